"""What the weights of a simulated worker are kept and multiplied in: their bytes, and the arithmetic of the products.

Two settings say it, one for each kind of device. ``weight_bits`` is of a GPU: 8 or 4 bits in the layers, embeddings and
lm_head in 16. ``quantize`` is ``diptych serve --quantize`` on a CPU: whole numbers with their scales, embeddings and
lm_head included, multiplied in 8 bits because activations are quantised when they come.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from diptych.control.config import QuantizeName
from diptych.control.errors import ConfigError
from diptych.simulation.hardware import Hardware

WeightBits = Literal[4, 8, 16]  # on a GPU

SCALE_BITS, GROUP_SCALE_BITS, GROUP_SIZE = 32, 16, 32  # of an output channel; of a group of GROUP_SIZE columns


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """bits: of a weight, the scales of its groups included. scale_bits: of each output channel. arithmetic: types of a
    device's peaks, of which the first that it has counts; without any the weights are widened to bf16."""

    bits: float = 16.0
    scale_bits: int = 0
    arithmetic: tuple[str, ...] = ()

    def num_bytes(self, outputs: int, parameters: int) -> int:
        """Bytes of matrices with ``outputs`` output channels and ``parameters`` weights in all."""
        return int(parameters * self.bits + outputs * self.scale_bits) // 8

    def peak(self, hardware: Hardware) -> str:
        """The type of ``hardware.flops`` that the products run in."""
        return next((name for name in self.arithmetic if name in hardware.flops), "bf16")


@dataclass(frozen=True, slots=True)
class WeightPrecision:
    """name: for people. bits: 16, 8 or 4. layers: the matrices of the layers. head: embeddings and lm_head. experts:
    the routed experts (None: as the layers). Norms, biases and routers of experts have 16 bits. tied_copies: how often
    an embedding that the lm_head shares is kept: on a CPU in 16 bits twice, as rows to look up and packed to
    multiply."""

    name: str
    bits: int = 16
    layers: MatrixFormat = MatrixFormat()
    head: MatrixFormat = MatrixFormat()
    tied_copies: int = 1
    experts: MatrixFormat | None = None

    @property
    def expert_format(self) -> MatrixFormat:
        """Format of the routed experts."""
        return self.experts or self.layers

    def with_experts(self, bits: float) -> "WeightPrecision":
        """The same, with routed experts of other bits, which are widened to bf16 to be multiplied."""
        return replace(self, name=f"{self.name}, experts {bits:g} bits", experts=MatrixFormat(bits))


GPU_WEIGHTS = {  # by weight_bits
    16: WeightPrecision("16 bits"),
    8: WeightPrecision("8 bits", 8, MatrixFormat(8.0, 0, ("fp8", "int8"))),
    4: WeightPrecision("4 bits", 4, MatrixFormat(4.0, 0, ("fp8", "int8"))),  # W4A8, as in QServe (arXiv:2405.04532)
}
_INT8 = MatrixFormat(8.0, SCALE_BITS, ("int8",))
_INT4 = MatrixFormat(4.0 + GROUP_SCALE_BITS / GROUP_SIZE, 0, ("int8",))
QUANTIZED = {  # by quantize
    "none": WeightPrecision("16 bits", tied_copies=2),
    "int8": WeightPrecision("int8", 8, _INT8, _INT8),
    "int4": WeightPrecision("int4", 4, _INT4, _INT8),
}


def weight_precision(
    hardware: Hardware, weight_bits: int = 16, quantize: QuantizeName | None = None
) -> WeightPrecision:
    """What the two settings mean on a device. Raises ConfigError when they contradict each other, when a value is
    unknown, and for the setting of the other kind of device."""
    if weight_bits not in GPU_WEIGHTS:
        known = ", ".join(map(str, GPU_WEIGHTS))
        raise ConfigError(f"weight_bits is {weight_bits}; one of {known}", param="weight_bits")
    if quantize is not None and quantize not in QUANTIZED:
        raise ConfigError(f"quantize is {quantize!r}; one of {', '.join(get_args(QuantizeName))}", param="quantize")
    if quantize in (None, "none"):
        if weight_bits != 16 and hardware.kind == "cpu":
            raise ConfigError(
                f"weight_bits is {weight_bits}, which is for GPUs; {hardware.name} is a CPU: set quantize (int8 or "
                "int4), as for diptych serve",
                param="weight_bits",
            )
        return QUANTIZED["none"] if hardware.kind == "cpu" else GPU_WEIGHTS[weight_bits]
    if weight_bits != 16:
        raise ConfigError(
            f"quantize is {quantize} and weight_bits is {weight_bits}; set one of them: quantize on a CPU, weight_bits "
            "on a GPU",
            param="quantize",
        )
    if hardware.kind != "cpu":
        raise ConfigError(
            f"quantize is {quantize}, which diptych serve computes on CPUs; {hardware.name} is a GPU: set weight_bits "
            "(8 or 4)",
            param="quantize",
        )
    return QUANTIZED[quantize]
