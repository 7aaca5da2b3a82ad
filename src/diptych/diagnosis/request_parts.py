"""Where the time of each request went, exactly: its life in segments, each split by what its worker did meanwhile.

Reads the records of a timeline. The parts of a request's TTFT sum to its TTFT, and those of its decode to the time from
its first to its last token, to the nanosecond: each segment is cut out of the time line, none is measured apart.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from diptych.control.request import FinishReason
from diptych.control.slo import Slo
from diptych.diagnosis.step_sums import NUM_USES, StepSums, Sums, Terms, Use, split_step
from diptych.timeline.records import AnswerRecord, Record, RequestRecord, StepRecord, TransferRecord

COMPLETED = ("stop", "length")
LONG_FACTOR = 4  # a prompt is long from this factor times the median on ...
LONG_TOKENS = 256  # ... if it also has this number of tokens to compute

_QUEUE = ("queue_streams", "queue_streams", "queue_streams", "queue_streams", "queue_prefill", "queue_prefill",
          "queue_slow", "queue_idle")  # fmt: skip
_PREFILL = ("prefill_streams", "prefill_streams", "prefill_streams", "prefill_streams", "prefill_others",
            "prefill_others", "prefill_slow", "prefill_idle")  # fmt: skip
_DECODE = ("decode_floor", "decode_batch", "decode_floor", "decode_batch", "mixed_prefill", "stalled_by_prefill",
           "decode_slow", "decode_idle")  # fmt: skip
_ENDED_BY = {  # milestones after which a request decodes, and the states that they end
    "resumed": ("preempted",),
    "rejoined": ("preempted",),
    "first_token": ("retried",),
    "handoff_delivered": ("handoff", "retried"),
}


@dataclass(slots=True)
class RequestParts:
    """One completed request. ttft, decode: nanoseconds by account. marked_ttft_ns, marked_decode_ns: of the time
    that it lost to prompts of others, the part that long prompts took."""

    request_id: str
    worker: int
    arrival_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    slo: Slo = field(default_factory=Slo)
    service_class: str = "standard"
    unread_ns: int = 0
    unsent_bytes: int = 0
    ttft: Counter[str] = field(default_factory=Counter)
    decode: Counter[str] = field(default_factory=Counter)
    marked_ttft_ns: int = 0
    marked_decode_ns: int = 0

    @property
    def ttft_ns(self) -> int:
        """Time to first token: the sum of its parts."""
        return self.ttft.total()

    @property
    def decode_ns(self) -> int:
        """First to last token: the sum of its parts."""
        return self.decode.total()

    @property
    def tpot_ns(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        return self.decode_ns / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """What is known of a worker beside its records. max_num_seqs 0: not known."""

    role: str = "both"
    terms: Terms = (0.0, 0.0, 0.0, 0.0, 0.0)
    max_num_seqs: int = 0


@dataclass(slots=True)
class _Life:
    """The records of one request."""

    milestones: list[RequestRecord] = field(default_factory=list)
    rejoined: list[tuple[int, int]] = field(default_factory=list)  # (worker, start of the step) it joined a batch
    chunks: list[tuple[int, int, int]] = field(default_factory=list)  # (worker, end of the step, tokens)
    answer: AnswerRecord | None = None

    def has_failed(self, since_ns: int) -> bool:
        """Whether it ended since then with an error, or without a first token because its client left."""
        ends = [record for record in self.milestones if record.what == "finished" and record.time_ns >= since_ns]
        if not ends or ends[-1].detail["reason"] in COMPLETED:
            return False
        has_begun = any(record.what == "first_token" for record in self.milestones)
        return ends[-1].detail["reason"] == FinishReason.ERROR or not has_begun

    def ends_after(self, time_ns: int) -> bool:
        """Whether it has ended, and then or later."""
        return any(record.what == "finished" and record.time_ns >= time_ns for record in self.milestones)


class PartsReader:
    """Splits requests by what the workers did. workers: by number (one that is missing: a plain one). default: the
    objectives of requests that have none of their own."""

    def __init__(self, records: Sequence[Record], workers: Mapping[int, KnownWorker], default: Slo) -> None:
        self._default = default
        self._lives: dict[str, _Life] = defaultdict(_Life)
        steps: dict[int, list[StepRecord]] = defaultdict(list)
        for record in records:
            self._note(record, steps)
        self.long_prompts = self._long()
        self.sums: dict[int, StepSums] = {}
        self._totals: dict[tuple[int, int], int] = {}  # (worker, end of a step) -> prompt tokens in it
        for worker, of_worker in steps.items():
            view = workers.get(worker, KnownWorker())
            seats = view.max_num_seqs or 1 << 60
            of_worker.sort(key=lambda step: step.start_ns)
            is_long = self.long_prompts.__contains__
            self.sums[worker] = StepSums([split_step(step, view.terms, seats, is_long) for step in of_worker])
            for step in of_worker:
                if step.prefills:
                    self._totals[worker, step.end_ns] = sum(count for _, _, count in step.prefills)

    def requests(self, since_ns: int = 0) -> list[RequestParts]:
        """Every request that was completed since then and whose whole life is in the records, in order of arrival."""
        lives = [(request_id, life) for request_id, life in self._lives.items() if life.ends_after(since_ns)]
        found = [parts for request_id, life in lives if (parts := self._split(request_id, life))]
        return sorted(found, key=lambda parts: (parts.arrival_ns, parts.request_id))

    @property
    def chunks_per_prompt(self) -> float:
        """Steps in which a prompt was computed: the mean over prompt tokens (1 without any)."""
        tokens = [(len(life.chunks), sum(count for _, _, count in life.chunks)) for life in self._lives.values()]
        total = sum(count for _, count in tokens)
        return sum(steps * count for steps, count in tokens) / total if total else 1.0

    def _note(self, record: Record, steps: dict[int, list[StepRecord]]) -> None:
        if isinstance(record, StepRecord):
            steps[record.worker].append(record)
            for request_id, _, count in record.prefills:
                if not request_id:  # an engine that does not name its prompts
                    continue
                self._lives[request_id].chunks.append((record.worker, record.end_ns, count))
            for request_id in record.joined:
                self._lives[request_id].rejoined.append((record.worker, record.start_ns))
        elif isinstance(record, RequestRecord):
            self._lives[record.request_id].milestones.append(record)
        elif isinstance(record, AnswerRecord):
            self._lives[record.request_id].answer = record

    def _long(self) -> frozenset[str]:
        """Requests with far more prompt tokens to compute than the others."""
        computed = {
            request_id: sum(count for _, _, count in life.chunks)
            for request_id, life in self._lives.items()
            if life.chunks
        }
        if not computed:
            return frozenset()
        limit = max(LONG_TOKENS, LONG_FACTOR * median(computed.values()))
        return frozenset(request_id for request_id, tokens in computed.items() if tokens >= limit)

    def num_failed(self, since_ns: int) -> int:
        """Requests that ended since then with an error, or without a first token because their clients left."""
        return sum(life.has_failed(since_ns) for life in self._lives.values())

    def _split(self, request_id: str, life: _Life) -> RequestParts | None:
        """The parts of one request; None when it did not end well, or its beginning is not in the records."""
        milestones = sorted(life.milestones, key=lambda record: record.time_ns)
        ends = [record for record in milestones if record.what == "finished"]
        first = next((record for record in milestones if record.what == "first_token"), None)
        queued = next((record for record in milestones if record.what == "queued"), None)
        if not ends or first is None or queued is None or ends[-1].detail["reason"] not in COMPLETED:
            return None
        end, answer = ends[-1], life.answer
        arrival_ns = queued.time_ns if answer is None else answer.submitted_ns
        parts = RequestParts(
            request_id,
            end.worker,
            arrival_ns,
            num_prompt_tokens=queued.detail["num_prompt_tokens"],
            num_cached_tokens=_cached(milestones),
            num_output_tokens=end.detail["num_output_tokens"],
            num_preemptions=sum(record.what == "preempted" for record in milestones),
            slo=self._default,
        )
        if answer is not None:
            own = Slo(answer.ttft_slo_ns or None, answer.tpot_slo_ns or None)
            parts.slo = own if answer.service_class == "batch" else own.or_else(self._default)  # the others come first
            parts.num_output_tokens, parts.service_class = answer.num_output_tokens, answer.service_class
            parts.unread_ns, parts.unsent_bytes = answer.unread_ns, answer.unsent_bytes
        self._until_first_token(parts, life, milestones, first)
        self._after_first_token(parts, life, milestones, first, end)
        if answer is not None and answer.first_token_ns:
            delivery = answer.first_token_ns - first.time_ns
            parts.ttft["delivery"] += delivery
            parts.decode["delivery"] += answer.last_token_ns - end.time_ns - delivery
        return parts

    def _until_first_token(
        self, parts: RequestParts, life: _Life, milestones: Sequence[RequestRecord], first: RequestRecord
    ) -> None:
        """Arrival, queue, prefill. Time before the last attempt's queue is that of attempts that were lost."""
        before = [record for record in milestones if record.time_ns <= first.time_ns]
        mine = [record for record in before if record.epoch == first.epoch]
        queued = next((record for record in mine if record.what == "queued"), first)
        start_ns = parts.arrival_ns
        if first.epoch:
            parts.ttft["retried"] += queued.time_ns - start_ns
            start_ns = queued.time_ns
        reserved = next((record for record in mine if record.what == "handoff_reserved"), None)
        if reserved is not None and start_ns < reserved.time_ns < queued.time_ns:
            parts.ttft["reserve"] += reserved.time_ns - start_ns
            start_ns = reserved.time_ns
        state, worker = "queue", queued.worker
        for record in mine:
            time_ns = max(record.time_ns, start_ns)  # a worker's turn may have begun before the request came
            if record.worker != worker:
                continue
            if record.what == "admitted" and state != "prefill":
                self._add_wait(parts, state, worker, start_ns, time_ns)
                state, start_ns = "prefill", time_ns
            elif record.what == "preempted" and state == "prefill":
                self._add_prefill(parts, life, worker, start_ns, time_ns)
                state, start_ns = "preempted", time_ns
        if state == "prefill":
            self._add_prefill(parts, life, worker, start_ns, first.time_ns)
        else:
            self._add_wait(parts, state, worker, start_ns, first.time_ns)

    def _add_wait(self, parts: RequestParts, state: str, worker: int, start_ns: int, end_ns: int) -> None:
        if state == "preempted":
            parts.ttft["preempted"] += end_ns - start_ns
            return
        sums = self._between(worker, start_ns, end_ns)
        parts.marked_ttft_ns += sums[Use.MARKED_PREFILL]
        for use, account in enumerate(_QUEUE):
            parts.ttft[account] += sums[use]
        pure = sums[Use.PURE_FLOOR] + sums[Use.PURE_BATCH]
        full = min(pure, sums[Use.FULL])
        parts.ttft["queue_streams"] -= pure
        parts.ttft["queue_seats"] += full
        parts.ttft["queue_memory"] += pure - full

    def _add_prefill(self, parts: RequestParts, life: _Life, worker: int, start_ns: int, end_ns: int) -> None:
        """Steps with a chunk of it: its share of the prompt part is its own. All others it waits for. After its last
        chunk nothing but a decode worker's blocks can be missing."""
        own = [(done_ns, count) for at, done_ns, count in life.chunks if at == worker and start_ns < done_ns <= end_ns]
        if own and (last_ns := own[-1][0]) < end_ns:
            parts.ttft["reserve"] += end_ns - last_ns
            end_ns = last_ns
        sums = self._between(worker, start_ns, end_ns)
        own_ns = 0
        for done_ns, count in own:
            begun_ns = self.sums[worker].begin_of(done_ns)
            part = self._between(worker, max(begun_ns, start_ns), done_ns)
            own_ns += (part[Use.MIXED_PREFILL] + part[Use.PROMPTS]) * count // self._totals[worker, done_ns]
        for use, account in enumerate(_PREFILL):
            parts.ttft[account] += sums[use]
        parts.ttft["prefill_own"] += own_ns
        parts.ttft["prefill_others"] -= own_ns
        if parts.request_id not in self.long_prompts:
            parts.marked_ttft_ns += sums[Use.MARKED_PREFILL]

    def _after_first_token(
        self,
        parts: RequestParts,
        life: _Life,
        milestones: Sequence[RequestRecord],
        first: RequestRecord,
        end: RequestRecord,
    ) -> None:
        """Decode, with the times in which it did not: preempted, handed off, tried again."""
        receivers = {record.worker for record in milestones if record.what == "handoff_reserved"} - {first.worker}
        state, worker, since_ns = ("handoff" if receivers else "decode"), first.worker, first.time_ns
        for time_ns, at, what in _turns(milestones, life.rejoined, first, end):
            if what == "preempted":
                new = "preempted"
            elif state in _ENDED_BY.get(what, ()):
                new = "decode"
            elif what == "queued":
                new = "retried"
            else:
                continue
            if new == state:
                continue
            self._add_decode(parts, state, worker, since_ns, time_ns)
            state, worker, since_ns = new, at, time_ns
        self._add_decode(parts, state, worker, since_ns, end.time_ns)

    def _add_decode(self, parts: RequestParts, state: str, worker: int, start_ns: int, end_ns: int) -> None:
        if state != "decode":
            parts.decode[state] += end_ns - start_ns
            return
        sums = self._between(worker, start_ns, end_ns)
        parts.marked_decode_ns += sums[Use.MARKED_PREFILL]
        for use, account in enumerate(_DECODE):
            parts.decode[account] += sums[use]

    def _between(self, worker: int, start_ns: int, end_ns: int) -> Sums:
        sums = self.sums.get(worker)
        if sums is None:
            return tuple(end_ns - start_ns if use is Use.IDLE else 0 for use in Use)
        return sums.between(start_ns, end_ns)


def _cached(milestones: Iterable[RequestRecord]) -> int:
    return max(
        (record.detail.get("num_cached_tokens", 0) for record in milestones if record.what == "admitted"), default=0
    )


def _turns(
    milestones: Iterable[RequestRecord], rejoined: Iterable[tuple[int, int]], first: RequestRecord, end: RequestRecord
) -> list[tuple[int, int, str]]:
    """What changed after the first token: (time, worker, what), in order of time."""
    turns = [
        (record.time_ns, record.worker, record.what)
        for record in milestones
        if record is not first and first.time_ns <= record.time_ns <= end.time_ns
    ]
    turns += [(time_ns, worker, "rejoined") for worker, time_ns in rejoined if first.time_ns < time_ns <= end.time_ns]
    return sorted(turns, key=lambda turn: turn[0])


def worker_uses(reader: PartsReader, start_ns: int, end_ns: int) -> dict[int, dict[str, float]]:
    """The share of the time that each worker used for what: prefill, decode, slow and idle add up to 1."""
    span = max(1, end_ns - start_ns)
    shares = {}
    for worker, sums in sorted(reader.sums.items()):
        parts = sums.between(start_ns, end_ns)
        prefill = parts[Use.MIXED_PREFILL] + parts[Use.PROMPTS]
        decode = sum(parts[use] for use in (Use.PURE_FLOOR, Use.PURE_BATCH, Use.MIXED_FLOOR, Use.MIXED_BATCH))
        shares[worker] = {
            "prefill": prefill / span,
            "decode": decode / span,
            "slow": parts[Use.SLOW] / span,
            "idle": parts[Use.IDLE] / span,
            "full": parts[Use.FULL] / span,
        }
    assert NUM_USES == Use.FULL
    return shares


def transfers(records: Iterable[Record]) -> list[TransferRecord]:
    """The KV that travelled."""
    return [record for record in records if isinstance(record, TransferRecord)]
