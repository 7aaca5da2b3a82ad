"""The two ends of a transfer: what its receiver knows of it, and what its sender does.

The worker's thread and the connector's thread both hold a transfer. Its blocks are behind a fence (fence.py); any other
field is written by one of the two threads, the connector's where nothing else is said.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from diptych.runtime.transfer.stream.addresses import SocketAddress
from diptych.runtime.transfer.stream.body_format import BodyFormat, Part
from diptych.runtime.transfer.stream.fence import Fence
from diptych.runtime.transfer.stream.frames import LAST_OF_CHUNK, Frame, OutgoingFrame, ProtocolError


class KVTransfer:
    """What both ends have. ``start``: the first token that travels."""

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

    def __init__(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        super().__init__(attempt_id, start)
        self.block_ids = tuple(block_ids)
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
        if self.end == self.start and not self.block_ids:
            return  # borrowed: no KV comes
        inside = self.start <= part.start and part.start + part.num_tokens <= self.end
        if not inside or not part.num_tokens or not 1 <= part.num_layers <= num_layers - part.first_layer:
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
        return -(-((self.end - self.start) * num_layers - self._cells) // num_layers) if self.block_ids else 0


@dataclass(eq=False, slots=True)
class _Send:
    """Tokens that were queued together. They may be queued while they are computed, layer by layer.

    The worker's thread writes ``num_layers`` and then reads ``awaited``; the connector's does it the other way round.
    So one of them sees what the other has written, and no part waits for a notice that was never given.
    """

    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
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

    def __init__(self, attempt_id: str, number: int, address: SocketAddress, start: int, num_layers: int) -> None:
        super().__init__(attempt_id, start)
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

    def queue_send(self, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int) -> bool:
        """Worker's thread. Whether the connector's thread has to be notified. Raises ValueError for a gap, for other
        tokens while some lack layers, and after the commit."""
        if self._unfinished is not None:
            return self._queue_layers(self._unfinished, start + num_tokens, num_layers)
        skipped = max(0, self.queued_until - start)
        if start > self.queued_until:
            raise ValueError(f"transfer {self.attempt_id}: tokens {self.queued_until} to {start} were never sent")
        if skipped >= num_tokens:
            return False
        if self._payload is not None:
            raise ValueError(f"transfer {self.attempt_id}: KV after its commit")
        self.queued_until = start + num_tokens
        send = _Send(start + skipped, num_tokens - skipped, tuple(block_ids), num_layers, self._num_layers)
        self._unfinished = send if num_layers < self._num_layers else None
        self._sends.append(send)
        return True

    def _queue_layers(self, send: _Send, end: int, num_layers: int) -> bool:
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

        ``choose``: how so many tokens travel. A part that is sent again travels as it did the first time.
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
        """See KVTransfer. The rest of a frame that is half sent becomes a copy of what the blocks hold now."""
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
            self._cutting = body_format.parts(send.start, send.num_tokens), body_format, send
        parts, body_format, send = self._cutting
        part = self._next = self._next or next(parts)
        send.awaited = part.first_layer + part.num_layers
        if not send.has(part):
            return None
        send.awaited = self._num_layers
        self._next = None
        if part.is_last:
            self._cutting = None
        return part, body_format, send.block_ids
