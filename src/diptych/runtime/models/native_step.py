"""Decode steps of all layers in one native call, where a call for each part of a layer would cost as much as its work.

The parts are the very kernels that the Decoder calls one by one for prompts: the same bits come out. Owns the records
that the call reads; never the weights, the caches or the batch.
"""

import ctypes

import torch

from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.kv_tensors import LayerCache
from diptych.runtime.models.layers import DecoderWeights, LayerWeights
from diptych.runtime.native import NativeLibrary, load_native
from diptych.runtime.ops.native_ops import NativeLinear


def _record(pointers: str, sizes: str, floats: str = "") -> list[tuple[str, type]]:
    """The fields of a struct in the order of decode_step.cpp."""
    kinds = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = _record(
        "input_norm mlp_norm qkv output gate_up down qkv_bias output_bias down_bias q_norm k_norm k_cache v_cache",
        "window",
    )


class _Step(ctypes.Structure):
    _fields_ = _record(
        "layers norm cos_sin residual x qkv attended inner partials positions slots block_tables query_start "
        "context_lens",
        "num_layers rows hidden inner_size heads kv_heads dim block_size table_stride",
        "eps scale",
    )


class NativeStep:
    """The layers of one model for batches in which every sequence computes one token."""

    def __init__(
        self,
        library: NativeLibrary,
        weights: DecoderWeights,
        attention: NativeCpuAttention,
        cos_sin: torch.Tensor,  # [max_positions, head_dim] fp32
        norm_eps: float,
    ) -> None:
        self._run = library.functions.diptych_decode_step
        self._attention = attention
        self._is_bf16 = int(attention.shape.dtype == torch.bfloat16)
        self._layers = (_Layer * len(weights.layers))(*(_describe(layer) for layer in weights.layers))
        self._caches: list[LayerCache] | None = None  # those that _layers points to
        shape, mlp = attention.shape, weights.layers[0].mlp
        self._step = _Step(
            layers=ctypes.addressof(self._layers), norm=weights.norm.data_ptr(), cos_sin=cos_sin.data_ptr(),
            num_layers=len(weights.layers), hidden=weights.norm.shape[0], inner_size=mlp.gate_up.out_features,
            heads=shape.num_heads, kv_heads=shape.num_kv_heads, dim=shape.head_dim, block_size=shape.block_size,
            eps=norm_eps, scale=shape.scale,
        )  # fmt: skip

    def __call__(self, residual: torch.Tensor, batch: InputBatch, caches: list[LayerCache]) -> torch.Tensor:
        """residual [num_seqs, hidden], the embeddings of the batch's tokens, is overwritten. Writes K and V, returns
        the normed hidden states [num_seqs, hidden]."""
        if caches is not self._caches:
            for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
                layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            self._caches = caches
        step, rows = self._step, batch.num_seqs
        queries = step.heads * step.dim
        widths = [step.hidden, queries + 2 * step.kv_heads * step.dim, queries, step.inner_size]
        x, qkv, attended, inner = (residual.new_empty((rows, width)) for width in widths)
        step.residual, step.x, step.qkv = residual.data_ptr(), x.data_ptr(), qkv.data_ptr()
        step.attended, step.inner = attended.data_ptr(), inner.data_ptr()
        step.partials = self._attention.partials(batch).data_ptr()
        step.positions, step.slots = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        step.block_tables, step.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        step.query_start, step.context_lens = batch.query_start.data_ptr(), batch.context_lens.data_ptr()
        step.rows = rows
        self._run(ctypes.addressof(step), self._is_bf16)
        return x


def native_step(
    weights: DecoderWeights, attention: AttentionBackend, cos_sin: torch.Tensor, norm_eps: float
) -> NativeStep | None:
    """The native step of a model, or None where a part of it has no kernel here."""
    library = load_native()
    if library is None or not isinstance(attention, NativeCpuAttention):
        return None
    if any(len(_native_linears(layer)) < 4 for layer in weights.layers):
        return None
    return NativeStep(library, weights, attention, cos_sin, norm_eps)


def _native_linears(layer: LayerWeights) -> list[NativeLinear]:
    """Those of qkv, output, gate_up and down that are packed for the kernels."""
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    return [linear for linear in linears if isinstance(linear, NativeLinear)]


def _describe(layer: LayerWeights) -> _Layer:
    qkv, output, gate_up, down = _native_linears(layer)
    return _Layer(
        input_norm=_pointer(layer.input_norm), mlp_norm=_pointer(layer.mlp_norm), qkv=_pointer(qkv.packed),
        output=_pointer(output.packed), gate_up=_pointer(gate_up.packed), down=_pointer(down.packed),
        qkv_bias=_pointer(qkv.bias), output_bias=_pointer(output.bias), down_bias=_pointer(down.bias),
        q_norm=_pointer(layer.attention.q_norm), k_norm=_pointer(layer.attention.k_norm), window=layer.window or 0,
    )  # fmt: skip


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
