"""A diagnosis as JSON and as tables of words: what the terminal, the report and the live page show."""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.control.slo import NS_PER_MS
from diptych.diagnosis.accounts import words
from diptych.diagnosis.attribution import Waterfall
from diptych.diagnosis.diagnosis import Cause, Diagnosis
from diptych.diagnosis.engine_advice import Advice
from diptych.diagnosis.objectives_presets import objectives_in_words
from diptych.diagnosis.observation import SIGNALS
from diptych.diagnosis.predicted_gain import Gain
from diptych.report.text import Table

LATENCIES = {"ttft": "TTFT", "itl": "ITL"}


def as_json(diagnosis: Diagnosis, advice: Sequence[Advice]) -> dict[str, Any]:
    """The output of ``--json``: seconds, shares 0 to 1; null: not known."""
    observation, slo = diagnosis.observation, diagnosis.slo
    return {
        "engine": observation.engine,
        "version": observation.version,
        "source": observation.source,
        "window_s": observation.window_s,
        "verdict": diagnosis.verdict,
        "sentence": diagnosis.sentence,
        "objectives": {
            "ttft_ms": None if slo.ttft_ns is None else slo.ttft_ns / NS_PER_MS,
            "tpot_ms": None if slo.tpot_ns is None else slo.tpot_ns / NS_PER_MS,
        },
        "num_requests": diagnosis.num_requests,
        "num_unserved": observation.num_unserved,
        "miss_share": diagnosis.miss_share,
        "unavoidable_seconds": diagnosis.unavoidable_s,
        "causes": [
            _cause(cause, [given for given in advice if given.cause == cause.name]) for cause in diagnosis.causes
        ],
        "attribution": {waterfall.latency: _waterfall(waterfall) for waterfall in diagnosis.waterfalls},
        "signals": dict(sorted(observation.signals.items())),
        "missing": [{"choices": list(gap.choices), "needed": gap.needed} for gap in diagnosis.missing],
        "unknown": list(observation.unknown),
        "notes": list(observation.notes),
    }


def _cause(cause: Cause, advice: Sequence[Advice]) -> dict[str, Any]:
    row = cause.row
    return {
        "cause": cause.name,
        "phase": row.phase,
        "seconds_per_request": cause.seconds,
        "seconds_interval": list(cause.seconds_interval),
        "share_of_misses": cause.share_of_misses,
        "share_interval": None if cause.share_interval is None else list(cause.share_interval),
        "ttft_seconds": cause.ttft_s,
        "decode_seconds": cause.decode_s,
        "symptom": row.symptom,
        "evidence": row.evidence,
        "counter_evidence": row.counter_evidence,
        "signals": dict(cause.signals),
        "pressure_point": row.pressure_point,
        "inspect": row.inspect,
        "action": row.action,
        "advice": [advice_json(given) for given in advice],
    }


def advice_json(given: Advice) -> dict[str, Any]:
    """One advice."""
    return {
        "setting": given.setting.name,
        "option": given.option,
        "words": given.setting.words,
        "gain": None if given.gain is None else _gain(given.gain),
        "costs": given.setting.costs,
        "refuted_by": given.setting.refuted_by,
        "can_change_live": given.setting.can_change_live,
        "takes_hardware": given.setting.takes_hardware,
        "next_step": given.next_step or None,
    }


def _gain(gain: Gain) -> dict[str, Any]:
    return {
        "ttft_seconds": gain.ttft_s,
        "ttft_interval": list(gain.ttft_interval),
        "decode_seconds": gain.decode_s,
        "decode_interval": list(gain.decode_interval),
        "attainment_before": gain.attainment_before,
        "attainment_after": gain.attainment_after,
        "twin_error": gain.twin_error,
    }


def _waterfall(waterfall: Waterfall) -> Mapping[str, Any]:
    return {
        "mean_s": waterfall.measured_s,
        "tail_s": waterfall.tail_s,
        "residual_s": waterfall.residual_s,
        "count": waterfall.count,
        "exact": waterfall.is_exact,
        "parts": [
            {
                "account": part.account,
                "words": words(part.account),
                "seconds": part.seconds,
                "interval": [part.low_s, part.high_s],
                "tail_seconds": part.tail_s,
            }
            for part in waterfall.parts
        ],
    }


def cause_table(diagnosis: Diagnosis) -> Table:
    """The causes, what each costs, and what was seen of it."""
    rows = tuple(
        (
            cause.name,
            cause.row.phase,
            _milliseconds(cause.seconds),
            f"{_milliseconds(cause.seconds_interval[0])} to {_milliseconds(cause.seconds_interval[1])}",
            "-" if cause.share_of_misses is None else f"{cause.share_of_misses:.0%}",
        )
        for cause in diagnosis.causes
    )
    return Table("Causes", ("cause", "phase", "ms per request", "interval", "of the misses"), rows)


def waterfall_table(waterfall: Waterfall) -> Table:
    """The accounts of a latency; the last rows are the residual and the mean as measured."""
    name, total = LATENCIES[waterfall.latency], waterfall.measured_s
    rows = [
        (
            f"{part.account}: {words(part.account)}",
            _milliseconds(part.seconds),
            f"{part.seconds / total:.0%}" if total else "-",
            "-" if part.tail_s is None else _milliseconds(part.tail_s),
        )
        for part in waterfall.parts
    ]
    if not waterfall.is_exact:
        rows.append(("residual", _milliseconds(waterfall.residual_s), "", "-"))
    tail = "-" if waterfall.tail_s is None else _milliseconds(waterfall.tail_s)
    rows.append(("measured", _milliseconds(total), "100%", tail))
    how = "exact" if waterfall.is_exact else "estimated"
    title = f"{name} by cause ({how}, {waterfall.count:,} {'requests' if waterfall.is_exact else 'values'})"
    return Table(title, ("account", "mean ms", "share", "slowest 5 %, ms"), tuple(rows))


def advice_table(advice: Sequence[Advice]) -> Table:
    """What to change, and what the twin says of it."""
    rows = tuple(
        (
            given.option,
            given.cause,
            "-" if given.gain is None else _signed(given.gain.ttft_s, given.gain.ttft_interval),
            "-" if given.gain is None else _signed(given.gain.decode_s, given.gain.decode_interval),
            "-" if given.gain is None else _attainment(given.gain),
        )
        for given in advice
    )
    columns = ("setting", "against", "TTFT saved, ms", "decode saved, ms", "objectives met")
    return Table("Advice (saved per request, predicted by simulation)", columns, rows)


def sentences(diagnosis: Diagnosis, advice: Sequence[Advice]) -> list[str]:
    """What the tables do not say: evidence, costs of the advice, what is missing."""
    said = []
    for cause in diagnosis.causes[:3]:
        seen = ", ".join(f"{SIGNALS[name]} {value:.3g}" for name, value in cause.signals.items())
        said.append(
            f"{cause.name}: {cause.row.evidence}{f' ({seen})' if seen else ''}; not if {cause.row.counter_evidence}"
        )
    for given in advice[:3]:
        said.append(f"{given.option}: costs {given.setting.costs}; refuted if {given.setting.refuted_by}")
    if any(given.next_step for given in advice):
        said.append("whether another shape of the fleet is better: diptych plan")
    said += [gap.sentence() for gap in diagnosis.missing]
    if diagnosis.observation.unknown:
        said.append(f"{len(diagnosis.observation.unknown)} exported names are not known here (--json lists them)")
    if diagnosis.verdict == "no objective":
        said.append("no objective: give --slo ttft=300ms,tpot=50ms, or a preset such as --slo mlperf-llama3.1-8b")
    return said + list(diagnosis.observation.notes)


def headline(diagnosis: Diagnosis) -> str:
    """One line above the tables."""
    observation = diagnosis.observation
    version = f" {observation.version}" if observation.version else ""
    missed = "" if diagnosis.miss_share is None else f", {diagnosis.miss_share:.1%} missed their objectives"
    return (
        f"{observation.engine}{version} at {observation.source}: {diagnosis.num_requests:,} requests in "
        f"{observation.window_s:.1f} s{missed} (objectives: {objectives_in_words(diagnosis.slo)})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _signed(seconds: float, interval: tuple[float, float]) -> str:
    return f"{seconds * 1000:+,.0f} ({interval[0] * 1000:+,.0f} to {interval[1] * 1000:+,.0f})"


def _attainment(gain: Gain) -> str:
    if gain.attainment_before is None or gain.attainment_after is None:
        return "-"
    return f"{gain.attainment_before:.0%} to {gain.attainment_after:.0%}"
