"""One socket between two connectors: bytes in, bytes out, never waiting. Used by the connector's thread only.

A body is received straight to where it belongs and sent straight from where it lies. While bytes move into or out of a
transfer's blocks, the lock of its fence is held; behind a closed fence they go to a scratch buffer instead. What a
frame means is the business of sender.py and receiver.py.
"""

import contextlib
import fcntl
import socket
import ssl
import termios
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from diptych.runtime.transfer.stream.encrypted_socket import EncryptedSocket
from diptych.runtime.transfer.stream.fence import Fence
from diptych.runtime.transfer.stream.frames import (
    HEADER_BYTES,
    Frame,
    Kind,
    OutgoingFrame,
    ProtocolError,
    Seal,
    parse_header,
    skip_bytes,
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


class ConnectionLost(Exception):
    """The connection has ended, from either side."""


class StreamConnection(ABC):
    """Reads and writes. Subclasses say what to read first (``expect_item``) and what follows from it; a side that takes
    KV says where its bodies go (``body_for``, ``data_done``): others refuse them."""

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
        """From here on, what is written and read travels in TLS. Raises ConnectionLost."""
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
        """From here on, frames."""
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
        frame = parse_header(self._header)
        self._sealed = bytes(self._header)
        if frame.kind is Kind.DATA:
            self.seal_in.check(self._sealed)
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
        self.seal_in.check(self._sealed, body)
        self.control_done(frame, body)

    def _next_header(self) -> None:
        self._targets, self._at, self._left = [memoryview(self._header)], 0, HEADER_BYTES
