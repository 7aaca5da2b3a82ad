"""What placing a request costs, and what letting one in in the admission queue costs.

    python benchmarks/placement.py [--json placement.json]

placement: 64 workers (32 prefill and 32 decode; 64 of both roles; 8 hosts of 4 + 4) whose caches hold 100,000 blocks in
all, prompts of 256 blocks of which a random part is known, 16 streams on each worker that decodes: the time of
Placer.place with all that it does (match, score, pair, pick, remember), of the messages of one request's life, and of
taking in a publication of 16 blocks.
edge: 10,000 requests of 200 tenants wait; the time of one arrival, of one dispatch, of one removal.
Times are the thread's CPU time, so that other programs count only by the caches they take.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from common import report

from diptych.control.admission.admission_queue import (
    SERVICE_CLASSES,
    AdmissionConfig,
    AdmissionQueue,
    QueuedRequest,
    ServiceClassConfig,
)
from diptych.control.engine.reports import LoadReport
from diptych.control.router.cost_router import PlacementConfig, PlacementRequest, Placer
from diptych.control.router.topology import LinkCosts, Role, WorkerInfo
from diptych.control.slo import NS_PER_MS, NS_PER_S

WORKERS, BLOCKS, PROMPT_BLOCKS, BLOCK_SIZE, STREAMS = 64, 100_000, 256, 32, 16


def fleet(kind: str) -> list[WorkerInfo]:
    """64 workers: halves of one host, all alike, or eight hosts."""
    workers = []
    for number in range(WORKERS):
        role: Role = "both" if kind == "64 both" else ("prefill" if number % 2 == 0 else "decode")
        host = number // 8 if kind == "32P + 32D, 8 hosts" else 0
        pool = None if kind == "64 both" else host
        workers.append(WorkerInfo(number, role, 10_000, BLOCK_SIZE, host=f"host{host}", pool=pool))
    return workers


def placements(kind: str, count: int = 3000) -> list[dict[str, Any]]:
    """Microseconds of one decision and of all that follows it."""
    rng = random.Random(1)
    placer = Placer(fleet(kind), PlacementConfig(links=LinkCosts(bytes_per_token=131_072)))
    chains = [[rng.randbytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(BLOCKS // PROMPT_BLOCKS)]
    for worker in range(WORKERS):
        placer.set_up(worker, True)
    for number, chain in enumerate(chains):
        assert placer.on_blocks(number % WORKERS, number // WORKERS + 1, stored=chain)
    for worker in range(WORKERS):
        prices = [rng.uniform(0.9, 1.1) * price for price in (1e4, 0.3, 5e6, 1e5, 50.0)]
        load = LoadReport(
            0, rng.randrange(10**8), 10_000, rng.randrange(9000), *prices, output_tokens=900, tpot_ns=50 * NS_PER_MS
        )
        placer.on_report(worker, load)
    decided, followed, heard, words = [], [], [], set()
    for number in range(count):
        chain = rng.choice(chains)[: rng.randrange(PROMPT_BLOCKS)]
        prompt = (*chain, *(rng.randbytes(16) for _ in range(PROMPT_BLOCKS - len(chain))))
        request = PlacementRequest(str(number), PROMPT_BLOCKS * BLOCK_SIZE, 512, prompt)
        now = number * NS_PER_MS
        begun = time.thread_time()
        placement = placer.place(request, now)
        decided.append(time.thread_time() - begun)
        assert placement is not None
        words.add(placement.reason)
        begun = time.thread_time()
        for worker in {placement.prefill, placement.decode}:
            placer.on_queued(str(number), worker)
            placer.on_admitted(str(number), worker, placement.num_cached_tokens)
        placer.on_first_token(str(number))
        if number >= STREAMS * WORKERS // 2:
            placer.on_ended(str(number - STREAMS * WORKERS // 2), rng.randrange(1, 512))
        followed.append(time.thread_time() - begun)
        worker = number % WORKERS
        sequence = len(chains[worker::WORKERS]) + number // WORKERS + 1
        begun = time.thread_time()
        assert placer.on_blocks(worker, sequence, stored=prompt[-16:])
        heard.append(time.thread_time() - begun)
    print(f"{kind}: {', '.join(sorted(words))}")
    return [
        row(f"placement, {kind}", decided),
        row(f"its messages, {kind}", followed),
        row(f"a publication of 16 blocks, {kind}", heard),
    ]


def edge(count: int = 10_000, tenants: int = 200) -> list[dict[str, Any]]:
    """Microseconds in the admission queue while ``count`` requests wait."""
    rng = random.Random(2)
    service_class = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S)
    made = AdmissionQueue(AdmissionConfig(service_class, service_class, service_class, max_queued=4 * count))
    entries = [
        QueuedRequest(
            str(number), rng.randrange(1, 8000), 100, number, f"key{rng.randrange(tenants)}", 
            rng.choice(SERVICE_CLASSES),
            deadline_ns=rng.choice((None, 3000 * NS_PER_S)),
        )
        for number in range(4 * count)
    ]  # fmt: skip
    for entry in entries[:count]:
        assert made.offer(entry, 0) is None
    offered = timed(lambda number: made.offer(entries[count + number], 0), range(count))
    removed = timed(lambda number: made.remove(str(number)), rng.sample(range(2 * count), count))

    def step(number: int) -> None:
        name = made.next(number, 100)
        assert name is not None
        entry = entries[int(name)]
        made.on_service(entry.tenant, 0, 50, entry.service_class)
        made.expired(number)

    dispatched = timed(step, range(len(made)))
    what = f"{count} wait"
    return [
        row(f"edge: an arrival, {what}", offered),
        row(f"edge: a removal, {what}", removed),
        row(f"edge: a dispatch with its service and expiry, {what}", dispatched),
    ]


def timed(call: Callable[[int], object], numbers: Sequence[int]) -> list[float]:
    """Seconds of each call."""
    times = []
    for number in numbers:
        begun = time.thread_time()
        call(number)
        times.append(time.thread_time() - begun)
    return times


def row(what: str, times: list[float]) -> dict[str, Any]:
    """One line of the table."""
    ordered = sorted(times)
    return {"what": what, "median us": 1e6 * median(times), "p99 us": 1e6 * ordered[int(0.99 * len(ordered))]}


def main() -> None:
    """All questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for kind in ("32P + 32D", "64 both", "32P + 32D, 8 hosts"):
        rows += placements(kind)
    report("placement", rows + edge(), options.json)


if __name__ == "__main__":
    main()
