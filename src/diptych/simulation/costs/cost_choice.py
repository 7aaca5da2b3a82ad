"""Which cost model prices a model on a device: the one asked for, or the best there is, and a description of it.

Owns the order of preference of ``auto``: measured layers of this very model and device, then tables of measured
operators, then the roofline. Must never mix two of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError
from diptych.simulation.costs.aiconfigurator import AIConfiguratorCost
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.fitted import Calibration, read_calibration
from diptych.simulation.costs.layer_tables import LayerTableCost, TableInfo, layer_table_names, load_layer_table
from diptych.simulation.costs.operator_tables import operator_table_cost
from diptych.simulation.costs.profiled import ProfileInfo, load_profile, profile_names
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import Hardware, load_hardware
from diptych.simulation.models import ModelSpec, load_model
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import QuantizeName, WeightPrecision, weight_precision

COSTS = ("auto", "tables", "operators", "roofline", "aiconfigurator")


@dataclass(frozen=True, slots=True)
class CostChoice:
    """A cost model, one sentence about it, and what it is of. weights: None where a calibration has measured them.
    assumptions: what of it was not measured, in sentences."""

    cost: CostModel
    words: str
    source: Calibration | tuple[ModelSpec, Hardware]
    max_model_len: int
    weights: WeightPrecision | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware | None:
        """The device, if it is one of the catalogue."""
        return None if isinstance(self.source, Calibration) else self.source[1]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be priced."""

    model: ModelSpec
    hardware: Hardware
    parallelism: Parallelism
    weights: WeightPrecision
    kv_bits: int

    @property
    def is_16_bits(self) -> bool:
        """Weights and KV, as most measurements are."""
        return self.weights.bits == self.kv_bits == 16 and self.weights.experts is None

    def __str__(self) -> str:
        bits = "" if self.is_16_bits else f" (weights {self.weights.name}, KV {self.kv_bits} bits)"
        split = "" if self.parallelism.is_tensor_only else f" ({self.parallelism})"
        return f"{self.model.name} on {self.parallelism.devices} x {self.hardware.name}{split}{bits}"


def choose_cost(
    name: str,
    *,
    model: str | None,
    hardware: str | Mapping[str, Any] | None,
    parallelism: Parallelism = ONE_DEVICE,
    weight_bits: int | None = None,
    kv_bits: int = 16,
    quantize: QuantizeName | None = None,
) -> CostChoice:
    """The cost model called ``name``: one of COSTS, a layer table or a profile of the catalogue by its name, or the
    path of a file of ``diptych calibrate``.

    weight_bits, quantize: see weight_precision (None: what the checkpoint has). A calibration has its own weights:
    ``quantize`` may only agree with them. Raises ConfigError when the cost model does not exist for the model and the
    device, or when one of these is not named.
    """
    if name not in COSTS and name not in layer_table_names() and name not in profile_names():
        return _calibrated(name, quantize)
    if model is None or hardware is None:
        missing = "model" if model is None else "hardware"
        example = "llama-3-8b" if model is None else "h100"
        raise ConfigError(f"{missing} is not set; name one of the catalogue, such as {example}", param=missing)
    device = load_hardware(hardware)
    spec = load_model(model)
    weights = _weights(spec, device, weight_bits, quantize)
    wanted = Wanted(spec, device, parallelism, weights, kv_bits)
    cost, words = _priced(name, wanted)
    assumptions = cost.assumptions if isinstance(cost, LayerTableCost | RooflineCost) else ()
    return CostChoice(cost, words, (wanted.model, device), wanted.model.max_context, weights, assumptions)


def _weights(
    model: ModelSpec, hardware: Hardware, weight_bits: int | None, quantize: QuantizeName | None
) -> WeightPrecision:
    """As the settings say; where they say nothing, as the checkpoint is published. Raises ConfigError."""
    if weight_bits is not None or hardware.kind == "cpu":
        return weight_precision(hardware, weight_bits or 16, quantize)
    weights = weight_precision(hardware, 16 if quantize else model.checkpoint_bits, quantize)
    return weights.with_experts(model.expert_bits) if model.expert_bits else weights


def _priced(name: str, wanted: Wanted) -> tuple[CostModel, str]:
    """The cost model and a sentence about it."""
    model, hardware, parallelism = wanted.model, wanted.hardware, wanted.parallelism
    if name in ("auto", "tables") or name in layer_table_names():
        names = layer_table_names() if name in ("auto", "tables") else (name,)
        table = find_layer_table(wanted, names)
        if table is not None:
            return table, f"measured layers of {table.info.model} on {_fleet(table.info)}"
        if name != "auto":
            raise ConfigError(
                f"cost is {name!r}, which does not hold {wanted}; there are {', '.join(names)}", param="cost"
            )
    if name in profile_names():
        profile = load_profile(name)
        if not _holds(profile.info, wanted):
            info = profile.info
            raise ConfigError(
                f"cost is {name!r}, which is of {info.model} on {_fleet(info)}, not {wanted}", param="cost"
            )
        return profile, f"published profile of {profile.info.model} on {_fleet(profile.info)}"
    weight_bits, kv_bits = wanted.weights.bits, wanted.kv_bits
    if name in ("auto", "operators"):
        try:
            if wanted.weights.experts is not None:
                raise ConfigError(f"operators of {wanted} were not measured", param="cost")
            operators = operator_table_cost(model, hardware, parallelism, weight_bits=weight_bits, kv_bits=kv_bits)
            return operators, f"measured operators, summed over the layers of {wanted} ({operators.info.engine})"
        except ConfigError:
            if name != "auto":
                raise
    if name == "aiconfigurator":
        if not parallelism.is_tensor_only:
            raise ConfigError(f"cost is 'aiconfigurator', which does not hold {wanted}", param="cost")
        engine = AIConfiguratorCost.compile(
            model.name, hardware.name, parallelism.tensor, weight_bits=weight_bits, kv_bits=kv_bits
        )
        return engine, f"aiconfigurator's tables of {wanted}"
    roofline = RooflineCost(model, hardware, parallelism, weights=wanted.weights, kv_bits=kv_bits)
    measured = "measured" if "measured" in hardware.sources else "assumed"
    return roofline, f"roofline of {wanted}, with {measured} efficiencies"


def find_layer_table(wanted: Wanted, names: Sequence[str]) -> LayerTableCost | None:
    """The first of these tables that is of a model with these dimensions on this device, if there is one."""
    tables = (load_layer_table(name) for name in names)
    return next((table for table in tables if _holds(table.info, wanted)), None)


def _holds(info: TableInfo | ProfileInfo, wanted: Wanted) -> bool:
    """Whether measurements are of what is wanted: the same device, number of devices, dimensions, and 16 bits."""
    return (
        info.tensor_parallel == wanted.parallelism.tensor
        and wanted.parallelism.is_tensor_only
        and wanted.is_16_bits
        and load_hardware(info.hardware).name == wanted.hardware.name
        and _dimensions(load_model(info.model)) == _dimensions(wanted.model)
    )


def _fleet(info: TableInfo | ProfileInfo) -> str:
    return f"{info.tensor_parallel} x {info.hardware} ({info.engine})"


def _dimensions(model: ModelSpec) -> ModelSpec:
    """What a step's duration depends on: all but the name and the longest context."""
    return replace(model, name="", max_context=1)


def _calibrated(name: str, quantize: QuantizeName | None) -> CostChoice:
    path = Path(name)
    if not path.exists():
        tables = ", ".join((*layer_table_names(), *profile_names()))
        raise ConfigError(
            f"cost is {name!r}; one of {', '.join(COSTS)}, a file of diptych calibrate, or one of the tables {tables}",
            param="cost",
        )
    calibration = read_calibration(path)
    measured = calibration.quantize
    if quantize is not None and quantize != measured:
        raise ConfigError(
            f"quantize is {quantize}; {path.name} was measured with {measured}: leave quantize out, or calibrate again",
            param="quantize",
        )
    weights = "" if measured == "none" else f" with {measured} weights"
    law = f"{path.name}, {calibration.cost.name} law"
    words = f"calibration of {Path(calibration.model).name}{weights} on this machine ({law})"
    return CostChoice(calibration.cost, words, calibration, calibration.max_model_len)
