"""Chapter 2: what a long prompt does to streams that share its worker, when prompts run whole.

Owns the measures of interference. The scheduler is the one that serves, in the shape ``unified``.
"""

from typing import Annotated, Any

from msgspec import Meta

from diptych.web.panels.cast import MAX_STREAMS, cast, one_worker, read_prompts, requests_of_kind, worst
from diptych.web.panels.formula import Formula, formula, milliseconds, significant
from diptych.web.panels.machine import about, machine
from diptych.web.panels.query import Query


class InterferenceQuery(Query, frozen=True, kw_only=True):
    """streams: chats that are being answered. prompts: see cast.read_prompts."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    streams: Annotated[int, Meta(ge=0, le=MAX_STREAMS)] = 4
    tokens: Annotated[int, Meta(ge=2, le=256)] = 96
    prompts: str = "200:8192:16"


def panel(query: InterferenceQuery) -> dict[str, Any]:
    """The playback, and under ``measures`` the longest gaps of the streams with and without the prompts. Raises
    ConfigError."""
    chosen = machine(query.model, query.hardware)
    scenario = one_worker(chosen, "unified")
    prompts = read_prompts(query.prompts)
    data = cast(query.streams, query.tokens, prompts).play(scenario).to_json()
    alone = cast(query.streams, query.tokens, ()).play(scenario).to_json() if query.streams else None
    measures = _measures(data, alone)
    return {
        "machine": about(chosen),
        "play": data,
        "measures": measures,
        "formulas": _formulas(data, measures),
        "notes": _notes(data, measures, len(prompts)),
    }


def _measures(data: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    streams = requests_of_kind(data, "stream")
    prompts = requests_of_kind(data, "short", "long")
    gap = worst([request["longest_gap_ms"] for request in streams])
    quiet = worst([request["longest_gap_ms"] for request in alone["requests"]]) if alone else None
    slowest = max(prompts, key=lambda request: request["prefill_ms"], default=None)
    return {
        "gap_ms": gap,
        "gap_alone_ms": quiet,
        "factor": gap / quiet if gap and quiet else None,
        "stalled_ms": worst([request["stalled_ms"] for request in streams]),
        "tpot_ms": worst([request["tpot_ms"] for request in streams]),
        "ttft_short_ms": worst([request["ttft_ms"] for request in prompts if request["kind"] == "short"]),
        "ttft_long_ms": worst([request["ttft_ms"] for request in prompts if request["kind"] == "long"]),
        "slowest": slowest and {"name": slowest["name"], "prefill_ms": slowest["prefill_ms"]},
    }


def _formulas(data: dict[str, Any], measures: dict[str, Any]) -> list[Formula]:
    gap, quiet = measures["gap_ms"], measures["gap_alone_ms"]
    lines = []
    if measures["factor"] is not None:
        lines.append(
            formula(
                "interference factor",
                "longest gap with the prompts ÷ longest gap without",
                f"{milliseconds(gap)} ÷ {milliseconds(quiet)}",
                f"{significant(measures['factor'])} ×",
            )
        )
    for request in requests_of_kind(data, "short", "long")[:4]:
        lines.append(
            formula(
                f"time to first token of {request['name']}",
                "queue + prefill",
                f"{milliseconds(request['queue_ms'])} + {milliseconds(request['prefill_ms'])}",
                milliseconds(request["ttft_ms"]),
            )
        )
    return lines


def _notes(data: dict[str, Any], measures: dict[str, Any], num_prompts: int) -> list[str]:
    streams = requests_of_kind(data, "stream")
    if not streams:
        return ["Nobody is being answered: without running streams a prompt can disturb only the prompts behind it."]
    if not num_prompts:
        return ["No prompt disturbs the streams. Add one, and press play."]
    notes = []
    slowest = measures["slowest"]
    if measures["stalled_ms"]:
        notes.append(
            f"While prompts were computed, the streams stood still for {milliseconds(measures['stalled_ms'])} in all. "
            f"The longest gap between two tokens grew from {milliseconds(measures['gap_alone_ms'])} to "
            f"{milliseconds(measures['gap_ms'])}; the prefill of {slowest['name']} took "
            f"{milliseconds(slowest['prefill_ms'])}."
        )
    else:
        notes.append("The prompts came when no stream was running, so nobody had to wait for them.")
    waiting = [request for request in requests_of_kind(data, "short") if request["queue_ms"] > request["prefill_ms"]]
    if waiting:
        request = max(waiting, key=lambda each: each["queue_ms"])
        notes.append(
            f"A short prompt suffers too: {request['name']} waited {milliseconds(request['queue_ms'])} for its turn, "
            f"to be computed in {milliseconds(request['prefill_ms'])}."
        )
    return notes
