"""The sending side of KV transfers on a clock of the test: what leaves in which order, and when it gives up.

A peer and one connection over a socket pair, whose other end the test speaks for; no thread, and no time passes by
itself.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.control.engine.worker_core import TransferBroken
from diptych.runtime.transfer.connector import Sent
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.addresses import parse_address
from diptych.runtime.transfer.stream.body_format import Part, SequenceTables
from diptych.runtime.transfer.stream.frames import HEADER_BYTES, Frame, Kind, ProtocolError, Seal, parse_header
from diptych.runtime.transfer.stream.handshake import HELLO_BYTES, Identity, accept_hello, greeting
from diptych.runtime.transfer.stream.stream_connector import (
    ConnectionLost,
    EventQueue,
    Peer,
    SenderConnection,
    SendTransfer,
)
from tests.runtime.transfer_parts import FORMAT, MS, SECRET, Clock

TIMEOUT = 1000 * MS
RECEIVER, RESTARTED = b"r" * 16, b"R" * 16


class World:
    """A peer, its connection, and the receiver that the test plays."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.queue = EventQueue()
        self.stack = stack
        stack.callback(self.queue.close)
        self.identity = Identity(SECRET, b"s" * 16, FORMAT)
        self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.path = folder / "kv"
        address = parse_address(f"unix://{self.path}")
        self.peer = Peer(address, self.identity, EmptyBody(3), self.queue, TIMEOUT)
        self.numbers = 0
        self.there: socket.socket
        self.seal_out: Seal
        self.seal_in: Seal

    def listen(self) -> None:
        self.listener.bind(str(self.path))
        self.listener.listen(8)

    def transfer(self, name: str, num_sends: int = 0, *, commits: bool = True) -> SendTransfer:
        """A transfer with ``num_sends`` sends of 16 tokens, all queued."""
        self.numbers += 1
        made = SendTransfer(name, self.numbers, self.peer.address, 0, 3)
        self.peer.transfers[made.number] = made
        for at in range(num_sends):
            made.queue_send(16 * at, 16, SequenceTables.of((), 16 * at), 3)
        if commits:
            made.queue_commit(name.encode())
        self.peer.news(made)
        return made

    def dial(self, now: int) -> SenderConnection:
        connection = self.peer.dial(now)
        assert connection is not None and self.peer.connection is connection
        self.stack.callback(connection.close)
        self.there = self.stack.enter_context(self.listener.accept()[0])
        self.there.settimeout(5)
        return connection

    def connect(self, now: int, instance: bytes = RECEIVER, kv_format: KVFormat = FORMAT) -> SenderConnection:
        """Dial and shake hands, as this instance."""
        connection = self.dial(now)
        assert self.peer.wants_write
        greeted = greeting()
        self.there.sendall(greeted)
        connection.read()
        assert connection.is_introduced
        self.peer.write()
        said = self.there.recv(HELLO_BYTES)
        said += self.there.recv(int.from_bytes(said[-2:], "little"))
        answer, who = accept_hello(Identity(SECRET, instance, kv_format), greeted, said)
        self.seal_out, self.seal_in = Seal(who.key_to_sender), Seal(who.key_to_receiver)
        self.there.sendall(answer)
        connection.read()
        return connection

    def frames(self) -> list[tuple[Kind, int, int]]:
        """Kind, number and sequence of what has left since the last time, in its order."""
        found = []
        self.there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while header := self.there.recv(HEADER_BYTES):
                frame = parse_header(header)
                body = self.there.recv(frame.body_bytes) if frame.body_bytes else b""
                self.seal_in.check(header, body)
                found.append((frame.kind, frame.number, frame.sequence))
        return found

    def say(self, kind: Kind, number: int, sequence: int = 0, body: bytes = b"") -> None:
        """A frame of the receiver."""
        frame = Frame(kind, number, sequence, body_bytes=len(body))
        self.there.sendall(self.seal_out.seal(frame, body) + body)
        assert self.peer.connection is not None
        self.peer.connection.read()

    def ends(self) -> list[tuple[str, str]]:
        """What became of transfers: an empty text, or why they are broken."""
        events = [event for _, event in self.queue.drain()]
        return [(event.attempt_id, event.message if isinstance(event, TransferBroken) else "") for event in events]


@pytest.fixture
def world(tmp_path: Path, clock: Clock) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


def test_openings_and_commits_go_first_and_kv_takes_turns_a_frame_each(world: World, clock: Clock) -> None:
    world.listen()
    world.transfer("long", 3)
    world.transfer("short", 1)
    world.connect(clock.now)
    assert world.peer.wants_write
    world.peer.write()
    assert world.frames() == [(Kind.OPEN, 1, 0), (Kind.OPEN, 2, 0), (Kind.DATA, 1, 0)]
    world.peer.write()
    assert world.frames() == [(Kind.DATA, 2, 0), (Kind.COMMIT, 2, 1)]
    world.peer.write()
    assert world.frames() == [(Kind.DATA, 1, 1)]
    world.peer.write()
    assert world.frames() == [(Kind.DATA, 1, 2), (Kind.COMMIT, 1, 3)]
    assert not world.peer.wants_write
    world.peer.write()
    assert world.frames() == []


def test_a_transfer_ends_with_the_acknowledgement_of_its_commit_and_says_when(world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", 2)
    began = clock.now
    clock.now += 5
    world.connect(clock.now)
    clock.now += 5
    for _ in range(2):
        world.peer.write()
    for sequence in (1, 2):
        world.say(Kind.ACK, made.number, sequence)
        assert world.ends() == [] and made.number in world.peer.transfers
    clock.now += 5
    world.say(Kind.ACK, made.number, 3)
    [(transfer, event)] = world.queue.drain()
    assert transfer is made and event == Sent("x", 0, began + 10, began, began + 15)
    assert made.is_closed and not world.peer.transfers
    world.say(Kind.ACK, made.number, 3)  # of one that has ended
    empty = world.transfer("empty")
    world.peer.write()
    world.say(Kind.ACK, empty.number, 1)
    assert [event.first_byte_ns for _, event in world.queue.drain() if isinstance(event, Sent)] == [empty.commit_ns]


def test_an_acknowledgement_of_what_was_never_sent_ends_the_connection(world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", 1)
    world.connect(clock.now)
    world.peer.write()
    with pytest.raises(ProtocolError, match="3 is acknowledged, 2 were sent"):
        world.say(Kind.ACK, made.number, 3)


@pytest.mark.parametrize("kind", [Kind.OPEN, Kind.COMMIT, Kind.CANCEL, Kind.DATA])
def test_a_receiver_does_not_say_what_senders_say(kind: Kind, world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", 1)
    world.connect(clock.now)
    with pytest.raises(ProtocolError, match=r"does not send|sends no KV"):
        world.say(kind, made.number)


def test_a_refused_transfer_is_broken_with_the_words_of_the_receiver(world: World, clock: Clock) -> None:
    world.listen()
    made, other = world.transfer("x", 1), world.transfer("y", 1)
    world.connect(clock.now)
    world.say(Kind.REFUSE, 99, body=b"of nobody")
    world.say(Kind.REFUSE, made.number, body=b"no \xff room")
    assert world.ends() == [("x", "no � room")] and made.is_closed and not other.is_closed
    world.say(Kind.REFUSE, made.number, body=b"again")
    assert world.ends() == [] and list(world.peer.transfers) == [other.number]


def test_a_cancelled_transfer_is_taken_back_where_it_was_announced(world: World, clock: Clock) -> None:
    world.listen()
    known, unknown = world.transfer("known", 1), world.transfer("unknown", 1, commits=False)
    world.connect(clock.now)
    unknown.close()
    world.peer.cancelled(unknown)
    world.peer.write()
    assert {number for _, number, _ in world.frames()} == {known.number}
    known.close()
    for _ in range(2):  # the second time, nobody knows it
        world.peer.cancelled(known)
    world.peer.write()
    assert world.frames() == [(Kind.CANCEL, known.number, 0)] and not world.peer.transfers


def test_what_was_sent_before_a_loss_is_asked_for_and_the_rest_follows(world: World, clock: Clock) -> None:
    world.listen()
    made, fresh = world.transfer("x", 3), world.transfer("fresh", 1, commits=False)
    world.connect(clock.now)
    world.peer.write()
    world.peer.write()
    world.peer.write()
    assert (Kind.DATA, made.number, 1) in world.frames()
    fresh.close()
    world.peer.cancelled(fresh)
    world.say(Kind.ACK, made.number, 1)
    assert made.in_flight is not None
    world.peer.lost("cut")
    assert made.in_flight is None  # no frame points into blocks any more
    assert world.peer.connection is None and not world.peer.wants_write
    world.peer.write()  # without a connection it does nothing
    clock.now += 10 * MS
    late = world.transfer("late", 1)
    world.connect(clock.now)
    for _ in range(3):
        world.peer.write()
    # the opening of x asks how much is there; nothing of it leaves before the answer
    assert world.frames() == [(Kind.OPEN, 1, 0), (Kind.OPEN, 3, 0), (Kind.DATA, 3, 0), (Kind.COMMIT, 3, 1)]
    world.peer.news(made)
    world.peer.write()
    assert world.frames() == []
    world.say(Kind.ACK, made.number, 2)
    world.peer.write()
    assert world.frames() == [(Kind.DATA, 1, 2), (Kind.COMMIT, 1, 3)]
    world.say(Kind.ACK, made.number, 4)
    world.say(Kind.ACK, late.number, 2)
    assert world.ends() == [("x", ""), ("late", "")]


def test_a_receiver_that_was_restarted_has_nothing_of_what_it_was_sent(world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", 2)
    world.connect(clock.now)
    world.peer.write()
    world.peer.lost("cut")
    unsent = world.transfer("unsent", 1)
    clock.now += 10 * MS
    world.connect(clock.now, RESTARTED)
    assert world.ends() == [("x", "the receiver was restarted")] and made.is_closed
    world.peer.write()
    assert world.frames()[0] == (Kind.OPEN, unsent.number, 0)


def test_caches_that_do_not_fit_end_all_transfers(world: World, clock: Clock) -> None:
    world.listen()
    world.transfer("x", 1)
    world.transfer("y", 1)
    with pytest.raises(ProtocolError, match="num_layers is 3 here and 4 there"):
        world.connect(clock.now, kv_format=KVFormat("m", 4, 2, 32, "bfloat16", 16, "cpu"))
    assert [name for name, why in world.ends() if "do not fit" in why] == ["x", "y"] and not world.peer.transfers


def test_a_receiver_that_is_not_there_is_dialled_less_and_less_often_and_at_last_given_up(
    world: World, clock: Clock
) -> None:
    assert world.peer.dial(clock.now) is None and world.peer.tick(clock.now) is None  # nothing to send
    world.transfer("x", 1)
    began, waits = clock.now, []
    for _ in range(6):
        assert world.peer.dial(clock.now) is None and world.peer.connection is None
        due = world.peer.tick(clock.now)
        assert due is not None
        waits.append((due - clock.now) // MS)
        assert world.peer.dial(due - 1) is None and world.peer.tick(due - 1) == due  # not before it is due
        clock.now = due
    assert waits == [10, 20, 40, 80, 160, 320] and world.ends() == []
    world.peer.tick(began + TIMEOUT)
    assert world.ends() == []
    world.peer.tick(began + TIMEOUT + 1)
    [(name, why)] = world.ends()
    assert name == "x" and "no working connection" in why and "for 1 s" in why and "ENOENT" in why
    world.transfer("y", 1)
    for _ in range(3):
        world.peer.lost("still nobody")
    assert world.peer.tick(clock.now) == clock.now + 1000 * MS  # a second is the longest wait


def test_a_transfer_has_the_whole_time_from_its_opening(world: World, clock: Clock) -> None:
    old = world.transfer("old", 1)
    world.peer.dial(clock.now)
    began = clock.now
    clock.now += TIMEOUT // 2
    young = world.transfer("young", 1)
    world.peer.tick(began + TIMEOUT)
    assert world.ends() == []
    world.peer.tick(began + TIMEOUT + 1)
    assert [name for name, _ in world.ends()] == ["old"] and old.is_closed
    world.peer.tick(young.opened_ns + TIMEOUT)
    assert world.ends() == []
    world.peer.tick(young.opened_ns + TIMEOUT + 1)
    assert [name for name, _ in world.ends()] == ["young"]


def test_a_handshake_without_an_answer_is_given_up_after_half_of_the_time(world: World, clock: Clock) -> None:
    world.listen()
    world.transfer("x", 1)
    world.dial(clock.now)
    assert world.peer.dial(clock.now) is None  # one connection at a time
    assert world.peer.tick(clock.now + TIMEOUT // 2) == clock.now + TIMEOUT // 2 + TIMEOUT // 16
    with pytest.raises(ConnectionLost, match="no answer to the handshake"):
        world.peer.tick(clock.now + TIMEOUT // 2 + 1)


def test_a_loss_during_the_handshake_asks_for_the_secret(world: World, clock: Clock) -> None:
    world.listen()
    world.transfer("x", 1)
    connection = world.dial(clock.now)
    world.there.sendall(greeting())
    connection.read()
    world.peer.lost("closed")
    world.peer.tick(clock.now + TIMEOUT + 1)
    assert [why.endswith("has it the same secret?)") for _, why in world.ends()] == [True]
    assert not connection.is_open


def test_a_connection_on_which_nothing_moves_is_lost_after_half_of_the_time(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [50]
    monkeypatch.setattr(SenderConnection, "num_unsent", property(lambda connection: held[0]))
    world.listen()
    world.transfer("x", 1)
    connection = world.connect(clock.now)
    for _ in range(3):
        world.peer.write()
    assert world.peer.tick(clock.now) == clock.now + TIMEOUT // 16
    held[0] = 40  # ten bytes more: something moves
    clock.now += TIMEOUT // 2
    assert world.peer.tick(clock.now) == clock.now + TIMEOUT // 16
    assert world.peer.tick(clock.now + TIMEOUT // 2) is not None
    with pytest.raises(ConnectionLost, match="nothing moves"):
        world.peer.tick(clock.now + TIMEOUT // 2 + 1)
    world.peer.lost("nothing moves")
    assert not connection.is_open
    world.peer.tick(clock.now + TIMEOUT)  # it counts as broken since something moved
    assert world.ends() == []
    world.peer.tick(clock.now + TIMEOUT + 1)
    assert [name for name, _ in world.ends()] == ["x"]


def test_an_idle_connection_has_nothing_to_wait_for(world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", commits=False)
    world.connect(clock.now)
    world.peer.write()
    for passed in (1, TIMEOUT, 10 * TIMEOUT):
        assert world.peer.tick(clock.now + passed) is None
    clock.now += 10 * TIMEOUT
    made.queue_send(0, 16, SequenceTables.of((), 0), 3)
    world.peer.news(made)
    world.peer.write()
    assert world.peer.tick(clock.now) is not None  # the time begins when there is something to wait for
    assert world.peer.tick(clock.now + TIMEOUT // 2) is not None


def test_connections_that_break_before_anything_is_through_are_given_up(world: World, clock: Clock) -> None:
    world.listen()
    world.transfer("x", 2)
    began, dials = clock.now, 0
    while not (ended := world.ends()) and dials < 50:
        world.connect(clock.now)
        world.peer.write()
        world.peer.lost("cut")
        dials += 1
        due = world.peer.tick(clock.now)
        clock.now = due or clock.now
    [(name, why)] = ended
    assert name == "x" and "break before anything is through: cut" in why
    assert clock.now - began > TIMEOUT and dials == 8  # after 10, 20, 40, ... 640 ms


def test_progress_begins_the_waits_and_the_patience_anew(world: World, clock: Clock) -> None:
    world.listen()
    made = world.transfer("x", 60)
    for turn in range(40):
        began = clock.now
        world.connect(clock.now)
        world.peer.write()
        if turn:
            world.say(Kind.ACK, made.number, turn)
        world.peer.write()
        world.say(Kind.ACK, made.number, turn + 1)
        world.peer.lost("cut")
        assert world.peer.tick(clock.now) == began + 10 * MS
        clock.now = began + 50 * MS
    assert world.ends() == []


def test_no_descriptor_for_a_socket_is_a_reason_to_try_later(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    world.transfer("x", 1)
    with monkeypatch.context() as patch:
        patch.setattr("socket.socket", fail)
        assert world.peer.dial(clock.now) is None
    assert world.peer.tick(clock.now) == clock.now + 10 * MS
    world.listen()
    clock.now += 10 * MS
    world.connect(clock.now)
    assert world.ends() == []


class Measured:
    """A TCP socket of which the kernel says this much."""

    def __init__(self, info: bytes, family: int = socket.AF_INET) -> None:
        self.info, self.family = info, family

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:size]


def tcp_info(rate: int, flags: int = 0, size: int = 232) -> bytes:
    """struct tcp_info as Linux writes it: the flags of tcpi_delivery_rate in byte 7, the rate at byte 160."""
    made = bytearray(232)
    made[7] = flags
    struct.pack_into("<Q", made, 160, rate)
    return bytes(made[:size])


@pytest.mark.parametrize(
    ("info", "num_written", "family", "expected"),
    [
        (tcp_info(125_000_000), 1 << 20, socket.AF_INET, 125_000_000.0),
        (tcp_info(125_000_000), 1 << 20, socket.AF_INET6, 125_000_000.0),
        (tcp_info(125_000_000, 2), 1 << 20, socket.AF_INET, 125_000_000.0),
        (tcp_info(125_000_000, 0, 168), 1 << 20, socket.AF_INET, 125_000_000.0),
        (tcp_info(125_000_000, 0, 167), 1 << 20, socket.AF_INET, None),  # an old kernel
        (tcp_info(125_000_000, 1), 1 << 20, socket.AF_INET, None),  # the pipe was not full
        (tcp_info(0), 1 << 20, socket.AF_INET, None),
        (tcp_info(125_000_000), (1 << 20) - 1, socket.AF_INET, None),
        (tcp_info(125_000_000), 1 << 20, socket.AF_UNIX, None),
    ],
)
def test_the_speed_of_a_link_is_the_kernels_where_it_has_one_from_a_full_pipe(
    info: bytes, num_written: int, family: int, expected: float | None, world: World
) -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = SenderConnection(here, world.identity, world.peer, 1)
        connection.sock, connection.num_written = Measured(info, family), num_written  # type: ignore[assignment]
        assert connection.link_bytes_per_s() == expected


def test_a_speed_that_was_known_stays_known(world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds: Iterator[float | None] = iter([None, 5.0, None, 7.0, None])
    asked = []
    body = EmptyBody(3)

    class Bodies:
        def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> EmptyBody:
            asked.append((num_tokens, link_bytes_per_s))
            return body

    monkeypatch.setattr(SenderConnection, "link_bytes_per_s", lambda connection: next(speeds))
    world.peer = Peer(world.peer.address, world.identity, Bodies(), world.queue, TIMEOUT)  # type: ignore[arg-type]
    world.listen()
    world.transfer("x", 5)
    world.connect(clock.now)
    assert asked.pop() == (1, None)
    for _ in range(5):
        world.peer.write()
    assert asked == [(16, None), (16, 5.0), (16, 5.0), (16, 7.0), (16, 7.0)]


def test_what_the_kernel_still_holds_is_not_yet_sent() -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = SenderConnection(here, Identity(SECRET, b"s" * 16, FORMAT), None, 1)  # type: ignore[arg-type]
        assert connection.num_unsent == 0 and not connection.wants_write
        connection.put(b"x" * 100)
        assert connection.wants_write and connection.num_written == 0
        connection.write()
        assert connection.num_unsent > 0 and connection.num_written == 100 and not connection.wants_write
        assert there.recv(200) == b"x" * 100
        assert connection.num_unsent == 0
        there.close()
        with pytest.raises(ConnectionLost, match="closed the connection"):
            connection.read()
        connection.put(b"y")
        with pytest.raises(ConnectionLost):
            connection.write()


def test_a_connection_that_failed_is_lost_with_its_reason(world: World) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = free.getsockname()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.connect_ex(target)
        connection = SenderConnection(sock, world.identity, world.peer, 1)
        with pytest.raises(ConnectionLost, match="ECONNREFUSED"):
            for _ in range(1000):
                connection.connected()
        assert not connection.is_connected


def test_parts_say_whether_they_complete_their_send() -> None:
    assert list(EmptyBody(3).parts(16, 32)) == [Part(16, 32, 0, 3, True)]
