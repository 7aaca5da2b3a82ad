"""Paths between two workers over which KV does not arrive: for a while, no request is handed over there.

Both workers can be well, and each can reach the front end; only they do not reach each other (a partition, or one
direction of a link). Owns which paths are suspected, until when, and the choice of another route.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from diptych.control.router.routing import Route, Router, RoutingRequest
from diptych.control.slo import NS_PER_S

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 2 * NS_PER_S, 60 * NS_PER_S

Path = tuple[int, int]  # prefill worker, decode worker


class Paths:
    """counts: of the core. A path is broken when two transfers in a row fail there, and again by each that fails
    after a pause, which doubles each time. A handoff that arrives, or a new process at either end, makes it whole."""

    def __init__(self, counts: Counter[str]) -> None:
        self.broken: dict[Path, int] = {}  # path -> until when it is left alone
        self._pauses: dict[Path, int] = {}  # the next pause, of paths where the last transfer failed
        self._counts = counts

    def on_broken(self, prefill: int, decode: int, now: int) -> None:
        """A transfer failed there."""
        path = (prefill, decode)
        until_ns = self.broken.get(path)
        if until_ns is not None and now < until_ns:  # an attempt from before the pause
            return
        pause_ns = self._pauses.get(path)
        if pause_ns is None:  # once may be chance
            self._pauses[path] = FIRST_PAUSE_NS
            return
        self.broken[path] = now + pause_ns
        self._pauses[path] = min(2 * pause_ns, LONGEST_PAUSE_NS)
        self._counts["paths_broken"] += 1

    def on_whole(self, prefill: int, decode: int) -> None:
        """A handoff arrived there."""
        if self._pauses:
            self.broken.pop((prefill, decode), None)
            self._pauses.pop((prefill, decode), None)

    def on_worker_changed(self, worker: int) -> None:
        """Forget a worker's paths when its process has ended: the next may be reached otherwise."""
        for path in [path for path in self._pauses if worker in path]:
            self.on_whole(*path)

    def is_broken(self, route: Route, now: int) -> bool:
        """Whether this route hands over where nothing arrives."""
        until_ns = self.broken.get((route.prefill, route.decode))
        return until_ns is not None and now < until_ns

    def broken_at(self, now: int) -> list[Path]:
        """The paths that are left alone now."""
        return [path for path, until_ns in self.broken.items() if now < until_ns]

    def route(
        self,
        router: Router,
        asked: RoutingRequest,
        now: int,
        closes_circle: Callable[[int, int], bool],
        failed: Path | None = None,
    ) -> Route | None:
        """The router's choice, if KV arrives there; else one with another prefill worker, else one that needs no
        handoff. closes_circle: whether two workers would wait for each other. failed: where a transfer of this very
        request has failed: it does not wait for another there."""
        route = router.route(asked, now)
        if route is not None and self._is_left(route, now, failed):
            route = router.route(replace(asked, avoid=asked.avoid | {route.prefill}), now)
        if route is None or not (closes_circle(route.prefill, route.decode) or self._is_left(route, now, failed)):
            return route
        return router.route(replace(asked, must_stay_whole=True), now)

    def _is_left(self, route: Route, now: int, failed: Path | None) -> bool:
        """Whether the path of this route is not to be taken."""
        return (route.prefill, route.decode) == failed or self.is_broken(route, now)
