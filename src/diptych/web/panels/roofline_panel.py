"""Chapter 1: the two phases on the roofline of a device.

Owns FLOPs and bytes of a prefill step and of a decode step, counted from the model's dimensions, and the places where
they sit under the device's roof (S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009). Durations are those of the
simulator's cost model, not of this count.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from diptych.control.step import chunk_attention
from diptych.simulation.models import ModelSpec, kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS
from diptych.web.panels.formula import Formula, duration, formula, large, scaled, significant
from diptych.web.panels.machine import Machine, about, machine, step_ns
from diptych.web.panels.query import Query

SERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_BATCH = 512


class RooflineQuery(Query, frozen=True, kw_only=True):
    """prompt: tokens of the prefill step. batch, context: sequences of the decode step, and tokens that each attends
    to. gpus 0: the fewest that hold the model. weight_bits 0:
    16, or fewer where 16 do not fit."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    gpus: Literal[0, 1, 2, 4, 8] = 0
    weight_bits: Literal[0, 4, 8, 16] = 0
    prompt: Annotated[int, Meta(ge=1, le=16384)] = 2048
    batch: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 16
    context: Annotated[int, Meta(ge=1, le=32768)] = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, and bytes that must come from or go to memory: weights and KV (activations stay out of the count)."""

    flop: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.num_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flop + other.flop, self.num_bytes + other.num_bytes)


def matrix_work(model: ModelSpec, num_tokens: int, num_sampled: int, weight_bits: int) -> Work:
    """All matrix products of a step: 2 FLOP per active parameter and token; each weight touched is read once."""
    flop = 2.0 * (model.layer_parameters(active=True) * num_tokens + model.head_parameters * num_sampled)
    weights = model.layer_parameters() - untouched_parameters(model, num_tokens)
    return Work(flop, weights * weight_bits / 8 + model.head_parameters * 2.0)


def untouched_parameters(model: ModelSpec, num_tokens: int) -> float:
    """Parameters of the experts that no token visits: E * (1 - k/E)^n of E, each token choosing k of them at random."""
    if model.moe is None:
        return 0.0
    share = 1.0
    for _ in range(min(num_tokens, 4096)):
        share *= 1.0 - model.moe.experts_per_token / model.moe.experts
    return share * model.moe.experts * model.expert_parameters * model.num_moe_layers


def prefill_attention(model: ModelSpec, num_tokens: int) -> Work:
    """Attention of a whole prompt: 4 FLOP per pair and number of a head; its KV is written once."""
    pairs = chunk_attention(0, num_tokens)
    mla = model.mla
    width = 2 * (mla.nope_dim + mla.rope_dim + mla.value_dim) if mla else 4 * model.head_dim
    return Work(float(width * model.heads * model.layers * pairs), float(model.kv_bytes_per_token() * num_tokens))


def decode_attention(model: ModelSpec, batch: int, context: int) -> Work:
    """Attention of one token of each sequence: the whole KV cache of each is read. With MLA in the latent space."""
    per_head = 2 * (2 * model.mla.kv_rank + model.mla.rope_dim) if model.mla else 4 * model.head_dim
    flop = float(per_head * model.heads * model.layers * batch * context)
    return Work(flop, float(model.kv_bytes_per_token() * batch * (context + 1)))


def panel(query: RooflineQuery) -> dict[str, Any]:
    """``roof``, ``points`` (each phase, and its two parts), ``series`` (throughput against tokens per step),
    ``phases``, ``formulas`` and ``notes``. Raises ConfigError."""
    chosen = machine(query.model, query.hardware, query.gpus, query.weight_bits)
    dtype = GPU_WEIGHTS[chosen.weight_bits].layers.peak(chosen.hardware)
    peak = chosen.hardware.flops[dtype] * chosen.num_gpus
    bandwidth = chosen.hardware.memory_bandwidth * chosen.num_gpus
    matrices = {
        "prefill": matrix_work(chosen.model, query.prompt, 1, chosen.weight_bits),
        "decode": matrix_work(chosen.model, query.batch, query.batch, chosen.weight_bits),
    }
    attention = {
        "prefill": prefill_attention(chosen.model, query.prompt),
        "decode": decode_attention(chosen.model, query.batch, query.context),
    }
    cost = chosen.choice.cost
    times = {
        "prefill": step_ns(cost, (0, query.prompt), 0, 0),
        "decode": step_ns(cost, None, query.batch, query.batch * query.context),
    }
    tokens = {"prefill": query.prompt, "decode": query.batch}
    phases = {
        phase: _phase(phase, matrices[phase] + attention[phase], peak, bandwidth, times[phase], tokens[phase])
        for phase in ("prefill", "decode")
    }
    points = [
        _point(phase, part, work, peak, bandwidth)
        for phase in ("prefill", "decode")
        for part, work in (
            ("whole step", matrices[phase] + attention[phase]),
            ("matrix products", matrices[phase]),
            ("attention", attention[phase]),
        )
    ]
    return {
        "machine": {**about(chosen), "dtype": dtype},
        "roof": _roof(points, peak, bandwidth),
        "points": points,
        "phases": phases,
        "series": _series(chosen, query),
        "formulas": _formulas(chosen, query, matrices, attention, peak, bandwidth),
        "notes": _notes(chosen, query, phases),
    }


def _phase(phase: str, work: Work, peak: float, bandwidth: float, took_ns: int, tokens: int) -> dict[str, Any]:
    compute_ns, memory_ns = work.flop / peak * 1e9, work.num_bytes / bandwidth * 1e9
    return {
        "phase": phase,
        "tokens": tokens,
        "flop": work.flop,
        "bytes": work.num_bytes,
        "intensity": work.intensity,
        "compute_ms": compute_ns / 1e6,
        "memory_ms": memory_ns / 1e6,
        "bound": "compute" if compute_ns > memory_ns else "memory",
        "step_ms": took_ns / 1e6,
        "tokens_per_s": tokens / took_ns * 1e9,
        "flops_reached": work.flop / took_ns * 1e9,
        "share_of_peak": work.flop / took_ns * 1e9 / peak,
        "share_of_bandwidth": work.num_bytes / took_ns * 1e9 / bandwidth,
    }


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """The roof: the most FLOP/s that a step of this intensity can reach."""
    return min(peak, intensity * bandwidth)


def _roof(points: list[dict[str, Any]], peak: float, bandwidth: float) -> dict[str, Any]:
    """line: from the left of all points to the right of them, with its corner."""
    ridge, reach = peak / bandwidth, [point["intensity"] for point in points]
    low, high = min(0.5, *reach) / 2, max(20 * ridge, *reach) * 1.5
    line = [(intensity, attainable(intensity, peak, bandwidth)) for intensity in (low, ridge, high)]
    return {"peak": peak, "bandwidth": bandwidth, "ridge": ridge, "line": line}


def _point(phase: str, part: str, work: Work, peak: float, bandwidth: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "part": part,
        "intensity": work.intensity,
        "attainable": attainable(work.intensity, peak, bandwidth),
    }


def _series(chosen: Machine, query: RooflineQuery) -> dict[str, list[dict[str, float]]]:
    """Duration and throughput of prefill and decode steps by their number of tokens."""
    cost = chosen.choice.cost
    prefill = [{"tokens": size, "ms": step_ns(cost, (0, size), 0, 0) / 1e6} for size in SERIES if size >= 16]
    decode = [
        {"tokens": size, "ms": step_ns(cost, None, size, size * query.context) / 1e6}
        for size in SERIES
        if size <= MAX_BATCH
    ]
    for row in prefill + decode:
        row["tokens_per_s"] = row["tokens"] / row["ms"] * 1e3
    return {"prefill": prefill, "decode": decode}


def _formulas(
    chosen: Machine,
    query: RooflineQuery,
    matrices: dict[str, Work],
    attention: dict[str, Work],
    peak: float,
    bandwidth: float,
) -> list[Formula]:
    model = chosen.model
    prefill, decode = (matrices[phase] + attention[phase] for phase in ("prefill", "decode"))
    lines = [
        formula(
            "ridge of the roof",
            "peak FLOP/s ÷ memory bandwidth",
            f"{scaled(peak, 'FLOP/s')} ÷ {scaled(bandwidth, 'B/s')}",
            f"{significant(peak / bandwidth)} FLOP/B",
        ),
        formula(
            "matrix products of the prefill",
            "2 × active parameters × tokens",
            f"2 × {large(model.layer_parameters(active=True))} × {query.prompt:,}",
            scaled(matrices["prefill"].flop, "FLOP"),
        ),
        formula(
            "weights read, once a step",
            "parameters × bits ÷ 8",
            f"{large(model.layer_parameters() + model.head_parameters)} × {chosen.weight_bits} ÷ 8"
            + (" (head: 16 bits; only the experts that are visited)" if model.moe else ""),
            scaled(matrices["prefill"].num_bytes, "B"),
        ),
        formula(
            "KV read by the decode step",
            "KV per token × sequences × context",
            f"{scaled(model.kv_bytes_per_token(), 'B')} × {query.batch:,} × {query.context + 1:,}",
            scaled(attention["decode"].num_bytes, "B"),
        ),
        formula(
            "intensity of the prefill",
            "FLOP ÷ bytes",
            f"{scaled(prefill.flop, 'FLOP')} ÷ {scaled(prefill.num_bytes, 'B')}",
            f"{significant(prefill.intensity)} FLOP/B",
        ),
        formula(
            "intensity of the decode",
            "FLOP ÷ bytes",
            f"{scaled(decode.flop, 'FLOP')} ÷ {scaled(decode.num_bytes, 'B')}",
            f"{significant(decode.intensity)} FLOP/B",
        ),
    ]
    return lines


def _notes(chosen: Machine, query: RooflineQuery, phases: dict[str, dict[str, Any]]) -> list[str]:
    prefill, decode = phases["prefill"], phases["decode"]
    notes = [
        f"On {chosen.devices} the prefill step takes {duration(prefill['step_ms'] * 1e6)} and is limited by "
        f"{_limit(prefill)}; the decode step takes {duration(decode['step_ms'] * 1e6)} and is limited by "
        f"{_limit(decode)}.",
        f"The prefill handles {significant(prefill['tokens_per_s'])} tokens a second, the decode "
        f"{significant(decode['tokens_per_s'])}: the same weights, read from memory for {query.prompt:,} tokens at a "
        f"time or for {query.batch:,}.",
    ]
    capacity = kv_capacity_tokens(
        chosen.model,
        chosen.hardware,
        parallelism=Parallelism(chosen.num_gpus),
        weights=GPU_WEIGHTS[chosen.weight_bits],
    )
    if query.batch * query.context > capacity:
        notes.append(
            f"This decode batch does not fit: {query.batch:,} × {query.context:,} tokens of KV are more than the "
            f"{capacity:,} that there is room for beside the weights."
        )
    return notes


def _limit(phase: dict[str, Any]) -> str:
    return "arithmetic" if phase["bound"] == "compute" else "memory bandwidth"
