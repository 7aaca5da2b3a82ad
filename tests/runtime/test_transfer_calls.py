"""A connector without its thread: the calls of the worker at their limits, and one turn of the loop at a time.

Sockets, codecs and what TLS gathers are here, too: what a connection asks of the kernel and keeps in memory.
"""

import errno
import os
import random
import select
import selectors
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError, WorkerError
from diptych.runtime.attention.layout import allocate_cpu
from diptych.runtime.transfer.codec.kv_codec import KVCodec
from diptych.runtime.transfer.codec.wire_format import (
    CODECS,
    WireEncoding,
    check_tiles,
    choose_codec,
    tile_bytes,
    transfer_seconds,
    wire_bytes,
    wire_share,
)
from diptych.runtime.transfer.connector import Committed, ConnectorEvent, TransferOptions
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.connectors.tcp_connector import CodecBodies, CodecBody
from diptych.runtime.transfer.stream.body_format import SequenceTables
from diptych.runtime.transfer.stream.encrypted_socket import EncryptedSocket, _gathered
from diptych.runtime.transfer.stream.frames import Frame, Kind, ProtocolError, Seal
from diptych.runtime.transfer.stream.handshake import Identity
from diptych.runtime.transfer.stream.stream_connector import (
    OutgoingFrame,
    RecvTransfer,
    SenderConnection,
    StreamConnector,
)
from tests.laws import law
from tests.runtime.open_descriptors import descriptors
from tests.runtime.transfer_parts import FORMAT, MS, SECRET, Clock


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[StreamConnector]:
    """One whose thread has ended at once: the test takes its turns. It gives up after 8 s."""
    monkeypatch.setattr(StreamConnector, "_run", lambda self: None)
    made = StreamConnector(EmptyBody(3), FORMAT, TransferOptions(SECRET, resume_timeout_s=8.0))
    yield made
    for connection in list(made._masks):
        connection.close()
    made._selector.close()
    made._listener.close()
    made.close()


# The calls of the worker


def test_an_id_has_1_to_1024_bytes_and_is_open_once(connector: StreamConnector) -> None:
    address = connector.address
    for taken in ("x", "x" * 1024, "é" * 512):
        connector.open(taken, address, 0)
    for refused in ("", "x" * 1025, "é" * 513):
        with pytest.raises(ValueError, match=f"{len(refused.encode())} bytes; 1 to 1024"):
            connector.open(refused, address, 0)
    with pytest.raises(ValueError, match="open already"):
        connector.open("x", address, 0)
    connector.expect("x", [0], 0, 16)  # to expect is another thing
    with pytest.raises(ValueError, match="expected already"):
        connector.expect("x", [0], 0, 16)
    numbers = [transfer.number for transfer in connector._sending.values()]
    assert numbers == [1, 2, 3]


def test_a_commit_has_65536_bytes_at_most(connector: StreamConnector) -> None:
    connector.open("x", connector.address, 0)
    with pytest.raises(ValueError, match="65537 bytes; at most 65536"):
        connector.commit("x", bytes(65_537))
    connector.commit("x", bytes(65_536))
    with pytest.raises(ValueError, match="committed already"):
        connector.commit("x", b"")
    connector.commit("unknown", b"")


@pytest.mark.parametrize(("blocks", "start", "tokens", "fits"), [
    ([0], 0, 16, True), ([0], 0, 17, False), ([0, 1], 16, 16, True), ([0, 1], 16, 17, False), ([], 100, 0, True),
    ([], 0, 1, False), ([0], 16, 0, True), ([0], 17, 0, False),
])  # fmt: skip
def test_blocks_are_enough_for_the_tokens_that_are_expected(
    blocks: list[int], start: int, tokens: int, fits: bool, connector: StreamConnector
) -> None:
    if fits:
        connector.expect("x", blocks, start, tokens)
        assert connector._receiver.transfers["x"].end == start + tokens
        return
    with pytest.raises(ValueError, match="do not hold" if blocks else "no blocks for its 1 tokens"):
        connector.expect("x", blocks, start, tokens)
    assert not connector._receiver.transfers


def test_layers_are_1_to_all_and_blocks_enough_for_what_is_sent(connector: StreamConnector) -> None:
    connector.open("x", connector.address, 0)
    for layers in (-1, 0, 4):
        with pytest.raises(ValueError, match=f"{layers} layers are computed, of 3"):
            connector.send("x", 0, 16, [0], layers)
    with pytest.raises(ValueError, match="1 blocks do not hold 17 tokens"):
        connector.send("x", 0, 17, [0])
    transfer = connector._sending["x"]
    connector.send("x", 0, 0, [0])
    assert not transfer._sends
    connector.send("x", 0, 16, [0], 1)
    assert transfer._sends[-1].num_layers == 1
    connector.send("x", 0, 16, [0], 3)
    connector.send("x", 16, 16, [0, 1])
    assert [send.num_layers for send in transfer._sends] == [3, 3] and transfer.queued_until == 32
    transfer.close()
    connector.send("x", 48, 16, [0, 1, 2, 3])  # after its end: ignored
    connector.send("unknown", 0, 16, [0])
    assert transfer.queued_until == 32


def test_what_has_ended_is_neither_open_nor_expected_any_more(connector: StreamConnector) -> None:
    for _ in range(2):  # an id may be used again once it has ended
        connector.expect("x", [0], 0, 16)
        connector.open("x", connector.address, 0)
        receiving, sending = connector._receiver.transfers["x"], connector._sending["x"]
        connector._events.emit(receiving, ChunkArrived("x", 16))
        assert connector.poll() == [ChunkArrived("x", 16)] and "x" in connector._receiver.transfers
        connector._events.emit(sending, TransferBroken("x", True, ""))
        assert connector.poll() == [TransferBroken("x", True, "")]
        assert "x" not in connector._sending and "x" in connector._receiver.transfers
        connector._events.emit(receiving, Committed("x", b"", 0, 0, 0))
        assert len(connector.poll()) == 1 and not connector._receiver.transfers and connector.poll() == []
    for end, begin in ((connector.forget, connector.expect), (connector.cancel, connector.open)):
        begin("y", *(([0], 0, 16) if end == connector.forget else (connector.address, 0)))  # type: ignore[operator]
        transfer = (connector._receiver.transfers | connector._sending)["y"]  # type: ignore[operator]
        connector._events.emit(transfer, TransferBroken("y", True, ""))
        end("y")
        end("y")  # idempotent
        assert transfer.is_closed and transfer.is_silent and connector.poll() == []


def test_a_thread_that_has_died_is_an_error_of_every_poll(connector: StreamConnector) -> None:
    connector._fault = RuntimeError("a bug")
    for _ in range(2):
        with pytest.raises(WorkerError, match="a bug"):
            connector.poll()


def test_a_fault_of_the_thread_wakes_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamConnector, "_tick", lambda self: 1 // 0)
    made = StreamConnector(EmptyBody(3), FORMAT, TransferOptions(SECRET))
    assert select.select([made], [], [], 10)[0]
    with pytest.raises(WorkerError, match="division"):
        made.poll()
    made.close()


# The loop


class Failing:
    """A listening socket that cannot accept."""

    def __init__(self, sock: socket.socket, code: int) -> None:
        self.sock, self.code = sock, code

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept(self) -> Any:
        raise OSError(self.code, os.strerror(self.code))

    def close(self) -> None:
        self.sock.close()


def is_listening(connector: StreamConnector) -> bool:
    return connector._listener.fileno() in {key.fd for key in connector._selector.get_map().values()}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_no_descriptor_for_who_calls_is_a_pause_of_200_ms(code: int, connector: StreamConnector, clock: Clock) -> None:
    connector._listener = Failing(connector._listener, code)  # type: ignore[assignment]
    assert connector._tick() is None
    connector._accept()
    assert not is_listening(connector)
    assert connector._tick() == pytest.approx(0.2)
    clock.now += 199_999_999
    assert connector._tick() == pytest.approx(1e-9) and not is_listening(connector)
    clock.now += 1
    connector._tick()
    assert is_listening(connector) and connector._tick() is None


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ECONNABORTED])
def test_who_has_gone_before_it_was_accepted_is_no_trouble(code: int, connector: StreamConnector) -> None:
    connector._listener = Failing(connector._listener, code)  # type: ignore[assignment]
    connector._accept()
    assert is_listening(connector) and connector._tick() is None


def test_what_is_waited_for_is_looked_at_after_an_eighth_of_the_time(connector: StreamConnector, clock: Clock) -> None:
    connector._receiver.transfers["x"] = transfer = RecvTransfer("x", SequenceTables.of((0,), 0), 0, 16)
    assert connector._tick() is None
    transfer.lost_ns = clock.now
    assert connector._tick() == pytest.approx(1.0)
    clock.now += 8_000_000_001
    connector._tick()
    assert transfer.is_closed and connector._tick() is None
    [event] = connector.poll()
    assert isinstance(event, TransferBroken) and "within 8 s" in event.message


def test_a_receiver_that_does_not_answer_is_hung_up_and_dialled_again(connector: StreamConnector, clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connector.open("x", f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0)
        connector._take_news()
        [peer] = connector._peers.values()
        connector._tick()
        first = peer.connection
        assert first is not None and connector._masks[first] == selectors.EVENT_READ | selectors.EVENT_WRITE
        connector._serve(first, selectors.EVENT_WRITE)
        assert first.is_connected and connector._masks[first] == selectors.EVENT_READ
        clock.now += 4 * 10**9 + 1  # half of the time
        connector._tick()
        assert not first.is_open and first not in connector._masks and peer.connection is None
        clock.now += 10 * MS
        connector._tick()
        second = peer.connection
        assert second is not None and second is not first and second in connector._masks
        connector.cancel("x")
        connector._take_news()
        assert not peer.transfers
        connector._lost(second, "enough")
        connector._tick()
        assert not connector._peers and not connector._masks


def test_transfers_to_one_address_share_a_peer_and_those_that_have_ended_get_none(connector: StreamConnector) -> None:
    for name, address in (("a", "tcp://127.0.0.1:1"), ("b", "tcp://127.0.0.1:1"), ("c", "tcp://127.0.0.1:2")):
        connector.open(name, address, 0)
    connector.open("d", "tcp://127.0.0.1:3", 0)
    connector.cancel("d")
    connector._take_news()
    assert [sorted(t.attempt_id for t in peer.transfers.values()) for peer in connector._peers.values()] == [
        ["a", "b"], ["c"],
    ]  # fmt: skip
    connector._take_news()  # nothing has changed
    connector.cancel("a")
    connector._take_news()
    [first, _] = connector._peers.values()
    assert [transfer.attempt_id for transfer in first.transfers.values()] == ["b"]


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_what_has_been_taken_wakes_nobody_again(connector: StreamConnector) -> None:
    assert not is_readable(connector._wake) and not is_readable(connector.fileno())
    connector.open("x", connector.address, 0)
    assert is_readable(connector._wake)
    connector._take_news()
    assert not is_readable(connector._wake)
    connector._events.emit(connector._sending["x"], TransferBroken("x", True, ""))
    assert is_readable(connector.fileno())
    connector.poll()
    assert not is_readable(connector.fileno())


# Sockets


def test_a_connection_is_quick_small_in_the_kernel_and_ends_when_its_host_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        SenderConnection(sock, Identity(SECRET, b"s" * 16, FORMAT), None, 1)  # type: ignore[arg-type]
        options = {
            name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("NODELAY", "NOTSENT_LOWAT", "KEEPIDLE", "KEEPINTVL", "KEEPCNT")
        }
        assert options == {"NODELAY": 1, "NOTSENT_LOWAT": 131_072, "KEEPIDLE": 30, "KEEPINTVL": 10, "KEEPCNT": 3}
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1 and not sock.getblocking()


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 1 << 26])
def test_what_is_not_wanted_takes_64_kib_however_long_it_is(count: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = SenderConnection(here, Identity(SECRET, b"s" * 16, FORMAT), None, 1)  # type: ignore[arg-type]
        views = connection.discard(count)
        assert sum(map(len, views)) == count
        assert {id(view.obj) for view in views} <= {id(connection._scratch.obj)} and len(connection._scratch) == 65_536
        assert all(len(view) for view in views)


def test_a_header_has_40_bytes_and_a_mac_of_16() -> None:
    header = Seal(b"key").seal(Frame(Kind.ACK, 1))
    assert len(header) == 56
    assert header[:40] == Seal(b"other").seal(Frame(Kind.ACK, 1))[:40]
    assert header[40:] != Seal(b"other").seal(Frame(Kind.ACK, 1))[40:]


def test_a_connection_that_is_closed_forgets_what_it_had_to_say() -> None:
    here, there = socket.socketpair()
    with there:
        connection = SenderConnection(here, Identity(SECRET, b"s" * 16, FORMAT), None, 1)  # type: ignore[arg-type]
        connection.put(b"x")
        connection.close()
        connection.close()  # idempotent
        assert not connection.wants_write and not connection.is_open and there.recv(9) == b""


@law(weight=0.1)
def test_pieces_are_gathered_in_their_order_up_to_256_kib(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [rng.randbytes(rng.choice([0, 1, 7, 100_000, 262_143, 262_144, 262_145])) for _ in range(rng.randrange(6))]
    gathered = _gathered([memoryview(piece) for piece in pieces])
    assert gathered == b"".join(pieces)[:262_144]


class Scripted:
    """A socket of TLS whose calls end as they are told; sent: what it was given."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.sent: list[bytes] = []
        self.left = 0

    def _next(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def send(self, data: bytes) -> int:
        self.sent.append(bytes(data))
        return int(self._next())

    def recv_into(self, view: memoryview) -> int:
        data = self._next()
        view[: len(data)] = data
        return len(data)

    def pending(self) -> int:
        return self.left


def encrypted(*outcomes: Any) -> tuple[EncryptedSocket, Scripted]:
    made, below = object.__new__(EncryptedSocket), Scripted(*outcomes)
    made.family, made.waits_for_read, made._begun = socket.AF_INET, False, b""
    made._socket = below  # type: ignore[assignment]
    return made, below


def test_what_was_begun_to_be_encrypted_is_given_again_until_it_is_taken() -> None:
    sock, below = encrypted(ssl.SSLWantWriteError(), ssl.SSLWantReadError(), 2, 3)
    block = bytearray(b"abc")
    for waits in (False, True):  # the kernel takes nothing; then TLS has to hear from the other end first
        with pytest.raises(BlockingIOError):
            sock.sendmsg([memoryview(block)])
        assert sock.waits_for_read is waits
        block[:] = b"---"  # the blocks may change meanwhile
    assert sock.sendmsg([memoryview(block)]) == 2 and not sock.waits_for_read
    assert sock.sendmsg([memoryview(b"xyz")]) == 3
    assert below.sent == [b"abc", b"abc", b"abc", b"xyz"]


def test_to_wait_for_what_comes_does_not_keep_from_sending() -> None:
    sock, _ = encrypted(ssl.SSLWantReadError(), ssl.SSLWantReadError(), b"x")
    with pytest.raises(BlockingIOError):
        sock.sendmsg([memoryview(b"abc")])
    assert sock.waits_for_read
    with pytest.raises(BlockingIOError):
        sock.recvmsg_into([memoryview(bytearray(1))])
    assert not sock.waits_for_read
    assert sock.recvmsg_into([memoryview(bytearray(1))]) == (1,) and not sock.waits_for_read


def test_another_secret_is_named_and_other_failures_stay_what_they_are() -> None:
    sock, _ = encrypted(ssl.SSLCertVerificationError(1, "self-signed"), ConnectionResetError())
    with pytest.raises(ConnectionRefusedError, match="same secret"):
        sock.sendmsg([memoryview(b"abc")])
    with pytest.raises(ConnectionResetError):
        sock.recvmsg_into([memoryview(bytearray(1))])


@pytest.mark.parametrize(("chunks", "left", "got"), [
    ([b"ab"], 0, (b"ab", b"\0\0\0")), ([b"ab", b"c", b"de"], 1, (b"ab", b"cde")), ([b"ab", b"cd"], 1, (b"ab", b"cd\0")),
    ([b"a", b"b", b"c"], 1, (b"ab", b"c\0\0")), ([b""], 0, (b"\0\0", b"\0\0\0")), ([b"ab", b""], 1, (b"ab", b"\0\0\0")),
])  # fmt: skip
def test_places_are_filled_one_after_the_other_while_something_is_decrypted(
    chunks: list[bytes], left: int, got: tuple[bytes, bytes]
) -> None:
    sock, below = encrypted(*chunks)
    taking, below.left = below.recv_into, left

    def take(view: memoryview) -> int:
        count = taking(view)
        below.left = left if below.outcomes else 0
        return count

    below.recv_into = take  # type: ignore[method-assign]
    places = [bytearray(2), bytearray(3)]
    total = sum(len(chunk) for chunk in chunks)
    assert sock.recvmsg_into([memoryview(place) for place in places]) == (total,)
    assert tuple(map(bytes, places)) == got and sock.has_pending is (below.left > 0)


def test_what_a_frame_does_not_say_is_0() -> None:
    header = Seal(b"key").seal(Frame(Kind.ACK, 7))
    assert header[:40] == bytes([5, 0, 0, 0, 0, 0, 0, 0]) + (7).to_bytes(8, "little") + bytes(24)


# Codecs


@law(weight=0.2)
def test_the_tokens_that_a_codec_takes_are_those_that_their_blocks_and_layers_have(seed: int) -> None:
    """Where one of the numbers is beyond its bound, that is refused by its name; neighbours are one segment."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 5)
    layers = [allocate_cpu(num_blocks, 2, 16, 32, torch.bfloat16) for _ in range(3)]
    codec = KVCodec(layers, FORMAT, WireEncoding.RAW)
    table = [rng.randint(-1, num_blocks) if rng.random() < 0.3 else rng.randrange(num_blocks)
             for _ in range(rng.randint(1, 5))]  # fmt: skip
    start, tokens = rng.choice([0, 16, 32, 8, -16]), rng.randint(-1, 16 * len(table) + 1)
    first = rng.randint(-1, 3)
    span = range(first, rng.randint(first, 4))
    used = table[start // 16 : -(-(start + tokens) // 16)] if start >= 0 else []
    wrong = (
        "start" if start < 0 or start % 16 or tokens < 0
        else "block_ids" if len(table) * 16 < start + tokens or any(not 0 <= block < num_blocks for block in used)
        else "layers" if not 0 <= span.start <= span.stop <= 3
        else None
    )  # fmt: skip
    try:
        segments = codec.segments(table, start, tokens, span)
    except ConfigError as error:
        assert error.param == wrong
        return
    assert wrong is None
    runs = sum(at == 0 or block != used[at - 1] + 1 for at, block in enumerate(used))
    assert len(segments) == 2 * len(span) * runs
    assert sum(map(len, segments)) == codec.num_bytes(tokens, len(span)) == 2 * len(span) * len(used) * 2048


@law(weight=0.1)
def test_parts_cover_each_layer_of_each_token_once_within_the_frame(seed: int) -> None:
    rng = random.Random(seed)
    frame_bytes = rng.choice([1, 2048, 4095, 4096, 4097, 12_288, 30_000, 1 << 19])
    encoding = rng.choice([WireEncoding.RAW, WireEncoding.INT8])
    layers = [allocate_cpu(1, 2, 16, 32, torch.bfloat16) for _ in range(3)]
    body = CodecBody(KVCodec(layers, FORMAT, encoding), frame_bytes)
    start, tokens = 16 * rng.randrange(4), rng.randint(1, 200)
    seen: set[tuple[int, int]] = set()
    parts = list(body.parts(start, tokens))
    for part in parts:
        cells = {(layer, token) for layer in range(part.first_layer, part.first_layer + part.num_layers)
                 for token in range(part.start, part.start + part.num_tokens)}  # fmt: skip
        assert cells and not cells & seen
        seen |= cells
        assert body.num_bytes(part) == body._codec.num_bytes(part.num_tokens, part.num_layers)
        assert body.accepts(part, body.num_bytes(part)) and not body.accepts(part, body.num_bytes(part) + 1)
        one_piece = part.num_tokens <= 16 and part.num_layers == 1
        assert body.num_bytes(part) <= frame_bytes or one_piece
        with pytest.raises(ProtocolError, match="no multiple of 16"):
            body.accepts(replace(part, start=part.start + 1), 0)
    assert seen == {(layer, token) for layer in range(3) for token in range(start, start + tokens)}
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    if len(parts) > 1:  # a frame is filled: another layer, or another piece of a single layer, would not fit
        more = parts[0].num_layers + 1 if parts[0].num_layers > 1 or parts[0].num_tokens == tokens else 0
        step = body._codec.num_bytes(tokens, more) if more else body._codec.num_bytes(parts[0].num_tokens + 16, 1)
        assert step > frame_bytes


def test_encodings_on_the_wire_are_numbered_from_1_and_blocks_as_they_lie_need_one_format() -> None:
    layers = [allocate_cpu(1, 2, 16, 32, torch.bfloat16) for _ in range(3)]
    bodies = CodecBodies(layers, FORMAT, "none", 4096)
    other = replace(FORMAT, block_size=32)
    for encoding in (-1, 0, 6, 16):
        with pytest.raises(ProtocolError, match=f"unknown encoding {encoding}"):
            bodies.for_receiving(encoding, FORMAT)
    for encoding in range(1, 6):
        if encoding == 5:
            with pytest.raises(ProtocolError, match="another format"):
                bodies.for_receiving(encoding, other)
        else:
            assert bodies.for_receiving(encoding, other) is bodies.for_receiving(encoding, FORMAT)
        assert bodies.for_receiving(encoding, FORMAT).encoding == encoding
    assert bodies.for_sending(FORMAT, 1, None).encoding == 5
    assert bodies.for_sending(other, 1, None).encoding == 1
    assert bodies.for_sending(other, 1, None) is bodies.for_sending(other, 99, 1e9)  # made once


@pytest.mark.parametrize("block_size", [15, 16, 17, 32])
@pytest.mark.parametrize("head_dim", [31, 32, 33, 34])
def test_tiles_need_blocks_of_16_tokens_and_an_even_number_of_channels(block_size: int, head_dim: int) -> None:
    form = replace(FORMAT, block_size=block_size, head_dim=head_dim)
    wrong = "block_size" if block_size % 16 else "head_dim" if head_dim % 2 else None
    try:
        check_tiles(form)
    except ConfigError as error:
        assert error.param == wrong
    else:
        assert wrong is None


@pytest.mark.parametrize("head_dim", [2, 30, 32, 34, 64, 66])
def test_a_tile_is_its_codes_and_a_scale_for_each_channel_of_k_and_each_32_of_v(head_dim: int) -> None:
    groups = -(-head_dim // 32)
    expected = {
        WireEncoding.FP32: (64 * head_dim, 64 * head_dim),
        WireEncoding.BF16: (32 * head_dim, 32 * head_dim),
        WireEncoding.INT8: (18 * head_dim, 16 * head_dim + 32 * groups),
        WireEncoding.INT4: (10 * head_dim, 8 * head_dim + 32 * groups),
    }
    for encoding, sizes in expected.items():
        assert (tile_bytes(head_dim, True, encoding), tile_bytes(head_dim, False, encoding)) == sizes
        form = replace(FORMAT, head_dim=head_dim)
        for tokens in (0, 1, 16, 17):
            assert wire_bytes(form, encoding, tokens, 2) == 2 * 2 * -(-tokens // 16) * sum(sizes)
            assert wire_bytes(form, encoding, tokens) == 3 * 2 * -(-tokens // 16) * sum(sizes)
    assert (WireEncoding.INT8.top, WireEncoding.INT4.top) == (127, 7)


@law(weight=0.1)
def test_a_coarser_codec_is_taken_where_it_saves_a_tenth_of_the_time_of_the_one_before(seed: int) -> None:
    rng = random.Random(seed)
    link, encode, decode = (10 ** rng.uniform(7, 11) for _ in range(3))
    kv_bytes = rng.choice([0, 1000, 1 << 20, 10**9])
    allowed = rng.sample(CODECS, rng.randint(1, 3))
    times = {
        codec: transfer_seconds(link, kv_bytes, wire_share(codec), () if codec == "none" else (encode, decode))
        for codec in CODECS
    }
    chosen = ""
    for codec in CODECS:
        if codec in allowed and (not chosen or times[codec] < 0.9 * times[chosen]):
            chosen = codec
    assert choose_codec(link, kv_bytes, encode, decode, allowed) == chosen
    with pytest.raises(ConfigError, match="codecs allowed"):
        choose_codec(link, kv_bytes, encode, decode, ())
    for at in range(3):
        rates = [link, encode, decode]
        rates[at] = 0.0
        with pytest.raises(ConfigError, match="above 0"):
            choose_codec(rates[0], kv_bytes, rates[1], rates[2])


def test_what_a_link_takes_overlaps_by_pieces_of_one_mib() -> None:
    mib = 1 << 20
    for pieces in (0, 0.5, 1, 2, 8):
        size = int(pieces * mib)
        link, encode, decode = size * 0.5 / 1e9, size / 2e9, size / 4e9
        expected = max(link, encode) + (min(link, encode) + decode) * min(1.0, 1 / pieces if pieces else 1.0)
        assert transfer_seconds(1e9, size, 0.5, (2e9, 4e9)) == pytest.approx(expected)


# What is opened is closed


@pytest.mark.parametrize("encrypts", [False, True])
@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "unix"])
def test_a_connector_that_is_closed_leaves_nothing_open(listen: str, encrypts: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    before = descriptors()
    for closed_first in (0, 1):
        places = [f"unix://{tmp_path}/kv{at}" if listen == "unix" else listen for at in range(2)]
        options = [TransferOptions(SECRET, place, encrypts=encrypts) for place in places]
        sides = [StreamConnector(EmptyBody(3), FORMAT, option) for option in options]
        sides[1].expect("x", (), 16, 0)
        sides[0].open("x", sides[1].address, 16)
        sides[0].commit("x", b"first")
        events: list[ConnectorEvent] = []
        while not any(isinstance(event, Committed) for event in events):
            assert select.select([sides[1]], [], [], 30)[0]
            events += sides[1].poll()
        for at in (closed_first, 1 - closed_first):
            fd = sides[at].fileno()
            for _ in range(2):  # idempotent
                sides[at].close()
            assert sides[at].poll() == [] and sides[at].fileno() == fd
            sides[at].cancel("x")
            sides[at].forget("x")
    assert descriptors() <= before and list(tmp_path.iterdir()) == []


def test_frames_point_into_blocks_until_they_have_left() -> None:
    pieces = [memoryview(bytes([at]) * (at + 1)) for at in range(4)]
    out = OutgoingFrame(list(pieces))
    assert out.fence is None and out.at == 0
    assert not out.advance(3) and out.at == 2 and all(a is b for a, b in zip(out.pieces, pieces, strict=True))
