"""What a worker costs a request, in nanoseconds: the one place where costs are computed.

    prefill = (work waiting there + work sent there since its last report + work of what is not cached there) * stretch
              + a share of that work for those who come later + what the streams that run there lose by it
    decode  = expected tokens * (its own step + what the other streams' steps grow by)
    memory  = a convex price of the KV memory, u / (1 - u), with the growth that is expected of those already there

Every term is time, from the step-time model that the worker itself has fitted, so nothing needs weights. Must never
choose: that is placement.py and router.py.
"""

from dataclasses import dataclass, field

from diptych.control.router.load import LoadReport
from diptych.control.slo import NS_PER_S

UNBOUNDED = 2**62
OTHERS_SHARE = 8  # one part in so many of a prompt's work is charged again, for those who come after it
MAX_STRETCH = 4  # prefill next to running streams is expected to be at most so many times slower than alone
WINDOW_NS = 10 * NS_PER_S  # how far back the share of time that a worker spends on prompts is looked at
MAX_BUSY = 0.9
HEARD = 0  # the time of a dispatch that the worker has acknowledged: any later report covers it
HOST_RESTORED = 25  # percent of its computation that a token in the host tier costs: a credit of 0.75


def kv_price_ns(used: int, total: int, price_ns: int) -> int:
    """The convex price of memory: price * u / (1 - u) for the share u in use, which ends at 999."""
    free = total - used
    return 999 * price_ns if free * 1000 < total else price_ns * max(0, used) // free


@dataclass(slots=True)
class BusyShare:
    """The share of its time for which a worker was given prompt work, over the last one to two windows."""

    begun_ns: int = 0
    now_ns: int = 0  # work given in this window
    before_ns: int = 0  # in the window before

    def add(self, now: int, work_ns: int) -> None:
        """Work was given."""
        self._pass_time(now)
        self.now_ns += work_ns

    def share(self, now: int) -> float:
        """In [0, 0.9]."""
        self._pass_time(now)
        left = WINDOW_NS - (now - self.begun_ns)
        return min(MAX_BUSY, (self.now_ns + self.before_ns * left // WINDOW_NS) / WINDOW_NS)

    def _pass_time(self, now: int) -> None:
        passed = (now - self.begun_ns) // WINDOW_NS
        if passed > 0:
            self.before_ns = self.now_ns if passed == 1 else 0
            self.now_ns = 0
            self.begun_ns += passed * WINDOW_NS


@dataclass(slots=True)
class WorkerView:
    """One worker as the front end sees it, with every sum that a decision needs kept ready.

    work, memory: dispatches that no report covers yet, as (time from which one does, nanoseconds or blocks).
    idle_at_ns: when what it reported will be done. standing_ns: what it costs any prompt now, besides that and the
    prompt's own work: the work sent since, and the price of its memory. streams, context, growth: the requests that
    decode there or are about to, their expected mean context, and the tokens that they are expected to generate.
    """

    report: LoadReport | None = None
    is_up: bool = True
    work: dict[str, tuple[int, int]] = field(default_factory=dict)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    work_sum_ns: int = 0  # of ``work``
    memory_sum: int = 0  # of ``memory``
    streams: int = 0
    context: int = 0
    growth: int = 0
    busy: BusyShare = field(default_factory=BusyShare)
    idle_at_ns: int = 0
    memory_ns: int = 0  # the price of its memory
    standing_ns: int = 0
    stretch: int = 1000  # per mille: how much slower a prompt runs next to the streams
    charge: int = 1000 // OTHERS_SHARE  # per mille of a prompt's work: what others lose by it
    token_decode_ns: float = 0.0  # decode cost of a token without context; per token of context
    context_decode_ns: float = 0.0

    def send(self, request_id: str, covered_ns: int, work_ns: int, num_blocks: int) -> None:
        """A dispatch; reports from ``covered_ns`` on know of it."""
        if work_ns:
            self.work[request_id] = (covered_ns, work_ns)
            self.work_sum_ns += work_ns
        if num_blocks:
            self.memory[request_id] = (covered_ns, num_blocks)
            self.memory_sum += num_blocks

    def drop_work(self, request_id: str) -> None:
        """Its prompt is computed, or given up."""
        self.work_sum_ns -= self.work.pop(request_id, (0, 0))[1]

    def drop(self, request_id: str) -> None:
        """It ended."""
        self.drop_work(request_id)
        self.memory_sum -= self.memory.pop(request_id, (0, 0))[1]

    def heard(self, request_id: str, *, holds_blocks: bool) -> None:
        """The worker has it: from its next report on, its work is in the backlog, and its blocks too once it holds
        them."""
        if request_id in self.work:
            self.work[request_id] = (HEARD, self.work[request_id][1])
        if holds_blocks and request_id in self.memory:
            self.memory[request_id] = (HEARD, self.memory[request_id][1])

    def on_report(self, report: LoadReport) -> None:
        """A report; what it covers is no longer counted here."""
        self.report = report
        self.idle_at_ns = report.time_ns + report.backlog_ns
        for one in [one for one, (covered_ns, _) in self.work.items() if covered_ns <= report.time_ns]:
            self.drop_work(one)
        for one in [one for one, (covered_ns, _) in self.memory.items() if covered_ns <= report.time_ns]:
            self.memory_sum -= self.memory.pop(one)[1]

    def join(self, sign: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request will decode there (1), or no longer does (-1); with its expected answer."""
        self.streams += sign
        self.context += sign * (num_prompt_tokens + num_output_tokens // 2)
        self.growth += sign * num_output_tokens

    def reprice(self, price_ns: int, now: int = 0, block_size: int = 1) -> None:
        """After a change: everything that costs depend on besides the prompt."""
        report = self.report
        if report is None:
            self.standing_ns = self.work_sum_ns
            return
        used = report.used_blocks + self.memory_sum
        if self.growth:
            used += max(0, self.growth - report.output_tokens) // block_size
        self.memory_ns = kv_price_ns(used, report.num_blocks, price_ns)
        busy = self.busy.share(now) if now else 0.0
        base_ns = report.fixed_ns + report.sequence_ns * self.streams + report.context_ns * self.context
        self._charge_streams(report, base_ns)
        self.standing_ns = self.work_sum_ns * self.stretch // 1000 + self.memory_ns
        slower, waiting = 1 / (1 - busy), busy / (1 - busy)
        others = self.streams + waiting  # who loses what this request adds to each step
        self.token_decode_ns = (base_ns + report.sequence_ns) * slower + report.sequence_ns * others
        self.context_decode_ns = report.context_ns * (slower + others)

    def queue_ns(self, now: int) -> int:
        """What it costs any prompt now: work in front of it, and memory."""
        left = self.idle_at_ns - now
        return self.standing_ns + left * self.stretch // 1000 if left > 0 else self.standing_ns

    def is_idle(self, now: int) -> bool:
        """Whether nothing waits, is computed or decodes there, as far as is known."""
        return not self.streams and not self.work and self.idle_at_ns <= now

    def work_ns(self, left: int, cached: int) -> int:
        """What computing ``left`` prompt tokens after ``cached`` ones takes there."""
        if self.report is None:
            return left
        pairs = left * cached + left * (left + 1) // 2
        return int(self.report.token_ns * left + self.report.pair_ns * pairs)

    def charged_ns(self, work_ns: int) -> int:
        """What work of the prompt costs there: itself, stretched, and what others lose."""
        return work_ns * (self.stretch + self.charge) // 1000

    def blocks_ns(self, num_blocks: int, price_ns: int) -> int:
        """The price of memory that the request itself will fill."""
        return price_ns * num_blocks // self.report.num_blocks if self.report else 0

    def decode_ns(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Its expected steps there after the first token, and what they cost the other streams."""
        if num_output_tokens < 2:
            return 0
        context = num_prompt_tokens + num_output_tokens // 2
        return int((num_output_tokens - 1) * (self.token_decode_ns + self.context_decode_ns * context))

    def _charge_streams(self, report: LoadReport, base_ns: float) -> None:
        """Prompts next to running streams: chunks get the part of a step that the objective leaves, and each stream
        loses the time of the chunk, which matters the more the fuller its objective is."""
        self.stretch, self.charge = 1000, 1000 // OTHERS_SHARE
        if not self.streams:
            return
        share = 1.0
        if report.tpot_ns:
            share = min(1.0, base_ns / report.tpot_ns)
            self.stretch = int(1000 / max(1 - share, 1 / MAX_STRETCH))
        self.charge += int(1000 * share * self.streams)
