"""What a receiver of KV takes for one transfer: what its own sender, on its newest connection, opened under one number.

The receiver's half alone, over socket pairs: frames with a right seal from senders that mix numbers up.
"""

import contextlib
import socket
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.runtime.transfer.connector import Committed
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.body_format import Part, SequenceTables
from diptych.runtime.transfer.stream.frames import (
    HEADER_BYTES,
    LAST_OF_CHUNK,
    Frame,
    Kind,
    ProtocolError,
    Seal,
    parse_header,
)
from diptych.runtime.transfer.stream.handshake import (
    GREETING_BYTES,
    WELCOME_BYTES,
    Identity,
    Introduction,
    accept_welcome,
    hello,
)
from diptych.runtime.transfer.stream.stream_connector import (
    EventQueue,
    ReceiverConnection,
    RecvTransfer,
    StreamReceiver,
)

SECRET = b"0123456789abcdef" * 2
FORMAT = KVFormat("m", 3, 2, 32, "bfloat16", 16, "cpu")
RESUME_NS = 10**10
A, B = b"a" * 16, b"b" * 16


class Receiver(StreamReceiver):
    """One whose connections that are dropped are noted."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        identity = Identity(SECRET, b"r" * 16, FORMAT)
        super().__init__(identity, EmptyBody(FORMAT.num_layers), self.queue, RESUME_NS, self.drop)
        self.dropped: list[ReceiverConnection] = []
        self.stack = contextlib.ExitStack()

    def drop(self, connection: ReceiverConnection, why: str) -> None:
        self.dropped.append(connection)
        self.lost(connection)

    def ends(self) -> list[tuple[str, str]]:
        """What became of transfers since the last time."""
        found = [event for _, event in self.queue.drain() if isinstance(event, Committed | TransferBroken)]
        return [(event.attempt_id, "done" if isinstance(event, Committed) else "broken") for event in found]


class Sender:
    """One connection of a sender, which dials with this number and says what it likes."""

    def __init__(self, receiver: Receiver, instance: bytes, dial: int, line: str = "unix:///kv") -> None:
        self.sock, there = socket.socketpair()
        self.sock.setblocking(False)
        receiver.stack.enter_context(self.sock)
        self.connection = receiver.accept(there, 0)
        receiver.stack.callback(self.connection.close)
        self.connection.write()
        me = Identity(SECRET, instance, FORMAT)
        greeted = self.sock.recv(GREETING_BYTES)
        said = hello(me, greeted, line, dial)
        self.sock.sendall(said)
        self.connection.read()
        self.connection.write()
        start = self.sock.recv(WELCOME_BYTES)
        welcome = start + self.sock.recv(int.from_bytes(start[-2:], "little"))
        self.seal = Seal(accept_welcome(me, greeted, said, welcome).key_to_receiver)

    def say(self, kind: Kind, number: int, sequence: int = 0, body: bytes = b"", start: int = 0) -> list[Frame]:
        """Send a frame: the answers."""
        frame = Frame(kind, number, sequence, start=start, body_bytes=len(body))
        self.sock.sendall(self.seal.seal(frame, body) + body)
        return self.answers()

    def answers(self) -> list[Frame]:
        """What the receiver says to all that was sent."""
        self.connection.read()
        self.connection.write()
        answers = []
        with contextlib.suppress(BlockingIOError):
            while header := self.sock.recv(HEADER_BYTES):
                answers.append(parse_header(header))
                self.sock.recv(answers[-1].body_bytes)
        return answers


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    with made.stack, contextlib.closing(made.queue):
        yield made


@pytest.mark.parametrize("dials", [(1, 1), (2, 1), (0, 0), (7, 7), (5, 3)])
def test_a_number_that_was_dialled_before_is_refused_and_the_newer_connection_stays(
    dials: tuple[int, int], receiver: Receiver
) -> None:
    newest = Sender(receiver, A, dials[0])
    with pytest.raises(ProtocolError, match="newer connection"):
        Sender(receiver, A, dials[1])
    assert newest.connection not in receiver.dropped
    Sender(receiver, A, dials[0] + 1)
    assert newest.connection in receiver.dropped


def test_dials_count_for_each_line_of_each_sender(receiver: Receiver) -> None:
    for instance, line in ((A, "unix:///1"), (A, "unix:///2"), (B, "unix:///1"), (B, "unix:///2")):
        Sender(receiver, instance, 3, line)
    assert not receiver.dropped


@pytest.mark.parametrize("other", ["sender", "number", "both"])
def test_a_transfer_belongs_to_the_sender_and_the_number_that_have_opened_it(other: str, receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of((), 100), 100, 0)
    owner = Sender(receiver, A, 1)
    second = Sender(receiver, B, 1)
    assert [answer.kind for answer in owner.say(Kind.OPEN, 5, body=b"x", start=100)] == [Kind.ACK]
    thief = owner if other == "number" else second
    number = 5 if other == "sender" else 6
    assert [answer.kind for answer in thief.say(Kind.OPEN, number, body=b"x", start=100)] == [Kind.REFUSE]
    assert thief.say(Kind.CANCEL, number) == [] or other != "number"
    assert receiver.ends() == []  # and what the other says of it changes nothing
    assert [answer.kind for answer in owner.say(Kind.COMMIT, 5)] == [Kind.ACK]
    assert receiver.ends() == [("x", "done")]


def test_a_resumed_transfer_keeps_its_number_and_what_it_has_got(receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of((), 100), 100, 0)
    first = Sender(receiver, A, 1)
    second = Sender(receiver, A, 2)
    first.say(Kind.OPEN, 5, body=b"x", start=100)
    receiver.lost(first.connection)
    assert receiver.tick(receiver.transfers["x"].lost_ns or 0)  # something is waited for
    [refused] = second.say(Kind.OPEN, 6, body=b"x", start=100)
    assert refused.kind is Kind.REFUSE
    [acknowledged] = second.say(Kind.OPEN, 5, body=b"x", start=100)
    assert (acknowledged.kind, acknowledged.sequence) == (Kind.ACK, 0)
    assert receiver.transfers["x"].lost_ns is None and not receiver.tick(10**20)
    second.say(Kind.COMMIT, 5)
    assert receiver.ends() == [("x", "done")]
    # its acknowledgement may be lost: opening it again finds out that it is over
    [again] = second.say(Kind.OPEN, 5, body=b"x", start=100)
    assert (again.kind, again.sequence) == (Kind.ACK, 1)


def test_a_connection_that_is_not_resumed_in_time_breaks_its_transfers_and_no_others(receiver: Receiver) -> None:
    receiver.transfers |= {name: RecvTransfer(name, SequenceTables.of((), 100), 100, 0) for name in ("x", "y", "z")}
    lost = Sender(receiver, A, 1)
    alive = Sender(receiver, B, 1)
    lost.say(Kind.OPEN, 1, body=b"x", start=100)
    alive.say(Kind.OPEN, 1, body=b"y", start=100)
    receiver.lost(lost.connection)
    since = receiver.transfers["x"].lost_ns
    assert since is not None
    assert receiver.tick(since + RESUME_NS) and receiver.ends() == []
    receiver.tick(since + RESUME_NS + 1)
    assert receiver.ends() == [("x", "broken")]
    assert not receiver.tick(since + RESUME_NS + 2) and receiver.ends() == []


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.COMMIT, Kind.CANCEL])
def test_what_was_not_opened_ends_the_connection_and_what_has_ended_is_let_be(kind: Kind, receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of((), 100), 100, 0)
    sender = Sender(receiver, A, 1)
    sender.say(Kind.OPEN, 5, body=b"x", start=100)
    sender.say(Kind.CANCEL, 5)
    assert receiver.ends() == [("x", "broken")]
    assert sender.say(kind, 5) == [] and sender.say(kind, 4) == []
    with pytest.raises(ProtocolError, match="not opened"):
        sender.say(kind, 6)


def test_a_commit_out_of_turn_ends_the_connection(receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of((), 100), 100, 0)
    sender = Sender(receiver, A, 1)
    sender.say(Kind.OPEN, 5, body=b"x", start=100)
    with pytest.raises(ProtocolError, match="commit number 1 where 0 is next"):
        sender.say(Kind.COMMIT, 5, sequence=1)
    assert receiver.ends() == []


def test_a_sender_does_not_say_what_receivers_say(receiver: Receiver) -> None:
    for dial, kind in enumerate((Kind.ACK, Kind.REFUSE)):
        sender = Sender(receiver, A, dial)
        with pytest.raises(ProtocolError, match=kind.name):
            sender.say(kind, 5)


def test_the_oldest_without_proof_makes_room_and_late_ones_are_dropped(receiver: Receiver) -> None:
    pairs = [socket.socketpair() for _ in range(200)]
    connections = [receiver.accept(there, at) for at, (_, there) in enumerate(pairs)]
    num_dropped = len(receiver.dropped)
    assert 0 < num_dropped < 200 and receiver.dropped == connections[:num_dropped]
    assert receiver.tick(num_dropped + RESUME_NS)
    assert len(receiver.dropped) == num_dropped
    receiver.tick(num_dropped + RESUME_NS + 2)
    assert receiver.dropped == connections[: num_dropped + 2]
    for connection in connections:
        connection.close()
    for here, _ in pairs:
        here.close()


def test_progress_of_a_transfer_is_that_of_its_tokens(receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of((), 100), 100, 0)
    sender = Sender(receiver, A, 1)
    sender.say(Kind.OPEN, 5, body=b"x", start=100)
    sender.say(Kind.COMMIT, 5, body=b"token")
    events = [event for _, event in receiver.queue.drain()]
    assert [event.payload for event in events if isinstance(event, Committed)] == [b"token"]
    assert not [event for event in events if isinstance(event, ChunkArrived)]


class Body(EmptyBody):
    """One whose parts have ``size`` bytes, which are kept in a buffer (staged) or go to ``memory``."""

    def __init__(self, size: int, *, staged: bool) -> None:
        super().__init__(FORMAT.num_layers)
        self.size, self.staged = size, staged
        self.memory = bytearray(size)
        self.unpacked: list[bytes] = []

    def num_bytes(self, part: Part) -> int:
        return 1000

    def accepts(self, part: Part, body_bytes: int) -> bool:
        return body_bytes == self.size

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        return None if self.staged else [memoryview(self.memory)[:1], memoryview(self.memory)[1:]]

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        self.unpacked.append(bytes(body))


def data(sender: Sender, sequence: int, body: bytes, **changes: Any) -> list[Frame]:
    """Send a part of transfer 5, 16 tokens in all layers: the answers."""
    fields = {"start": 16 * sequence, "num_tokens": 16, "num_layers": FORMAT.num_layers, "flags": LAST_OF_CHUNK}
    fields |= {"body_bytes": len(body), "checksum": zlib.crc32(body), "number": 5} | changes
    sender.sock.sendall(sender.seal.seal(Frame(kind=Kind.DATA, sequence=sequence, **fields)) + body)
    return sender.answers()


@pytest.fixture(params=[True, False], ids=["staged", "in place"])
def body(request: pytest.FixtureRequest, receiver: Receiver) -> Body:
    made = Body(3, staged=request.param)
    receiver.bodies = made
    receiver.transfers["x"] = RecvTransfer("x", SequenceTables.of(range(4), 0), 0, 64)
    return made


def opened(receiver: Receiver) -> Sender:
    """A sender that has opened transfer 5."""
    sender = Sender(receiver, A, 1)
    assert [(answer.kind, answer.sequence) for answer in sender.say(Kind.OPEN, 5, body=b"x")] == [(Kind.ACK, 0)]
    return sender


def test_parts_are_written_counted_and_acknowledged_in_their_order(
    receiver: Receiver, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**9]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    sender = opened(receiver)
    for sequence in range(4):
        now[0] += 50
        text = bytes([sequence]) * 3
        assert [(a.kind, a.number, a.sequence) for a in data(sender, sequence, text)] == [(Kind.ACK, 5, sequence + 1)]
        assert body.unpacked[-1:] == [text] if body.staged else bytes(body.memory) == text
        [(_, told)] = receiver.queue.drain()
        assert isinstance(told, ChunkArrived) and told.num_tokens == 16 * (sequence + 1)
    # what was sent again after a broken link is acknowledged and not taken twice
    assert [(a.kind, a.sequence) for a in data(sender, 2, b"???")] == [(Kind.ACK, 4)]
    assert receiver.transfers["x"].next_sequence == 4 and not receiver.queue.drain()
    assert body.unpacked[-1:] == [b"\3\3\3"] if body.staged else bytes(body.memory) == b"\3\3\3"
    assert [(a.kind, a.sequence) for a in sender.say(Kind.COMMIT, 5, 4, b"first")] == [(Kind.ACK, 5)]
    [(_, done)] = receiver.queue.drain()
    assert done == Committed("x", b"first", 4000, 10**9 + 50, 10**9 + 200, 0)


def test_several_parts_that_come_at_once_have_one_acknowledgement(receiver: Receiver, body: Body) -> None:
    sender = opened(receiver)
    for sequence in range(3):
        frame = Frame(Kind.DATA, 5, sequence, 16 * sequence, 16, 0, 3, 0, LAST_OF_CHUNK, 3, zlib.crc32(b"abc"))
        sender.sock.sendall(sender.seal.seal(frame) + b"abc")
    assert [(answer.kind, answer.sequence) for answer in sender.answers()] == [(Kind.ACK, 3)]


def test_a_part_out_of_turn_or_damaged_ends_the_connection_and_is_not_counted(receiver: Receiver, body: Body) -> None:
    sender = opened(receiver)
    with pytest.raises(ProtocolError, match="part 1 where 0 is next"):
        data(sender, 1, b"abc")
    sender = Sender(receiver, A, 2)
    sender.say(Kind.OPEN, 5, body=b"x")
    with pytest.raises(ProtocolError, match="checksum"):
        data(sender, 0, b"abc", checksum=zlib.crc32(b"abd"))
    assert receiver.transfers["x"].next_sequence == 0 and not body.unpacked and not receiver.queue.drain()
    assert not receiver.transfers["x"].is_closed  # it can be sent again on another connection


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"start": 64}, "not what transfer x expects"),
        ({"num_tokens": 65}, "not what transfer x expects"),
        ({"num_layers": 4}, "not what transfer x expects"),
        ({"first_layer": 1}, "not what transfer x expects"),
        ({"encoding": 9}, "encoding 9"),
        ({"body_bytes": 4, "checksum": 0}, "cannot have 4 bytes"),
        ({"body_bytes": 2, "checksum": 0}, "cannot have 2 bytes"),
    ],
)
def test_a_part_that_does_not_fit_ends_its_transfer_alone(
    receiver: Receiver, body: Body, changes: dict[str, int], why: str
) -> None:
    receiver.transfers["y"] = RecvTransfer("y", SequenceTables.of((), 100), 100, 0)
    sender = opened(receiver)
    sender.say(Kind.OPEN, 6, body=b"y", start=100)
    answers = data(sender, 0, b"abcd"[: changes.get("body_bytes", 3)], **changes)
    assert [(answer.kind, answer.number) for answer in answers] == [(Kind.REFUSE, 5)]
    [(_, event)] = receiver.queue.drain()
    assert isinstance(event, TransferBroken) and not event.is_sender and why in event.message
    assert data(sender, 1, b"abc") == []  # on its way meanwhile: it goes nowhere
    assert [answer.kind for answer in sender.say(Kind.COMMIT, 6)] == [Kind.ACK]
    assert receiver.ends() == [("y", "done")] and not body.unpacked and not any(body.memory)


def test_a_transfer_that_the_worker_forgets_is_refused_once_to_its_own_sender(receiver: Receiver, body: Body) -> None:
    other, sender = Sender(receiver, B, 1), opened(receiver)
    receiver.transfers["y"] = RecvTransfer("y", SequenceTables.of((), 100), 100, 0)
    other.say(Kind.OPEN, 5, body=b"y", start=100)  # its own number 5
    transfer = receiver.transfers.pop("x")
    transfer.close()
    assert receiver.forgotten(transfer) is sender.connection
    assert receiver.forgotten(transfer) is None
    sender.connection.write()
    assert [answer.kind for answer in sender.answers()] == [Kind.REFUSE]
    assert data(sender, 0, b"abc") == [] and other.answers() == []
    assert [answer.kind for answer in other.say(Kind.COMMIT, 5)] == [Kind.ACK]
    assert receiver.ends() == [("y", "done")]


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.COMMIT, Kind.CANCEL])
def test_what_comes_for_a_transfer_that_was_just_closed_is_refused(kind: Kind, receiver: Receiver, body: Body) -> None:
    sender = opened(receiver)
    receiver.transfers["x"].close()  # the worker's thread has, and this one does not know it yet
    answers = data(sender, 0, b"abc") if kind is Kind.DATA else sender.say(kind, 5)
    assert [(answer.kind, answer.number) for answer in answers] == [(Kind.REFUSE, 5)]
    assert not receiver.queue.drain() and not body.unpacked and not any(body.memory)
    assert [answer.kind for answer in sender.say(Kind.OPEN, 6, body=b"x")] == [Kind.REFUSE]


def test_what_follows_a_part_without_bytes_is_read_also_when_its_transfer_is_closed_meanwhile(
    receiver: Receiver,
) -> None:
    receiver.transfers |= {
        "x": RecvTransfer("x", SequenceTables.of((), 0), 0, 0),
        "y": RecvTransfer("y", SequenceTables.of((), 100), 100, 0),
    }
    sender = opened(receiver)
    assert [answer.kind for answer in data(sender, 0, b"", encoding=0)] == [Kind.ACK]
    receiver.transfers["x"].close()
    assert [answer.kind for answer in sender.say(Kind.OPEN, 6, body=b"y", start=100)] == [Kind.ACK]
    assert [answer.kind for answer in sender.say(Kind.COMMIT, 6)] == [Kind.ACK]
    assert receiver.ends() == [("y", "done")]


def test_a_commit_waits_for_every_token(receiver: Receiver, body: Body) -> None:
    sender = opened(receiver)
    for sequence in range(3):
        data(sender, sequence, b"abc")
    assert [answer.kind for answer in sender.say(Kind.COMMIT, 5, 3)] == [Kind.REFUSE]
    assert receiver.ends() == [("x", "broken")]


def test_progress_within_one_send_is_told_after_a_quarter_of_a_second(
    receiver: Receiver, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, now, told = opened(receiver), [10**9], []
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    for sequence, passed in enumerate((0, 249_999_999, 1, 249_999_999)):
        now[0] += passed
        data(sender, sequence, b"abc", flags=0)
        told.append(len(receiver.queue.drain()))
    assert told == [1, 0, 1, 0]


def test_where_the_receiver_begins_elsewhere_both_give_up(receiver: Receiver, body: Body) -> None:
    sender = Sender(receiver, A, 1)
    assert [answer.kind for answer in sender.say(Kind.OPEN, 5, body=b"x", start=16)] == [Kind.REFUSE]
    assert receiver.ends() == [("x", "broken")]
    assert [answer.kind for answer in sender.say(Kind.OPEN, 6, body=b"unknown")] == [Kind.REFUSE]


def test_a_refusal_is_cut_to_what_a_frame_may_have(receiver: Receiver) -> None:
    sender = Sender(receiver, A, 1)
    [answer] = sender.say(Kind.OPEN, 5, body=b"\xff" * 1024)  # each byte becomes three
    assert answer.kind is Kind.REFUSE and answer.body_bytes == 2048


def test_4096_finished_transfers_and_lines_are_remembered_the_newest_ones(receiver: Receiver) -> None:
    for number in range(4097):
        receiver.finish(RecvTransfer(f"{number}", SequenceTables.of((), 0), 0, 0), A, 1)
    assert len(receiver.finished) == 4096
    assert (A, "0") not in receiver.finished and {(A, "1"), (A, "4096")} <= receiver.finished.keys()
    connections = []
    for number in range(4097):
        connection = Unsaid()
        receiver._unproved[connection] = 0  # type: ignore[index]
        receiver.introduced(connection, who(number, 3))  # type: ignore[arg-type]
        connections.append(connection)
        if number == 4000:
            again = Unsaid()
            receiver._unproved[again] = 0  # type: ignore[index]
            receiver.introduced(again, who(0, 4))  # type: ignore[arg-type]
            assert receiver.dropped == connections[:1]
    assert not receiver._unproved and len(receiver._dials) == 4096
    for number, dial, is_old in ((0, 4, True), (2, 3, True), (1, 1, False)):  # the line without news is forgotten
        connection = Unsaid()
        receiver._unproved[connection] = 0  # type: ignore[index]
        if is_old:
            with pytest.raises(ProtocolError, match="newer connection"):
                receiver.introduced(connection, who(number, dial))  # type: ignore[arg-type]
        else:
            receiver.introduced(connection, who(number, dial))  # type: ignore[arg-type]


class Unsaid:
    """A connection whose handshake was skipped."""

    peer = None

    def __init__(self) -> None:
        self.transfers: dict[int, RecvTransfer] = {}


def who(line: int, dial: int) -> Introduction:
    return Introduction(A, line.to_bytes(24, "little"), dial, FORMAT, b"", b"")


def test_64_connections_may_be_without_proof(receiver: Receiver) -> None:
    pairs = [socket.socketpair() for _ in range(65)]
    connections = [receiver.accept(there, at) for at, (_, there) in enumerate(pairs)]
    assert receiver.dropped == connections[:1]
    Sender(receiver, A, 1)
    assert receiver.dropped == connections[:2]  # it made room while it had no proof, and needs none now
    assert len(receiver._unproved) == 63
    for connection in connections:
        connection.close()
    for here, _ in pairs:
        here.close()


def test_the_loss_of_an_old_connection_is_none_of_the_new_one(receiver: Receiver, body: Body) -> None:
    first, second = opened(receiver), Sender(receiver, A, 2)
    second.say(Kind.OPEN, 5, body=b"x")
    receiver.lost(first.connection)
    transfer = receiver.transfers["x"]
    transfer.close()
    assert receiver.forgotten(transfer) is second.connection
    receiver.lost(second.connection)
    assert receiver.forgotten(transfer) is None


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_what_is_not_wanted_has_a_place_of_its_size(count: int, receiver: Receiver) -> None:
    sender = Sender(receiver, A, 1)
    assert sum(map(len, sender.connection.discard(count))) == count
