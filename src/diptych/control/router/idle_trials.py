"""Idle workers that were slow when they last computed are tried again: without work they learn no new prices.

Warm-up beside other workers, or a disturbance that has passed, can leave a worker with prices several times those of
its equals, and it would never be chosen again. So a worker that has been idle for a while is priced as the cheapest of
its equals until it reports; if it is still slow then, the next trial comes after twice the time, so that a worker that
really is slower costs a request now and then.
"""

from collections.abc import Sequence
from dataclasses import replace

from diptych.control.engine.reports import LoadReport
from diptych.control.router.costs import WorkerView
from diptych.control.router.topology import Role, WorkerInfo
from diptych.control.slo import NS_PER_S

FIRST_TRIAL_NS = 5 * NS_PER_S  # of being idle
LAST_INTERVAL_NS = 320 * NS_PER_S
SLOW = 1.5  # times the cheapest of its equals: less may be the noise of measurement
PROMPT_TOKENS, ANSWER_TOKENS = 512, 64  # of the request by which workers are compared


class IdleTrials:
    """Trials of idle workers, by position in the router's lists ``workers`` and ``views``. A review is due at
    ``due_ns``."""

    def __init__(self, workers: Sequence[WorkerInfo], views: Sequence[WorkerView]) -> None:
        self.due_ns = FIRST_TRIAL_NS
        self._workers = workers
        self._views = views
        self._intervals_ns: dict[int, int] = {}  # position -> how long the worker is idle before its next trial

    def review(self, now: int) -> list[WorkerView]:
        """Price idle workers whose prices are old and high like the cheapest of their equals; returns their views."""
        self.due_ns = now + FIRST_TRIAL_NS
        cheapest: dict[tuple[Role, int, int], tuple[float, int]] = {}
        for position, view in enumerate(self._views):
            if view.is_up and view.report is not None:
                found = (typical_ns(view.report), position)
                kind = self._kind(position)
                cheapest[kind] = min(found, cheapest.get(kind, found))
        tried = []
        for position, view in enumerate(self._views):
            report = view.report
            if not view.is_up or report is None:
                continue
            least_ns, best = cheapest[self._kind(position)]
            if typical_ns(report) <= SLOW * least_ns:
                if best != position and report.time_ns + FIRST_TRIAL_NS > now:  # it has computed since, and is not slow
                    self._intervals_ns.pop(position, None)
                continue
            interval_ns = self._intervals_ns.get(position, FIRST_TRIAL_NS)
            is_idle = not (view.streams or view.work or report.backlog_ns)
            if is_idle and now >= report.time_ns + interval_ns:
                self._intervals_ns[position] = min(2 * interval_ns, LAST_INTERVAL_NS)
                prices = self._views[best].report
                assert prices is not None
                view.report = replace(
                    report,
                    token_ns=prices.token_ns,
                    pair_ns=prices.pair_ns,
                    fixed_ns=prices.fixed_ns,
                    sequence_ns=prices.sequence_ns,
                    context_ns=prices.context_ns,
                )
                tried.append(view)
        return tried

    def _kind(self, position: int) -> tuple[Role, int, int]:
        """Workers of one kind are expected to be equally fast."""
        info = self._workers[position]
        return self._views[position].role, info.share.num_units, info.model_copy


def typical_ns(report: LoadReport) -> float:
    """What a request of PROMPT_TOKENS and ANSWER_TOKENS takes alone, by the prices of this report."""
    prompt_ns = PROMPT_TOKENS * report.token_ns + PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2 * report.pair_ns
    step_ns = report.fixed_ns + report.sequence_ns + PROMPT_TOKENS * report.context_ns
    return report.fixed_ns + prompt_ns + ANSWER_TOKENS * step_ns
