"""KV between two workers: how fast, how late, and how much of it a prefill hides.

    python benchmarks/transfer.py workers [--json transfer.json] [--only throughput,commit,link] [--prefill-s 4]

Sender and receiver are two processes with a core each; the KV is that of 4096 tokens of Qwen2.5-0.5B (50 MB: 24 layers,
2 heads of 64, bf16, blocks of 32 tokens, scattered at the receiver).

throughput: everything queued at once, until the receiver has it. "CPU" is processor time of both sides: on a machine
with other work it says more than the seconds.
commit: a handoff within one pool (shared memory: nothing but the commit moves), from commit() to the receiver's event.
link: two network namespaces joined by a link of limited bandwidth (ip netns, tc; root), such that the KV takes 80 % of
the prefill. The prefill is matrix multiplications of that length in chunks of 24 layers that take the same time, on the
sender's core; a chunk is sent when it is computed, or layer by layer while it is. "exposed" is the time from the end of
the last chunk until the receiver has everything; its share is of the time that the link needs for all. "CPU" is here
that of send() and of the connector's thread, and of the receiver.
"""

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import HERE, names_of, report

from diptych.control.engine.worker_core import TransferBroken
from diptych.runtime.attention.layout import allocate_cpu
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer import CONNECTORS, make_connector
from diptych.runtime.transfer.connector import (
    Committed,
    ConnectorEvent,
    KVConnector,
    Sent,
    TransferOptions,
)
from diptych.runtime.transfer.kv_format import KVFormat

FORMAT = KVFormat("benchmark", 24, 2, 64, "bfloat16", 32, "cpu")
TOKENS, NUM_BLOCKS = 4096, 160
TABLE = TOKENS // FORMAT.block_size
KV_BYTES = TABLE * FORMAT.bytes_per_block
SECRET = b"a secret of this benchmark alone"
QUESTIONS = ("throughput", "commit", "link")
MARK = "@"  # begins the lines that are meant for us: NIXL prints too
SPACE, NEAR, FAR = "diptych-kv", "dkv0", "dkv1"
NEAR_ADDRESS, FAR_ADDRESS = "10.213.7.1", "10.213.7.2"


def connector(name: str, listen: str, codec: str = "none") -> tuple[KVConnector, list[LayerCache]]:
    """A connector with a cache of noise."""
    torch.set_num_threads(1)
    layers = [
        allocate_cpu(NUM_BLOCKS, FORMAT.num_kv_heads, FORMAT.block_size, FORMAT.head_dim, torch.bfloat16)
        for _ in range(FORMAT.num_layers)
    ]
    for cache in (cache for pair in layers for cache in pair):
        cache.normal_()
    return make_connector(name, layers, FORMAT, TransferOptions(SECRET, listen, codec=codec)), layers


def wait_for(side: KVConnector, kind: type[ConnectorEvent]) -> ConnectorEvent:
    """The next event of a kind. Raises RuntimeError when the attempt fails."""
    while True:
        select.select([side], [], [], 60)
        for event in side.poll():
            if isinstance(event, kind):
                return event
            if isinstance(event, TransferBroken):
                raise RuntimeError(event.message)


def receive(name: str, listen: str, codec: str) -> None:
    """The other process: a line of JSON for each attempt, answered when it is expected and when it is here."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    side, _ = connector(name, listen, codec)
    rng = random.Random(1)
    say(side.address)
    for line in sys.stdin:
        attempt = json.loads(line)
        if attempt["borrowed"]:
            side.expect(attempt["id"], (), TOKENS, 0)
        else:
            side.expect(attempt["id"], rng.sample(range(NUM_BLOCKS), TABLE), 0, TOKENS)
        say(None)
        cpu = time.process_time()
        done = wait_for(side, Committed)
        now = time.monotonic_ns()
        assert isinstance(done, Committed)
        say({"ns": now, "bytes": done.num_bytes, "cpu": time.process_time() - cpu})
    side.close()


def say(what: Any) -> None:
    """A line for the first process."""
    print(MARK + json.dumps(what), flush=True)


class Receiver:
    """The other process, as this one sees it."""

    def __init__(self, name: str, listen: str, codec: str = "none", prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, str(HERE / "transfer.py"), "workers", "--receive", name, listen, codec]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self.hear()

    def expect(self, attempt_id: str, borrowed: bool = False) -> None:
        """Have it expect an attempt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": attempt_id, "borrowed": borrowed}) + "\n")
        self._process.stdin.flush()
        self.hear()

    def hear(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError("the receiver has ended")

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def throughput(directory: str, repetitions: int) -> Iterator[dict[str, Any]]:
    """Each transport, 50 MB at a time."""
    cases = [("tcp", "tcp://127.0.0.1:0", "none"), ("tcp", f"unix://{directory}/kv", "none")]
    cases += [("tcp", "tcp://127.0.0.1:0", "int8"), ("tcp", "tcp://127.0.0.1:0", "int4")]
    if CONNECTORS["nixl"].is_installed:
        cases.append(("nixl", "tcp://127.0.0.1:0", "none"))
    for name, listen, codec in cases:
        side, _ = connector(name, "tcp://127.0.0.1:0", codec)
        seconds, ours, theirs, size = [], [], [], 0
        with Receiver(name, listen, codec) as receiver:
            for number in range(repetitions + 2):
                attempt = f"{number}"
                receiver.expect(attempt)
                cpu, begun = time.process_time(), time.monotonic_ns()
                side.open(attempt, receiver.address, 0)
                side.send(attempt, 0, TOKENS, range(TABLE))
                side.commit(attempt, b"")
                said = receiver.hear()
                wait_for(side, Sent)
                seconds.append((said["ns"] - begun) / 1e9)
                ours.append(time.process_time() - cpu)
                theirs.append(said["cpu"])
                size = said["bytes"]
        side.close()
        via = f"{name} over a unix socket" if listen.startswith("unix") else name
        middle, best = statistics.median(seconds[2:]), min(seconds[2:])
        yield {
            "what": f"throughput, {via}, {codec}", "wire MB": size / 1e6, "ms": 1e3 * middle, "best ms": 1e3 * best,
            "KV GB/s": KV_BYTES / middle / 1e9, "best KV GB/s": KV_BYTES / best / 1e9,
            "sender CPU ms": 1e3 * min(ours[2:]), "receiver CPU ms": 1e3 * min(theirs[2:]),
        }  # fmt: skip


def commits(directory: str, repetitions: int) -> Iterator[dict[str, Any]]:
    """A handoff within one pool."""
    side, _ = connector("shared_memory", f"unix://{directory}/p")
    delays, acknowledged = [], []
    with Receiver("shared_memory", f"unix://{directory}/d") as receiver:
        for number in range(repetitions):
            attempt = f"{number}"
            receiver.expect(attempt, borrowed=True)
            side.open(attempt, receiver.address, TOKENS)
            time.sleep(0.005)
            side.commit(attempt, bytes(24))
            said = receiver.hear()
            sent = wait_for(side, Sent)
            assert isinstance(sent, Sent) and not said["bytes"]
            delays.append((said["ns"] - sent.commit_ns) / 1e6)
            acknowledged.append((sent.acknowledged_ns - sent.commit_ns) / 1e6)
    side.close()
    ordered = sorted(delays)
    yield {
        "what": "commit within one pool", "wire MB": 0.0, "ms": statistics.median(delays), "best ms": ordered[0],
        "p99 ms": ordered[int(0.99 * len(ordered))], "acknowledged ms": statistics.median(acknowledged),
    }  # fmt: skip


@contextlib.contextmanager
def shaped_link(bytes_per_s: float) -> Iterator[None]:
    """A namespace behind a pair of interfaces of this rate each way. Raises CalledProcessError without rights."""
    rate = f"{int(8 * bytes_per_s)}bit"
    shape = f"root tbf rate {rate} burst 32kb latency 50ms"
    inside = f"ip netns exec {SPACE}"
    try:
        for command in (
            f"ip netns add {SPACE}", f"ip link add {NEAR} type veth peer name {FAR}",
            f"ip link set {FAR} netns {SPACE}", f"ip addr add {NEAR_ADDRESS}/30 dev {NEAR}", f"ip link set {NEAR} up",
            f"{inside} ip addr add {FAR_ADDRESS}/30 dev {FAR}", f"{inside} ip link set {FAR} up",
            f"tc qdisc add dev {NEAR} {shape}", f"{inside} tc qdisc add dev {FAR} {shape}",
        ):  # fmt: skip
            subprocess.run(command.split(), check=True, capture_output=True)
        yield
    finally:
        for command in (f"ip netns del {SPACE}", f"ip link del {NEAR}"):
            subprocess.run(command.split(), capture_output=True)


def compute(end_ns: int, a: torch.Tensor, b: torch.Tensor) -> None:
    """Matrix multiplications until then, as a layer of a chunk of prefill would."""
    while time.monotonic_ns() < end_ns:
        a @ b


def prefill(side: KVConnector, attempt: str, chunk: int, prefill_s: float, is_by_layer: bool) -> float:
    """As long as that, in chunks, each sent when it is computed or layer by layer. CPU seconds of send()."""
    a, b = torch.ones(64, 896, dtype=torch.bfloat16), torch.ones(896, 4864, dtype=torch.bfloat16)
    num_layers, table = FORMAT.num_layers, range(TABLE)
    layer_ns, cpu_ns, begun = 1e9 * prefill_s * chunk / TOKENS / num_layers, 0, time.monotonic_ns()
    for number, start in enumerate(range(0, TOKENS, chunk)):
        for layer in range(1, num_layers + 1):
            compute(begun + int(layer_ns * (num_layers * number + layer)), a, b)
            if is_by_layer or layer == num_layers:
                before = time.thread_time_ns()
                side.send(attempt, start, chunk, table, layer)
                cpu_ns += time.thread_time_ns() - before
    return cpu_ns / 1e9


def link(prefill_s: float) -> Iterator[dict[str, Any]]:
    """Over a link that carries the KV in 80 % of the prefill: unstreamed, chunk by chunk, and layer by layer."""
    rate = KV_BYTES / (0.8 * prefill_s)
    ways = [(chunk, is_by_layer) for chunk in (TOKENS, 1024, 512, 256, 128) for is_by_layer in (False, True)]
    with shaped_link(rate), Receiver(
        "tcp", f"tcp://{FAR_ADDRESS}:0", prefix=("ip", "netns", "exec", SPACE)
    ) as receiver:  # fmt: skip
        for codec in ("none", "int8", "auto"):
            side, _ = connector("tcp", f"tcp://{NEAR_ADDRESS}:0", codec)
            (thread,) = (each for each in threading.enumerate() if each.name == "kv-transfer")
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            for chunk, is_by_layer in ways:
                attempt = f"{codec}, {chunk}, {is_by_layer}"
                receiver.expect(attempt)
                cpu, begun = time.clock_gettime(clock), time.monotonic_ns()
                side.open(attempt, receiver.address, 0)
                send_s = prefill(side, attempt, chunk, prefill_s, is_by_layer)
                ended = time.monotonic_ns()
                side.commit(attempt, b"")
                said = receiver.hear()
                wait_for(side, Sent)
                exposed, whole = (said["ns"] - ended) / 1e9, said["bytes"] / rate
                way = ", layer by layer" if is_by_layer else ""
                yield {
                    "what": f"link of {rate / 1e6:.1f} MB/s, {codec}, chunks of {chunk}{way}",
                    "wire MB": said["bytes"] / 1e6, "prefill s": (ended - begun) / 1e9, "transfer s": whole,
                    "exposed ms": 1e3 * exposed, "exposed share": exposed / whole,
                    "sender CPU ms": 1e3 * (send_s + time.clock_gettime(clock) - cpu),
                    "receiver CPU ms": 1e3 * said["cpu"],
                }  # fmt: skip
            side.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--only", type=names_of(QUESTIONS), default=QUESTIONS)
    parser.add_argument("--prefill-s", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--receive", nargs=3, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.receive:
        receive(*options.receive)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wanted, load = options.only, os.getloadavg()
    rows: list[dict[str, Any]] = []
    skipped = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o700)
        if "throughput" in wanted:
            rows += throughput(directory, options.repetitions)
        if "commit" in wanted:
            rows += commits(directory, 10 * options.repetitions)
    if "link" in wanted:
        if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
            skipped.append("link: needs ip, tc and root")
        else:
            try:
                rows += link(options.prefill_s)
            except subprocess.CalledProcessError as error:
                skipped.append(f"link: {' '.join(error.cmd)}: {error.stderr.decode().strip()}")
    for line in skipped:
        print(f"skipped: {line}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rows = [{column: row.get(column) for column in columns} for row in rows]
    report("KV transfer", rows, options.json, load_before=load[0], load_after=os.getloadavg()[0], skipped=skipped)
