"""``quantization_config`` of a config.json: how the weights are stored, or a refusal that names the field.

Which modules are quantised is not read here: a checkpoint holds the tensors of a quantised module under other names or
dtypes than those of a module in floating point, so that ``ignore``, ``targets``, ``modules_to_not_convert`` and
``modules_in_block_to_quantize`` say nothing that the tensors do not. Imports no torch.
"""

from dataclasses import dataclass

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.weights.weight_format import BITS, MIN_GROUP, WeightFormat

METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "modelopt", "mxfp4")
MXFP4 = WeightFormat(8, 32)  # which holds its values exactly
INT_QUANTIZED = ("int-quantized", "naive-quantized")  # two names of one layout
COMPRESSED = ("pack-quantized", *INT_QUANTIZED, "float-quantized")
MODELOPT_FILE = "hf_quant_config.json"
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB")
DEFAULT_BLOCK = (128, 128)

CONVERTED = "FP8 weights are converted when they are loaded: to the dtype of the model, or as --quantize says"
NO_ACTIVATIONS = "the checkpoint's scales of activations are not used: activations are not in FP8"
NO_KV_CACHE = "the checkpoint's quantisation of the KV cache is not used: the cache is in the dtype of the model"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint stores its quantised weights. layout: pack-quantized | int-quantized (both compressed-tensors) |
    gptq | gptq_v2 | awq | mxfp4; see packed_weight.py."""

    layout: str
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Fp8Quantization:
    """How a checkpoint stores its weights in FP8 (E4M3). block: rows and columns that share a scale, where neither a
    row nor the whole weight does (None: there are no such weights). notes: what people should know of it."""

    block: tuple[int, int] | None
    notes: tuple[str, ...]


def read_quantization(fields: ConfigFields) -> QuantizationConfig | Fp8Quantization | None:
    """None for a checkpoint in floating point of 16 or 32 bits. Raises UnsupportedModelError for what is not read."""
    if not fields.values.get("quantization_config"):
        beside = fields.path.with_name(MODELOPT_FILE)
        if fields.path.name != "config.json" or not beside.exists():
            return None
        return _modelopt(ConfigFields.of_file(beside).nested("quantization"))
    config = fields.nested("quantization_config")
    match config.values.get("quant_method"):
        case "gptq":
            return _gptq(config)
        case "awq":
            return _awq(config)
        case "mxfp4":
            return QuantizationConfig("mxfp4", MXFP4)
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "fp8":
            return _fp8(config)
        case "modelopt":
            return _modelopt(config)
    raise config.unsupported("quant_method", ", ".join(METHODS))


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


def _fp8(config: ConfigFields) -> Fp8Quantization:
    """The FP8 of DeepSeek, Mistral, transformers (FineGrainedFP8Config) and AutoFP8."""
    config.require("fmt", "e4m3", None)
    config.require("activation_scheme", "dynamic", "static")
    config.require("scale_fmt", "float", "ue8m0", None)
    is_static = config.values.get("activation_scheme") == "static"
    has_kv_cache = bool(config.values.get("kv_cache_scheme"))
    return Fp8Quantization(_block(config, "weight_block_size"), _notes_of_fp8(is_static, has_kv_cache))


def _modelopt(config: ConfigFields) -> Fp8Quantization | None:
    """The FP8 of NVIDIA's Model Optimizer, which may have quantised the KV cache alone."""
    has_kv_cache = any(config.values.get(name) for name in ("kv_cache_quant_algo", "kv_cache_scheme"))
    if config.values.get("quant_algo") is None:
        return Fp8Quantization(DEFAULT_BLOCK, (NO_KV_CACHE,)) if has_kv_cache else None
    config.require("quant_algo", *MODELOPT_ALGORITHMS)
    return Fp8Quantization(DEFAULT_BLOCK, _notes_of_fp8(config.values["quant_algo"] == "FP8", has_kv_cache))


def _float_quantized(config: ConfigFields, group: ConfigFields) -> Fp8Quantization:
    """The FP8 of compressed-tensors."""
    weights, activations = group.nested("weights"), group.nested("input_activations")
    weights.require("type", "float")
    weights.require("num_bits", 8)
    weights.require("symmetric", True, None)
    weights.require("dynamic", False)
    weights.require("strategy", "tensor", "channel", "block")
    is_static = bool(activations.values) and activations.values.get("dynamic") in (False, None)
    block = _block(weights, "block_structure") if weights.values.get("strategy") == "block" else None
    return Fp8Quantization(block, _notes_of_fp8(is_static, bool(config.values.get("kv_cache_scheme"))))


def _notes_of_fp8(is_static: bool, has_kv_cache: bool) -> tuple[str, ...]:
    return (CONVERTED, *([NO_ACTIVATIONS] if is_static else []), *([NO_KV_CACHE] if has_kv_cache else []))


def _block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale. Null: none do; absent: as every writer has it."""
    match fields.values.get(name, list(DEFAULT_BLOCK)):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise fields.unsupported(name, "two whole numbers of at least 1, or null")


def _compressed_tensors(config: ConfigFields) -> QuantizationConfig | Fp8Quantization:
    layout = config.values.get("format")
    if layout not in COMPRESSED:
        raise config.unsupported("format", ", ".join(COMPRESSED))
    _require_absent(config, "transform_config")
    config.nested("sparsity_config").require("format", "dense")
    groups = config.nested("config_groups")
    if len(groups.values) != 1:
        raise config.unsupported("config_groups", "one group")
    group = groups.nested(next(iter(groups.values)))
    group.require("format", layout, None)
    _require_absent(group, "output_activations")
    weights = group.nested("weights")
    if layout == "float-quantized" or (layout == "naive-quantized" and weights.values.get("type") == "float"):
        return _float_quantized(config, group)
    return _int_quantized(config, group, layout)


def _int_quantized(config: ConfigFields, group: ConfigFields, layout: str) -> QuantizationConfig:
    """The whole numbers of compressed-tensors, packed or not."""
    _require_absent(config, "kv_cache_scheme")
    weights = group.nested("weights")
    if group.values.get("input_activations"):
        activations = group.nested("input_activations")
        activations.require("type", "int")
        activations.require("num_bits", 8)
        if activations.values.get("dynamic") is not True:
            raise activations.unsupported("dynamic", "true: scales of activations are computed, not read")
        activations.require("strategy", "token")
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
