"""One prefill worker and one decode worker, one core each: long prompts, the cost of a handoff, cancel storms.

    python benchmarks/serving.py handoff MODEL_DIR [--transfer shared_memory|tcp] [--repetitions 5] [--json FILE]
                                        [--only interference,handoff,storm,control]

interference  ``diptych bench --interference``: 4 streams decode; a 4096-token prompt is prefilled meanwhile. Gaps
              between tokens during / before; then the same with nothing but the streams.
handoff       4096-token prompts one after another on the idle server: end of a prefill to the decode worker's taking
              over (``handoff_ms`` of the server's own account), and to the second token; bytes that travelled.
storm         50 prompts of 8000 tokens are sent and cancelled one after another, then a short one: its time to first
              token, over that on the idle server.
control       CPU time of the front-end process per request of 64 tokens, several at once, HTTP and text included.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from chaos import ServerProcess
from common import names_of, report
from servers import PROGRAM
from serving_parts.interference import measure, row, without_gaps

from diptych.bench.clock import now_ns
from diptych.bench.session import BenchConfig, Session, drive, open_session
from diptych.bench.target import TargetConfig
from diptych.bench.token_stream import TokenStream
from diptych.workload.spec import RequestSpec

LONG, SHORT, STORM, STORM_TOKENS = 4096, 32, 50, 8000


def records(url: str, *options: str) -> list[dict[str, Any]]:
    """``diptych bench`` in a closed loop: a record per request, with the server's own account of its time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        command = [PROGRAM, "bench", "--url", url, "--warmup", "0"]
        command += ["--extra", '{"return_latency": true}', "--records", str(path), "--gaps", *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return [json.loads(line) for line in path.read_text().splitlines()]


def interference(server: ServerProcess, repetitions: int) -> dict[str, Any]:
    """The row of this question."""
    run = measure(server.url, repetitions)
    return {**row("1P1D", [run]), "run": without_gaps(run)}


def handoff(server: ServerProcess, repetitions: int) -> dict[str, Any]:
    """The row of this question; the first prompt does not count."""
    before, count = transferred(server), repetitions + 1
    found = records(
        server.url, "--concurrency", "1", "--num-requests", str(count), "--prompt-tokens", str(LONG),
        "--output-tokens", "8",
    )[1:]  # fmt: skip
    times = [one["server_ms"]["handoff_ms"] for one in found]
    return {
        "handoff ms, median": round(statistics.median(times), 2),
        "min": round(min(times), 2),
        "max": round(max(times), 2),
        "first to second token ms": round(statistics.median(one["gaps_ms"][0] for one in found), 1),
        "bytes a prompt": round((transferred(server) - before) / count),
    }


def transferred(server: ServerProcess) -> float:
    """KV bytes that have travelled so far."""
    return sum(value for name, value in server.metrics().items() if name == "diptych:kv_transfer_bytes_total")


async def storm_once(session: Session, number: int) -> tuple[float, float]:
    """(time to first token on the idle server, after the storm), milliseconds."""
    maker = session.target.prompt_maker(f"{session.salt}/storm/{number}")

    async def short(name: str) -> float:
        stream = await session.target.ask(maker.fresh(name, SHORT), 4)
        return (stream.stamps[0] - stream.sent_ns) / 1e6

    idle = await short("idle")
    spec = RequestSpec(arrival_ns=0, prompt_tokens=STORM_TOKENS, output_tokens=4)
    for index in range(STORM):
        stream = TokenStream(now_ns())
        session.target.send(session.target.body(maker.fresh(f"long/{index}", STORM_TOKENS), spec), stream)
        await asyncio.sleep(0.05)
        stream.cancel(now_ns(), "the client went away")
    return idle, await short("after")


def storm(server: ServerProcess, repetitions: int) -> dict[str, Any]:
    """The row of this question."""

    async def run() -> list[tuple[float, float]]:
        config = BenchConfig(target=TargetConfig(url=server.url), warm_up=2)
        async with open_session(config) as session:
            return [await storm_once(session, number) for number in range(repetitions)]

    pairs = drive(run())
    return {
        "idle TTFT ms": round(statistics.median(idle for idle, _ in pairs), 1),
        "after TTFT ms": round(statistics.median(after for _, after in pairs), 1),
        "after / idle, median": round(statistics.median(after / idle for idle, after in pairs), 2),
        "each": [round(after / idle, 2) for idle, after in pairs],
    }


def control(server: ServerProcess, repetitions: int) -> dict[str, Any]:
    """The row of this question: ``repetitions`` times 160 requests, after 8 that do not count."""
    tick = os.sysconf("SC_CLK_TCK")

    def cpu_ms() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return 1e3 * (int(fields[11]) + int(fields[12])) / tick

    def ask(count: int) -> float:
        before = cpu_ms()
        lengths = ("--prompt-tokens", "64", "--output-tokens", "64")
        found = records(server.url, "--concurrency", "8", "--num-requests", str(count), *lengths)
        assert all(one["outcome"] == "completed" for one in found), "a request failed"
        return (cpu_ms() - before) / count

    ask(8)
    costs = [ask(160) for _ in range(repetitions)]
    each = [round(cost, 2) for cost in costs]
    return {"front-end CPU ms a request": round(statistics.median(costs), 2), "each": each}


QUESTIONS = {"interference": interference, "handoff": handoff, "storm": storm, "control": control}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", type=names_of(QUESTIONS), default=list(QUESTIONS))


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    arguments = ["--model", str(options.model), "--prefill", "1", "--decode", "1", "--transfer", options.transfer]
    rows: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    server = ServerProcess([*arguments, "--disaggregate", "always"])
    with server:
        for question in options.only:
            found = QUESTIONS[question](server, options.repetitions)
            extra |= {question: found.pop("run")} if "run" in found else {}
            rows.append({"question": question, **found})
            print(rows[-1], flush=True)
        server.close()
    report(f"disaggregation {options.model.name} {options.transfer}", rows, options.json, **extra)
