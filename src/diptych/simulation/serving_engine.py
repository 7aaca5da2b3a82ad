"""Serving engines as data: what an engine's host adds to the time of the devices, and to the wait for a first token.

The figures lie in catalogue/engines.toml beside their sources. The kernels of an engine are the business of the cost
models; a layer table says of which engine its kernels are.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from diptych.control.errors import ConfigError
from diptych.simulation.costs.interpolation import Curve


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What a client of the HTTP server waits besides the worker: nanoseconds from sending a request to the worker's
    notice of it and from a first token to the client, together; a part for each request and one per prompt token."""

    request_ns: float = 0.0
    prompt_token_ns: float = 0.0

    def delay_ns(self, prompt_tokens: int) -> int:
        """Time to add to the time to first token that a worker gives, in nanoseconds."""
        return round(self.request_ns + self.prompt_token_ns * prompt_tokens)


NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """An engine of one generation. step_us: what the host adds to a step, in microseconds, by its sequences, for each
    number of devices that was measured (empty: as the entry of the hardware says). sources: of each figure; a key that
    ends in "assumed" says that nothing was measured."""

    name: str
    step_us: Mapping[int, Curve]
    front_end: FrontEnd
    sources: Mapping[str, str] = field(default_factory=dict)

    def host_us(self, num_devices: int) -> Curve | None:
        """The curve of the most devices that are not more than ``num_devices``; None: the hardware's entry says it."""
        if not self.step_us:
            return None
        known = [size for size in self.step_us if size <= num_devices]
        return self.step_us[max(known) if known else min(self.step_us)]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What of it was not measured."""
        return tuple(
            f"{key.removesuffix('_assumed').replace('_', ' ')} of {self.name}: {text}"
            for key, text in self.sources.items()
            if key.endswith("assumed")
        )


def load_engine(name: str) -> ServingEngine:
    """The engine of the catalogue with this name. Raises ConfigError naming the known ones."""
    engines = _catalogue()
    if name not in engines:
        raise ConfigError(f"engine is {name!r}; one of {', '.join(engines)}", param="engine")
    return engines[name]


def engine_names() -> tuple[str, ...]:
    """The engines of the catalogue, in its order."""
    return tuple(_catalogue())


@cache
def _catalogue() -> Mapping[str, ServingEngine]:
    text = (resources.files("diptych.simulation.catalogue") / "engines.toml").read_text()
    return {name: _engine(name, raw) for name, raw in tomllib.loads(text).items()}


def _engine(name: str, raw: Mapping[str, Any]) -> ServingEngine:
    curves = {
        int(devices): Curve(tuple(map(float, curve["knots"])), tuple(map(float, curve["us"])))
        for devices, curve in raw.get("step_us", {}).items()
    }
    return ServingEngine(name, curves, FrontEnd(NS_PER_MS * raw["request_ms"]), raw["sources"])
