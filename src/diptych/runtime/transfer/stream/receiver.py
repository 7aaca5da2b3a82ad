"""The receiving side: connections that others have opened, and the transfers that are expected.

Owns which connection of a sender counts, what each transfer has got, and the answers. Runs in the connector's thread;
only ``transfers`` is shared with the worker's, whose single dict operations need no lock. An error in a transfer ends
that transfer, an error in a connection that connection; others continue.
"""

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import Committed
from diptych.runtime.transfer.stream.body_format import BodyFormat, BodyFormats, Part
from diptych.runtime.transfer.stream.event_queue import EventQueue
from diptych.runtime.transfer.stream.fence import Fence
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
from diptych.runtime.transfer.stream.stream_connection import StreamConnection
from diptych.runtime.transfer.stream.transfer_state import RecvTransfer

MAX_UNPROVED = 64  # connections whose handshake is not done
MAX_REMEMBERED = 4096  # finished transfers, whose acknowledgement may have been lost
REPORT_EVERY_NS = 250_000_000  # progress within one send


class StreamReceiver:
    """All incoming connections and all expected transfers of one connector."""

    def __init__(self, identity: Identity, bodies: BodyFormats, events: EventQueue, resume_timeout_ns: int,
                 drop: Callable[["ReceiverConnection", str], None]) -> None:  # fmt: skip
        self.identity = identity
        self.bodies = bodies
        self.events = events
        self.transfers: dict[str, RecvTransfer] = {}
        self.finished: OrderedDict[tuple[bytes, str], int] = OrderedDict()  # (sender, transfer) -> what is acknowledged
        self._resume_timeout_ns = resume_timeout_ns
        self._drop = drop  # unregisters a connection, calls ``lost`` and closes it
        self._unproved: dict[ReceiverConnection, int] = {}  # since when
        self._connections: dict[bytes, ReceiverConnection] = {}  # by line
        self._dials: OrderedDict[bytes, int] = OrderedDict()  # the last of each line

    def accept(self, sock: socket.socket, now_ns: int) -> "ReceiverConnection":
        """A new connection; the oldest whose handshake is not done may have to make room for it."""
        if len(self._unproved) >= MAX_UNPROVED:
            self._drop(next(iter(self._unproved)), "too many connections without proof")
        connection = ReceiverConnection(sock, self)
        self._unproved[connection] = now_ns
        return connection

    def introduced(self, connection: "ReceiverConnection", who: Introduction) -> None:
        """Its handshake is done: it takes the place of the same sender's older one. Raises ProtocolError when it is
        itself the older one."""
        if who.dial <= self._dials.get(who.line, -1):
            raise ProtocolError("a newer connection of this sender is there already")
        self._dials[who.line] = who.dial
        self._dials.move_to_end(who.line)
        _trim(self._dials)
        del self._unproved[connection]
        older = self._connections.get(who.line)
        if older is not None:
            self._drop(older, "replaced by a newer one of the same sender")
        self._connections[who.line] = connection

    def lost(self, connection: "ReceiverConnection") -> None:
        """It is over; its transfers wait for another connection of the same sender."""
        self._unproved.pop(connection, None)
        who = connection.peer
        if who is not None and self._connections.get(who.line) is connection:
            del self._connections[who.line]
        now = time.monotonic_ns()
        for transfer in connection.transfers.values():
            transfer.lost_ns = now

    def forgotten(self, transfer: RecvTransfer) -> "ReceiverConnection | None":
        """The worker has forgotten a transfer: its sender is informed, over the connection that is returned."""
        for connection in self._connections.values():
            if connection.transfers.get(transfer.number) is transfer:
                connection.refuse_closed(transfer.number, transfer)
                return connection
        return None

    def fail(self, transfer: RecvTransfer, message: str) -> None:
        """The transfer is broken on this side, unless it has ended."""
        if transfer.close():
            self.events.emit(transfer, TransferBroken(transfer.attempt_id, False, message))

    def finish(self, transfer: RecvTransfer, sender: bytes, sequence: int) -> None:
        """Remember what was acknowledged: the acknowledgement may be lost."""
        self.finished[sender, transfer.attempt_id] = sequence
        _trim(self.finished)

    def tick(self, now_ns: int) -> bool:
        """Give up what takes too long. Whether anything is waited for."""
        limit, is_waiting = now_ns - self._resume_timeout_ns, False
        for connection in [unproved for unproved, since in self._unproved.items() if since < limit]:
            self._drop(connection, "no proof in time")
        for transfer in list(self.transfers.values()):
            if transfer.lost_ns is None or transfer.is_closed:
                continue
            is_waiting = True
            if transfer.lost_ns < limit:
                seconds = self._resume_timeout_ns / 1e9
                self.fail(transfer, f"the sender's connection broke and was not resumed within {seconds:g} s")
        return is_waiting or bool(self._unproved)


class ReceiverConnection(StreamConnection):
    """One sender's connection."""

    def __init__(self, sock: socket.socket, receiver: StreamReceiver) -> None:
        super().__init__(sock)
        if (encryption := receiver.identity.encryption) is not None:
            self.encrypt(encryption.receiver, is_server=True)
        self.peer: Introduction | None = None
        self.transfers: dict[int, RecvTransfer] = {}  # under way here, by the sender's numbers
        self._highest_number = 0  # that was opened here; lower ones that are not in ``transfers`` have ended
        self._receiver = receiver
        self._greeted = greeting()
        self._hello = b""
        self._current: tuple[RecvTransfer, BodyFormat, Part, Sequence[memoryview], bool] | None = None
        self._begun_ns = 0  # when the body of the current part began to come in
        self._staging = memoryview(b"")
        self._acks: dict[int, int] = {}
        self.put(self._greeted)
        self.expect_item(HELLO_BYTES)

    def item_done(self, item: bytes) -> None:
        """See StreamConnection: the fixed part of a HELLO, then its format."""
        if not self._hello:
            self._hello = item
            self.expect_item(format_bytes_of(item))
            return
        answer, who = accept_hello(self._receiver.identity, self._greeted, self._hello + item)
        self._receiver.introduced(self, who)
        self.peer = who
        self.put(answer)
        self.seal_in, self.seal_out = Seal(who.key_to_receiver), Seal(who.key_to_sender)
        self.begin_frames()  # a sender whose format does not fit finds that in the answer, and reports it on its side

    def read(self) -> None:
        """See StreamConnection; then acknowledges what has come."""
        super().read()
        if self.is_open:
            for number, sequence in self._acks.items():
                self.put_control(Frame(Kind.ACK, number, sequence))
        self._acks.clear()

    def refuse(self, number: int, message: str) -> None:
        """Inform the sender, once, that this transfer is refused."""
        body = message.encode()[:MAX_MESSAGE_BYTES]
        self.transfers.pop(number, None)
        self._acks.pop(number, None)
        self.put_control(Frame(Kind.REFUSE, number, body_bytes=len(body)), body)

    def refuse_closed(self, number: int, transfer: RecvTransfer) -> None:
        """Inform the sender, once, that the worker has ended this transfer."""
        self.refuse(number, f"the receiver has given transfer {transfer.attempt_id} up")

    def body_for(self, frame: Frame) -> tuple[Sequence[memoryview], Fence | None]:
        """See StreamConnection."""
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
            body_format = self._receiver.bodies.for_receiving(frame.encoding, self.peer.kv_format)
            if not body_format.accepts(part, frame.body_bytes):
                raise ProtocolError(f"a part of {frame.num_tokens} tokens cannot have {frame.body_bytes} bytes")
            views = body_format.targets(transfer.block_ids, part)
        except (ProtocolError, ConfigError) as error:
            self._give_up(transfer, frame.number, str(error))
            return nowhere
        staged = views is None
        if views is None:
            if len(self._staging) < frame.body_bytes:
                self._staging = memoryview(bytearray(frame.body_bytes))
            views = [self._staging[: frame.body_bytes]]
        self._current = transfer, body_format, part, list(views), staged
        self._begun_ns = time.monotonic_ns()
        return views, None if staged else transfer.fence

    def data_done(self, frame: Frame) -> None:
        """See StreamConnection."""
        if self._current is None:
            return
        transfer, body_format, part, views, staged = self._current
        self._current = None
        with transfer.fence.lock:
            is_closed = transfer.is_closed
            if not is_closed:
                if checksum(views) != frame.checksum:
                    raise ProtocolError("the checksum of a part is wrong")
                if staged:
                    body_format.unpack(transfer.block_ids, part, views[0])
                is_whole = transfer.count(frame, body_format.num_bytes(part), self._begun_ns)
        if is_closed:
            self.refuse_closed(frame.number, transfer)
            return
        self._acks[frame.number] = transfer.next_sequence
        if is_whole or transfer.last_byte_ns - transfer.reported_ns >= REPORT_EVERY_NS:
            transfer.reported_ns = transfer.last_byte_ns
            self._receiver.events.emit(transfer, ChunkArrived(transfer.attempt_id, transfer.arrived - transfer.start))

    def control_done(self, frame: Frame, body: bytes) -> None:
        """See StreamConnection."""
        if frame.kind is Kind.OPEN:
            self._opened(frame, body)
            return
        if frame.kind not in (Kind.COMMIT, Kind.CANCEL):
            raise ProtocolError(f"a sender does not send {frame.kind.name}")
        transfer = self._transfer_of(frame)
        if transfer is None:
            return
        if frame.kind is Kind.CANCEL:
            del self.transfers[frame.number]
            self._receiver.fail(transfer, "the sender has cancelled it")
        else:
            self._committed(transfer, frame, body)

    def _opened(self, frame: Frame, body: bytes) -> None:
        assert self.peer is not None
        self._highest_number = max(self._highest_number, frame.number)
        sender, attempt_id = self.peer.instance, body.decode(errors="replace")
        sequence = self._receiver.finished.get((sender, attempt_id))
        if sequence is not None:
            self._acks[frame.number] = sequence
            return
        transfer = self._receiver.transfers.get(attempt_id)
        if transfer is None or transfer.is_closed:
            self.refuse(frame.number, f"the receiver does not expect transfer {attempt_id}")
        elif (transfer.sender or sender, transfer.number or frame.number) != (sender, frame.number):
            self.refuse(frame.number, f"transfer {attempt_id} has another sender")
        elif transfer.block_ids and transfer.start != frame.start:
            message = f"the sender begins at token {frame.start}, the receiver at {transfer.start}"
            self._give_up(transfer, frame.number, message)
        else:
            transfer.sender, transfer.number, transfer.lost_ns = sender, frame.number, None
            self.transfers[frame.number] = transfer
            self._acks[frame.number] = transfer.next_sequence

    def _committed(self, transfer: RecvTransfer, frame: Frame, payload: bytes) -> None:
        assert self.peer is not None
        if frame.sequence != transfer.next_sequence:
            raise ProtocolError(f"commit number {frame.sequence} where {transfer.next_sequence} is next")
        missing = transfer.missing(self._receiver.identity.kv_format.num_layers)
        if missing:
            self._give_up(transfer, frame.number, f"committed, but the KV of {missing} tokens is missing")
            return
        now = time.monotonic_ns()
        if not transfer.close():
            self.refuse_closed(frame.number, transfer)
            return
        del self.transfers[frame.number]
        self._receiver.finish(transfer, self.peer.instance, frame.sequence + 1)
        self._acks[frame.number] = frame.sequence + 1
        times = transfer.first_byte_ns or now, transfer.last_byte_ns or now
        committed = Committed(transfer.attempt_id, payload, transfer.num_bytes, *times, transfer.wire_ns)
        self._receiver.events.emit(transfer, committed)

    def _transfer_of(self, frame: Frame) -> RecvTransfer | None:
        """The transfer of a frame; None when it has ended here. Raises ProtocolError when it was never opened."""
        transfer = self.transfers.get(frame.number)
        if transfer is None:
            if frame.number > self._highest_number:
                raise ProtocolError(f"{frame.kind.name} for a transfer that was not opened")
            return None
        if transfer.is_closed:
            self.refuse_closed(frame.number, transfer)
            return None
        if frame.kind is Kind.DATA and frame.sequence > transfer.next_sequence:
            raise ProtocolError(f"part {frame.sequence} where {transfer.next_sequence} is next")
        return transfer

    def _give_up(self, transfer: RecvTransfer, number: int, message: str) -> None:
        self.refuse(number, message)
        self._receiver.fail(transfer, message)


def _trim(memory: "OrderedDict[bytes, int] | OrderedDict[tuple[bytes, str], int]") -> None:
    while len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
