"""Decode steps of all layers in one native call, where a call for each part of a layer would cost as much as its work.

For the layers of decoder_layers.py, computed in the order of decode_step.h by the very kernels that the parts call one
by one: the same bits come out. A model that is made otherwise, or has a part without a kernel, goes without.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.dtypes import INT8
from diptych.runtime.kernels.native import NativeGate, NativeWeight
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.parts import (
    Attention,
    GatedMlp,
    MixtureOfExperts,
    Norm,
    RmsNorm,
    RopeAndCache,
    ShortConvolution,
)
from diptych.runtime.ops.native_experts import NativeExpert, NativeExperts, NativeMixture, native_routing
from diptych.runtime.ops.native_linear import NativeLinear, WideNativeLinear
from diptych.runtime.ops.ops import Linear


class DecoderLayer(Protocol):
    """x += attention_norm(o_proj(attention(rope(qkv(input_norm(x)))))), then x += output_norm(mlp(mlp_norm(x))).

    A norm that is None is left out. attention_gate: what attention gives is multiplied with sigmoid(attention_gate(.))
    of the layer's normed input before o_proj (None: it is not). convolution: mixes what qkv gives in place of rope and
    attention (None: these do). caches: the layers of the cache that are its own, one for attention.
    """

    @property
    def caches(self) -> range: ...
    @property
    def convolution(self) -> ShortConvolution | None: ...

    @property
    def input_norm(self) -> Norm | None: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def rope(self) -> RopeAndCache | None: ...
    @property
    def attention(self) -> Attention | None: ...
    @property
    def attention_gate(self) -> Linear | None: ...
    @property
    def o_proj(self) -> Linear: ...
    @property
    def attention_norm(self) -> Norm | None: ...
    @property
    def mlp_norm(self) -> Norm | None: ...
    @property
    def mlp(self) -> GatedMlp | MixtureOfExperts: ...
    @property
    def output_norm(self) -> Norm | None: ...


def _record(pointers: str, sizes: str, floats: str = "") -> list[tuple[str, type]]:
    """The fields of a struct in the order of decode_step.h."""
    kinds = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Norm(ctypes.Structure):
    _fields_ = _record("weight", "is_wide", "eps")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "attention_norm", "mlp_norm", "output_norm")),
        *((name, NativeWeight) for name in ("qkv", "attention_gate", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("q_norm", "k_norm")),
        *_record(
            "mixture convolution cos_sin query_scale sinks k_cache v_cache", "window rotary norms_rows inner_size group"
        ),
        ("gate", NativeGate),
        *_record("", "", "scale softcap"),
    )


class _InputsCache(ctypes.Structure):
    _fields_ = _record("k_cache v_cache", "group")


class _Convolution(ctypes.Structure):
    _fields_ = _record("weight bias caches", "taps num_caches")


class _Step(ctypes.Structure):
    _fields_ = (
        *_record("layers", ""),
        ("norm", _Norm),
        *_record(
            "residual x qkv attended gates inner partials positions slots block_tables query_start context_lens",
            "num_layers rows hidden heads kv_heads dim block_size table_stride is_int8",
            "multiplier",
        ),
    )


class NativeStep:
    """The layers of one model, and the norm behind them, for batches in which every sequence computes one token."""

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Norm, attention: NativeCpuAttention, multiplier: float
    ) -> None:
        self._attention = attention
        dim = attention.geometry.head_dim
        mixtures = [_mixture(layer.mlp) if isinstance(layer.mlp, MixtureOfExperts) else None for layer in layers]
        described = (_describe(layer, mixture, dim) for layer, mixture in zip(layers, mixtures, strict=True))
        self._layers = (_Layer * len(layers))(*described)
        self._convolutions: list[_Convolution] = []  # which _layers points to, and what these point to
        self._caches_of_inputs: list[ctypes.Array[_InputsCache]] = []
        self._places: list[_Layer | _InputsCache] = []  # what has each layer of the cache
        for layer, record in zip(layers, self._layers, strict=True):
            self._places += [record] if layer.convolution is None else self._add_convolution(layer, record)
        self._widest = max(map(_inner_size, layers))
        self._caches: Sequence[LayerCache] = ()  # those that _layers points to
        num_groups = len(attention.geometry.layers.groups)
        self._slots, self._block_tables = (ctypes.c_void_p * num_groups)(), (ctypes.c_void_p * num_groups)()
        self._kept = (list(layers), norm, mixtures)  # which the records point to, or to their tensors
        self._has_gates = any(layer.attention_gate is not None for layer in layers)
        geometry = attention.geometry
        self._step = _Step(
            layers=ctypes.addressof(self._layers), norm=_norm(norm), num_layers=len(layers),
            hidden=norm.weight.shape[0], heads=attention.num_heads,
            kv_heads=geometry.num_kv_heads, dim=geometry.head_dim, block_size=geometry.block_size,
            multiplier=multiplier, slots=ctypes.addressof(self._slots),
            block_tables=ctypes.addressof(self._block_tables), is_int8=geometry.dtype == INT8,
        )  # fmt: skip

    def __call__(self, residual: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """residual [num_seqs, hidden], the embeddings of the batch's tokens, is overwritten. Writes K and V, returns
        the normed hidden states [num_seqs, hidden]."""
        if step.caches is not self._caches:
            for index, (place, (k_cache, v_cache)) in enumerate(zip(self._places, step.caches, strict=True)):
                place.k_cache, place.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
                place.group = step.group_of(index)
            self._caches = step.caches
        call, batch = self._step, step.batch
        call.rows = rows = batch.num_seqs
        queries = call.heads * call.dim
        widths = [call.hidden, queries + 2 * call.kv_heads * call.dim, queries, self._widest]
        if self._convolutions:
            widths[1:3] = max(widths[1], 3 * call.hidden), max(queries, call.hidden)
        x, qkv, attended, inner = (residual.new_empty((rows, width)) for width in widths)
        call.residual, call.x, call.qkv = residual.data_ptr(), x.data_ptr(), qkv.data_ptr()
        call.attended, call.inner = attended.data_ptr(), inner.data_ptr()
        gates = residual.new_empty((rows, queries)) if self._has_gates else None
        call.gates = _pointer(gates)
        call.partials = self._attention.partials(batch).data_ptr()
        call.positions, call.table_stride = batch.positions.data_ptr(), batch.block_tables[0].stride(0)
        for group, (slots, tables) in enumerate(zip(batch.slot_mappings, batch.block_tables, strict=True)):
            self._slots[group], self._block_tables[group] = slots.data_ptr(), tables.data_ptr()
        call.query_start, call.context_lens = batch.query_start.data_ptr(), batch.context_lens.data_ptr()
        kernels = self._attention.kernels
        kernels.functions.diptych_decode_step(kernels.handle, ctypes.addressof(call))
        return x

    def _add_convolution(self, layer: DecoderLayer, record: _Layer) -> list[_InputsCache]:
        """Describe the convolution of a layer; its part of the cache."""
        assert layer.convolution is not None
        caches = (_InputsCache * len(layer.caches))()
        convolution = _Convolution(
            weight=layer.convolution.weight.data_ptr(), bias=_pointer(layer.convolution.bias),
            caches=ctypes.addressof(caches), taps=layer.convolution.taps, num_caches=len(caches),
        )  # fmt: skip
        record.convolution = ctypes.addressof(convolution)
        self._convolutions.append(convolution)
        self._caches_of_inputs.append(caches)
        return list(caches)


def native_step(
    layers: Sequence[DecoderLayer], norm: Norm, attention: AttentionBackend, multiplier: float
) -> NativeStep | None:
    """The native step of these layers, or None where a part has no kernel here (a norm that subtracts the mean has
    none)."""
    if not isinstance(attention, NativeCpuAttention) or not isinstance(norm, RmsNorm):
        return None
    if not all(_has_kernels(layer) for layer in layers):
        return None
    return NativeStep(layers, norm, attention, multiplier)


def _has_kernels(layer: DecoderLayer) -> bool:
    """Whether all linear layers are packed for the kernels, and all norms are RMS norms."""
    norms = (layer.input_norm, layer.attention_norm, layer.mlp_norm, layer.output_norm)
    if not all(norm is None or isinstance(norm, RmsNorm) for norm in norms):
        return False
    linears = (layer.qkv, layer.o_proj, layer.attention_gate)
    if not all(linear is None or isinstance(linear, NativeLinear) for linear in linears):
        return False
    return _mixture_has_kernels(layer.mlp) if isinstance(layer.mlp, MixtureOfExperts) else _mlp_has_kernels(layer.mlp)


def _mlp_has_kernels(mlp: GatedMlp) -> bool:
    return isinstance(mlp.gate_up, NativeLinear) and isinstance(mlp.down, NativeLinear)


def _mixture_has_kernels(mixture: MixtureOfExperts) -> bool:
    """Likewise; a gate of the expert of all rows has no kernel, and that expert has the activation of the others."""
    experts, shared = mixture.experts, mixture.shared
    if not isinstance(experts, NativeExperts) or not isinstance(mixture.router, NativeLinear) or mixture.shared_gate:
        return False
    if shared is None:
        return True
    gate_up = shared.gate_up
    return isinstance(gate_up, NativeLinear) and gate_up.activation == experts.activation and _mlp_has_kernels(shared)


def _mixture(mixture: MixtureOfExperts) -> NativeMixture:
    experts, shared = mixture.experts, mixture.shared
    assert isinstance(experts, NativeExperts), "see _has_kernels"
    return NativeMixture(
        router=_weight(mixture.router), routing=native_routing(mixture.routing, mixture.correction),
        experts=ctypes.addressof(experts.records), inner=experts.inner, gate=experts.gate,
        shared=NativeExpert() if shared is None else NativeExpert(_weight(shared.gate_up), _weight(shared.down)),
        shared_inner=0 if shared is None else shared.gate_up.out_features,
        router_is_wide=isinstance(mixture.router, WideNativeLinear),
    )  # fmt: skip


def _inner_size(layer: DecoderLayer) -> int:
    """How wide the MLP of a layer is within, or of a mixture the expert of all rows."""
    mlp = layer.mlp.shared if isinstance(layer.mlp, MixtureOfExperts) else layer.mlp
    return 0 if mlp is None else mlp.gate_up.out_features


def _describe(layer: DecoderLayer, mixture: NativeMixture | None, dim: int) -> _Layer:
    mlp = layer.mlp if isinstance(layer.mlp, GatedMlp) else None
    gate_up = mlp.gate_up if mlp is not None else None
    record = _Layer(
        input_norm=_norm(layer.input_norm), attention_norm=_norm(layer.attention_norm), mlp_norm=_norm(layer.mlp_norm),
        output_norm=_norm(layer.output_norm), qkv=_weight(layer.qkv), attention_gate=_weight(layer.attention_gate),
        output=_weight(layer.o_proj), gate_up=_weight(gate_up), down=_weight(mlp.down if mlp is not None else None),
        gate=gate_up.gate if isinstance(gate_up, NativeLinear) else NativeGate(), inner_size=_inner_size(layer),
        mixture=None if mixture is None else ctypes.addressof(mixture),
    )  # fmt: skip
    if layer.rope is not None and layer.attention is not None:
        _describe_attention(record, layer.rope, layer.attention, dim)
    return record


def _describe_attention(record: _Layer, rope: RopeAndCache, attention: Attention, dim: int) -> None:
    how, norm_of_heads, table = attention.how, rope.q_norm or rope.k_norm, rope.table
    record.q_norm, record.k_norm = _norm(rope.q_norm), _norm(rope.k_norm)
    record.cos_sin, record.query_scale = table.cos_sin.data_ptr(), _pointer(table.query_scale)
    record.window, record.rotary = how.window or 0, table.cos_sin.shape[1]
    record.norms_rows = norm_of_heads is not None and norm_of_heads.weight.shape[0] != dim
    record.scale, record.softcap, record.sinks = how.scale, how.softcap or 0.0, _pointer(attention.sinks)


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm()
    assert isinstance(norm, RmsNorm), "see native_step"
    return _Norm(norm.weight.data_ptr(), norm.weight.dtype is torch.float32, norm.eps)


def _weight(linear: Linear | None) -> NativeWeight:
    return linear.weight if isinstance(linear, NativeLinear) else NativeWeight()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
