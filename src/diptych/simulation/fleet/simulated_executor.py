"""An executor without a model: it knows how long each answer will be and what each step costs.

Owns the true output lengths and the identities of output blocks, which the scheduler never sees. It follows plans as
diptych.control.step documents them and can take a repeated decode step many times at once, unless tokens are guessed:
then every step may bring other drafts.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from diptych.control.request import FinishReason, Request, RequestOptions
from diptych.control.step import DraftProposal, SchedulerOutput, StepResult, VerifyResult, VerifyRows
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts, number_of
from diptych.workload.spec import RequestSpec

NEVER = 2**62


def block_hashes(spec: RequestSpec, num_tokens: int, block_size: int) -> list[bytes]:
    """The hashes of the full blocks within the first ``num_tokens`` tokens, as far as the spec identifies them."""
    ids, width = spec.hash_ids, spec.hash_block_tokens
    full = min(num_tokens, len(ids) * width) // block_size
    return [
        ids[((index + 1) * block_size - 1) // width].to_bytes(10, "little", signed=True) + index.to_bytes(6, "little")
        for index in range(full)
    ]


def make_request(request_id: str, spec: RequestSpec, block_size: int, options: RequestOptions) -> Request:
    """The request as the control code sees it."""
    hashes = tuple(block_hashes(spec, spec.prompt_tokens, block_size)) if spec.hash_ids else ()
    return Request(
        request_id,
        spec.prompt_tokens,
        spec.max_tokens or spec.output_tokens,
        block_hashes=hashes,
        options=options,
    )


@dataclass(slots=True)
class _Answer:
    """What will become of one request. While it decodes, its counts follow from the tick at which it joined."""

    output_tokens: int  # after which it stops before its limit
    hashes: list[bytes]  # of blocks that hold output
    first_hash: int  # index of the block that hashes[0] stands for
    num_reported: int = 0
    sampled: int = 0
    kv_tokens: int = 0
    joined_tick: int = 0
    stay: int = 0  # 0: not in the batch
    number: int = 0  # of the request, for drafts


class SimulatedExecutor:
    """An executor without a model. Only requests with something to report are tracked: those that stop before
    max_tokens or have output hashes, and all where tokens are guessed."""

    def __init__(self, cost: CostModel, block_size: int, drafts: SimulatedDrafts | None = None) -> None:
        self.cost = cost
        self._drafts = drafts
        self._block_size = block_size
        self._answers: dict[str, _Answer] = {}
        self._calendar: list[tuple[int, int, str]] = []  # (tick, stay, request id): something happens to it then
        self._ticks = 0  # decode steps done
        self._num_stays = 0
        self._output: SchedulerOutput | None = None
        self._stopped: list[tuple[str, FinishReason]] = []
        self._full: list[tuple[str, bytes]] = []

    def add(self, request: Request, spec: RequestSpec) -> None:
        """A request that plans will name."""
        num_tokens = spec.prompt_tokens + spec.output_tokens
        first = spec.prompt_tokens // self._block_size
        hashes = block_hashes(spec, num_tokens, self._block_size)[first:] if spec.hash_ids else []
        stops = spec.output_tokens < request.max_tokens  # else the scheduler ends it at its limit
        if hashes or stops or self._drafts:
            answer = _Answer(spec.output_tokens if stops else NEVER, hashes, first)
            self._answers[request.request_id] = answer
            answer.number = number_of(request.request_id) if self._drafts else 0

    def deliver(self, request_id: str) -> None:
        """The first token was sampled elsewhere."""
        if answer := self._answers.get(request_id):
            answer.sampled = 1

    def execute(self, output: SchedulerOutput) -> StepResult:
        """One step (see diptych.control.step.Executor)."""
        self.begin(output)
        return self.end(1)

    def begin(self, output: SchedulerOutput) -> int:
        """Start a plan. Returns how many steps of it may be taken at once before an answer ends or a block fills."""
        self._output = output
        self._stopped, self._full = [], []
        if self._answers:
            self._follow(output)
        if self._drafts:
            return 1
        if output.max_repeats == 1 or not self._calendar:
            return output.max_repeats
        calendar = self._calendar
        while calendar and self._is_stale(calendar[0]):
            heappop(calendar)
        return min(output.max_repeats, calendar[0][0] - self._ticks) if calendar else output.max_repeats

    def end(self, num_steps: int) -> StepResult:
        """The plan was taken ``num_steps`` times; the result is that of the last step."""
        output = self._output
        assert output is not None
        extra: list[VerifyResult] = []
        if output.num_decodes:
            self._ticks += num_steps
            extra = [self._verify(rows) for rows in output.verify_rows]
            calendar = self._calendar
            while calendar and calendar[0][0] <= self._ticks:
                entry = heappop(calendar)
                if not self._is_stale(entry):
                    self._report(entry[2])
        for chunk in output.prefills:
            if chunk.is_last and chunk.request_id in self._answers:
                self._finish_prefill(chunk.request_id, chunk.start + chunk.num_tokens)
        proposals = self._proposals(self._drafts) if self._drafts and output.num_decodes else ()
        if not (self._stopped or self._full or extra or proposals):
            return StepResult(output.step_id)
        full = tuple(self._full)
        return StepResult(output.step_id, tuple(self._stopped), full, extra=tuple(extra), proposals=proposals)

    def _verify(self, rows: VerifyRows) -> VerifyResult:
        """A member computed guessed tokens behind its newest one; its calendar begins again with those that were
        right."""
        assert self._drafts is not None
        answer = self._answers[rows.request_id]
        sampled = answer.sampled + self._ticks - answer.joined_tick  # with the one of this step
        num_right = self._drafts.num_right(answer.number, sampled - 1, rows.num_tokens)
        num_accepted = min(num_right, answer.output_tokens - sampled)
        if num_accepted:
            answer.sampled += num_accepted
            answer.kv_tokens += num_accepted
            self._num_stays += 1
            answer.stay = self._num_stays
            self._report(rows.request_id)
        return VerifyResult(rows.request_id, rows.num_tokens, num_accepted)

    def _proposals(self, drafts: SimulatedDrafts) -> tuple[DraftProposal, ...]:
        """The drafts that there are for members of the batch."""
        stopped = {request_id for request_id, _ in self._stopped}
        return tuple(
            DraftProposal(request_id, drafts.chances)
            for request_id, answer in self._answers.items()
            if answer.stay
            and request_id not in stopped
            and drafts.exists(answer.number, answer.sampled + self._ticks - answer.joined_tick)
        )

    def _follow(self, output: SchedulerOutput) -> None:
        answers = self._answers
        for request_id in output.finished:
            answers.pop(request_id, None)
        for request_id in output.paused:
            if answer := answers.get(request_id):
                self._leave(answer)
        for resumed in output.resumed:
            if answer := answers.get(resumed.request_id):
                answer.kv_tokens = resumed.num_tokens
                self._join(resumed.request_id, answer, self._ticks)

    def _finish_prefill(self, request_id: str, kv_tokens: int) -> None:
        """The last chunk samples a token; the request joins the batch."""
        answer = self._answers[request_id]
        answer.sampled += 1
        answer.kv_tokens = kv_tokens
        self._report_blocks(request_id, answer, kv_tokens)
        if answer.sampled == answer.output_tokens:
            self._stopped.append((request_id, FinishReason.STOP))
        self._join(request_id, answer, self._ticks)

    def _join(self, request_id: str, answer: _Answer, tick: int) -> None:
        self._num_stays += 1
        answer.stay = self._num_stays
        answer.joined_tick = tick
        self._note_next(request_id, answer)

    def _leave(self, answer: _Answer) -> None:
        if answer.stay:
            ticks = self._ticks - answer.joined_tick
            answer.sampled += ticks
            answer.kv_tokens += ticks
            answer.stay = 0

    def _note_next(self, request_id: str, answer: _Answer) -> None:
        """Note the next tick at which there is something to report."""
        tick = answer.joined_tick + answer.output_tokens - answer.sampled
        if answer.num_reported < len(answer.hashes):
            end = (answer.first_hash + answer.num_reported + 1) * self._block_size
            tick = min(tick, answer.joined_tick + end - answer.kv_tokens)
        if self._ticks < tick < NEVER // 2:
            heappush(self._calendar, (tick, answer.stay, request_id))

    def _report(self, request_id: str) -> None:
        answer = self._answers[request_id]
        ticks = self._ticks - answer.joined_tick
        self._report_blocks(request_id, answer, answer.kv_tokens + ticks)
        if answer.sampled + ticks == answer.output_tokens:
            self._stopped.append((request_id, FinishReason.STOP))
        self._note_next(request_id, answer)

    def _report_blocks(self, request_id: str, answer: _Answer, kv_tokens: int) -> None:
        while answer.num_reported < len(answer.hashes):
            if (answer.first_hash + answer.num_reported + 1) * self._block_size > kv_tokens:
                return
            self._full.append((request_id, answer.hashes[answer.num_reported]))
            answer.num_reported += 1

    def _is_stale(self, entry: tuple[int, int, str]) -> bool:
        answer = self._answers.get(entry[2])
        return answer is None or answer.stay != entry[1]
