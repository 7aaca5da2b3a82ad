"""Prefill on one host, decode on another, over links of given rates: are the tokens those of one host, and how much of
a transfer does a client wait for?

    python benchmarks/transfer.py links [--model DIR] [--requests 1000] [--rates 100,1000] [--streams 8]
                                    [--json host_links.json]

Two network namespaces are the hosts (own /dev/shm and host name), joined by a pair of interfaces that pass --rates
megabits per second each way (tc tbf). Every request is also asked of one worker on one host before. handoff: what a
client waits between the prompt's end and the decode worker's first step. transfer: what the KV of a request takes at
the rate of the link. exposed: handoff as a share of it (a handoff has also messages and the end of the decode worker's
step, so that it is never 0). Needs Linux, iproute2, and user namespaces.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from common import report
from servers import metric

from diptych.serving.link.engine_options import BUNDLED_MODEL

CLI = (sys.executable, "-c", "from diptych.cli.main import main; main()")
NEAR, FAR, PORT, HTTP = "10.78.0.1", "10.78.0.2", 7000, 8000
ADDRESS = f"http://{NEAR}:{HTTP}"
FAR_HOST = 'hostname far; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")
PROMPT_TOKENS, ANSWER_TOKENS = 300, 16


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def make_hosts() -> None:
    """This namespace is the near host."""
    for command in (
        "mount -t tmpfs tmpfs /run", "ip link set lo up", "ip netns add far",
        "ip link add near type veth peer name far netns far", f"ip addr add {NEAR}/24 dev near",
        "ip link set near up", f"ip -n far addr add {FAR}/24 dev far", "ip -n far link set far up",
        "ip -n far link set lo up",
    ):  # fmt: skip
        run(command)


def shape(megabits: float) -> None:
    """What the link passes from now on."""
    for prefix, device in (("", "near"), ("ip netns exec far ", "far")):
        run(f"{prefix}tc qdisc replace dev {device} root tbf rate {megabits:g}mbit burst 64kb latency 100ms")


@contextmanager
def processes(*commands: tuple[str, ...]) -> Iterator[None]:
    """A fleet that is ready; ends with the block."""
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


def wait_for_workers(count: int) -> None:
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        try:
            if metric("diptych:worker_up", ADDRESS) >= count:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{count} workers were not ready within 120 s")


def ask(number: int) -> tuple[list[int], float]:
    """The tokens of an answer, and the milliseconds of its handoff."""
    prompt = [1000 + (number * 7919 + at * 31) % 1500 for at in range(PROMPT_TOKENS)]
    body = {
        "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "return_latency": True,
    }  # fmt: skip
    request = Request(f"{ADDRESS}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["token_ids"], answer["usage"]["latency"]["handoff_ms"]


def ask_all(count: int, streams: int) -> list[tuple[list[int], float]]:
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(ask, range(count)))


def inside(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Within the near host."""
    make_hosts()
    serve = (*CLI, "serve", "--host", NEAR, "--port", str(HTTP))
    with processes((*serve, "--model", asked.model)):
        wait_for_workers(1)
        expected = [tokens for tokens, _ in ask_all(asked.requests, asked.streams)]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        key = Path(directory) / "key"
        key.write_bytes(os.urandom(32).hex().encode())
        key.chmod(0o600)
        for megabits in (float(text) for text in asked.rates.split(",")):
            shape(megabits)
            listen = ("--both", "0", "--listen-workers", f"{NEAR}:{PORT}", "--key-file", str(key))
            worker = (*CLI, "worker", "--join", f"{NEAR}:{PORT}", "--key-file", str(key), "--role")
            far = ("ip", "netns", "exec", "far", "unshare", "-mu", "sh", "-c", FAR_HOST, "far")
            with processes(
                (*serve, "--model", asked.model, *listen, "--disaggregate", "always"),
                (*worker, "prefill", "--host-name", "near"),
                (*far, *worker, "decode"),
            ):
                wait_for_workers(2)
                begun = time.monotonic()
                answers = ask_all(asked.requests, asked.streams)
                seconds = time.monotonic() - begun
                handoffs = metric("diptych:handoffs_total", ADDRESS)
                sent = metric("diptych:kv_transfer_bytes_total", ADDRESS)
            transfer_ms = 8 * sent / max(1.0, handoffs) / megabits / 1000
            pauses = sorted(pause for _, pause in answers)
            rows.append(
                {"megabits": megabits, "requests": len(answers), "handoffs": handoffs,
                 "wrong": sum(tokens != right for (tokens, _), right in zip(answers, expected, strict=True)),
                 "requests_per_s": len(answers) / seconds, "kv_kib": sent / max(1.0, handoffs) / 1024,
                 "transfer_ms": transfer_ms, "handoff_p50_ms": statistics.median(pauses),
                 "handoff_p99_ms": pauses[int(0.99 * len(pauses))],
                 "exposed": statistics.median(pauses) / transfer_ms}
            )  # fmt: skip
            print(rows[-1], file=sys.stderr)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rates", default="100,1000", help="megabits per second, with commas")
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def main(asked: argparse.Namespace) -> None:
    if asked.inside:
        report("hosts over links", inside(asked), asked.json)
        return
    if missing := [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]:
        sys.exit(f"{missing[0]} is not installed")
    sys.exit(subprocess.run([*UNSHARE, sys.executable, *sys.argv, "--inside"]).returncode)
