"""``quantization_config`` of a config.json: how the weights are stored, or a refusal that names the field.

Which modules are quantised is not read here: a checkpoint holds the tensors of a quantised module under other names or
dtypes than those of a module in floating point, so that ``ignore``, ``targets``, ``modules_to_not_convert`` and
``modules_in_block_to_quantize`` say nothing that the tensors do not. Imports no torch.
"""

from dataclasses import dataclass

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.weights.weight_format import BITS, MIN_GROUP, WeightFormat

METHODS = ("compressed-tensors", "gptq", "awq", "mxfp4")
MXFP4 = WeightFormat(8, 32)  # which holds its values exactly
INT_QUANTIZED = ("int-quantized", "naive-quantized")  # two names of one layout


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint stores its quantised weights. layout: pack-quantized | int-quantized (both compressed-tensors) |
    gptq | gptq_v2 | awq | mxfp4; see packed_weight.py."""

    layout: str
    format: WeightFormat


def read_quantization(fields: ConfigFields) -> QuantizationConfig | None:
    """None for a checkpoint in floating point. Raises UnsupportedModelError for what unpack.py does not read."""
    if not fields.values.get("quantization_config"):
        return None
    config = fields.nested("quantization_config")
    method = config.values.get("quant_method")
    if method not in METHODS:
        raise config.unsupported("quant_method", ", ".join(METHODS))
    if method == "gptq":
        return _gptq(config)
    if method == "mxfp4":
        return QuantizationConfig("mxfp4", MXFP4)
    return _awq(config) if method == "awq" else _compressed_tensors(config)


def _gptq(config: ConfigFields) -> QuantizationConfig:
    config.integer("bits")
    config.require("bits", *BITS)
    for name in ("checkpoint_format", "format"):  # older and newer writers
        config.require(name, "gptq", "gptq_v2", None)
    config.require("is_marlin_format", False, None)
    config.require("pack_dtype", "int32", None)
    _require_absent(config, "adapter")
    if any(not module.startswith("-:") for module in config.nested("dynamic").values):
        raise config.unsupported("dynamic", "modules that are not quantised (-:), no other bits or groups for some")
    is_v2 = "gptq_v2" in (config.values.get("checkpoint_format"), config.values.get("format"))
    weight_format = WeightFormat(config.values["bits"], _group_size(config), has_mins=not config.flag("sym", True))
    return QuantizationConfig("gptq_v2" if is_v2 else "gptq", weight_format)


def _awq(config: ConfigFields) -> QuantizationConfig:
    config.require("bits", 4)
    for name in ("version", "checkpoint_format", "format"):
        if str(config.values.get(name) or "gemm").lower() != "gemm":
            raise config.unsupported(name, "gemm")
    config.require("backend", "autoawq", None)
    config.require("zero_point", True)
    return QuantizationConfig("awq", WeightFormat(4, _group_size(config), has_mins=True))


def _compressed_tensors(config: ConfigFields) -> QuantizationConfig:
    layout = config.values.get("format")
    if layout not in ("pack-quantized", *INT_QUANTIZED):
        raise config.unsupported("format", ", ".join(("pack-quantized", *INT_QUANTIZED)))
    _require_absent(config, "kv_cache_scheme", "transform_config")
    config.nested("sparsity_config").require("format", "dense")
    groups = config.nested("config_groups")
    if len(groups.values) != 1:
        raise config.unsupported("config_groups", "one group")
    group = groups.nested(next(iter(groups.values)))
    group.require("format", layout, None)
    _require_absent(group, "output_activations")
    if group.values.get("input_activations"):
        activations = group.nested("input_activations")
        activations.require("type", "int")
        activations.require("num_bits", 8)
        if activations.values.get("dynamic") is not True:
            raise activations.unsupported("dynamic", "true: scales of activations are computed, not read")
        activations.require("strategy", "token")
    weights = group.nested("weights")
    weights.require("type", "int")
    bits = weights.integer("num_bits", 8)
    weights.require("num_bits", *(BITS if layout == "pack-quantized" else (8,)))
    weights.require("dynamic", False)
    weights.require("strategy", "channel", "group")
    weight_format = WeightFormat(bits, _group_size(weights), has_mins=not weights.flag("symmetric", True))
    return QuantizationConfig("pack-quantized" if layout == "pack-quantized" else "int-quantized", weight_format)


def _group_size(fields: ConfigFields) -> int | None:
    """Columns that share a scale; None for all of a row (-1, or absent)."""
    value = fields.values.get("group_size")
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % MIN_GROUP:
        raise fields.unsupported("group_size", f"-1 and multiples of {MIN_GROUP}")
    return value


def _require_absent(fields: ConfigFields, *names: str) -> None:
    for name in names:
        if fields.values.get(name):
            raise fields.unsupported(name, "none")
