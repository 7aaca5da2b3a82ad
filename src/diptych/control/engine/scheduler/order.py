"""Who goes first. Every order is a key that does not change while a request waits, so that queues can be heaps.

Aging is linear, and linear aging needs no clock: "work minus a share of the time waited" orders requests exactly as
"work plus that share of the arrival time" does.
"""

from collections.abc import Callable

from diptych.control.config import SchedulerConfig
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.request import Request
from diptych.control.slo import Slo

OrderKey = tuple[int, ...]
Order = Callable[[Request], OrderKey]

DEFAULT_TTFT_NS = 10_000_000_000  # the deadline of a request without a TTFT objective in order "deadline"
_RESUMED, _FRESH = 0, 1  # requests that lost their place come back before new ones of their priority


def _tier(request: Request) -> int:
    return _RESUMED if request.num_preemptions else _FRESH


def make_order(config: SchedulerConfig, slo: Slo, model: StepTimeModel) -> Order:
    """The key function of ``config.order``; lower keys go first, the arrival number breaks ties."""

    def work_ns(request: Request) -> int:
        start = max(request.num_scheduled_tokens, request.cached_tokens_at_arrival)
        return model.prefill_work_ns(start, request.num_tokens - start)

    def fcfs(request: Request) -> OrderKey:
        return (_tier(request), request.arrival_ns, request.number)

    def priority(request: Request) -> OrderKey:
        return (request.priority, _tier(request), request.arrival_ns, request.number)

    def shortest(request: Request) -> OrderKey:
        aged = work_ns(request) + int(config.aging * request.arrival_ns)
        return (request.priority, _tier(request), aged, request.number)

    def deadline(request: Request) -> OrderKey:
        slack_end = request.arrival_ns + ttft_ns(request, slo) - work_ns(request)
        return (request.priority, _tier(request), slack_end, request.number)

    orders: dict[str, Order] = {"fcfs": fcfs, "priority": priority, "shortest": shortest, "deadline": deadline}
    return orders[config.order]


def ttft_ns(request: Request, slo: Slo) -> int:
    """The request's TTFT objective, or the worker's, or a default."""
    own = request.slo.ttft_ns if request.slo else None
    return own or slo.ttft_ns or DEFAULT_TTFT_NS
