"""The sending side: one connection to each receiver, dialled again as long as there are transfers.

Owns dialling, backing off, resuming, and which frame is next. Openings and commits go before KV; the KV of different
transfers takes turns, a frame each. A transfer whose next frame waits for layers is in no queue: the worker's thread
notifies this one when they are there. Runs in the connector's thread.
"""

import errno
import socket
import time
from collections import deque

from diptych.control.engine.worker_core import TransferBroken
from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import Sent
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.addresses import SocketAddress
from diptych.runtime.transfer.stream.body_format import BodyFormat, BodyFormats
from diptych.runtime.transfer.stream.event_queue import EventQueue
from diptych.runtime.transfer.stream.frames import LAST_OF_CHUNK, Frame, Kind, ProtocolError, Seal, checksum
from diptych.runtime.transfer.stream.handshake import (
    GREETING_BYTES,
    WELCOME_BYTES,
    Identity,
    Introduction,
    accept_welcome,
    format_bytes_of,
    hello,
)
from diptych.runtime.transfer.stream.stream_connection import ConnectionLost, StreamConnection
from diptych.runtime.transfer.stream.transfer_state import SendTransfer

FIRST_BACK_OFF_NS = 10_000_000
LAST_BACK_OFF_NS = 1_000_000_000
MIN_SAMPLE_BYTES = 1 << 20  # written before the kernel's estimate of the link is believed
_DELIVERY_RATE_AT, _APP_LIMITED_AT = 160, 7  # in struct tcp_info of linux/tcp.h


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
        """See StreamConnection: a greeting, the fixed part of a WELCOME, its format."""
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
            self.seal_in, self.seal_out = Seal(who.key_to_sender), Seal(who.key_to_receiver)
            self.begin_frames()
            self.peer.welcomed(who)

    def control_done(self, frame: Frame, body: bytes) -> None:
        """See StreamConnection."""
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
    """One receiver, by its address: its transfers, its connection while there is one, and the way to the next."""

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
        """Something was queued: the transfer gets in line when it is its turn to send."""
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
