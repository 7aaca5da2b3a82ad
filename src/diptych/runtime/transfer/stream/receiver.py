"""The receiving side: connections that others have opened, and the transfers that are expected.

Owns which connection of a sender counts, what each transfer has got, and the answers. Runs in the connector's thread;
only ``transfers`` is shared with the worker's, whose single dict operations need no lock. A transfer's mistakes end
that transfer, a connection's end that connection; nobody else notices.
"""

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import ChunkArrived, Committed, Failed
from diptych.runtime.transfer.stream.carriers import Carrier, CarrierChoice, Part
from diptych.runtime.transfer.stream.frames import (
    LAST_OF_CHUNK,
    MAX_MESSAGE_BYTES,
    Frame,
    Kind,
    ProtocolError,
    Seal,
    checksum,
)
from diptych.runtime.transfer.stream.handshake import (
    HELLO_BYTES,
    Identity,
    Introduction,
    accept_hello,
    format_bytes_of,
    greeting,
)
from diptych.runtime.transfer.stream.stream_connection import Connection
from diptych.runtime.transfer.stream.transfer_table import EventQueue, RecvTransfer, Transfer

MAX_STRANGERS = 64  # connections that have not proved anything yet
MAX_REMEMBERED = 4096  # finished transfers, whose acknowledgement may have been lost
TELL_EVERY_NS = 250_000_000  # progress within one send


class Receiver:
    """All incoming connections and all expected transfers of one connector."""

    def __init__(self, identity: Identity, carriers: CarrierChoice, events: EventQueue, resume_timeout_ns: int,
                 drop: Callable[["ReceiverConnection", str], None]) -> None:  # fmt: skip
        self.identity = identity
        self.carriers = carriers
        self.events = events
        self.transfers: dict[str, RecvTransfer] = {}
        self.finished: OrderedDict[tuple[bytes, str], int] = OrderedDict()  # (sender, transfer) -> what is acknowledged
        self._resume_timeout_ns = resume_timeout_ns
        self._drop = drop  # unregisters a connection, calls ``lost`` and closes it
        self._strangers: dict[ReceiverConnection, int] = {}  # since when
        self._connections: dict[bytes, ReceiverConnection] = {}  # by line
        self._dials: OrderedDict[bytes, int] = OrderedDict()  # the last of each line

    def accept(self, sock: socket.socket, now_ns: int) -> "ReceiverConnection":
        """A new connection; the oldest that has not proved anything may have to make room for it."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many connections without proof")
        connection = ReceiverConnection(sock, self)
        self._strangers[connection] = now_ns
        return connection

    def introduced(self, connection: "ReceiverConnection", who: Introduction) -> None:
        """It has proved itself: it takes the place of the same sender's older one. Raises ProtocolError when late."""
        if who.dial <= self._dials.get(who.line, -1):
            raise ProtocolError("a newer connection of this sender is there already")
        self._dials[who.line] = who.dial
        self._dials.move_to_end(who.line)
        _trim(self._dials)
        del self._strangers[connection]
        older = self._connections.get(who.line)
        if older is not None:
            self._drop(older, "replaced by a newer one of the same sender")
        self._connections[who.line] = connection

    def lost(self, connection: "ReceiverConnection") -> None:
        """It is over; its transfers wait for another connection of the same sender."""
        self._strangers.pop(connection, None)
        who = connection.peer
        if who is not None and self._connections.get(who.line) is connection:
            del self._connections[who.line]
        now = time.monotonic_ns()
        for transfer in connection.numbers.values():
            if transfer is not None and transfer.connection is connection:
                transfer.connection, transfer.lost_ns = None, now

    def forgotten(self, transfer: RecvTransfer) -> None:
        """The worker has forgotten a transfer: its sender should know."""
        if transfer.connection is not None and transfer.connection.is_open:
            transfer.connection.refuse(transfer.number, f"the receiver has given transfer {transfer.attempt_id} up")
            transfer.connection = None

    def fail(self, transfer: RecvTransfer, message: str) -> None:
        """The transfer is over on this side."""
        with transfer.lock:
            if transfer.is_closed:
                return
            transfer.is_closed = True
        self.events.emit(transfer, Failed(transfer.attempt_id, False, message))

    def finish(self, transfer: RecvTransfer, sender: bytes, sequence: int) -> None:
        """Remember what was acknowledged: the acknowledgement may be lost."""
        self.finished[sender, transfer.attempt_id] = sequence
        _trim(self.finished)

    def tick(self, now_ns: int) -> bool:
        """Give up what takes too long. Whether anything is waited for."""
        limit = now_ns - self._resume_timeout_ns
        for connection in [stranger for stranger, since in self._strangers.items() if since < limit]:
            self._drop(connection, "no proof in time")
        waiting = [
            transfer
            for transfer in list(self.transfers.values())
            if transfer.lost_ns is not None and not transfer.is_closed
        ]
        for transfer in waiting:
            if transfer.lost_ns is not None and transfer.lost_ns < limit:
                seconds = self._resume_timeout_ns / 1e9
                self.fail(transfer, f"the sender's connection broke and was not resumed within {seconds:g} s")
        return bool(waiting or self._strangers)


class ReceiverConnection(Connection):
    """One sender's connection."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock)
        self.peer: Introduction | None = None
        self.numbers: dict[int, RecvTransfer | None] = {}  # the sender's numbers; None: refused
        self._receiver = receiver
        self._greeted = greeting()
        self._hello = b""
        self._current: tuple[RecvTransfer, Carrier, Part, Sequence[memoryview], bool] | None = None
        self._staging = memoryview(b"")
        self._acks: dict[int, int] = {}
        self.put(self._greeted)
        self.expect(HELLO_BYTES)

    def heard(self, message: bytes) -> None:
        """See Connection: the fixed part of a HELLO, then its format."""
        if not self._hello:
            self._hello = message
            self.expect(format_bytes_of(message))
            return
        answer, who = accept_hello(self._receiver.identity, self._greeted, self._hello + message)
        self._receiver.introduced(self, who)
        self.peer = who
        self.put(answer)
        self.seal_in, self.seal_out = Seal(who.key_to_receiver), Seal(who.key_to_sender)
        self.begin_frames()  # a sender whose format does not fit reads that in the answer, and says so at its side

    def read(self) -> None:
        """See Connection; then acknowledges what has come."""
        super().read()
        if self.is_open:
            for number, sequence in self._acks.items():
                self.put_control(Frame(Kind.ACK, number, sequence))
        self._acks.clear()

    def refuse(self, number: int, message: str) -> None:
        """Tell the sender, once, that this transfer is not taken."""
        body = message.encode()[:MAX_MESSAGE_BYTES]
        self.numbers[number] = None
        self._acks.pop(number, None)
        self.put_control(Frame(Kind.REFUSE, number, body_bytes=len(body)), body)

    def body_for(self, frame: Frame) -> tuple[Sequence[memoryview], Transfer | None]:
        """See Connection."""
        self._current = None
        nowhere = self.discard(frame.body_bytes), None
        transfer = self._transfer_of(frame)
        if transfer is None:
            return nowhere
        if frame.sequence < transfer.next_sequence:
            self._acks[frame.number] = transfer.next_sequence
            return nowhere
        last = bool(frame.flags & LAST_OF_CHUNK)
        part = Part(frame.start, frame.num_tokens, frame.first_layer, frame.num_layers, last)
        assert self.peer is not None
        try:
            transfer.check(part, self._receiver.identity.kv_format.num_layers)
            carrier = self._receiver.carriers.for_receiving(frame.encoding, self.peer.kv_format)
            if not carrier.accepts(part, frame.body_bytes):
                raise ProtocolError(f"a part of {frame.num_tokens} tokens cannot have {frame.body_bytes} bytes")
            views = carrier.targets(transfer.block_ids, part)
        except (ProtocolError, ConfigError) as error:
            self._give_up(transfer, str(error))
            return nowhere
        staged = views is None
        if views is None:
            if len(self._staging) < frame.body_bytes:
                self._staging = memoryview(bytearray(frame.body_bytes))
            views = [self._staging[: frame.body_bytes]]
        self._current = transfer, carrier, part, list(views), staged
        return views, None if staged else transfer

    def data_done(self, frame: Frame) -> None:
        """See Connection."""
        if self._current is None:
            return
        transfer, carrier, part, views, staged = self._current
        self._current = None
        with transfer.lock:
            is_closed = transfer.is_closed
            if not is_closed:
                if checksum(views) != frame.checksum:
                    raise ProtocolError("the checksum of a part is wrong")
                if staged:
                    carrier.unpack(transfer.block_ids, part, views[0])
                is_whole = transfer.took(frame, carrier.num_bytes(part))
        if is_closed:
            self.refuse(frame.number, f"the receiver has given transfer {transfer.attempt_id} up")
            return
        self._acks[frame.number] = transfer.next_sequence
        if is_whole or transfer.last_byte_ns - transfer.told_ns >= TELL_EVERY_NS:
            transfer.told_ns = transfer.last_byte_ns
            self._receiver.events.emit(transfer, ChunkArrived(transfer.attempt_id, transfer.arrived - transfer.start))

    def control_done(self, frame: Frame, body: bytes) -> None:
        """See Connection."""
        if frame.kind is Kind.OPEN:
            self._opened(frame, body)
            return
        if frame.kind not in (Kind.COMMIT, Kind.CANCEL):
            raise ProtocolError(f"a sender does not say {frame.kind.name}")
        transfer = self._transfer_of(frame)
        if transfer is None:
            return
        if frame.kind is Kind.CANCEL:
            self.numbers[frame.number] = None
            self._receiver.fail(transfer, "the sender has cancelled it")
        else:
            self._committed(transfer, frame, body)

    def _opened(self, frame: Frame, body: bytes) -> None:
        assert self.peer is not None
        sender, attempt_id = self.peer.instance, body.decode(errors="replace")
        sequence = self._receiver.finished.get((sender, attempt_id))
        if sequence is not None:
            self.numbers[frame.number] = None
            self._acks[frame.number] = sequence
            return
        transfer = self._receiver.transfers.get(attempt_id)
        if transfer is None or transfer.is_closed:
            self.refuse(frame.number, f"the receiver does not expect transfer {attempt_id}")
        elif (transfer.sender or sender, transfer.number or frame.number) != (sender, frame.number):
            self.refuse(frame.number, f"transfer {attempt_id} has another sender")
        elif transfer.block_ids and transfer.start != frame.start:
            self._give_up(
                transfer, f"the sender begins at token {frame.start}, the receiver at {transfer.start}", frame.number
            )
        else:
            transfer.sender, transfer.number, transfer.connection, transfer.lost_ns = sender, frame.number, self, None
            self.numbers[frame.number] = transfer
            self._acks[frame.number] = transfer.next_sequence

    def _committed(self, transfer: RecvTransfer, frame: Frame, payload: bytes) -> None:
        assert self.peer is not None
        if frame.sequence != transfer.next_sequence:
            raise ProtocolError(f"commit number {frame.sequence} where {transfer.next_sequence} is next")
        missing = transfer.missing(self._receiver.identity.kv_format.num_layers)
        if missing:
            self._give_up(transfer, f"committed, but the KV of {missing} tokens is missing")
            return
        now = time.monotonic_ns()
        with transfer.lock:
            is_closed, transfer.is_closed = transfer.is_closed, True
        if is_closed:
            self.refuse(frame.number, f"the receiver has given transfer {transfer.attempt_id} up")
            return
        self.numbers[frame.number] = None
        self._receiver.finish(transfer, self.peer.instance, frame.sequence + 1)
        self._acks[frame.number] = frame.sequence + 1
        times = transfer.first_byte_ns or now, transfer.last_byte_ns or now
        self._receiver.events.emit(transfer, Committed(transfer.attempt_id, payload, transfer.num_bytes, *times))

    def _transfer_of(self, frame: Frame) -> RecvTransfer | None:
        """The transfer of a frame; None when it is refused. Raises ProtocolError when it was never opened."""
        if frame.number not in self.numbers:
            raise ProtocolError(f"{frame.kind.name} for a transfer that was not opened")
        transfer = self.numbers[frame.number]
        if transfer is not None and transfer.is_closed:
            self.refuse(frame.number, f"the receiver has given transfer {transfer.attempt_id} up")
            return None
        if transfer is not None and frame.kind is Kind.DATA and frame.sequence > transfer.next_sequence:
            raise ProtocolError(f"part {frame.sequence} where {transfer.next_sequence} is next")
        return transfer

    def _give_up(self, transfer: RecvTransfer, message: str, number: int | None = None) -> None:
        self.refuse(transfer.number if number is None else number, message)
        self._receiver.fail(transfer, message)


def _trim(memory: "OrderedDict[bytes, int] | OrderedDict[tuple[bytes, str], int]") -> None:
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
