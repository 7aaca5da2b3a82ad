"""Makes the parts of a model out of the tensors of its checkpoint, packed for the machine that computes it.

Knows how Hugging Face names the halves of a part (weight, bias, q_proj and its kind), not which parts a family has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.layers.decoder_layers import DecoderLayers
from diptych.runtime.layers.native_step import DecoderLayer, native_step
from diptych.runtime.layers.parts import (
    Attention,
    Embedding,
    GatedMlp,
    LayerNorm,
    MixtureOfExperts,
    Norm,
    QuantizedEmbedding,
    RmsNorm,
    RopeAndCache,
    ShortConvolution,
)
from diptych.runtime.layers.rope import RotaryTables
from diptych.runtime.layers.transformers_layers import TransformersLayers
from diptych.runtime.models.experts import ExpertNames, ExpertsConfig
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention, RopeConfig
from diptych.runtime.models.transformers_config import TransformersConfig
from diptych.runtime.ops.ops import Activation, Linear, Ops
from diptych.runtime.weights.loader import Weights
from diptych.runtime.weights.quantized_weight import QuantizedSource, QuantizedWeight, quantize
from diptych.runtime.weights.stored_tensor import weight_name
from diptych.runtime.weights.weight_format import NO_QUANTIZATION, Quantization, WeightFormat

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a weight lies in a checkpoint. is_transposed: columns first. is_interleaved: gates and ups alternate."""

    is_transposed: bool = False
    is_interleaved: bool = False

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Gates first."""
        return torch.cat((rows[::2], rows[1::2])) if self.is_interleaved else rows

    def ordered_source(self, weight: QuantizedSource) -> QuantizedSource:
        """The same weight, gates first, when it is read."""
        if not self.is_interleaved:
            return weight

        def read() -> QuantizedWeight:
            stored = weight.read()
            mins = None if stored.mins is None else self.ordered(stored.mins)
            return replace(stored, values=self.ordered(stored.values), scales=self.ordered(stored.scales), mins=mins)

        return replace(weight, read=read)


AS_STORED = _Form()


def _biases(names: Sequence[str], are_there: bool) -> list[str]:
    return [f"{name}.bias" for name in names] if are_there else []


class LayerLoader:
    """Loads the parts of one model; a family calls it with what it has. Names are without ``.weight`` and ``.bias``."""

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        attention: AttentionBackend,
        rotary: RotaryTables,
        quantization: Quantization = NO_QUANTIZATION,
    ) -> None:
        self._weights = weights
        self._quantization = quantization
        self.formats: dict[WeightFormat, None] = {}  # of weights in whole numbers, in the order of loading
        self._memory = weights.memory
        self._ops = ops
        self._attention = attention
        self._rotary = rotary
        self._embedding = ""  # the name of the embedding, once it is loaded

    def transformers_layers(self, config: TransformersConfig) -> TransformersLayers:
        """A whole model of the package transformers, which reads the checkpoint by itself."""
        self._weights.ignore_all()
        return TransformersLayers(config, self.rope(None), self._attention, self._weights.dtype)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor as it is in the checkpoint, in the model's dtype."""
        return self._weights.tensor(name, shape)

    def leave_out(self, prefix: str) -> None:
        """Tensors with such names may be there; the model does without them."""
        self._weights.leave_out(prefix)

    def embedding(
        self, name: str, vocab_size: int, width: int, *, is_tied: bool = False
    ) -> Embedding | QuantizedEmbedding:
        """A table of one row per token. is_tied: the checkpoint may hold it as the lm_head alone."""
        if is_tied and not self._weights.has(f"{name}.weight") and self._weights.has(f"{HEAD}.weight"):
            name = HEAD
        self._embedding = name
        weight = self._quantized([name], width, [vocab_size], is_vocabulary=True)
        if weight is None:
            return Embedding(self.tensor(f"{name}.weight", vocab_size, width))
        return QuantizedEmbedding(self._ops.pack_quantized(weight, None, self._weights.dtype, self._memory))

    def rms_norm(self, name: str, width: int, eps: float, *, is_wide: bool = False, offset: float = 0.0) -> RmsNorm:
        """An RMS norm. is_wide: the weight is fp32 whatever the model's dtype, and the product is rounded once. offset:
        what is added to the weight as the checkpoint holds it, in fp32."""
        dtype = torch.float32 if is_wide else None
        return RmsNorm(self._ops, self._weights.tensor(f"{name}.weight", [width], dtype, offset), eps)

    def plain_norm(self, width: int, eps: float) -> RmsNorm:
        """An RMS norm without a weight."""
        return RmsNorm(self._ops, self._memory.new([width], torch.float32, lambda ones: ones.fill_(1.0)), eps)

    def layer_norm(self, name: str, width: int, eps: float) -> LayerNorm:
        """A norm that subtracts the mean, with weight and bias."""
        return LayerNorm(self._ops, self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width), eps)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer."""
        return self.stacked([name], inputs, [outputs], bias=bias)

    def stacked(self, names: Sequence[str], inputs: int, outputs: Sequence[int], *, bias: bool = False) -> Linear:
        """Linear layers of the same input as one, their outputs side by side."""
        return self._linear(names, inputs, outputs, bias=bias)

    def qkv(self, name: str, inputs: int, heads: AttentionConfig, *, bias: bool = False) -> Linear:
        """The projections to queries, keys and values as one: all query heads, all key heads, all value heads."""
        outputs = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        return self.stacked([f"{name}.{part}_proj" for part in "qkv"], inputs, outputs, bias=bias)

    def gate_up(
        self,
        name: str,
        inputs: int,
        inner: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        fused: str | None = None,
        parts: Sequence[str] = ("gate_proj", "up_proj"),
    ) -> Linear:
        """The first half of a gated MLP: activation(gate(x)) * up(x), ``inner`` wide. fused: the name behind ``name``
        of one tensor that holds both, gates first. parts: the names of both, where each has its own."""
        names = [f"{name}.{fused}"] if fused else [f"{name}.{part}" for part in parts]
        return self._gate_up(names, inputs, inner, bias=bias, activation=activation)

    def gated_mlp(
        self,
        name: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        fused: str | None = None,
        parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMlp:
        """A gated MLP, ``inner`` wide within. fused: see gate_up. parts: the names of gate, up and down."""
        gate_up = self.gate_up(name, hidden, inner, bias=bias, activation=activation, fused=fused, parts=parts[:2])
        return GatedMlp(gate_up, self.linear(f"{name}.{parts[2]}", inner, hidden, bias=bias))

    def find_experts(self, hidden: int, experts: ExpertsConfig) -> list[ExpertNames | None]:
        """The names of the experts of each layer (None: it is no mixture). Raises ConfigError for anything that is
        wrong with the tensors of any of them: call it before the first one is loaded."""
        return self._weights.find_experts(hidden, experts)

    def experts(
        self, names: ExpertNames, hidden: int, experts: ExpertsConfig, activation: Activation = "silu"
    ) -> MixtureOfExperts:
        """The mixture of one layer. The weights of an expert lie side by side, and experts one after the other. The
        router stays in floating point: a rounding that is small to a sum may choose another expert."""
        inner, form = experts.intermediate_size, _Form(names.is_transposed, names.is_interleaved)
        mlps = []
        for index, (gate_up, down) in enumerate(zip(names.gate_up, names.down, strict=True)):
            biases = names.gate_up_bias[index] if names.gate_up_bias else ()
            first = self._gate_up(gate_up, hidden, inner, activation=activation, biases=biases, form=form)
            biases = names.down_bias[index : index + 1]
            second = self._linear([down], inner, [hidden], biases=biases, form=_Form(names.is_transposed))
            mlps.append(GatedMlp(first, second))
        count = experts.routing.num_experts
        return MixtureOfExperts(
            self._ops,
            experts.routing,
            self._router(names.router, hidden, experts),
            self._ops.join_experts(mlps),
            self._weights.tensor(names.correction, [count], torch.float32) if names.correction else None,
            self.gated_mlp(names.shared, hidden, experts.shared_size, activation=activation)
            if names.shared and experts.shared_size
            else None,
        )

    def _router(self, name: str, hidden: int, experts: ExpertsConfig) -> Linear:
        count = experts.routing.num_experts
        dtype = torch.float32 if experts.is_wide else None
        weight = self._weights.fused([f"{name}.weight"], [count], hidden, dtype=dtype)
        bias = self._weights.fused([f"{name}.bias"], [count], dtype=dtype) if experts.has_bias else None
        return self._ops.pack_router(weight, None if bias is None else self._memory.keep(bias), self._memory)

    def rope(
        self, rope: RopeConfig | None, q_norm: RmsNorm | None = None, k_norm: RmsNorm | None = None
    ) -> RopeAndCache:
        """Rotation of q and k (None: they are not rotated), and the way of k and v into the cache."""
        return RopeAndCache(self._ops, self._rotary.table(rope), q_norm, k_norm)

    def attention(self, how: LayerAttention, name: str = "", num_heads: int = 0) -> Attention:
        """Attention over the cache. name, num_heads: of the part of the layer, for one that has sinks."""
        sinks = self._weights.tensor(f"{name}.sinks", [num_heads], torch.float32) if how.has_sinks else None
        return Attention(how, sinks)

    def convolution(self, name: str, width: int, taps: int, *, bias: bool = False) -> ShortConvolution:
        """A causal convolution of each of ``width`` channels over ``taps`` tokens."""
        shape = [taps] if self._weights.is_matrix(f"{name}.weight") else [1, taps]
        stored = self._weights.fused([f"{name}.weight"], [width], *shape)
        weight = self._memory.keep(stored.view(width, taps).t().contiguous())
        vector = self.tensor(f"{name}.bias", width) if bias else None
        return ShortConvolution(self._ops, weight, vector, self._rotary.table(None))

    def lm_head(self, embedding: Embedding | QuantizedEmbedding, *, is_tied: bool, bias: bool = False) -> Linear:
        """Hidden states to logits. is_tied: with the weights of the embedding, unless the checkpoint holds others, as
        transformers has it. bias: of an lm_head with weights of its own."""
        head, embedded = f"{HEAD}.weight", f"{self._embedding}.weight"
        if not is_tied or (self._weights.has(head) and not self._weights.are_equal(head, embedded)):
            return self._linear([HEAD], embedding.width, [embedding.vocab_size], bias=bias, is_vocabulary=True)
        self._weights.ignore(head)
        if isinstance(embedding, QuantizedEmbedding):
            return embedding.linear
        return self._ops.pack_linear(embedding.weight, None, self._memory)

    def decoder(self, layers: Sequence[DecoderLayer], norm: Norm, *, multiplier: float = 1.0) -> DecoderLayers:
        """These layers and the norm behind them; decode steps of all of them in one native call where that can be.
        multiplier: of what each part of a layer adds."""
        native = native_step(layers, norm, self._attention, multiplier)
        return DecoderLayers(self._ops, layers, norm, multiplier, native)

    def rounded(self, value: float) -> float:
        """A number as the model's dtype holds it."""
        return float(torch.tensor(value, dtype=self._weights.dtype))

    def softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(logits / cap), in place. logits [rows, vocab]."""
        self._ops.softcap(logits, cap)
        return logits

    def _linear(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        *,
        bias: bool = False,
        biases: Sequence[str] = (),
        form: _Form = AS_STORED,
        is_vocabulary: bool = False,
    ) -> Linear:
        """biases: whole names, where they are not those of ``names``."""
        vector, memory = self._bias(biases or _biases(names, bias), outputs), self._memory
        if (weight := self._quantized(names, inputs, outputs, form, is_vocabulary=is_vocabulary)) is not None:
            return self._ops.pack_quantized(weight, vector, self._weights.dtype, memory)
        return self._ops.pack_linear(self._floating(names, inputs, outputs, form), vector, memory)

    def _gate_up(
        self,
        names: Sequence[str],
        inputs: int,
        inner: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        biases: Sequence[str] = (),
        form: _Form = AS_STORED,
    ) -> Linear:
        """names: of gate and up, or of one tensor that holds both. biases: see _linear."""
        outputs, ops = [2 * inner] if len(names) == 1 else [inner, inner], self._ops
        vector = self._bias(biases or _biases(names, bias), outputs, form)
        if (weight := self._quantized(names, inputs, outputs, form)) is not None:
            return ops.pack_quantized_gate_up(weight, vector, self._weights.dtype, self._memory, activation)
        return ops.pack_gate_up(self._floating(names, inputs, outputs, form), vector, self._memory, activation)

    def _floating(
        self, names: Sequence[str], inputs: int, outputs: Sequence[int], form: _Form = AS_STORED
    ) -> torch.Tensor:
        tensors = [weight_name(name) for name in names]
        if form.is_transposed:
            return form.ordered(self._weights.fused(tensors, [inputs], sum(outputs)).t())
        return form.ordered(self._weights.fused(tensors, outputs, inputs))

    def _bias(self, names: Sequence[str], outputs: Sequence[int], form: _Form = AS_STORED) -> torch.Tensor | None:
        return self._memory.keep(form.ordered(self._weights.fused(names, outputs))) if names else None

    def _quantized(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        form: _Form = AS_STORED,
        *,
        is_vocabulary: bool = False,
    ) -> QuantizedSource | None:
        """The weight in whole numbers, where the checkpoint holds it so or the quantization asks for it."""
        if self._attention.device.type != "cpu":
            return None
        if (found := self._weights.quantized(names, outputs, inputs)) is not None:
            self.formats[found.format] = None
            return form.ordered_source(found)
        wanted = self._quantization.format_of(inputs, is_vocabulary=is_vocabulary)
        if wanted is None:
            return None
        self.formats[wanted] = None
        if not form.is_transposed:
            return form.ordered_source(self._weights.rounded(names, outputs, inputs, wanted))
        weight = self._floating(names, inputs, outputs, form)
        return QuantizedSource(wanted, sum(outputs), inputs, lambda: quantize(weight, wanted))
