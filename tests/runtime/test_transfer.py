"""KV between two connectors in one process: nothing is lost, nothing comes twice, nobody is disturbed, fences hold."""

import contextlib
import random
import select
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError
from diptych.runtime.attention.layout import allocate_cpu, read_cpu
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer import CONNECTORS, make_connector
from diptych.runtime.transfer.connector import (
    MAX_PAYLOAD_BYTES,
    CodecName,
    Committed,
    ConnectorEvent,
    KVConnector,
    Sent,
    TransferOptions,
)
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.connectors.tcp_connector import CodecBodies
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.addresses import parse_address
from diptych.runtime.transfer.stream.body_format import SequenceTables
from diptych.runtime.transfer.stream.frames import HEADER_BYTES, Frame, Kind, ProtocolError, Seal, parse_header
from diptych.runtime.transfer.stream.handshake import (
    GREETING_BYTES,
    HELLO_BYTES,
    WELCOME_BYTES,
    Identity,
    accept_hello,
    accept_welcome,
    greeting,
    hello,
)
from diptych.runtime.transfer.stream.stream_connector import (
    EventQueue,
    ReceiverConnection,
    RecvTransfer,
    SendTransfer,
    StreamReceiver,
)
from tests.laws import law
from tests.runtime.cutting_proxy import CuttingProxy

SECRET = b"0123456789abcdef" * 2
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 32, 40
FORMAT = KVFormat("m", LAYERS, HEADS, DIM, "bfloat16", 16, "cpu")


class Side:
    """A worker's cache, filled with noise, and its connector."""

    def __init__(self, connector: KVConnector, layers: list[LayerCache], kv_format: KVFormat) -> None:
        self.connector = connector
        self.layers = layers
        self.block_size = kv_format.block_size

    def rows(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """K and V of these tokens in every layer."""
        slots = torch.tensor([block_ids[t // self.block_size] * self.block_size + t % self.block_size
                              for t in range(start, end)])  # fmt: skip
        return [rows.float() for k, v in self.layers for rows in read_cpu(k, v, slots)]

    def snapshot(self) -> list[torch.Tensor]:
        """All bytes."""
        return [cache.clone() for pair in self.layers for cache in pair]


class Make:
    """Makes sides; a law closes them behind each seed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Side] = []

    def __call__(
        self, name: str = "tcp", listen: str = "tcp://127.0.0.1:0", kv_format: KVFormat = FORMAT,
        codec: CodecName = "none", frame_bytes: int = 4096, secret: bytes = SECRET, timeout_s: float = 10.0,
        encrypts: bool = False,
    ) -> Side:  # fmt: skip
        if listen == "unix":
            listen = f"unix://{self._folder}/{len(self._made)}"
        dtype = getattr(torch, kv_format.dtype)
        generator = torch.Generator().manual_seed(len(self._made))
        layers = [allocate_cpu(BLOCKS, HEADS, kv_format.block_size, DIM, dtype) for _ in range(kv_format.num_layers)]
        for cache in (cache for pair in layers for cache in pair):
            cache.copy_(torch.randn(cache.shape, generator=generator))
        options = TransferOptions(secret, listen, codec, timeout_s, frame_bytes, encrypts)
        side = Side(make_connector(name, layers, kv_format, options), layers, kv_format)
        self._made.append(side)
        return side

    def close(self) -> None:
        """Close all that were made."""
        while self._made:
            self._made.pop().connector.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    tmp_path.chmod(0o700)
    sides = Make(tmp_path)
    yield sides
    sides.close()


def until(side: Side, kind: type[ConnectorEvent], count: int = 1) -> list[ConnectorEvent]:
    """Poll until ``count`` events of a kind have come; all events."""
    happened: list[ConnectorEvent] = []
    deadline = time.monotonic() + 60
    while sum(isinstance(event, kind) for event in happened) < count:
        assert time.monotonic() < deadline, happened
        assert not any(isinstance(event, TransferBroken) for event in happened if kind is not TransferBroken), happened
        select.select([side.connector], [], [], 1)
        happened += side.connector.poll()
    return happened


def newest(side: Side, kind: type[ConnectorEvent]) -> ConnectorEvent:
    """Poll until an event of a kind has come: that event. Others may come before it and behind it."""
    return [event for event in until(side, kind) if isinstance(event, kind)][-1]


def transfer(sender: Side, receiver: Side, attempt: str, tokens: int, address: str = "", chunk: int = 48) -> tuple[
    list[int], list[int]
]:  # fmt: skip
    """Queue a whole attempt in chunks; the block tables on both sides."""
    rng = random.Random(attempt)
    tables = [rng.sample(range(BLOCKS), -(-tokens // side.block_size)) for side in (sender, receiver)]
    receiver.connector.expect(attempt, tables[1], 0, tokens)
    sender.connector.open(attempt, address or receiver.connector.address, 0)
    for start in range(0, tokens, chunk):
        sender.connector.send(attempt, start, min(chunk, tokens - start), tables[0])
    sender.connector.commit(attempt, attempt.encode())
    return tables[0], tables[1]


def assert_same(sender: Side, receiver: Side, tables: tuple[list[int], list[int]], tokens: int) -> None:
    for sent, got in zip(sender.rows(tables[0], 0, tokens), receiver.rows(tables[1], 0, tokens), strict=True):
        assert torch.equal(sent, got)


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "unix"])
@pytest.mark.parametrize("frame_bytes", [1, 5000, 1 << 19])
@pytest.mark.parametrize("encrypts", [False, True])
def test_blocks_arrive_bit_for_bit_in_frames_of_every_size(
    make: Make, listen: str, frame_bytes: int, encrypts: bool
) -> None:
    sender, receiver = make(encrypts=encrypts, frame_bytes=frame_bytes), make(encrypts=encrypts, listen=listen)
    untouched = receiver.snapshot()
    tables = transfer(sender, receiver, "abc", 203)
    happened = until(receiver, Committed)
    done = happened[-1]
    assert isinstance(done, Committed) and done.payload == b"abc"
    assert done.num_bytes == 13 * FORMAT.bytes_per_block and done.first_byte_ns <= done.last_byte_ns
    assert_same(sender, receiver, tables, 203)
    others = [block for block in range(BLOCKS) if block not in tables[1]]
    for before, after in zip(untouched, receiver.snapshot(), strict=True):
        assert torch.equal(before[others], after[others])
    assert [event.num_tokens for event in happened if isinstance(event, ChunkArrived)][-1] == 203
    (sent,) = until(sender, Sent)
    assert isinstance(sent, Sent) and sent.num_bytes == done.num_bytes


@pytest.mark.parametrize("chunk", [16, 32, 64, 208])
def test_a_prefix_that_the_receiver_holds_is_left_alone(make: Make, chunk: int) -> None:
    sender, receiver = make(), make()
    mine, theirs = list(range(13)), list(range(20, 33))
    held = receiver.rows(theirs, 0, 48)
    receiver.connector.expect("abc", theirs, 48, 200 - 48)
    sender.connector.open("abc", receiver.connector.address, 48)
    for start in range(48, 200, chunk):
        sender.connector.send("abc", start, min(chunk, 200 - start), mine)
    sender.connector.commit("abc", b"")
    until(receiver, Committed)
    assert all(map(torch.equal, held, receiver.rows(theirs, 0, 48)))
    assert all(map(torch.equal, sender.rows(mine, 48, 200), receiver.rows(theirs, 48, 200)))


@pytest.mark.parametrize(("block_size", "dtype"), [(32, "bfloat16"), (16, "float32"), (64, "float32")])
def test_block_sizes_and_dtypes_may_differ(make: Make, block_size: int, dtype: str) -> None:
    wide = replace(FORMAT, block_size=block_size, dtype=dtype)
    narrow_side, wide_side = make(), make(kv_format=wide)
    tables = transfer(narrow_side, wide_side, "there", 203)
    until(wide_side, Committed)
    assert_same(narrow_side, wide_side, tables, 203)
    back = transfer(wide_side, narrow_side, "back", 203, chunk=64)
    until(narrow_side, Committed)
    for sent, got in zip(wide_side.rows(back[0], 0, 203), narrow_side.rows(back[1], 0, 203), strict=True):
        assert torch.equal(sent.bfloat16().float(), got)


@pytest.mark.parametrize("codec", ["int8", "int4", "auto"])
def test_a_codec_saves_bytes_and_keeps_the_values_near(make: Make, codec: CodecName) -> None:
    sender, receiver = make(codec=codec), make(kv_format=replace(FORMAT, block_size=32))
    tables = transfer(sender, receiver, "abc", 100)
    done = newest(receiver, Committed)
    assert isinstance(done, Committed)
    share, error = {"int8": (0.6, 0.02), "int4": (0.35, 0.3), "auto": (1.0, 0.0)}[codec]
    assert done.num_bytes <= share * 7 * FORMAT.bytes_per_block
    for sent, got in zip(sender.rows(tables[0], 0, 100), receiver.rows(tables[1], 0, 100), strict=True):
        assert (sent - got).abs().max() <= error * sent.abs().max()


def test_within_one_pool_only_the_commit_travels(make: Make) -> None:
    sender, receiver = make("shared_memory", "unix"), make("shared_memory", "unix")
    before = sender.snapshot() + receiver.snapshot()
    receiver.connector.expect("abc", (), 100, 0)
    sender.connector.open("abc", receiver.connector.address, 100)
    sender.connector.commit("abc", b"first token")
    done = newest(receiver, Committed)
    assert isinstance(done, Committed) and (done.payload, done.num_bytes) == (b"first token", 0)
    until(sender, Sent)
    assert all(map(torch.equal, before, sender.snapshot() + receiver.snapshot()))


@law(weight=0.8)
@pytest.mark.parametrize("encrypts", [False, True])
def test_a_link_that_breaks_anywhere_loses_nothing_and_repeats_nothing(make: Make, seed: int, encrypts: bool) -> None:
    sender, receiver = make(encrypts=encrypts), make(encrypts=encrypts)
    with CuttingProxy(receiver.connector.address, seed, cuts=12, cut_within=60_000) as proxy:
        attempts = {f"attempt {i}": 16 * i + 77 for i in range(5)}
        tables = {
            attempt: transfer(sender, receiver, attempt, tokens, proxy.address) for attempt, tokens in attempts.items()
        }
        # block tables of different attempts overlap at the receiver: compare one attempt at a time
        happened = until(receiver, Committed, 5)
        assert sorted(event.attempt_id for event in happened if isinstance(event, Committed)) == list(attempts)
        assert {event.attempt_id for event in until(sender, Sent, 5)} == set(attempts)
        proxy.cuts_left = 6
        proxy.cut()
        tables["last"] = transfer(sender, receiver, "last", 203, proxy.address)
        until(receiver, Committed)
        assert_same(sender, receiver, tables["last"], 203)
        assert newest(sender, Sent).attempt_id == "last"
    make.close()


@law(weight=0.6)
@pytest.mark.parametrize("encrypts", [False, True])
def test_damaged_bytes_are_noticed_and_sent_again(make: Make, seed: int, encrypts: bool) -> None:
    sender, receiver = make(encrypts=encrypts), make(encrypts=encrypts)
    with CuttingProxy(receiver.connector.address, seed, flips=5, cut_within=40_000) as proxy:
        for turn in range(6):
            tables = transfer(sender, receiver, f"{turn}", 203, proxy.address)
            until(receiver, Committed)
            assert_same(sender, receiver, tables, 203)
            until(sender, Sent)
    make.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_small_attempt_passes_a_long_one_on_a_slow_link(make: Make, encrypts: bool) -> None:
    sender, receiver = make(encrypts=encrypts), make(encrypts=encrypts)
    with CuttingProxy(receiver.connector.address, bytes_per_s=1_200_000) as proxy:
        transfer(sender, receiver, "long", 640, proxy.address)
        until(receiver, ChunkArrived)
        transfer(sender, receiver, "short", 16, proxy.address)
        ended = [event.attempt_id for event in until(receiver, Committed, 2) if isinstance(event, Committed)]
        assert ended == ["short", "long"]


@pytest.mark.parametrize("encrypts", [False, True])
def test_64_attempts_in_both_directions_at_once(make: Make, encrypts: bool) -> None:
    left, right = make(encrypts=encrypts, frame_bytes=20_000), make(encrypts=encrypts, listen="unix", frame_bytes=3000)
    for number in range(32):
        for sender, receiver in ((left, right), (right, left)):
            blocks = list(range(20)) if sender is left else list(range(20, 40))
            attempt = f"{number}{'>' if sender is left else '<'}"
            receiver.connector.expect(attempt, blocks, 0, 320)
            sender.connector.open(attempt, receiver.connector.address, 0)
            for start in range(0, 320, 80):
                sender.connector.send(attempt, start, 80, blocks)
            sender.connector.commit(attempt, b"")
    for side in (left, right):
        happened: list[ConnectorEvent] = []
        while sum(isinstance(event, Committed | Sent) for event in happened) < 64:
            select.select([side.connector], [], [], 30)
            happened += side.connector.poll()
            assert not any(isinstance(event, TransferBroken) for event in happened)
    assert_same(left, right, (list(range(20)), list(range(20))), 320)
    assert_same(right, left, (list(range(20, 40)), list(range(20, 40))), 320)


def test_an_attempt_that_nobody_expects_fails_at_the_sender_alone(make: Make) -> None:
    sender, receiver = make(), make()
    sender.connector.open("unknown", receiver.connector.address, 0)
    sender.connector.send("unknown", 0, 64, list(range(4)))
    sender.connector.commit("unknown", b"")
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and failed.is_sender
    assert "does not expect transfer unknown" in failed.message
    sender.connector.send("unknown", 64, 64, list(range(8)))  # has no effect
    tables = transfer(sender, receiver, "known", 64)
    until(receiver, Committed)
    assert_same(sender, receiver, tables, 64)


@law(weight=0.4)
@pytest.mark.parametrize("encrypts", [False, True])
def test_nothing_is_written_after_forget(make: Make, seed: int, encrypts: bool) -> None:
    rng = random.Random(seed)
    sender, receiver = make(encrypts=encrypts, frame_bytes=1 << 16), make(encrypts=encrypts)
    kept = transfer(sender, receiver, "kept", 48)
    until(receiver, Committed)
    table = [block for block in range(BLOCKS) if block not in kept[1]]
    receiver.connector.expect("abc", table, 0, 16 * len(table))
    sender.connector.open("abc", receiver.connector.address, 0)
    sender.connector.send("abc", 0, 16 * len(table), [block % BLOCKS for block in range(len(table))])
    time.sleep(rng.random() * 0.004)
    receiver.connector.forget("abc")
    frozen = receiver.snapshot()
    receiver.connector.forget("abc")
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and failed.attempt_id == "abc"
    assert all(map(torch.equal, frozen, receiver.snapshot()))
    assert not [event for event in receiver.connector.poll() if event.attempt_id == "abc"]
    transfer(sender, receiver, "next", 48)
    until(receiver, Committed)
    make.close()


@law(weight=0.4)
@pytest.mark.parametrize("encrypts", [False, True])
def test_nothing_is_read_after_cancel(make: Make, seed: int, encrypts: bool) -> None:
    rng = random.Random(seed)
    sender, receiver = make(encrypts=encrypts, frame_bytes=1 << 16), make(encrypts=encrypts)
    table = list(range(BLOCKS - 3))
    with CuttingProxy(receiver.connector.address, bytes_per_s=20_000_000) as proxy:
        receiver.connector.expect("abc", table, 0, 16 * len(table))
        sender.connector.open("abc", proxy.address, 0)
        sender.connector.send("abc", 0, 16 * len(table), table)
        time.sleep(rng.random() * 0.02)
        sender.connector.cancel("abc")
        for pair in sender.layers:
            for cache in pair:
                cache[: BLOCKS - 3] = torch.nan
        sender.connector.cancel("abc")
        receiver.connector.expect("next", [BLOCKS - 1], 0, 16)
        sender.connector.open("next", proxy.address, 0)
        sender.connector.send("next", 0, 16, [BLOCKS - 2])
        sender.connector.commit("next", b"")
        happened: list[ConnectorEvent] = []
        while not any(isinstance(event, Committed) for event in happened):
            select.select([receiver.connector], [], [], 30)
            happened += receiver.connector.poll()
        assert all(event.attempt_id == "abc" for event in happened if isinstance(event, TransferBroken))
        assert not any(cache.isnan().any() for pair in receiver.layers for cache in pair)
        assert [event.attempt_id for event in until(sender, Sent)] == ["next"]
    make.close()


def compute(side: Side, blocks: list[int], layer: int, rng: random.Random) -> None:
    """Write one layer's KV of these blocks, as a step does."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for cache in side.layers[layer]:
        cache[blocks] = torch.randn((len(blocks), *cache.shape[1:]), generator=generator).to(cache.dtype)


def prefill(side: Side, attempt: str, table: list[int], tokens: int, rng: random.Random) -> Iterator[None]:
    """Compute in random chunks and send each layer by layer, now and then more layers at once; then commit."""
    size, num_layers, start = side.block_size, len(side.layers), 0
    while start < tokens:
        count = min(size * rng.randint(1, 12), tokens - start)
        for layer in range(num_layers):
            compute(side, table[start // size : -(-(start + count) // size)], layer, rng)
            if layer + 1 < num_layers and rng.random() < 0.7:
                side.connector.send(attempt, start, count, table, layer + 1)
            yield
        side.connector.send(attempt, start, count, table)
        start += count
    side.connector.commit(attempt, b"")


@law(weight=0.5)
def test_layers_that_leave_while_others_are_computed_bring_the_bytes_of_a_whole_send(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    codec: CodecName = rng.choice(["none", "none", "int8", "int4"])
    ours, theirs = replace(FORMAT, num_layers=7), replace(FORMAT, num_layers=7, block_size=rng.choice([16, 32]))
    frame_bytes = rng.choice([1, 3000, 12_000, 40_000, 1 << 19])
    sender, receiver = make(kv_format=ours, codec=codec, frame_bytes=frame_bytes), make(kv_format=theirs)
    lengths = {"one": rng.randint(1, 320), "two": rng.randint(1, 320)}
    mine = {"one": rng.sample(range(20), 20), "two": rng.sample(range(20, 40), 20)}
    there = {"one": rng.sample(range(20), 20), "two": rng.sample(range(20, 40), 20)}
    cuts = rng.choice([0, 5])
    with CuttingProxy(receiver.connector.address, seed, cuts=cuts, cut_within=30_000) as proxy:
        steps = {}
        for attempt, tokens in lengths.items():
            receiver.connector.expect(attempt, there[attempt], 0, tokens)
            sender.connector.open(attempt, proxy.address, 0)
            steps[attempt] = prefill(sender, attempt, mine[attempt], tokens, rng)
        while steps:
            attempt = rng.choice(list(steps))
            if next(steps[attempt], StopIteration) is StopIteration:
                del steps[attempt]
            elif rng.random() < 0.3:
                time.sleep(0.001)
        until(receiver, Committed, 2)
        until(sender, Sent, 2)
    for attempt, tokens in lengths.items():
        streamed = receiver.rows(there[attempt], 0, tokens)
        for cache in (cache for pair in receiver.layers for cache in pair):
            cache[there[attempt]] = torch.nan
        receiver.connector.expect(f"{attempt} again", there[attempt], 0, tokens)
        sender.connector.open(f"{attempt} again", receiver.connector.address, 0)
        sender.connector.send(f"{attempt} again", 0, tokens, mine[attempt])
        sender.connector.commit(f"{attempt} again", b"")
        until(receiver, Committed)
        assert all(map(torch.equal, streamed, receiver.rows(there[attempt], 0, tokens)))
    make.close()


def test_the_first_layers_arrive_before_the_others_are_computed_and_count_for_no_token(make: Make) -> None:
    sender, receiver = make(frame_bytes=64 * FORMAT.bytes_per_block // (16 * LAYERS)), make()
    receiver.connector.expect("abc", list(range(4)), 0, 64)
    sender.connector.open("abc", receiver.connector.address, 0)
    sender.connector.send("abc", 0, 64, list(range(4)), 1)
    (told,) = until(receiver, ChunkArrived)
    assert isinstance(told, ChunkArrived) and told.num_tokens == 0
    k, v = receiver.layers[0]
    assert torch.equal(k[:4], sender.layers[0][0][:4]) and torch.equal(v[:4], sender.layers[0][1][:4])
    for wrong in (0, LAYERS + 1):
        with pytest.raises(ValueError, match="layers are computed"):
            sender.connector.send("abc", 0, 64, list(range(4)), wrong)
    with pytest.raises(ValueError, match="up to 64 have 1 of 3 layers"):
        sender.connector.send("abc", 64, 16, list(range(5)))
    with pytest.raises(ValueError, match="committed with 1 layers"):
        sender.connector.commit("abc", b"")
    sender.connector.send("abc", 0, 64, list(range(4)))
    sender.connector.commit("abc", b"")
    assert [event.num_tokens for event in until(receiver, Committed) if isinstance(event, ChunkArrived)][-1] == 64
    assert_same(sender, receiver, (list(range(4)), list(range(4))), 64)


@law(weight=0.4)
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_attempt_may_end_between_two_layers(make: Make, seed: int, who: str) -> None:
    rng = random.Random(seed)
    sender, receiver = make(frame_bytes=rng.choice([1, 6000])), make()
    table = list(range(20))
    receiver.connector.expect("abc", table, 0, 320)
    sender.connector.open("abc", receiver.connector.address, 0)
    steps = prefill(sender, "abc", table, 320, rng)
    for _ in range(rng.randint(1, 2 * LAYERS)):  # it computes in two chunks at least: it is never committed by then
        next(steps)
        time.sleep(rng.random() * 0.002)
    if who == "sender":
        sender.connector.cancel("abc")
        for cache in (cache for pair in sender.layers for cache in pair):
            cache[:20] = torch.nan
    else:
        receiver.connector.forget("abc")
        frozen = receiver.snapshot()
    for _ in steps:  # the step that is under way ends; nobody hears of it
        pass
    tables = list(range(20, 26)), list(range(30, 36))
    receiver.connector.expect("next", tables[1], 0, 96)
    sender.connector.open("next", receiver.connector.address, 0)
    for _ in prefill(sender, "next", tables[0], 96, rng):
        pass
    happened = []
    while not any(isinstance(event, Committed) for event in happened):
        select.select([receiver.connector], [], [], 30)
        happened += receiver.connector.poll()
    assert {event.attempt_id for event in happened if isinstance(event, Committed)} == {"next"}
    assert_same(sender, receiver, tables, 96)
    if who == "sender":
        assert not any(cache[:20].isnan().any() for pair in receiver.layers for cache in pair)
    else:
        for before, after in zip(frozen, receiver.snapshot(), strict=True):
            assert torch.equal(before[:20], after[:20])
    make.close()


@given(
    st.integers(1, 12), st.integers(1, 700), st.sampled_from([1, 9000, 60_000, 1 << 19]), st.booleans(),
    st.lists(st.integers(1, 12), max_size=12),
)  # fmt: skip
def test_a_frame_leaves_when_its_layers_are_there_and_is_the_one_of_a_whole_send(
    num_layers: int, tokens: int, frame_bytes: int, is_raw: bool, said: list[int]
) -> None:
    form = replace(FORMAT, num_layers=num_layers)
    caches = [allocate_cpu(1, HEADS, form.block_size, DIM, torch.bfloat16) for _ in range(num_layers)]
    body_format = CodecBodies(caches, form, "none" if is_raw else "int8", frame_bytes).for_sending(form, tokens, None)
    attempt = SendTransfer("abc", 1, parse_address("tcp://127.0.0.1:1"), 0, num_layers)
    whole, left, known = list(body_format.parts(0, tokens)), [], 0
    for count in [*(min(number, num_layers) for number in said), num_layers]:
        was_waiting = attempt.has_data
        if attempt.lacks_layers:
            is_told = attempt.queue_layers(tokens, count)
        else:
            is_told = attempt.queue_send(0, tokens, SequenceTables.of((), 0), count)
        known = max(known, count)
        assert is_told or not attempt.has_data or was_waiting
        while attempt.has_data and (following := attempt.next_part(lambda _: body_format)) is not None:
            assert following[0] == len(left)
            left.append(following[1])
        assert left == [part for part in whole if part.first_layer + part.num_layers <= known]
        if known == num_layers:
            break
    assert left == whole and attempt.is_cut
    attempt.queue_commit(b"")
    assert attempt.has_commit and attempt.next_commit() == (len(whole), b"")


def test_sends_that_are_repeated_are_skipped_and_gaps_are_an_error(make: Make) -> None:
    sender, receiver = make(), make()
    table = list(range(8))
    receiver.connector.expect("abc", table, 0, 128)
    sender.connector.open("abc", receiver.connector.address, 0)
    sender.connector.send("abc", 0, 48, table)
    sender.connector.send("abc", 0, 48, table)
    sender.connector.send("abc", 32, 64, table)
    with pytest.raises(ValueError, match="tokens 96 to 112 were never sent"):
        sender.connector.send("abc", 112, 16, table)
    sender.connector.send("abc", 96, 32, table)
    sender.connector.commit("abc", b"")
    with pytest.raises(ValueError, match="committed already"):
        sender.connector.commit("abc", b"")
    done = newest(receiver, Committed)
    assert isinstance(done, Committed) and done.num_bytes == 8 * FORMAT.bytes_per_block


def test_a_commit_without_all_of_the_kv_fails_on_both_sides(make: Make) -> None:
    sender, receiver = make(), make()
    receiver.connector.expect("abc", list(range(8)), 0, 128)
    sender.connector.open("abc", receiver.connector.address, 0)
    sender.connector.send("abc", 0, 112, list(range(7)))
    sender.connector.commit("abc", b"")
    for side, is_sender in ((sender, True), (receiver, False)):
        failed = newest(side, TransferBroken)
        assert isinstance(failed, TransferBroken) and failed.is_sender is is_sender
        assert "16 tokens is missing" in failed.message


def test_a_sender_that_begins_elsewhere_is_refused(make: Make) -> None:
    sender, receiver = make(), make()
    receiver.connector.expect("abc", list(range(8)), 32, 96)
    sender.connector.open("abc", receiver.connector.address, 0)
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and "begins at token 0, the receiver at 32" in failed.message
    assert isinstance(newest(receiver, TransferBroken), TransferBroken)


@pytest.mark.skipif(not CONNECTORS["nixl"].is_installed, reason="needs the extra [nixl]")
def test_nixl_reads_the_blocks_bit_for_bit_and_fences(make: Make) -> None:
    sender, receiver = make("nixl"), make("nixl")
    tables = transfer(sender, receiver, "abc", 203)
    done = newest(receiver, Committed)
    assert isinstance(done, Committed) and done.num_bytes == 13 * FORMAT.bytes_per_block
    assert_same(sender, receiver, tables, 203)
    assert isinstance(newest(sender, Sent), Sent)
    transfer(sender, receiver, "forgotten", 500)
    receiver.connector.forget("forgotten")
    frozen = receiver.snapshot()
    assert isinstance(newest(sender, TransferBroken), TransferBroken)
    assert all(map(torch.equal, frozen, receiver.snapshot()))
    other = make("nixl", kv_format=replace(FORMAT, block_size=32))
    other.connector.expect("abc", [0], 0, 16)
    sender.connector.open("abc", other.connector.address, 0)
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and "one format" in failed.message


@pytest.mark.skipif(not CONNECTORS["nixl"].is_installed, reason="needs the extra [nixl]")
@pytest.mark.parametrize("part_bytes", [1, 30_000, 1 << 23])
def test_nixl_reads_layers_while_others_are_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr("diptych.runtime.transfer.connectors.nixl_connector.PART_BYTES", part_bytes)
    sender, receiver = make("nixl"), make("nixl")
    tables = list(range(13)), list(range(20, 33))
    receiver.connector.expect("abc", tables[1], 0, 203)
    sender.connector.open("abc", receiver.connector.address, 0)
    for _ in prefill(sender, "abc", tables[0], 203, random.Random(part_bytes)):
        time.sleep(0.002)
    until(receiver, Committed)
    assert_same(sender, receiver, tables, 203)


@pytest.mark.skipif(CONNECTORS["nixl"].is_installed, reason="the extra [nixl] is there")
def test_without_its_extra_nixl_says_how_to_get_it(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"pip install '\.\[nixl\]'"):
        make("nixl")


def test_everything_may_be_queued_before_the_receiver_listens(make: Make, tmp_path: Path) -> None:
    sender = make()
    sender.connector.open("abc", f"unix://{tmp_path}/1", 0)
    sender.connector.send("abc", 0, 64, [3, 2, 1, 0])
    sender.connector.commit("abc", b"")
    time.sleep(0.05)
    receiver = make(listen="unix")
    receiver.connector.expect("abc", [5, 6, 7, 8], 0, 64)
    until(receiver, Committed)
    assert_same(sender, receiver, ([3, 2, 1, 0], [5, 6, 7, 8]), 64)


def test_nobody_there_is_a_failure_in_the_end(make: Make, tmp_path: Path) -> None:
    sender = make(timeout_s=0.2)
    sender.connector.open("abc", f"unix://{tmp_path}/nobody", 0)
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken)
    assert "no working connection" in failed.message and "ENOENT" in failed.message


def test_a_sender_that_vanishes_is_a_failure_at_the_receiver_in_the_end(make: Make) -> None:
    sender, receiver = make(), make(timeout_s=0.2)
    receiver.connector.expect("abc", list(range(8)), 0, 128)
    sender.connector.open("abc", receiver.connector.address, 0)
    sender.connector.send("abc", 0, 64, list(range(8)))
    until(receiver, ChunkArrived)
    sender.connector.close()
    failed = newest(receiver, TransferBroken)
    assert isinstance(failed, TransferBroken) and "not resumed within 0.2 s" in failed.message


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_restarted_receiver_fails_the_attempts_of_the_old_one(make: Make, tmp_path: Path, encrypts: bool) -> None:
    sender, old = make(encrypts=encrypts), make(encrypts=encrypts, listen=f"unix://{tmp_path}/kv")
    old.connector.expect("abc", list(range(8)), 0, 128)
    sender.connector.open("abc", old.connector.address, 0)
    sender.connector.send("abc", 0, 64, list(range(8)))
    until(old, ChunkArrived)
    old.connector.close()
    new = make(encrypts=encrypts, listen=f"unix://{tmp_path}/kv")
    new.connector.expect("abc", list(range(8)), 0, 128)
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and "was restarted" in failed.message
    transfer(sender, new, "another", 64)
    until(new, Committed)


@pytest.mark.parametrize("encrypts", [False, True])
def test_closing_with_everything_in_flight_ends_at_once(make: Make, encrypts: bool) -> None:
    for first in (0, 1):
        sides = make(encrypts=encrypts), make(encrypts=encrypts)
        for number in range(8):
            transfer(sides[0], sides[1], f"{number}", 500)
        sides[first].connector.close()
        sides[1 - first].connector.close()
        sides[first].connector.close()
        sides[first].connector.cancel("0")
        assert not sides[first].connector.poll()


@pytest.mark.parametrize("encrypts", [False, True])
def test_who_does_not_know_the_secret_stays_outside(make: Make, encrypts: bool) -> None:
    stranger, receiver = (
        make(encrypts=encrypts, secret=b"another secret, also 32 bytes long", timeout_s=0.3),
        make(encrypts=encrypts),
    )
    receiver.connector.expect("abc", [0], 0, 16)
    stranger.connector.open("abc", receiver.connector.address, 0)
    stranger.connector.send("abc", 0, 16, [0])
    before = receiver.snapshot()
    failed = newest(stranger, TransferBroken)
    assert isinstance(failed, TransferBroken) and "has it the same secret?" in failed.message
    assert not receiver.connector.poll() and all(map(torch.equal, before, receiver.snapshot()))


def test_garbage_disturbs_nobody(make: Make) -> None:
    sender, receiver = make(), make()
    rng = random.Random(5)
    target = parse_address(receiver.connector.address)
    with contextlib.ExitStack() as stack:
        for number in range(100):  # more than may be strangers at a time
            sock = stack.enter_context(socket.socket(target.family))
            sock.connect(target.target)
            with contextlib.suppress(OSError):
                sock.send(rng.randbytes(rng.randrange(1, 3000)))
            if number % 10 == 0:
                tables = transfer(sender, receiver, f"{number}", 48)
                until(receiver, Committed)
                assert_same(sender, receiver, tables, 48)


def any_frame(rng: random.Random) -> tuple[Frame, bytes]:
    """A frame that a peer with the secret, and without a mind, might send."""
    kind = rng.choice(list(Kind))
    body = b"abc" if kind is Kind.OPEN else rng.randbytes(rng.choice([0, 0, 7, 6144, 12288]))
    if kind in (Kind.ACK, Kind.CANCEL, Kind.REFUSE):
        body = b""
    small = [rng.choice([0, 0, 1, 2, 3, 16, 48, 2**16 - 1]) for _ in range(5)]
    number, sequence = rng.choice([1, 1, 1, 2, 2**64 - 1]), rng.choice([0, 0, 1, 2, 2**64 - 1])
    frame = Frame(
        kind, number, sequence, *small[:4], rng.choice([0, 1, 2, 3, 4, 5, 6, 255]), rng.choice([0, 1]), len(body),
        zlib.crc32(body) if rng.random() < 0.9 else 0,
    )  # fmt: skip
    return frame, body


def exactly(sock: socket.socket, count: int) -> bytes:
    """``count`` bytes of a socket."""
    data = sock.recv(count, socket.MSG_WAITALL)
    assert len(data) == count
    return data


def introduce(sock: socket.socket, me: Identity, dial: int) -> bytes:
    """The handshake of a sender; the key to the receiver."""
    greeted = exactly(sock, GREETING_BYTES)
    said = hello(me, greeted, "tcp://127.0.0.1:1", dial)
    sock.sendall(said)
    start = exactly(sock, WELCOME_BYTES)
    welcome = start + exactly(sock, int.from_bytes(start[-2:], "little"))
    return accept_welcome(me, greeted, said, welcome).key_to_receiver


def test_a_newer_connection_of_a_sender_replaces_the_older_one_and_not_the_reverse(make: Make) -> None:
    sender, receiver = make(), make()
    receiver.connector.expect("abc", [0], 0, 16)
    me = Identity(SECRET, b"s" * 16, FORMAT)
    opening = Frame(Kind.OPEN, 1, body_bytes=3)
    with contextlib.ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(parse_address(receiver.connector.address).target))
            for _ in range(8)
        ]
        for dial in (1, 3, 4):
            seal = Seal(introduce(socks[dial], me, dial))
            socks[dial].sendall(seal.seal(opening, b"abc") + b"abc")
            acknowledgement = parse_header(exactly(socks[dial], HEADER_BYTES))
            assert (acknowledgement.kind, acknowledgement.sequence) == (Kind.ACK, 0)
        assert socks[1].recv(1) == socks[3].recv(1) == b""
        with pytest.raises(AssertionError):
            introduce(socks[2], me, 2)  # a connection that is late
        for number in range(4):  # file descriptors are used again
            transfer(sender, receiver, f"{number}", 48)
            until(receiver, Committed)
            socks.append(stack.enter_context(socket.create_connection(socks[0].getpeername())))


def test_a_connection_remembers_no_transfer_that_has_ended() -> None:
    def unexpected(connection: ReceiverConnection, why: str) -> None:
        raise AssertionError(why)

    events, sender = EventQueue(), Identity(SECRET, b"s" * 16, FORMAT)
    receiver = StreamReceiver(Identity(SECRET, b"r" * 16, FORMAT), EmptyBody(LAYERS), events, 10**10, unexpected)
    here, there = socket.socketpair()
    with here, there:
        connection = receiver.accept(there, 0)
        connection.write()
        greeted = exactly(here, GREETING_BYTES)
        said = hello(sender, greeted, "unix:///kv", 1)
        here.sendall(said)
        connection.read()
        connection.write()
        start = exactly(here, WELCOME_BYTES)
        welcome = start + exactly(here, int.from_bytes(start[-2:], "little"))
        seal = Seal(accept_welcome(sender, greeted, said, welcome).key_to_receiver)
        for number in range(1, 301):
            attempt = f"{number}".encode()
            if number % 3:
                receiver.transfers[f"{number}"] = RecvTransfer(f"{number}", SequenceTables.of((), 100), 100, 0)
            here.sendall(seal.seal(Frame(Kind.OPEN, number, start=100, body_bytes=len(attempt)), attempt) + attempt)
            connection.read()
            assert len(connection.transfers) == bool(number % 3)
            here.sendall(seal.seal(Frame(Kind.COMMIT if number % 2 else Kind.CANCEL, number)))
            connection.read()
            connection.write()
            assert not connection.transfers
            here.sendall(seal.seal(Frame(Kind.CANCEL, number)))  # too late, and no error
            connection.read()
            here.recv(1 << 16)
        kinds = [type(event) for _, event in events.drain()]
        assert (kinds.count(Committed), kinds.count(TransferBroken)) == (100, 100)
        here.sendall(seal.seal(Frame(Kind.CANCEL, 301)))
        with pytest.raises(ProtocolError, match="not opened"):
            connection.read()
    events.close()


@law(weight=0.4)
def test_a_sender_with_the_secret_and_no_mind_harms_only_itself(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver = make(), make()
    untouched = [(k.clone(), v.clone()) for k, v in receiver.layers]
    receiver.connector.expect("abc", list(range(6)), 0, 96)
    mad = Identity(SECRET, rng.randbytes(16), FORMAT)
    with socket.create_connection(parse_address(receiver.connector.address).target) as sock:
        seal = Seal(introduce(sock, mad, 1))
        opening = Frame(Kind.OPEN, 1, body_bytes=3)
        with contextlib.suppress(OSError):
            sock.sendall(seal.seal(opening, b"abc") + b"abc")
            for _ in range(12):
                frame, body = any_frame(rng)
                sock.sendall(seal.seal(frame, b"" if frame.kind is Kind.DATA else body) + body)
        receiver.connector.expect("other", [7], 0, 16)
        sender.connector.open("other", receiver.connector.address, 0)
        sender.connector.send("other", 0, 16, [3])
        sender.connector.commit("other", b"")
        until(sender, Sent)
    assert_same(sender, receiver, ([3], [7]), 16)
    for before, after in zip(untouched, receiver.layers, strict=True):
        assert all(torch.equal(a[8:], b[8:]) and torch.equal(a[6], b[6]) for a, b in zip(before, after, strict=True))
    make.close()


@law(weight=0.4)
def test_a_receiver_with_the_secret_and_no_mind_harms_only_its_attempts(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver = make(timeout_s=0.5), make()
    mad = Identity(SECRET, rng.randbytes(16), FORMAT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender.connector.open("abc", f"tcp://127.0.0.1:{server.getsockname()[1]}", 0)
        sender.connector.send("abc", 0, 96, list(range(6)))
        with server.accept()[0] as sock:
            greeted = greeting()
            sock.sendall(greeted)
            start = exactly(sock, HELLO_BYTES)
            answer, who = accept_hello(mad, greeted, start + exactly(sock, int.from_bytes(start[-2:], "little")))
            sock.sendall(answer)
            seal = Seal(who.key_to_sender)
            with contextlib.suppress(OSError):
                for _ in range(12):
                    frame, body = any_frame(rng)
                    sock.sendall(seal.seal(frame, b"" if frame.kind is Kind.DATA else body) + body)
            tables = transfer(sender, receiver, "other", 48)
            until(receiver, Committed)
            assert_same(sender, receiver, tables, 48)
    make.close()


def test_caches_of_different_models_are_refused_with_both_sides_values(make: Make) -> None:
    sender, receiver = make(), make(kv_format=replace(FORMAT, model="another"))
    receiver.connector.expect("abc", [0], 0, 16)
    sender.connector.open("abc", receiver.connector.address, 0)
    failed = newest(sender, TransferBroken)
    assert isinstance(failed, TransferBroken) and "model is 'm' here and 'another' there" in failed.message


def test_what_cannot_be_is_said_at_once(make: Make, tmp_path: Path) -> None:
    side = make()
    with pytest.raises(ConfigError, match="at least 32"):
        TransferOptions(b"short")
    with pytest.raises(ConfigError, match="one of shared_memory, tcp, nixl"):
        make(name="carrier pigeon")
    with pytest.raises(ConfigError, match="unix"):
        make(name="shared_memory")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        make(listen="unix")
    for address in ("tcp://example.org:1", "tcp://127.0.0.1", "http://127.0.0.1:1", "unix://", "tcp://127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="address"):
            side.connector.open("abc", address, 0)
    with pytest.raises(ValueError, match="do not hold"):
        side.connector.expect("abc", [0], 0, 17)
    side.connector.open("abc", side.connector.address, 0)
    with pytest.raises(ValueError, match="at most"):
        side.connector.commit("abc", bytes(MAX_PAYLOAD_BYTES + 1))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.binary(max_size=64))
def test_no_header_is_believed_without_its_seal(header: bytes, body: bytes) -> None:
    try:
        assert parse_header(header).body_bytes <= 1 << 26
    except ProtocolError:
        return
    with pytest.raises(ProtocolError):
        Seal(b"k" * 32).check(header, body)


@given(st.sampled_from(list(Kind)), st.integers(0, 2**64 - 1), st.integers(0, HEADER_BYTES - 1), st.integers(0, 7))
def test_a_sealed_header_is_read_as_written_once_and_no_bit_of_it_may_change(
    kind: Kind, number: int, byte: int, bit: int
) -> None:
    frame = Frame(kind, number, 3, 4, 5, 6, 7, 1, 1, 0, 9)
    header = Seal(b"k" * 32).seal(frame)
    assert parse_header(header) == frame
    check = Seal(b"k" * 32)
    check.check(header)
    with pytest.raises(ProtocolError):
        check.check(header)  # played back
    damaged = bytearray(header)
    damaged[byte] ^= 1 << bit
    with pytest.raises(ProtocolError):
        Seal(b"k" * 32).check(damaged)


@given(st.data())
def test_no_byte_of_a_handshake_may_change(data: st.DataObject) -> None:
    sender, receiver = Identity(SECRET, b"s" * 16, FORMAT), Identity(SECRET, b"r" * 16, FORMAT)
    greeted = greeting()
    said = hello(sender, greeted, "tcp://127.0.0.1:1", 7)
    answer, who = accept_hello(receiver, greeted, said)
    known = accept_welcome(sender, greeted, said, answer)
    assert (who.instance, who.dial, who.kv_format, known.instance) == (b"s" * 16, 7, FORMAT, b"r" * 16)
    assert (who.key_to_receiver, who.key_to_sender) == (known.key_to_receiver, known.key_to_sender)
    place = data.draw(st.integers(0, len(said) - 1).filter(lambda at: not HELLO_BYTES - 2 <= at < HELLO_BYTES))
    with pytest.raises(ProtocolError):
        accept_hello(receiver, greeted, said[:place] + bytes([said[place] ^ 1]) + said[place + 1 :])
    place = data.draw(st.integers(0, len(answer) - 1).filter(lambda at: not WELCOME_BYTES - 2 <= at < WELCOME_BYTES))
    with pytest.raises(ProtocolError):
        accept_welcome(sender, greeted, said, answer[:place] + bytes([answer[place] ^ 1]) + answer[place + 1 :])
    with pytest.raises(ProtocolError):
        accept_hello(receiver, greeting(), said)


@given(st.binary(max_size=300))
def test_a_kv_format_from_outside_is_one_or_a_config_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(KVFormat.from_bytes(data), KVFormat)
    assert KVFormat.from_bytes(FORMAT.to_bytes()) == FORMAT
