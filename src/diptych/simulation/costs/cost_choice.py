"""Which cost model prices a model on a device: the one asked for, or the best there is, and a description of it.

``auto`` takes measured layers of this very model, device and number of devices, then tables of measured operators,
then the roofline. Layers are scaled where fewer bits are asked than were measured, so that they are never slower; else
two kinds are never mixed. Among several layer tables these rules decide, each where those before
it leave a tie: kernels of the asked engine (of vLLM, if none is asked); of the version nearest to the asked one (the
newest, if none is asked); fewer parts assumed. Operators that no engine runs like that ("unfused") are priced only by
the name of their table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.control.config import QuantizeName
from diptych.control.errors import ConfigError
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.engine_cost import EngineCost
from diptych.simulation.costs.fitted import MOST_ERROR, Calibration, read_calibration
from diptych.simulation.costs.interpolation import Curve
from diptych.simulation.costs.layer_tables import (
    UNFUSED,
    LayerTableCost,
    TableInfo,
    layer_table_info,
    layer_table_names,
    load_layer_table,
)
from diptych.simulation.costs.narrowed_tables import narrowed
from diptych.simulation.costs.operator_tables import operator_table_cost
from diptych.simulation.costs.operators import US
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import Hardware, load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import ModelSpec
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.serving_engine import FrontEnd, ServingEngine, load_engine
from diptych.simulation.weight_precision import (
    WeightPrecision,
    weight_precision,
)

NO_FRONT_END = FrontEnd()
COSTS = ("auto", "tables", "operators", "roofline")


@dataclass(frozen=True, slots=True)
class CostChoice:
    """A cost model, one sentence about it, and what it is of. weights: None where a calibration has measured them.
    front_end: what a request waits in front of the engine. assumptions: what of all that was not measured."""

    cost: CostModel
    words: str
    source: Calibration | tuple[ModelSpec, Hardware]
    max_model_len: int
    weights: WeightPrecision | None = None
    front_end: FrontEnd = NO_FRONT_END
    assumptions: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware | None:
        """The device, if it is one of the catalogue."""
        return None if isinstance(self.source, Calibration) else self.source[1]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be priced. skew: longest context of a decode batch over its mean."""

    model: ModelSpec
    hardware: Hardware
    parallelism: Parallelism
    weights: WeightPrecision
    kv_bits: int
    engine: ServingEngine | None = None
    skew: float = 1.0

    @property
    def host_us(self) -> Curve | None:
        """What the host of the asked engine adds to a step; None: as the table or the entry of the hardware has it."""
        return None if self.engine is None else self.engine.host_us(self.parallelism.devices)

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
    engine: str | None = None,
    skew: float = 1.0,
    force_calibration: bool = False,
) -> CostChoice:
    """The cost model called ``name``: one of COSTS, a layer table of the catalogue by its name, or the path of a file
    of ``diptych calibrate``.

    weight_bits, quantize: see weight_precision (None: what the checkpoint has). A calibration has its own weights:
    ``quantize`` may only agree with them. engine: whose host prepares the steps and whose front end takes the requests
    (see serving_engine.py); None: as the table has it, else step_overhead_s of the hardware, and no front end. skew:
    longest context of a decode batch over its mean; only layer tables that measured it know what that costs.
    force_calibration: use a calibration whose held-out error is above MOST_ERROR. Raises ConfigError when the cost
    model does not exist for the model and the device, when one of these is not named, or when it is too inaccurate.
    """
    if name not in (*COSTS, *layer_table_names()):
        _check_no_engine(engine, f"{Path(name).name}, which was measured with one")
        return _calibrated(name, quantize, force_calibration)
    if model is None or hardware is None:
        missing = "model" if model is None else "hardware"
        example = "llama-3-8b" if model is None else "h100"
        raise ConfigError(f"{missing} is not set; name one of the catalogue, such as {example}", param=missing)
    device = load_hardware(hardware)
    spec = load_model(model)
    weights = _weights(spec, device, weight_bits, quantize)
    served = None if engine is None else load_engine(engine)
    wanted = Wanted(spec, device, parallelism, weights, kv_bits, served, skew)
    cost, words = _priced(name, wanted)
    assumptions = cost.assumptions if isinstance(cost, LayerTableCost | RooflineCost | EngineCost) else ()
    front_end = NO_FRONT_END
    if served is not None:
        words += f", host and front end of {served.name}"
        assumptions += served.assumptions
        front_end = served.front_end
    source = (wanted.model, device)
    return CostChoice(cost, words, source, wanted.model.max_context, weights, front_end, assumptions)


def _check_no_engine(engine: str | None, cost: str) -> None:
    """Raise ConfigError where an engine cannot be exchanged: whole steps were measured with their own."""
    if engine is not None:
        raise ConfigError(f"engine is {engine!r}; it has no effect on {cost}: leave it out", param="engine")


def _weights(
    model: ModelSpec, hardware: Hardware, weight_bits: int | None, quantize: QuantizeName | None
) -> WeightPrecision:
    """The weights' precision as the settings say; where they say nothing, as the checkpoint is published. Raises
    ConfigError."""
    if weight_bits is not None or hardware.kind == "cpu":
        return weight_precision(hardware, weight_bits or 16, quantize)
    weights = weight_precision(hardware, 16 if quantize else model.checkpoint_bits, quantize)
    return weights.with_experts(model.expert_bits) if model.expert_bits else weights


def _priced(name: str, wanted: Wanted) -> tuple[CostModel, str]:
    """The cost model and a sentence about it."""
    if name not in ("operators", "roofline"):
        names = (name,) if name in layer_table_names() else served_tables(wanted.engine)
        table = next((name for name in names if _holds(layer_table_info(name), wanted)), None)
        if table is not None:
            cost = _table(table, wanted)
            bits = "" if wanted.is_16_bits else f", scaled to {wanted.weights.name} (KV {wanted.kv_bits} bits)"
            return cost, f"measured layers of {cost.info.model} on {_fleet(cost.info)}{bits}"
        if name != "auto":
            known = ", ".join(layer_table_names())
            raise ConfigError(f"cost is {name!r}, which does not hold {wanted}; the tables are {known}", param="cost")
    if name != "roofline":
        try:
            return _operators(wanted)
        except ConfigError:
            if name != "auto":
                raise
    measured = "measured" if "measured" in wanted.hardware.sources else "assumed"
    return _roofline(wanted), f"roofline of {wanted}, with {measured} efficiencies"


def _roofline(wanted: Wanted) -> CostModel:
    bits: dict[str, Any] = {"weights": wanted.weights, "kv_bits": wanted.kv_bits}
    host = wanted.host_us
    if wanted.engine is None or host is None:
        return RooflineCost(wanted.model, wanted.hardware, wanted.parallelism, **bits)
    devices = RooflineCost(wanted.model, wanted.hardware, wanted.parallelism, step_overhead_s=0.0, **bits)
    return EngineCost(devices, host, wanted.engine.name)


def _table(name: str, wanted: Wanted) -> LayerTableCost:
    """The layers of a table behind the host of the asked engine; without one, behind its own."""
    table = load_layer_table(name, skew=wanted.skew)
    if not wanted.is_16_bits:
        split, kv_bits = wanted.parallelism, wanted.kv_bits
        table = narrowed(table, wanted.model, wanted.hardware, split, wanted.weights, kv_bits)
    if wanted.engine is None:
        return table
    constant = Curve((1.0,), (US * wanted.hardware.achieved.step_overhead_s,))
    return table.with_host(wanted.host_us or constant, wanted.engine.name)


def _operators(wanted: Wanted) -> tuple[CostModel, str]:
    if wanted.weights.experts is not None:
        raise ConfigError(f"operators of {wanted} were not measured", param="cost")
    operators = operator_table_cost(
        wanted.model,
        wanted.hardware,
        wanted.parallelism,
        weight_bits=wanted.weights.bits,
        kv_bits=wanted.kv_bits,
    )
    words = f"measured operators, summed over the layers of {wanted} ({operators.info.engine})"
    if wanted.engine is not None and wanted.host_us is not None:
        operators = operators.with_host(wanted.host_us, wanted.engine.name)
    return operators, words


def served_tables(engine: ServingEngine | None = None) -> tuple[str, ...]:
    """Names of the layer tables that ``auto`` chooses from, best first; see the module for the rules."""
    family, version = _version(engine.name if engine is not None else "vllm")

    def rank(info: TableInfo) -> tuple[bool, int, int, str]:
        of, found = _version(info.kernels)
        distance = abs(found - version) if of == family and version else -found
        return of != family, distance, len(info.assumptions), info.name

    infos = [layer_table_info(name) for name in layer_table_names()]
    return tuple(info.name for info in sorted(infos, key=rank) if info.kernels != UNFUSED)


def _version(name: str) -> tuple[str, int]:
    """The engine and its version as one number: ("vllm", 24) of "vllm-0.24", ("sglang", 0) of "sglang"."""
    family, _, version = name.partition("-")
    major, _, minor = version.partition(".")
    return family, 1000 * int(major or 0) + int(minor or 0)


def _holds(info: TableInfo, wanted: Wanted) -> bool:
    """Whether measured layers are of what is wanted: the same device, sharing of the model, dimensions. Layers were
    measured with 16 bits; they can be scaled (narrowed_tables.py)."""
    return (
        _parallelism(info) == wanted.parallelism
        and load_hardware(info.hardware).name == wanted.hardware.name
        and dimensions(load_model(info.model)) == dimensions(wanted.model)
    )


def _parallelism(info: TableInfo) -> Parallelism:
    return Parallelism(info.tensor_parallel, 1, info.expert_parallel, info.data_parallel)


def _fleet(info: TableInfo) -> str:
    return f"{_parallelism(info).devices} x {info.hardware} ({info.engine})"


def dimensions(model: ModelSpec) -> ModelSpec:
    """What a step's duration depends on: all but the name and the longest context."""
    return replace(model, name="", max_context=1)


def _calibrated(name: str, quantize: QuantizeName | None, is_forced: bool) -> CostChoice:
    path = Path(name)
    if not path.exists():
        tables = ", ".join(layer_table_names())
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
    error = calibration.error_words()
    law = f"{path.name}, {calibration.cost.name} law" + (f"; held-out error: {error}" if error else "")
    words = f"calibration of {Path(calibration.model).name}{weights} on this machine ({law})"
    return CostChoice(
        calibration.cost,
        words,
        calibration,
        calibration.max_model_len,
        front_end=calibration.front_end,
        assumptions=_inaccuracy(path, calibration, is_forced),
    )


def _inaccuracy(path: Path, calibration: Calibration, is_forced: bool) -> tuple[str, ...]:
    """What a forced calibration is taken for; nothing of an accurate one. Raises ConfigError unless it is forced."""
    if calibration.is_accurate:
        return ()
    missed = f"{path.name} misses held-out steps of its own measurement by {calibration.error_words()}"
    if not is_forced:
        raise ConfigError(
            f"{missed}; the limit is a median of {MOST_ERROR:.0%}. Calibrate again on an idle machine, or use it all "
            "the same with --force-calibration",
            param="cost",
        )
    return (f"step durations are right, although {missed} (forced; the limit is a median of {MOST_ERROR:.0%})",)
