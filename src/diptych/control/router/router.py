"""Where a request goes: filter the replicas, give each a cost in seconds, take the cheapest.

The costs are those of scorers.py, for replicas that do both jobs. Owns the front end's picture of the replicas; never
asks one. Whether the picture was right is counted: see ``hit_error``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.control.router.load import LoadReport
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.scorers import UNBOUNDED, WorkerView, prompt_ns, queue_ns
from diptych.control.slo import NS_PER_MS


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
        self._views = [WorkerView() for _ in range(num_replicas)]
        self._expected: dict[str, tuple[int, int]] = {}  # request -> (replica, tokens expected in the cache)

    @property
    def hit_error(self) -> float:
        """|cached as predicted - cached in fact| over the prompt tokens so far (0: the picture was right)."""
        return abs(self.predicted_tokens - self.actual_tokens) / max(1, self.prompt_tokens)

    def on_report(self, replica: int, report: LoadReport) -> None:
        """A replica reports; dispatches before that are in its backlog."""
        view = self._views[replica]
        view.on_report(report)
        view.reprice(self._config.kv_price_ns)

    def set_up(self, replica: int, is_up: bool) -> None:
        """The replica came (empty) or went."""
        if not is_up:
            self.index.remove(replica)
            self._views[replica] = WorkerView(is_up=False)
        self._views[replica].is_up = is_up

    def route(
        self, request_id: str, num_prompt_tokens: int, hashes: Sequence[bytes], now: int, *, num_blocks: int = 0
    ) -> Decision | None:
        """The replica for a request; None when none may take it. ``num_blocks``: what it will need at most (a replica
        that does not have so many in all is left out)."""
        matches = self.index.matches(hashes, now)
        best = self._cheapest(matches, num_prompt_tokens, num_blocks, now)
        if best is None:
            return None
        view = self._views[best.replica]
        left = num_prompt_tokens - best.num_cached_tokens
        view.send(request_id, now, view.work_ns(left, best.num_cached_tokens), -(-left // self._block_size))
        view.reprice(self._config.kv_price_ns)
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
            view = self._views[expected[0]]
            view.drop(request_id)
            view.reprice(self._config.kv_price_ns)

    def _cheapest(self, matches: list[int], num_tokens: int, num_blocks: int, now: int) -> Decision | None:
        """One pass over the replicas; most have nothing of the prompt, and their work is computed once per price."""
        size = self._block_size
        longest = (num_tokens - 1) // size
        best, least = -1, UNBOUNDED
        prices: tuple[float, float, int] | None = None
        whole_ns = 0
        for replica, view in enumerate(self._views):
            report = view.report
            if not view.is_up or (report is not None and not self._may_take(report, num_blocks, now)):
                continue
            matched = matches[replica]
            if matched:
                left = num_tokens - min(matched, longest) * size
                own_ns = self._own_ns(view, left, num_tokens - left)
            else:
                here = (report.token_ns, report.pair_ns, report.num_blocks) if report else None
                if here != prices or not whole_ns:
                    prices, whole_ns = here, self._own_ns(view, num_tokens, 0)
                own_ns = whole_ns
            cost_ns = int(queue_ns(view.prices, now)) + own_ns
            if cost_ns < least:
                best, least = replica, cost_ns
        if best < 0:
            return None
        return Decision(best, least, min(matches[best], longest) * self._block_size)

    def _own_ns(self, view: WorkerView, left: int, cached: int) -> int:
        """What the prompt itself costs there: its work, a share of it again, and the memory that it will fill."""
        num_blocks = -(-left // self._block_size)
        return int(prompt_ns(view.prices, left, cached) + view.prices.block * num_blocks)

    def _may_take(self, report: LoadReport, num_blocks: int, now: int) -> bool:
        stale_ns = self._config.stale_ns
        return num_blocks <= report.num_blocks and not (stale_ns and now - report.time_ns > stale_ns)
