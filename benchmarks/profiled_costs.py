"""Cost models from published step-time profiles: whole steps that others measured, as a fitted law or as a table.

The profiles are DistServe's fits of OPT and Splitwise's measurements of BLOOM and Llama 2 (data/profiles/, written by
scripts/derive_profiles.py): what the reproductions of these papers price steps by. ``use_profiles`` makes them costs of
the settings of this process, by their names; ``diptych simulate`` and ``diptych plan`` do not know them.

Profiles are never mixed, and one device's numbers are never scaled to another. A step that mixes both phases was not
measured by the authors: the law used for it is named below.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.step import SchedulerOutput, StepFeatures
from diptych.simulation import prepare
from diptych.simulation.costs import cost_choice
from diptych.simulation.costs.cost_choice import CostChoice
from diptych.simulation.costs.cost_model import FRACTION_BITS, UNBOUNDED, DecodeLine
from diptych.simulation.costs.interpolation import Curve
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import weight_precision

FOLDER = Path(__file__).parent / "data" / "profiles"
NS_PER_MS = 1_000_000
ONE = 1 << FRACTION_BITS


@dataclass(frozen=True, slots=True)
class ProfileInfo:
    """What a profile describes, where it comes from and under which licence.

    kv_tokens: tokens of KV that fit beside the weights, by number of pipeline stages (empty: not published). Step
    times hold for one stage.
    """

    name: str
    hardware: str
    model: str
    tensor_parallel: int
    engine: str
    source: str
    licence: str
    changes: str
    kv_tokens: dict[int, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0


class StepLaw(Protocol):
    """What a step takes, in 2**-FRACTION_BITS nanoseconds."""

    def decode_line(self, num_seqs: int) -> tuple[int, int]:
        """(intercept, slope in context tokens) of a pure decode step."""
        ...

    def with_prefill(self, features: StepFeatures) -> int:
        """A step with at least one prompt token."""
        ...


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """A StepLaw by DistServe (Zhong et al., OSDI 2024): a prefill step of prompts of n_i tokens takes a + b*sum(n_i) +
    c*sum(n_i**2), a decode step of ``batch`` sequences a + b*sum(context) + c*batch, with other coefficients from
    ``threshold`` sequences on. All in 2**-FRACTION_BITS nanoseconds.

    A chunk after ``start`` tokens counts (start + n)**2 - start**2 squares. A step with both phases takes the prefill
    plus what the decodes add to their own intercept (not measured; the engines profiled never mixed).
    """

    prefill: tuple[int, int, int]
    decode_small: tuple[int, int, int]
    decode_large: tuple[int, int, int]
    threshold: int

    def decode_line(self, num_seqs: int) -> tuple[int, int]:
        base, per_context, per_seq = self.decode_small if num_seqs < self.threshold else self.decode_large
        return base + per_seq * num_seqs, per_context

    def with_prefill(self, features: StepFeatures) -> int:
        base, per_token, per_square = self.prefill
        tokens, seqs = features.prefill_tokens, features.decode_seqs
        squares = 2 * features.prefill_attention - tokens  # sum of (start + n)**2 - start**2, from the pairs
        total = base + per_token * tokens + per_square * squares
        if seqs:
            _, per_context, per_seq = self.decode_small if seqs < self.threshold else self.decode_large
            total += per_context * features.decode_context + per_seq * seqs
        return total


@dataclass(frozen=True, slots=True)
class TabledLaw:
    """A StepLaw by Splitwise's measurements (Patel et al., ISCA 2024): curves in nanoseconds, linear between measured
    points.

    prefill: by prompt tokens of the step. decode: by ``decode_axis`` sequences; the context does not count. A step with
    both phases takes ``mixed_factor`` times the prefill of all its tokens (each decode is one), as the authors'
    simulator has it, and never less than its decodes alone.
    """

    prefill: Curve
    decode: Curve
    mixed_factor: float

    def decode_line(self, num_seqs: int) -> tuple[int, int]:
        return round(self.decode(num_seqs) * ONE), 0

    def with_prefill(self, features: StepFeatures) -> int:
        seqs = features.decode_seqs
        if not seqs:
            return round(self.prefill(features.prefill_tokens) * ONE)
        both = self.mixed_factor * self.prefill(features.prefill_tokens + seqs)
        return round(max(both, self.decode(seqs)) * ONE)


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Measured power as a share of the devices' rated power.

    peak: of a run with one prompt, by its tokens (reached in its prefill). mean: of a run of prompts of 512 tokens
    and answers of 128, by batch size (mostly decode).
    """

    peak: Curve
    mean: Curve


class ProfiledCost:
    """The CostModel of one profile. Lines are made when they are first asked for, and kept."""

    def __init__(self, info: ProfileInfo, law: StepLaw, power: PowerProfile | None = None) -> None:
        self.name = info.name
        self.info = info
        self.law = law
        self.power = power
        self._line = cache(self._make_line)

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """The fitted line, which holds for every context."""
        return self._line(num_seqs)

    def step_ns(self, output: SchedulerOutput) -> int:
        features = output.features
        if not features.prefill_tokens:
            return self.decode_line(features.decode_seqs, 0).step_ns(features.decode_context)
        return max(1, self.law.with_prefill(features) >> FRACTION_BITS)

    def _make_line(self, num_seqs: int) -> DecodeLine:
        intercept, slope = self.law.decode_line(num_seqs)
        return DecodeLine(max(ONE, intercept), max(0, slope), UNBOUNDED)


def profile_names() -> tuple[str, ...]:
    """Every profile, sorted."""
    return tuple(sorted(name for file in _files() for name in json.loads(file.read_text("utf-8"))["profiles"]))


@cache
def profile_families() -> dict[str, tuple[str, ...]]:
    """Profiles of one model and engine on several devices, or cut in several ways, under what their names share: all
    but the device and tpN."""
    families: dict[str, tuple[str, ...]] = {}
    for name in profile_names():
        if parts := re.fullmatch(r"(.+?)-(?:a100-80|a100|h100)-tp\d+(.*)", name):
            family = parts[1] + parts[2]
            families[family] = (*families.get(family, ()), name)
    return families


def load_profile(name: str) -> ProfiledCost:
    """The profile of this name; ConfigError when there is none."""
    for file in _files():
        document = json.loads(file.read_text("utf-8"))
        if name in document["profiles"]:
            return parse_profile(name, document)
    raise ConfigError(f"profile is {name!r}; one of {', '.join(profile_names())}", param="profile")


def parse_profile(name: str, document: dict[str, Any]) -> ProfiledCost:
    """One profile of a document as scripts/derive_profiles.py writes it (times in milliseconds)."""
    entry = document["profiles"][name]
    info = msgspec.convert({**document, **entry, "name": name}, ProfileInfo, str_keys=True)
    if document["form"] == "fitted":
        return ProfiledCost(
            info, fitted_law(entry["prefill"], entry["decode_small"], entry["decode_large"], entry["threshold"])
        )
    law = TabledLaw(_curve(entry["prefill"], NS_PER_MS), _curve(entry["decode"], NS_PER_MS), entry["mixed_factor"])
    power = PowerProfile(_curve(entry["peak_power"]), _curve(entry["mean_power"])) if "peak_power" in entry else None
    return ProfiledCost(info, law, power)


Coefficients = tuple[float, float, float]


def fitted_law(
    prefill: Coefficients, decode_small: Coefficients, decode_large: Coefficients, threshold: int
) -> FittedLaw:
    """DistServe's law from coefficients in milliseconds: of a prefill (1, tokens, squares), of a decode (1, context,
    sequences)."""
    scaled = [
        tuple(round(value * NS_PER_MS * ONE) for value in coefficients)
        for coefficients in (prefill, decode_small, decode_large)
    ]
    (p0, p1, p2), (s0, s1, s2), (l0, l1, l2) = scaled
    return FittedLaw((p0, p1, p2), (s0, s1, s2), (l0, l1, l2), threshold)


def _curve(points: dict[str, list[float]], scale: float = 1.0) -> Curve:
    return Curve(tuple(points["knots"]), tuple(value * scale for value in points["values"]))


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def use_profiles() -> None:
    """Take the names of profiles, and of their families, as ``cost`` of settings in this process. Call it while the
    main module is imported, so that the processes of a search do, too."""
    prepare.choose_cost = choose_cost


def choose_cost(
    name: str,
    *,
    model: str | None,
    hardware: str | Mapping[str, Any] | None,
    parallelism: Parallelism = ONE_DEVICE,
    weight_bits: int | None = None,
    kv_bits: int = 16,
    engine: str | None = None,
    **more: Any,
) -> CostChoice:
    """The profile called ``name``, or the one of a family that is of this device and its sharing of the model; for any
    other name see cost_choice.choose_cost. Raises ConfigError where the profile is not of what is asked for."""
    members = profile_families().get(name, (name,) if name in profile_names() else ())
    if not members or model is None or hardware is None:
        split = {"weight_bits": weight_bits, "kv_bits": kv_bits, "parallelism": parallelism}
        return cost_choice.choose_cost(name, model=model, hardware=hardware, engine=engine, **split, **more)
    if engine is not None:
        raise ConfigError(f"engine is {engine!r}; it has no effect on {name}, which is of whole steps", param="engine")
    device, spec = load_hardware(hardware), load_model(model)
    dimensions, is_16_bits = cost_choice.dimensions, kv_bits == 16 and weight_bits in (None, 16)
    for profile in map(load_profile, members):
        info = profile.info
        is_of_it = Parallelism(info.tensor_parallel) == parallelism and load_hardware(info.hardware).name == device.name
        if is_16_bits and is_of_it and dimensions(load_model(info.model)) == dimensions(spec):
            words = f"published profile of {info.model} on {info.tensor_parallel} x {info.hardware} ({info.engine})"
            return CostChoice(profile, words, (spec, device), spec.max_context, weight_precision(device, 16, None))
    wanted = f"{spec.name} on {parallelism.devices} x {device.name}"
    raise ConfigError(f"cost is {name!r}, which does not hold {wanted}; its profiles are {members}", param="cost")
