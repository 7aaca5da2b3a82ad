"""How long a worker needs to change its role while it decodes, and whether its streams lose anything by it.

    python benchmarks/flips.py MODEL_DIR [--streams 8] [--flips 20] [--prompt-tokens 1000] [--transfer auto]
                               [--json flips.json]

One worker that prefills and two that decode. The streams run without a pause between them, each with an answer that an
undisturbed server has given before. Again and again the decode worker with more of them becomes a prefill worker, and
then a decode worker again. ``first step ms``: from the moment at which the front end decided to the end of the first
step of that worker that decodes nothing. ``longest pause``: the longest gap between two tokens of an answer.
Every answer must be, token for token, the undisturbed one.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import Case, Outcome, ServerProcess, client, undisturbed
from common import report

SETTLE_S = 1.0  # between two flips
PATIENCE_S = 30.0


@dataclass
class Flips:
    """What was measured of each flip."""

    first_step_ms: list[float] = field(default_factory=list)
    num_streams: list[int] = field(default_factory=list)


def newest(server: ServerProcess) -> str:
    """The number of the timeline's newest record."""
    header = server.call("/timeline/records?limit=1")["header"]
    return str(header["next_sequence"] - 1)


async def records_until_new_role(server: ServerProcess, worker: int, since: str) -> list[dict[str, Any]]:
    """The worker's records since ``since`` until it has made a step in which it decodes nothing, after its change."""
    found: list[dict[str, Any]] = []
    for _ in range(int(PATIENCE_S / 0.05)):
        page = await asyncio.to_thread(server.call, f"/timeline/records?since={since}&workers={worker}")
        found, since = found + page["records"], page["next"]
        changed = next((at for at, record in enumerate(found) if record["kind"] == "worker"), None)
        if changed is not None and any(is_free(record) for record in found[changed:]):
            return found[changed:]
        await asyncio.sleep(0.05)
    raise RuntimeError(f"worker {worker} still decodes after {PATIENCE_S:g} s")


def is_free(record: dict[str, Any]) -> bool:
    """Whether it is a step with nothing but prompts."""
    return record["kind"] == "step" and not record["num_decodes"]


async def flip(server: ServerProcess, flips: Flips) -> None:
    """Turn the decode worker with more streams into a prefill worker, and back."""
    workers = (await asyncio.to_thread(server.call, "/ui/state"))["workers"]
    chosen = max((worker for worker in workers if worker["role"] == "decode"), key=lambda worker: worker["decoding"])
    number, since = chosen["worker"], await asyncio.to_thread(newest, server)
    await asyncio.to_thread(server.call, f"/admin/workers/{number}", {"role": "prefill"})
    records = await records_until_new_role(server, number, since)
    first = next(record for record in records if is_free(record))
    flips.first_step_ms.append((first["end_ns"] - records[0]["time_ns"]) / 1e6)
    flips.num_streams.append(chosen["decoding"])
    await asyncio.sleep(SETTLE_S)
    await asyncio.to_thread(server.call, f"/admin/workers/{number}", {"role": "decode"})
    await asyncio.sleep(SETTLE_S)


async def measure(server: ServerProcess, cases: list[Case], options: argparse.Namespace) -> tuple[Flips, Outcome]:
    """Flip while the streams run."""
    flips, outcome, over = Flips(), Outcome(), asyncio.Event()
    streams = [
        asyncio.create_task(client(server.port, cases, random.Random(number), over, outcome, hangs_up=False))
        for number in range(options.streams)
    ]
    await asyncio.sleep(2 * SETTLE_S)
    for number in range(options.flips):
        await flip(server, flips)
        print(f"\r{number + 1}/{options.flips} flips, {outcome.num_complete} answers", end="", file=sys.stderr)
    print(file=sys.stderr)
    over.set()
    await asyncio.wait_for(asyncio.gather(*streams), 300)
    return flips, outcome


def main() -> None:
    """Measure, print, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--json")
    options = parser.parse_args()
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(1)
    cases = []
    for number in range(options.streams):
        body = {"prompt": [rng.randrange(3, vocab) for _ in range(options.prompt_tokens)], "ignore_eos": True}
        body |= {"max_tokens": options.output_tokens, "return_token_ids": True}
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        cases.append(Case(body))
    with ServerProcess(["--model", str(options.model)]) as quiet:
        asyncio.run(undisturbed(quiet.port, cases))
        quiet.close()
    arguments = ["--model", str(options.model), "--prefill", "1", "--decode", "2", "--transfer", options.transfer]
    with ServerProcess([*arguments, "--disaggregate", "always"]) as server:
        flips, outcome = asyncio.run(measure(server, cases, options))
        metrics = server.metrics()
        server.close()
    row = {
        "transfer": options.transfer,
        "flips": len(flips.first_step_ms),
        "streams there p50": statistics.median(flips.num_streams),
        "first step ms p50": round(statistics.median(flips.first_step_ms), 1),
        "first step ms max": round(max(flips.first_step_ms), 1),
        "moved": int(metrics["diptych:streams_moved_total"]),
        "answers": outcome.num_complete,
        "wrong": outcome.num_wrong + outcome.num_refused,
        "longest pause ms p50": round(1000 * statistics.median(outcome.pauses or [0.0])),
        "longest pause ms max": round(1000 * max(outcome.pauses, default=0.0)),
    }
    for line in outcome.wrong[:5]:
        print(line, file=sys.stderr)
    report(f"flips {options.model.name}", [row], options.json)
    sys.exit(bool(row["wrong"]))


if __name__ == "__main__":
    main()
