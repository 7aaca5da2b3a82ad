"""Servers that are hurt on purpose: does ``diptych diagnose`` name the cause, and is the predicted gain true?

    python benchmarks/diagnosis.py [MODEL_DIR] [--cases sequence_limit,...] [--loads 5] [--healthy 20] [--vllm VENV]
                                   [--apply] [--doctors VENV] [--seconds 20] [--json FILE]

Each case starts a server with one thing wrong and sends it ``--loads`` loads of different rates (``diptych bench``; a
slow reader and conversations are made here). The objectives are FACTOR times what the same server takes when nothing is
wrong, measured first. A run counts as right when the first cause is the injected one; a healthy run when there is none.
With --doctors, published tools look at the same server (other_doctors.py). With --apply the first advice that has a
predicted gain and an option of ``diptych serve`` is applied: the same load runs again, and sign and size of the
measured gain are compared with the prediction. A slow link cannot be injected on one machine without privileges;
tests/diagnosis does it in the simulator.
"""

import argparse
import http.client
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import report
from other_doctors import OTHER_DOCTORS, other_findings
from other_doctors import is_right as doctor_is_right
from servers import PORT, PROGRAM, URL, Server, bench, diptych_server, vllm_server

from diptych.diagnosis.engine_settings import DIPTYCH
from diptych.serving.link.engine_options import BUNDLED_MODEL

FACTOR = 3.0  # objectives over the latencies of the healthy server
RATE_STEPS = (0.8, 0.9, 1.0, 1.1, 1.2)  # of a case's rate
MIXED = """
[workload]
classes = [
    {{ kind = "chat", share = 9, lengths = {{ prompt = {{ mean = 120 }}, output = {{ mean = {output} }} }} }},
    {{ kind = "document", share = 1, lengths = {{ prompt = {{ mean = {document} }}, output = {{ mean = 8 }} }} }},
]
"""


@dataclass(frozen=True)
class Load:
    """What a server gets: requests per second (times ``scale``) with these mean lengths; a document every tenth request
    where ``document`` is given; ``flood``: so many batch requests at once in the middle."""

    rate: float = 4.0
    prompt: int = 120
    output: int = 60
    document: int = 0
    flood: int = 0

    def run(self, seconds: float, scale: float, seed: int) -> None:
        """Send it."""
        rate = self.rate * scale
        count = max(20, round(rate * seconds))
        options = ["--rate", f"{rate:g}", "--num-requests", str(count), "--seed", str(seed)]
        with tempfile.TemporaryDirectory() as folder:
            if self.document:
                path = Path(folder) / "load.toml"
                path.write_text(MIXED.format(document=self.document, output=self.output))
                options += ["--workload", str(path)]
            else:
                options += ["--prompt-tokens", str(self.prompt), "--output-tokens", str(self.output)]
            flood = threading.Thread(target=self._flood, args=(seconds / 2, seed))
            flood.start()
            bench(URL, *options)
            flood.join()

    def _flood(self, after_s: float, seed: int) -> None:
        if self.flood:
            time.sleep(after_s)
            bench(
                URL, "--rate", "1000", "--num-requests", str(self.flood), "--prompt-tokens", "400", "--output-tokens",
                "40", "--extra", '{"service_class": "batch"}', "--seed", str(seed + 100),
            )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One thing that is wrong. options: of ``diptych serve`` (vllm: of vLLM; None: it is not injected there). beside:
    runs during the load. expected: causes that count as right, "" for none."""

    expected: tuple[str, ...]
    options: str = ""
    load: Load = field(default_factory=Load)
    vllm: str | None = None
    beside: Callable[[float], None] | None = None


def slow_reader(seconds: float) -> None:
    """Clients that ask for long answers with many alternatives and hardly read them."""
    body = json.dumps(
        {"prompt": [7] * 40, "max_tokens": 2000, "stream": True, "logprobs": 20, "ignore_eos": True, "temperature": 0}
    )
    open_connections = []
    for _ in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        open_connections.append(connection)
        connection.getresponse().read(100)
    time.sleep(seconds)
    for connection in open_connections:
        connection.close()


def conversations(first_token: Callable[[int, float], int]) -> Callable[[float], None]:
    """Sessions that resend a long beginning, whose first token is ``first_token(turn, share of the time that is
    over)``."""

    def run(seconds: float) -> None:
        begun, turn = time.monotonic(), 0
        while (over := (time.monotonic() - begun) / seconds) < 1:
            turn += 1
            prompt = [first_token(turn, over)] + [200 + at % 700 for at in range(1500)] + [300 + turn % 600]
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            body = json.dumps({"prompt": prompt, "max_tokens": 8})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            connection.getresponse().read()
            connection.close()

    return run


def always_another(turn: int, over: float) -> int:
    """A time stamp, say, at the beginning of the system prompt."""
    return 100 + turn % 800


def coming_back(turn: int, over: float) -> int:
    """After a start, everybody's conversation is new to the cache, until they come back."""
    return 100 + (turn % 800 if over < 0.54 else turn % 10)


def busy_cores(seconds: float) -> None:
    """Two processes that compute on every core."""
    others = [multiprocessing.Process(target=_spin, args=(seconds,)) for _ in range(2 * multiprocessing.cpu_count())]
    for other in others:
        other.start()
    for other in others:
        other.join()


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


CASES = {
    "healthy": Case((), vllm=""),
    "long prompts": Case(("prefill_queueing",), "--shape unified", Load(3, document=6000), vllm=""),
    "interference": Case(
        ("prefill_interference",), "--budget fixed --max-batched-tokens 4096 --max-num-seqs 64",
        Load(3, output=150, document=4000), vllm="--max-num-batched-tokens 4096",
    ),
    "KV too small": Case(("kv_cache_full",), "--kv-cache-memory 8MiB", Load(6, output=150)),
    "queue cap": Case(("sequence_limit",), "--max-num-seqs 2", Load(8, output=100), vllm="--max-num-seqs 2"),
    "slow client": Case(("slow_client",), load=Load(2), beside=slow_reader),
    "too few prefill workers": Case(
        ("too_few_prefill_workers",), "--prefill 1 --decode 2 --disaggregate always", Load(8, 2500, 4)
    ),
    "too few decode workers": Case(
        ("too_few_decode_workers", "kv_cache_full"),
        "--prefill 2 --decode 1 --disaggregate always --kv-cache-memory 8MiB", Load(6, 60, 200),
    ),
    "broken prefix": Case(("prefix_misses",), "--explain-misses on", Load(1), beside=conversations(always_another)),
    "cold cache": Case(("cold_cache", "prefix_misses"), load=Load(1), beside=conversations(coming_back)),
    "busy cores": Case(("oversubscribed_cores",), load=Load(4), vllm="", beside=busy_cores),
    "batch flood": Case(("batch_flood",), load=Load(4, flood=300), vllm=""),
    "capacity": Case(("capacity", "decode_batch"), load=Load(60, 600, 60), vllm=""),
}  # fmt: skip


def diagnosed(slo: str, window: float) -> dict[str, Any]:
    """What ``diptych diagnose --json`` says now, and how long it took."""
    begun = time.monotonic()
    command = [PROGRAM, "diagnose", URL, "--json", "--slo", slo, "--window", f"{window:g}"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {**found, "took_s": time.monotonic() - begun}


def observe(
    case: Case, seconds: float, scale: float, seed: int, slo: str, doctors: Path | None = None
) -> dict[str, Any]:
    """Run a load; diagnose in its last third."""
    beside = threading.Thread(target=case.beside or time.sleep, args=(seconds,))
    load = threading.Thread(target=case.load.run, args=(seconds, scale, seed))
    beside.start()
    load.start()
    time.sleep(2 * seconds / 3)
    found = diagnosed(slo, seconds / 4)
    found["others"] = other_findings(doctors, URL, seconds / 8) if doctors else {}
    load.join()
    beside.join()
    return found


def means(found: dict[str, Any]) -> tuple[float, float]:
    """Measured mean TTFT, and seconds per token after it."""
    return tuple(found["attribution"].get(name, {}).get("mean_s", 0.0) for name in ("ttft", "itl"))  # type: ignore[return-value]


def objectives(start: Callable[[str], Server], options: str, seconds: float) -> str:
    """FACTOR times the latencies of the healthy server, under half its load."""
    with start(options):
        found = observe(Case(()), seconds, 0.5, 1, "ttft=1000s,tpot=1000s")
    ttft_s, itl_s = means(found)
    return f"ttft={max(1.0, FACTOR * ttft_s * 1000):.0f}ms,tpot={max(1.0, FACTOR * itl_s * 1000):.0f}ms"


def applied(
    given: dict[str, Any], start: Callable[[str], Server], case: Case, arguments: Sequence[Any]
) -> dict[str, Any]:
    """The gain that was predicted for an advice, and what the same load shows with it."""
    seconds, scale, seed, slo, before = arguments
    with start(f"{case.options} {given['option']}"):
        after = observe(case, seconds, scale, seed, slo)
    predicted = given["gain"]["ttft_seconds"]
    measured = means(before)[0] - means(after)[0]
    return {
        "applied": given["option"],
        "predicted TTFT gain": predicted,
        "measured TTFT gain": measured,
        "sign right": (predicted > 0) == (measured > 0),
        "within 30 %": abs(predicted - measured) <= 0.3 * abs(measured),
    }


def runs(engine: str, name: str, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads of a case."""
    own = case.options if engine == "diptych" else case.vllm
    if own is None:
        return []

    def start(words: str) -> Server:
        if engine == "diptych":
            return diptych_server(options.model, *shlex.split(words))
        return vllm_server(options.vllm, "vllm", options.model, slots=16, slot_tokens=8192)

    slo = objectives(start, "", options.seconds)
    count = options.healthy if name == "healthy" else options.loads
    rows = []
    for number in range(count):
        scale = RATE_STEPS[number % len(RATE_STEPS)]
        with start(own):
            found = observe(case, options.seconds, scale, number + 1, slo, options.doctors)
        first = found["causes"][0]["cause"] if found["causes"] else ""
        is_right = first in case.expected if case.expected else not found["causes"]
        rows.append({"engine": engine, "case": name, "load": number + 1, "first cause": first, "right": is_right,
                     "requests": found["num_requests"], "took s": round(found["took_s"], 2)})  # fmt: skip
        for tool, finding in found["others"].items():
            rows[-1] |= {tool: finding, f"{tool} right": doctor_is_right(finding, case.expected)}
        advice = [given for cause in found["causes"] for given in cause["advice"] if _can_apply(given)]
        if options.apply and engine == "diptych" and advice:
            rows[-1] |= applied(advice[0], start, case, (options.seconds, scale, number + 1, slo, found))
        print(rows[-1], file=sys.stderr)
    return rows


def _can_apply(given: dict[str, Any]) -> bool:
    known = {setting.name for settings in DIPTYCH.values() for setting in settings}
    plain = given["option"].startswith("--") and "(" not in given["option"] and not given["option"].endswith("N")
    return given["gain"] is not None and plain and not given["takes_hardware"] and given["setting"] in known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment, to hurt it too")
    parser.add_argument("--doctors", type=Path, help="a virtual environment with vllm-doctor and inferpilot")
    parser.add_argument("--apply", action="store_true", help="apply the first advice, and measure")
    parser.add_argument("--json", help="write a record")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for engine in ("diptych", "vllm") if options.vllm else ("diptych",):
        for name in options.cases.split(","):
            rows += runs(engine, name, CASES[name], options)
    hurt = [row["right"] for row in rows if row["case"] != "healthy"]
    alarms = sum(not row["right"] for row in rows if row["case"] == "healthy")
    share = statistics.fmean(hurt) if hurt else 0.0
    for tool in OTHER_DOCTORS if options.doctors else ():
        others = [row[f"{tool} right"] for row in rows if row["case"] != "healthy"]
        false = sum(not row[f"{tool} right"] for row in rows if row["case"] == "healthy")
        print(f"{tool}: right in {statistics.fmean(others or [0]):.0%}; {false} alarms on healthy runs")
    print(f"first cause right in {share:.0%} of {len(hurt)} runs; {alarms} alarms on healthy runs")
    report("diagnosis", rows, options.json, right=share, alarms=alarms)


if __name__ == "__main__":
    main()
