"""Advice: for a cause one setting of this engine, what it would gain, what it costs, and what would refute it.

The settings of each engine are data (engine_settings.py): a cause has several, and the twin says which gains most. A
setting that the twin cannot simulate (cores, the client's prompts) has no predicted gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.slo import NS_PER_MS
from diptych.diagnosis.diagnosis import Diagnosis
from diptych.diagnosis.engine_settings import CATALOGUE, Setting
from diptych.diagnosis.predicted_gain import Gain, Present
from diptych.diagnosis.twin_model import TwinModel, twin_of

MOST_SIMULATED = 6  # changes of one diagnosis
NUM_CAUSES = 3  # for which there is advice
SHAPE_CAUSES = ("capacity", "too_few_prefill_workers", "too_few_decode_workers", "prefill_interference", "slow_model")
PLAN = "diptych plan"
NOTHING = 0.005  # of a request's time: a gain below is none


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting for a cause. option: with this server's values. gain: None where it is not predicted. next_step: the
    command that answers what comes after it ("": none)."""

    cause: str
    setting: Setting
    option: str
    gain: Gain | None
    next_step: str = ""


def advise(diagnosis: Diagnosis) -> tuple[Advice, ...]:
    """Advice for the first causes of a diagnosis: of each cause, what gains most first; what loses, last."""
    catalogue = CATALOGUE.get(diagnosis.observation.engine, {})
    names = [cause.name for cause in diagnosis.causes[:NUM_CAUSES]]
    wanted = [(cause, setting) for cause in names for setting in catalogue.get(cause, ())]
    if not wanted:
        return ()
    model = twin_of(diagnosis.observation)
    present = Present.of(model, diagnosis.observation) if model is not None else None
    found: list[Advice] = []
    num_simulated = 0
    for cause, setting in wanted:
        gain, changed = None, None
        if setting.change is not None and present is not None:
            changed = setting.change(present.model)
            if changed is None:  # it is so already
                continue
            if num_simulated < MOST_SIMULATED:
                gain = present.gain_of(changed)
                num_simulated += 1
        if gain is not None and abs(gain.total_s) < NOTHING * sum(present.measured if present else ()):
            continue
        values = {"slo": ""}
        if changed is not None and model is not None:
            values = {**_values(changed), "slo": _slo_option(model, changed)}
        option = setting.option.format_map(_Values(values)).strip()
        if not option or any(advice.option == option for advice in found):
            continue
        found.append(Advice(cause, setting, option, gain, PLAN if cause in SHAPE_CAUSES else ""))
    return tuple(_ranked(found, names))


def _ranked(found: Sequence[Advice], causes: Sequence[str]) -> list[Advice]:
    """Rank advice by cause, then what needs no hardware, then by what is gained; what would make things worse comes
    last."""

    def place(advice: Advice) -> tuple[bool, int, bool, float]:
        gain, takes_hardware = advice.gain, advice.setting.takes_hardware
        if gain is None:
            return False, causes.index(advice.cause), takes_hardware, 0.0
        is_worse = gain.total_s < 0
        before, after = gain.attainment_before, gain.attainment_after
        if before is not None and after is not None and before != after:
            is_worse = after < before
        return is_worse, causes.index(advice.cause), takes_hardware, -gain.total_s

    return sorted(found, key=place)


class _Values(dict[str, str]):
    """Values that the text of an option may name; N for one that is not known."""

    def __missing__(self, name: str) -> str:
        return "N"


def _slo_option(present: TwinModel, changed: TwinModel) -> str:
    """What tells the server its objectives; empty where it knows them."""
    slo = changed.engines[0].slo
    if slo == present.engines[0].slo:
        return ""
    given = (("ttft", slo.ttft_ns), ("tpot", slo.tpot_ns))
    return "--slo " + ",".join(f"{name}={value / NS_PER_MS:g}ms" for name, value in given if value)


def _values(model: TwinModel) -> dict[str, str]:
    scheduler, cache = model.engines[0].scheduler, model.engines[0].cache
    values = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_batched_tokens": scheduler.budget.max_batched_tokens,
        "quarter": scheduler.caps.long_prefill_threshold or scheduler.budget.max_batched_tokens // 4,
        "step_target_ms": scheduler.budget.target_ns / 1e6,
        "num_workers": len(model.roles),
        "num_prefill": model.roles.count("prefill"),
        "num_decode": model.roles.count("decode"),
        "kv_blocks": cache.num_blocks,
    }
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
