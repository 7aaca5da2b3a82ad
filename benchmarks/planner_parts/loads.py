"""How near a fleet that plans itself comes to the best configuration, in the simulator.

    python benchmarks/planner.py loads [--loads shift,code] [--seconds 900] [--json planner.json]

Four workers that take about as long as an H100 takes for an 8B model; for the sinusoid a 1B model, whose peak four of
them can just serve (five terms, see Fleet). Objectives: the first token within a second, 15 ms a token: steps that keep
it hold few prompt tokens, so that roles matter. Rates are such that the best static configuration differs. Each load is
served by every static configuration (all both, and each split), and by a fleet that the planner changes, which begins
with all both.
``oracle``: of the static configurations, the best in each 30 s of arrivals, as if it had always been that one: an upper
bound that changes for nothing. Shares are of requests that met TTFT and TPOT. ``changes``: how many times the planner
changed the fleet. Loads:

    sinusoid        1 to 24 requests/s and back, 8000 prompt and 1000 answer tokens
    conversation    Azure's conversation trace, its gaps scaled to the fleet
    code            long prompts, short answers (medians of Azure's code trace: 1500 and 13), 55 requests/s
    mooncake        Mooncake's conversations with their shared prefixes
    shift           code for one half of the time, then chat (300 and 500), 75 requests/s
    constant        20 requests/s (2000 and 200) with 10 % noise for an hour: the planner should leave it alone
    outage          the sinusoid; for five minutes there is no observation of the workers

Of the last two, only the changes count, and no static configuration is measured.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common import names_of, report

from diptych.advisor.planned_fleet import PlannedFleet
from diptych.advisor.twin import Twin
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CacheConfig, EngineConfig, prefill_scheduler, shape_preset
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_events import TwinSettings
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec
from diptych.workload.traces import Trace, load_trace

NUM_WORKERS = 4
SLO = Slo(1000 * NS_PER_MS, 15 * NS_PER_MS)
CLUSTER = ClusterConfig()
SPLITS = ((0, 0, 4), (1, 3, 0), (2, 2, 0), (3, 1, 0))  # prefill, decode, both
LOADS = ("sinusoid", "conversation", "code", "mooncake", "shift", "constant", "outage")
SPAN_NS = 30 * NS_PER_S  # of the oracle

Rate = Callable[[float], float]  # requests/s at a second
Lengths = Callable[[random.Random, float], tuple[int, int]]


@dataclass(frozen=True)
class Fleet:
    """Workers of one model."""

    cost: StepTermsCost
    kv_bytes_per_token: int
    num_blocks: int

    @property
    def engine(self) -> EngineConfig:
        """The settings of each worker."""
        return EngineConfig(CacheConfig(self.num_blocks, 16), shape_preset("chunked"), SLO, 32_768)


LLAMA_8B = Fleet(StepTermsCost(6e6, 2.4e4, 0.35, 1.5e4, 5.5), 131_072, 25_000)  # 40,000 prompt tokens/s
LLAMA_1B = Fleet(StepTermsCost(3e6, 5e3, 0.1, 1e4, 10.0), 32_768, 125_000)  # 180,000


@dataclass(frozen=True)
class Load:
    """What is sent, and when the planner is blind."""

    requests: list[RequestSpec]
    fleet: Fleet = LLAMA_8B
    outages: tuple[tuple[int, int], ...] = field(default=())


def generated(seconds: float, rate: Rate, lengths: Lengths, seed: int = 0) -> list[RequestSpec]:
    """Poisson arrivals of a changing rate (Lewis and Shedler 1979, thinning)."""
    rng = random.Random(seed)
    most = max(rate(second) for second in range(int(seconds) + 1))
    requests, now = [], 0.0
    while (now := now + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(now):
            prompt, answer = lengths(rng, now)
            requests.append(RequestSpec(arrival_ns=int(now * NS_PER_S), prompt_tokens=prompt, output_tokens=answer))
    return requests


def spread(rng: random.Random, median: int) -> int:
    """Log-normal about the median."""
    return max(1, min(16_000, int(rng.lognormvariate(math.log(median), 0.5))))


def sinusoid(seconds: float) -> list[RequestSpec]:
    """One period of 1 to 24 requests/s."""
    return generated(
        seconds, lambda now: 12.5 - 11.5 * math.cos(2 * math.pi * now / seconds), lambda rng, now: (8000, 1000)
    )


def scaled(trace: Trace, seconds: float, rate: float) -> list[RequestSpec]:
    """The first arrivals of a trace, at another mean rate (for less than ``seconds`` where it is shorter)."""
    count = min(len(trace), int(seconds * rate))
    window = trace.rows(0, count)
    factor = count / rate * NS_PER_S / max(1, window.arrival_ns[count - 1])
    return [
        RequestSpec(
            arrival_ns=int(request.arrival_ns * factor),
            prompt_tokens=min(request.prompt_tokens, 30_000),
            output_tokens=min(request.output_tokens, 2000),
            hash_ids=request.hash_ids,
            hash_block_tokens=request.hash_block_tokens,
        )
        for request in window
    ]


def load_named(name: str, seconds: float) -> Load:
    """One of the loads of the module's docstring."""
    if name == "sinusoid":
        return Load(sinusoid(seconds), LLAMA_1B)
    if name == "outage":
        middle = int(seconds / 2 * NS_PER_S)
        return Load(sinusoid(seconds), LLAMA_1B, ((middle - 150 * NS_PER_S, middle + 150 * NS_PER_S),))
    if name == "conversation":
        return Load(scaled(load_trace("azure-conv"), seconds, 65.0))
    if name == "mooncake":
        return Load(scaled(load_trace("mooncake-conversation"), seconds, 3.5))
    if name == "code":
        return Load(generated(seconds, lambda now: 55.0, lambda rng, now: (spread(rng, 1500), spread(rng, 13))))
    if name == "shift":
        return Load(
            generated(
                seconds,
                lambda now: 55.0 if now < seconds / 2 else 75.0,
                lambda rng, now: (
                    (spread(rng, 1500), spread(rng, 13)) if now < seconds / 2 else (spread(rng, 300), spread(rng, 500))
                ),
            )
        )
    noise = random.Random(1)
    factors = [1 + 0.1 * noise.uniform(-1, 1) for _ in range(int(seconds) // 10 + 1)]
    return Load(generated(seconds, lambda now: 20 * factors[int(now) // 10], lambda rng, now: (2000, 200)))


def scenario(load: Load, split: tuple[int, int, int]) -> Scenario:
    """The load on a fleet that begins so."""
    prefill, decode, both = split
    engine = load.fleet.engine
    pools = Pools(
        kv_bytes_per_token=load.fleet.kv_bytes_per_token,
        num_prefill=prefill,
        num_decode=decode,
        num_both=both,
        link="ib400",
        prefill=engine.with_(scheduler=prefill_scheduler(engine.scheduler, SLO)),  # as roles are given while serving
    )
    return Scenario(engine=engine, cost=load.fleet.cost, workload=load.requests, cluster=CLUSTER, pools=pools)


def met_by_span(table: RequestTable) -> dict[int, int]:
    """Requests that met their objectives, by the 30 s in which they arrived."""
    met: dict[int, int] = defaultdict(int)
    for row in range(len(table)):
        met[table.arrival_ns[row] // SPAN_NS] += table.slo_met[row] == 1
    return met


def measure(name: str, seconds: float) -> dict[str, Any]:
    """All configurations under one load."""
    load = load_named(name, seconds)
    count = len(load.requests)
    static, best = {}, defaultdict(int)
    for split in () if name in ("constant", "outage") else SPLITS:
        met = met_by_span(simulate(scenario(load, split)).requests)
        static["P{}D{}B{}".format(*split)] = sum(met.values()) / count
        for span, number in met.items():
            best[span] = max(best[span], number)
    settings = TwinSettings(load.fleet.engine, CLUSTER, load.fleet.kv_bytes_per_token, shares_memory=False)
    begun = time.perf_counter()
    fleet = PlannedFleet(scenario(load, SPLITS[0]), PlannerConfig("auto"), Twin(settings), outages=load.outages)
    fleet.run()
    met = met_by_span(fleet.cluster.collector.requests)
    in_outage = [
        when for when, _ in fleet.changes if any(begin <= when < end for begin, end in load.outages)
    ]  # fmt: skip
    return {
        "load": name,
        "requests": count,
        "static": static,
        "oracle": sum(best.values()) / count,
        "planned": sum(met.values()) / count,
        "changes": len(fleet.changes),
        "changes in outages": len(in_outage),
        "wall_s": time.perf_counter() - begun,
        "configurations": [(when / NS_PER_S, words) for when, words in fleet.changes],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--loads", type=names_of(LOADS), default=LOADS, help=f"of {', '.join(LOADS)}")
    parser.add_argument("--seconds", type=float, default=900.0)


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    found = []
    for name in options.loads:
        found.append(measure(name, 3600.0 if name == "constant" else options.seconds))
        print(json.dumps(found[-1]), flush=True)
    rows = [
        {
            "load": entry["load"],
            "requests": entry["requests"],
            "best static": f"{max(entry['static'].values()):.1%}" if entry["static"] else "",
            "oracle": f"{entry['oracle']:.1%}" if entry["static"] else "",
            "planned": f"{entry['planned']:.1%}",
            "changes": entry["changes"],
        }
        for entry in found
    ]
    report("planner", rows, options.json, loads=found)
