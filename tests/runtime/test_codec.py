"""The KV codec: what comes back, what it costs in accuracy, and that both implementations write the same bytes."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.control.errors import ConfigError
from diptych.runtime.attention.layout import allocate_cpu, read_cpu, read_cuda, write_cpu, write_cuda
from diptych.runtime.kernels.native import load_native
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.codec.kv_codec import CODEC_FEATURE, KVCodec, measure_rates
from diptych.runtime.transfer.codec.wire_format import (
    WireEncoding,
    choose_codec,
    transfer_seconds,
    wire_bytes,
    wire_encoding,
    wire_share,
)
from diptych.runtime.transfer.kv_format import KVFormat

BASE = KVFormat("model", num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32", block_size=32, layout="cpu")
INTEGERS = (WireEncoding.INT8, WireEncoding.INT4)
UNTOUCHED = 9.0


class Cache:
    """A cache of one format whose blocks are taken in a scattered order."""

    def __init__(self, kv_format: KVFormat, num_tokens: int, fill: float = UNTOUCHED) -> None:
        self.format, self.dtype = kv_format, getattr(torch, kv_format.dtype)
        size, heads, dim = kv_format.block_size, kv_format.num_kv_heads, kv_format.head_dim
        count = -(-num_tokens // size)
        self.blocks = torch.randperm(count + 2, generator=torch.Generator().manual_seed(size)).tolist()[:count]
        self.layers: list[LayerCache] = []
        for _ in range(kv_format.num_layers):
            if kv_format.layout == "cpu":
                pair = allocate_cpu(count + 2, heads, size, dim, self.dtype)
            else:
                pair = (torch.zeros(count + 2, size, heads, dim, dtype=self.dtype),) * 2
                pair = (pair[0], pair[1].clone())
            self.layers.append((pair[0].fill_(fill), pair[1].fill_(fill)))

    def slots(self, start: int, num_tokens: int) -> torch.Tensor:
        tokens = torch.arange(start, start + num_tokens)
        return torch.tensor(self.blocks)[tokens // self.format.block_size] * self.format.block_size + (
            tokens % self.format.block_size
        )

    def write(self, kv: torch.Tensor, start: int = 0) -> "Cache":
        """kv: [layers, 2, num_tokens, kv_heads, head_dim]."""
        write = write_cpu if self.format.layout == "cpu" else write_cuda
        for (k, v), layer in zip(kv.to(self.dtype), self.layers, strict=True):
            write(k, v, *layer, self.slots(start, len(k)))
        return self

    def read(self, start: int, num_tokens: int) -> torch.Tensor:
        read = read_cpu if self.format.layout == "cpu" else read_cuda
        return torch.stack([torch.stack(read(*layer, self.slots(start, num_tokens))) for layer in self.layers])

    def encode(
        self,
        encoding: WireEncoding,
        start: int,
        num_tokens: int,
        native: bool | None = None,
        layers: range | None = None,
    ) -> bytearray:
        codec = KVCodec(self.layers, self.format, encoding, native)
        wire = bytearray(codec.num_bytes(num_tokens, None if layers is None else len(layers)))
        codec.encode(self.blocks, start, num_tokens, wire, layers)
        return wire

    def decode(
        self, encoding: WireEncoding, wire: bytes | bytearray, start: int, num_tokens: int, native: bool | None = None
    ) -> "Cache":
        KVCodec(self.layers, self.format, encoding, native).decode(wire, self.blocks, start, num_tokens)
        return self


def random_kv(kv_format: KVFormat, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Gaussian values whose size differs between channels and tokens: [layers, 2, num_tokens, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (kv_format.num_layers, 2, num_tokens, kv_format.num_kv_heads, kv_format.head_dim)
    values = torch.randn(shape, generator=generator)
    values[:, 0] *= torch.randn(kv_format.head_dim, generator=generator).exp()
    values[:, 1] *= torch.randn(num_tokens, 1, 1, generator=generator).exp()
    return values.to(getattr(torch, kv_format.dtype))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().view(torch.int32)


def group_maxima(kv: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each value's group: 16 tokens of a channel of K, 32 channels of a token of V."""
    largest, values = torch.empty_like(kv), kv.abs()
    for start in range(0, kv.shape[2], 16):
        largest[:, 0, start : start + 16] = values[:, 0, start : start + 16].amax(1, keepdim=True)
    for channel in range(0, kv.shape[4], 32):
        largest[:, 1, ..., channel : channel + 32] = values[:, 1, ..., channel : channel + 32].amax(-1, keepdim=True)
    return largest


def has_native_codec() -> bool:
    library = load_native()
    return library is not None and CODEC_FEATURE in library.features


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_kernels_and_torch_write_the_same_bytes_and_read_the_same_values(dtype: str, dim: int) -> None:
    if not has_native_codec():
        pytest.skip("no native codec here")
    kv_format = replace(BASE, dtype=dtype, head_dim=dim)
    kv = random_kv(kv_format, 116)
    kv[0, 0, ::7, 0, ::5] = float("nan")
    kv[0, 1, ::5, 1, 3] = float("-inf")
    kv[1, :, ::2] = 0
    kv[1, :, 17:40] *= 1e-38
    sender = Cache(kv_format, 116).write(kv)
    for encoding, (start, num_tokens) in itertools.product(
        (WireEncoding.FP32, WireEncoding.BF16, *INTEGERS), ((0, 7), (16, 100), (32, 64))
    ):
        if encoding is WireEncoding.FP32 and dtype == "bfloat16":
            continue
        wire = sender.encode(encoding, start, num_tokens, native=True)
        assert wire == sender.encode(encoding, start, num_tokens, native=False)
        for other in ("bfloat16", "float32") if encoding is not WireEncoding.FP32 else ("float32",):
            target = replace(kv_format, dtype=other, block_size=16)
            got = [
                Cache(target, 128).decode(encoding, wire, start, num_tokens, native).read(0, 128)
                for native in (True, False)
            ]
            assert torch.equal(bits(got[0]), bits(got[1]))
            assert (got[0][:, :, start + num_tokens :] == UNTOUCHED).all()
            assert (got[0][:, :, :start] == UNTOUCHED).all()


def test_a_processor_without_bf16_instructions_reads_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_native()
    if library is None or not has_native_codec():
        pytest.skip("no native codec here")
    narrow = replace(BASE, dtype="bfloat16")
    kv = random_kv(BASE, 50)
    kv[0, 0, 3] = float("nan")
    kv[1] *= 1e-37
    for encoding in (WireEncoding.BF16, *INTEGERS):
        wire = Cache(BASE, 50).write(kv).encode(encoding, 0, 50)
        expected = Cache(narrow, 50).decode(encoding, wire, 0, 50).read(0, 50)
        with monkeypatch.context() as patch:
            patch.setattr(
                "diptych.runtime.transfer.codec.kv_codec.load_native",
                lambda: replace(library, features=("avx2", "avx512")),
            )
            got = Cache(narrow, 50).decode(encoding, wire, 0, 50, native=True).read(0, 50)
        assert torch.equal(bits(got), bits(expected))


@given(
    encoding=st.sampled_from(INTEGERS),
    num_tokens=st.integers(1, 50),
    dim=st.sampled_from([16, 48, 64]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
def test_no_value_is_wrong_by_more_than_half_a_step(
    encoding: WireEncoding, num_tokens: int, dim: int, exponent: int, seed: int
) -> None:
    kv_format = replace(BASE, head_dim=dim, num_kv_heads=1)
    kv = random_kv(kv_format, num_tokens, seed) * 2.0**exponent
    kv[:, :, seed % num_tokens, :, seed % dim] *= 50
    wire = Cache(kv_format, num_tokens).write(kv).encode(encoding, 0, num_tokens)
    got = Cache(kv_format, num_tokens).decode(encoding, wire, 0, num_tokens).read(0, num_tokens)
    scale = group_maxima(kv).double() / encoding.top * (1 + 2**-7)  # rounded up to bf16
    assert ((got.double() - kv.double()).abs() <= scale / 2 * (1 + 2**-15)).all()
    narrow = replace(kv_format, dtype="bfloat16")
    rounded = Cache(narrow, num_tokens).decode(encoding, wire, 0, num_tokens).read(0, num_tokens)
    assert ((rounded.double() - got.double()).abs() <= got.double().abs() * 2**-8).all()


@pytest.mark.parametrize(("encoding", "limit"), [(WireEncoding.INT8, 0.006), (WireEncoding.INT4, 0.11)])
def test_the_error_of_gaussian_values_is_small(encoding: WireEncoding, limit: float) -> None:
    kv_format = replace(BASE, head_dim=128)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((2, 2, 256, 3, 128), generator=generator)
    wire = Cache(kv_format, 256).write(kv).encode(encoding, 0, 256)
    got = Cache(kv_format, 256).decode(encoding, wire, 0, 256).read(0, 256)
    for tensor in (0, 1):
        error = (got[:, tensor] - kv[:, tensor]).pow(2).mean().sqrt()
        assert 0.5 * limit < error < limit


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
def test_any_block_size_dtype_and_layout_receives_from_any(codec: str) -> None:
    formats = [
        replace(BASE, block_size=size, dtype=dtype, layout=layout)
        for size, dtype, layout in [
            (16, "float32", "cpu"),
            (32, "bfloat16", "cpu"),
            (64, "float32", "cpu"),
            (64, "bfloat16", "cuda"),
            (16, "float32", "cuda"),
        ]
    ]
    kv = random_kv(BASE, 77)
    for source, target in itertools.product(formats, formats):
        encoding = wire_encoding(codec, source, target)
        held = Cache(source, 77).write(kv).read(0, 77)
        wire = Cache(source, 77).write(kv).encode(encoding, 0, 77)
        got = Cache(target, 77).decode(encoding, wire, 0, 77).read(0, 77)
        if codec == "none":
            assert torch.equal(got, held.to(got.dtype))
        else:
            error = (got.float() - held.float()).abs()
            assert (error <= group_maxima(held.float()) / encoding.top * 0.51 + held.float().abs() * 2**-7).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("encoding", [WireEncoding.FP32, WireEncoding.BF16, *INTEGERS])
def test_a_gpu_writes_and_reads_the_same_bytes(encoding: WireEncoding) -> None:
    host = Cache(replace(BASE, layout="cuda"), 77).write(random_kv(BASE, 77))
    expected = host.encode(encoding, 0, 77)
    device = Cache(host.format, 77).write(random_kv(BASE, 77))
    device.layers = [(k.cuda(), v.cuda()) for k, v in device.layers]
    assert device.encode(encoding, 0, 77) == expected
    device.decode(encoding, expected, 0, 77)
    device.layers = [(k.cpu(), v.cpu()) for k, v in device.layers]
    assert torch.equal(device.read(0, 77), host.decode(encoding, expected, 0, 77).read(0, 77))


def test_pieces_of_tokens_and_layers_carry_the_bytes_of_the_whole() -> None:
    sender = Cache(BASE, 90).write(random_kv(BASE, 90))
    for encoding in INTEGERS:
        whole = [sender.encode(encoding, 0, 90, layers=range(layer, layer + 1)) for layer in (0, 1)]
        assert whole[0] + whole[1] == sender.encode(encoding, 0, 90)
        receiver = Cache(replace(BASE, block_size=64), 90)
        for start, count in ((0, 16), (16, 48), (64, 26)):
            receiver.decode(encoding, sender.encode(encoding, start, count), start, count)
        at_once = Cache(replace(BASE, block_size=64), 90).decode(encoding, whole[0] + whole[1], 0, 90)
        assert torch.equal(receiver.read(0, 90), at_once.read(0, 90))


def test_what_lies_behind_the_last_token_is_neither_sent_nor_overwritten() -> None:
    kv = random_kv(BASE, 37)
    for encoding in (WireEncoding.FP32, WireEncoding.BF16, *INTEGERS):
        wires = [Cache(BASE, 37, fill).write(kv).encode(encoding, 0, 37) for fill in (0.0, 1e30, float("nan"))]
        assert wires[0] == wires[1] == wires[2]
        receiver = Cache(BASE, 64).decode(encoding, wires[0], 0, 37)
        assert (receiver.read(37, 27) == UNTOUCHED).all()


def test_a_group_with_a_nan_or_an_infinity_comes_back_as_nan_and_no_other_group_does() -> None:
    kv = random_kv(BASE, 32)
    kv[0, 0, 20, 1, 5], kv[1, 1, 3, 2, 40] = float("nan"), float("inf")
    for encoding in INTEGERS:
        wire = Cache(BASE, 32).write(kv).encode(encoding, 0, 32)
        got = Cache(BASE, 32).decode(encoding, wire, 0, 32).read(0, 32)
        expected = torch.zeros_like(kv, dtype=torch.bool)
        expected[0, 0, 16:32, 1, 5] = expected[1, 1, 3, 2, 32:64] = True
        assert torch.equal(got.isnan(), expected)


def test_equal_formats_share_segments_of_memory_and_need_no_copy() -> None:
    sender, receiver = Cache(BASE, 100).write(random_kv(BASE, 100)), Cache(BASE, 100)
    sender.blocks, receiver.blocks = [1, 2, 3, 5], [4, 2, 1, 0]
    sender.write(random_kv(BASE, 100))
    assert wire_encoding("none", BASE, BASE) is WireEncoding.RAW
    source = KVCodec(sender.layers, BASE, WireEncoding.RAW)
    target = KVCodec(receiver.layers, BASE, WireEncoding.RAW)
    parts = source.segments(sender.blocks, 32, 68)
    assert len(parts) == 2 * 2 * 2, "blocks 2 and 3 are one segment"
    assert sum(map(len, parts)) == source.num_bytes(68) == 3 * BASE.bytes_per_block
    stream, done = b"".join(parts), 0
    for part in target.segments(receiver.blocks, 32, 68):
        part[:] = stream[done : done + len(part)]
        done += len(part)
    assert torch.equal(receiver.read(32, 68), sender.read(32, 68))
    assert (receiver.read(0, 32) == UNTOUCHED).all()
    assert sender.encode(WireEncoding.RAW, 32, 68) == stream
    again = Cache(BASE, 100).decode(WireEncoding.RAW, stream, 32, 68)
    assert torch.equal(again.read(32, 68), sender.read(32, 68))


def test_sizes_count_scales_and_whole_tiles() -> None:
    assert wire_bytes(replace(BASE, num_layers=1, num_kv_heads=1), WireEncoding.INT8, 17) == 2 * (2 * 1024 + 128 + 64)
    assert wire_bytes(BASE, WireEncoding.RAW, 33) == 2 * BASE.bytes_per_block
    assert wire_share("int8") == (9 + 8.5) / 2 / 16
    assert wire_share("int4", "float32") == (5 + 4.5) / 2 / 32


def test_none_sends_what_the_receiver_can_hold() -> None:
    bf16 = replace(BASE, dtype="bfloat16")
    assert wire_encoding("none", BASE, bf16) is WireEncoding.BF16
    assert wire_encoding("none", bf16, BASE) is WireEncoding.BF16
    assert wire_encoding("none", BASE, replace(BASE, block_size=64)) is WireEncoding.FP32
    assert wire_encoding("int4", BASE, BASE) is WireEncoding.INT4


def test_a_codec_is_chosen_only_when_it_saves_time() -> None:
    kv, coding = 100_000_000, 8e9
    assert choose_codec(12e9, kv, coding, coding) == "none"  # the encoder would be slower than the link
    assert choose_codec(1e8, kv, coding, coding) == "int4"
    assert choose_codec(1e8, kv, coding, coding, ("none", "int8")) == "int8"
    assert choose_codec(1e8, kv, coding, coding, ("none",)) == "none"
    assert choose_codec(1e8, 0, coding, coding) == "none", "there is no time to save"
    assert choose_codec(12e9, kv, coding, coding, ("int8", "int4")) == "int8", "int4 would save nothing more"
    assert choose_codec(1e8, kv, 5e7, coding) == "none", "the encoder is the slower stage"
    assert choose_codec(1.05 * coding, kv, 1e12, 1e12, ("none", "int8"), dtype="float32") == "int8"


def test_stages_of_a_long_transfer_overlap_and_those_of_a_short_one_do_not() -> None:
    assert transfer_seconds(1e9, 1 << 20, 1.0, (1e9, 1e9)) == pytest.approx(3 * 2**20 / 1e9)
    assert transfer_seconds(1e9, 1 << 30, 0.5, (2e9, 4e9)) == pytest.approx(2**30 / 2e9 * (1 + 1.5 / 1024))


def test_rates_are_bytes_of_kv_per_second_of_the_clock() -> None:
    ticks = itertools.count(0, 1_000_000)
    rates = measure_rates(BASE, native=False, clock=lambda: next(ticks))
    num_blocks = (2 << 20) // (2 * BASE.bytes_per_layer_block)
    assert rates.encode_bytes_per_s == rates.decode_bytes_per_s == num_blocks * 2 * BASE.bytes_per_layer_block * 1e3


def test_rates_are_those_of_what_is_done_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("encode", "decode"):
        monkeypatch.setattr(KVCodec, name, lambda *_, name=name: done.append(name))
    durations = iter([9, 9, 5, 30, 7, 20, 6, 40])  # the first two touch the memory
    now = [0]

    def clock() -> int:
        if done and done[-1] != "look":
            now[0] += next(durations) * 1_000_000
        done.append("look")
        return now[0]

    rates = measure_rates(BASE, native=False, clock=clock)
    assert done == ["look", "encode", "look", "decode", "look"] * 4
    kv_bytes = (2 << 20) // (2 * BASE.bytes_per_layer_block) * 2 * BASE.bytes_per_layer_block
    assert rates.encode_bytes_per_s == pytest.approx(kv_bytes / 0.005)
    assert rates.decode_bytes_per_s == pytest.approx(kv_bytes / 0.020)


def test_what_does_not_fit_together_is_refused_with_both_values() -> None:
    cache = Cache(BASE, 64)
    codec = KVCodec(cache.layers, BASE, WireEncoding.INT8)
    wire = bytearray(codec.num_bytes(32))
    with pytest.raises(ConfigError, match="multiple of 16"):
        codec.encode(cache.blocks, 8, 32, wire)
    with pytest.raises(ConfigError, match="do not reach token 96"):
        codec.encode(cache.blocks, 64, 32, wire)
    with pytest.raises(ConfigError, match="there are 4 blocks"):
        codec.encode([99, 0], 0, 32, wire)
    with pytest.raises(ConfigError, match="take"):
        codec.decode(wire[:-1], cache.blocks, 0, 32)
    with pytest.raises(ConfigError, match="read-only"):
        codec.encode(cache.blocks, 0, 32, memoryview(bytes(wire)))
    with pytest.raises(ConfigError, match="layers"):
        codec.encode(cache.blocks, 0, 32, wire, range(1, 3))
    with pytest.raises(ConfigError, match="not what"):
        KVCodec(cache.layers, replace(BASE, block_size=64), WireEncoding.INT8)
    with pytest.raises(ConfigError, match="num_layers is 2 here and 3 there"):
        wire_encoding("none", BASE, replace(BASE, num_layers=3))
    with pytest.raises(ConfigError, match="float16"):
        replace(BASE, dtype="float16")
    with pytest.raises(ConfigError, match="zip"):
        wire_encoding("zip", BASE, BASE)
    with pytest.raises(ConfigError, match="gzip"):
        choose_codec(1e9, 1, 1e9, 1e9, ("gzip",))
    with pytest.raises(ConfigError, match="above 0"):
        choose_codec(0, 1, 1e9, 1e9)
