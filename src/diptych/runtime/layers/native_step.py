"""Decode steps of all layers in one native call, where a call for each part of a layer would cost as much as its work.

For models of pre-norm layers (PreNormLayer), computed in the order of decode_step.h by the very kernels that the
parts call one by one: the same bits come out. A model that is made otherwise, or has a part without a kernel, goes
without.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.kernels.native import NativeWeight
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.parts import Attention, RmsNorm, RopeAndCache
from diptych.runtime.ops.native_linear import NativeLinear
from diptych.runtime.ops.ops import Linear


class PreNormLayer(Protocol):
    """x += o_proj(attention(rope(qkv(input_norm(x))))), then x += down(gate_up(mlp_norm(x)))."""

    @property
    def input_norm(self) -> RmsNorm: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def rope(self) -> RopeAndCache: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def o_proj(self) -> Linear: ...
    @property
    def mlp_norm(self) -> RmsNorm: ...
    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...


def _record(pointers: str, sizes: str, floats: str = "") -> list[tuple[str, type]]:
    """The fields of a struct in the order of decode_step.h."""
    kinds = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = (
        _record("input_norm mlp_norm", "")
        + [(name, NativeWeight) for name in ("qkv", "output", "gate_up", "down")]
        + _record("q_norm k_norm k_cache v_cache", "window")
    )


class _Step(ctypes.Structure):
    _fields_ = _record(
        "layers norm cos_sin residual x qkv attended inner partials positions slots block_tables query_start "
        "context_lens",
        "num_layers rows hidden inner_size heads kv_heads dim block_size table_stride",
        "eps scale",
    )


class NativeStep:
    """The layers of one model, and the norm behind them, for batches in which every sequence computes one token."""

    def __init__(self, layers: Sequence[PreNormLayer], norm: RmsNorm, attention: NativeCpuAttention) -> None:
        self._attention = attention
        self._layers = (_Layer * len(layers))(*(_describe(layer) for layer in layers))
        self._caches: Sequence[LayerCache] = ()  # those that _layers points to
        geometry, first = attention.geometry, layers[0]
        self._step = _Step(
            layers=ctypes.addressof(self._layers), norm=norm.weight.data_ptr(), cos_sin=first.rope.cos_sin.data_ptr(),
            num_layers=len(layers), hidden=norm.weight.shape[0], inner_size=first.gate_up.out_features,
            heads=attention.num_heads, kv_heads=geometry.num_kv_heads, dim=geometry.head_dim,
            block_size=geometry.block_size, eps=norm.eps, scale=first.attention.how.scale,
        )  # fmt: skip

    def __call__(self, residual: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """residual [num_seqs, hidden], the embeddings of the batch's tokens, is overwritten. Writes K and V, returns
        the normed hidden states [num_seqs, hidden]."""
        if step.caches is not self._caches:
            for layer, (k_cache, v_cache) in zip(self._layers, step.caches, strict=True):
                layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            self._caches = step.caches
        call, batch = self._step, step.batch
        call.rows = rows = batch.num_seqs
        queries = call.heads * call.dim
        widths = [call.hidden, queries + 2 * call.kv_heads * call.dim, queries, call.inner_size]
        x, qkv, attended, inner = (residual.new_empty((rows, width)) for width in widths)
        call.residual, call.x, call.qkv = residual.data_ptr(), x.data_ptr(), qkv.data_ptr()
        call.attended, call.inner = attended.data_ptr(), inner.data_ptr()
        call.partials = self._attention.partials(batch).data_ptr()
        call.positions, call.slots = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        call.block_tables, call.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        call.query_start, call.context_lens = batch.query_start.data_ptr(), batch.context_lens.data_ptr()
        kernels = self._attention.kernels
        kernels.functions.diptych_decode_step(kernels.handle, ctypes.addressof(call))
        return x


def native_step(layers: Sequence[PreNormLayer], norm: RmsNorm, attention: AttentionBackend) -> NativeStep | None:
    """The native step of these layers, or None where a part has no kernel here, or layers differ in what the call has
    once (eps, scale, rotation)."""
    if not isinstance(attention, NativeCpuAttention):
        return None
    if any(len(_native_linears(layer)) < 4 for layer in layers):
        return None
    once = {(layer.attention.how.scale, layer.rope.cos_sin.data_ptr()) for layer in layers}
    eps = {norm.eps} | {part for layer in layers for part in _eps_of(layer)}
    return NativeStep(layers, norm, attention) if len(once) == len(eps) == 1 else None


def _eps_of(layer: PreNormLayer) -> set[float]:
    norms = (layer.input_norm, layer.mlp_norm, layer.rope.q_norm, layer.rope.k_norm)
    return {norm.eps for norm in norms if norm is not None}


def _native_linears(layer: PreNormLayer) -> list[NativeLinear]:
    """The qkv, o_proj, gate_up and down layers that are packed for the kernels."""
    linears = (layer.qkv, layer.o_proj, layer.gate_up, layer.down)
    return [linear for linear in linears if isinstance(linear, NativeLinear)]


def _describe(layer: PreNormLayer) -> _Layer:
    qkv, output, gate_up, down = _native_linears(layer)
    rope = layer.rope
    return _Layer(
        input_norm=_pointer(layer.input_norm.weight), mlp_norm=_pointer(layer.mlp_norm.weight),
        qkv=qkv.weight, output=output.weight, gate_up=gate_up.weight, down=down.weight,
        q_norm=_pointer(rope.q_weight), k_norm=_pointer(rope.k_weight), window=layer.attention.how.window or 0,
    )  # fmt: skip


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
