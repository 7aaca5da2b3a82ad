"""Objectives by name, and the text of ``--slo``.

The presets are the latency constraints of MLPerf Inference's server and interactive scenarios for language models
(v5.0 and v5.1 rules: 99th percentile of the time to first token and of the time per output token).
"""

from collections.abc import Mapping
from typing import Final

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, Slo

PRESETS: Final[Mapping[str, Slo]] = {
    "mlperf-llama2-70b": Slo(2000 * NS_PER_MS, 200 * NS_PER_MS),
    "mlperf-llama2-70b-interactive": Slo(450 * NS_PER_MS, 40 * NS_PER_MS),
    "mlperf-llama3.1-8b": Slo(2000 * NS_PER_MS, 100 * NS_PER_MS),
    "mlperf-llama3.1-8b-interactive": Slo(500 * NS_PER_MS, 30 * NS_PER_MS),
    "mlperf-llama3.1-405b": Slo(6000 * NS_PER_MS, 175 * NS_PER_MS),
}
UNITS = {"us": 1e3, "ms": 1e6, "s": 1e9}


def parse_objectives(text: str) -> Slo:
    """The objectives of ``ttft=300ms,tpot=50ms`` (either may be left out; plain numbers are milliseconds), or a preset
    by its name. Raises ConfigError."""
    if text in PRESETS:
        return PRESETS[text]
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        name = {"itl": "tpot"}.get(name, name)
        if not equals or name not in ("ttft", "tpot"):
            known = ", ".join(PRESETS)
            message = f"slo is {text!r}; expected ttft=300ms,tpot=50ms, or one of {known}"
            raise ConfigError(message, param="slo")
        found[f"{name}_ns"] = _nanoseconds(value.strip(), text)
    return Slo(**found)


def _nanoseconds(value: str, text: str) -> int:
    unit = value.lstrip("0123456789.")
    try:
        nanoseconds = int(float(value[: len(value) - len(unit)]) * UNITS[unit.strip() or "ms"])
    except (KeyError, ValueError, OverflowError):
        message = f"slo is {text!r}; {value!r} is no time such as 300ms, 0.3s or 300"
        raise ConfigError(message, param="slo") from None
    if nanoseconds <= 0:
        raise ConfigError(f"slo is {text!r}; {value!r} must be more than 0", param="slo")
    return nanoseconds


def objectives_in_words(slo: Slo) -> str:
    """Objectives in words, such as "TTFT 300 ms, TPOT 50 ms"; "none" without any."""
    parts = (("TTFT", slo.ttft_ns), ("TPOT", slo.tpot_ns))
    return ", ".join(f"{name} {value / NS_PER_MS:g} ms" for name, value in parts if value) or "none"
