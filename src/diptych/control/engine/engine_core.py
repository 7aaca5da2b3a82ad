"""EngineCore: one worker's decisions, from the arrival of a request to its one terminal event.

A state machine without a clock: every call takes the time and returns what happened or what is to be done. The
driver's whole job is to call ``begin_step``, let an executor run the plan, and hand the result to ``end_step``.
"""

from collections.abc import Iterable

from diptych.control.config import EngineConfig, SchedulerConfig
from diptych.control.engine.engine_audit import STEPS_BETWEEN, check_idle, check_step
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.tier_records import TierEvent
from diptych.control.engine.leases import Leases
from diptych.control.engine.reports import EngineStats, LoadReport, engine_stats, load_report
from diptych.control.engine.scheduler.incoming import reservation
from diptych.control.engine.scheduler.scheduler import Scheduler
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.errors import (
    BrokenInvariantError,
    ConfigError,
    ContextLengthError,
    DiptychError,
    ErrorRecord,
    GrammarLimitError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    StepMemoryError,
    WorkerError,
)
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    KVEvents,
    KVSnapshot,
    RequestFinished,
    RequestQueued,
    StepFinished,
)
from diptych.control.request import FinishReason, Request, RequestOptions, WaitClass
from diptych.control.slo import Slo, breakdown_from_times, objectives
from diptych.control.step import SchedulerOutput, StepFeatures, StepResult

NUM_DROPPED = 4096  # dropped attempts that are remembered, lest they come later


class EngineCore:
    """One worker. All requests live here from ``add_request`` to their RequestFinished event."""

    def __init__(self, config: EngineConfig, model: StepTimeModel | None = None) -> None:
        self.config = config
        self.kv = KVCacheManager(config.cache)
        self.model = model or StepTimeModel(experts=config.experts)
        self.scheduler = Scheduler(config, self.kv, self.model)
        self.requests: dict[str, Request] = {}
        self.leases = Leases()
        self._dropped: dict[str, None] = {}  # oldest first
        self._plan: SchedulerOutput | None = None  # between begin_step and end_step
        self._plan_ahead: SchedulerOutput | None = None  # of the step that follows it
        self._begun_ns = 0
        self._finished_ids: list[str] = []  # ended since the last plan: the next one says so to the executor
        self._num_arrivals = 0
        self._num_steps = 0
        self._pending_events: list[Event] = []
        self._num_kv_events = 0
        self._first_scheduler = config.scheduler  # what the executor was made for
        self._shrinks_to = 0  # blocks; 0: the executor knows how many there are
        self._audit_at = 0  # the step after which the counts are compared; 0: nothing has happened since they were

    def add_request(self, request: Request, now: int) -> list[Event]:
        """Queue a request, or refuse it with its terminal event (the executor then never gets it).

        Raises ConfigError for an id that is in use: that is the caller's mistake. One that was dropped before it came
        is answered with HandoffReleased."""
        if request.request_id in self._dropped:
            return [HandoffReleased(now, request.request_id)]
        if refused := self._enter(request, now):
            return refused
        self.scheduler.add(request, now)
        return [RequestQueued(now, request.request_id, request.num_prompt_tokens, request.options)]

    def check_request(self, request: Request) -> None:
        """Raise the error with which ``add_request`` would refuse this request now."""
        if error := self._refusal(request):
            raise error

    def abort(
        self,
        request_id: str,
        now: int,
        reason: FinishReason = FinishReason.ABORT,
        error: ErrorRecord | None = None,
    ) -> list[Event]:
        """End a request wherever it is; its blocks are free for the next step. Unknown ids are ignored (a request
        may end on its own while the abort is on its way)."""
        request = self.requests.get(request_id)
        return [self._finish(request, reason, now, error)] if request else []

    def reserve(self, request: Request, now: int, lease_ns: int = 0) -> list[Event]:
        """Hold blocks for a prompt that another worker will compute; HandoffReserved says when they are there.

        Refused like ``add_request``; ``drop`` and ``abort`` give them back, and so does ``expire`` when they are not
        renewed for ``lease_ns`` (0: never). ``deliver`` starts the decode.
        """
        if request.request_id in self._dropped:
            return [HandoffReleased(now, request.request_id)]
        request.awaits_kv = True
        if refused := self._enter(request, now):
            return refused
        self.scheduler.reserve(request, now)
        self.leases.grant(request.request_id, lease_ns, now)
        return []

    def renew(self, attempt_ids: Iterable[str], now: int) -> None:
        """These attempts are still wanted: their leases begin again."""
        self.leases.renew(attempt_ids, now)

    def deliver(
        self,
        request_id: str,
        now: int,
        *,
        first_step_ns: int,
        first_token_ns: int,
        num_bytes: int = 0,
        transfer_ns: int = 0,
        wire_ns: int = 0,
    ) -> list[Event]:
        """The KV of the whole prompt lies in the reserved blocks and the first token is known: decode from the next
        plan on. The times are those of the prefill worker, on this worker's clock. An id that is not reserved is
        ignored (it may have been aborted meanwhile). num_bytes, transfer_ns, wire_ns: see HandoffDelivered."""
        request = self.scheduler.incoming.reserved.get(request_id)
        if request is None:
            return []
        self.leases.end(request_id)
        request.first_step_ns, request.first_token_ns = first_step_ns, first_token_ns
        self.kv.take_back_lent(request)
        self.kv.remember_computed(request, request.num_prompt_tokens)
        self.scheduler.incoming.deliver(request)
        events: list[Event] = [HandoffDelivered(now, request_id, num_bytes, transfer_ns, wire_ns)]
        if request.num_output_tokens >= request.max_tokens:  # the context is longer where its prompt was computed
            events.append(self._finish(request, FinishReason.LENGTH, now))
        return events

    def place_found(self, request_id: str, now: int) -> list[Event]:
        """The worker that will decode a prompt which is computed here ahead has blocks for it: its first token may be
        given, if it is known."""
        request = self.requests[request_id]
        request.is_early_prefill = False
        self.scheduler.place_found(request)
        if not request.is_handed_off:
            return []
        request.first_token_ns = now
        return [FirstToken(now, request_id)]

    def release(self, request_id: str, now: int) -> list[Event]:
        """Another worker has taken over a prompt that was prefilled here: give up its blocks. Unknown ids are answered
        too; one whose prefill is not over is left alone."""
        request = self.requests.get(request_id)
        if request is not None:
            if not request.is_handed_off:
                return []
            self._forget(request)
        return [HandoffReleased(now, request_id)]

    def drop(self, request_id: str, now: int, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End an attempt wherever it is, and refuse it should it come later. Answered by RequestFinished when it was
        running here, else by HandoffReleased."""
        self._dropped[request_id] = None
        if len(self._dropped) > NUM_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        request = self.requests.get(request_id)
        if request is None or request.is_handed_off:
            return self.release(request_id, now)
        return [self._finish(request, reason, now)]

    def kv_snapshot(self, now: int) -> list[Event]:
        """All that the prefix cache holds; first the changes that were not said yet, so that it follows from them."""
        known = tuple(self.kv.pool.prefix_cache if self.kv.is_dense else self.kv.boundaries)
        snapshot = KVSnapshot(now, self._num_kv_events + self.kv.pool.has_changes, known)
        return [*self._kv_events(now), snapshot]

    def expire(self, now: int) -> list[Event]:
        """Give up the attempts whose leases have run out: reservations whose KV never came, and blocks that no
        worker took over. Compute the prompts whose loads from disk have taken as long as that."""
        for request in self.kv.tiers.expire(now):
            self.scheduler.add_computed(request)
        expired = [self.requests[attempt_id] for attempt_id in self.leases.take_expired(now)]
        for request in expired:
            self._forget(request)
        return [HandoffExpired(now, request.request_id, is_sender=request.hands_off) for request in expired]

    @property
    def next_expiry_ns(self) -> int | None:
        """No lease and no load expires before then: call ``expire`` at that time. None: there are none."""
        times = (self.leases.next_expiry_ns, self.kv.tiers.loads.next_deadline_ns())
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    def on_tier(self, event: TierEvent, now: int) -> None:
        """The driver of the tiers reports what became of an action, or of the disk."""
        for request in self.kv.tiers.on_event(event, now):
            self.scheduler.add(request, now)

    @property
    def begun(self) -> SchedulerOutput | None:
        """The plan of the step that ``end_step`` is to be called for next; None where no step is under way."""
        return self._plan

    @property
    def has_work(self) -> bool:
        """Whether a step may be needed: there are requests, or the executor does not know yet which ended, or blocks
        are to be copied down."""
        return bool(self.requests or self._finished_ids) or self.kv.tiers.has_moves

    def begin_step(self, now: int) -> SchedulerOutput | None:
        """The plan of the next step, or None when there is nothing to do. Events that planning causes are returned by
        ``end_step`` or ``take_events``.

        A driver may ask once more while a step is under way, to run ahead of its result (depth 2). It gets a plan where
        that follows from the one before: all members of the decode batch take one token more, nothing joins, leaves,
        or is copied, and no answer ends by its length. Requests that end with the first step of the two, by a stop
        token or a failure, cost a row in the second: its token is none, and the driver drops it."""
        if self._plan is not None:
            return self._begin_ahead(now)
        if not self.has_work:
            if self._audit_at:
                check_idle(self.leases, self.scheduler, self.kv)
                self._audit_at = 0
            return None
        output, events = self.scheduler.schedule(self._num_steps, tuple(self._finished_ids), now)
        self._pending_events.extend(events)
        if output is None:
            return None
        self._num_steps += 1
        if self._num_steps >= self._audit_at:
            self._audit_at = self._num_steps + STEPS_BETWEEN
            check_step(self.requests, self.leases, self.scheduler, self.kv)
        self._finished_ids.clear()
        if self._shrinks_to and not self.kv.pool.is_shrinking:
            output.num_blocks, self._shrinks_to = self._shrinks_to, 0
        self._plan, self._begun_ns = output, now
        return output

    def _begin_ahead(self, now: int) -> SchedulerOutput | None:
        if self._plan_ahead is not None or self._plan is None:
            raise BrokenInvariantError("two steps are under way already")
        if self._plan.verify_rows or self._finished_ids or self._shrinks_to or not self.scheduler.may_run_ahead():
            return None
        output, events = self.scheduler.schedule(self._num_steps, (), now, is_ahead=True)
        if output is None or events or output.prefills or output.paused or output.resumed or output.swap_in:
            raise BrokenInvariantError(f"a step ahead decides more than its decodes: {output}")
        self._num_steps += 1
        self._plan_ahead = output
        return output

    def end_step(
        self, result: StepResult, now: int, *, num_steps: int = 1, last_start_ns: int | None = None
    ) -> list[Event]:
        """Take in the result of the step that was begun: the only place where computed-token counts grow.

        num_steps: how many times in a row the plan was taken (at most its max_repeats), the last time from
        ``last_start_ns`` on; ``result`` is that of the last. 0: it was broken off, after the end of all its requests or
        because they give way (``is_preemptible_by``): then it computed nothing, and will be planned again. So it is for
        a result that says it ran out of memory.
        """
        if result.is_out_of_memory:
            num_steps = 0
        output, self._plan, self._plan_ahead = self._plan, self._plan_ahead, None
        if output is None:
            raise BrokenInvariantError("no step has begun")
        if result.step_id != output.step_id:
            raise BrokenInvariantError(f"result of step {result.step_id}, expected {output.step_id}")
        if num_steps > 1:
            if num_steps > output.max_repeats:
                raise BrokenInvariantError(f"{num_steps} steps of a plan for {output.max_repeats}")
            self.scheduler.repeat(num_steps - 1)
            self._num_steps += num_steps - 1
        self.kv.tiers.step_ended()
        # What planning caused comes first: admissions before the first tokens of the same step.
        events = self.take_events()
        if self.scheduler.incoming.raising:
            raised = self.scheduler.incoming.take_raised()
            events += [reservation(request, self.kv, now) for request in raised]
        if not num_steps:
            events += self._end_failed(result, now)
            if result.num_blocks:
                events += self.shrink_cache(result.num_blocks, now)
            return events + self._take_back(output, result, now)
        reached_limit = self._end_prefills(output, now, events) if output.prefills else []
        if output.num_decodes:
            reached_limit += self.scheduler.batch.advance_completed()
            reached_limit += self._take_extra(result)
        self.scheduler.speculation.note(
            proposal for proposal in result.proposals if proposal.request_id in self.requests
        )
        for request_id, block_hash in result.full_blocks:
            self._remember_output_block(request_id, block_hash)
        events += self._end_failed(result, now)
        # Before the length limit: an answer that stops with its last allowed token ends for its own reason.
        for request_id, reason in result.stopped:
            if request := self.requests.get(request_id):
                events.append(self._finish(request, reason, now))
        for request in reached_limit:
            if request.request_id in self.requests:
                events.append(self._finish(request, FinishReason.LENGTH, now))
        if output.is_compute:
            events.append(self._measure(output, now, result, num_steps, last_start_ns))
        if self._plan is not None:  # it was computed behind this one
            self._begun_ns = now
        events += self._kv_events(now)
        return events

    def _end_failed(self, result: StepResult, now: int) -> list[Event]:
        """End the requests that the executor could not compute."""
        events: list[Event] = []
        for request_id, message in result.failed:
            if request := self.requests.get(request_id):
                kind: type[DiptychError] = StepMemoryError if result.is_out_of_memory else WorkerError
                if request_id in result.beyond_grammar:
                    kind = GrammarLimitError
                events.append(self._finish(request, FinishReason.ERROR, now, ErrorRecord.of(kind(message))))
        return events

    def shrink_cache(self, num_blocks: int, now: int) -> list[Event]:
        """Have ``num_blocks`` blocks from now on, fewer than before. Requests that would never fit any more end. The
        first plan after the last of the other blocks is released tells the executor."""
        self.kv.shrink(num_blocks)
        self._shrinks_to = num_blocks
        events: list[Event] = []
        for request in list(self.requests.values()):
            error = refusal(request, self.config, self.kv.capacity_tokens, 0)
            if isinstance(error, ContextLengthError) and not request.is_handed_off:
                events.append(self._finish(request, FinishReason.ERROR, now, ErrorRecord.of(error)))
        return events

    def _take_back(self, output: SchedulerOutput, result: StepResult, now: int) -> list[Event]:
        prefills = tuple([chunk for chunk in output.prefills if chunk.request_id not in self.requests])
        self.scheduler.block_owners.take_back(output)
        output = SchedulerOutput(output.step_id, prefills, features=output.features, predicted_ns=output.predicted_ns)
        return [self._measure(output, now, result, 0, None), *self._kv_events(now)]

    def is_preemptible_by(self, options: RequestOptions) -> bool:
        """Whether the step that was begun may be broken off for a request of these options that comes now: all that it
        computes gives way to it, and nothing of it is on its way to other workers."""
        output = self._plan
        if (
            output is None
            or self._plan_ahead is not None
            or options.is_best_effort
            or not self.scheduler.best_effort.are_all(output)
        ):
            return False
        return output.is_compute and not any(self.requests[chunk.request_id].hands_off for chunk in output.prefills)

    def take_events(self) -> list[Event]:
        """Events that planning caused since the last call."""
        events, self._pending_events = self._pending_events, []
        return events

    def configure(self, scheduler: SchedulerConfig) -> None:
        """Schedule by these settings from the next plan on; what runs keeps its place. Raises ConfigError for more
        sequences at once than the worker was started for: the executor has no rows for them."""
        self._first_scheduler.check_change_to(scheduler)
        self.config = self.config.with_(scheduler=scheduler)
        self.scheduler.configure(scheduler)

    def rescale(self, ratio: float) -> None:
        """The worker computes on other units from now on: steps are expected to take ``ratio`` times as long."""
        self.model.rescale(ratio)

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        """Teach the step-time model a step that was measured outside of the loop (warm-up, calibration)."""
        self.model.observe(features, duration_ns)

    def stats(self) -> EngineStats:
        """A snapshot for metrics and routing."""
        return engine_stats(self.scheduler, self.kv, self.model)

    def load(self, now: int) -> LoadReport:
        """What a router needs to know."""
        return load_report(self.config, self.scheduler, self.kv, self.model, now)

    def _enter(self, request: Request, now: int) -> list[Event]:
        """Number the request and take it in; or the terminal event with which it is refused."""
        if request.request_id in self.requests:
            raise ConfigError(f"request id {request.request_id!r} is in use", param="request_id")
        request.arrival_ns = now
        if not request.hands_off:  # else the answer is limited where it is written
            request.max_tokens = min(request.max_tokens, self.config.max_model_len - request.num_prompt_tokens)
        request.slo = self._effective_slo(request.slo)
        if error := self._refusal(request):
            return [self._finished_event(request, FinishReason.ERROR, now, 0, ErrorRecord.of(error))]
        request.number = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        request.length_group = self.scheduler.lengths.group(
            request.options.service_class, request.num_prompt_tokens, request.block_hashes
        )
        return []

    def _effective_slo(self, own: Slo | None) -> Slo | None:
        merged = objectives(own, self.config.slo)
        return merged if merged.ttft_ns or merged.tpot_ns else None

    def _refusal(self, request: Request) -> RequestError | None:
        if error := refusal(request, self.config, self.kv.capacity_tokens, self.scheduler.num_waiting):
            return error
        room = self.kv.pool.num_blocks - self.kv.config.watermark_blocks
        if request.remote_block_tables and (needed := self.kv.num_borrowed_beside(request)) > room:
            return ContextLengthError(
                f"windows of a prompt of {request.num_prompt_tokens} tokens take {needed} blocks; "
                f"the KV cache has {room}",
                param="prompt",
            )
        return None

    def _end_prefills(self, output: SchedulerOutput, now: int, events: list[Event]) -> list[Request]:
        """Confirm the step's chunks. Returns requests whose first token was also their last."""
        reached_limit = []
        for chunk in output.prefills:
            request = self.requests.get(chunk.request_id)
            if request is None:  # aborted while the step ran
                continue
            if chunk.is_last and request.first_token_ns is None and not request.is_early_prefill:
                request.first_token_ns = now
                events.append(FirstToken(now, request.request_id))
            request.num_computed_tokens = chunk.start + chunk.num_tokens
            self.kv.remember_computed(request, request.num_computed_tokens)
            if chunk.is_last:
                self.kv.tiers.want(request, self.model.prefill_work_ns)
                if request.hands_off:
                    self.leases.grant(request.request_id, request.lease_ns, now)
                request.num_output_tokens += 1
                if request.num_output_tokens >= request.max_tokens:
                    reached_limit.append(request)
        return reached_limit

    def _take_extra(self, result: StepResult) -> list[Request]:
        """Confirm the tokens that members got beside one each. Returns requests for which they were the last."""
        scheduler, reached_limit = self.scheduler, []
        for extra in result.extra:
            request = self.requests.get(extra.request_id)
            if request is None or extra.request_id not in scheduler.batch:  # aborted while the step ran
                continue
            scheduler.speculation.count(extra)
            if extra.num_accepted and scheduler.batch.got_more(request, extra.num_accepted):
                reached_limit.append(request)
        return reached_limit

    def _remember_output_block(self, request_id: str, block_hash: bytes) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        request.block_hashes.append(block_hash)
        if request.block_tables:
            computed = request.num_computed_tokens
            if request_id in self.scheduler.batch:
                computed = self.scheduler.batch.num_computed(request)
            self.kv.remember_computed(request, computed)

    def _learn(self, features: StepFeatures, duration_ns: int, *, has_extra: bool) -> None:
        if self.model.is_trusted and not features.prefill_tokens:
            predicted_ns = self.model.predict_ns(features)
            self.scheduler.speculation.measured(predicted_ns, duration_ns, has_extra=has_extra)
        self.model.observe(features, duration_ns)

    def _measure(
        self, output: SchedulerOutput, now: int, result: StepResult, num_steps: int, last_start_ns: int | None
    ) -> StepFinished:
        features = output.features
        is_rare = bool(output.verify_rows)  # and says what a row costs
        if num_steps and (is_rare or self.model.wants(features, self.scheduler.batch.ticks_completed)):
            if num_steps > 1:
                context = features.decode_context + (num_steps - 1) * features.decode_seqs
                features = StepFeatures(0, 0, features.decode_seqs, context)
            duration_ns = now - (self._begun_ns if last_start_ns is None else last_start_ns)
            copies_ns = (len(output.swap_out) + len(output.swap_in)) * self.config.cache.tiers.copy_block_ns
            if 2 * copies_ns < duration_ns:  # else it says little of what was computed
                self._learn(features, duration_ns - copies_ns, has_extra=is_rare)
        return StepFinished(  # (by position, which is faster)
            output.step_id,
            self._begun_ns,
            now,
            tuple([(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in output.prefills]),
            output.num_decodes,
            output.features.decode_context,
            output.predicted_ns,
            max(1, num_steps),
            result.extra,
        )

    def _forget(self, request: Request) -> None:
        """The request leaves without a terminal event: it goes on, or is ended, elsewhere."""
        self.leases.end(request.request_id)
        self.scheduler.remove(request)
        self.kv.tiers.want(request, self.model.prefill_work_ns)
        self.kv.release(request)
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)

    def _kv_events(self, now: int) -> list[Event]:
        if not self.kv.pool.has_changes:
            return []
        self._num_kv_events += 1
        evicted_for = self.kv.pool.drain_evictors()
        stored, evicted = self.kv.pool.drain_changes()
        return [KVEvents(now, self._num_kv_events, stored, evicted, evicted_for)]

    def _finish(
        self, request: Request, reason: FinishReason, now: int, error: ErrorRecord | None = None
    ) -> RequestFinished:
        self.leases.end(request.request_id)
        if request.is_early_prefill and request.is_handed_off:  # its first token was its last
            request.first_token_ns = now
        num_outputs = self.scheduler.remove(request)
        self.kv.tiers.want(request, self.model.prefill_work_ns)
        self.kv.release(request)
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)
        if request.length_group is not None and request.wait_class_at_arrival is not WaitClass.STREAM:
            is_cut = reason is not FinishReason.STOP
            self.scheduler.lengths.observe(request.length_group, num_outputs, is_cut=is_cut)
        return self._finished_event(request, reason, now, num_outputs, error)

    def _finished_event(
        self, request: Request, reason: FinishReason, now: int, num_outputs: int, error: ErrorRecord | None
    ) -> RequestFinished:
        latency = breakdown_from_times(
            request.arrival_ns,
            request.first_step_ns,
            request.first_token_ns,
            now,
            num_outputs,
            request.handoff_end_ns,
        )
        completed = reason in (FinishReason.STOP, FinishReason.LENGTH)
        return RequestFinished(
            time_ns=now,
            request_id=request.request_id,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            latency=latency,
            slo_met=(completed and request.slo.is_met(latency)) if request.slo else None,
            error=error,
        )


def refusal(request: Request, config: EngineConfig, capacity_tokens: int, num_waiting: int) -> RequestError | None:
    """The error with which a request is refused, or None.

    capacity_tokens: the longest sequence that the cache holds when it is alone. A request whose client has a part of
    the answer is not refused because others wait. A prompt that is computed for another
    worker needs room for itself only, and none where it is computed into the other's blocks.
    """
    length, prompt = config.max_model_len, request.num_prompt_tokens
    if prompt < 1:
        return ContextLengthError("the prompt has 0 tokens; it must have at least 1", param="prompt")
    if prompt >= length:
        return ContextLengthError(
            f"the prompt has {prompt} tokens; the context holds {length}, of which at least 1 is for the answer",
            param="prompt",
        )
    if request.max_tokens < 1:
        return InvalidRequestError(f"max_tokens is {request.max_tokens}; it must be at least 1", param="max_tokens")
    needed = prompt if request.hands_off else prompt + min(request.max_tokens, length - prompt)
    if needed > capacity_tokens and not request.remote_block_tables:
        return ContextLengthError(
            f"prompt and max_tokens make {needed} tokens; the KV cache holds {capacity_tokens}", param="max_tokens"
        )
    limit = config.scheduler.max_waiting
    if num_waiting >= limit and request.wait_class_at_arrival is not WaitClass.STREAM:
        return OverloadedError(f"{limit} requests are waiting already (max_waiting)")
    return None
