"""Mixtures of experts as data: how a router chooses, which layers have experts, and which tensors of a checkpoint they
are. Everything that can be wrong with these tensors is said here, by tensor and field, before any of them is read.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diptych.control.errors import ConfigError
from diptych.control.expert_law import ExpertLaw
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.weights.stored_tensor import StoredTensor, split_index, weight_name

Scoring = Literal["softmax", "softmax_of_top", "sigmoid", "sparsemixer"]
COUNTS = ("num_experts", "num_local_experts")  # fields that say how many experts there are


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How the logits of a router, one for each expert, become the top_k experts of a token and their weights.

    scoring: softmax: of all logits, and the largest are taken; softmax_of_top: the largest logits are taken, and their
    softmax is that of these alone; sigmoid: of each logit by itself; sparsemixer: top_k is 2, and the weight of each is
    that of a softmax over the experts that are nearly as good (Liu et al. 2024). is_normalized: weights are divided by
    their sum. scale: what they are multiplied with then. jitter: of sparsemixer, what nearly as good is.

    Of experts that are equally good, the one with the lowest index is taken.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    is_normalized: bool = False
    scale: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class ClampedSwish:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), where gates are at most ``limit`` and ups between -limit
    and limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of a model. intermediate_size: of each expert. layers: whether each layer is a mixture;
    others have one MLP. count_field, width_field: where the file says how many experts there are and how wide, for
    messages. shared_size: how wide an expert of all rows is (None: there is none). has_bias: of the router, and of each
    expert. has_correction: see Ops.route. is_wide: the router is computed in fp32, whatever the model's dtype.
    is_interleaved: where one tensor holds gates and ups, they alternate, and where it is in floating point, weights lie
    with their columns first."""

    routing: ExpertRouting
    intermediate_size: int
    layers: tuple[bool, ...]
    count_field: str = field(compare=False, repr=False)
    width_field: str = field(compare=False, repr=False)
    shared_size: int | None = None
    has_bias: bool = False
    has_correction: bool = False
    is_wide: bool = False
    is_interleaved: bool = False

    @property
    def law(self) -> ExpertLaw:
        """How many experts the tokens of a step visit together."""
        return ExpertLaw(self.routing.num_experts, self.routing.top_k)


def read_routing(
    fields: ConfigFields,
    count: int,
    top_k: int,
    *,
    names: Sequence[str] = COUNTS,
    scoring: Scoring = "softmax",
    is_normalized: bool = False,
    scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[ExpertRouting, str]:
    """The routing, and the field that says how many experts there are. count, top_k: where the file does not say them.
    names: of the field for the number of experts; where more than one is there, they must agree."""
    found = [name for name in names if fields.values.get(name) is not None]
    name = found[0] if found else names[0]
    num_experts = fields.integer(name, count)
    for other in found[1:]:
        if fields.integer(other) != num_experts:
            raise fields.unsupported(other, f"{num_experts}, as {fields.name_of(name)} says")
    top_k = fields.integer("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise fields.unsupported("num_experts_per_tok", f"at most {num_experts}, the value of {fields.name_of(name)}")
    routing = ExpertRouting(num_experts, top_k, scoring, is_normalized=is_normalized, scale=scale, jitter=jitter)
    return routing, fields.name_of(name)


def read_experts(
    fields: ConfigFields,
    routing: tuple[ExpertRouting, str],
    *,
    width_field: str = "intermediate_size",
    width: int | None = None,
    layers: Sequence[bool] = (),
    **more: Any,
) -> ExpertsConfig:
    """routing: from read_routing. width: where the file does not say how wide an expert is. layers: see ExpertsConfig
    (none given: each is a mixture). more: other fields of ExpertsConfig."""
    return ExpertsConfig(
        routing[0],
        fields.integer(width_field, width),
        tuple(layers) or (True,) * fields.integer("num_hidden_layers"),
        routing[1],
        fields.name_of(width_field),
        **more,
    )


# ---------------------------------------------------------------- the tensors

# Behind "model.layers.N.". A name that ends in an index is a whole one: a matrix in a tensor of three dimensions.
ROUTERS = (
    "mlp.gate",
    "mlp.router",
    "block_sparse_moe.gate",
    "block_sparse_moe.router.layer",
    "block_sparse_moe.router",
)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a checkpoint names the weights of expert {}. gate_up: two tensors, or one that holds both. gate_up_bias,
    down_bias: of experts that have them."""

    gate_up: tuple[str, ...]
    down: str
    gate_up_bias: tuple[str, ...] = ()
    down_bias: str = ""


_SPELLINGS = (
    # a tensor for each expert
    _Spelling(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"),
    _Spelling(("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"), "block_sparse_moe.experts.{}.w2"),
    # a tensor for all experts: transformers 5 in memory, the files of Granite, GGUF with and without a fused gate_up
    _Spelling(
        ("mlp.experts.gate_up_proj[{}]",),
        "mlp.experts.down_proj[{}]",
        ("mlp.experts.gate_up_proj_bias[{}]",),
        "mlp.experts.down_proj_bias[{}]",
    ),
    _Spelling(("block_sparse_moe.experts.gate_up_proj[{}]",), "block_sparse_moe.experts.down_proj[{}]"),
    _Spelling(("block_sparse_moe.input_linear.weight[{}]",), "block_sparse_moe.output_linear.weight[{}]"),
    _Spelling(("mlp.experts.gate_up_proj.weight[{}]",), "mlp.experts.down_proj.weight[{}]"),
    _Spelling(
        ("mlp.experts.gate_proj.weight[{}]", "mlp.experts.up_proj.weight[{}]"),
        "mlp.experts.down_proj.weight[{}]",
        ("mlp.experts.gate_proj.bias[{}]", "mlp.experts.up_proj.bias[{}]"),
        "mlp.experts.down_proj.bias[{}]",
    ),
)
CORRECTION = "e_score_correction_bias"  # behind the name of the router
SHARED = "mlp.shared_experts"  # the expert of all rows, behind "model.layers.N."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The weights of one layer's router and experts, by the names that a loader takes: without ``.weight``, unless a
    name ends in an index. gate_up, down: of each expert, in order. gate_up_bias, down_bias: likewise, whole names
    (none: they have no biases). correction: a whole name. shared: of the expert of all rows, without the name of a
    part. is_interleaved: gates and ups alternate in gate_up and its bias. is_transposed: gate_up and down have their
    columns first."""

    router: str
    gate_up: tuple[tuple[str, ...], ...]
    down: tuple[str, ...]
    gate_up_bias: tuple[tuple[str, ...], ...] = ()
    down_bias: tuple[str, ...] = ()
    correction: str | None = None
    shared: str | None = None
    is_interleaved: bool = False
    is_transposed: bool = False


def find_experts(
    tensors: Mapping[str, StoredTensor], path: Path, hidden: int, experts: ExpertsConfig
) -> list[ExpertNames | None]:
    """The names of each layer (None: it is no mixture). tensors, path: of the checkpoint. Raises ConfigError for
    tensors that are missing, that are too many, or whose shapes are not those that the config asks for."""
    check = _Check(tensors, path, hidden, experts)
    return [check.layer(index) if is_mixture else None for index, is_mixture in enumerate(experts.layers)]


class _Check:
    """The search in one checkpoint."""

    def __init__(self, tensors: Mapping[str, StoredTensor], path: Path, hidden: int, experts: ExpertsConfig) -> None:
        self._tensors, self._path, self._hidden, self._experts = tensors, path, hidden, experts

    def layer(self, index: int) -> ExpertNames:
        experts, layer = self._experts, f"model.layers.{index}"
        count, width, hidden = experts.routing.num_experts, experts.intermediate_size, self._hidden
        spelling = max(_SPELLINGS, key=lambda found: self._num_found(layer, found))  # the first of several
        router = next((name for name in ROUTERS if f"{layer}.{name}.weight" in self._tensors), ROUTERS[0])
        self._check_shape(f"{layer}.{router}.weight", count, hidden)  # first: it bounds the count
        is_fused = len(spelling.gate_up) == 1
        biases = self._biases(layer, router, spelling) if experts.has_bias else ((), ())
        names = ExpertNames(
            f"{layer}.{router}",
            tuple(tuple(f"{layer}.{part.format(e)}" for part in spelling.gate_up) for e in range(count)),
            tuple(f"{layer}.{spelling.down.format(e)}" for e in range(count)),
            biases[0],
            biases[1],
            correction=f"{layer}.{router}.{CORRECTION}" if experts.has_correction else None,
            shared=f"{layer}.{SHARED}" if experts.shared_size else None,
            is_interleaved=is_fused and experts.is_interleaved,
            is_transposed=is_fused and experts.is_interleaved and self._is_floating(f"{layer}.{spelling.down}"),
        )
        rows = 2 * width if is_fused else width
        for gate_up, down in zip(names.gate_up, names.down, strict=True):
            for name in gate_up:
                self._check_shape(weight_name(name), *self._oriented(names, rows, hidden))
            self._check_shape(weight_name(down), *self._oriented(names, hidden, width))
        for part in (*spelling.gate_up, spelling.down):
            self._check_no_more(weight_name(f"{layer}.{part.format(count)}"))
        if names.correction:
            self._check_shape(names.correction, count)
        if names.shared and experts.shared_size:
            for part in ("gate_proj", "up_proj"):
                self._check_shape(f"{names.shared}.{part}.weight", experts.shared_size, hidden)
            self._check_shape(f"{names.shared}.down_proj.weight", hidden, experts.shared_size)
        return names

    def _biases(
        self, layer: str, router: str, spelling: _Spelling
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """The names of the biases of gate_up and of down of each expert."""
        if not spelling.down_bias:
            raise ConfigError(
                f"{self._path}: tensor {layer}.{spelling.down.format(0)}.bias is missing in the checkpoint: the biases "
                "of all experts of a layer lie in one tensor",
                param="model",
            )
        count, width = self._experts.routing.num_experts, self._experts.intermediate_size
        self._check_shape(f"{layer}.{router}.bias", count)
        gate_up = [tuple(f"{layer}.{part.format(e)}" for part in spelling.gate_up_bias) for e in range(count)]
        down = [f"{layer}.{spelling.down_bias.format(e)}" for e in range(count)]
        for name in gate_up[0]:
            self._check_shape(name, 2 * width if len(spelling.gate_up_bias) == 1 else width)
        self._check_shape(down[0], self._hidden)
        return tuple(gate_up), tuple(down)

    def _oriented(self, names: ExpertNames, rows: int, columns: int) -> tuple[int, int]:
        return (columns, rows) if names.is_transposed else (rows, columns)

    def _is_floating(self, name: str) -> bool:
        tensor = self._tensors.get(split_index(weight_name(name.format(0)))[0])
        return tensor is None or tensor.format is None

    def _num_found(self, layer: str, spelling: _Spelling) -> int:
        """How many weights of the first and of the last expert are named so."""
        ends = (0, self._experts.routing.num_experts - 1)
        names = [weight_name(f"{layer}.{part.format(e)}") for part in (*spelling.gate_up, spelling.down) for e in ends]
        return sum(split_index(name)[0] in self._tensors for name in names)

    def _check_shape(self, name: str, *shape: int) -> None:
        """Raise unless the tensor is there and has this shape, or where the name has an index, one for each expert."""
        tensor_name, index = split_index(name)
        tensor = self._tensors.get(tensor_name)
        if tensor is None:
            raise ConfigError(f"{self._path}: tensor {tensor_name} is missing in the checkpoint", param="model")
        count = self._experts.routing.num_experts
        wanted = shape if index is None else (count, *shape)
        if tensor.shape != wanted:
            raise ConfigError(
                f"{tensor.path}: tensor {tensor_name} has shape {list(tensor.shape)}; the config asks for "
                f"{list(wanted)}, by {self._experts.count_field} ({count}), {self._experts.width_field} "
                f"({self._experts.intermediate_size}) and hidden_size ({self._hidden})",
                param="model",
            )

    def _check_no_more(self, name: str) -> None:
        """Raise for an expert beyond the last one. (One tensor of all experts has a shape that says it.)"""
        if name in self._tensors:
            raise ConfigError(
                f"{self._tensors[name].path}: tensor {name} is of an expert beyond the last one; "
                f"{self._experts.count_field} is {self._experts.routing.num_experts}",
                param="model",
            )
