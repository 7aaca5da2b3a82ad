"""A KVConnector that moves no KV: it tells the other side what would have come, and checks that it all would have.

One datagram a message over a unix socket. Raises AssertionError for what a caller must never do.
"""

import contextlib
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import Committed, ConnectorEvent, Sent

BYTES_PER_TOKEN = 8


@dataclass
class Receiving:
    """An attempt that is expected: KV up to ``num_here`` of ``num_tokens``."""

    num_here: int
    num_tokens: int
    start: int
    first_ns: int = 0


@dataclass
class Sending:
    """An attempt on its way. ``num_layers``: computed so far of the tokens up to ``end`` (0: all tokens have all
    layers)."""

    path: str
    start: int
    num_sent: int
    end: int = 0
    num_layers: int = 0
    first_ns: int = 0
    commit_ns: int = 0


class FakeConnector:
    """A KVConnector that needs no torch. The address is unix://PATH."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._path)
        self._receiving: dict[str, Receiving] = {}
        self._sending: dict[str, Sending] = {}
        self._early: dict[str, list[tuple[Any, ...]]] = {}  # what came before its attempt was expected
        self._backlog: deque[tuple[str, str, bytes]] = deque()
        self._events: list[ConnectorEvent] = []
        self.forgotten: list[str] = []
        self.cancelled: list[str] = []
        self.layers: list[tuple[str, int]] = []  # what was sent of steps under way: attempt, number of layers

    def expect(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        """Receiver: this will come."""
        assert attempt_id not in self._receiving, attempt_id
        assert not num_tokens or block_ids, "no blocks for the tokens that will come"
        self._receiving[attempt_id] = Receiving(start, start + num_tokens, start)
        for message in self._early.pop(attempt_id, []):
            self._take(message)

    def forget(self, attempt_id: str) -> None:
        """Receiver: it will not."""
        self.forgotten.append(attempt_id)
        self._receiving.pop(attempt_id, None)
        self._events = [event for event in self._events if event.attempt_id != attempt_id or isinstance(event, Sent)]

    def open(self, attempt_id: str, address: str, start: int) -> None:
        """Sender: a handoff begins."""
        assert attempt_id not in self._sending, attempt_id
        if not address.startswith("unix://"):
            raise ConfigError(f"address is {address!r}; expected unix://PATH", param="address")
        self._sending[attempt_id] = Sending(address.removeprefix("unix://"), start, start)

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        """Sender: these tokens, in these blocks; the other side hears of them when all layers are there."""
        if (attempt := self._sending.get(attempt_id)) is None:
            return
        assert start <= attempt.num_sent, f"{attempt_id}: nobody sends tokens {attempt.num_sent} to {start}"
        assert not attempt.commit_ns
        assert attempt.end in (0, start + num_tokens), f"{attempt_id}: tokens up to {attempt.end} lack layers"
        if num_layers is not None:
            assert attempt.num_layers < num_layers, f"{attempt_id}: layer {num_layers} after {attempt.num_layers}"
            attempt.end, attempt.num_layers = start + num_tokens, num_layers
            self.layers.append((attempt_id, num_layers))
            return
        attempt.end = attempt.num_layers = 0
        attempt.num_sent = start + num_tokens
        attempt.first_ns = attempt.first_ns or time.monotonic_ns()
        self._tell(attempt.path, attempt_id, ("chunk", attempt_id, start, num_tokens))

    def commit(self, attempt_id: str, payload: bytes) -> None:
        """Sender: that was all."""
        if (attempt := self._sending.get(attempt_id)) is None:
            return
        assert not attempt.commit_ns, f"{attempt_id} is committed twice"
        assert not attempt.end, f"{attempt_id} is committed and lacks layers"
        attempt.commit_ns = time.monotonic_ns()
        self._tell(attempt.path, attempt_id, ("commit", attempt_id, payload, self._path))

    def cancel(self, attempt_id: str) -> None:
        """Sender: no more of it."""
        self.cancelled.append(attempt_id)
        self._sending.pop(attempt_id, None)

    def poll(self) -> list[ConnectorEvent]:
        """What has happened."""
        while self._backlog:
            if not self._put(*self._backlog[0]):
                break
            self._backlog.popleft()
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(tuple(msgspec.msgpack.decode(self._socket.recv(1 << 17))))
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        """Readable when something came."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop."""
        self._socket.close()

    def _tell(self, path: str, attempt_id: str, message: tuple[Any, ...]) -> None:
        data = msgspec.msgpack.encode(message)
        if self._backlog or not self._put(path, attempt_id, data):
            self._backlog.append((path, attempt_id, data))

    def _put(self, path: str, attempt_id: str, data: bytes) -> bool:
        try:
            self._socket.sendto(data, path)
        except BlockingIOError:
            return False
        except OSError as error:
            if self._sending.pop(attempt_id, None):
                self._events.append(TransferBroken(attempt_id, True, f"cannot reach {path}: {error.strerror}"))
        return True

    def _take(self, message: tuple[Any, ...]) -> None:
        now, kind, attempt_id = time.monotonic_ns(), message[0], message[1]
        if kind == "ack":
            if attempt := self._sending.pop(attempt_id, None):
                self._events.append(Sent(attempt_id, 0, attempt.first_ns or attempt.commit_ns, attempt.commit_ns, now))
            return
        attempt = self._receiving.get(attempt_id)
        if attempt is None:
            if attempt_id not in self.forgotten:
                self._early.setdefault(attempt_id, []).append(message)
            return
        attempt.first_ns = attempt.first_ns or now
        if kind == "chunk":
            _, _, start, num_tokens = message
            assert start <= attempt.num_here, f"{attempt_id}: tokens {attempt.num_here} to {start} never came"
            attempt.num_here = max(attempt.num_here, start + num_tokens)
            self._events.append(ChunkArrived(attempt_id, attempt.num_here))
            return
        _, _, payload, sender = message
        assert attempt.num_here == attempt.num_tokens, (
            f"{attempt_id}: {attempt.num_here} of {attempt.num_tokens} tokens are here"
        )
        del self._receiving[attempt_id]
        num_bytes = BYTES_PER_TOKEN * (attempt.num_tokens - attempt.start)
        self._events.append(Committed(attempt_id, payload, num_bytes, attempt.first_ns, now))
        self._tell(sender, attempt_id, ("ack", attempt_id))
