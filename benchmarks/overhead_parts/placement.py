"""What placing a request costs, and what letting one in in the admission queue costs.

    python benchmarks/overhead.py placement [--json placement.json]

placement: 64 workers (32 prefill and 32 decode; 64 of both roles; 8 hosts of 4 + 4) whose caches hold 100,000 blocks in
all, prompts of 256 blocks of which a random part is known, 16 streams on each worker that decodes: the time of
CostRouter.route with all that it does (match, price, pair, pick, remember), of the messages of one request's life, and
of taking in KV events of 16 blocks.
admission queue: 10,000 requests of 200 tenants wait; the time of one arrival, of one dispatch, of one removal.
Times are the thread's CPU time, so that other programs count only by the caches they take.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from common import report

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.admission.admission_queue import SERVICE_CLASSES, AdmissionQueue, QueuedRequest
from diptych.control.engine.reports import LoadReport
from diptych.control.request import RequestOptions, Submission
from diptych.control.router.cost_router import CostRouter
from diptych.control.router.routing import RoutingConfig, RoutingRequest
from diptych.control.router.topology import LinkCosts, Role, WorkerInfo
from diptych.control.slo import NS_PER_MS, NS_PER_S

WORKERS, BLOCKS, PROMPT_BLOCKS, BLOCK_SIZE, STREAMS = 64, 100_000, 256, 32, 16


def fleet(kind: str) -> list[WorkerInfo]:
    """64 workers: halves of one host, all alike, or eight hosts."""
    workers = []
    for number in range(WORKERS):
        role: Role = "both" if kind == "64 both" else ("prefill" if number % 2 == 0 else "decode")
        host = number // 8 if kind == "32P + 32D, 8 hosts" else 0
        domain = None if kind == "64 both" else host
        workers.append(WorkerInfo(number, role, 10_000, BLOCK_SIZE, host=f"host{host}", memory_domain=domain))
    return workers


def placements(kind: str, count: int = 3000) -> list[dict[str, Any]]:
    """Microseconds of one decision and of all that follows it."""
    rng = random.Random(1)
    router = CostRouter(RoutingConfig(links=LinkCosts(bytes_per_token=131_072)))
    chains = [[rng.randbytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(BLOCKS // PROMPT_BLOCKS)]
    for info in fleet(kind):
        router.set_up(info)
    for number, chain in enumerate(chains):
        assert router.on_kv_events(number % WORKERS, number // WORKERS + 1, stored=chain)
    for worker in range(WORKERS):
        prices = [rng.uniform(0.9, 1.1) * price for price in (1e4, 0.3, 5e6, 1e5, 50.0)]
        load = LoadReport(
            0, rng.randrange(10**8), 10_000, rng.randrange(9000), *prices, output_tokens=900, tpot_ns=50 * NS_PER_MS
        )
        router.on_load(worker, load)
    decided, followed, heard, words = [], [], [], set()
    for number in range(count):
        chain = rng.choice(chains)[: rng.randrange(PROMPT_BLOCKS)]
        prompt = (*chain, *(rng.randbytes(16) for _ in range(PROMPT_BLOCKS - len(chain))))
        request = RoutingRequest(Submission(str(number), PROMPT_BLOCKS * BLOCK_SIZE, 512, prompt))
        now = number * NS_PER_MS
        begun = time.thread_time()
        route = router.route(request, now)
        decided.append(time.thread_time() - begun)
        assert route is not None
        words.add(route.reason)
        begun = time.thread_time()
        for worker in {route.prefill, route.decode}:
            router.on_queued(str(number), worker)
            router.on_admitted(str(number), worker, route.num_cached_tokens)
        router.on_first_token(str(number))
        if number >= STREAMS * WORKERS // 2:
            router.on_ended(str(number - STREAMS * WORKERS // 2))
        followed.append(time.thread_time() - begun)
        worker = number % WORKERS
        sequence = len(chains[worker::WORKERS]) + number // WORKERS + 1
        begun = time.thread_time()
        assert router.on_kv_events(worker, sequence, stored=prompt[-16:])
        heard.append(time.thread_time() - begun)
    print(f"{kind}: {', '.join(sorted(words))}")
    return [
        row(f"routing, {kind}", decided),
        row(f"its messages, {kind}", followed),
        row(f"KV events of 16 blocks, {kind}", heard),
    ]


def admission(count: int = 10_000, tenants: int = 200) -> list[dict[str, Any]]:
    """Microseconds in the admission queue while ``count`` requests wait."""
    rng = random.Random(2)
    service_class = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S)
    made = AdmissionQueue(AdmissionConfig(service_class, service_class, service_class, max_queued=4 * count))
    entries = [
        QueuedRequest(
            Submission(
                str(number), rng.randrange(1, 8000), 100,
                options=RequestOptions(
                    tenant=f"key{rng.randrange(tenants)}", service_class=rng.choice(SERVICE_CLASSES),
                    deadline_ns=rng.choice((None, 3000 * NS_PER_S)),
                ),
            ),
            number,
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
        options = entry.submission.options
        made.on_service(options.tenant, 50, options.service_class)
        made.expired(number)

    dispatched = timed(step, range(len(made)))
    what = f"{count} wait"
    return [
        row(f"admission queue: an arrival, {what}", offered),
        row(f"admission queue: a removal, {what}", removed),
        row(f"admission queue: a dispatch with its service and expiry, {what}", dispatched),
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""


def main(options: argparse.Namespace) -> None:
    """All questions."""
    rows = []
    for kind in ("32P + 32D", "64 both", "32P + 32D, 8 hosts"):
        rows += placements(kind)
    report("placement", rows + admission(), options.json)
