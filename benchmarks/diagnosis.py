"""Servers that are hurt on purpose: does ``diptych diagnose`` name the cause, and is the predicted gain true?

    python benchmarks/diagnosis.py [MODEL_DIR] [--engines diptych,vllm] [--vllm VENV] [--cases queue-cap,...]
                                   [--loads 5] [--healthy 20] [--apply] [--doctors VENV] [--seconds 20] [--json FILE]

Each case starts a server with one thing wrong and sends it ``--loads`` loads of different rates (``diptych bench``; a
slow reader and conversations are made here). What is too much for one machine is nothing to another, so rates, floods
and caches are given in what the server itself was measured to do alone: seconds per prompt token and per token of an
answer. The objectives are FACTORS times the latencies of the same requests on a healthy server that they do not fill.
A run counts as right when the first cause is the injected one; a healthy run when there is none. With --doctors,
published tools look at the same server (other_doctors.py). With --apply the first advice is applied that is an option
of ``diptych serve`` and predicted to gain more than its interval: the same load runs again, and what the requests gain
that came before the diagnosis is compared with the prediction, sign and size. A slow link cannot be injected on one
machine without privileges; tests/diagnosis does it in the simulator. Speculation is off: answers of random weights
repeat themselves, and would take no time. Use a model whose steps take some milliseconds (``make_random_model.py
llama-20m``): of a smaller one the clients are the load, of a larger one a window holds too few prompts.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import report
from other_doctors import OTHER_DOCTORS, other_findings
from other_doctors import is_right as doctor_is_right
from servers import PORT, PROGRAM, URL, Server, bench, diptych_server, vllm_server

from diptych.diagnosis.engine_settings import DIPTYCH
from diptych.serving.link.engine_options import BUNDLED_MODEL

FACTORS = (3.0, 3.0)  # objectives of TTFT and TPOT over the latencies of the healthy server
BENCH_STARTS_S = 1.0  # from the start of ``diptych bench`` to its first request
RATE_STEPS = (0.8, 0.9, 1.0, 1.1, 1.2)  # of a case's rate
WINDOW_DOCUMENTS = 5  # expected in the window of a diagnosis, where documents are what hurts
MIXED = """
[workload]
classes = [
    {{ kind = "chat", share = 9, lengths = {{ prompt = {{ mean = 120 }}, output = {{ mean = {output} }} }} }},
    {{ kind = "document", share = 1, lengths = {{ prompt = {{ mean = {document} }}, output = {{ mean = 8 }} }} }},
]
"""


@dataclass(frozen=True)
class Speed:
    """What the healthy server does alone: seconds per prompt token, and per token of an answer. documents: seconds of
    a whole prompt, by length, where it is so long that its tokens take more."""

    prompt_s: float
    token_s: float
    documents: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """A request that was answered, in seconds: when it was sent, to its first token, after it, and per token then."""

    arrival_s: float
    ttft_s: float
    decode_s: float
    tpot_s: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Sent":
        """The request of a record of ``diptych bench``."""
        return cls(row["arrival_s"], row["ttft_s"], row["e2e_s"] - row["ttft_s"], row["tpot_s"] or 0.0)


@dataclass(frozen=True)
class Load:
    """What a server gets, with these mean lengths: prompts that fill ``use`` of its time, or this number of ``streams``
    at once (whichever is given), times a scale. A document every tenth request where ``document`` is given; flood_s:
    seconds of work in a job's requests, which come at once after a quarter of the time and do not say that they are of
    class batch (those that do give way)."""

    use: float = 0.0
    streams: float = 0.0
    prompt: int = 120
    output: int = 60
    document: int = 0
    flood_s: float = 0.0

    def rate(self, speed: Speed, scale: float) -> float:
        """Requests per second."""
        prompt_s = self.prompt * speed.prompt_s
        if self.document:
            prompt_s = 0.9 * prompt_s + 0.1 * speed.documents[self.document]
        by_use = self.use / prompt_s
        by_streams = self.streams / (self.output * speed.token_s)
        return scale * (by_use or by_streams)

    def seconds(self, least: float, speed: Speed, scale: float) -> float:
        """How long to send it: a window is a quarter of that, and holds some documents."""
        if not self.document:
            return least
        return max(least, 4 * WINDOW_DOCUMENTS / (0.1 * self.rate(speed, scale)))

    def run(self, seconds: float, speed: Speed, scale: float, seed: int) -> dict[int, Sent]:
        """Send it; the requests that were answered, by number."""
        rate = self.rate(speed, scale)
        count = max(20, round(rate * seconds))
        options = ["--rate", f"{rate:g}", "--num-requests", str(count), "--seed", str(seed)]
        with tempfile.TemporaryDirectory() as folder:
            if self.document:
                path = Path(folder) / "load.toml"
                path.write_text(MIXED.format(document=self.document, output=self.output))
                options += ["--workload", str(path)]
            else:
                options += ["--prompt-tokens", str(self.prompt), "--output-tokens", str(self.output)]
            flood = threading.Thread(target=self._flood, args=(seconds / 4, speed, seed))
            flood.start()
            records = Path(folder) / "records.jsonl"
            bench(URL, *options, "--records", str(records))
            flood.join()
            rows = map(json.loads, records.read_text().splitlines())
            return {row["number"]: Sent.of(row) for row in rows if row["outcome"] == "completed"}

    def _flood(self, after_s: float, speed: Speed, seed: int) -> None:
        if self.flood_s:
            time.sleep(after_s)
            count = round(self.flood_s / (400 * speed.prompt_s))
            bench(
                URL, "--rate", "1000", "--num-requests", str(count), "--prompt-tokens", "400", "--output-tokens",
                "40", "--seed", str(seed + 100),
            )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One thing that is wrong. expected: causes that count as right, none for a healthy server. options: of ``diptych
    serve`` (vllm: of vLLM; None: it is not injected there), in which ``{kv}`` stands for the bytes of ``kv_tokens``
    tokens. beside: runs during the load. factors: see FACTORS. lasts: times as long, where the diagnosis itself takes
    longer to start, or a load that ended would look like another."""

    expected: tuple[str, ...]
    options: str = ""
    load: Load = field(default_factory=lambda: Load(streams=1))
    vllm: str | None = None
    beside: Callable[[float], None] | None = None
    kv_tokens: int = 0
    factors: tuple[float, float] = FACTORS
    lasts: float = 1.0


def slow_reader(seconds: float) -> None:
    """Clients that ask for answers with many alternatives and hardly read them."""
    body = json.dumps(
        {"prompt": [7] * 40, "max_tokens": 300, "stream": True, "logprobs": 20, "ignore_eos": True, "temperature": 0}
    )
    open_connections = []
    for _ in range(3):
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sock.connect(("127.0.0.1", PORT))
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            open_connections.append(connection)
        time.sleep(seconds / 5)
    time.sleep(2 * seconds / 5)
    for connection in open_connections:
        connection.close()


def conversations(first_token: Callable[[int, float], int], length: int = 1500) -> Callable[[float], None]:
    """Sessions that resend a beginning of ``length`` tokens, whose first is ``first_token(turn, share of the time
    that is over)``."""

    def run(seconds: float) -> None:
        begun, turn = time.monotonic(), 0
        while (over := (time.monotonic() - begun) / seconds) < 1:
            turn += 1
            prompt = [first_token(turn, over)] + [200 + at % 700 for at in range(length)] + [300 + turn % 600]
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
    os.setsid()  # Linux divides cores between sessions first: not at the cost of the clients, who are of this one
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


CASES = {
    "healthy": Case((), load=Load(streams=1.5), vllm=""),
    "long-prompts": Case(
        ("prefill_queueing",), "--shape unified", Load(use=0.6, document=6000),
        vllm="--max-num-batched-tokens 8192", factors=(3.0, 30.0),
    ),
    "interference": Case(
        ("prefill_interference",), "--budget fixed --max-batched-tokens 4096 --max-num-seqs 64",
        Load(use=0.25, output=150, document=4000), vllm="--max-num-batched-tokens 4096", factors=(30.0, 2.0),
    ),
    "kv-too-small": Case(
        ("kv_cache_full",), "--kv-cache-memory {kv}", Load(streams=8, output=150), kv_tokens=640,
        vllm="--num-gpu-blocks-override 8 --max-model-len 896",
    ),
    "queue-cap": Case(
        ("sequence_limit",), "--max-num-seqs 2", Load(streams=1.5, output=100), vllm="--max-num-seqs 2"
    ),
    "slow-client": Case(("slow_client",), load=Load(streams=1), beside=slow_reader, factors=(10.0, 10.0)),
    "too-few-prefill-workers": Case(
        ("too_few_prefill_workers",), "--prefill 1 --decode 1 --disaggregate always",
        Load(use=1.4, prompt=1200, output=16),
    ),
    "too-few-decode-workers": Case(
        ("too_few_decode_workers", "kv_cache_full"),
        "--prefill 1 --decode 1 --disaggregate always --kv-cache-memory {kv}",
        Load(streams=8, prompt=60, output=200), kv_tokens=800,
    ),
    "broken-prefix": Case(
        ("prefix_misses",), "--explain-misses on", Load(streams=0.3), beside=conversations(always_another)
    ),
    "cold-cache": Case(
        ("cold_cache", "prefix_misses"), load=Load(streams=0.3), beside=conversations(coming_back, 4000),
        factors=(3.0, 10.0),
    ),
    "busy-cores": Case(("oversubscribed_cores",), load=Load(streams=1.5), vllm="", beside=busy_cores, lasts=2.5),
    "batch-flood": Case(("batch_flood",), load=Load(streams=1.5, flood_s=12), vllm=""),
    "capacity": Case(("capacity", "decode_batch"), load=Load(use=2, prompt=600), vllm="", lasts=1.5),
}  # fmt: skip


def measured_speed(documents: Iterable[int]) -> Speed:
    """Speed of the server, alone: the best of three prompts and answers, and of three documents of each length."""
    prompts, answers = [], []
    for number in range(3):
        prompts.append(_seconds(2000, 1, 100 + number) / 2000)
        answers.append((_seconds(16, 65, 200 + number) - _seconds(16, 1, 300 + number)) / 64)
    long = {length: min(_seconds(length, 1, 400 + number) for number in range(3)) for length in sorted(set(documents))}
    return Speed(min(prompts), min(answers), long)


def _seconds(num_prompt_tokens: int, max_tokens: int, first_token: int) -> float:
    prompt = [first_token, *(200 + at % 700 for at in range(num_prompt_tokens - 1))]
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1})
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    begun = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().read()
    connection.close()
    return time.monotonic() - begun


def kv_bytes_per_token(model: Path) -> int:
    """Bytes per token of 16-bit keys and values."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 4 * int(config["num_hidden_layers"]) * int(heads) * int(size)


def diagnosed(slo: str, window: float) -> dict[str, Any]:
    """What ``diptych diagnose --json`` says now, and how long it took."""
    begun = time.monotonic()
    command = [PROGRAM, "diagnose", URL, "--json", "--slo", slo, "--window", f"{window:g}"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {**found, "took_s": time.monotonic() - begun}


def observe(
    case: Case, seconds: float, speed: Speed, scale: float, seed: int, slo: str, doctors: Path | None = None
) -> dict[str, Any]:
    """Run a load; diagnose after two thirds of it. "sent": the requests."""
    whole_s = seconds * case.lasts
    beside = threading.Thread(target=case.beside or time.sleep, args=(whole_s,))
    sent: dict[int, Sent] = {}
    load = threading.Thread(target=lambda: sent.update(case.load.run(whole_s, speed, scale, seed)))
    beside.start()
    load.start()
    time.sleep(2 * seconds / 3)
    found = diagnosed(slo, seconds / 4)
    found["others"] = other_findings(doctors, URL, seconds / 8) if doctors else {}
    load.join()
    beside.join()
    return found | {"sent": sent}


def means(found: dict[str, Any]) -> tuple[float, float]:
    """Measured mean TTFT, and seconds per token after it."""
    return tuple(found["attribution"].get(name, {}).get("mean_s", 0.0) for name in ("ttft", "itl"))


def healthy_latencies(load: Load, seconds: float, speed: Speed) -> tuple[float, float]:
    """Mean TTFT and seconds per token of its requests on the healthy server that is up: half a stream of them, or,
    where documents are what hurts, as many as beside the documents."""
    streams = load.rate(speed, 1.0) * load.output * speed.token_s if load.document else 0.5
    light = Case((), load=Load(streams=streams, prompt=load.prompt, output=load.output))
    return means(observe(light, seconds, speed, 1.0, 1, "ttft=1000s,tpot=1000s"))


def lengths_of(load: Load) -> tuple[int, int, int]:
    """Loads of the same lengths have the same healthy latencies."""
    return load.prompt, load.output, load.document


def objectives(latencies: tuple[float, float], factors: tuple[float, float]) -> tuple[float, float]:
    """Objectives of TTFT and TPOT, in milliseconds."""
    ttft_ms, tpot_ms = (max(1.0, factor * value * 1000) for value, factor in zip(latencies, factors, strict=True))
    return round(ttft_ms, 1), round(tpot_ms, 1)


def as_option(objective: tuple[float, float]) -> str:
    """As ``--slo`` takes them."""
    return f"ttft={objective[0]:g}ms,tpot={objective[1]:g}ms"


def missed_by_clients(found: dict[str, Any], objective: tuple[float, float], seconds: float) -> float:
    """Share of the requests that missed an objective as their client saw it: of those that ended in about the window of
    the diagnosis, in a load that took ``seconds``."""
    ttft_s, tpot_s = (value / 1000 for value in objective)
    begin_s = 2 * seconds / 3 - BENCH_STARTS_S
    missed = [
        sent.ttft_s > ttft_s or sent.tpot_s > tpot_s
        for sent in found["sent"].values()
        if begin_s <= sent.arrival_s + sent.ttft_s + sent.decode_s <= begin_s + found["took_s"]
    ]
    return statistics.fmean(missed or [0.0])


def applied(
    given: dict[str, Any], start: Callable[[str], Server], case: Case, arguments: Sequence[Any]
) -> dict[str, Any]:
    """The gain that was predicted for an advice, of the latency that it changes most (to the first token, or after it),
    and what the same requests gain with it: the mean of those that came before the diagnosis."""
    seconds, speed, scale, seed, slo, found = arguments
    with start(f"{case.options} {given['option']}"):
        after = observe(case, seconds, speed, scale, seed, slo)["sent"]
    gain, before = given["gain"], found["sent"]
    part = _most_changed(gain)
    end_s = 2 * seconds / 3 - BENCH_STARTS_S
    shared = [number for number in before.keys() & after.keys() if before[number].arrival_s <= end_s]
    saved = [getattr(before[number], f"{part}_s") - getattr(after[number], f"{part}_s") for number in shared]
    predicted, measured = gain[f"{part}_seconds"], statistics.fmean(saved or [0.0])
    return {
        "applied": given["option"],
        "latency": part,
        "requests of the gain": len(saved),
        "predicted gain": predicted,
        "interval": gain[f"{part}_interval"],
        "measured gain": measured,
        "sign right": (predicted > 0) == (measured > 0),
        "within 30 %": abs(predicted - measured) <= 0.3 * abs(measured),
    }


def runs(engine: str, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads of all cases. A server of our own is started for each load; vLLM, which needs a minute for it, for each
    case."""
    rows: list[dict[str, Any]] = []

    def start(words: str) -> Server:
        if engine == "diptych":
            return diptych_server(options.model, "--speculation", "off", *shlex.split(words))
        own = ["--dtype", options.vllm_dtype, *shlex.split(words)]
        return vllm_server(options.vllm, "vllm", options.model, slots=32, slot_tokens=8192, options=own)

    cases = {name: CASES[name] for name in names if engine == "diptych" or CASES[name].vllm is not None}
    healthy: dict[tuple[int, int, int], tuple[float, float]] = {}
    with start(""):
        speed = measured_speed(case.load.document for case in cases.values() if case.load.document)
        print(
            f"{engine}: {1 / speed.prompt_s:.0f} prompt tokens/s, {speed.token_s * 1000:.2f} ms a token",
            file=sys.stderr,
        )
        for case in cases.values():
            lengths = lengths_of(case.load)
            healthy[lengths] = healthy.get(lengths) or healthy_latencies(case.load, options.seconds / 2, speed)
    for name, case in cases.items():
        words = case.options if engine == "diptych" else case.vllm or ""
        words = words.format(kv=case.kv_tokens * kv_bytes_per_token(options.model))
        case = replace(case, options=words)
        with start(words) if engine == "vllm" else nullcontext():
            for number in range(options.healthy if name == "healthy" else options.loads):
                with nullcontext() if engine == "vllm" else start(words):
                    scale = RATE_STEPS[number % len(RATE_STEPS)]
                    seconds = case.load.seconds(options.seconds, speed, scale)
                    objective = objectives(healthy[lengths_of(case.load)], case.factors)
                    slo = as_option(objective)
                    found = observe(case, seconds, speed, scale, number + 1, slo, options.doctors)
                rows.append(row_of(engine, name, case, number, found))
                rows[-1]["missed by clients"] = round(missed_by_clients(found, objective, seconds), 2)
                advice = [given for cause in found["causes"] for given in cause["advice"] if _helps(given)]
                if options.apply and engine == "diptych" and advice:
                    arguments = (seconds, speed, scale, number + 1, slo, found)
                    rows[-1] |= applied(advice[0], start, case, arguments)
                print(rows[-1], file=sys.stderr)
    return rows


def row_of(engine: str, name: str, case: Case, number: int, found: dict[str, Any]) -> dict[str, Any]:
    """What a run has shown."""
    causes = {cause["cause"]: round(cause["share_of_misses"], 2) for cause in found["causes"]}
    first = next(iter(causes), "")
    row = {
        "engine": engine, "case": name, "load": number + 1, "first cause": first,
        "right": first in case.expected if case.expected else not causes, "causes": causes,
        "requests": found["num_requests"], "missed": round(found["miss_share"] or 0.0, 2),
        "took s": round(found["took_s"], 2),
    }  # fmt: skip
    for tool, finding in found["others"].items():
        row |= {tool: finding, f"{tool} right": doctor_is_right(finding, case.expected)}
    return row


def _helps(given: dict[str, Any]) -> bool:
    """An option of ``diptych serve`` that is predicted to gain more than the error of the prediction."""
    known = {setting.name for settings in DIPTYCH.values() for setting in settings}
    plain = given["option"].startswith("--") and "(" not in given["option"] and not given["option"].endswith("N")
    gain = given["gain"]
    if gain is None or not plain or given["takes_hardware"] or given["setting"] not in known:
        return False
    part = _most_changed(gain)
    return bool(gain[f"{part}_interval"][0] > 0)


def _most_changed(gain: dict[str, Any]) -> str:
    """The latency that a change gains or costs most of: to the first token, or after it."""
    return max(("ttft", "decode"), key=lambda name: abs(gain[f"{name}_seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engines", default="diptych", help="diptych, vllm or both with a comma")
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 where the processor computes no bfloat16")
    parser.add_argument("--doctors", type=Path, help="a virtual environment with vllm-doctor and inferpilot")
    parser.add_argument("--apply", action="store_true", help="apply the first advice, and measure")
    parser.add_argument("--json", help="write a record")
    options = parser.parse_args()
    if "vllm" in options.engines.split(",") and not options.vllm:
        parser.error("--engines vllm needs --vllm VENV, its virtual environment")
    rows: list[dict[str, Any]] = []
    for engine in options.engines.split(","):
        rows += runs(engine, options.cases.split(","), options)
    gains = [row for row in rows if "applied" in row]
    for name in ("sign right", "within 30 %") if gains else ():
        print(f"predicted gains: {name} in {statistics.fmean(row[name] for row in gains):.0%} of {len(gains)}")
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
