"""Chapter 6: the three shapes on the same GPUs under the same load, and which of them to take.

Owns what is compared and the rule of the recommendation. Every figure is a simulation of the scheduler and the router
that serve; nothing is looked up in a table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from diptych.advisor.device_layout import LayoutName
from diptych.advisor.evaluation import PACES, TARGET, EvaluatedFleet, Score, evaluation
from diptych.control.errors import ConfigError
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.prepare import prepare
from diptych.simulation.results import SimulationResult, summarize
from diptych.simulation.run import simulate
from diptych.simulation.settings import Settings, plain, settings_from
from diptych.web.panels.advice import LAYOUTS, AdvisedShape, recommend
from diptych.web.panels.machine import Machine, about, machine, step_ns
from diptych.web.panels.query import Query

SECONDS = 15.0  # of load per simulation, within these numbers of requests
LEAST_REQUESTS, MOST_REQUESTS = 150, 800
SEARCH_STEPS = PACES.max_probes - 1
MOST_FACTOR = 4  # how far above the asked rate it is worth knowing what a shape holds
MAX_SPLITS = 3
LENGTH_SIGMA = 0.6  # of the lognormal lengths


class ChooseQuery(Query, frozen=True, kw_only=True):
    """rate: requests a second, of the whole fleet. prompt, output: mean lengths in tokens. gpus: of the fleet."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    gpus: Literal[1, 2, 4, 8, 16] = 8
    rate: Annotated[float, Meta(ge=0.1, le=400)] = 12.0
    prompt: Annotated[int, Meta(ge=16, le=16_384)] = 6000
    output: Annotated[int, Meta(ge=2, le=1000)] = 100
    ttft_ms: Annotated[float, Meta(ge=10, le=60_000)] = 1500.0
    tpot_ms: Annotated[float, Meta(ge=1, le=1000)] = 8.0
    link: str = "ib400"
    seed: Annotated[int, Meta(ge=0, le=9999)] = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to use the GPUs. prefill, decode 0: every worker does both."""

    shape: LayoutName
    workers: int
    prefill: int = 0
    decode: int = 0


def panel(query: ChooseQuery) -> dict[str, Any]:
    """The last event of ``steps``: everything at once. Raises ConfigError."""
    return list(steps(query))[-1]


def steps(query: ChooseQuery) -> Iterator[dict[str, Any]]:
    """``{"kind": "progress", "done", "total", "text"}`` after each simulation, then ``{"kind": "result", ...}`` with
    ``shapes``, ``recommendation`` and ``machine``. The first is there before anything is simulated. Raises ConfigError.
    """
    chosen = machine(query.model, query.hardware)
    if chosen.num_gpus > query.gpus:
        raise ConfigError(
            f"gpus is {query.gpus}; {chosen.model.name} needs at least {chosen.num_gpus} x {chosen.hardware.name}",
            param="gpus",
        )
    if query.prompt * 4 > chosen.model.max_context:
        raise ConfigError(
            f"prompt is {query.prompt:,}; with lengths that scatter around it, at most a quarter of the context of "
            f"{chosen.model.name} ({chosen.model.max_context:,}) can be asked for",
            param="prompt",
        )
    groups = [plans(chosen, query, shape) for shape in LAYOUTS]
    total = sum(len(group) + SEARCH_STEPS for group in groups if group)
    done = 0
    yield {"kind": "progress", "done": 0, "total": total, "text": "starting"}
    best: list[Plan] = []
    for group in groups:
        tried: dict[Plan, AdvisedShape] = {}
        for plan in group:
            tried[plan] = candidate(chosen, query, plan, query.rate)
            done += 1
            yield {"kind": "progress", "done": done, "total": total, "text": words(plan)}
        if tried:
            best.append(max(tried, key=lambda plan: (tried[plan].attainment, tried[plan].goodput_rps)))
    found: list[AdvisedShape] = []
    for event in _searched(chosen, query, best):
        if isinstance(event, list):
            found = [_advised(chosen, query, each) for each in event]
        else:
            done += 1
            yield {"kind": "progress", "done": done, "total": total, "text": f"the highest rate of {words(event)}"}
    for step in range(done + 1, total + 1):  # searches that ended early
        yield {"kind": "progress", "done": step, "total": total, "text": "the highest rates"}
    yield {
        "kind": "result",
        "machine": about(chosen),
        "target": TARGET,
        "requests": num_requests(query.rate),
        "shapes": [msgspec.to_builtins(shape) for shape in found],
        "recommendation": recommend(found, query.rate, query.gpus, chosen, _asked(query)),
    }


def plans(chosen: Machine, query: ChooseQuery, shape: LayoutName) -> list[Plan]:
    """What to try of a shape: for two pools the splits around the one that balances prefill and decode work."""
    workers = query.gpus // chosen.num_gpus
    if shape != "split":
        return [Plan(shape, workers)]
    if workers < 2:
        return []
    cost = chosen.choice.cost
    prefill = _prefill_seconds(cost, query)
    decode = _decode_seconds(cost, query)
    balanced = workers * prefill / (prefill + decode)
    splits = sorted(range(1, workers), key=lambda count: (abs(count - balanced), count))[:MAX_SPLITS]
    return [Plan(shape, workers, count, workers - count) for count in sorted(splits)]


def words(plan: Plan) -> str:
    """The plan in words, for a page."""
    if plan.prefill:
        return f"{plan.prefill} prefill + {plan.decode} decode"
    return f"{plan.workers} {plan.shape} worker{'s' if plan.workers > 1 else ''}"


def num_requests(rate: float) -> int:
    """Requests of one simulation at this rate."""
    return int(min(MOST_REQUESTS, max(LEAST_REQUESTS, rate * SECONDS)))


def settings_of(chosen: Machine, query: ChooseQuery, plan: Plan, rate: float) -> Settings:
    """What is simulated."""
    lengths = {
        "prompt": {"kind": "lognormal", "mean": query.prompt, "sigma": LENGTH_SIGMA, "max": 4 * query.prompt},
        "output": {"kind": "lognormal", "mean": query.output, "sigma": LENGTH_SIGMA, "max": 4 * query.output},
    }
    raw: dict[str, Any] = {
        "model": chosen.model.name,
        "hardware": chosen.hardware.name,
        "tensor_parallel": chosen.num_gpus,
        "weight_bits": chosen.weight_bits,
        "shape": "unified" if plan.shape == "unified" else "chunked",
        "seed": query.seed,
        "routing": "kv_aware",
        "workload": {
            "rate": rate,
            "num_requests": num_requests(query.rate),  # at every pace the same requests
            "lengths": lengths,
            "slo": {"ttft_ms": query.ttft_ms, "tpot_ms": query.tpot_ms},
        },
    }
    if plan.prefill:
        raw |= {"pools": {"prefill": plan.prefill, "decode": plan.decode, "link": query.link}}
    else:
        raw |= {"replicas": plan.workers}
    return settings_from(raw)


@lru_cache(maxsize=512)
def _simulated(settings: bytes) -> SimulationResult:
    return simulate(prepare(settings_from(msgspec.json.decode(settings))).scenario)


def candidate(chosen: Machine, query: ChooseQuery, plan: Plan, rate: float) -> AdvisedShape:
    """What a plan does at this rate."""
    result = _served(chosen, query, plan, rate)
    summary, table = summarize(result), result.requests
    rows = table.completed_rows()
    late = sum(table.ttft_ns(row) > query.ttft_ms * 1e6 for row in rows)
    slow = sum((table.tpot_ns(row) or 0) > query.tpot_ms * 1e6 for row in rows)
    usd_per_hour = chosen.hardware.price_per_hour * plan.workers * chosen.num_gpus
    attainment = Score.of(table).attainment or 0.0
    good = rate * attainment  # of a fleet that runs on; the last answers of a short run would count against it
    return AdvisedShape(
        shape=plan.shape,
        words=words(plan),
        workers=plan.workers,
        prefill=plan.prefill,
        decode=plan.decode,
        attainment=attainment,
        goodput_rps=good,
        late_share=late / max(1, len(rows)),
        slow_share=slow / max(1, len(rows)),
        ttft_ms={name: summary["ttft_ms"][name] for name in ("p50", "p90", "p99")},
        tpot_ms={name: summary["tpot_ms"][name] for name in ("p50", "p90", "p99")},
        itl_p99_ms=summary["itl_ms"]["p99"],
        usd_per_hour=usd_per_hour,
        usd_per_thousand_good=usd_per_hour / 3.6 / good if good else None,
        busy={name: summary["utilization"][name] for name in ("prefill", "mixed", "decode", "idle")},
    )


def _searched(chosen: Machine, query: ChooseQuery, fleets: list[Plan]) -> "Iterator[Plan | list[EvaluatedFleet[Plan]]]":
    """The plan of each simulation of advisor.evaluation, and at last what it found. A pace is a rate."""
    steps = evaluation(fleets, pace=query.rate)
    asked = next(steps)
    while True:
        scores: dict[tuple[Plan, float], Score] = {}
        for plan, rate in asked:
            scores[plan, rate] = Score.of(_served(chosen, query, plan, rate).requests)
            if rate != query.rate:
                yield plan
        try:
            asked = steps.send(scores)
        except StopIteration as end:
            yield end.value
            return


def _advised(chosen: Machine, query: ChooseQuery, evaluated: EvaluatedFleet[Plan]) -> AdvisedShape:
    most = MOST_FACTOR * query.rate
    highest = evaluated.highest or 0.0
    shape = candidate(chosen, query, evaluated.fleet, query.rate)
    return msgspec.structs.replace(shape, capacity_rps=round(min(most, highest), 3), holds_more=highest >= most)


def _served(chosen: Machine, query: ChooseQuery, plan: Plan, rate: float) -> SimulationResult:
    return _simulated(msgspec.json.encode(plain(settings_of(chosen, query, plan, rate))))


def _prefill_seconds(cost: CostModel, query: ChooseQuery) -> float:
    return step_ns(cost, (0, query.prompt), 0, 0) / 1e9


def _decode_seconds(cost: CostModel, query: ChooseQuery) -> float:
    """Decode seconds of one answer: its share of the batches that keep the objective."""
    context = query.prompt + query.output // 2
    batch = 1
    while batch < 256 and step_ns(cost, None, batch * 2, batch * 2 * context) <= query.tpot_ms * 1e6:
        batch *= 2
    return query.output * step_ns(cost, None, batch, batch * context) / batch / 1e9


def _asked(query: ChooseQuery) -> dict[str, Any]:
    return msgspec.structs.asdict(query)
