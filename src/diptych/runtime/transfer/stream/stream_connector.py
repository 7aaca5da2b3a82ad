"""A KVConnector over stream sockets: both ends of each transfer, their connections, and the thread that serves them.

Of two threads, the worker's only touches dictionaries, queues and the fences of single transfers; it notifies the
connector's thread through a queue and an eventfd. That thread owns the sockets. It sleeps in the selector, without a
time limit when nothing is pending. From top to bottom:

    Fence                               around the blocks of one transfer, which two threads hold
    StreamConnection                    one socket: bytes in, bytes out, never waiting
    RecvTransfer, SendTransfer          the two ends of a transfer
    EventQueue                          events on their way to the worker's thread
    SenderConnection, Peer              a receiver that this worker sends to: dialling, resuming, which frame is next
    ReceiverConnection, StreamReceiver  senders that have dialled this worker, and the transfers that are expected
    StreamConnector                     the calls of the worker, and the loop of the connector's thread

An error in a transfer ends that transfer, an error in a connection that connection; others continue. What lies on the
wire is the business of frames.py and handshake.py; how KV becomes bodies of frames that of body_format.py.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import selectors
import socket
import ssl
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError, WorkerError
from diptych.runtime.transfer.connector import (
    MAX_ATTEMPT_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    BlockIds,
    Committed,
    ConnectorEvent,
    GroupTables,
    Sent,
    TransferOptions,
)
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.addresses import SocketAddress, listen, parse_address
from diptych.runtime.transfer.stream.body_format import (
    BodyFormat,
    BodyFormats,
    LayerRun,
    Part,
    SequenceTables,
    layer_runs,
    parts_of_runs,
)
from diptych.runtime.transfer.stream.encrypted_socket import EncryptedSocket, kv_encryption
from diptych.runtime.transfer.stream.frames import (
    HEADER_BYTES,
    LAST_OF_CHUNK,
    MAX_MESSAGE_BYTES,
    Frame,
    Kind,
    ProtocolError,
    Seal,
    checksum,
    make_seals,
)
from diptych.runtime.transfer.stream.handshake import (
    GREETING_BYTES,
    HELLO_BYTES,
    INSTANCE_BYTES,
    WELCOME_BYTES,
    Identity,
    Introduction,
    accept_hello,
    accept_welcome,
    format_bytes_of,
    greeting,
    hello,
)

MAX_PIECES = 1000  # per system call; the kernel takes 1024
READ_BUDGET = 1 << 21  # bytes from one connection before others have their turn
NOT_SENT_LOW_WATER = 1 << 17  # bytes that may wait in the kernel, with a small frame of another transfer behind them
SCRATCH_BYTES = 1 << 16
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # an idle connection to a host that is gone ends after a minute
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
FIRST_BACK_OFF_NS = 10_000_000
LAST_BACK_OFF_NS = 1_000_000_000
MIN_SAMPLE_BYTES = 1 << 20  # written before the kernel's estimate of the link is believed
_DELIVERY_RATE_AT, _APP_LIMITED_AT = 160, 7  # in struct tcp_info of linux/tcp.h
MAX_UNPROVED = 64  # connections whose handshake is not done
MAX_REMEMBERED = 4096  # finished transfers, whose acknowledgement may have been lost
REPORT_EVERY_NS = 250_000_000  # progress within one send
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LISTENER_PAUSE_NS = 200_000_000  # after accepting has failed for lack of resources


class Fence:
    """Keeps the bytes of one transfer's blocks in place once the worker has ended it. Knows nothing of the transfer.

    Two threads hold a transfer: the worker's may end it at any moment, the connector's moves bytes of its blocks. The
    connector's thread holds ``lock`` while it reads or writes the blocks, and does neither once ``is_closed`` is set.
    The flag is set with the lock held: a system call that was moving bytes has then returned, and no other begins.
    """

    __slots__ = ("is_closed", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False


class OutgoingFrame:
    """A frame on its way out: a header and pieces of a body that may lie in a transfer's blocks, behind ``fence``."""

    def __init__(self, pieces: list[memoryview], fence: Fence | None = None) -> None:
        self.pieces = pieces
        self.at = 0  # pieces before this one have left
        self.fence = fence

    def detach(self) -> None:
        """Copy what has not left yet: the frame no longer points into blocks. With the fence's lock held."""
        self.pieces[self.at :] = [memoryview(bytes(piece)) for piece in self.pieces[self.at :]]

    def advance(self, count: int) -> bool:
        """``count`` bytes have left. Whether all have."""
        self.at = skip_bytes(self.pieces, self.at, count)
        return self.at == len(self.pieces)


def skip_bytes(pieces: list[memoryview], at: int, count: int) -> int:
    """Cut ``count`` bytes off the pieces from ``at`` on: where they begin now."""
    while count:
        size = len(pieces[at])
        if size > count:
            pieces[at] = pieces[at][count:]
            return at
        count -= size
        at += 1
    return at


class ConnectionLost(Exception):
    """The connection has ended, from either side."""


class StreamConnection(ABC):
    """One socket between two connectors: bytes in, bytes out, never waiting. Used by the connector's thread only.

    Subclasses say what to read first (``expect_item``) and what follows from it; a side that takes KV says where its
    bodies go (``body_for``, ``data_done``): others refuse them. A body is received straight to where it belongs and
    sent straight from where it lies. While bytes move into or out of a transfer's blocks, the lock of its fence is
    held; behind a closed fence they go to a scratch buffer instead.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            for level, option, value in _TCP_OPTIONS:
                sock.setsockopt(level, option, value)
        self.sock: socket.socket | EncryptedSocket = sock
        self.is_open = True
        self.num_written = 0
        self._out: deque[OutgoingFrame] = deque()
        self._targets: list[memoryview] = []
        self._at = 0
        self._left = 0  # bytes of the current item (a body, before the next header) that are still to come
        self._fence: Fence | None = None  # around the blocks that the current item goes to
        self._header = bytearray(HEADER_BYTES)
        self._sealed = b""  # the header of the frame whose body is read
        self._in_frames = False
        self._frame: Frame | None = None
        self._control = bytearray()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.seal_in: Seal | None = None
        self.seal_out: Seal | None = None

    def encrypt(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Switch to TLS for all that is written and read from here on. Raises ConnectionLost."""
        assert isinstance(self.sock, socket.socket)
        try:
            self.sock = EncryptedSocket(self.sock, context, is_server=is_server)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def close(self) -> None:
        """Close the socket; what was queued is lost."""
        if self.is_open:
            self.is_open = False
            self._out.clear()
            self.sock.close()

    # Writing

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be written, and could be."""
        if isinstance(self.sock, EncryptedSocket) and self.sock.waits_for_read:
            return False
        return bool(self._out)

    @property
    def num_unsent(self) -> int:
        """Bytes that the kernel still holds: not yet acknowledged by, or not yet read at, the other host."""
        return int.from_bytes(fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4), "little")

    def put(self, data: bytes) -> None:
        """Queue plain bytes (of the handshake)."""
        self._out.append(OutgoingFrame([memoryview(data)]))

    def put_control(self, frame: Frame, body: bytes = b"") -> None:
        """Queue a frame of a kind other than DATA."""
        assert self.seal_out is not None
        pieces = [memoryview(self.seal_out.seal(frame, body))]
        self._out.append(OutgoingFrame([*pieces, memoryview(body)] if body else pieces))

    def put_data(self, frame: Frame, pieces: list[memoryview], fence: Fence) -> OutgoingFrame:
        """Queue a frame of KV."""
        assert self.seal_out is not None
        out = OutgoingFrame([memoryview(self.seal_out.seal(frame)), *pieces], fence)
        self._out.append(out)
        return out

    def write(self) -> None:
        """Write until nothing is queued or the kernel takes no more. Raises ConnectionLost."""
        while self._out:
            out = self._out[0]
            # Held while the kernel reads the blocks: code that has closed the fence may write to them at once.
            with out.fence.lock if out.fence is not None else contextlib.nullcontext():
                try:
                    count = self.sock.sendmsg(out.pieces[out.at : out.at + MAX_PIECES])
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as error:
                    raise ConnectionLost(str(error)) from error
                self.num_written += count
                is_done = out.advance(count)
            if is_done:
                self._out.popleft()

    # Reading

    def expect_item(self, count: int) -> None:
        """Handshake: the next ``count`` bytes are one item, given to ``item_done``."""
        self._control = bytearray(count)
        self._targets, self._at, self._left = [memoryview(self._control)], 0, count

    def begin_frames(self) -> None:
        """Expect frames from here on."""
        self._in_frames = True
        self._next_header()

    def read(self) -> None:
        """Read what is there, within the budget. Raises ConnectionLost, ProtocolError."""
        budget, sock = READ_BUDGET, self.sock
        while self.is_open and (budget > 0 or (isinstance(sock, EncryptedSocket) and sock.has_pending)):
            count = self._receive()
            if count is None:
                return
            budget -= count
            while count and self.is_open:
                count = self._take(count)

    @abstractmethod
    def item_done(self, item: bytes) -> None:
        """An item of the handshake is here. Must call ``expect_item`` or ``begin_frames``, or raise."""

    def body_for(self, frame: Frame) -> tuple[Sequence[memoryview], Fence | None]:
        """Where the body of this DATA frame goes, and the fence in front of it (None: a buffer). The seal is
        checked."""
        raise ProtocolError("a receiver sends no KV")

    def data_done(self, frame: Frame) -> None:
        """The body of a DATA frame is where ``body_for`` said, or in the scratch buffer when its fence was closed."""
        raise ProtocolError("a receiver sends no KV")

    @abstractmethod
    def control_done(self, frame: Frame, body: bytes) -> None:
        """A frame of another kind is here; its seal is checked."""

    def discard(self, count: int) -> list[memoryview]:
        """A place for ``count`` bytes that are not wanted."""
        whole, rest = divmod(count, SCRATCH_BYTES)
        return [self._scratch] * whole + ([self._scratch[:rest]] if rest else [])

    def _receive(self) -> int | None:
        with self._fence.lock if self._fence is not None else contextlib.nullcontext():
            # The transfer was forgotten in the middle of a body: the rest must be read, and must not reach its blocks.
            if self._fence is not None and self._fence.is_closed:
                self._fence = None
                tail = self._targets[-1:]  # the next header
                self._targets, self._at = [*self.discard(self._left), *tail], 0
            try:
                count = self.sock.recvmsg_into(self._targets[self._at : self._at + MAX_PIECES])[0]
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise ConnectionLost(str(error)) from error
        if count == 0:
            raise ConnectionLost("the other side has closed the connection")
        return count

    def _take(self, count: int) -> int:
        """``count`` bytes have come; take in what belongs to the current item. How many are left for the next."""
        if self._left > count:
            self._left -= count
            self._at = skip_bytes(self._targets, self._at, count)
            return 0
        rest = count - self._left
        self._at = skip_bytes(self._targets, self._at, self._left)
        self._left = 0
        self._fence = None
        if not self._in_frames:
            self.item_done(bytes(self._control))
        elif self._frame is None:
            self._header_done()
        else:
            self._body_done(self._frame)
        return rest  # of the next header: these bytes lie in its buffer already

    def _header_done(self) -> None:
        assert self.seal_in is not None
        frame = self.seal_in.open(self._header)
        self._sealed = bytes(self._header)
        if frame.kind is Kind.DATA:
            views, self._fence = self.body_for(frame)
            body = [view for view in views if len(view)]
        else:
            self._control = bytearray(frame.body_bytes)
            body = [memoryview(self._control)] if frame.body_bytes else []
        self._frame = frame
        if frame.body_bytes:  # the next header is read along with the body
            self._targets, self._at, self._left = [*body, memoryview(self._header)], 0, frame.body_bytes
        else:
            self._fence = None
            self._body_done(frame)

    def _body_done(self, frame: Frame) -> None:
        self._frame = None
        self._next_header()
        if frame.kind is Kind.DATA:
            self.data_done(frame)
            return
        assert self.seal_in is not None
        body = bytes(self._control)
        if body:
            self.seal_in.check(self._sealed, body)
        self.control_done(frame, body)

    def _next_header(self) -> None:
        self._targets, self._at, self._left = [memoryview(self._header)], 0, HEADER_BYTES


class KVTransfer:
    """What both ends have. ``start``: the first token that travels.

    The worker's thread and the connector's thread both hold a transfer. Its blocks are behind the fence; any other
    field is written by one of the two threads, the connector's where nothing else is said.
    """

    def __init__(self, attempt_id: str, start: int) -> None:
        self.attempt_id = attempt_id
        self.start = start
        self.fence = Fence()
        self.is_silent = False  # the worker has ended it: it wants no event of it any more
        self.num_bytes = 0
        self.first_byte_ns = 0

    @property
    def is_closed(self) -> bool:
        """Whether its blocks are read and written no more."""
        return self.fence.is_closed

    def close(self) -> bool:
        """Either thread: its blocks are neither read nor written after this returns. False when it was closed
        before."""
        with self.fence.lock:
            was_open, self.fence.is_closed = not self.fence.is_closed, True
        return was_open


class RecvTransfer(KVTransfer):
    """Receiver: what is expected, and how much of it is here."""

    def __init__(self, attempt_id: str, tables: SequenceTables, start: int, num_tokens: int) -> None:
        super().__init__(attempt_id, start)
        self.tables = tables
        self.has_blocks = any(tables.tables)  # else they are borrowed: no KV comes
        self.end = start + num_tokens
        self.next_sequence = 0
        self.sender: bytes | None = None  # the instance that has opened it
        self.number = 0  # the sender's number for it; 0: it was not opened
        self.lost_ns: int | None = None  # since when its connection is broken
        self.reported_ns = 0  # when its progress was last reported to the worker
        self.last_byte_ns = 0
        self.wire_ns = 0  # while bodies of its parts were coming in
        self.arrived = start  # tokens before this are here in all layers
        self._cells = 0  # layers x tokens that are here

    def check(self, part: Part, num_layers: int) -> None:
        """Raises ProtocolError when a part lies outside of what is expected."""
        if self.end == self.start and not self.has_blocks:
            return
        are_layers = 1 <= part.num_layers <= num_layers - part.first_layer
        if not are_layers or not part.num_tokens or not self.tables.covers(part, self.end):
            raise ProtocolError(
                f"tokens {part.start} to {part.start + part.num_tokens} in layers {part.first_layer} to "
                f"{part.first_layer + part.num_layers} are not what transfer {self.attempt_id} expects"
            )

    def count(self, frame: Frame, num_bytes: int, begun_ns: int) -> bool:
        """The part of this frame, which began to come in at ``begun_ns``, lies in its blocks. Whether a send is
        complete with it."""
        self.next_sequence = frame.sequence + 1
        self.num_bytes += num_bytes
        self.last_byte_ns = time.monotonic_ns()
        self.wire_ns += self.last_byte_ns - begun_ns
        self.first_byte_ns = self.first_byte_ns or self.last_byte_ns
        self._cells += frame.num_tokens * frame.num_layers
        if frame.flags & LAST_OF_CHUNK:
            self.arrived = max(self.arrived, frame.start + frame.num_tokens)
            return True
        return False

    def missing(self, num_layers: int) -> int:
        """Tokens (in whole or in part) that are expected and not here."""
        if not self.has_blocks:
            return 0
        return -(-(self.tables.num_cells(self.end, num_layers) - self._cells) // num_layers)


@dataclass(eq=False, slots=True)
class _Send:
    """Tokens that were queued together. They may be queued while they are computed, layer by layer.

    The worker's thread writes ``num_layers`` and then reads ``awaited``; the connector's does it the other way round.
    So one of them sees what the other has written, and no part waits for a notice that was never given.
    """

    start: int
    num_tokens: int
    tables: SequenceTables
    num_layers: int  # that are computed
    awaited: int  # layers after which the connector's thread wants to be notified

    def has(self, part: Part) -> bool:
        """Whether all layers of this part are computed."""
        return part.first_layer + part.num_layers <= self.num_layers


class SendTransfer(KVTransfer):
    """Sender: what is queued, what is on its way, what is acknowledged. ``num_layers``: of the model.

    ``queue_*`` are for the worker's thread, the rest for the connector's; ``_sends`` and ``_payload`` are how the first
    hands over to the second.
    """

    def __init__(
        self,
        attempt_id: str,
        number: int,
        address: SocketAddress,
        start: int,
        num_layers: int,
        runs: Sequence[LayerRun] = (),
    ) -> None:
        super().__init__(attempt_id, start)
        self._runs = runs or layer_runs(num_layers)
        self.number = number
        self.address = address
        self.opened_ns = time.monotonic_ns()
        self.commit_ns = 0
        self.queued_until = start
        self.in_flight: OutgoingFrame | None = None  # a frame that still points into the blocks
        self.receiver: bytes | None = None  # the instance that it is bound to
        self.is_announced = False  # on this connection
        self.is_resuming = False  # waits for the receiver to report what it has
        self.is_ready = False  # stands in a queue of its peer
        self.acknowledged = 0
        self._num_layers = num_layers
        self._unfinished: _Send | None = None  # worker's thread: queued, and not computed in all layers
        self._sends: deque[_Send] = deque()
        self._payload: bytes | None = None
        self._cutting: tuple[Iterator[Part], BodyFormat, _Send] | None = None
        self._next: Part | None = None  # of _cutting; it may have to wait for its layers
        self._parts: deque[tuple[Part, BodyFormat, tuple[int, ...]]] = deque()  # from ``acknowledged`` on
        self._cursor = 0  # next to be sent on this connection
        self._sent_until = 0  # on any connection

    def queue_send(self, start: int, num_tokens: int, tables: SequenceTables, num_layers: int) -> bool:
        """Worker's thread, when no tokens lack layers. Whether the connector's thread has to be notified. Raises
        ValueError for a gap, and after the commit."""
        skipped = max(0, self.queued_until - start)
        if start > self.queued_until:
            raise ValueError(f"transfer {self.attempt_id}: tokens {self.queued_until} to {start} were never sent")
        if skipped >= num_tokens:
            return False
        if self._payload is not None:
            raise ValueError(f"transfer {self.attempt_id}: KV after its commit")
        self.queued_until = start + num_tokens
        if skipped:
            tables = tables.from_token(start + skipped)
        if min(tables.starts) >= self.queued_until:  # windows will have left all of it
            return False
        send = _Send(start + skipped, num_tokens - skipped, tables, num_layers, self._num_layers)
        self._unfinished = send if num_layers < self._num_layers else None
        self._sends.append(send)
        return True

    @property
    def lacks_layers(self) -> bool:
        """Worker's thread. Whether more layers are to come of the tokens that were queued last."""
        return self._unfinished is not None

    def queue_layers(self, end: int, num_layers: int) -> bool:
        """Worker's thread: of tokens that lack layers, ``num_layers`` are computed. Whether the connector's thread has
        to be notified. Raises ValueError for other tokens."""
        send = self._unfinished
        assert send is not None, "no tokens lack layers"
        if end != self.queued_until:
            raise ValueError(
                f"transfer {self.attempt_id}: tokens up to {end}, while those up to {self.queued_until} have "
                f"{send.num_layers} of {self._num_layers} layers"
            )
        if num_layers == self._num_layers:
            self._unfinished = None
        send.num_layers = max(send.num_layers, num_layers)
        return send.num_layers >= send.awaited

    def queue_commit(self, payload: bytes) -> None:
        """Worker's thread. Raises ValueError when repeated, or while tokens lack layers (unless the transfer has ended
        meanwhile: then the last layers were not queued any more)."""
        if self._payload is not None:
            raise ValueError(f"transfer {self.attempt_id} is committed already")
        if self._unfinished is not None and not self.is_closed:
            raise ValueError(
                f"transfer {self.attempt_id}: committed with {self._unfinished.num_layers} layers of its last tokens"
            )
        self.commit_ns = time.monotonic_ns()
        self._payload = payload

    def restart(self) -> None:
        """A new connection: announce again, and continue behind what is acknowledged."""
        self.is_resuming = self._sent_until > 0
        self.is_announced = self.is_ready = False
        self._cursor = self.acknowledged

    def next_part(self, choose: Callable[[int], BodyFormat]) -> tuple[int, Part, BodyFormat, tuple[int, ...]] | None:
        """The next part to be sent: its number, how it travels, its block table; None when there is none now.

        ``choose``: the body format for a number of tokens. A part that is sent again travels as it did the first time.
        """
        index = self._cursor - self.acknowledged
        if index == len(self._parts):
            part = self._cut(choose)
            if part is None:
                return None
            self._parts.append(part)
        self._cursor += 1
        self._sent_until = max(self._sent_until, self._cursor)
        return (self._cursor - 1, *self._parts[index])

    def next_commit(self) -> tuple[int, bytes] | None:
        """The commit and its number, when everything before it is on its way and it is not."""
        if self._payload is None or not self.is_cut or self._cursor != self.acknowledged + len(self._parts):
            return None
        self._cursor += 1
        self._sent_until = max(self._sent_until, self._cursor)
        return self._cursor - 1, self._payload

    @property
    def is_cut(self) -> bool:
        """Whether all that was queued has become parts."""
        return not self._sends and self._cutting is None

    @property
    def has_data(self) -> bool:
        """Whether KV can be sent now."""
        if self._cursor < self.acknowledged + len(self._parts):
            return True
        if self._cutting is None or self._next is None:
            return not self.is_cut
        return self._cutting[2].has(self._next)

    @property
    def has_commit(self) -> bool:
        """Whether the commit is the next to be sent."""
        return self._payload is not None and not self.has_data and self._cursor == self.acknowledged + len(self._parts)

    @property
    def is_waiting(self) -> bool:
        """Whether something was sent and is not acknowledged."""
        return self._sent_until > self.acknowledged

    def acknowledge(self, sequence: int) -> bool:
        """The receiver has everything below ``sequence``. Whether that ends the transfer. Raises ProtocolError."""
        if sequence > self._sent_until:
            raise ProtocolError(f"transfer {self.attempt_id}: {sequence} is acknowledged, {self._sent_until} were sent")
        while self.acknowledged < sequence:
            self.acknowledged += 1
            if not self._parts:
                return True  # that was the commit
            self._parts.popleft()
        self._cursor = max(self._cursor, self.acknowledged)
        return False

    def close(self) -> bool:
        """Close the transfer. The rest of a frame that is half sent becomes a copy of what the blocks hold now."""
        with self.fence.lock:
            was_open, self.fence.is_closed = not self.fence.is_closed, True
            if self.in_flight is not None:
                self.in_flight.detach()
                self.in_flight = None
        return was_open

    def _cut(self, choose: Callable[[int], BodyFormat]) -> tuple[Part, BodyFormat, tuple[int, ...]] | None:
        if self._cutting is None:
            if not self._sends:
                return None
            send = self._sends.popleft()
            body_format = choose(send.num_tokens)
            end = send.start + send.num_tokens
            self._cutting = parts_of_runs(body_format, self._runs, send.tables.starts, end), body_format, send
        parts, body_format, send = self._cutting
        part = self._next = self._next or next(parts)
        send.awaited = part.first_layer + part.num_layers
        if not send.has(part):
            return None
        send.awaited = self._num_layers
        self._next = None
        if part.is_last:
            self._cutting = None
        return part, body_format, send.tables.table_of(part)


class EventQueue:
    """Events in order, each beside its transfer; an eventfd says when there are some."""

    def __init__(self) -> None:
        self._events: deque[tuple[KVTransfer, ConnectorEvent]] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events, and after ``wake``."""
        return self._fd

    def emit(self, transfer: KVTransfer, event: ConnectorEvent) -> None:
        """Connector's thread."""
        self._events.append((transfer, event))
        self.wake()

    def wake(self) -> None:
        """Connector's thread: make the worker look, also without an event."""
        os.eventfd_write(self._fd, 1)

    def drain(self) -> list[tuple[KVTransfer, ConnectorEvent]]:
        """Worker's thread: what there is, except events of transfers that it has ended itself."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        happened = [self._events.popleft() for _ in range(len(self._events))]
        return [(transfer, event) for transfer, event in happened if not transfer.is_silent]

    def close(self) -> None:
        """No more events."""
        os.close(self._fd)


class SenderConnection(StreamConnection):
    """This connector's connection to one receiver."""

    def __init__(self, sock: socket.socket, identity: Identity, peer: "Peer", dial: int) -> None:
        super().__init__(sock)
        self.is_connected = False
        self._identity = identity
        self.peer = peer
        self._dial = dial
        self._greeted = b""
        self._said = b""
        self._welcome = b""
        self.expect_item(GREETING_BYTES)

    @property
    def is_introduced(self) -> bool:
        """Whether the HELLO was sent."""
        return bool(self._said)

    def connected(self) -> None:
        """The socket is writable for the first time. Raises ConnectionLost when that is because it failed."""
        assert isinstance(self.sock, socket.socket)
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise ConnectionLost(errno.errorcode.get(code, str(code)))
        self.is_connected = True
        if self._identity.encryption is not None:
            self.encrypt(self._identity.encryption.sender, is_server=False)

    def item_done(self, item: bytes) -> None:
        """Take in a greeting, the fixed part of a WELCOME, or its format."""
        if not self._greeted:
            self._greeted = item
            self._said = hello(self._identity, item, str(self.peer.address), self._dial)
            self.put(self._said)
            self.expect_item(WELCOME_BYTES)
        elif not self._welcome:
            self._welcome = item
            self.expect_item(format_bytes_of(item))
        else:
            who = accept_welcome(self._identity, self._greeted, self._said, self._welcome + item)
            self.seal_in, self.seal_out = make_seals(who.key_to_sender, who.key_to_receiver)
            self.begin_frames()
            self.peer.welcomed(who)

    def control_done(self, frame: Frame, body: bytes) -> None:
        if frame.kind is Kind.ACK:
            self.peer.acknowledged(frame.number, frame.sequence)
        elif frame.kind is Kind.REFUSE:
            self.peer.refused(frame.number, body.decode(errors="replace"))
        else:
            raise ProtocolError(f"a receiver does not send {frame.kind.name}")

    def link_bytes_per_s(self) -> float | None:
        """The kernel's estimate of what the path delivers; None when it has none, or none from a full pipe."""
        if self.sock.family == socket.AF_UNIX or self.num_written < MIN_SAMPLE_BYTES:
            return None
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        assert isinstance(info, bytes)
        if len(info) < _DELIVERY_RATE_AT + 8 or info[_APP_LIMITED_AT] & 1:
            return None
        return float(int.from_bytes(info[_DELIVERY_RATE_AT : _DELIVERY_RATE_AT + 8], "little")) or None


class Peer:
    """One receiver, by its address: its transfers, its connection while there is one, and the way to the next.

    Openings and commits go before KV; the KV of different transfers takes turns, a frame each. A transfer whose next
    frame waits for layers is in no queue: the worker's thread notifies this one when they are there.
    """

    def __init__(self, address: SocketAddress, identity: Identity, bodies: BodyFormats, events: EventQueue,
                 resume_timeout_ns: int) -> None:  # fmt: skip
        self.address = address
        self.connection: SenderConnection | None = None
        self.transfers: dict[int, SendTransfer] = {}
        self._identity = identity
        self._bodies = bodies
        self._events = events
        self._resume_timeout_ns = resume_timeout_ns
        self._urgent: deque[SendTransfer] = deque()
        self._ready: deque[SendTransfer] = deque()
        self._receiver: KVFormat | None = None  # while the connection is up
        self._instance = b""
        self._link_bytes_per_s: float | None = None
        self._dialled_ns = 0
        self._next_dial_ns = 0
        self._back_off_ns = FIRST_BACK_OFF_NS
        self._broken_ns: int | None = None  # since when there is no connection, though there are transfers
        self._stuck_ns: int | None = None  # since when connections break before anything is acknowledged
        self._trouble = "no connection yet"
        self._progress = (0, 0)  # when, bytes that have really left

    # Calls of the worker

    def news(self, transfer: SendTransfer) -> None:
        """Take in that something was queued: the transfer gets in line when it is its turn to send."""
        is_asking = transfer.is_announced and transfer.is_resuming
        if self._receiver is None or transfer.is_ready or transfer.is_closed or is_asking:
            return
        if not transfer.is_announced or transfer.has_commit:
            transfer.is_ready = True
            self._urgent.append(transfer)
        elif transfer.has_data:
            transfer.is_ready = True
            self._ready.append(transfer)

    def cancelled(self, transfer: SendTransfer) -> None:
        """The worker has given a transfer up, and its fence is closed."""
        was_known = self.transfers.pop(transfer.number, None) is not None
        if was_known and transfer.is_announced and self.connection is not None:
            self.connection.put_control(Frame(Kind.CANCEL, transfer.number))

    # Answers of the receiver

    def welcomed(self, who: Introduction) -> None:
        """The connection is up. Raises ProtocolError, with all transfers failed, when the caches do not fit."""
        try:
            self._identity.kv_format.check_compatible(who.kv_format)
            self._bodies.for_sending(who.kv_format, 1, None)
        except ConfigError as error:
            self.fail_all(error.message)
            raise ProtocolError(error.message) from error
        self._receiver, self._instance, self._broken_ns = who.kv_format, who.instance, None
        self._progress = (time.monotonic_ns(), 0)
        for transfer in list(self.transfers.values()):
            if transfer.receiver not in (None, who.instance):
                self._fail(transfer, "the receiver was restarted")
            else:
                self.news(transfer)

    def acknowledged(self, number: int, sequence: int) -> None:
        """The receiver has everything below ``sequence``. Raises ProtocolError for what was never sent."""
        transfer = self.transfers.get(number)
        if transfer is None:
            return
        before = transfer.acknowledged
        transfer.is_resuming = False
        is_over = transfer.acknowledge(sequence)
        if transfer.acknowledged > before or not transfer.is_waiting:
            self._stuck_ns, self._back_off_ns = None, FIRST_BACK_OFF_NS
        if not is_over:
            self.news(transfer)
            return
        del self.transfers[number]
        if transfer.close():
            now, first = time.monotonic_ns(), transfer.first_byte_ns or transfer.commit_ns
            self._events.emit(transfer, Sent(transfer.attempt_id, transfer.num_bytes, first, transfer.commit_ns, now))

    def refused(self, number: int, message: str) -> None:
        """The receiver does not take this transfer."""
        transfer = self.transfers.get(number)
        if transfer is not None:
            self._fail(transfer, message)

    # The connection

    @property
    def wants_write(self) -> bool:
        """Whether there is something for the socket to take."""
        connection = self.connection
        if connection is None:
            return False
        return not connection.is_connected or connection.wants_write or bool(self._urgent or self._ready)

    def write(self) -> None:
        """The socket takes bytes: all that is urgent, and one frame of KV. Raises ConnectionLost."""
        connection = self.connection
        if connection is None:
            return
        if not connection.is_connected:
            connection.connected()
        connection.write()
        may_send_kv = True
        while not connection.wants_write and (self._urgent or (may_send_kv and self._ready)):
            transfer = self._urgent.popleft() if self._urgent else self._ready.popleft()
            transfer.is_ready = False
            may_send_kv = not self._put_next(transfer, connection) and may_send_kv
            connection.write()

    def lost(self, trouble: str) -> None:
        """The connection is over (or could not be had): later another, and from there on."""
        now = time.monotonic_ns()
        was_up = self._receiver is not None
        if self.connection is not None:
            if self.connection.is_introduced and not was_up:
                trouble += " (during the handshake: has it the same secret?)"
            self.connection.close()
        self.connection, self._receiver, self._trouble = None, None, trouble
        self._urgent.clear()
        self._ready.clear()
        for transfer in self.transfers.values():
            with transfer.fence.lock:
                transfer.in_flight = None
            transfer.restart()
        if self.transfers:
            self._broken_ns = self._broken_ns or now
            if was_up:
                self._stuck_ns = self._stuck_ns or now
            if self._stuck_ns is not None and now - self._stuck_ns > self._resume_timeout_ns:
                self.fail_all(f"connections to {self.address} break before anything is through: {trouble}")
        self._next_dial_ns = now + self._back_off_ns
        self._back_off_ns = min(2 * self._back_off_ns, LAST_BACK_OFF_NS)

    def dial(self, now_ns: int) -> SenderConnection | None:
        """A new connection on its way, when one is needed and due."""
        if self.connection is not None or not self.transfers or now_ns < self._next_dial_ns:
            return None
        if self._broken_ns is None:
            self._broken_ns = now_ns
        self._dialled_ns = now_ns
        try:
            sock = socket.socket(self.address.family, socket.SOCK_STREAM)
        except OSError as error:  # no file descriptors: later
            self.lost(str(error))
            return None
        connection = SenderConnection(sock, self._identity, self, now_ns)
        code = sock.connect_ex(self.address.target)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self.lost(f"{self.address}: {errno.errorcode.get(code, code)}")
            return None
        self.connection = connection
        return connection

    def tick(self, now_ns: int) -> int | None:
        """Give up what takes too long. When to look again; None when nothing is pending. Raises ConnectionLost."""
        if not self.transfers:
            return None
        if self._broken_ns is not None:
            for transfer in list(self.transfers.values()):
                if now_ns - max(self._broken_ns, transfer.opened_ns) > self._resume_timeout_ns:
                    seconds = self._resume_timeout_ns / 1e9
                    self._fail(transfer, f"no working connection to {self.address} for {seconds:g} s: {self._trouble}")
        if self.connection is None:
            return self._next_dial_ns
        patience = self._resume_timeout_ns // 2
        if self._receiver is None:
            if now_ns - self._dialled_ns > patience:
                raise ConnectionLost("no answer to the handshake")
        elif self.connection.wants_write or any(transfer.is_waiting for transfer in self.transfers.values()):
            left = self.connection.num_written - self.connection.num_unsent
            if left != self._progress[1]:
                self._progress = (now_ns, left)
            elif now_ns - self._progress[0] > patience:
                self._broken_ns = self._progress[0]
                raise ConnectionLost("nothing moves")
        else:
            self._progress = (now_ns, self._progress[1])
            return None
        return now_ns + max(1_000_000, self._resume_timeout_ns // 16)

    def fail_all(self, message: str) -> None:
        """Every transfer to this receiver is over."""
        for transfer in list(self.transfers.values()):
            self._fail(transfer, message)

    def _fail(self, transfer: SendTransfer, message: str) -> None:
        self.transfers.pop(transfer.number, None)
        if transfer.close():
            self._events.emit(transfer, TransferBroken(transfer.attempt_id, True, message))

    def _put_next(self, transfer: SendTransfer, connection: SenderConnection) -> bool:
        """Queue the transfer's next frame and let it get in line again. Whether that was KV."""
        if transfer.is_closed:
            return False
        is_kv = False
        if not transfer.is_announced:
            body = transfer.attempt_id.encode()
            connection.put_control(Frame(Kind.OPEN, transfer.number, start=transfer.start, body_bytes=len(body)), body)
            transfer.is_announced, transfer.receiver = True, self._instance
        elif (commit := transfer.next_commit()) is not None:
            sequence, payload = commit
            connection.put_control(Frame(Kind.COMMIT, transfer.number, sequence, body_bytes=len(payload)), payload)
        else:
            is_kv = self._put_kv(transfer, connection)
        self.news(transfer)
        return is_kv

    def _put_kv(self, transfer: SendTransfer, connection: SenderConnection) -> bool:
        with transfer.fence.lock:
            following = None if transfer.is_closed else transfer.next_part(self._choose)
            if following is None:
                return False
            sequence, part, body_format, blocks = following
            pieces = body_format.pack(blocks, part)
            size = sum(map(len, pieces))
            frame = Frame(
                Kind.DATA, transfer.number, sequence, part.start, part.num_tokens, part.first_layer, part.num_layers,
                body_format.encoding, LAST_OF_CHUNK if part.is_last else 0, size, checksum(pieces),
            )  # fmt: skip
            transfer.in_flight = connection.put_data(frame, pieces, transfer.fence)
            transfer.first_byte_ns = transfer.first_byte_ns or time.monotonic_ns()
            transfer.num_bytes += body_format.num_bytes(part)
        return True

    def _choose(self, num_tokens: int) -> BodyFormat:
        assert self._receiver is not None and self.connection is not None
        self._link_bytes_per_s = self.connection.link_bytes_per_s() or self._link_bytes_per_s
        return self._bodies.for_sending(self._receiver, num_tokens, self._link_bytes_per_s)


class StreamReceiver:
    """All incoming connections and all expected transfers of one connector: which connection of a sender counts, and
    what is answered. Runs in the connector's thread; only ``transfers`` is shared with the worker's, whose single dict
    operations need no lock."""

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
        """Take in a finished handshake: the connection takes the place of the same sender's older one. Raises
        ProtocolError when it is itself the older one."""
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
        """Take in that a connection is over; its transfers wait for another connection of the same sender."""
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
        """Take in the fixed part of a HELLO, then its format."""
        if not self._hello:
            self._hello = item
            self.expect_item(format_bytes_of(item))
            return
        answer, who = accept_hello(self._receiver.identity, self._greeted, self._hello + item)
        self._receiver.introduced(self, who)
        self.peer = who
        self.put(answer)
        self.seal_in, self.seal_out = make_seals(who.key_to_receiver, who.key_to_sender)
        self.begin_frames()  # a sender whose format does not fit finds that in the answer, and reports it on its side

    def read(self) -> None:
        """Read what has come, then acknowledge it."""
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
            views = body_format.targets(transfer.tables.table_of(part), part)
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
                    body_format.unpack(transfer.tables.table_of(part), part, views[0])
                is_whole = transfer.count(frame, body_format.num_bytes(part), self._begun_ns)
        if is_closed:
            self.refuse_closed(frame.number, transfer)
            return
        self._acks[frame.number] = transfer.next_sequence
        if is_whole or transfer.last_byte_ns - transfer.reported_ns >= REPORT_EVERY_NS:
            transfer.reported_ns = transfer.last_byte_ns
            self._receiver.events.emit(transfer, ChunkArrived(transfer.attempt_id, transfer.arrived - transfer.start))

    def control_done(self, frame: Frame, body: bytes) -> None:
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
        elif transfer.has_blocks and transfer.start != frame.start:
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


class StreamConnector:
    """A KVConnector with one protocol over TCP and unix sockets; ``bodies`` say how KV becomes bodies of frames.
    groups: of each layer, the number of its block table ((): all have one)."""

    def __init__(
        self, bodies: BodyFormats, kv_format: KVFormat, options: TransferOptions, groups: Sequence[int] = ()
    ) -> None:
        self._format = kv_format
        self._groups = tuple(groups)
        self._runs = layer_runs(kv_format.num_layers, groups)
        encryption = kv_encryption(options.secret) if options.encrypts else None
        self._identity = Identity(options.secret, secrets.token_bytes(INSTANCE_BYTES), kv_format, encryption)
        self._bodies = bodies
        self._timeout_ns = int(options.resume_timeout_s * 1e9)
        self._listener, self._bound = listen(parse_address(options.listen))
        self.address = str(self._bound)
        self._events = EventQueue()
        self._receiver = StreamReceiver(self._identity, bodies, self._events, self._timeout_ns, self._lost)
        self._sending: dict[str, SendTransfer] = {}
        self._next_number = 1
        self._peers: dict[SocketAddress, Peer] = {}
        self._news: deque[RecvTransfer | SendTransfer] = deque()  # transfers whose state the worker has changed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._masks: dict[StreamConnection, int] = {}
        self._resume_listening_ns: int | None = None
        self._is_closed = False
        self._fault: Exception | None = None
        self._selector.register(self._wake, READ, None)
        self._selector.register(self._listener, READ, None)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # The worker's thread

    def expect(self, attempt_id: str, block_ids: BlockIds, start: int, num_tokens: int) -> None:
        if attempt_id in self._receiver.transfers:
            raise ValueError(f"transfer {attempt_id} is expected already")
        if not block_ids and num_tokens:
            raise ValueError(f"transfer {attempt_id} has no blocks for its {num_tokens} tokens")
        tables = self._tables_of(attempt_id, block_ids, start, start + num_tokens)
        self._receiver.transfers[attempt_id] = RecvTransfer(attempt_id, tables, start, num_tokens)

    def forget(self, attempt_id: str) -> None:
        transfer = self._receiver.transfers.pop(attempt_id, None)
        if transfer is not None:
            transfer.is_silent = True
            transfer.close()
            self._notify(transfer)

    def open(self, attempt_id: str, address: str, start: int) -> None:
        if attempt_id in self._sending:
            raise ValueError(f"transfer {attempt_id} is open already")
        if not 0 < len(attempt_id.encode()) <= MAX_ATTEMPT_ID_BYTES:
            raise ValueError(f"a transfer id of {len(attempt_id.encode())} bytes; 1 to {MAX_ATTEMPT_ID_BYTES}")
        layers, runs = self._format.num_layers, self._runs
        transfer = SendTransfer(attempt_id, self._next_number, parse_address(address), start, layers, runs)
        self._next_number += 1
        self._sending[attempt_id] = transfer
        self._notify(transfer)

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: BlockIds, num_layers: int | None = None
    ) -> None:
        transfer = self._sending.get(attempt_id)
        if transfer is None or transfer.is_closed or not num_tokens:
            return
        if num_layers is not None and not 1 <= num_layers <= self._format.num_layers:
            raise ValueError(f"transfer {attempt_id}: {num_layers} layers are computed, of {self._format.num_layers}")
        end, layers = start + num_tokens, num_layers or self._format.num_layers
        if transfer.lacks_layers:  # this is called layer by layer: where the tokens lie is known from the first
            has_more = transfer.queue_layers(end, layers)
        else:
            has_more = transfer.queue_send(
                start, num_tokens, self._tables_of(attempt_id, block_ids, start, end), layers
            )
        if has_more:
            self._notify(transfer)

    def commit(self, attempt_id: str, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a commit of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
        transfer = self._sending.get(attempt_id)
        if transfer is not None:
            transfer.queue_commit(payload)
            self._notify(transfer)

    def cancel(self, attempt_id: str) -> None:
        transfer = self._sending.pop(attempt_id, None)
        if transfer is not None:
            transfer.is_silent = True
            transfer.close()
            self._notify(transfer)

    def poll(self) -> list[ConnectorEvent]:
        """The events since the last call. Raises WorkerError when the connector's thread has died of a bug."""
        if self._fault is not None:
            raise WorkerError(f"the KV connector has failed: {self._fault}") from self._fault
        happened: list[ConnectorEvent] = []
        if self._is_closed:
            return happened
        for transfer, event in self._events.drain():
            happened.append(event)
            if not isinstance(event, ChunkArrived):
                table = self._sending if isinstance(transfer, SendTransfer) else self._receiver.transfers
                table.pop(transfer.attempt_id, None)
        return happened

    def fileno(self) -> int:
        return self._events.fileno()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._events.close()
        if isinstance(self._bound.target, str):
            Path(self._bound.target).unlink(missing_ok=True)

    def _notify(self, transfer: RecvTransfer | SendTransfer) -> None:
        if self._is_closed:
            return
        self._news.append(transfer)
        os.eventfd_write(self._wake, 1)

    def _tables_of(self, attempt_id: str, block_ids: BlockIds, start: int, end: int) -> SequenceTables:
        """Where the KV of the tokens [start, end) lies. Raises ValueError where blocks do not hold them."""
        size = self._format.block_size
        if not isinstance(block_ids, GroupTables):
            if block_ids and len(block_ids) * size < end:
                raise ValueError(f"transfer {attempt_id}: {len(block_ids)} blocks do not hold {end} tokens")
            return SequenceTables.of(block_ids, start)
        needed = 1 + max(self._groups, default=0)
        if not needed == len(block_ids.block_tables) == len(block_ids.first_blocks):
            given = f"{len(block_ids.block_tables)} block tables, {len(block_ids.first_blocks)} first blocks"
            raise ValueError(f"transfer {attempt_id}: {given}; the layers are of {needed} groups")
        starts, tables = [], []
        for first, ids in zip(block_ids.first_blocks, block_ids.block_tables, strict=True):
            starts.append(max(start, first * size))
            tables.append((0,) * first + tuple(ids))
            if starts[-1] < end and len(tables[-1]) * size < end:
                raise ValueError(f"transfer {attempt_id}: {len(tables[-1])} blocks do not hold {end} tokens")
        return SequenceTables(tuple(tables), tuple(starts), self._groups)

    # The connector's thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                ready = self._selector.select(self._tick())
                self._take_news()
                for key, mask in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.data.is_open:
                        self._serve(key.data, mask)
        except Exception as error:
            self._fault = error
            self._events.wake()  # the worker polls, and finds the fault
        finally:
            for connection in list(self._masks):
                connection.close()
            self._selector.close()
            self._listener.close()

    def _take_news(self) -> None:
        """Act on what the worker has changed since the last time."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        for _ in range(len(self._news)):
            transfer = self._news.popleft()
            if isinstance(transfer, RecvTransfer):
                connection = self._receiver.forgotten(transfer)
                if connection is not None:
                    self._watch(connection)
            else:
                self._take_sending(transfer)

    def _take_sending(self, transfer: SendTransfer) -> None:
        peer = self._peers.get(transfer.address)
        if transfer.is_silent:
            if peer is not None:
                peer.cancelled(transfer)
        elif not transfer.is_closed:
            if peer is None:
                peer = Peer(transfer.address, self._identity, self._bodies, self._events, self._timeout_ns)
                self._peers[transfer.address] = peer
            peer.transfers[transfer.number] = transfer
            peer.news(transfer)
        if peer is not None and peer.connection is not None and peer.connection.is_connected:
            self._serve(peer.connection, WRITE)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it was gone before it was accepted
            return
        except OSError:  # no file descriptors, say: the others wait in the backlog
            self._selector.unregister(self._listener)
            self._resume_listening_ns = time.monotonic_ns() + LISTENER_PAUSE_NS
            return
        try:
            self._watch(self._receiver.accept(sock, time.monotonic_ns()))
        except ConnectionLost:  # while it was wrapped in TLS
            sock.close()

    def _serve(self, connection: StreamConnection, mask: int) -> None:
        try:
            if mask & WRITE:
                connection.peer.write() if isinstance(connection, SenderConnection) else connection.write()
            if mask & READ and connection.is_open:
                connection.read()
            if isinstance(connection, ReceiverConnection) and connection.wants_write:
                connection.write()
        except (ConnectionLost, ProtocolError, ConfigError) as error:
            self._lost(connection, str(error))
        else:
            self._watch(connection)

    def _lost(self, connection: StreamConnection, why: str) -> None:
        self._unwatch(connection)
        if isinstance(connection, ReceiverConnection):
            self._receiver.lost(connection)
            connection.close()
        elif isinstance(connection, SenderConnection):
            connection.peer.lost(why)

    def _watch(self, connection: StreamConnection) -> None:
        """Ask the selector for what this connection waits for."""
        if not connection.is_open:
            self._unwatch(connection)
            return
        writes = connection.peer.wants_write if isinstance(connection, SenderConnection) else connection.wants_write
        mask = READ | WRITE if writes else READ
        known = self._masks.get(connection)
        if known is None:
            self._selector.register(connection.sock, mask, connection)
        elif known != mask:
            self._selector.modify(connection.sock, mask, connection)
        self._masks[connection] = mask

    def _unwatch(self, connection: StreamConnection) -> None:
        if self._masks.pop(connection, None) is not None:
            self._selector.unregister(connection.sock)

    def _tick(self) -> float | None:
        """Dial, and give up what takes too long. Seconds until the next time; None when nothing is pending."""
        now = time.monotonic_ns()
        due = [now + self._timeout_ns // 8] if self._receiver.tick(now) else []
        if self._resume_listening_ns is not None:
            due.append(self._resume_listening_ns)
            if now >= self._resume_listening_ns:
                self._resume_listening_ns = None
                self._selector.register(self._listener, READ, None)
        for peer in list(self._peers.values()):
            if not peer.transfers and peer.connection is None:
                del self._peers[peer.address]
                continue
            dialled = peer.dial(now)
            if dialled is not None:
                self._watch(dialled)
            try:
                when = peer.tick(now)
            except ConnectionLost as error:
                assert peer.connection is not None
                self._lost(peer.connection, str(error))
                when = now
            if when is not None:
                due.append(when)
        return max(0, min(due) - now) / 1e9 if due else None
