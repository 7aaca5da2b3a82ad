"""What batches cost: memory, other requests beside them, idle time that they use.

    python benchmarks/batches.py memory [--lines 100000]              resident memory while a file of --lines lines runs
    python benchmarks/batches.py beside MODEL [--seconds 40]          other requests beside a batch; idle time used
    (each with [--json FILE])

memory: the real store, runner and rows in a process of their own; lines are answered at once, without a
model. beside: a server with MODEL. Other requests come one after another, with pauses; their time to first token and
gaps, alone and while a batch runs, in turns, and the lines per second of the batch in the pauses, as a share of those
of the batch alone.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from common import report

from diptych.cli.batch_client import BatchClient
from diptych.diagnosis.adapters.http_get import Site
from diptych.report.statistics import percentile
from diptych.serving.batches.batch_records import BatchLimits, BatchTerms
from diptych.serving.batches.batch_runner import LineReply
from diptych.serving.batches.batch_service import BatchOptions, BatchService, LineHost

ENDPOINT = "/v1/completions"
REPLY = LineReply(200, b'{"choices":[{"text":"' + b"x" * 400 + b'"}]}', "req")
BATCH_TOKENS = 48
PAUSE_S = 1.2


def write_input(path: Path, num_lines: int) -> None:
    with path.open("w") as file:
        for number in range(num_lines):
            body = {"prompt": f"line {number} " + "word " * 40, "max_tokens": 16}
            row = {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(row) + "\n")


def resident_mb() -> float:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("VmRSS"):
            return int(text.split()[1]) / 1000
    return 0.0


async def answer(path: str, body: bytes, tenant: str) -> LineReply:
    await asyncio.sleep(0)
    return REPLY


async def serve_folder(folder: Path, source: Path | None, num_lines: int) -> None:
    """The process that is killed: goes on with what is open in the folder; prints its memory, then the files."""
    service = BatchService(BatchOptions(folder, BatchLimits(max_file_bytes=10**10, max_lines=num_lines)))
    service.connect(LineHost(answer, lambda: 0, lambda: ("m",), (ENDPOINT,)))
    service.start()
    if source is not None:
        upload = await service.begin_upload()
        with source.open("rb") as file:
            while chunk := file.read(2**20):
                await upload.write(chunk)
        stored = await upload.keep("", "in.jsonl", None)
        upload.drop()
        await service.create(BatchTerms(stored.id, ENDPOINT, "24h", 86400), "")
    print("ready", flush=True)
    most, begun = 0.0, time.monotonic()
    while True:
        [batch] = await service.batches("", None, 1)
        most = max(most, resident_mb())
        if not batch.is_open:
            break
        await asyncio.sleep(0.05)
    files = [str(service.store.path(name)) for name in (batch.output_file, batch.error_file)]
    print(
        json.dumps({"resident_mb": most, "seconds": time.monotonic() - begun, "status": batch.status, "files": files})
    )


def child(folder: Path, source: Path | None, num_lines: int) -> "subprocess.Popen[str]":
    words = [sys.executable, __file__, "serve-folder", str(folder), str(source or ""), str(num_lines)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(process.communicate()[0].splitlines()[-1])
    return found


def check_each_once(found: dict[str, Any], num_lines: int) -> int:
    """How many lines have no row, or several."""
    seen: Counter[str] = Counter()
    for name in found["files"]:
        if Path(name).exists():
            with Path(name).open() as file:
                seen.update(json.loads(text)["custom_id"] for text in file)
    return sum(seen[f"id-{number}"] != 1 for number in range(num_lines)) + max(0, len(seen) - num_lines)


def memory(num_lines: int) -> list[dict[str, Any]]:
    rows = []
    for count in (num_lines // 100, num_lines // 10, num_lines):
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "in.jsonl"
            write_input(source, count)
            found = finish(child(Path(place) / "batches", source, count))
            row = {"lines": count, "resident_mb": found["resident_mb"], "seconds": found["seconds"]}
            rows.append({**row, "lines_per_s": count / found["seconds"], "wrong": check_each_once(found, count)})
    return rows


class Others:
    """Requests that come one after another, each stream read to its end. seed: of their prompts, which nobody has asked
    before."""

    def __init__(self, url: str, seconds: float, seed: int) -> None:
        self.url, self.ttfts, self.gaps = url, list[float](), list[float]()
        self.busy_s = 0.0
        chance, end = random.Random(seed), time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.monotonic()
            self._stream(chance)
            self.busy_s += time.monotonic() - begun
            time.sleep(chance.expovariate(1 / PAUSE_S))

    def _stream(self, chance: random.Random) -> None:
        prompt = [chance.randrange(100, 500) for _ in range(200)]
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json"}
        begun = last = time.monotonic()
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        is_first = True
        with urllib.request.urlopen(request, timeout=600) as reply:
            for text in reply:
                if text.startswith(b"data: {"):
                    now = time.monotonic()
                    (self.ttfts if is_first else self.gaps).append(now - (begun if is_first else last))
                    is_first, last = False, now


def figures(what: str, others: list[Others]) -> dict[str, Any]:
    """The figures of all requests of these runs."""
    ttfts = sorted(seconds for run in others for seconds in run.ttfts)
    gaps = sorted(seconds for run in others for seconds in run.gaps)
    return {
        "what": what,
        "requests": len(ttfts),
        **{f"ttft_p{share}_ms": round(1000 * percentile(ttfts, share), 1) for share in (50, 90, 99)},
        **{f"gap_p{share}_ms": round(1000 * percentile(gaps, share), 1) for share in (50, 99)},
    }


def beside(model: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    from servers import PORT, PROGRAM, URL, Server, metric

    alone, both, idle, rates = [], [], [], []
    with tempfile.TemporaryDirectory() as place:
        words = [PROGRAM, "serve", "--model", model, "--port", str(PORT), "--batch-dir", f"{place}/batches"]
        with Server(words, ready="/ready"):
            source = Path(place) / "in.jsonl"
            with source.open("w") as file:
                for number in range(20_000):
                    body = {"prompt": [7 + number % 400] * 64, "max_tokens": BATCH_TOKENS, "ignore_eos": True}
                    row = {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body}
                    file.write(json.dumps(row) + "\n")
            client = BatchClient(Site.of(URL))
            name = "diptych:batch_lines_total"
            Others(URL, 10.0, 0)  # warm
            for number in range(1, rounds + 1):
                alone.append(Others(URL, seconds, number))
                batch = client.create(client.upload(source), ENDPOINT, "30d")
                while client.batch(batch["id"])["status"] == "validating":
                    time.sleep(0.2)
                time.sleep(5.0)
                begun, before = time.monotonic(), metric(name)
                time.sleep(seconds / 2)
                full = (metric(name) - before) / (time.monotonic() - begun)
                begun, before = time.monotonic(), metric(name)
                found: list[Others] = []
                thread = threading.Thread(
                    target=lambda runs=found, seed=100 + number: runs.append(Others(URL, seconds, seed))
                )
                thread.start()
                thread.join()
                lasted = time.monotonic() - begun
                rates.append((full, (metric(name) - before) / lasted))
                idle.append(1 - found[0].busy_s / lasted)
                both += found
                client.cancel(batch["id"])
                time.sleep(2.0)
    used = [rate / full / free for (full, rate), free in zip(rates, idle, strict=True)]
    return [
        figures("others alone", alone),
        {
            **figures("beside a batch", both),
            "lines/s alone": round(statistics.median(full for full, _ in rates), 1),
            "lines/s": round(statistics.median(rate for _, rate in rates), 1),
            "idle": round(statistics.median(idle), 3),
            "idle used": round(statistics.median(used), 3),
        },
    ]


def main() -> None:
    if sys.argv[1:2] == ["serve-folder"]:
        folder, source, num_lines = sys.argv[2:5]
        asyncio.run(serve_folder(Path(folder), Path(source) if source else None, int(num_lines)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("memory", "beside"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lines", type=int)
    parser.add_argument("--seconds", type=float, default=40.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the record")
    asked = parser.parse_args()
    if asked.part == "memory":
        rows = memory(asked.lines or 100_000)
    else:
        if asked.model is None:
            parser.error("beside needs a MODEL")
        rows = beside(asked.model, asked.seconds, asked.rounds)
    report(f"batches {asked.part}", rows, asked.json)


if __name__ == "__main__":
    main()
