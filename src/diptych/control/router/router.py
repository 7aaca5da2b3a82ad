"""Where a request goes: filter the replicas, give each a cost in seconds, take the cheapest.

    cost = work waiting there + work sent there since its last report + work of this prompt that is not cached there
           + a convex price of its KV memory

Every term is time, from the step-time model that the replica itself has fitted, so nothing needs weights. Owns the
front end's picture of the replicas; never asks one. Whether the picture was right is counted: see ``hit_error``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.control.errors import ConfigError
from diptych.control.router.load import LoadReport
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.slo import NS_PER_MS

UNBOUNDED = 2**62
OTHERS_SHARE = 8  # one part in so many of a prompt's work is charged again, for those who come after it


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """kv_price_ns: what a replica costs more when its KV would be half full (the price is kv_price * u / (1 - u) for
    the share u in use). stale_ns: a replica that has not reported for so long gets nothing (0: never)."""

    kv_price_ns: int = 50 * NS_PER_MS
    stale_ns: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_price_ns", "stale_ns"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0", param=name)


@dataclass(frozen=True, slots=True)
class Decision:
    """The replica, what it was expected to cost, and how many leading tokens it was expected to have cached."""

    replica: int
    cost_ns: int
    num_cached_tokens: int


@dataclass(slots=True)
class _View:
    """One replica as the front end sees it. ``sent``: (time, work, blocks) of dispatches that no report covers yet."""

    report: LoadReport | None = None
    is_up: bool = True
    sent: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    sent_work_ns: int = 0  # sums over ``sent``
    sent_blocks: int = 0

    def add(self, request_id: str, now: int, work_ns: int, num_blocks: int) -> None:
        """A dispatch."""
        self.sent[request_id] = (now, work_ns, num_blocks)
        self.sent_work_ns += work_ns
        self.sent_blocks += num_blocks

    def drop(self, request_id: str) -> None:
        """It ended, or a report covers it."""
        _, work_ns, num_blocks = self.sent.pop(request_id, (0, 0, 0))
        self.sent_work_ns -= work_ns
        self.sent_blocks -= num_blocks


class Router:
    """All replicas of one pool."""

    def __init__(self, num_replicas: int, block_size: int, config: RouterConfig | None = None) -> None:
        if num_replicas < 1 or block_size < 1:
            raise ConfigError(
                f"a router of {num_replicas} replicas with blocks of {block_size}; both must be at least 1",
                param="num_replicas",
            )
        self.index = PrefixIndex(num_replicas)
        self.predicted_tokens = 0
        self.actual_tokens = 0
        self.prompt_tokens = 0
        self._config = config or RouterConfig()
        self._block_size = block_size
        self._views = [_View() for _ in range(num_replicas)]
        self._expected: dict[str, tuple[int, int]] = {}  # request -> (replica, tokens expected in the cache)

    @property
    def hit_error(self) -> float:
        """|cached as predicted - cached in fact| over the prompt tokens so far (0: the picture was right)."""
        return abs(self.predicted_tokens - self.actual_tokens) / max(1, self.prompt_tokens)

    def on_report(self, replica: int, report: LoadReport) -> None:
        """A replica reports; dispatches before that are in its backlog."""
        view = self._views[replica]
        view.report = report
        for request_id in [one for one, entry in view.sent.items() if entry[0] <= report.time_ns]:
            view.drop(request_id)

    def set_up(self, replica: int, is_up: bool) -> None:
        """The replica came (empty) or went."""
        if not is_up:
            self.index.remove(replica)
            self._views[replica] = _View(is_up=False)
        self._views[replica].is_up = is_up

    def route(
        self, request_id: str, num_prompt_tokens: int, hashes: Sequence[bytes], now: int, *, num_blocks: int = 0
    ) -> Decision | None:
        """The replica for a request; None when none may take it. ``num_blocks``: what it will need at most (a replica
        that does not have so many in all is left out)."""
        matches = self.index.matches(hashes, now)
        longest = (num_prompt_tokens - 1) // self._block_size
        best: Decision | None = None
        least = UNBOUNDED
        for replica, view in enumerate(self._views):
            if view.is_up and (view.report is None or self._may_take(view.report, num_blocks, now)):
                cached = min(matches[replica], longest) * self._block_size
                cost_ns = self._cost_ns(view, num_prompt_tokens - cached, cached, now)
                if cost_ns < least:
                    least, best = cost_ns, Decision(replica, cost_ns, cached)
        if best is None:
            return None
        view = self._views[best.replica]
        work_ns = self._work_ns(view, num_prompt_tokens - best.num_cached_tokens, best.num_cached_tokens)
        new_blocks = -(-(num_prompt_tokens - best.num_cached_tokens) // self._block_size)
        view.add(request_id, now, work_ns, new_blocks)
        self.index.predict(best.replica, hashes[matches[best.replica] :], now)
        self._expected[request_id] = (best.replica, best.num_cached_tokens)
        return best

    def on_admitted(self, request_id: str, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A replica says what it found in its cache for a request that was sent there."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        self.prompt_tokens += num_prompt_tokens
        self.predicted_tokens += expected[1]
        self.actual_tokens += num_cached_tokens

    def on_ended(self, request_id: str) -> None:
        """The request ended, wherever it was."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._views[expected[0]].drop(request_id)

    def _may_take(self, report: LoadReport, num_blocks: int, now: int) -> bool:
        stale_ns = self._config.stale_ns
        return num_blocks <= report.num_blocks and not (stale_ns and now - report.time_ns > stale_ns)

    def _work_ns(self, view: _View, left: int, cached: int) -> int:
        """What computing ``left`` tokens after ``cached`` ones takes."""
        report = view.report
        if report is None:
            return left
        return int(report.token_ns * left + report.pair_ns * (left * cached + left * (left + 1) // 2))

    def _cost_ns(self, view: _View, left: int, cached: int, now: int) -> int:
        report = view.report
        if report is None:
            return left + left // OTHERS_SHARE + view.sent_work_ns
        pairs = left * cached + left * (left + 1) // 2
        work_ns = int(report.token_ns * left + report.pair_ns * pairs)
        waiting_ns = max(0, report.backlog_ns - now + report.time_ns)
        cost_ns = work_ns + work_ns // OTHERS_SHARE + view.sent_work_ns + waiting_ns
        free = report.num_blocks - report.used_blocks - view.sent_blocks - left // self._block_size - 1
        if free * 1000 < report.num_blocks:  # less than a thousandth is left: as dear as memory gets
            return cost_ns + 999 * self._config.kv_price_ns
        return cost_ns + self._config.kv_price_ns * (report.num_blocks - free) // free
