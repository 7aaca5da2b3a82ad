"""What runs in the next step of one worker: one loop for every serving shape.

Shapes differ in the policy objects that the loop asks (order, budget, caps, preemption), never in branches of it. The
scheduler sees counts and block ids, never token ids, and never waits.

What a *stream* (a request that has given a token, and is not of class batch: see best_effort.py) may rely on while its
worker lives:

- With blocks it gets a token in every step. Where prompts run before decodes (budget "whole"), it rests for as many
  prompt tokens as the cache holds, at most.
- It loses its blocks to the growth of another stream only while every block is held by streams, by prompts that are
  computed for other workers, or by reservations; prompts that are computed for this worker lose theirs first.
- Without blocks it waits for streams alone: those that held blocks when it lost its own, and those that came before it.
  So it waits for at most as many decode steps as one of the former may still take, plus those that each of the latter
  may still take while it waits, too. No prompt gets blocks before it; reservations whose prompts are not computed yet
  are recalled, which takes the prefill worker's step at hand and three messages.
- Then it is computed again first of all prompts, and no cap applies to it: with budget "slo" steps may get longer by
  a quarter of what their decodes take, at least; with "fixed" it gets what the decodes leave of the budget.

Where waiting requests may displace running ones by priority (PreemptionConfig.from_waiting), more important requests go
before all this. tests/control/stream_law.py checks it.
"""

from collections.abc import Callable
from enum import Enum
from functools import partial

from diptych.control.config import EngineConfig, SchedulerConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.scheduler.admission_backoff import AdmissionBackoff, steps_without_decision
from diptych.control.engine.scheduler.best_effort import BestEffortRequests
from diptych.control.engine.scheduler.block_owners import BlockOwners
from diptych.control.engine.scheduler.budget import make_budget
from diptych.control.engine.scheduler.caps import Caps
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.early_prefills import EarlyPrefills
from diptych.control.engine.scheduler.incoming import reservation
from diptych.control.engine.scheduler.order import ORDERS
from diptych.control.engine.scheduler.preemption import Preemption
from diptych.control.engine.scheduler.speculation import Speculation
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.engine.scheduler.waiting_queue import WaitingQueue
from diptych.control.errors import BrokenInvariantError
from diptych.control.events import Event, HandoffRevoked, RequestAdmitted, RequestResumed
from diptych.control.request import Request
from diptych.control.step import ResumedDecode, SchedulerOutput

MAX_SKIPPED = 64  # waiting requests passed over in one step before the loop looks no further


class _Verdict(Enum):
    ADMITTED = 0
    SKIP = 1  # not this one, but perhaps those behind it
    STOP = 2  # no other waiting request in this step
    PARK = 3  # not this one before something changes
    DEFER = 4  # it has another place in the queue from now on


class Scheduler:
    """Owner of the requests that wait, prefill, decode and are swapped out."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, model: StepTimeModel) -> None:
        self._slo = config.slo
        self._kv = kv
        self._model = model
        self.waiting = WaitingQueue()
        self.early_prefills = EarlyPrefills(kv, kv.num_blocks_for(config.max_model_len))
        self.batch = DecodeBatch()
        self.speculation = Speculation(kv, self.batch, model)
        self.best_effort = BestEffortRequests(kv, self.batch, self.speculation)
        self.block_owners = block_owners = BlockOwners(kv, self.batch, self.best_effort)
        self.prefilling, self.joining, self.swapped = (
            block_owners.prefilling,
            block_owners.joining,
            block_owners.swapped,
        )
        self.incoming, self.outgoing, self.lengths = block_owners.incoming, block_owners.outgoing, block_owners.lengths
        self.interrupted: dict[str, Request] = {}  # streams in ``waiting``
        self.preemption = Preemption(kv, self.batch, self.best_effort)
        self._only_others = False  # are planned: requests that give way have no part in the step
        self._num_departures = 0
        self._num_ahead = 0  # prompt tokens computed while the batch rested, since it last gave tokens
        self._refused = AdmissionBackoff()  # the first in ``waiting``
        self._refused_incoming = AdmissionBackoff()
        self.configure(config.scheduler)

    def configure(self, settings: SchedulerConfig) -> None:
        """Decide by these settings from the next plan on. Requests that hold blocks keep them."""
        self._settings = settings
        self._order = ORDERS[settings.order](settings, self._slo, self._model)
        self._budget = make_budget(settings.budget, self._slo, self._model)
        self._caps = Caps(settings.caps)
        self.preemption.config = settings.preemption
        waiting = [*self.waiting.requests(), *self.early_prefills.parked.requests()]
        self.waiting, self.early_prefills.parked = WaitingQueue(), WaitingQueue()
        for request in waiting:
            self._queue(request)
        incoming = (*self.incoming.waiting.values(), *self.incoming.reserved.values())
        for request in (*incoming, *self.swapped.values(), *self.best_effort):
            request.order_key = self._order.key(request)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks that are computed here."""
        return len(self.waiting) + len(self.early_prefills.parked) + self._kv.tiers.loads.num_waiting

    def add(self, request: Request, now: int) -> None:
        """A new request, or one that lost its blocks, waits for admission, or first for a load from disk."""
        self.best_effort.add(request)
        if not request.num_output_tokens and self._kv.fetch(request, self._model.prefill_work_ns, now):
            return
        self.add_computed(request)

    def add_computed(self, request: Request) -> None:
        """Let a request wait for admission; what is only on disk is computed."""
        if request.is_remote_prefill:
            self._await_blocks(request)
            return
        request.cached_tokens_at_arrival = self._kv.num_ready_tokens(request)
        if request.is_stream:
            self.interrupted[request.request_id] = request
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.is_long = self._caps.is_long(request, request.num_tokens - request.cached_tokens_at_arrival)
        request.order_key = self._order.key(request)
        self.waiting.push(request, is_long=request.is_long)

    def reserve(self, request: Request, now: int) -> None:
        """A request that another worker prefills waits for its blocks here, or first for a load from disk into them."""
        self.best_effort.add(request)
        if not (request.is_remote_prefill and self._kv.fetch(request, self._model.prefill_work_ns, now)):
            self._await_blocks(request)

    def _await_blocks(self, request: Request) -> None:
        request.order_key = self._order.key(request)
        self.incoming.add(request)

    def place_found(self, request: Request) -> None:
        """The worker that will decode this one has blocks for it."""
        self.early_prefills.forget(request.request_id)
        if request.request_id in self.early_prefills.parked:
            self.early_prefills.parked.remove(request)
            self.waiting.push(request, is_long=request.is_long)

    def remove(self, request: Request) -> int:
        """The request ends, wherever it is. Returns its confirmed output tokens."""
        request_id, outputs = request.request_id, request.num_output_tokens
        self._num_departures += 1
        self.early_prefills.forget(request_id)
        self.speculation.forget(request_id)
        self.best_effort.remove(request)
        if request_id in self.batch:
            outputs = self.batch.num_outputs(request)
            self.batch.leave(request)
        elif request_id in self.waiting:
            self.waiting.remove(request)
            self.interrupted.pop(request_id, None)
        elif request_id in self.early_prefills.parked:
            self.early_prefills.parked.remove(request)
        elif not self._kv.tiers.leave(request):
            self.block_owners.remove(request_id)
        return outputs

    def schedule(
        self, step_id: int, finished: tuple[str, ...], now: int, *, is_ahead: bool = False
    ) -> tuple[SchedulerOutput | None, list[Event]]:
        """The plan of the next step (None: nothing to do) and the events that planning caused. is_ahead: the step
        before has not ended; ``may_run_ahead`` was asked."""
        plan = StepPlan(now)
        # First: prompts that the last step completed decode in this one.
        self._settle(plan)
        self._only_others = bool(self.best_effort.requests) and self._plan_best_effort(plan)
        self._seat_incoming(plan)
        self._plan_work(plan)
        if self._only_others and not plan.has_work:  # they have nothing to do in this step
            self._only_others = False
            self._go_on(plan)
            self._plan_work(plan)
        features = plan.features
        predicted_ns = self._model.predict_ns(features)
        # Last: only now is it known how long the step takes, of which copies get a share, and nothing is allocated any
        # more.
        if not is_ahead:  # the copies of the step before count as done when that ends
            plan.swap_out += self._kv.tiers.copy_down(predicted_ns if plan.prefills or plan.num_decodes else 0, step_id)
        if plan.is_empty and not finished:
            return None, plan.events
        if plan.num_decodes:
            self.batch.advance_scheduled()
        predicted_ns += plan.num_copies * self._kv.config.tiers.copy_block_ns
        return plan.output(step_id, finished, features, predicted_ns, self._repeats(plan)), plan.events

    def may_run_ahead(self) -> bool:
        """Whether the next plan follows from the one under way, whatever comes of it (see EngineCore.begin_step)."""
        if (
            not len(self.batch)
            or self.prefilling
            or self.joining
            or self.swapped
            or self.incoming.raising
            or self.incoming.delivered
            or self.speculation.has_offers
            or self._kv.tiers.has_moves
            or self._kv.tiers.loads.num_waiting
            or self.best_effort.requests
            or len(self.early_prefills.parked)
        ):
            return False
        queues = ((self.waiting, self._refused), (self.incoming.waiting, self._refused_incoming))
        if any(queue and refusal.until_tick <= self.batch.ticks_scheduled for queue, refusal in queues):
            return False
        num_groups = len(self._kv.layout.groups)
        room = self._kv.pool.num_free - self._kv.tiers.num_watched_blocks
        return self.batch.steps_until_end() > 1 and len(self.batch) * num_groups <= room

    def repeat(self, num_steps: int) -> None:
        """The step just handed out was taken ``num_steps`` more times (see SchedulerOutput.max_repeats)."""
        self.batch.skip(num_steps, self._kv.grow)

    def _repeats(self, plan: StepPlan) -> int:
        """Steps in a row for which nothing is to be decided unless a message arrives."""
        # Whatever a plan of its own would treat differently ends the run: a worker that plans each step must decide the
        # same.
        others = (
            plan.resumed
            or plan.prefills
            or self.prefilling
            or self.joining
            or self.swapped
            or self.incoming.raising
            or plan.verify_rows
            or self._kv.pool.has_changes
            or self._kv.tiers.has_moves
            or self.best_effort.has_limits
        )
        if not plan.num_decodes or others or not self._model.is_trusted:
            return 1
        queues = ((self.waiting, self._refused), (self.incoming.waiting, self._refused_incoming))
        return steps_without_decision(self.batch, self._kv, [refusal for queue, refusal in queues if queue])

    def _plan_best_effort(self, plan: StepPlan) -> bool:
        """Whether this step is for others. Those that give way are set aside then, and come back otherwise."""
        for request in self.best_effort.take_due(plan.now):
            self._end_best_effort(request)
        head = self.waiting.head()
        if (head is None or head.is_best_effort) and not self.block_owners.others_are_here():
            self._go_on(plan)
            return False
        if self.best_effort.rest(plan, self.prefilling):
            self._num_departures += 1  # what was refused beside them may fit now
        self._go_on(plan, only_due=True)
        return True

    def _go_on(self, plan: StepPlan, *, only_due: bool = False) -> None:
        num_seats = self._settings.max_num_seqs - self.block_owners.num_running
        self.best_effort.go_on(plan, self.prefilling, num_seats, only_due=only_due)

    def _end_best_effort(self, request: Request) -> None:
        """Let a request go before those that still give way."""
        for queue in (self.waiting, self.early_prefills.parked):
            if request.request_id in queue:
                # Out and in again: an entry of the queue keeps the key with which it was pushed.
                queue.remove(request)
                request.order_key = self._order.key(request)
                queue.push(request, is_long=request.is_long)
        request.order_key = self._order.key(request)
        if self.incoming.waiting.pop(request.request_id, None) is not None:
            self.incoming.add(request)

    def _plan_work(self, plan: StepPlan) -> None:
        """Decodes, then prompts; or prompts first. Then the batch rests for as many of their tokens as the cache holds;
        more come only where prompts leave with their first token, and then they would never end."""
        if self._budget.mixes_phases:
            self._plan_decodes(plan)
            self._plan_prefills(plan)
            return
        if self._num_ahead < self._kv.capacity_tokens:
            self._plan_prefills(plan)
        else:
            self._refused.clear()
        if plan.prefills and len(self.batch):
            self._num_ahead += plan.prefill_tokens
            return
        self._num_ahead = 0
        if not plan.prefills:
            self._plan_decodes(plan)

    def _settle(self, plan: StepPlan) -> None:
        """Let the requests whose prompts are computed, here or elsewhere, join the decode batch, or wait to be handed
        off."""
        for request in self.incoming.take_delivered():
            request.handoff_end_ns = plan.now
            self._kv.end_prompt(request)
            self.batch.join(request, request.num_prompt_tokens, 1)
            tables, firsts = request.tables, request.first_blocks
            plan.resumed.append(ResumedDecode(request.request_id, request.num_prompt_tokens, tables, firsts))
        for request in self.joining.values():
            self._kv.end_prompt(request)
            if request.hands_off:
                self.outgoing[request.request_id] = request
                plan.paused.append(request.request_id)
            else:
                self.batch.join(request, request.num_computed_tokens, request.num_output_tokens)
        self.joining.clear()

    def _seat_incoming(self, plan: StepPlan) -> None:
        """Blocks for requests that are prefilled elsewhere, first come, first served; after the streams that wait
        here, whose clients wait in the middle of an answer."""
        incoming = self.incoming
        while incoming.waiting:
            request = next(iter(incoming.waiting.values()))
            hit = self._kv.admission_hit(request, self._model.prefill_work_ns)
            self._refused_incoming.clear()
            if any(stream.order_key <= request.order_key for stream in self.interrupted.values()):
                self._refused_incoming.stand_until_departure()  # or until that stream is admitted: that is a prefill
                return
            if not self._has_room(plan, request, hit, self._refused_incoming):
                self._recall(plan, request)
                return
            if not self._kv.still_holds(hit):  # others went there
                return
            incoming.seat(request, hit, self.block_owners.expected(request), self._kv, self._model.prefill_work_ns)
            if request.request_id not in incoming.raising:
                plan.events.append(reservation(request, self._kv, plan.now))

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Every member of the decode batch takes a token or more; those at the end of a block get a new one first."""
        for request in self.batch.take_block_due():
            # The victim may be this stream itself: then it has left the batch, and the loop ends without a block.
            while request.request_id in self.batch and not self._kv.grow(request, plan.new_blocks):
                self._preempt(plan, self.preemption.victim_for_growth(self.prefilling.values()))
            if request.request_id in self.batch:
                self.batch.block_added(request)
        self._resume_swapped(plan)
        plan.num_decodes = len(self.batch)
        plan.decode_context = self.batch.context
        if self.speculation.has_offers:
            self._budget.open(plan.features, self.batch)
            num_rows, room_ns = self._budget.room()
            if self._prompts_wait():  # good guesses must not keep a prompt, or a lost stream, from its step
                num_rows, room_ns = num_rows // 2, room_ns / 2
            self.speculation.add_rows(plan, num_rows, room_ns)

    def _prompts_wait(self) -> bool:
        head = self.waiting.head()
        return bool(self.prefilling) or (head is not None and not (head.is_best_effort and self._only_others))

    def _resume_swapped(self, plan: StepPlan) -> None:
        if not self.swapped:
            return
        first_to_compute = min((stream.order_key for stream in self.interrupted.values()), default=None)
        for request in sorted(self.swapped.values(), key=lambda swapped: swapped.order_key):
            is_behind = first_to_compute is not None and first_to_compute < request.order_key
            if is_behind or (self._only_others and request.is_best_effort):
                break
            has_seat = self.block_owners.num_running < self._settings.max_num_seqs
            if not has_seat or plan.takes_away(request) or not self._fits_back(plan, request):
                self._recall(plan, request)
                break
            plan.swap_in.extend(self._kv.swap_in(request, self.block_owners.expected(request)))
            del self.swapped[request.request_id]
            num_tokens = request.num_scheduled_tokens
            self.batch.join(request, num_tokens, request.num_output_tokens)
            for due in self.batch.take_block_due():
                if not self._kv.grow(due):
                    raise BrokenInvariantError("no block for a request that was swapped in, though there was room")
                self.batch.block_added(due)
            plan.resumed.append(ResumedDecode(request.request_id, num_tokens, request.tables, request.first_blocks))
            plan.events.append(RequestResumed(plan.now, request.request_id))

    def _plan_prefills(self, plan: StepPlan) -> None:
        """Admitted and waiting prompts in one order, each as far as budget, caps and memory allow."""
        self._refused.clear()
        for request in self.early_prefills.take_unparked():
            self.waiting.push(request, is_long=request.is_long)
        if not self.waiting and not self.prefilling and not self.incoming.raising:
            return
        self._budget.open(plan.features, self.batch)
        self.incoming.raise_blocks(plan, self._budget, self._kv)
        # A stream that is computed once more counts under no cap: streams never wait for prompts.
        self._caps.open(request for request in self.prefilling.values() if not request.is_stream)
        for request in self.prefilling.values():
            request.order_key = self._order.key(request)
        # Backwards: the next one is popped from the end.
        admitted = sorted(self.prefilling.values(), key=lambda request: request.order_key, reverse=True)
        skipped: list[Request] = []
        open_to_new = True
        while True:
            head = self.waiting.head(skip_long=self._caps.long_is_full) if open_to_new else None
            if head is not None and head.is_best_effort and self._only_others:
                self._refused.stand_until_departure()
                head, open_to_new = None, False
            if admitted and (head is None or admitted[-1].order_key <= head.order_key):
                if not self._continue(plan, admitted.pop()):
                    break
            elif head is not None:
                verdict = self._try_admit(plan, head)
                if verdict is _Verdict.SKIP:
                    self.waiting.remove(head)
                    skipped.append(head)
                elif verdict is _Verdict.DEFER:  # once in its life; with nothing before it now, it is next all the same
                    self.waiting.remove(head)
                    self.waiting.push(head, is_long=head.is_long)
                elif verdict is _Verdict.PARK:
                    self.waiting.remove(head)
                    self.early_prefills.parked.push(head, is_long=head.is_long)
                open_to_new = verdict is not _Verdict.STOP and len(skipped) < MAX_SKIPPED
            else:
                break
        if skipped or self._order.changes_with_time or self._settings.preemption.from_waiting:
            self._refused.clear()  # the first in the queue may change with time
        for request in skipped:
            self.waiting.push(request, is_long=request.is_long)

    def _continue(self, plan: StepPlan, request: Request) -> bool:
        """The next chunk of an admitted prompt, after what is copied up of it; False when the step is full."""
        if num_below := len(request.host_block_ids):
            count = self._budget.copies(num_below, self._kv.config.tiers.copy_block_ns)
            plan.swap_in += self._kv.raise_blocks(request, count)
            if count < num_below:
                return False
        remaining = request.num_tokens - request.num_scheduled_tokens
        chunk = self._budget.chunk(request.num_scheduled_tokens, remaining, is_stream=request.is_stream)
        if chunk <= 0:
            return False
        self._run_chunk(plan, request, min(chunk, self._kv.longest_chunk))
        return True

    def _run_chunk(self, plan: StepPlan, request: Request, chunk: int) -> None:
        self._budget.take(request.num_scheduled_tokens, chunk)
        self._kv.begin_chunk(request)
        plan.add_prefill(request, chunk)
        if request.num_scheduled_tokens == request.num_tokens:
            if not request.is_stream:
                self._caps.finished_prefill()
            del self.prefilling[request.request_id]
            self.joining[request.request_id] = request

    def _try_admit(self, plan: StepPlan, request: Request) -> _Verdict:
        if not self.early_prefills.has_room(request):
            return _Verdict.PARK
        if self._order.defer(request, plan.now):
            return _Verdict.DEFER
        hit = self._kv.admission_hit(request, self._model.prefill_work_ns)
        below = self._kv.blocks_below(request, hit, self._model.prefill_work_ns)
        start = self._kv.num_found_tokens(request, hit, below)
        remaining = request.num_tokens - start
        request.is_long = self._caps.is_long(request, remaining)
        is_stream = request.is_stream  # then it waits for no prompt: neither for its blocks nor for a cap
        if not is_stream and self._kv.awaits_sibling(request, start // self._kv.block_size):
            return _Verdict.SKIP
        chunk = self._budget.chunk(start, remaining, is_stream=is_stream)
        if chunk <= 0:
            return _Verdict.STOP
        chunk = min(chunk, self._kv.longest_chunk)
        if not is_stream and not self._caps.allows(is_long=request.is_long, is_partial=chunk < remaining):
            return _Verdict.SKIP
        if not self._seat(plan, request, hit):
            self._recall(plan, request)
            return _Verdict.STOP
        if not self._kv.still_holds(hit):  # others went there
            return _Verdict.STOP
        below = self._kv.blocks_below(request, hit, self._model.prefill_work_ns)  # less, if others went there
        start = self._kv.num_found_tokens(request, hit, below)
        self.waiting.remove(request)
        self.interrupted.pop(request.request_id, None)
        is_first = request.first_step_ns is None
        plan.block_copies += self._kv.admit(request, hit, self.block_owners.expected(request))
        self._kv.tiers.attach(request, below)
        if is_first:
            request.first_step_ns = plan.now
            # Once: what a request finds after a preemption is mostly its own KV, which is no hit.
            request.num_cached_tokens = start
        num_below = start - hit.num_device_tokens if hit.below else len(below) * self._kv.block_size
        plan.events.append(RequestAdmitted(plan.now, request.request_id, start, is_first, num_below))
        self.prefilling[request.request_id] = request
        self.early_prefills.admitted(request)
        if not is_stream:
            self._caps.started(is_long=request.is_long)
        self._continue(plan, request)
        return _Verdict.ADMITTED

    def _recall(self, plan: StepPlan, request: Request) -> None:
        """A stream found no room: prompts that other workers are to compute give up the blocks they hold for it."""
        if not request.is_stream or not self.incoming.reserved:
            return
        num_tokens = request.num_tokens + self.block_owners.expected(request)
        needed = self._kv.num_blocks_for(num_tokens) + self._kv.config.watermark_blocks - self._kv.pool.num_available
        for reserved in self.incoming.revoke(request, needed):
            plan.events.append(HandoffRevoked(plan.now, reserved.request_id))

    def _seat(self, plan: StepPlan, request: Request, hit: Hit) -> bool:
        """Whether there is a seat and memory, if need be after displacing less important requests."""
        if self._has_room(plan, request, hit, self._refused):
            return True
        if self.block_owners.is_behind_swapped(request):
            return False
        blocks = self._kv.num_new_blocks(request, hit) + self._kv.config.watermark_blocks
        blocks += self._kv.pool.num_idle(hit.blocks) - self._kv.pool.num_available
        blocks -= self.best_effort.given_up_for(request, hit)[0]
        seats = self.block_owners.num_running + 1 - self._settings.max_num_seqs
        victims = self.preemption.victims_for(request, blocks, seats, hit)
        for victim in victims:
            self._preempt(plan, victim, by_priority=True)
        if victims and plan.num_decodes:
            plan.num_decodes = len(self.batch)
            plan.decode_context = self.batch.context
        # Enough of them for its prompt; when it grows, it may displace more.
        return bool(victims) and self._clear_room(plan, partial(self.block_owners.fits_now, request, hit))

    def _has_room(self, plan: StepPlan, request: Request, hit: Hit, refusal: AdmissionBackoff) -> bool:
        """Whether there is a seat and memory for the first of a queue, which those set aside have given up then; else
        ``refusal`` says for how long not."""
        if self.block_owners.num_running >= self._settings.max_num_seqs:
            refusal.stand_until_departure()
            return False
        if not self.block_owners.has_room(request, hit, refusal, self._num_departures):
            return False
        return not len(self.best_effort) or self._clear_room(plan, partial(self.block_owners.fits_now, request, hit))

    def _fits_back(self, plan: StepPlan, request: Request) -> bool:
        """Whether there are blocks for one that was swapped out, which those set aside have given up then."""
        fits = partial(self.block_owners.fits_back, request)
        return fits() if request.is_best_effort else self._clear_room(plan, fits)

    def _clear_room(self, plan: StepPlan, fits: Callable[[], bool]) -> bool:
        """Take the blocks of requests that are set aside, until it fits. Returns whether it does."""
        while not fits():
            victim = self.best_effort.victim()
            if victim is None:
                return False
            self._preempt(plan, victim)
        return True

    def _preempt(self, plan: StepPlan, victim: Request, *, by_priority: bool = False) -> None:
        self._num_departures += 1
        self._refused.clear()  # both queues may have been asked before this, in the same plan
        self._refused_incoming.clear()
        if self.prefilling.pop(victim.request_id, None) is not None or self.best_effort.leave_prompt(victim):
            self.early_prefills.forget(victim.request_id)
            self.preemption.displace(plan, victim)
            self.add(victim, plan.now)
            return
        self.speculation.forget(victim.request_id)
        if self.preemption.preempt(plan, victim, by_priority=by_priority):
            victim.order_key = self._order.key(victim)
            self.swapped[victim.request_id] = victim
            return
        self.add(victim, plan.now)
