"""The KV codec: blocks of the paged cache to bytes on a wire, and such bytes to blocks of perhaps another format.

Made for a transport's thread: the kernels run without the interpreter's lock. Keeps no state between calls. Which codec
is used is decided in wire_format.py.

Bytes of an encoding other than RAW, for tokens [start, start + num_tokens) with start a multiple of 16:

    for each layer: for K, then V: for each tile of 16 tokens: for each head: one tile

The same for every block size, dtype and layout; a token range can be sent in any pieces that begin at tiles without
changing a byte. Tokens that the last tile lacks travel as zeros and are not written at the receiver.

    BF16, FP32   the tile in the CPU layout of that dtype (runtime/attention/attention_backend.py)
    INT8, INT4   scales (bf16), then codes in the order of the bf16 CPU layout, K [head_dim / 2, 16, 2] and
                 V [8, head_dim, 2], as int8 or as two 4-bit numbers a byte, the first in the lower half

Groups: K has large channels, so its scale is one channel's over the tile's 16 tokens, scales [head_dim]; V has large
tokens: one token's over 32 neighbouring channels (the last group may be shorter), scales [8, groups, 2]. On the bundled
model K's error is 0.63 of what groups of 32 channels give, and V's within 6 % of what groups of 32 tokens of a channel
would give, which no block of 16 holds. Bits per value: K 9 and 5, V 8.5 and 4.5 (where 32 divides head_dim).

A value x becomes code = round_to_even(x * (1 / scale)) with scale = (largest magnitude / 127 or 7) rounded up to bf16,
and comes back as code * scale, exact in fp32. So |error| <= scale / 2 * (1 + 2^-15), plus the rounding of a bf16
receiver (|x| * 2^-8). Scales are at least 2^-126. Zeros stay zeros. A group that holds a NaN or an infinity comes
back as NaN altogether: what is broken stays visibly broken. BF16 and FP32 keep both; every NaN that fp32 -> bf16
rounds is 0x7fc0.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.layout import allocate_cpu, read_cpu, read_cuda, write_cpu, write_cuda
from diptych.runtime.dtypes import COMPUTE_DTYPES, INT8, SCALE_BYTES
from diptych.runtime.kernels.native import load_native
from diptych.runtime.kernels.triton_kernels import has_triton
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.codec.torch_codec import decode_rows, encode_rows
from diptych.runtime.transfer.codec.wire_format import TILE_TOKENS, WireEncoding, check_tiles, tile_bytes, wire_bytes
from diptych.runtime.transfer.kv_format import KVFormat

Buffer = bytes | bytearray | memoryview
MAX_NATIVE_DIM = 256
CODEC_FEATURE = "avx512"  # what codec.cpp needs; bf16 instructions it uses where there are any
NATIVE_BENCHMARK_BYTES = 48 << 20  # more than the processor's caches keep
TORCH_BENCHMARK_BYTES = 2 << 20


class KVCodec:
    """Encodes from and decodes into the caches of one worker. Several threads may use one object.

    caches: (k_cache, v_cache) of each layer; they must stay where they are. kv_format: what they are. Raises
    ConfigError when the two disagree, or the encoding needs what the format has not.
    native: None takes the kernels where they cover the format, True insists, False takes torch.
    """

    def __init__(
        self, caches: Sequence[LayerCache], kv_format: KVFormat, encoding: WireEncoding, native: bool | None = None
    ) -> None:
        if encoding is not WireEncoding.RAW:
            check_tiles(kv_format)
        _check_caches(caches, kv_format)
        self.format = kv_format
        self.encoding = encoding
        self.num_blocks = caches[0][0].shape[0]
        self._caches = list(caches)
        self._on_cpu = caches[0][0].device.type == "cpu"
        self._flat = [_bytes_of(cache) for pair in caches for cache in pair] if self._on_cpu else []
        library = load_native() if native is not False else None
        dim = kv_format.head_dim
        can_run = library is not None and CODEC_FEATURE in library.features
        is_floating = kv_format.dtype in COMPUTE_DTYPES and kv_format.layout == "cpu"
        is_covered = can_run and self._on_cpu and is_floating and dim % 16 == 0 and dim <= MAX_NATIVE_DIM
        self._native = library if is_covered else None
        is_on_gpu = kv_format.layout == "cuda" and not self._on_cpu
        self.uses_triton = encoding is WireEncoding.INT8 and is_on_gpu and has_triton()
        self._block_bytes = kv_format.bytes_per_layer_block
        # on the wire, tokens take whole pieces: blocks (RAW) or tiles, of this many bytes in one layer
        self.piece_tokens = kv_format.block_size if encoding is WireEncoding.RAW else TILE_TOKENS
        self.piece_bytes = wire_bytes(kv_format, encoding, self.piece_tokens, 1)
        if native and self._native is None:
            raise ConfigError(f"native kernels are not built, or do not cover {kv_format}", param="native")
        addresses = [cache.data_ptr() for pair in caches for cache in pair]
        self._addresses = np.array(addresses, dtype=np.int64)

    @property
    def is_native(self) -> bool:
        """Whether the kernels do the work."""
        return self._native is not None

    def num_bytes(self, num_tokens: int, num_layers: int | None = None) -> int:
        """Bytes on the wire of ``num_tokens`` tokens in ``num_layers`` layers (None: all)."""
        layers = self.format.num_layers if num_layers is None else num_layers
        return layers * -(-num_tokens // self.piece_tokens) * self.piece_bytes

    def encode(
        self,
        block_ids: Sequence[int],
        start: int,
        num_tokens: int,
        wire: bytearray | memoryview,
        layers: range | None = None,
    ) -> None:
        """Write tokens [start, start + num_tokens) into ``wire``, which has num_bytes(num_tokens, len(layers)) bytes.

        block_ids: the block table from token 0 on. start: a multiple of 16 (RAW: of the block size). layers: a range
        with step 1, None for all. Raises ConfigError for what does not fit together.
        """
        span = self._check(block_ids, start, num_tokens, layers)
        buffer = self._check_wire(wire, num_tokens, span)
        if not buffer.flags.writeable:
            raise ConfigError("the wire buffer is read-only", param="wire")
        if self.encoding is WireEncoding.RAW:
            for segment, part in self._parts(block_ids, start, num_tokens, span, buffer):
                part[:] = segment
        elif self._native is not None:
            self._call("diptych_kv_encode", _table(block_ids), start, num_tokens, buffer, span)
        elif self.uses_triton:
            self._encode_triton(self._slots(block_ids, start, num_tokens), torch.from_numpy(buffer), span)
        else:
            self._encode_torch(self._slots(block_ids, start, num_tokens), torch.from_numpy(buffer), span)

    def decode(
        self, wire: Buffer, block_ids: Sequence[int], start: int, num_tokens: int, layers: range | None = None
    ) -> None:
        """Write what ``encode`` gave, at any sender, into blocks of this cache. Arguments as for encode.

        Other tokens of these blocks are left alone (RAW: whole blocks are written)."""
        span = self._check(block_ids, start, num_tokens, layers)
        buffer = self._check_wire(wire, num_tokens, span)
        if self.encoding is WireEncoding.RAW:
            for segment, part in self._parts(block_ids, start, num_tokens, span, buffer):
                segment[:] = part
        elif self._native is not None:
            self._call("diptych_kv_decode", _table(block_ids), start, num_tokens, buffer, span)
        elif self.uses_triton:
            self._decode_triton(self._slots(block_ids, start, num_tokens), torch.tensor(buffer), span)
        else:
            self._decode_torch(self._slots(block_ids, start, num_tokens), torch.tensor(buffer), span)

    def segments(
        self, block_ids: Sequence[int], start: int, num_tokens: int, layers: range | None = None
    ) -> list[memoryview]:
        """The memory of whole blocks, to send from or to receive into: the bytes of RAW without a copy.

        By layer, K before V, then in the order of the tokens; neighbouring blocks are one segment, so that the two
        sides may cut the same bytes differently. Writable, valid as long as the cache. The last block is whole: its
        tokens behind the end are stale and must not be read. Raises ConfigError when the cache is not in host memory.
        """
        span = self._check(block_ids, start, num_tokens, layers)
        size = self.format.block_size
        if not self._on_cpu or start % size:
            where = "cpu" if self._on_cpu else "cuda"
            raise ConfigError(f"start is {start}, the cache on {where}; whole blocks in host memory can be segments",
                              param="start")  # fmt: skip
        runs: list[list[int]] = []  # [first block, end)
        for block in block_ids[start // size : -(-(start + num_tokens) // size)]:
            if runs and runs[-1][1] == block:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
        step = self._block_bytes
        flat = self._flat[2 * span.start : 2 * span.stop]
        return [cache[first * step : end * step] for cache in flat for first, end in runs]

    def _parts(
        self, block_ids: Sequence[int], start: int, num_tokens: int, span: range, wire: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Segments, each beside its part of the wire buffer."""
        view, done = wire.data, 0
        for segment in self.segments(block_ids, start, num_tokens, span):
            yield segment, view[done : done + len(segment)]
            done += len(segment)

    def _check(self, block_ids: Sequence[int], start: int, num_tokens: int, layers: range | None) -> range:
        size = self.format.block_size
        if start < 0 or start % TILE_TOKENS or num_tokens < 0:
            raise ConfigError(f"start is {start}, num_tokens {num_tokens}; start must be a multiple of {TILE_TOKENS}",
                              param="start")  # fmt: skip
        if len(block_ids) * size < start + num_tokens:
            raise ConfigError(f"{len(block_ids)} blocks of {size} tokens do not reach token {start + num_tokens}",
                              param="block_ids")  # fmt: skip
        needed = block_ids[start // size : -(-(start + num_tokens) // size)]
        if needed and not 0 <= min(needed) <= max(needed) < self.num_blocks:
            raise ConfigError(f"block ids go from {min(needed)} to {max(needed)}; there are {self.num_blocks} blocks",
                              param="block_ids")  # fmt: skip
        span = range(self.format.num_layers) if layers is None else layers
        if span.step != 1 or not 0 <= span.start <= span.stop <= self.format.num_layers:
            raise ConfigError(f"layers are {span}; there are {self.format.num_layers}", param="layers")
        return span

    def _check_wire(self, wire: Buffer, num_tokens: int, span: range) -> npt.NDArray[np.uint8]:
        buffer = np.frombuffer(wire, dtype=np.uint8)
        expected = self.num_bytes(num_tokens, len(span))
        if len(buffer) != expected:
            raise ConfigError(f"the wire buffer has {len(buffer)} bytes; {num_tokens} tokens in {len(span)} layers "
                              f"take {expected} as {self.encoding.name}", param="wire")  # fmt: skip
        return buffer

    def _call(
        self, name: str, table: npt.NDArray[np.int64], start: int, num_tokens: int, wire: npt.NDArray[np.uint8],
        span: range,
    ) -> None:  # fmt: skip
        assert self._native is not None
        form = self.format
        has_bf16 = "avx512_bf16" in self._native.features
        sizes = (ctypes.c_int64 * 7)(
            2 * len(span), start, num_tokens, form.num_kv_heads, form.head_dim, form.block_size, has_bf16
        )
        getattr(self._native.functions, name)(
            self._addresses[2 * span.start :].ctypes.data, table.ctypes.data, wire.ctypes.data,
            ctypes.addressof(sizes), self.encoding.value, form.dtype == "bfloat16",
        )  # fmt: skip

    def _slots(self, block_ids: Sequence[int], start: int, num_tokens: int) -> torch.Tensor:
        size, device = self.format.block_size, self._caches[0][0].device
        tokens = torch.arange(start, start + num_tokens)
        return (torch.tensor(block_ids)[tokens // size] * size + tokens % size).to(device)

    def _tiles(self, wire: torch.Tensor, num_tokens: int, span: range) -> list[torch.Tensor]:
        """Views [num_tiles, num_kv_heads, tile bytes] of a wire buffer, K and V of each layer."""
        tiles, heads = -(-num_tokens // TILE_TOKENS), self.format.num_kv_heads
        sizes = [tile_bytes(self.format.head_dim, is_k, self.encoding) for is_k in (True, False)]
        parts, begin = [], 0
        for size in sizes * len(span):
            end = begin + tiles * heads * size
            parts.append(wire[begin:end].view(tiles, heads, size))
            begin = end
        return parts

    def _encode_triton(self, slots: torch.Tensor, wire: torch.Tensor, span: range) -> None:
        from diptych.runtime.kernels.triton_kernels import int8_codec as kernels

        on_device = torch.empty(len(wire), dtype=torch.uint8, device=slots.device)
        kernels.encode(self._caches[span.start : span.stop], slots, on_device)
        wire.copy_(on_device)

    def _decode_triton(self, slots: torch.Tensor, wire: torch.Tensor, span: range) -> None:
        from diptych.runtime.kernels.triton_kernels import int8_codec as kernels

        kernels.decode(self._caches[span.start : span.stop], slots, wire.to(slots.device))

    def _encode_torch(self, slots: torch.Tensor, wire: torch.Tensor, span: range) -> None:
        read = read_cpu if self.format.layout == "cpu" else read_cuda
        tiles = self._tiles(wire, len(slots), span)
        for layer, k_wire, v_wire in zip(span, tiles[::2], tiles[1::2], strict=True):
            k, v = read(*self._caches[layer], slots)
            k_wire.copy_(encode_rows(k, True, self.encoding))
            v_wire.copy_(encode_rows(v, False, self.encoding))

    def _decode_torch(self, slots: torch.Tensor, wire: torch.Tensor, span: range) -> None:
        write, form = write_cpu if self.format.layout == "cpu" else write_cuda, self.format
        dtype = torch.float32 if form.dtype == INT8 else self._caches[0][0].dtype
        tiles = self._tiles(wire.to(slots.device), len(slots), span)
        for layer, k_wire, v_wire in zip(span, tiles[::2], tiles[1::2], strict=True):
            k = decode_rows(k_wire, len(slots), form.head_dim, True, self.encoding, dtype)
            v = decode_rows(v_wire, len(slots), form.head_dim, False, self.encoding, dtype)
            write(k, v, *self._caches[layer], slots)


@dataclass(frozen=True, slots=True)
class CodecRates:
    """What one thread of this machine encodes and decodes, in bytes of KV (as the cache holds it) per second."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float


def measure_rates(
    kv_format: KVFormat,
    encoding: WireEncoding = WireEncoding.INT8,
    *,
    native: bool | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> CodecRates:
    """Encode and decode some KV like this in the CPU layout and give the best of three: 0.1 s in all.

    More than the processor's caches hold, so that the rates are those of memory; with torch, which is slower than
    memory, less. A thread that shares its core with others gets less than this.
    """
    one_layer = replace(kv_format, num_layers=1, layout="cpu", windows=())
    codec = KVCodec([_scratch(one_layer, 1)], one_layer, encoding, native)
    size = NATIVE_BENCHMARK_BYTES if codec.is_native else TORCH_BENCHMARK_BYTES
    num_blocks = max(1, size // one_layer.bytes_per_block)
    codec = KVCodec([_scratch(one_layer, num_blocks)], one_layer, encoding, native)
    num_tokens, table = num_blocks * kv_format.block_size, [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]
    wire = bytearray(codec.num_bytes(num_tokens))
    encode_ns, decode_ns = [], []
    for _ in range(4):  # the first one touches the memory
        began = clock()
        codec.encode(table, 0, num_tokens, wire)
        between = clock()
        codec.decode(wire, table, 0, num_tokens)
        decode_ns.append(max(1, clock() - between))
        encode_ns.append(max(1, between - began))
    kv_bytes = num_blocks * one_layer.bytes_per_block * 1e9
    return CodecRates(kv_bytes / min(encode_ns[1:]), kv_bytes / min(decode_ns[1:]))


def _scratch(form: KVFormat, num_blocks: int) -> LayerCache:
    k, v = allocate_cpu(num_blocks, form.num_kv_heads, form.block_size, form.head_dim, getattr(torch, form.dtype))
    return k.fill_(0.5), v.fill_(-0.5)


def _check_caches(caches: Sequence[LayerCache], form: KVFormat) -> None:
    lanes = 4 // getattr(torch, form.dtype).itemsize
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    if form.dtype == INT8:
        k_shape = v_shape = (form.num_kv_heads, form.block_size, form.head_dim + SCALE_BYTES)
    elif form.layout == "cpu":
        k_shape = (form.num_kv_heads, form.block_size // TILE_TOKENS, form.head_dim // lanes, TILE_TOKENS, lanes)
        v_shape = (form.num_kv_heads, form.block_size // lanes, form.head_dim, lanes)
    else:
        k_shape = v_shape = (form.block_size, form.num_kv_heads, form.head_dim)
    fits = len(caches) == form.num_layers and all(
        tuple(k.shape[1:]) == k_shape
        and tuple(v.shape[1:]) == v_shape
        and k.dtype == v.dtype == getattr(torch, form.dtype)
        and k.is_contiguous()
        and v.is_contiguous()
        for k, v in caches
    )
    if not fits:
        found = f"{len(caches)} layers of {[tuple(cache.shape) for cache in caches[0]]} {caches[0][0].dtype}"
        raise ConfigError(f"the KV cache is {found}, not contiguous or not what {form} says", param="kv_format")


def _table(block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(block_ids, dtype=np.int64)


def _bytes_of(cache: torch.Tensor) -> memoryview:
    flat: npt.NDArray[np.uint8] = cache.view(-1).view(torch.uint8).numpy()
    return flat.data
