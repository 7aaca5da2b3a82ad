"""The grammars of option values: durations, objectives, ramps, ranges. Defaults are elsewhere."""

import re

from diptych.bench.objectives import LatencyObjectives
from diptych.bench.session import Ramp
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S

OBJECTIVES = ("ttft", "tpot", "itl", "e2e")
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str, param: str) -> float:
    """``2s``, ``50ms``, ``5m``; seconds without a unit. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise ConfigError(f"{param} is {text!r}; expected a time such as 2s, 50ms or 5m", param=param)
    return float(match[1]) * UNITS[match[2]]


def slo(text: str | None) -> LatencyObjectives:
    """``ttft=2s,tpot=50ms,itl=60ms,e2e=20s``, any of them. Raises ConfigError."""
    found: dict[str, int] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.strip().partition("=")
        if name not in OBJECTIVES:
            raise ConfigError(f"slo is {text!r}; {name!r} is none of {', '.join(OBJECTIVES)}", param="slo")
        if not equals or name in found:
            raise ConfigError(f"slo is {text!r}; expected ttft=2s,tpot=50ms, each once", param="slo")
        if value.strip()[-1:].isdigit():
            raise ConfigError(f"slo is {text!r}; {name} needs a unit, such as {value.strip()}ms", param="slo")
        found[name] = max(1, round(duration_s(value, f"slo: {name}") * NS_PER_S))
    return LatencyObjectives(*(found.get(name) for name in OBJECTIVES))


def slo_of(ttft_ms: float | None, tpot_ms: float | None) -> LatencyObjectives:
    """Objectives in milliseconds, as files of settings have them."""
    return LatencyObjectives(*(None if value is None else round(value * NS_PER_MS) for value in (ttft_ms, tpot_ms)))


def ramp(text: str) -> Ramp:
    """``1:20:60s``: from 1 to 20 requests per second in 60 seconds. Raises ConfigError."""
    parts = text.split(":")
    try:
        start, end = float(parts[0]), float(parts[1])
        over = parts[2]
    except (ValueError, IndexError):
        raise ConfigError(f"ramp is {text!r}; expected FROM:TO:TIME, such as 1:20:60s", param="ramp") from None
    return Ramp(start=start, end=end, over_s=duration_s(over, "ramp"))


def id_range(text: str) -> tuple[int, int]:
    """``100:1000``: token ids from 100 to 999. Raises ConfigError."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ConfigError(f"token_ids is {text!r}; expected LOW:HIGH, such as 100:1000", param="token_ids")
    return int(low), int(high)


def rates(text: str) -> list[float]:
    """``1,2,4``. Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ConfigError(f"rates is {text!r}; expected requests per second, such as 1,2,4", param="rates")
    return found


def in_words(objectives: LatencyObjectives) -> str:
    """Objectives as they are typed; empty when there are none."""
    return ",".join(f"{name}={time(value / NS_PER_MS)}" for name, value in objectives.items())


def time(ms: float) -> str:
    """``2s`` or ``50ms``."""
    return f"{ms / 1000:g}s" if ms >= 1000 else f"{ms:g}ms"
