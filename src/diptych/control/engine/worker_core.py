"""WorkerCore: the worker's half of every protocol, around one EngineCore.

What the front end commands, what the KV connector reports and what the executor returns come in; events to report and
actions on transfers go out. The live worker (serving.worker) and the simulated one (simulation.fleet) drive the same
class: the first moves bytes, the second virtual time.

A turn of a worker is the same everywhere, and nothing else touches the core while a step runs:

    end_step(result)                what the executor computed
    on_transfer(event) ...          what the KV connector reports
    serve, prefill, reserve, handle what the front end commands
    end_turn()                      leases that have run out; the load, when a report of it is due
    begin_step()                    the next plan

After each of these the driver takes the outbox: it carries out ``before``, sends the report, carries out ``after``. So
a place for KV exists before its reservation is reported, transfers of an attempt stop before its end is reported, and
tokens leave before the KV that was computed with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.commands import AskKVSnapshot, Configure, Drop, ForgetPeer, Prefill, Release, Renew, Reserve, Send
from diptych.control.compute_share import ComputeShare
from diptych.control.engine.engine_core import NUM_DROPPED, EngineCore
from diptych.control.engine.kvcache.tier_changes import TierChanges
from diptych.control.engine.kvcache.tier_records import TierAction, TierEvent
from diptych.control.engine.outgoing import Outgoing, SendChunk
from diptych.control.engine.reports import LoadReport
from diptych.control.events import (
    Event,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestFinished,
    Resized,
    StepBegun,
    StepFinished,
    TransferFailed,
)
from diptych.control.request import BlockTables, Request
from diptych.control.slo import NS_PER_MS
from diptych.control.step import SchedulerOutput, StepResult

REPORT_INTERVAL_NS = 200 * NS_PER_MS  # a worker reports its load at most this often
_HANDOFFS = frozenset((HandoffReserved, HandoffDelivered, HandoffReleased, HandoffExpired, RequestFinished))
_KV = frozenset((KVEvents, KVSnapshot))
_NOT_NEWS = frozenset((StepBegun, StepFinished, KVEvents, KVSnapshot))


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """KV of an attempt will be sent to the worker ``target``, which has its first ``start`` tokens."""

    attempt_id: str
    target: int
    start: int


@dataclass(frozen=True, slots=True)
class ExpectTransfer:
    """KV of tokens [start, start + num_tokens) will come into ``block_tables`` (no tokens: only a commit will).
    first_blocks: by group, the index of the first block in its table: what lies before it does not come ((): 0)."""

    attempt_id: str
    block_tables: BlockTables
    start: int
    num_tokens: int
    first_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """Everything is sent and the first token is known. The times are this worker's."""

    attempt_id: str
    first_step_ns: int
    first_token_ns: int


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Send nothing more of this attempt."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class ForgetTransfer:
    """Take nothing more of this attempt: its blocks are no longer its own."""

    attempt_id: str


TransferAction = OpenTransfer | ExpectTransfer | SendChunk | CommitTransfer | CancelTransfer | ForgetTransfer


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """KV of an expected attempt comes in. num_tokens: how many of its tokens are here in all layers, so far."""

    attempt_id: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferCommitted:
    """All KV of an expected attempt is here. The times are the sender's, on this worker's clock; num_bytes,
    transfer_ns, wire_ns: see HandoffDelivered."""

    attempt_id: str
    first_step_ns: int
    first_token_ns: int
    num_bytes: int = 0
    transfer_ns: int = 0
    wire_ns: int = 0


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """A transfer cannot be completed, says the connector of its sender or of its receiver. That side does not touch its
    blocks any more; what came of it is of no use."""

    attempt_id: str
    is_sender: bool
    message: str


TransferEvent = ChunkArrived | TransferCommitted | TransferBroken


class Outbox:
    """What the driver is to do: ``before``, then send ``events`` and ``load`` as one report, then ``after``. tiers: for
    the driver of the tiers, in their own order."""

    __slots__ = ("after", "before", "events", "load", "tiers")

    def __init__(self) -> None:
        self.before: list[TransferAction] = []
        self.events: list[Event] = []
        self.load: LoadReport | None = None
        self.after: list[TransferAction] = []
        self.tiers: list[TierAction] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.before or self.events or self.after or self.tiers) and self.load is None


class WorkerCore:
    """One worker. publishes_kv: report the changes of the prefix cache and of the tiers below it, for a router.
    reports_load: report the load."""

    def __init__(self, engine: EngineCore, *, publishes_kv: bool = True, reports_load: bool = True) -> None:
        self.engine = engine
        self._publishes_kv = publishes_kv
        # A router knows tiers by chains of blocks.
        has_tiers = engine.kv.host.num_blocks > 0 and engine.kv.is_dense
        self._tier_changes = TierChanges(engine.kv) if publishes_kv and has_tiers else None
        self._reports_load = reports_load
        self._outgoing = Outgoing(engine.kv.layout)
        self._targets: dict[str, Prefill] = {}  # attempts that are prefilled here and not released yet
        self._first_scheduler = engine.config.scheduler
        self._early: dict[str, Send] = {}  # that came before their Prefill, or after its end; oldest first
        self._borrowed: dict[str, bool] = {}  # attempts to come -> whether another worker computes into our blocks
        self._outbox = Outbox()
        self._has_news = True  # since the last report of the load
        self._next_report_ns = 0

    # -- what the front end commands ----------------------------------------------------------------------------------

    def serve(self, request: Request, now: int) -> None:
        """Prefill and decode this request."""
        self._note(self.engine.add_request(request, now))

    def reserve(self, command: Reserve, request: Request, now: int) -> None:
        """Hold blocks for an attempt that another worker prefills."""
        self._borrowed[command.attempt_id] = request.is_remote_prefill = command.borrowed
        self._note(self.engine.reserve(request, now, command.lease_ns))

    def prefill(self, command: Prefill, request: Request, now: int) -> None:
        """Prefill an attempt for another worker."""
        attempt_id = command.attempt_id
        request.hands_off, request.is_early_prefill = True, command.is_early_prefill
        request.lease_ns = command.lease_ns
        if command.borrowed:
            request.remote_block_tables = command.block_tables
            request.num_remote_tokens = command.num_cached_tokens
        self._note(self.engine.add_request(request, now))
        # Else it was refused, or a Drop came first.
        if attempt_id in self.engine.requests:
            self._targets[attempt_id] = command
            if not command.is_early_prefill:
                start = request.num_prompt_tokens if command.borrowed else command.num_cached_tokens
                self._open(command, request, start)
            elif send := self._early.pop(attempt_id, None):
                self._send(send, now)

    def handle(self, command: Send | Release | Drop | Renew | AskKVSnapshot | ForgetPeer | Configure, now: int) -> None:
        """A command that needs no tokens."""
        self._has_news = True
        match command:
            case Send():
                self._send(command, now)
            case Release():
                self._note(self.engine.release(command.attempt_id, now))
            case Drop():
                self._note(self.engine.drop(command.attempt_id, now, command.reason))
            case Renew():
                self.engine.renew(command.attempt_ids, now)
            case AskKVSnapshot():
                self._note_snapshots(now)
            case ForgetPeer():
                self._forget_peer(command.peer, now)
            case Configure():
                self.engine.configure(command.scheduler)

    def drop_all(self, now: int) -> None:
        """End every attempt: no front end wants them any more. Settings are those of the start again."""
        for attempt_id in list(self.engine.requests):
            self._note(self.engine.drop(attempt_id, now))
        self._early.clear()
        self.engine.configure(self._first_scheduler)

    def introduce(self, now: int) -> None:
        """Report to a front end that knows nothing of this worker: what is cached, and the load."""
        self._note_snapshots(now)
        self._has_news, self._next_report_ns = True, now

    def on_resized(self, share: ComputeShare, ratio: float, now: int, message: str = "") -> None:
        """The worker computes on ``share`` from the next step on, where steps should take ``ratio`` times as long.
        message: why it is not the share that was ordered."""
        if ratio != 1.0:
            self.engine.rescale(ratio)
        self._note([Resized(now, share, message)])

    def is_held_back(self, attempt_id: str) -> bool:
        """Whether no token of the attempt may be given yet."""
        request = self.engine.requests.get(attempt_id)
        return request is not None and request.is_early_prefill

    def note(self, events: Sequence[Event]) -> None:
        """Events that the driver found itself: those of a call that it made to the engine (a request that the executor
        refused), or that a long step has begun."""
        self._note(events)

    # -- what the KV connector reports --------------------------------------------------------------------------------

    def on_transfer(self, event: TransferEvent, now: int) -> bool:
        """Take in an event of a transfer. Returns whether an attempt was taken over with it."""
        match event:
            case ChunkArrived():
                self.engine.renew((event.attempt_id,), now)
            case TransferBroken():
                self._outgoing.drop(event.attempt_id)
                self._note([TransferFailed(now, event.attempt_id, event.is_sender, event.message)])
            case TransferCommitted():
                events = self.engine.deliver(
                    event.attempt_id,
                    now,
                    first_step_ns=event.first_step_ns,
                    first_token_ns=event.first_token_ns,
                    num_bytes=event.num_bytes,
                    transfer_ns=event.transfer_ns,
                    wire_ns=event.wire_ns,
                )
                self._note(events)
                return bool(events)
        return False

    def on_tier(self, event: TierEvent, now: int) -> None:
        """The driver of the tiers reports what became of an action, or of the disk."""
        self._has_news = True
        self.engine.on_tier(event, now)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, now: int) -> SchedulerOutput | None:
        """The plan of the next step, or None."""
        output = self.engine.begin_step(now)
        if events := self.engine.take_events():
            self._note(events)
        return output

    def chunks_of(self, output: SchedulerOutput) -> list[SendChunk]:
        """What ``end_step`` will send of this step: its layers may be sent while the others are computed."""
        return self._outgoing.in_step(output.prefills) if len(self._outgoing) else []

    def end_step(
        self,
        output: SchedulerOutput,
        result: StepResult,
        now: int,
        *,
        num_steps: int = 1,
        last_start_ns: int | None = None,
    ) -> None:
        """Take in what the executor computed (see EngineCore.end_step), and send its KV to where it is wanted."""
        events = self.engine.end_step(result, now, num_steps=num_steps, last_start_ns=last_start_ns)
        self._note(events)
        if not len(self._outgoing) or not num_steps or result.is_out_of_memory:
            return
        for chunk in self._outgoing.on_step(output.prefills):
            self._post(chunk)

    def end_turn(self, now: int) -> None:
        """The turn's inputs are handled: give up leases that were not renewed, and report the load when that is due.
        The load covers all events up to this report."""
        expiry_ns = self.engine.next_expiry_ns
        if expiry_ns is not None and expiry_ns <= now:
            self._note(self.engine.expire(now))
        if self._reports_load and self._has_news and now >= self._next_report_ns:
            self._outbox.load = self.engine.load(now)
            self._has_news = False
            self._next_report_ns = now + REPORT_INTERVAL_NS
        changes = self._tier_changes
        if changes is not None and changes.has_more:
            self._outbox.events += changes.take(now)
            self._has_news |= changes.has_more

    @property
    def next_wake_ns(self) -> int | None:
        """When a turn is due if nothing comes: a lease runs out, or the load is to be reported. None: never."""
        expiry_ns = self.engine.next_expiry_ns
        if not (self._reports_load and self._has_news):
            return expiry_ns
        return self._next_report_ns if expiry_ns is None else min(expiry_ns, self._next_report_ns)

    def take_outbox(self) -> Outbox:
        """What is to be done since the last call."""
        outbox, self._outbox = self._outbox, Outbox()
        outbox.tiers = self.engine.kv.tiers.take_actions()
        return outbox

    @property
    def has_output(self) -> bool:
        """Whether ``take_outbox`` would return anything to be done."""
        return not self._outbox.is_empty or bool(self.engine.kv.tiers.actions)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any attempt (for tests)."""
        return not (len(self._outgoing) or self._targets or self._borrowed or self.engine.has_work)

    # -- what follows from events -------------------------------------------------------------------------------------

    def _note(self, events: Sequence[Event]) -> None:
        reported = self._outbox.events
        for event in events:
            kind = type(event)
            if kind not in _NOT_NEWS:
                self._has_news = True
                if kind in _HANDOFFS:
                    self._follow(event)
            elif kind in _KV and not self._publishes_kv:
                continue
            reported.append(event)

    def _note_snapshots(self, now: int) -> None:
        """All that is cached, tier by tier."""
        self._note(self.engine.kv_snapshot(now))
        if self._tier_changes is not None:
            self._note(self._tier_changes.snapshot(now))

    def _follow(self, event: Event) -> None:
        """An attempt moves on: what its transfer needs."""
        if isinstance(event, HandoffReserved):
            self._expect(event)
        elif isinstance(event, HandoffDelivered):
            self._borrowed.pop(event.request_id, None)
        elif isinstance(event, RequestFinished | HandoffReleased | HandoffExpired):
            self._let_go(event.request_id)

    def _open(self, prefill: Prefill, request: Request, start: int) -> None:
        """Begin to send: the target has its blocks, and the first ``start`` tokens."""
        attempt_id = prefill.attempt_id
        self._outgoing.begin(attempt_id, start, request.num_prompt_tokens, is_borrowed=prefill.borrowed)
        self._outbox.before.append(OpenTransfer(attempt_id, prefill.target, start))

    def _send(self, command: Send, now: int) -> None:
        """The target of an attempt that is computed ahead has blocks: send what is computed already, and give the first
        token if it is known. Messages may come twice, and in another order."""
        attempt_id = command.attempt_id
        prefill, request = self._targets.get(attempt_id), self.engine.requests.get(attempt_id)
        if prefill is None or request is None:
            self._early[attempt_id] = command
            if len(self._early) > NUM_DROPPED:
                del self._early[next(iter(self._early))]
            return
        if not request.is_early_prefill:
            return
        events = self.engine.place_found(attempt_id, now)
        self._open(prefill, request, command.num_cached_tokens)
        computed = request.num_computed_tokens
        chunk = self._outgoing.catch_up(attempt_id, computed, request.tables, request.first_blocks)
        if chunk is not None:
            self._post(chunk)
        self._note(events)

    def _post(self, chunk: SendChunk) -> None:
        """Send this chunk, and the commit after the last one."""
        if chunk.num_tokens:
            self._outbox.after.append(chunk)
        if chunk.is_last:
            request = self.engine.requests[chunk.attempt_id]
            assert request.first_step_ns is not None and request.first_token_ns is not None
            commit = CommitTransfer(chunk.attempt_id, request.first_step_ns, request.first_token_ns)
            self._outbox.after.append(commit)

    def _expect(self, event: HandoffReserved) -> None:
        attempt_id = event.request_id
        request = self.engine.requests[attempt_id]
        num_tokens = request.num_prompt_tokens
        if self._borrowed[attempt_id]:
            self._outbox.before.append(ExpectTransfer(attempt_id, (), num_tokens, 0))
        else:
            start = event.num_cached_tokens
            expected = ExpectTransfer(attempt_id, event.block_tables, start, num_tokens - start, request.first_blocks)
            self._outbox.before.append(expected)

    def _let_go(self, attempt_id: str) -> None:
        if self._targets.pop(attempt_id, None) is not None:
            self._outgoing.drop(attempt_id)
            self._outbox.after = [action for action in self._outbox.after if action.attempt_id != attempt_id]
            self._outbox.before.append(CancelTransfer(attempt_id))
        if self._borrowed.pop(attempt_id, None) is not None:
            self._outbox.before.append(ForgetTransfer(attempt_id))

    def _forget_peer(self, peer: int, now: int) -> None:
        """End the attempts that are computed into that worker's blocks: afterwards nothing here touches them."""
        for attempt_id in [at for at, prefill in self._targets.items() if prefill.borrowed and prefill.target == peer]:
            self._note(self.engine.drop(attempt_id, now))
        self._note([PeerForgotten(now, peer)])
