"""Carries out what ClusterCore wants done: events in, commands as messages to workers or as words to the streams.

Owns the ClusterCore of a live front end, the order of its events, and its ticks. Must never decide anything, nor know
processes: messages go to ``send(worker, message)``.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from diptych.control.cluster import commands
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Cancelled, ClusterEvent, Tick
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S
from diptych.serving.answers.output_streams import OutputStreams
from diptych.serving.fleet.membership import Membership
from diptych.serving.link import messages as wire

Send = Callable[[int, wire.FrontendMessage], None]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request whose stop string was found: cancelled for the cluster, a good end for its worker and the metrics."""

    request_id: str
    attempt_id: str


class ClusterDriver:
    """One ClusterCore among real workers. All calls come from one event loop."""

    def __init__(self, core: ClusterCore, streams: OutputStreams, members: Membership, send: Send) -> None:
        self.core = core
        self.last_words: dict[
            str, wire.Finished
        ] = {}  # of the record in hand: what a worker said of attempts that ended
        self._streams = streams
        self._members = members
        self._send = send
        self._pending: deque[ClusterEvent | Stopped] = deque()
        self._is_busy = False
        self._outbox: list[list[wire.FrontendMessage]] = [[] for _ in members.roles]
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._carriers: dict[type, Callable[[Any], None]] = {
            commands.Serve: self._serve,
            commands.Reserve: self._reserve,
            commands.Prefill: self._prefill,
            commands.Release: lambda one: self._post(one.worker, wire.ReleaseAttempts([one.attempt_id])),
            commands.Drop: lambda one: self._post(one.worker, wire.DropAttempts([one.attempt_id])),
            commands.Renew: lambda one: self._post(one.worker, wire.RenewAttempts(list(one.attempt_ids))),
            commands.AskSnapshot: lambda one: self._post(one.worker, wire.AskBlocks()),
            commands.Restarted: lambda one: streams.on_restarted(one.request_id, one.attempt_id),
            commands.End: self._end,
        }

    def tell(self, *happened: ClusterEvent | Stopped) -> None:
        """These happened, in this order; what happens while they are dealt with waits for its turn."""
        self._pending.extend(happened)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._pending:
                event = self._pending.popleft()
                if isinstance(event, Stopped):
                    self._stop_attempt(event)
                else:
                    self._carry_out(self.core.on_event(event, time.monotonic_ns()))
        finally:
            self._is_busy = False
            self._flush()
        self._set_timer()

    def close(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, todo: Iterable[commands.Command]) -> None:
        for command in todo:
            self._carriers[type(command)](command)

    def _stop_attempt(self, stop: Stopped) -> None:
        """As a Cancelled, but the workers are told that the end is a good one."""
        is_awaited = False
        for command in self.core.on_event(Cancelled(stop.request_id), time.monotonic_ns()):
            if isinstance(command, commands.Drop) and command.attempt_id == stop.attempt_id:
                is_awaited = True
                self._post(command.worker, wire.Abort([stop.attempt_id], FinishReason.STOP))
            self._carry_out([command])
        if not is_awaited:
            self._streams.on_gone(stop.attempt_id)

    def _set_timer(self) -> None:
        due_ns = self.core.next_time()
        if due_ns == self._timer_ns:
            return
        self._timer_ns = due_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - time.monotonic_ns()) / NS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_ns = None
        self.tell(Tick())

    def _serve(self, command: commands.Serve) -> None:
        request = self._streams.wire_request(command.request_id, command.attempt_id)
        if request is None:  # its client left; the Cancelled waits for its turn
            return
        self._streams.on_placed(command.request_id, command.attempt_id, command.worker)
        messages = self._outbox[command.worker]
        last = messages[-1] if messages else None
        if isinstance(last, wire.Submit):
            last.requests.append(request)
        else:
            messages.append(wire.Submit([request]))

    def _reserve(self, command: commands.Reserve) -> None:
        request = self._streams.wire_request(command.request_id, command.attempt_id)
        if request is not None:
            self._post(command.worker, wire.ReserveAttempt(request, command.lease_ns, command.borrowed))

    def _prefill(self, command: commands.Prefill) -> None:
        request = self._streams.wire_request(command.request_id, command.attempt_id)
        target = self._members.known[command.target]
        if request is None or target is None:
            return
        self._streams.on_placed(command.request_id, command.attempt_id, command.worker)
        num_cached, block_ids = command.num_cached_tokens, list(command.block_ids)
        message = wire.PrefillAttempt(request, target.address, num_cached, block_ids, command.lease_ns, command.target)
        self._post(command.worker, message)

    def _end(self, command: commands.End) -> None:
        finished, last_word = command.finished, None
        if finished is not None:
            last_word = self.last_words.get(finished.request_id) or wire.pack_finished(finished)
        self._streams.on_end(command.request_id, last_word, command.error)

    def _post(self, worker: int, message: wire.FrontendMessage) -> None:
        self._outbox[worker].append(message)

    def _flush(self) -> None:
        for worker, messages in enumerate(self._outbox):
            if messages:
                self._outbox[worker] = []
                for message in messages:
                    self._send(worker, message)
