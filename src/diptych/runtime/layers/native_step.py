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
from diptych.runtime.kernels.native import NativeWeight
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.parts import Attention, GatedMlp, MixtureOfExperts, Norm, RmsNorm, RopeAndCache
from diptych.runtime.ops.native_linear import NativeLinear
from diptych.runtime.ops.ops import Linear


class DecoderLayer(Protocol):
    """x += attention_norm(o_proj(attention(rope(qkv(input_norm(x)))))), then x += output_norm(mlp(mlp_norm(x))).

    A norm that is None is left out. attention_gate: what attention gives is multiplied with sigmoid(attention_gate(.))
    of the layer's normed input before o_proj (None: it is not).
    """

    @property
    def input_norm(self) -> Norm | None: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def rope(self) -> RopeAndCache: ...
    @property
    def attention(self) -> Attention: ...
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
        *_record("cos_sin query_scale k_cache v_cache", "window rotary norms_rows gate group", "scale softcap"),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *_record("layers", ""),
        ("norm", _Norm),
        *_record(
            "residual x qkv attended gates inner partials positions slots block_tables query_start context_lens",
            "num_layers rows hidden inner_size heads kv_heads dim block_size table_stride is_int8",
            "multiplier",
        ),
    )


class NativeStep:
    """The layers of one model, and the norm behind them, for batches in which every sequence computes one token."""

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Norm, attention: NativeCpuAttention, multiplier: float
    ) -> None:
        self._attention = attention
        mlps = [mlp for layer in layers if isinstance(mlp := layer.mlp, GatedMlp)]
        dim = attention.geometry.head_dim
        described = (_describe(layer, mlp, dim) for layer, mlp in zip(layers, mlps, strict=True))
        self._layers = (_Layer * len(layers))(*described)
        self._caches: Sequence[LayerCache] = ()  # those that _layers points to
        num_groups = len(attention.geometry.layers.groups)
        self._slots, self._block_tables = (ctypes.c_void_p * num_groups)(), (ctypes.c_void_p * num_groups)()
        self._kept = (list(layers), norm)  # whose tensors the records point to
        self._has_gates = any(layer.attention_gate is not None for layer in layers)
        geometry = attention.geometry
        self._step = _Step(
            layers=ctypes.addressof(self._layers), norm=_norm(norm), num_layers=len(layers),
            hidden=norm.weight.shape[0], inner_size=mlps[0].gate_up.out_features, heads=attention.num_heads,
            kv_heads=geometry.num_kv_heads, dim=geometry.head_dim, block_size=geometry.block_size,
            multiplier=multiplier, slots=ctypes.addressof(self._slots),
            block_tables=ctypes.addressof(self._block_tables), is_int8=geometry.dtype == INT8,
        )  # fmt: skip

    def __call__(self, residual: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """residual [num_seqs, hidden], the embeddings of the batch's tokens, is overwritten. Writes K and V, returns
        the normed hidden states [num_seqs, hidden]."""
        if step.caches is not self._caches:
            for layer, (k_cache, v_cache) in zip(self._layers, step.caches, strict=True):
                layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            for index, group in enumerate(step.groups or ()):
                self._layers[index].group = group
            self._caches = step.caches
        call, batch = self._step, step.batch
        call.rows = rows = batch.num_seqs
        queries = call.heads * call.dim
        widths = [call.hidden, queries + 2 * call.kv_heads * call.dim, queries, call.inner_size]
        x, qkv, attended, inner = (residual.new_empty((rows, width)) for width in widths)
        call.residual, call.x, call.qkv = residual.data_ptr(), x.data_ptr(), qkv.data_ptr()
        call.attended, call.inner = attended.data_ptr(), inner.data_ptr()
        gates = torch.empty_like(attended) if self._has_gates else None
        call.gates = _pointer(gates)
        call.partials = self._attention.partials(batch).data_ptr()
        call.positions, call.table_stride = batch.positions.data_ptr(), batch.block_tables[0].stride(0)
        for group, (slots, tables) in enumerate(zip(batch.slot_mappings, batch.block_tables, strict=True)):
            self._slots[group], self._block_tables[group] = slots.data_ptr(), tables.data_ptr()
        call.query_start, call.context_lens = batch.query_start.data_ptr(), batch.context_lens.data_ptr()
        kernels = self._attention.kernels
        kernels.functions.diptych_decode_step(kernels.handle, ctypes.addressof(call))
        return x


def native_step(
    layers: Sequence[DecoderLayer], norm: Norm, attention: AttentionBackend, multiplier: float
) -> NativeStep | None:
    """The native step of these layers, or None where a part has no kernel here (a mixture of experts has none, and a
    norm that subtracts the mean), or MLPs differ in their width."""
    if not isinstance(attention, NativeCpuAttention) or not isinstance(norm, RmsNorm):
        return None
    if not all(_has_kernels(layer) for layer in layers):
        return None
    if len({layer.mlp.gate_up.out_features for layer in layers if isinstance(layer.mlp, GatedMlp)}) != 1:
        return None
    return NativeStep(layers, norm, attention, multiplier)


def _has_kernels(layer: DecoderLayer) -> bool:
    """Whether all linear layers are packed for the kernels, and all norms are RMS norms."""
    mlp, norms = layer.mlp, (layer.input_norm, layer.attention_norm, layer.mlp_norm, layer.output_norm)
    if not isinstance(mlp, GatedMlp) or not all(norm is None or isinstance(norm, RmsNorm) for norm in norms):
        return False
    linears = (layer.qkv, layer.o_proj, mlp.gate_up, mlp.down, layer.attention_gate)
    return all(linear is None or isinstance(linear, NativeLinear) for linear in linears)


def _describe(layer: DecoderLayer, mlp: GatedMlp, dim: int) -> _Layer:
    rope, how, gate_up = layer.rope, layer.attention.how, mlp.gate_up
    assert isinstance(gate_up, NativeLinear), "see _has_kernels"
    norm_of_heads = rope.q_norm or rope.k_norm
    return _Layer(
        input_norm=_norm(layer.input_norm), attention_norm=_norm(layer.attention_norm), mlp_norm=_norm(layer.mlp_norm),
        output_norm=_norm(layer.output_norm), qkv=_weight(layer.qkv), attention_gate=_weight(layer.attention_gate),
        output=_weight(layer.o_proj), gate_up=gate_up.weight, down=_weight(mlp.down), q_norm=_norm(rope.q_norm),
        k_norm=_norm(rope.k_norm), cos_sin=rope.table.cos_sin.data_ptr(),
        query_scale=_pointer(rope.table.query_scale), window=how.window or 0, rotary=rope.table.cos_sin.shape[1],
        norms_rows=norm_of_heads is not None and norm_of_heads.weight.shape[0] != dim, gate=gate_up.gate,
        scale=how.scale, softcap=how.softcap or 0.0,
    )  # fmt: skip


def _norm(norm: Norm | None) -> _Norm:
    if norm is None:
        return _Norm()
    assert isinstance(norm, RmsNorm), "see native_step"
    return _Norm(norm.weight.data_ptr(), norm.weight.dtype is torch.float32, norm.eps)


def _weight(linear: Linear | None) -> NativeWeight:
    return linear.weight if isinstance(linear, NativeLinear) else NativeWeight()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
