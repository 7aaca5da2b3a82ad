"""How many of the tokens that executors proposal are computed in a step: as many as make more tokens per second.

A step of n streams gives n tokens in the time that the step-time model predicts. One more row costs what the model says
of a decode sequence, and gives a token with the chance that the executor has measured. Rows are added while a row gives
more tokens per nanosecond than the step without it: the best first, over all streams. So a lone stream on a machine
that waits for its memory takes long drafts of small chance, and a wide batch takes only what is forced or almost
certain. Time that streams or prompts need is not taken: what a budget leaves is the limit.

A step with more rows than streams may leave the fast path of its executor (captured graphs, kernels for one row a
stream). What that costs is measured, and the rows of a step must pay for it together.

What is computed and refused costs its time and nothing else: the rows behind the last right token are written again.
"""

from collections.abc import Iterable

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.errors import BrokenInvariantError
from diptych.control.request import Request
from diptych.control.step import DraftProposal, VerifyResult, VerifyRows

MIN_GAIN = 1.1  # a guess must be better than the step by this factor: predictions and chances err
LEARNED = 0.05  # weight of a step in what a step with extra rows costs more
FORGOTTEN = 0.995  # of it, whenever it was too much: so that it is measured again some time


class Speculation:
    """The proposals that stand, and the counts of what came of those that were taken."""

    def __init__(self, kv: KVCacheManager, batch: DecodeBatch, model: StepTimeModel) -> None:
        self._kv = kv
        self._batch = batch
        self._model = model
        self._proposals: dict[str, tuple[float, ...]] = {}
        self._late_ns = [0.0, 0.0]  # decode steps took so much longer than predicted: without extra rows, and with them
        self.num_drafts = 0  # steps of a stream in which drafted tokens were computed
        self.num_draft_tokens = 0
        self.num_forced_tokens = 0  # computed as extra rows
        self.accepted_at: list[int] = []  # by place in the draft: drafted tokens that were right

    @property
    def has_offers(self) -> bool:
        """Whether there is anything to choose from."""
        return bool(self._proposals)

    def note(self, proposals: Iterable[DraftProposal]) -> None:
        """The executor knows what may come next."""
        for proposal in proposals:
            self._proposals[proposal.request_id] = proposal.chances

    def forget(self, request_id: str) -> None:
        """The request ends, or leaves the decode batch."""
        self._proposals.pop(request_id, None)

    def count(self, extra: VerifyResult) -> None:
        """A step has computed extra rows."""
        num_drafted = extra.num_tokens - extra.num_forced
        self.num_forced_tokens += extra.num_forced
        if num_drafted <= 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.accepted_at += [0] * (num_drafted - len(self.accepted_at))
        for place in range(extra.num_accepted - extra.num_forced):
            self.accepted_at[place] += 1

    @property
    def step_ns(self) -> float:
        """What a step costs more because it has extra rows, beside the rows themselves."""
        return max(0.0, self._late_ns[1] - self._late_ns[0])

    def measured(self, predicted_ns: int, duration_ns: int, *, has_extra: bool) -> None:
        """A step without prompts has run."""
        late_ns = min(max(duration_ns - predicted_ns, -predicted_ns), predicted_ns)  # the rest is somebody else's
        kind = 1 if has_extra else 0
        self._late_ns[kind] += LEARNED * (late_ns - self._late_ns[kind])

    def add_rows(self, plan: StepPlan, rows_left: int, ns_left: float) -> None:
        """Choose for this step, in which the batch decodes; every proposal is used up. rows_left, ns_left: what the
        step may still hold."""
        proposals, self._proposals = self._proposals, {}
        if not self._model.is_trusted:
            return
        members = [self._batch.member(request_id) for request_id in proposals if request_id in self._batch]
        counts = self._choose(plan, members, proposals, rows_left, ns_left)
        for request, count in zip(members, counts, strict=True):
            fitting = min(count, self._room(plan, request, count)) if count else 0
            if fitting > 0:
                plan.add_verify_rows(VerifyRows(request.request_id, fitting), self._batch.num_computed(request) + 1)

    def _choose(
        self,
        plan: StepPlan,
        members: list[Request],
        proposals: dict[str, tuple[float, ...]],
        rows_left: int,
        ns_left: float,
    ) -> list[int]:
        """How many rows each member takes."""
        if self.step_ns > ns_left:
            return [0] * len(members)
        row_ns, token_ns = self._model.coefficients[3], self._model.coefficients[4]
        # the first row more visits the most experts that the step does not read yet: no row costs more than that
        row_ns += self._model.experts_work_ns(1, plan.features.prefill_tokens + plan.features.decode_seqs)
        ns_left -= self.step_ns
        num_tokens, step_ns = float(plan.num_decodes), float(max(1, self._model.predict_ns(plan.features)))
        least = num_tokens / step_ns
        rows: list[tuple[float, int, int, float, float]] = []  # minus gain per ns, member, place, chance, ns
        for number, request in enumerate(members):
            chances = proposals[request.request_id]
            context = self._batch.num_computed(request) + 2
            limit = min(len(chances), request.max_tokens - self._batch.num_outputs(request) - 1)
            for place in range(limit):
                cost_ns = max(1.0, row_ns + token_ns * (context + place))
                gain = chances[place] / (cost_ns if chances[place] == 1.0 else MIN_GAIN * cost_ns)
                if gain <= least:
                    break
                rows.append((-gain, number, place, chances[place], cost_ns))
        counts = [0] * len(members)
        rows.sort()
        gained, spent_ns = 0.0, self.step_ns
        for minus_gain, number, _, chance, cost_ns in rows[: max(0, rows_left)]:
            if -minus_gain * step_ns <= num_tokens or cost_ns > ns_left:
                break
            num_tokens += chance
            step_ns += cost_ns
            ns_left -= cost_ns
            gained += -minus_gain * cost_ns
            spent_ns += cost_ns
            counts[number] += 1
        if gained and gained <= least * spent_ns:
            self._late_ns[1] = self._late_ns[0] + FORGOTTEN * self.step_ns
            return [0] * len(members)
        return counts

    def _room(self, plan: StepPlan, request: Request, count: int) -> int:
        """Verify rows that its blocks hold, after new ones where memory is plentiful."""
        kv = self._kv
        taken = self._batch.num_computed(request) + 1
        while request.num_slots - taken < count:
            if kv.pool.num_available <= kv.config.watermark_blocks + len(self._batch) * len(kv.layout.groups):
                break
            if not kv.grow(request, plan.new_blocks, taken - 1):
                raise BrokenInvariantError("no block for an extra row where blocks are available")
            self._batch.block_came_early(request)
        return request.num_slots - taken
