"""The model and the device of a panel: names of the catalogue, and how many GPUs the model needs.

Owns the smallest number of devices that holds a model. Must never hold a figure of one: all of them are the
catalogue's.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_choice import CostChoice, choose_cost
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.fleet.links import LINKS
from diptych.simulation.hardware import Hardware, catalogue_hardware, hardware_names
from diptych.simulation.model_catalogue import load_model, model_names
from diptych.simulation.models import ModelSpec, kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, weight_precision

SIZES = (1, 2, 4, 8)
WEIGHT_BITS = (16, 8, 4)
MIN_KV_TOKENS = 32_768  # with less room for KV beside the weights little of use can be served
TEXTS = {
    "a100-40gb": "A100 40 GB",
    "a100-80gb": "A100 80 GB",
    "h100-sxm": "H100 80 GB",
    "h200": "H200 141 GB",
    "b200": "B200 180 GB",
    "l40s": "L40S 48 GB",
    "a6000": "RTX A6000 48 GB",
    "rtx-4090": "RTX 4090 24 GB",
    "rtx-pro-6000": "RTX PRO 6000 96 GB",
    "mi300x": "MI300X 192 GB",
    "pcie4": "PCIe 4.0 x16 (inside a node)",
    "pcie5": "PCIe 5.0 x16 (inside a node)",
    "eth100": "Ethernet 100 Gb/s",
    "eth200": "Ethernet 200 Gb/s",
    "eth400": "Ethernet 400 Gb/s",
    "ib100": "InfiniBand 100 Gb/s",
    "ib200": "InfiniBand 200 Gb/s",
    "ib400": "InfiniBand 400 Gb/s",
    "nvlink3": "NVLink 3 (A100)",
    "nvlink4": "NVLink 4 (H100)",
    "nvlink5": "NVLink 5 (B200)",
    "shared_memory": "Shared memory, copied by one core",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a panel computes with. num_gpus: of one worker."""

    model: ModelSpec
    hardware: Hardware
    num_gpus: int
    weight_bits: int
    choice: CostChoice

    @property
    def words(self) -> str:
        """Where the durations come from."""
        return self.choice.words

    @property
    def devices(self) -> str:
        """The GPUs of one worker."""
        name = TEXTS.get(self.hardware.name, self.hardware.name)
        return f"{self.num_gpus} × {name}" if self.num_gpus > 1 else name


def catalogue() -> dict[str, list[dict[str, str]]]:
    """What the selection boxes of the pages offer: ``model``, ``hardware`` and ``link``, each value and text."""
    return {
        "model": [{"value": name, "text": _model_text(name)} for name in model_names()],
        "hardware": [{"value": name, "text": TEXTS.get(name, name)} for name in hardware_names("gpu")],
        "link": [{"value": name, "text": TEXTS.get(name, name)} for name in LINKS],
    }


def _model_text(name: str) -> str:
    spec = load_model(name)
    billions = spec.num_parameters / 1e9
    size = f"{billions:.0f} B" if billions >= 10 else f"{billions:.1f} B"
    extra = " MLA" if spec.mla else ""
    return f"{spec.name} · {size}{extra}{' MoE' if spec.moe else ''}"


@lru_cache(maxsize=256)
def machine(model: str, hardware: str, num_gpus: int = 0, weight_bits: int = 0) -> Machine:
    """num_gpus 0: the fewest that hold the model. weight_bits 0: 16, or fewer where 16 do not fit. Raises ConfigError
    when it does not fit."""
    spec, device = load_model(model), catalogue_hardware(hardware)
    size, bits = _smallest_with(spec, device, num_gpus, weight_bits or WEIGHT_BITS[0])
    if not size:
        for other in WEIGHT_BITS[1:] if not weight_bits and device.kind == "gpu" else ():
            size, bits = _smallest_with(spec, device, num_gpus, other)
            if size:
                break
    if not size:
        bits = weight_bits or (WEIGHT_BITS[-1] if device.kind == "gpu" else WEIGHT_BITS[0])
        where = f"{num_gpus or f'up to {SIZES[-1]}'} x {device.name} ({device.memory_bytes / 1e9:.0f} GB each)"
        size_gb = spec.weight_bytes(GPU_WEIGHTS[bits]) / 1e9
        raise ConfigError(
            f"{spec.name} does not fit on {where}: its weights are {size_gb:.0f} GB at {bits} bits; choose more or "
            "larger GPUs, fewer bits, or a smaller model",
            param="model",
        )
    choice = choose_cost(
        "auto", model=spec.name, hardware=device.name, parallelism=Parallelism(size), weight_bits=bits, kv_bits=16
    )
    return Machine(spec, device, size, bits, choice)


def _smallest_with(model: ModelSpec, hardware: Hardware, num_gpus: int, weight_bits: int) -> tuple[int, int]:
    """(the fewest GPUs that hold the weights and a useful KV cache, the bits); 0: it does not fit. With ``num_gpus``
    given, only that many are tried, and any cache will do."""
    most = hardware.interconnect.max_devices
    weights = weight_precision(hardware, weight_bits)
    for size in (num_gpus,) if num_gpus else SIZES:
        if model.heads % size or size > most:
            continue
        try:
            tokens = kv_capacity_tokens(model, hardware, parallelism=Parallelism(size), weights=weights)
        except ConfigError:  # it does not fit; the next size may
            continue
        if num_gpus or tokens >= min(MIN_KV_TOKENS, model.max_context):
            return size, weight_bits
    return 0, weight_bits


def step_ns(cost: CostModel, chunk: tuple[int, int] | None, decode_seqs: int, decode_context: int) -> int:
    """Duration of one step: the last chunk (first token, tokens) of a prompt, if any, and ``decode_seqs`` decodes that
    attend to ``decode_context`` tokens together."""
    start, num_tokens = chunk or (0, 0)
    features = StepFeatures(num_tokens, chunk_attention(start, num_tokens), decode_seqs, decode_context)
    prefills = (ScheduledPrefill("prompt", start, num_tokens, (), is_last=True),) if num_tokens else ()
    return cost.step_ns(SchedulerOutput(0, prefills=prefills, num_decodes=decode_seqs, features=features))


def about(chosen: Machine) -> dict[str, Any]:
    """What a page says of it."""
    return {
        "model": chosen.model.name,
        "devices": chosen.devices,
        "gpus": chosen.num_gpus,
        "weight_bits": chosen.weight_bits,
        "words": chosen.words,
    }
