"""Which request goes first. An order gives each request a key; lower keys go first, so that queues can be heaps.

Best-effort requests (class batch) go after all others. Among each of the two, streams go before prompts, whatever
the order and their priority, and the older before the younger: their clients wait in the middle of an answer. Next are
requests that have waited before. Only where a waiting request may displace a running one
(PreemptionConfig.from_waiting) does priority count more.

Aging is linear, and linear aging needs no clock: "work minus a share of the time waited" orders requests exactly as
"work plus that share of the arrival time" does. To add an order: a class here, its line in ORDERS, its name in
config.OrderName.
"""

from abc import ABC, abstractmethod

from diptych.control.config import OrderName, SchedulerConfig
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.request import Request, WaitClass
from diptych.control.slo import Slo

OrderKey = tuple[int, ...]

DEFAULT_TTFT_NS = 10_000_000_000  # the deadline of a request without a TTFT objective in order "deadline"
HOPELESS_DEFERRAL = 8  # a deadline that cannot be met any more moves back by this many objectives


class RequestOrder(ABC):
    """The base of all orders. changes_with_time: whether the first in the queue may change although no request arrives
    or ends (then a refusal of the first does not stand)."""

    changes_with_time = False

    def __init__(self, config: SchedulerConfig, slo: Slo, model: StepTimeModel) -> None:
        self._config = config
        self._slo = slo
        self._model = model

    def key(self, request: Request) -> OrderKey:
        """The key of a request; the arrival number breaks ties."""
        place = int(request.is_best_effort)
        wait_class = request.wait_class
        rank = (request.priority, request.number) if wait_class is WaitClass.STREAM else self.rank(request)
        if self._config.preemption.from_waiting:
            return (place, request.priority, wait_class, *rank)
        return (place, wait_class, *rank)

    @abstractmethod
    def rank(self, request: Request) -> OrderKey:
        """The key of a request among those that have given no token."""

    def defer(self, request: Request, now: int) -> bool:
        """Asked before a request is admitted: whether it moves back in the queue instead, under a new
        ``order_key``."""
        return False

    def _work_ns(self, request: Request) -> int:
        start = max(request.num_scheduled_tokens, request.cached_tokens_at_arrival)
        return self._model.prefill_work_ns(start, request.num_tokens - start)


class FirstComeFirstServed(RequestOrder):
    """The order of arrival."""

    def rank(self, request: Request) -> OrderKey:
        return (request.arrival_ns, request.number)


class PriorityFirst(RequestOrder):
    """The order of priority, then of arrival."""

    def rank(self, request: Request) -> OrderKey:
        return (request.priority, request.arrival_ns, request.number)


class ShortestFirst(RequestOrder):
    """The order of priority, then of the work that is left, with aging."""

    def rank(self, request: Request) -> OrderKey:
        aged = self._work_ns(request) + int(self._config.aging * request.arrival_ns)
        return (request.priority, aged, request.number)


class DeadlineFirst(RequestOrder):
    """The order of priority, then of the latest time at which the prefill can begin and still meet the TTFT objective.
    A request that cannot meet it any more moves back once, so that it does not make others late as well."""

    changes_with_time = True

    def rank(self, request: Request) -> OrderKey:
        latest_ns = request.arrival_ns + self._ttft_ns(request) - self._work_ns(request)
        return (request.priority, latest_ns, request.number)

    def defer(self, request: Request, now: int) -> bool:
        if request.is_stream:
            return False
        *place, latest_ns, number = request.order_key
        deferred_ns = request.arrival_ns + HOPELESS_DEFERRAL * self._ttft_ns(request)
        if latest_ns > now or now >= deferred_ns or latest_ns == deferred_ns:
            return False
        request.order_key = (*place, deferred_ns, number)
        return True

    def _ttft_ns(self, request: Request) -> int:
        own = request.slo.ttft_ns if request.slo else None
        return own or self._slo.ttft_ns or DEFAULT_TTFT_NS


ORDERS: dict[OrderName, type[RequestOrder]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest": ShortestFirst,
    "deadline": DeadlineFirst,
}
