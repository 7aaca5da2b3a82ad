"""Laws of order that every cost model keeps, and random pairs of steps to try them on.

Fewer bits, more bandwidth, a shorter context and a smaller batch are never slower; more devices are never slower by
more than what they send to each other. "Smaller" keeps everything else: the mean context of the sequences that are
left, the tokens of the other chunks. A pair is made from a seed, so that one that breaks a law can be had again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.layer_tables import layer_table_info, layer_table_names, load_layer_table
from diptych.simulation.costs.operator_tables import operator_table_cost
from diptych.simulation.costs.operators import load_operator_tables, operator_table_names
from diptych.simulation.costs.roofline import RooflineCost, collective_costs
from diptych.simulation.hardware import Hardware, hardware_names, load_hardware
from diptych.simulation.model_catalogue import load_model, model_names
from diptych.simulation.models import ModelSpec
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, QUANTIZED

NS = 1e9
ROUNDING_NS = 2  # a duration is a whole number of nanoseconds, made of two parts
LAWS = ("fewer bits", "fewer KV bits", "more bandwidth", "more devices", "shorter context", "smaller batch")


@dataclass(frozen=True)
class Step:
    """chunks: (start, tokens) of prompts. seqs: decodes, at a mean ``context``."""

    chunks: tuple[tuple[int, int], ...] = ()
    seqs: int = 0
    context: int = 1

    @property
    def tokens(self) -> int:
        """Computed in the step."""
        return sum(size for _, size in self.chunks) + self.seqs

    def ns(self, cost: CostModel) -> int:
        """What a cost model takes for it."""
        prefills = tuple(ScheduledPrefill(str(i), start, size, (), True) for i, (start, size) in enumerate(self.chunks))
        pairs = sum(chunk_attention(start, size) for start, size in self.chunks)
        features = StepFeatures(self.tokens - self.seqs, pairs, self.seqs, self.seqs * self.context)
        return cost.step_ns(SchedulerOutput(0, prefills, self.seqs, features=features))


@dataclass(frozen=True)
class Setup:
    """kind: roofline, operators, auto, or the name of a layer table (the rest is then of no account). faster: what the
    device's memory and links are multiplied with."""

    kind: str
    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    parallelism: Parallelism = ONE_DEVICE
    bits: int = 16
    kv_bits: int = 16
    faster: float = 1.0

    def device(self) -> Hardware:
        """With its bandwidths multiplied."""
        hardware, factor = load_hardware(self.hardware), self.faster
        if factor == 1.0:
            return hardware
        link = hardware.interconnect
        scaled = {size: factor * value for size, value in link.all_reduce_bandwidth.items()}
        return replace(
            hardware,
            memory_bandwidth=factor * hardware.memory_bandwidth,
            interconnect=replace(link, all_reduce_bandwidth=scaled, link_bandwidth=factor * link.link_bandwidth),
            network=hardware.network and replace(hardware.network, bandwidth=factor * hardware.network.bandwidth),
        )

    def exchange_ns(self, tokens: int) -> float:
        """What its devices send to each other in a step."""
        model, hardware = load_model(self.model), self.device()
        by_law = collective_costs(model, hardware, self.parallelism).seconds(tokens)
        if self.kind != "operators" or self.parallelism.tensor == 1:
            return NS * by_law
        tables = _operators(self.hardware)
        measured = (2 * model.layers + 1) * tables.all_reduce_us(self.parallelism.tensor, tokens * model.hidden)
        return max(NS * by_law, 1000 * measured)


_operators = lru_cache(8)(lambda name: load_operator_tables(load_hardware(name)))


@lru_cache(64)
def cost_of(setup: Setup) -> CostModel:
    """The cost model of a setup. Raises ConfigError where there is none."""
    if setup.kind in layer_table_names():
        return load_layer_table(setup.kind)
    if setup.kind == "auto":
        return choose_cost(
            "auto",
            model=setup.model,
            hardware=setup.hardware,
            parallelism=setup.parallelism,
            weight_bits=setup.bits,
            kv_bits=setup.kv_bits,
        ).cost
    model, hardware = load_model(setup.model), setup.device()
    if setup.kind == "operators":
        return operator_table_cost(model, hardware, setup.parallelism, weight_bits=setup.bits, kv_bits=setup.kv_bits)
    names = {16: "none", 8: "int8", 4: "int4"}
    weights = GPU_WEIGHTS[setup.bits] if hardware.kind == "gpu" else QUANTIZED[names[setup.bits]]
    return RooflineCost(model, hardware, setup.parallelism, weights=weights, kv_bits=setup.kv_bits)


@dataclass(frozen=True)
class Pair:
    """A step that must not take longer than another one, but for ``allowed_ns``."""

    law: str
    less: tuple[Setup, Step]
    more: tuple[Setup, Step]
    allowed_ns: float = 0.0

    def violation(self) -> str | None:
        """What is wrong, with the excess; None: nothing."""
        less, more = (step.ns(cost_of(setup)) for setup, step in (self.less, self.more))
        excess = less - more - self.allowed_ns
        if excess <= ROUNDING_NS:
            return None
        return f"{self.law}: {less} ns > {more} ns + {self.allowed_ns:.0f} ns ({excess / more:.2%}): {self}"


def random_pairs(seed: int, steps: int) -> Iterator[Pair]:
    """``steps`` pairs of one random law on one random pair of setups."""
    draw = random.Random(seed)
    law = draw.choice(LAWS)
    setups = _setups(draw, law)
    while setups is None:
        setups = _setups(draw, law)
    better, worse = setups
    for _ in range(steps):
        more = _random_step(draw)
        less = _smaller(draw, law, more)
        allowed = better.exchange_ns(less.tokens) if law == "more devices" else 0.0
        yield Pair(law, (better, less), (worse, more), allowed)


def _setups(draw: random.Random, law: str) -> tuple[Setup, Setup] | None:
    """Two setups of which the first is not slower by the law; None: such a setup does not exist."""
    tables = layer_table_names() if law in ("shorter context", "smaller batch") else ()
    scaled = law in ("fewer bits", "fewer KV bits")
    kind = draw.choice(("roofline", "operators", *(["table"] if tables else []), *(["auto"] if scaled else [])))
    if kind == "table":
        setup = Setup(draw.choice(tables))
        return setup, setup
    if kind == "auto":  # measured layers, scaled to fewer bits
        info = layer_table_info(draw.choice(layer_table_names()))
        split = Parallelism(info.tensor_parallel, 1, info.expert_parallel, info.data_parallel)
        worse = Setup(kind, info.model, info.hardware, split, draw.choice((16, 8, 4)), draw.choice((16, 8)))
        return _fewer_bits(draw, law, worse)
    device = draw.choice(operator_table_names() if kind == "operators" else hardware_names())
    model = load_model(draw.choice(model_names()))
    split = _random_split(draw, model)
    bits, kv_bits = draw.choice((16, 8, 4)), draw.choice((16, 8))
    worse = Setup(kind, model.name, device, split, bits, kv_bits)
    better = worse
    if scaled:
        better, worse = _fewer_bits(draw, law, worse)
    elif law == "more bandwidth":
        better = replace(worse, kind="roofline", faster=draw.uniform(1.0, 3.0))
        worse = replace(worse, kind="roofline")
    elif law == "more devices":
        better = replace(worse, parallelism=_more_devices(draw, split))
        if kind == "operators" and better.parallelism.stage_devices > better.device().interconnect.max_devices:
            return None  # sums were measured within a host; between hosts, a law of another source prices them
    try:
        cost_of(worse), cost_of(better)
    except ConfigError:
        return None
    return better, worse


def _fewer_bits(draw: random.Random, law: str, setup: Setup) -> tuple[Setup, Setup]:
    if law == "fewer KV bits":
        return replace(setup, kv_bits=8), replace(setup, kv_bits=16)
    few, many = draw.choice(((8, 16), (4, 16), (4, 8)))
    return replace(setup, bits=few), replace(setup, bits=many)


def _random_split(draw: random.Random, model: ModelSpec) -> Parallelism:
    tensor, pipeline = draw.choice((1, 1, 2, 4, 8, 16)), draw.choice((1, 1, 1, 2, 4))
    data = draw.choice((1, 1, 2, 4, 8)) if model.moe else 1
    expert = draw.choice((1, tensor * data)) if model.moe else 1
    return Parallelism(tensor, pipeline, expert, data)


def _more_devices(draw: random.Random, split: Parallelism) -> Parallelism:
    name = draw.choice(("tensor", "pipeline", "data"))
    more = replace(split, **{name: 2 * getattr(split, name)}, expert=1)
    return replace(more, expert=more.stage_devices) if split.expert > 1 else more


def _random_step(draw: random.Random) -> Step:
    seqs = draw.choice((0, 1, 2, 8, 64, 256, draw.randint(1, 600)))
    context = draw.randint(1, 200) * draw.choice((1, 10, 100, 300))
    sizes = [draw.randint(1, draw.choice((8, 100, 1000, 8000))) for _ in range(draw.choice((0, 1, 1, 2, 5)))]
    if not sizes and not seqs:
        seqs = 1
    return Step(tuple((draw.choice((0, 0, draw.randint(1, 30_000))), size) for size in sizes), seqs, context)


def _smaller(draw: random.Random, law: str, step: Step) -> Step:
    """The same step with a shorter context, or with less in it."""
    chunks = list(step.chunks)
    if law == "shorter context":
        chunks = [(draw.randint(0, start), size) for start, size in chunks]
        return replace(step, chunks=tuple(chunks), context=draw.randint(1, step.context))
    if law != "smaller batch":
        return step
    if step.seqs > bool(not chunks) and draw.random() < 0.5:
        return replace(step, seqs=draw.randint(int(not chunks), step.seqs - 1))
    if len(chunks) + bool(step.seqs) > 1 and draw.random() < 0.5:
        chunks.pop(draw.randrange(len(chunks))) if chunks else None
    elif chunks:
        index = draw.randrange(len(chunks))
        start, size = chunks[index]
        chunks[index] = (start, draw.randint(1, size))
    return replace(step, chunks=tuple(chunks))
