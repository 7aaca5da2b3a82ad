"""The decoder that all families here are: attention and a gated MLP, or a mixture of experts, in each layer, with their
differences as data.

A family's file reads its config.json into a DecoderConfig, which says where the norms are, what is rotated, and what is
multiplied with what. Knows the names of tensors, not the names of families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.experts import ExpertNames, ExpertsConfig
from diptych.runtime.models.model_config import (
    AttentionConfig,
    LayerAttention,
    ModelConfig,
    RopeConfig,
    read_common,
    read_heads,
)

if TYPE_CHECKING:
    from typing import Any

    import torch

    from diptych.runtime.layers.forward_pass import ForwardPass
    from diptych.runtime.layers.layer_loader import LayerLoader
    from diptych.runtime.layers.parts import (
        Attention,
        GatedMlp,
        MixtureOfExperts,
        Norm,
        RmsNorm,
        RopeAndCache,
        ShortConvolution,
    )
    from diptych.runtime.ops.ops import Activation, Linear


NormKind = Literal["rounded", "wide", "centered", "plain", "layer"]


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm of the root mean square. kind: rounded: the normed value is rounded to the model's dtype, then multiplied
    with the weight; wide: multiplied in fp32, then rounded; centered: likewise, with 1 + weight; plain: it has no
    weight; layer: of what differs from the mean, with weight and bias."""

    eps: float
    kind: NormKind = "rounded"


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """Layers that mix tokens by a short convolution, gated before and behind it, in place of attention. layers: whether
    each layer of the model is one. taps: how many tokens it sees, its own among them. bias: of the convolution and of
    the projections around it.

    What a token leaves for those behind it is one row of inputs. The cache holds it where K and V of a token lie, in
    ``num_caches`` layers of the cache, which attend to the newest ``taps`` tokens."""

    layers: tuple[bool, ...]
    taps: int
    bias: bool
    num_caches: int


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """What the layers of a decoder compute.

    ropes: of each layer (None: no rotation). norm: behind the last layer. before_norm, after_norm: before and behind
    attention and MLP (None: there is none). qk_norm: of queries and keys before they are rotated, head by head, or
    where norms_rows of all heads together. embedding_norm: of the embedding. embedding_multiplier, residual_multiplier,
    logits_multiplier: of embeddings (in the model's dtype where rounds_multiplier), of what each part adds to the
    residual stream, of logits. final_softcap: of logits after that. is_fused: the checkpoint holds q, k and v, and gate
    and up, as one tensor each. has_attention_gate: see DecoderLayer. experts: of the layers that are mixtures (None: no
    layer is one); intermediate_size is that of the others. num_draft_layers: layers that the checkpoint holds behind
    the last one, which are not loaded. convolution: of layers without attention (None: there are none). part_names: how
    the checkpoint calls the parts of its layers that have other names than in most.
    """

    intermediate_size: int
    ropes: tuple[RopeConfig | None, ...]
    tie_word_embeddings: bool
    norm: NormConfig
    before_norm: NormConfig | None
    after_norm: NormConfig | None = None
    qk_norm: NormConfig | None = None
    norms_rows: bool = False
    embedding_norm: NormConfig | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    final_softcap: float | None = None
    is_fused: bool = False
    has_attention_gate: bool = False
    experts: ExpertsConfig | None = None
    num_draft_layers: int = 0
    convolution: ConvolutionConfig | None = None
    part_names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def num_layers(self) -> int:
        return len(self.ropes)

    @property
    def caches(self) -> tuple[range, ...]:
        """By layer, those of the cache that it has: entries of attention.layers."""
        ends = [0]
        for index in range(self.num_layers):
            is_convolution = self.convolution is not None and self.convolution.layers[index]
            ends.append(ends[-1] + (self.convolution.num_caches if self.convolution and is_convolution else 1))
        return tuple(map(range, ends, ends[1:]))

    def part_name(self, part: str) -> str:
        """The name of a part in the checkpoint."""
        return self.part_names.get(part, part)

    def for_context(self, num_positions: int) -> Self:
        ropes = tuple(rope and rope.for_context(num_positions) for rope in self.ropes)
        if ropes == self.ropes:
            return self
        original = next(rope.original_max_positions for rope in self.ropes if rope and rope.long_factors)
        which = f"long ones, beyond {original}" if num_positions > original else f"short ones, up to {original}"
        note = f"the rotary factors are the {which} tokens, as max_model_len is {num_positions}"
        return replace(self, ropes=ropes, notes=(*self.notes, note))


def read_decoder(
    fields: ConfigFields,
    ropes: Sequence[RopeConfig | None],
    *,
    windows: Sequence[int | None] = (),
    scale: float | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    **differences: Any,
) -> DecoderConfig:
    """What families read alike, with their ``differences``: fields of DecoderConfig. ropes, windows: of each layer (no
    windows given: no layer has one). scale: of scores (None: head_dim^-0.5). softcap, has_sinks: see LayerAttention.
    head_dim: where the file does not say it (None: hidden_size divided by the number of heads). kv_heads: likewise
    (None: as many as there are heads)."""
    heads = read_heads(fields, head_dim, kv_heads)
    num_layers = fields.integer("num_hidden_layers")
    scale = heads[-1] ** -0.5 if scale is None else scale
    layers = tuple(LayerAttention(scale, window, softcap, has_sinks) for window in windows or (None,) * num_layers)
    norms: dict[str, NormConfig] = {}
    if not {"norm", "before_norm"} <= differences.keys():
        norms = dict.fromkeys(("norm", "before_norm"), NormConfig(fields.number("rms_norm_eps", 1e-6)))
    return DecoderConfig(
        **read_common(fields),
        **{
            "attention": AttentionConfig(*heads, layers),
            "intermediate_size": fields.integer("intermediate_size"),
            "ropes": tuple(ropes),
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            **norms,
            **differences,
        },
    )


class LoadedLayer:
    """The parts of one layer, loaded from ``model.layers.{index}``; see DecoderLayer. experts: the names of the
    weights of its mixture (None: it has one MLP)."""

    rope: RopeAndCache | None
    attention: Attention | None

    def __init__(
        self, config: DecoderConfig, load: LayerLoader, index: int, experts: ExpertNames | None = None
    ) -> None:
        hidden, part = config.hidden_size, config.part_name
        layer = f"model.layers.{index}"
        before, after = config.before_norm, config.after_norm
        self.caches = config.caches[index]
        self.convolution: ShortConvolution | None = None
        self.attention_gate: Linear | None = None
        self.input_norm = _load_norm(load, f"{layer}.{part('input_layernorm')}", hidden, before)
        if config.convolution is not None and config.convolution.layers[index]:
            self._load_convolution(config.convolution, load, f"{layer}.conv", hidden)
        else:
            self._load_attention(config, load, index)
        self.attention_norm = _load_norm(load, f"{layer}.post_attention_layernorm", hidden, after)
        mlp_norm = part("post_attention_layernorm") if after is None else "pre_feedforward_layernorm"
        self.mlp_norm = _load_norm(load, f"{layer}.{mlp_norm}", hidden, before)
        self.mlp = _load_mlp(load, f"{layer}.{part('mlp')}", config, experts)
        self.output_norm = _load_norm(load, f"{layer}.post_feedforward_layernorm", hidden, after)

    def _load_attention(self, config: DecoderConfig, load: LayerLoader, index: int) -> None:
        heads, hidden, part = config.attention, config.hidden_size, config.part_name
        name = f"model.layers.{index}.self_attn"
        key_width = heads.num_kv_heads * heads.head_dim
        if config.is_fused:
            widths = [heads.query_width + 2 * key_width]
            self.qkv = load.stacked([f"{name}.qkv_proj"], hidden, widths, bias=config.qkv_bias)
        else:
            self.qkv = load.qkv(name, hidden, heads, bias=config.qkv_bias)
        q_width, k_width = (heads.query_width, key_width) if config.norms_rows else (heads.head_dim, heads.head_dim)
        q_norm = _load_rms_norm(load, f"{name}.{part('q_norm')}", q_width, config.qk_norm)
        k_norm = _load_rms_norm(load, f"{name}.{part('k_norm')}", k_width, config.qk_norm)
        self.rope = load.rope(config.ropes[index], q_norm, k_norm)
        self.attention = load.attention(heads.layers[self.caches.start], name, heads.num_heads)
        if config.has_attention_gate:
            self.attention_gate = load.linear(f"{name}.gate_proj", hidden, heads.query_width)
        self.o_proj = load.linear(f"{name}.{part('o_proj')}", heads.query_width, hidden, bias=config.output_bias)

    def _load_convolution(self, convolution: ConvolutionConfig, load: LayerLoader, name: str, hidden: int) -> None:
        """In the places of qkv and o_proj are the projections around the convolution. Nothing is rotated, and there is
        no attention."""
        bias = convolution.bias
        self.qkv = load.linear(f"{name}.in_proj", hidden, 3 * hidden, bias=bias)
        self.convolution = load.convolution(f"{name}.conv", hidden, convolution.taps, bias=bias)
        self.rope, self.attention = None, None
        self.o_proj = load.linear(f"{name}.out_proj", hidden, hidden, bias=bias)


def _load_mlp(
    load: LayerLoader, name: str, config: DecoderConfig, experts: ExpertNames | None
) -> GatedMlp | MixtureOfExperts:
    hidden, inner = config.hidden_size, config.intermediate_size
    if experts is not None:
        assert config.experts is not None, "which has the names"
        return load.experts(experts, hidden, config.experts, config.activation)
    fused = "gate_up_proj" if config.is_fused else None
    gate, up, down = map(config.part_name, ("gate_proj", "up_proj", "down_proj"))
    return load.gated_mlp(
        name,
        hidden,
        inner,
        bias=config.mlp_bias,
        activation=config.activation,
        fused=fused,
        parts=(gate, up, down),
    )


def _load_norm(load: LayerLoader, name: str, width: int, norm: NormConfig | None) -> Norm | None:
    if norm is not None and norm.kind == "layer":
        return load.layer_norm(name, width, norm.eps)
    return _load_rms_norm(load, name, width, norm)


def _load_rms_norm(load: LayerLoader, name: str, width: int, norm: NormConfig | None) -> RmsNorm | None:
    if norm is None:
        return None
    if norm.kind == "plain":
        return load.plain_norm(width, norm.eps)
    offset = 1.0 if norm.kind == "centered" else 0.0
    return load.rms_norm(name, width, norm.eps, is_wide=norm.kind != "rounded", offset=offset)


class Decoder:
    """A LanguageModel of decoder layers. A family adds ``read_config``."""

    def __init__(self, config: DecoderConfig, load: LayerLoader) -> None:
        self.config = config
        # which experts there is work for is known on the host
        self.fits_cuda_graphs = config.experts is None and config.convolution is None
        is_tied, hidden = config.tie_word_embeddings, config.hidden_size
        for index in range(config.num_layers, config.num_layers + config.num_draft_layers):
            load.leave_out(f"model.layers.{index}.")
        experts: Sequence[ExpertNames | None] = [None] * config.num_layers
        if config.experts is not None:
            experts = load.find_experts(hidden, config.experts)
        self.embed_tokens = load.embedding("model.embed_tokens", config.vocab_size, hidden, is_tied=is_tied)
        self.embedding_norm = _load_norm(load, "model.embed_norm", hidden, config.embedding_norm)
        layers = [LoadedLayer(config, load, index, names) for index, names in enumerate(experts)]
        norm = _load_norm(load, f"model.{config.part_name('norm')}", hidden, config.norm)
        assert norm is not None, "config.norm is one"
        self.lm_head = load.lm_head(self.embed_tokens, is_tied=is_tied, bias=config.head_bias)
        self.layers = load.decoder(layers, norm, multiplier=config.residual_multiplier)
        multiplier = config.embedding_multiplier
        self._multiplier = load.rounded(multiplier) if config.rounds_multiplier else multiplier
        self._softcap = load.softcap

    def forward(self, step: ForwardPass) -> torch.Tensor:
        x = self.embed_tokens(step.batch.token_ids)  # [num_tokens, hidden]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.config.embedding_multiplier != 1.0:
            x = x * self._multiplier
        return self.layers(x, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden)
        if self.config.logits_multiplier != 1.0:
            logits.mul_(self.config.logits_multiplier)
        return logits if self.config.final_softcap is None else self._softcap(logits, self.config.final_softcap)
