"""The INT8 codec of a GPU writes the bytes and reads the values that torch and the native kernels do.

Without a GPU Triton's interpreter runs it, on the same caches in host memory.
"""

import os
from dataclasses import replace

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from diptych.runtime.transfer.codec.kv_codec import KVCodec  # noqa: E402
from diptych.runtime.transfer.codec.wire_format import WireEncoding  # noqa: E402
from tests.runtime.test_codec import BASE, UNTOUCHED, Cache, bits, random_kv  # noqa: E402


def moved(cache: Cache) -> Cache:
    """The cache where the kernels run."""
    if HAS_GPU:
        cache.layers = [(k.cuda(), v.cuda()) for k, v in cache.layers]
    return cache


def codec_of(cache: Cache, *, triton: bool) -> KVCodec:
    codec = KVCodec(cache.layers, cache.format, WireEncoding.INT8, native=False)
    codec.uses_triton = triton
    return codec


@pytest.mark.parametrize(
    ("dtype", "dim", "start", "num_tokens"),
    [("bfloat16", 16, 0, 7), ("float32", 64, 16, 60), ("bfloat16", 80, 16, 37), ("float32", 256, 0, 16)],
)
def test_the_kernel_writes_the_same_bytes_and_reads_the_same_values(
    dtype: str, dim: int, start: int, num_tokens: int
) -> None:
    kv_format = replace(BASE, dtype=dtype, head_dim=dim, layout="cuda")
    kv = random_kv(kv_format, 80)
    kv[0, 0, ::7, 0, ::5] = float("nan")
    kv[0, 1, ::5, 1, 3] = float("-inf")
    kv[1, :, ::2] = 0
    kv[1, :, 17:40] *= 1e-38
    sender = moved(Cache(kv_format, 80).write(kv))
    wires = []
    for triton in (False, True):
        codec = codec_of(sender, triton=triton)
        wires.append(bytearray(codec.num_bytes(num_tokens)))
        codec.encode(sender.blocks, start, num_tokens, wires[-1])
    assert wires[0] == wires[1]
    for other in ("bfloat16", "float32"):
        got = []
        for triton in (False, True):
            receiver = moved(Cache(replace(kv_format, dtype=other, block_size=16), 96))
            codec_of(receiver, triton=triton).decode(wires[0], receiver.blocks, start, num_tokens)
            receiver.layers = [(k.cpu(), v.cpu()) for k, v in receiver.layers]
            got.append(receiver.read(0, 96))
        assert torch.equal(bits(got[0]), bits(got[1]))
        assert (got[1][:, :, start + num_tokens :] == UNTOUCHED).all()


def test_layers_and_tokens_are_sent_in_pieces() -> None:
    kv_format = replace(BASE, layout="cuda", head_dim=64)
    sender = moved(Cache(kv_format, 60).write(random_kv(kv_format, 60)))
    whole, pieces = (codec_of(sender, triton=triton) for triton in (False, True))
    for layers in (range(1), range(1, 2)):
        expected, found = bytearray(whole.num_bytes(28, 1)), bytearray(whole.num_bytes(28, 1))
        whole.encode(sender.blocks, 32, 28, expected, layers)
        pieces.encode(sender.blocks, 32, 28, found, layers)
        assert expected == found
