"""A small scenario encoded in the query of a URL, and the scenario that a panel simulates with them.

Owns the grammar "ARRIVAL_MS:PROMPT:OUTPUT,..." and the limits that keep a panel fast. What is simulated and how is
diptych.simulation's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from diptych.control.config import PresetName
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, Slo
from diptych.simulation.prepare import cache_config, prepare, scheduler_of
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import settings_from
from diptych.web.panels.machine import Machine
from diptych.web.playback import STREAM, Playback, play
from diptych.workload.spec import RequestSpec

MAX_PROMPTS = 24
MAX_ARRIVAL_MS = 5000.0
MAX_PROMPT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 256
MAX_STREAMS = 16
LONG_TOKENS = 1024
STREAM_PROMPT = 200


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request that a reader adds. Lengths in tokens."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int


def read_prompts(text: str) -> tuple[Prompt, ...]:
    """ "300:8192:32,350:128:32". Raises ConfigError naming the prompt, the value and the limit."""
    prompts = []
    for index, item in enumerate(text.split(",") if text else ()):
        parts = item.split(":")
        try:
            arrival, lengths = float(parts[0]), [int(part) for part in parts[1:]]
        except ValueError:
            lengths = []
        if len(lengths) != 2:
            raise ConfigError(
                f"prompts[{index}] is {item!r}; it must be ARRIVAL_MS:PROMPT_TOKENS:OUTPUT_TOKENS", param="prompts"
            )
        prompt, output = lengths
        for name, value, least, most in (
            ("arrival", arrival, 0, MAX_ARRIVAL_MS),
            ("prompt", prompt, 1, MAX_PROMPT_TOKENS),
            ("output", output, 1, MAX_OUTPUT_TOKENS),
        ):
            if not least <= value <= most:
                raise ConfigError(
                    f"the {name} of prompts[{index}] is {value:g}; it must be from {least} to {most:g}", param="prompts"
                )
        prompts.append(Prompt(arrival, prompt, output))
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(f"there are {len(prompts)} prompts; at most {MAX_PROMPTS}", param="prompts")
    return tuple(prompts)


@dataclass(frozen=True, slots=True)
class Cast:
    """Everybody of a scenario, in order of arrival: names for the page, and what they ask."""

    names: tuple[str, ...]
    specs: tuple[RequestSpec, ...]

    def play(self, scenario: Scenario) -> Playback:
        """Simulate it with these requests."""
        return play(replace(scenario, workload=list(self.specs)), self.names, [spec.arrival_ns for spec in self.specs])


def cast(streams: int, stream_tokens: int, prompts: Sequence[Prompt]) -> Cast:
    """``streams`` chats that begin at once and go on for ``stream_tokens`` tokens, and the prompts."""
    named: list[tuple[int, int, str, RequestSpec]] = []
    for index in range(streams):
        spec = RequestSpec(arrival_ns=0, prompt_tokens=STREAM_PROMPT, output_tokens=stream_tokens, kind=STREAM)
        named.append((spec.arrival_ns, len(named), f"stream {index + 1}", spec))
    counts = {"short": 0, "long": 0}
    for prompt in prompts:
        kind = "long" if prompt.prompt_tokens >= LONG_TOKENS else "short"
        counts[kind] += 1
        spec = RequestSpec(
            arrival_ns=round(prompt.arrival_ms * NS_PER_MS),
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=prompt.output_tokens,
            kind=kind,
        )
        named.append((spec.arrival_ns, len(named), f"{kind} {counts[kind]}", spec))
    named.sort(key=lambda request: request[:2])
    return Cast(tuple(request[2] for request in named), tuple(request[3] for request in named))


def scenario_of(chosen: Machine, **settings: Any) -> Scenario:
    """The scenario of a machine without a workload of its own. settings: as diptych.simulation.settings has them.
    Raises ConfigError."""
    return _scenario(msgspec.json.encode(_raw(chosen, settings)))


def one_worker(
    chosen: Machine, shape: PresetName, scheduler: Mapping[str, Any] | None = None, tpot_ms: float | None = None
) -> Scenario:
    """The scenario of one worker with these settings of its scheduler. (Quicker than ``scenario_of``: finding the cost
    model takes as long as a simulation.) Raises ConfigError."""
    settings = settings_from(_raw(chosen, {"shape": shape, "scheduler": dict(scheduler or {})}))
    config = scheduler_of(settings)
    base = scenario_of(chosen)
    slo = Slo(tpot_ns=None if tpot_ms is None else round(tpot_ms * NS_PER_MS))
    cache = cache_config(settings, config, chosen.choice)
    return replace(base, engine=replace(base.engine, scheduler=config, cache=cache, slo=slo))


def _raw(chosen: Machine, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": chosen.model.name,
        "hardware": chosen.hardware.name,
        "tensor_parallel": chosen.num_gpus,
        "weight_bits": chosen.weight_bits,
        "workload": {"num_requests": 1},
        **settings,
    }


@lru_cache(maxsize=128)
def _scenario(settings: bytes) -> Scenario:
    return prepare(settings_from(msgspec.json.decode(settings))).scenario


def requests_of_kind(data: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """Events of these kinds in a Playback's JSON."""
    return [request for request in data["requests"] if request["kind"] in kinds]


def worst(values: Sequence[float | None]) -> float | None:
    """The largest that is there."""
    known = [value for value in values if value is not None]
    return max(known) if known else None
