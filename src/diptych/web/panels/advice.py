"""Which shape to take: from measured candidates to a recommendation with its reasons and the command.

Owns the words; the rule is that of ``diptych plan`` (advisor/layout_preference.py).
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from diptych.advisor.device_layout import LayoutName
from diptych.advisor.evaluation import TARGET
from diptych.advisor.layout_preference import ROOM, TIE, LayoutOffer, preferred
from diptych.web.panels.formula import milliseconds, percent, significant
from diptych.web.panels.machine import Machine

LAYOUTS: tuple[LayoutName, ...] = ("unified", "chunked", "split")


class AdvisedShape(msgspec.Struct, frozen=True, kw_only=True):
    """One shape at the asked rate. capacity_rps: the highest rate found at which 90 % of the requests meet their
    objectives (0: none was found). late_share, slow_share: of the answers, those that missed TTFT, and TPOT."""

    shape: LayoutName
    words: str
    workers: int
    prefill: int
    decode: int
    attainment: float
    goodput_rps: float
    late_share: float
    slow_share: float
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    itl_p99_ms: float | None
    usd_per_hour: float
    usd_per_thousand_good: float | None
    busy: dict[str, float | None]
    capacity_rps: float = 0.0
    holds_more: bool = False  # the search ended there


def recommend(
    found: Sequence[AdvisedShape], rate: float, gpus: int, chosen: Machine, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """``shape``, ``title``, ``reasons``, ``serve`` (the launch command) and ``simulate`` (to check it further)."""
    best = best_of(found, rate)
    reasons = [_why(best, found)]
    reasons += [_against(shape, best, asked) for shape in found if shape is not best]
    if best.shape != "split" and all(shape.shape != "split" for shape in found):
        reasons.append(
            f"Two pools need two workers at least, and here is room for one: a worker of {chosen.model.name} takes "
            f"{chosen.num_gpus} of {gpus}."
        )
    holds = best.attainment >= TARGET
    equals = tied(best, found, rate)
    title = f"Take {best.words}."
    if equals:
        title = (
            f"A tie with {' and '.join(shape.words for shape in equals)} at this rate. Take the simpler: {best.words}."
        )
    if not holds:
        title = f"Nothing holds {significant(rate)} requests/s here; {best.words} comes closest."
    if not holds and best.capacity_rps:
        workers = -(-rate * best.workers // best.capacity_rps)
        reasons.append(
            f"It holds {significant(best.capacity_rps)} requests/s, so about {workers * chosen.num_gpus:.0f} GPUs in "
            "the same proportion would hold this load."
        )
    if not holds and not best.capacity_rps:
        reasons.append(
            "No rate was found at which 90 % meet these objectives: they are too tight for this model on this device, "
            "or the prompts are too long for them."
        )
    return {
        "shape": best.shape,
        "holds": holds,
        "title": title,
        "reasons": reasons,
        "serve": serve_command(best, chosen, asked),
        "serve_note": _serve_note(chosen),
        "simulate": simulate_command(best, chosen, asked),
    }


def best_of(found: Sequence[AdvisedShape], rate: float) -> AdvisedShape:
    """The one to take, by the rule of ``diptych plan``."""
    offers = [
        LayoutOffer(
            shape.shape,
            shape.attainment,
            worth=shape.capacity_rps,
            headroom=shape.capacity_rps / rate,
        )
        for shape in found
    ]
    return found[preferred(offers, TARGET)]


def tied(best: AdvisedShape, found: Sequence[AdvisedShape], rate: float) -> list[AdvisedShape]:
    """The shapes that the rule does not tell from ``best`` but by being less simple: all hold the load, and either all
    hold it at ease or carry nearly the same rate."""
    if best.attainment < TARGET:
        return []
    others = [shape for shape in found if shape is not best and shape.attainment >= TARGET]
    if best.capacity_rps >= ROOM * rate:
        return [shape for shape in others if shape.capacity_rps >= ROOM * rate]
    return [shape for shape in others if abs(shape.capacity_rps - best.capacity_rps) <= TIE * best.capacity_rps]


def _why(best: AdvisedShape, found: Sequence[AdvisedShape]) -> str:
    others = [shape for shape in found if shape is not best]
    text = (
        f"At the asked rate {percent(best.attainment)} of the requests meet both objectives: TTFT p90 "
        f"{milliseconds(best.ttft_ms['p90'])}, TPOT p90 {milliseconds(best.tpot_ms['p90'])}."
    )
    if best.capacity_rps and others:
        second = max(others, key=lambda shape: shape.capacity_rps)
        if best.holds_more:
            text += f" It holds more than {_rate(best)}, far above what is asked."
        elif second.capacity_rps > best.capacity_rps:
            text += (
                f" It holds up to {_rate(best)}. {second.words} would hold up to {_rate(second)}, which is not asked."
            )
        elif second.capacity_rps < best.capacity_rps / (1 + TIE) and second.capacity_rps:
            factor = significant(best.capacity_rps / second.capacity_rps)
            text += f" It holds up to {_rate(best)}, {factor} × as many as {second.words}."
        else:
            text += f" It holds up to {_rate(best)}."
    return text


def _rate(shape: AdvisedShape) -> str:
    return f"{significant(shape.capacity_rps)} requests/s"


def _against(shape: AdvisedShape, best: AdvisedShape, asked: Mapping[str, Any]) -> str:
    missed = []
    if shape.late_share > 0.02:
        missed.append(
            f"{percent(shape.late_share)} of the first tokens are later than {milliseconds(asked['ttft_ms'])}"
        )
    if shape.slow_share > 0.02:
        missed.append(
            f"{percent(shape.slow_share)} of the answers are slower than {milliseconds(asked['tpot_ms'])} a token"
        )
    name = shape.words[0].upper() + shape.words[1:]
    if not missed:
        return (
            f"{name}: {percent(shape.attainment)} of the requests meet their objectives; it holds "
            f"{'more than' if shape.holds_more else 'up to'} {_rate(shape)}."
        )
    if shape.shape == "split":
        pool = "prefill" if shape.late_share > shape.slow_share else "decode"
        cause = f"its {pool} workers have too much to do"
    elif shape.shape == "unified":
        cause = "prompts run whole, and running streams wait for them"
    else:
        cause = "prompts and streams share each step, so one of them gives way"
    holds = f"it holds up to {_rate(shape)}" if shape.capacity_rps else "no rate was found that it holds"
    return f"{name}: {' and '.join(missed)} ({cause}); {holds}."


def serve_command(best: AdvisedShape, chosen: Machine, asked: Mapping[str, Any]) -> str:
    """How to start that shape, with these objectives for requests that name none."""
    command = ["diptych", "serve", "--model", f"./{chosen.model.name}"]
    if best.shape == "split":
        command += ["--prefill", str(best.prefill), "--decode", str(best.decode)]
    else:
        command += ["--shape", best.shape]
        if best.workers > 1:
            command += ["--both", str(best.workers)]
    for name in ("ttft", "tpot"):
        command += [f"--{name}-slo-ms", f"{asked[f'{name}_ms']:g}"]
    return shlex.join(command)


def _serve_note(chosen: Machine) -> str:
    note = (
        f"./{chosen.model.name} stands for the directory of the model, as Hugging Face has it. The objectives are for "
        "requests that name none of their own (ttft_slo_ms, tpot_slo_ms). Without --model, a small bundled model is "
        "served, in the same shape."
    )
    if chosen.num_gpus > 1:
        note += (
            f" Here a worker spans {chosen.num_gpus} GPUs. `diptych serve` runs each worker on one GPU, so this shape "
            "can be simulated, but not yet served, with this model."
        )
    if chosen.weight_bits != 16:
        note += (
            f" The simulation has weights of {chosen.weight_bits} bits; `diptych serve` computes with 16 on a GPU, and "
            "quantises weights (--quantize) on a CPU only."
        )
    return note


def simulate_command(best: AdvisedShape, chosen: Machine, asked: Mapping[str, Any]) -> str:
    """The same with more requests, and with a report."""
    command = ["diptych", "simulate", "--model", chosen.model.name, "--hardware", chosen.hardware.name]
    if chosen.num_gpus > 1:
        command += ["--tensor-parallel", str(chosen.num_gpus)]
    if chosen.weight_bits != 16:
        command += ["--weight-bits", str(chosen.weight_bits)]
    command += ["--shape", "unified" if best.shape == "unified" else "chunked"]
    if best.shape == "split":
        command += ["--prefill", str(best.prefill), "--decode", str(best.decode), "--link", asked["link"]]
    elif best.workers > 1:
        command += ["--replicas", str(best.workers)]
    command += ["--routing", "kv_aware", "--rate", f"{asked['rate']:g}", "--num-requests", "2000"]
    for part in ("prompt", "output"):
        path = f"workload.lengths.{part}"
        for name, value in (("kind", "lognormal"), ("mean", asked[part]), ("sigma", 0.6), ("max", 4 * asked[part])):
            command += ["--set", f"{path}.{name}={value}"]
    for name in ("ttft_ms", "tpot_ms"):
        command += ["--set", f"workload.slo.{name}={asked[name]:g}"]
    return shlex.join([*command, "--report", "report.html"])
