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

from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import ChunkArrived, Committed, Failed, Sent, TransferEvent

BYTES_PER_TOKEN = 8


@dataclass
class Receiving:
    """A leg that is expected: KV up to ``num_here`` of ``num_tokens``."""

    num_here: int
    num_tokens: int
    start: int
    first_ns: int = 0


@dataclass
class Sending:
    """A leg on its way. ``num_layers``: computed so far of the tokens up to ``end`` (0: all tokens have all layers)."""

    path: str
    start: int
    num_sent: int
    end: int = 0
    num_layers: int = 0
    first_ns: int = 0
    commit_ns: int = 0


class FakeConnector:
    """See diptych.runtime.transfer.connector.KVConnector. The address is unix://PATH."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._path)
        self._receiving: dict[str, Receiving] = {}
        self._sending: dict[str, Sending] = {}
        self._early: dict[str, list[tuple[Any, ...]]] = {}  # what came before its leg was expected
        self._backlog: deque[tuple[str, str, bytes]] = deque()
        self._events: list[TransferEvent] = []
        self.forgotten: list[str] = []
        self.cancelled: list[str] = []
        self.layers: list[tuple[str, int]] = []  # what was sent of steps under way: leg, number of layers

    def expect(self, leg_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        """Receiver: this will come."""
        assert leg_id not in self._receiving, leg_id
        assert not num_tokens or block_ids, "no blocks for the tokens that will come"
        self._receiving[leg_id] = Receiving(start, start + num_tokens, start)
        for message in self._early.pop(leg_id, []):
            self._take(message)

    def forget(self, leg_id: str) -> None:
        """Receiver: it will not."""
        self.forgotten.append(leg_id)
        self._receiving.pop(leg_id, None)
        self._events = [event for event in self._events if event.leg_id != leg_id or isinstance(event, Sent)]

    def open(self, leg_id: str, address: str, start: int) -> None:
        """Sender: a handoff begins."""
        assert leg_id not in self._sending, leg_id
        if not address.startswith("unix://"):
            raise ConfigError(f"address is {address!r}; expected unix://PATH", param="address")
        self._sending[leg_id] = Sending(address.removeprefix("unix://"), start, start)

    def send(
        self, leg_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        """Sender: these tokens, in these blocks; the other side hears of them when all layers are there."""
        if (leg := self._sending.get(leg_id)) is None:
            return
        assert start <= leg.num_sent, f"{leg_id}: nobody sends tokens {leg.num_sent} to {start}"
        assert not leg.commit_ns
        assert leg.end in (0, start + num_tokens), f"{leg_id}: tokens up to {leg.end} lack layers"
        if num_layers is not None:
            assert leg.num_layers < num_layers, f"{leg_id}: layer {num_layers} after {leg.num_layers}"
            leg.end, leg.num_layers = start + num_tokens, num_layers
            self.layers.append((leg_id, num_layers))
            return
        leg.end = leg.num_layers = 0
        leg.num_sent = start + num_tokens
        leg.first_ns = leg.first_ns or time.monotonic_ns()
        self._tell(leg.path, leg_id, ("chunk", leg_id, start, num_tokens))

    def commit(self, leg_id: str, payload: bytes) -> None:
        """Sender: that was all."""
        if (leg := self._sending.get(leg_id)) is None:
            return
        assert not leg.commit_ns, f"{leg_id} is committed twice"
        assert not leg.end, f"{leg_id} is committed and lacks layers"
        leg.commit_ns = time.monotonic_ns()
        self._tell(leg.path, leg_id, ("commit", leg_id, payload, self._path))

    def cancel(self, leg_id: str) -> None:
        """Sender: no more of it."""
        self.cancelled.append(leg_id)
        self._sending.pop(leg_id, None)

    def poll(self) -> list[TransferEvent]:
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

    def _tell(self, path: str, leg_id: str, message: tuple[Any, ...]) -> None:
        data = msgspec.msgpack.encode(message)
        if self._backlog or not self._put(path, leg_id, data):
            self._backlog.append((path, leg_id, data))

    def _put(self, path: str, leg_id: str, data: bytes) -> bool:
        try:
            self._socket.sendto(data, path)
        except BlockingIOError:
            return False
        except OSError as error:
            if self._sending.pop(leg_id, None):
                self._events.append(Failed(leg_id, True, f"cannot reach {path}: {error.strerror}"))
        return True

    def _take(self, message: tuple[Any, ...]) -> None:
        now, kind, leg_id = time.monotonic_ns(), message[0], message[1]
        if kind == "ack":
            if leg := self._sending.pop(leg_id, None):
                self._events.append(Sent(leg_id, 0, leg.first_ns or leg.commit_ns, leg.commit_ns, now))
            return
        leg = self._receiving.get(leg_id)
        if leg is None:
            if leg_id not in self.forgotten:
                self._early.setdefault(leg_id, []).append(message)
            return
        leg.first_ns = leg.first_ns or now
        if kind == "chunk":
            _, _, start, num_tokens = message
            assert start <= leg.num_here, f"{leg_id}: tokens {leg.num_here} to {start} never came"
            leg.num_here = max(leg.num_here, start + num_tokens)
            self._events.append(ChunkArrived(leg_id, leg.num_here))
            return
        _, _, payload, sender = message
        assert leg.num_here == leg.num_tokens, f"{leg_id}: {leg.num_here} of {leg.num_tokens} tokens are here"
        del self._receiving[leg_id]
        num_bytes = BYTES_PER_TOKEN * (leg.num_tokens - leg.start)
        self._events.append(Committed(leg_id, payload, num_bytes, leg.first_ns, now))
        self._tell(sender, leg_id, ("ack", leg_id))
