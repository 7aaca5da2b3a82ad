"""What a receiver of KV takes for one transfer: what its own sender, on its newest connection, opened under one number.

The receiver's half alone, over socket pairs: frames with a right seal from senders that mix numbers up.
"""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.runtime.transfer.connector import Committed
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.frames import HEADER_BYTES, Frame, Kind, ProtocolError, Seal, parse_header
from diptych.runtime.transfer.stream.handshake import (
    GREETING_BYTES,
    WELCOME_BYTES,
    Identity,
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
    receiver.transfers["x"] = RecvTransfer("x", (), 100, 0)
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
    receiver.transfers["x"] = RecvTransfer("x", (), 100, 0)
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
    receiver.transfers |= {name: RecvTransfer(name, (), 100, 0) for name in ("x", "y", "z")}
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
    receiver.transfers["x"] = RecvTransfer("x", (), 100, 0)
    sender = Sender(receiver, A, 1)
    sender.say(Kind.OPEN, 5, body=b"x", start=100)
    sender.say(Kind.CANCEL, 5)
    assert receiver.ends() == [("x", "broken")]
    assert sender.say(kind, 5) == [] and sender.say(kind, 4) == []
    with pytest.raises(ProtocolError, match="not opened"):
        sender.say(kind, 6)


def test_a_commit_out_of_turn_ends_the_connection(receiver: Receiver) -> None:
    receiver.transfers["x"] = RecvTransfer("x", (), 100, 0)
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
    receiver.transfers["x"] = RecvTransfer("x", (), 100, 0)
    sender = Sender(receiver, A, 1)
    sender.say(Kind.OPEN, 5, body=b"x", start=100)
    sender.say(Kind.COMMIT, 5, body=b"token")
    events = [event for _, event in receiver.queue.drain()]
    assert [event.payload for event in events if isinstance(event, Committed)] == [b"token"]
    assert not [event for event in events if isinstance(event, ChunkArrived)]
