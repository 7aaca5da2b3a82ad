"""What a worker costs a request, in nanoseconds: the one place where costs are computed.

    prefill = (work waiting there + work sent there since its last report + work of what is not cached there) * stretch
              + a share of that work for the requests that come later + what the streams that run there lose by it
              + bringing up what the tiers below the cache hold of the prompt, where that is faster than computing it
    decode  = expected tokens * (its own step + what the other streams' steps grow by); what is due to the load of now
              counts in full where the roles differ, in part between equals, whose loads even out during a long answer
    memory  = a convex price of the KV memory, u / (1 - u), with the growth that is expected of those already there

Every term is time, from the step-time model that the worker itself has fitted, so nothing needs weights. Must never
choose: candidates.py and pairing.py do.
"""

from dataclasses import dataclass, field

from diptych.control.engine.kvcache.tier_loads import MARGIN
from diptych.control.engine.reports import LoadReport
from diptych.control.request import PeerRun
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S

UNBOUNDED = 2**62
OTHERS_SHARE = 8  # this part of a prompt's work is charged again, for the requests that come after it
MAX_STRETCH = 4  # prefill next to running streams is expected to be at most this factor slower than alone
WINDOW_NS = 10 * NS_PER_S  # how far back the share of time that a worker spends on prompts is looked at
MAX_BUSY = 0.9
# What a role implies before any report: a prefill worker will compute prompts for at least
# this share of its time, and on a decode worker at least this many streams will lose by a prompt.
LEAST_BUSY, LEAST_STREAMS = 0.75, 0.125
# Of what an answer suffers and inflicts by the load of a worker that does both jobs, this part lasts: the next requests
# go to the worker with less load. By simulation: 1/4 to 1/10 are equally good for both latencies, 1 scatters shared
# prompts.
LASTING = 0.25
# Where objectives say what streams may lose (local_prefill "objective"), a stream's loss counts as this power of the
# share
# of its objective that its steps take: 6 % where they take half of it, all where they take it whole.
OBJECTIVE_POWER = 4
ACKNOWLEDGED = 0  # the time of a dispatch that the worker has acknowledged: any later report covers it


def kv_price_ns(used: int, total: int, price_ns: int) -> int:
    """The convex price of memory: price * u / (1 - u) for the share u in use, which ends at 999."""
    free = total - used
    return 999 * price_ns if free * 1000 < total else price_ns * max(0, used) // free


@dataclass(slots=True)
class WorkerPrices:
    """What a prompt and its answer cost on one worker, all in nanoseconds. standing: any prompt. memory: the part of it
    that is memory. idle_at: a time; work reported until then is in front. stretch: factor on that work. token, pair: of
    what is computed of the prompt, with what others lose by it. work_token, work_pair: the same, the work alone. block:
    of memory filled. step, context: of a step of the answer, and of a token of context in it. copy: of a block that is
    copied up from host memory, with what others lose by it; work_copy: alone. read: of one that is read from disk (0:
    none is). read_wait: before the first of these. peer, peer_wait: the same of host memories of other workers.
    Replaced, never changed (and not frozen only because one is made at every change of a worker, and read many times in
    every decision)."""

    standing: float
    memory: int
    idle_at: int
    stretch: float
    token: float
    pair: float
    work_token: float
    work_pair: float
    block: float
    step: float
    context: float
    copy: float = 0.0
    work_copy: float = 0.0
    read: float = 0.0
    read_wait: float = 0.0
    peer: float = 0.0
    peer_wait: float = 0.0


def unknown_prices(standing: float = 0) -> WorkerPrices:
    """Prices before the first report."""
    return WorkerPrices(standing, 0, 0, 1.0, 1 + 1 / OTHERS_SHARE, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class RequestDemand:
    """One request, as costs need it. num_output_tokens: expected, at least 1. held: leading tokens that each worker
    holds in its cache. ready: those that it need not compute, with what it would bring up from the tiers below;
    raise_ns: what that costs. most_tokens: of prompt and answer. is_prefill_only: see RoutingRequest; False where that
    makes no difference. peer_runs: what the worker at a position may read from another of its host."""

    num_tokens: int
    num_output_tokens: int
    held: list[int]
    ready: list[int]
    raise_ns: list[float]
    may_hand_off: bool
    now: int
    most_tokens: int
    is_prefill_only: bool = False
    peer_runs: dict[int, PeerRun] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Decode steps that are expected."""
        return self.num_output_tokens - 1

    @property
    def middle(self) -> int:
        """Mean context of a step of the answer."""
        return self.num_tokens + self.num_output_tokens // 2


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
        """The share of time that the worker was busy, in [0, 0.9]."""
        if now >= self.begun_ns + WINDOW_NS:
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
    streams, context, growth: the requests that decode there or are about to, their expected mean context in all, and
    the tokens that they are expected to generate. loss_power: see OBJECTIVE_POWER. prompt_blocks, answer_blocks: how
    many blocks the worker takes for the tokens of one, of a prompt and when an answer grows by them.
    """

    report: LoadReport | None = None
    is_up: bool = True
    role: Role = "both"
    work: dict[str, tuple[int, int]] = field(default_factory=dict)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    work_sum_ns: int = 0  # of ``work``
    memory_sum: int = 0  # of ``memory``
    streams: int = 0
    context: int = 0
    growth: int = 0
    busy: BusyShare = field(default_factory=BusyShare)
    loss_power: int = 1
    prompt_blocks: int = 1
    answer_blocks: int = 1
    _prices: WorkerPrices = field(default_factory=unknown_prices)
    _terms: tuple[int, int, int] | None = None  # of the prices that are still to be made

    @property
    def prices(self) -> WorkerPrices:
        """What follows from all that, as of the last ``reprice``. Most workers change several times between decisions,
        so prices are made when they are read."""
        if self._terms is not None:
            price_ns, now, block_size = self._terms
            self._prices, self._terms = self._priced(price_ns, now, block_size), None
        return self._prices

    def send(self, request_id: str, covered_ns: int, work_ns: int, num_blocks: int) -> None:
        """A dispatch; reports from ``covered_ns`` on know of it."""
        if work_ns:
            self.work[request_id] = (covered_ns, work_ns)
            self.work_sum_ns += work_ns
        if num_blocks:
            self.memory[request_id] = (covered_ns, num_blocks)
            self.memory_sum += num_blocks

    def drop_work(self, request_id: str) -> None:
        """Drop a prompt's work: it is computed, or given up."""
        self.work_sum_ns -= self.work.pop(request_id, (0, 0))[1]

    def drop(self, request_id: str) -> None:
        """Drop a request that ended."""
        self.drop_work(request_id)
        self.memory_sum -= self.memory.pop(request_id, (0, 0))[1]

    def acknowledged(self, request_id: str, *, holds_blocks: bool) -> None:
        """The worker has it: from its next report on, its work is in the backlog, and its blocks too once it holds
        them."""
        if request_id in self.work:
            self.work[request_id] = (ACKNOWLEDGED, self.work[request_id][1])
        if holds_blocks and request_id in self.memory:
            self.memory[request_id] = (ACKNOWLEDGED, self.memory[request_id][1])

    def on_report(self, report: LoadReport) -> None:
        """A report of the worker; what it covers is no longer counted here."""
        self.report = report
        for request_id in report.computed:
            self.drop_work(request_id)
        for request_id in [name for name, (covered_ns, _) in self.work.items() if covered_ns <= report.time_ns]:
            self.drop_work(request_id)
        for request_id in [name for name, (covered_ns, _) in self.memory.items() if covered_ns <= report.time_ns]:
            self.memory_sum -= self.memory.pop(request_id)[1]

    def join(self, sign: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request will decode there (1), or no longer does (-1); with its expected answer."""
        self.streams += sign
        self.context += sign * (num_prompt_tokens + num_output_tokens // 2)
        self.growth += sign * num_output_tokens

    def reprice(self, price_ns: int, now: int = 0, block_size: int = 1) -> None:
        """Recompute what costs depend on besides the prompt, after a change and before the next."""
        self._terms = (price_ns, now, block_size)

    def _priced(self, price_ns: int, now: int, block_size: int) -> WorkerPrices:
        report = self.report
        if report is None:
            return unknown_prices(self.work_sum_ns)
        used = report.used_blocks + self.memory_sum * self.prompt_blocks
        if self.growth:
            used += max(0, self.growth - report.output_tokens) // block_size * self.answer_blocks
        memory_ns = kv_price_ns(used, report.num_blocks, price_ns)
        base_ns = report.fixed_ns + report.sequence_ns * self.streams + report.context_ns * self.context
        stretch, loss = self._next_to_streams(report, base_ns)
        busy = self.busy.share(now)
        if self.role == "prefill" and busy < LEAST_BUSY:
            busy = LEAST_BUSY
        slower, waiting = 1 / (1 - busy), busy / (1 - busy)
        others = self.streams + waiting  # the streams that lose what this request adds to each step
        lasting = LASTING if self.role == "both" else 1.0
        alone_ns = report.fixed_ns + report.sequence_ns
        load_ns = (base_ns + report.sequence_ns) * slower + report.sequence_ns * others - alone_ns
        return WorkerPrices(  # (by position, which is faster)
            self.work_sum_ns * stretch + memory_ns,
            memory_ns,
            report.time_ns + report.backlog_ns,
            stretch,
            report.token_ns * (stretch + loss),
            report.pair_ns * (stretch + loss),
            report.token_ns,
            report.pair_ns,
            price_ns * self.prompt_blocks / report.num_blocks,
            alone_ns + lasting * load_ns,
            report.context_ns * (1 + lasting * (slower - 1 + others)),
            report.copy_block_ns * (stretch + loss),
            report.copy_block_ns,
            report.read_block_ns,
            report.read_wait_ns,
            report.peer_block_ns,
            report.peer_wait_ns,
        )

    def work_ns(self, left: int, cached: int) -> int:
        """What computing ``left`` prompt tokens after ``cached`` ones takes there."""
        return int(work_ns(self.prices, left, cached))

    def _next_to_streams(self, report: LoadReport, base_ns: float) -> tuple[float, float]:
        """Prompts next to running streams: chunks get the part of a step that the objective leaves (the first factor),
        and each stream loses the time of the chunk, which matters the more the fuller its objective is (the second)."""
        streams = max(self.streams, LEAST_STREAMS) if self.role == "decode" else self.streams
        if not self.streams or not report.tpot_ns:
            return 1.0, 1 / OTHERS_SHARE + streams
        share = min(1.0, base_ns / report.tpot_ns)
        return 1 / max(1 - share, 1 / MAX_STRETCH), 1 / OTHERS_SHARE + share**self.loss_power * self.streams


def pairs(left: int, cached: int) -> int:
    """(query, key) pairs of ``left`` tokens after ``cached`` ones."""
    return left * cached + left * (left + 1) // 2


def work_ns(prices: WorkerPrices, left: int, cached: int) -> float:
    """Computing ``left`` prompt tokens after ``cached`` ones, alone."""
    return prices.work_token * left + prices.work_pair * pairs(left, cached)


def raised(
    prices: WorkerPrices, cached: int, num_host: int, num_disk: int, num_peer: int, size: int
) -> tuple[int, float]:
    """Price bringing up the lower tiers' part of a prompt. Its first ``cached`` tokens are in a worker's cache, then
    ``num_host`` blocks in its host memory, then ``num_disk`` blocks on its disk, which are also ``num_peer`` blocks in
    another worker's host memory. Returns the tokens that need no computing, and the cost of loading them; the worker
    loads what pays, see Tiers.worth_copying and TierLoads.begin."""
    cost_ns = 0.0
    if num_host:
        if num_host * prices.work_copy >= work_ns(prices, num_host * size, cached):
            return cached, 0.0
        cached, cost_ns = cached + num_host * size, num_host * prices.copy
    disk_ns = _saved_ns(prices, prices.read, prices.read_wait, cached, num_disk, size)
    peer_ns = _saved_ns(prices, prices.peer, prices.peer_wait, cached, num_peer, size)
    if disk_ns >= peer_ns:
        if not disk_ns:
            return cached, cost_ns
        return cached + num_disk * size, cost_ns + prices.read_wait + num_disk * (prices.read + prices.copy)
    return cached + num_peer * size, cost_ns + prices.peer_wait + num_peer * (prices.peer + prices.copy)


def _saved_ns(prices: WorkerPrices, block_ns: float, wait_ns: float, cached: int, num_blocks: int, size: int) -> float:
    """What loading these blocks saves; 0 where it does not pay."""
    if not num_blocks or not block_ns:
        return 0.0
    gain_ns = work_ns(prices, num_blocks * size, cached)
    price_ns = wait_ns + num_blocks * (block_ns + prices.work_copy)
    return gain_ns - price_ns if gain_ns > MARGIN * price_ns else 0.0


def prompt_ns(prices: WorkerPrices, left: int, cached: int) -> float:
    """What the prompt costs: its work, and what others lose by it."""
    return prices.token * left + prices.pair * pairs(left, cached)
