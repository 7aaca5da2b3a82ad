"""What a cost model made of operators takes for granted, in sentences for the report: nothing that was not measured is
priced without one."""

from diptych.simulation.costs.layer_shapes import EXPERT_IMBALANCE
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import WeightPrecision


def assumptions_of(
    hardware: Hardware, parallelism: Parallelism, weights: WeightPrecision, *, measured_experts: bool = False
) -> tuple[str, ...]:
    """Assumptions about a device's constants, the links between devices, and how they share the work. measured_experts:
    with the balance that they have between groups of devices."""
    found = [
        *_device(hardware, weights, parallelism.stage_devices),
        *_network(hardware, parallelism),
    ]
    if parallelism.pipeline > 1:
        found.append("the host prepares a pass once for all pipeline stages, and layers are dealt to them evenly")
    if parallelism.expert > 1 and not measured_experts:
        found.append(f"the busiest group of experts computes {EXPERT_IMBALANCE} times its share of the tokens")
    if parallelism.data > 1:
        found.append("data-parallel groups have equal numbers of sequences, and a prompt's chunk stays in one group")
    return tuple(found)


def model_assumptions(model: ModelSpec, weights: WeightPrecision) -> tuple[str, ...]:
    """Assumptions about the parts of a model that no kernel was measured for."""
    found = []
    if model.window:
        layers = f"{model.window.layers} of the {model.layers} layers of {model.name}"
        found.append(f"{layers} attend to a window of {model.window.tokens:,} tokens as fast as to a short context")
    if model.linear:
        layers = f"{model.linear.layers} of the {model.layers} layers of {model.name}"
        found.append(f"{layers} have linear attention, whose kernels are taken to reach what attention reaches")
    if weights.experts is not None:
        found.append(f"experts of {weights.experts.bits:g} bits are widened to bf16 as they are read")
    return tuple(found)


def _device(hardware: Hardware, weights: WeightPrecision, devices: int) -> list[str]:
    """What the entry's sources say: of every run, of fewer bits than 16, of links between devices."""
    keys = ["assumed"]
    keys += ["assumed_8_bits"] if weights.bits < 16 else []
    keys += ["assumed_link"] if devices > 1 else []
    found = [f"{hardware.name}: {hardware.sources[key]}" for key in keys if key in hardware.sources]
    if weights.bits == 4 and hardware.kind == "gpu":
        found.append("4-bit weights are multiplied in 8-bit arithmetic where the device has it (W4A8 kernels)")
    return found


def _network(hardware: Hardware, parallelism: Parallelism) -> list[str]:
    network = hardware.network
    if network is None or parallelism.devices <= hardware.interconnect.max_devices:
        return []
    return [
        f"hosts of {hardware.interconnect.max_devices} x {hardware.name} are joined by {network.kind}: "
        f"{network.bandwidth / 1e9:g} GB/s of each device, {network.latency_s * 1e6:g} us a message"
    ]
