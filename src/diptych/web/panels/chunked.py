"""Chapter 3: prompts in chunks between the tokens of the streams, how large the chunks are, and how many prompts are
computed side by side.

Owns which settings of the scheduler the page offers and the comparison with whole prompts. What the settings do is
diptych.control.engine.scheduler's business.
"""

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from diptych.control.config import BudgetConfig, BudgetName, PresetName
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.simulation.scenario import Scenario
from diptych.web.panels.cast import MAX_STREAMS, cast, one_worker, read_prompts, requests_of_kind, worst
from diptych.web.panels.formula import Formula, formula, milliseconds, significant
from diptych.web.panels.machine import Machine, about, machine, step_ns
from diptych.web.panels.query import Query

CURVE = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MARGIN = BudgetConfig().margin


class ChunkedQuery(Query, frozen=True, kw_only=True):
    """mode: whole prompts, chunks of ``chunk`` tokens a step at most, or chunks that keep ``tpot_ms``. partial,
    long_partial: prompts (long prompts) that are half done at the same time (0: any number). The rest as in chapter 2.
    """

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    streams: Annotated[int, Meta(ge=0, le=MAX_STREAMS)] = 4
    tokens: Annotated[int, Meta(ge=2, le=256)] = 96
    prompts: str = "200:8192:16,210:8192:16,230:128:16"
    mode: BudgetName = "fixed"
    chunk: Annotated[int, Meta(ge=64, le=8192)] = 512
    tpot_ms: Annotated[float, Meta(ge=1, le=1000)] = 25.0
    partial: Annotated[int, Meta(ge=0, le=8)] = 2
    long_partial: Annotated[int, Meta(ge=0, le=8)] = 1
    order: Literal["fcfs", "shortest"] = "shortest"


def panel(query: ChunkedQuery) -> dict[str, Any]:
    """``play`` as chosen, ``whole`` the same with whole prompts, ``measures`` of both, ``objective_ns``: the
    longest gap that is allowed (0: none is asked for), and ``curve``: the trade between
    the longest gap and the first token of the longest prompt, by chunk size. Raises ConfigError."""
    if query.partial and query.long_partial > query.partial:
        raise ConfigError(
            f"long_partial is {query.long_partial}; it must be at most partial ({query.partial}): long prompts are "
            "some of those that are half done",
            param="long_partial",
        )
    chosen = machine(query.model, query.hardware)
    people = cast(query.streams, query.tokens, read_prompts(query.prompts))
    play = people.play(_scenario(chosen, query)).to_json()
    whole = people.play(one_worker(chosen, "unified")).to_json()
    measures = {"chosen": measure(play), "whole": measure(whole)}
    return {
        "machine": about(chosen),
        "play": play,
        "whole": whole,
        "measures": measures,
        "objective_ns": round(query.tpot_ms * NS_PER_MS) if query.mode == "slo" else 0,
        "curve": _curve(query) if query.streams else [],
        "formulas": _formulas(chosen, query, play),
        "notes": _notes(query, play, measures),
    }


def measure(data: dict[str, Any]) -> dict[str, Any]:
    """What streams and prompts felt."""
    streams = requests_of_kind(data, "stream")
    return {
        "gap_ms": worst([request["longest_gap_ms"] for request in streams]),
        "stalled_ms": worst([request["stalled_ms"] for request in streams]),
        "tpot_ms": worst([request["tpot_ms"] for request in streams]),
        "ttft_short_ms": worst([request["ttft_ms"] for request in requests_of_kind(data, "short")]),
        "ttft_long_ms": worst([request["ttft_ms"] for request in requests_of_kind(data, "long")]),
        "end_ms": data["end_ns"] / 1e6,
    }


def scheduler_settings(query: ChunkedQuery, chunk: int) -> dict[str, Any]:
    """Fields of diptych.simulation.settings.SchedulerSettings."""
    if query.mode == "whole":
        return {"order": query.order}
    settings: dict[str, Any] = {
        "budget": query.mode,
        "order": query.order,
        "max_batched_tokens": chunk if query.mode == "fixed" else 8192,
        "max_partial_prefills": query.partial,
        "max_long_partial_prefills": query.long_partial,
        "max_num_seqs": min(256, chunk),
    }
    return settings


def _scenario(chosen: Machine, query: ChunkedQuery) -> Scenario:
    shape: PresetName = "unified" if query.mode == "whole" else "chunked"
    tpot_ms = query.tpot_ms if query.mode == "slo" else None
    return one_worker(chosen, shape, scheduler_settings(query, query.chunk), tpot_ms)


def _curve(query: ChunkedQuery) -> list[dict[str, Any]]:
    """The trade, for the sizes of CURVE. It does not depend on the mode and the size that were chosen."""
    return list(_curve_of(msgspec.structs.replace(query, mode="fixed", chunk=CURVE[0], tpot_ms=1.0)))


@lru_cache(maxsize=64)
def _curve_of(query: ChunkedQuery) -> tuple[dict[str, Any], ...]:
    chosen = machine(query.model, query.hardware)
    people = cast(query.streams, query.tokens, read_prompts(query.prompts))
    points = []
    for chunk in CURVE:
        scenario = one_worker(chosen, "chunked", scheduler_settings(query, chunk))
        found = measure(people.play(scenario).to_json())
        points.append({"chunk": chunk, **{name: found[name] for name in ("gap_ms", "ttft_long_ms", "ttft_short_ms")}})
    return tuple(points)


def _formulas(chosen: Machine, query: ChunkedQuery, play: dict[str, Any]) -> list[Formula]:
    longest = max((request["prompt_tokens"] for request in requests_of_kind(play, "short", "long")), default=0)
    if not longest:
        return []
    cost, context = chosen.choice.cost, query.streams * 250
    lines = []
    alone_ns = step_ns(cost, None, query.streams, context) if query.streams else 0
    if query.mode == "fixed":
        tokens = max(1, min(query.chunk - query.streams, longest))
        lines.append(
            formula(
                "chunks of the longest prompt",
                "⌈prompt ÷ (tokens of a step − running streams)⌉",
                f"⌈{longest:,} ÷ ({query.chunk:,} − {query.streams})⌉, if it is alone",
                f"{-(-longest // max(1, query.chunk - query.streams))} steps",
            )
        )
        mixed_ns = step_ns(cost, (0, tokens), query.streams, context)
        if query.streams:
            lines.append(
                formula(
                    "a step with a chunk, against one without",
                    "(decodes + chunk) ÷ decodes",
                    f"{milliseconds(mixed_ns / 1e6)} ÷ {milliseconds(alone_ns / 1e6)}",
                    f"{significant(mixed_ns / alone_ns)} ×",
                )
            )
    elif query.mode == "slo":
        lines.append(
            formula(
                "time for a step with a chunk",
                "TPOT objective × margin",
                f"{significant(query.tpot_ms)} ms × {MARGIN}",
                f"{significant(query.tpot_ms * MARGIN)} ms at most",
            )
        )
        sizes = [
            chunk[2] for record in play["records"] if record["kind"] == "step" for chunk in record.get("prefills", ())
        ]
        lines.append(
            formula(
                "chunks that fitted",
                "largest n with predicted time (decodes + n tokens) ≤ that",
                f"{len(sizes)} chunks, of {min(sizes):,} to {max(sizes):,} tokens",
                f"{sum(sizes) // len(sizes):,} tokens on average",
            )
        )
    return lines


def _notes(query: ChunkedQuery, play: dict[str, Any], measures: dict[str, Any]) -> list[str]:
    ours, whole = measures["chosen"], measures["whole"]
    notes = []
    if ours["gap_ms"] and query.mode != "whole":
        notes.append(
            f"The longest gap of a stream is {milliseconds(ours['gap_ms'])}; with whole prompts it is "
            f"{milliseconds(whole['gap_ms'])}."
        )
    if ours["ttft_long_ms"] and query.mode != "whole":
        notes.append(
            f"The slowest long prompt has its first token after {milliseconds(ours['ttft_long_ms'])}, against "
            f"{milliseconds(whole['ttft_long_ms'])} with whole prompts. Chunks do not make a long prompt faster: they "
            "help everybody else."
        )
    if ours["ttft_short_ms"] and query.mode != "whole":
        notes.append(
            f"The short prompt behind the long ones has its first token after {milliseconds(ours['ttft_short_ms'])}, "
            f"against {milliseconds(whole['ttft_short_ms'])}."
        )
    if query.mode == "slo" and ours["tpot_ms"]:
        kept = "keep" if ours["tpot_ms"] <= query.tpot_ms else "miss"
        notes.append(
            f"The streams {kept} their objective: {milliseconds(ours['tpot_ms'])} a token on average, "
            f"{milliseconds(query.tpot_ms)} allowed."
        )
    if query.mode == "whole":
        notes.append("Prompts run whole: this is chapter 2. Choose chunks to see the difference.")
    return notes
