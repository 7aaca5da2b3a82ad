"""How well the lengths of answers are foreseen, and what that is worth to a fleet.

    python benchmarks/lengths.py [--sharegpt FILE.csv] [--json lengths.json]

Errors: requests are asked in order of arrival, and each teaches when it ends (30 ms a token later). "static" expects
DEFAULT_TOKENS of every answer, "hindsight" the mean of all answers of the trace, which cannot be known before;
"quantile" is the rule that the learned one replaces: the 0.8 quantile of the last 256 answers of a service class and an
octave of prompt sizes. "error" is the mean absolute error, as a share of the mean length; "rms" in tokens; "bias" is
the sum of what was expected over the sum of what came, less 1; "below high": answers shorter than the 0.8 quantile of
the learned curves. ShareGPT's file (num_prefill_tokens, num_decode_tokens) has no times: ten requests a second.

Fleets: the same decision code in the simulator, with each of the expectations and with the truth. Limits are 4096
tokens, so that no limit tells the length.
"""

import argparse
import csv
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common import report

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.length_predictor import DEFAULT_TOKENS, LengthGroup, LengthPredictor
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.costs.layer_tables import load_layer_table
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.results import SimulationResult, summarize
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec
from diptych.workload.traces import load_trace

LIMIT = 4096
TOKEN_NS = 30 * NS_PER_MS
SLO = Slo(2_000 * NS_PER_MS, 50 * NS_PER_MS)
LOADS = (  # trace, factor on its rate, blocks of 64 tokens in each worker's cache
    ("azure-conv", 8, 4000),
    ("azure-conv", 6, 800),
    ("mooncake-conversation", 0.4, 4000),
)


@dataclass
class Recent:
    """The last 256 lengths."""

    in_order: deque[int] = field(default_factory=deque)
    sizes: list[int] = field(default_factory=list)

    def add(self, num_tokens: int) -> None:
        """One more."""
        if len(self.in_order) == 256:
            self.sizes.remove(self.in_order.popleft())
        self.in_order.append(num_tokens)
        insort(self.sizes, num_tokens)


class Quantile(LengthPredictor):
    """The rule before: a high quantile per class, cut answers taken for whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[str, Recent] = {"": Recent()}
        self._names: dict[LengthGroup, str] = {}

    def group(self, service_class: str, num_prompt_tokens: int, hashes: Sequence[bytes] = ()) -> LengthGroup:
        """A group of its own, which stands for the class."""
        group = LengthGroup(None)
        self._names[group] = f"{service_class}<{num_prompt_tokens.bit_length()}"
        return group

    def mean(self, group: LengthGroup, num_generated: int, max_tokens: int) -> int:
        """The quantile of the class, or of all while the class is young."""
        limit = max_tokens - num_generated
        for name in (self._names[group], ""):
            recent = self._classes.get(name)
            if recent is not None and len(recent.sizes) >= 16:
                return min(limit, recent.sizes[int(0.8 * len(recent.sizes))])
        return min(limit, DEFAULT_TOKENS)

    high = mean

    def observe(self, group: LengthGroup, num_tokens: int, *, is_cut: bool = False) -> None:
        """Into the class, and into all."""
        for name in (self._names.pop(group), ""):
            self._classes.setdefault(name, Recent()).add(num_tokens)


class Static(LengthPredictor):
    """The same for every answer."""

    def __init__(self, num_tokens: int = DEFAULT_TOKENS) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def mean(self, group: LengthGroup, num_generated: int, max_tokens: int) -> int:
        """What is left of it."""
        return max(1, min(max_tokens, self._num_tokens) - num_generated)

    high = mean


class Truth(LengthPredictor):
    """Knows the workload, and asks for groups in its order: the bound of what foresight can be worth."""

    def __init__(self, workload: "Limited") -> None:
        super().__init__()
        self._coming = iter([spec.output_tokens for spec in workload])
        self._lengths: dict[LengthGroup, int] = {}

    def group(self, service_class: str, num_prompt_tokens: int, hashes: Sequence[bytes] = ()) -> LengthGroup:
        """One for each request."""
        group = LengthGroup(None)
        self._lengths[group] = next(self._coming)
        return group

    def mean(self, group: LengthGroup, num_generated: int, max_tokens: int) -> int:
        """What will be."""
        return max(1, self._lengths[group] - num_generated)


@dataclass(frozen=True)
class Limited:
    """Requests whose limits do not tell how long their answers are."""

    specs: tuple[RequestSpec, ...]

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def limited(specs: Iterable[RequestSpec], slower: float = 1.0) -> Limited:
    """Every limit is LIMIT, and time passes ``slower`` times as slowly."""
    return Limited(
        tuple(
            replace(
                spec,
                max_tokens=LIMIT,
                output_tokens=min(LIMIT, spec.output_tokens),
                arrival_ns=int(spec.arrival_ns * slower),
            )
            for spec in specs
        )
    )


def sharegpt(path: str) -> Limited:
    """Lengths from a CSV file."""
    with open(path, newline="") as file:
        rows = [(row["num_prefill_tokens"], row["num_decode_tokens"]) for row in csv.DictReader(file)]
    lengths = [(max(1, int(float(prompt))), max(1, int(float(answer)))) for prompt, answer in rows]
    return limited(
        RequestSpec(arrival_ns=100 * NS_PER_MS * number, prompt_tokens=prompt, output_tokens=answer)
        for number, (prompt, answer) in enumerate(lengths)
    )


def expectations(workload: Limited, lengths: LengthPredictor) -> tuple[list[int], float]:
    """What was expected of each request when it arrived, and the share of answers below ``high``."""
    happens = [(spec.arrival_ns, 1, number) for number, spec in enumerate(workload)]
    happens += [(spec.arrival_ns + TOKEN_NS * spec.output_tokens, 0, number) for number, spec in enumerate(workload)]
    expected, num_below = [0] * len(workload), 0
    groups: dict[int, LengthGroup] = {}
    for _, arrives, number in sorted(happens):
        spec = workload.specs[number]
        if not arrives:
            lengths.observe(groups.pop(number), spec.output_tokens)
            continue
        hashes = tuple(identity.to_bytes(8, "little") for identity in spec.hash_ids)
        groups[number] = group = lengths.group("standard", spec.prompt_tokens, hashes)
        expected[number] = lengths.mean(group, 0, LIMIT)
        num_below += spec.output_tokens <= lengths.high(group, 0, LIMIT)
    return expected, num_below / len(workload)


def error_rows(name: str, workload: Limited) -> list[dict[str, Any]]:
    """Every rule on one trace."""
    actual = [spec.output_tokens for spec in workload]
    rules = {
        "static": Static(),
        "hindsight": Static(round(sum(actual) / len(actual))),
        "quantile": Quantile(),
        "learned": LengthPredictor(),
    }
    rows = []
    for rule, lengths in rules.items():
        expected, below = expectations(workload, lengths)
        wrong = [guess - length for guess, length in zip(expected, actual, strict=True)]
        rows.append(
            {
                "trace": name,
                "expectation": rule,
                "error": sum(map(abs, wrong)) / sum(actual),
                "rms": (sum(miss * miss for miss in wrong) / len(wrong)) ** 0.5,
                "bias": sum(wrong) / sum(actual),
                "below high": below if rule == "learned" else None,
            }
        )
    return rows


def fleet_rows(name: str, workload: Limited, num_blocks: int) -> list[dict[str, Any]]:
    """Four workers with every rule, in the front end and in the workers. "truth": in the front end alone."""
    rules: dict[str, type[LengthPredictor]] = {"static": Static, "quantile": Quantile, "learned": LengthPredictor}
    fleets = {rule: four_workers(workload, num_blocks, make) for rule, make in rules.items()}
    fleets["truth"] = four_workers(workload, num_blocks, LengthPredictor)
    fleets["truth"].core.lengths = Truth(workload)
    return [{"load": name, "expectation": rule, **outcome(cluster)} for rule, cluster in fleets.items()]


def four_workers(workload: Limited, num_blocks: int, rule: type[LengthPredictor]) -> SimulatedCluster:
    """Each has Llama-3.1-70B on four H100."""
    worker = EngineConfig(
        CacheConfig(num_blocks=num_blocks, block_size=64),
        shape_preset("chunked", max_waiting=100_000),
        SLO,
        max_model_len=200_000,
    )
    cost = load_layer_table("h100-llama-3.1-70b-tp4")
    cluster = SimulatedCluster(Scenario(engine=worker, cost=cost, workload=workload, num_workers=4))
    cluster.core.lengths = rule()
    for simulated in cluster.workers:
        simulated.core.engine.scheduler.lengths = rule()
    return cluster


def outcome(cluster: SimulatedCluster) -> dict[str, Any]:
    """What clients saw, after a run."""
    cluster.run()
    result = SimulationResult(
        requests=cluster.collector.requests,
        gaps=cluster.collector.gaps,
        workers=[worker.usage for worker in cluster.workers],
        duration_ns=cluster.last_end_ns,
    )
    summary = summarize(result)
    return {
        "attainment": summary["attainment"],
        "goodput": summary["goodput_rps"],
        "TTFT p50 ms": summary["ttft_ms"]["p50"],
        "TTFT p99 ms": summary["ttft_ms"]["p99"],
        "TPOT p50 ms": summary["tpot_ms"]["p50"],
        "TPOT p99 ms": summary["tpot_ms"]["p99"],
        "preemptions": sum(worker.core.engine.stats().num_preemptions for worker in cluster.workers),
    }


def main() -> None:
    """Errors, then fleets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharegpt", help="CSV with num_prefill_tokens and num_decode_tokens")
    parser.add_argument("--json")
    parser.add_argument("--requests", type=int, default=3000, help="of each simulated load")
    options = parser.parse_args()
    traces = {name: limited(load_trace(name)) for name in ("azure-conv", "mooncake-conversation")}
    if options.sharegpt:
        traces["sharegpt"] = sharegpt(options.sharegpt)
    errors = [row for name, workload in traces.items() for row in error_rows(name, workload)]
    report("errors of expected lengths", errors)
    fleets = []
    for name, faster, num_blocks in LOADS:
        load = limited(load_trace(name).rows(0, options.requests), 1 / faster)
        fleets += fleet_rows(f"{name} x {faster}, {num_blocks * 64 // 1000}k tokens of KV", load, num_blocks)
    report("fleets", fleets, options.json, errors=errors)


if __name__ == "__main__":
    main()
