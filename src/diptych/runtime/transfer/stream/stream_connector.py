"""A KVConnector over stream sockets: the worker's calls on one side, one thread for all sockets on the other.

Owns that thread, the selector and the listening socket. The worker's thread only touches dictionaries, queues and the
fences of single transfers; it notifies the connector's thread through a queue and an eventfd. That thread sleeps in the
selector, without a time limit when nothing is pending.
"""

import os
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from diptych.control.engine.worker_core import ChunkArrived
from diptych.control.errors import ConfigError, WorkerError
from diptych.runtime.transfer.connector import (
    MAX_ATTEMPT_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    ConnectorEvent,
    TransferOptions,
)
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.addresses import SocketAddress, listen, parse_address
from diptych.runtime.transfer.stream.body_format import BodyFormats
from diptych.runtime.transfer.stream.encrypted_socket import kv_encryption
from diptych.runtime.transfer.stream.event_queue import EventQueue
from diptych.runtime.transfer.stream.frames import ProtocolError
from diptych.runtime.transfer.stream.handshake import INSTANCE_BYTES, Identity
from diptych.runtime.transfer.stream.receiver import ReceiverConnection, StreamReceiver
from diptych.runtime.transfer.stream.sender import Peer, SenderConnection
from diptych.runtime.transfer.stream.stream_connection import ConnectionLost, StreamConnection
from diptych.runtime.transfer.stream.transfer_state import RecvTransfer, SendTransfer

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LISTENER_PAUSE_NS = 200_000_000  # after accepting has failed for lack of resources


class StreamConnector:
    """See KVConnector. One protocol over TCP and unix sockets; ``bodies`` say how KV becomes bodies of frames."""

    def __init__(self, bodies: BodyFormats, kv_format: KVFormat, options: TransferOptions) -> None:
        self._format = kv_format
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

    def expect(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        """See KVConnector."""
        if attempt_id in self._receiver.transfers:
            raise ValueError(f"transfer {attempt_id} is expected already")
        if block_ids:
            self._check_blocks(attempt_id, block_ids, start + num_tokens)
        elif num_tokens:
            raise ValueError(f"transfer {attempt_id} has no blocks for its {num_tokens} tokens")
        self._receiver.transfers[attempt_id] = RecvTransfer(attempt_id, block_ids, start, num_tokens)

    def forget(self, attempt_id: str) -> None:
        """See KVConnector."""
        transfer = self._receiver.transfers.pop(attempt_id, None)
        if transfer is not None:
            transfer.is_silent = True
            transfer.close()
            self._notify(transfer)

    def open(self, attempt_id: str, address: str, start: int) -> None:
        """See KVConnector."""
        if attempt_id in self._sending:
            raise ValueError(f"transfer {attempt_id} is open already")
        if not 0 < len(attempt_id.encode()) <= MAX_ATTEMPT_ID_BYTES:
            raise ValueError(f"a transfer id of {len(attempt_id.encode())} bytes; 1 to {MAX_ATTEMPT_ID_BYTES}")
        transfer = SendTransfer(attempt_id, self._next_number, parse_address(address), start, self._format.num_layers)
        self._next_number += 1
        self._sending[attempt_id] = transfer
        self._notify(transfer)

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        """See KVConnector."""
        transfer = self._sending.get(attempt_id)
        if transfer is None or transfer.is_closed or not num_tokens:
            return
        if num_layers is not None and not 1 <= num_layers <= self._format.num_layers:
            raise ValueError(f"transfer {attempt_id}: {num_layers} layers are computed, of {self._format.num_layers}")
        if block_ids:
            self._check_blocks(attempt_id, block_ids, start + num_tokens)
        if transfer.queue_send(start, num_tokens, block_ids, num_layers or self._format.num_layers):
            self._notify(transfer)

    def commit(self, attempt_id: str, payload: bytes) -> None:
        """See KVConnector."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a commit of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
        transfer = self._sending.get(attempt_id)
        if transfer is not None:
            transfer.queue_commit(payload)
            self._notify(transfer)

    def cancel(self, attempt_id: str) -> None:
        """See KVConnector."""
        transfer = self._sending.pop(attempt_id, None)
        if transfer is not None:
            transfer.is_silent = True
            transfer.close()
            self._notify(transfer)

    def poll(self) -> list[ConnectorEvent]:
        """See KVConnector. Raises WorkerError when the connector's thread has died of a bug."""
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
        """See KVConnector."""
        return self._events.fileno()

    def close(self) -> None:
        """See KVConnector."""
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

    def _check_blocks(self, attempt_id: str, block_ids: Sequence[int], num_tokens: int) -> None:
        if len(block_ids) * self._format.block_size < num_tokens:
            raise ValueError(f"transfer {attempt_id}: {len(block_ids)} blocks do not hold {num_tokens} tokens")

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
