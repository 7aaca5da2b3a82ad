"""The admission queue: which requests are let in, which is dispatched next, which has waited too long.

    offer -> waiting in its service class -> next (dispatched) | expired (refused late) | remove (the client went away)
         `-> a Refusal at once

Service classes are strict: interactive before standard before batch; a class that has waited too long gets one of
PROMOTE_EVERY dispatches, and batch is dispatched only while workers have room to spare. Inside a class tenants share by
attained service: the tenant with the least is next (virtual token counters: Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024), and a tenant that comes back starts at the least of the active tenants. Inside a tenant:
priority, aged. Owns the waiting requests of the front end; knows no workers.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.admission.fair_queue import FairQueue
from diptych.control.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from diptych.control.request import SERVICE_CLASSES, Submission
from diptych.control.slo import NS_PER_S

MAX_RETRY_S = 60
PROMOTE_EVERY = 4  # one in this many dispatches may go to a class that has waited too long
BATCH_RESERVE = 1  # room that must be left for others when batch is dispatched
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token counts in attained service
PRIORITY_NS = 10 * NS_PER_S  # how much waiting one step of priority is worth
MAX_TENANTS = 1024  # counters kept of tenants that have nothing waiting


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in the queue. service_ns: the least time that serving it takes; a deadline nearer than that cannot be
    met any more."""

    submission: Submission
    arrival_ns: int = 0
    service_ns: int = 0

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.submission.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """What its prompt counts."""
        return self.submission.num_prompt_tokens

    @property
    def tenant(self) -> str:
        """The owner of the request."""
        return self.submission.options.tenant

    @property
    def service_class(self) -> str:
        """Which of the queues it waits in."""
        return self.submission.options.service_class

    @property
    def deadline_ns(self) -> int | None:
        """When the first token comes too late."""
        deadline_ns = self.submission.options.deadline_ns
        return None if deadline_ns is None else self.arrival_ns + deadline_ns


RefusalReason = Literal["queue_full", "tenant_queue_full", "overloaded", "displaced", "queue_timeout", "deadline"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served. status: 429 (too much is asked for) or 503 (it cannot be done now)."""

    reason: RefusalReason
    status: int
    message: str
    retry_after_s: float

    @property
    def error(self) -> RequestError:
        """The refusal as the exception that the HTTP layer answers with."""
        kind = OverloadedError if self.status == 429 else UnavailableError
        return kind(self.message, retry_after_s=self.retry_after_s, code=self.reason)


class AdmissionQueue:
    """All requests that the front end has accepted and not dispatched."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self._config = config or AdmissionConfig()
        self._classes: dict[str, ServiceClassConfig] = {name: getattr(self._config, name) for name in SERVICE_CLASSES}
        self._queues: dict[str, FairQueue[QueuedRequest]] = {name: FairQueue(MAX_TENANTS) for name in SERVICE_CLASSES}
        self._class_of: dict[str, str] = {}
        self._num_arrivals = 0
        self._ends: list[tuple[int, int, str]] = []  # heap of (when it expires, arrival number, request id)
        self._displaced: list[tuple[str, Refusal]] = []
        self._since_promotion = 0
        self._token_ns = 0.0

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._class_of

    @property
    def num_held(self) -> int:
        """Requests that wait, or had to make room and were not refused yet."""
        return len(self._class_of) + len(self._displaced)

    def holds(self, request_id: str) -> bool:
        """Whether this is one of those."""
        return request_id in self._class_of or any(displaced == request_id for displaced, _ in self._displaced)

    def num_waiting(self, service_class: str) -> int:
        """Requests that wait in a class."""
        return len(self._queues[service_class].entries)

    def service(self, tenant: str, service_class: str = "standard") -> int:
        """Attained service of a tenant in a class, in weighted tokens."""
        return self._queues[service_class].service(tenant)

    def on_load(self, token_ns: float) -> None:
        """The price of one more waiting prompt token for the whole fleet (a worker's price, divided by how many compute
        prompts)."""
        self._token_ns = token_ns

    def queue_ns(self, service_class: str) -> int:
        """Predicted time until a newcomer of this class begins: all that wait before it."""
        num_tokens = 0
        for other in SERVICE_CLASSES[: SERVICE_CLASSES.index(service_class) + 1]:
            num_tokens += self._queues[other].num_tokens
        return int(self._token_ns * num_tokens)

    def offer(self, request: QueuedRequest, now: int) -> Refusal | None:
        """A request arrives: it waits (None), or is refused at once."""
        if request.request_id in self._class_of:
            raise ConfigError(f"request id {request.request_id!r} is in use", param="request_id")
        refusal = self._refusal(request, now)
        if refusal is not None:
            return refusal
        number = self._num_arrivals
        self._num_arrivals += 1
        key = request.arrival_ns + request.submission.options.priority * PRIORITY_NS
        self._queues[request.service_class].add(request, number, key)
        self._class_of[request.request_id] = request.service_class
        heappush(self._ends, (self._end_ns(request), number, request.request_id))
        return None

    def may_pass_by(self, service_class: str, headroom: int, for_batch: int) -> bool:
        """Whether a newcomer of this class would be dispatched at once: none waits, and there is room (``next``)."""
        return not self._class_of and headroom >= 1 and (service_class != "batch" or for_batch > BATCH_RESERVE)

    def pass_by(self, request: QueuedRequest, now: int) -> Refusal | None:
        """A request that ``may_pass_by`` arrives: it is dispatched (None), or refused at once, as by ``offer`` and
        ``next``."""
        refusal = self._refusal(request, now)
        if refusal is None:
            self._since_promotion += 1
            self._queues[request.service_class].pass_by(request.tenant, PROMPT_WEIGHT * request.num_prompt_tokens)
        return refusal

    def next(self, now: int, headroom: int, for_batch: int | None = None) -> str | None:
        """The request to dispatch now; None when none may be. headroom: how many more requests the workers should be
        given; for_batch: of class batch (None: as many). Charges the prompt to its tenant."""
        if headroom < 1:
            return None
        service_class = self._next_class(now, headroom if for_batch is None else for_batch)
        if service_class is None:
            return None
        request = self._queues[service_class].pop(PROMPT_WEIGHT)
        assert request is not None
        del self._class_of[request.request_id]
        self._tidy()
        return request.request_id

    def expired(self, now: int) -> list[tuple[str, Refusal]]:
        """Requests that have waited too long, cannot meet their deadlines any more, or had to make room: refused, and
        forgotten."""
        refused, self._displaced = self._displaced, []
        while self._drop_dead() and self._ends[0][0] <= now:
            request_id = self._ends[0][2]
            request = self._request(request_id)
            self.remove(request_id)
            service_class = request.service_class
            limit_ns = self._classes[service_class].max_queue_ns
            if request.arrival_ns + limit_ns <= now:
                message = f"the request waited {_seconds(limit_ns)} s, the limit of {service_class} requests"
                refused.append((request_id, self._refuse("queue_timeout", 503, message, service_class)))
            else:
                message = "the deadline of the request cannot be met any more"
                refused.append((request_id, self._refuse("deadline", 503, message, service_class)))
        return refused

    def on_service(self, tenant: str, output_tokens: int, service_class: str = "standard") -> None:
        """A tenant attained service besides its prompts, which are charged when they are dispatched."""
        if output_tokens:
            self._queues[service_class].serve(tenant, OUTPUT_WEIGHT * output_tokens)

    def remove(self, request_id: str) -> None:
        """The client went away; unknown ids are ignored."""
        service_class = self._class_of.pop(request_id, None)
        if service_class is not None:
            self._queues[service_class].remove(request_id)
            self._tidy()

    def next_time(self) -> int | None:
        """When ``expired`` will return something, if nothing else happens (0: now)."""
        if self._displaced:
            return 0
        return self._ends[0][0] if self._drop_dead() else None

    def _next_class(self, now: int, for_batch: int) -> str | None:
        waiting = [name for name in SERVICE_CLASSES if self._queues[name].entries]
        if not waiting:
            return None
        first = waiting[0]
        self._since_promotion += 1
        if self._since_promotion >= PROMOTE_EVERY:
            for service_class in waiting[1:]:
                promote_ns = self._classes[service_class].promote_ns
                oldest = next(iter(self._queues[service_class].entries.values()))[1]
                if promote_ns and now - oldest.arrival_ns >= promote_ns:
                    self._since_promotion = 0
                    return service_class
        if first == "batch" and for_batch <= BATCH_RESERVE:
            return None
        return first

    def _refusal(self, request: QueuedRequest, now: int) -> Refusal | None:
        config, service_class = self._config, request.service_class
        queue_ns = self.queue_ns(service_class)
        limit_ns = self._classes[service_class].max_wait_ns
        if queue_ns > limit_ns:
            message = (
                f"a {service_class} request would wait {_seconds(queue_ns)} s; the limit is {_seconds(limit_ns)} s"
            )
            return self._refuse("overloaded", 429, message, service_class)
        deadline_ns = request.deadline_ns
        if deadline_ns is not None and now + queue_ns + request.service_ns > deadline_ns:
            message = f"the deadline cannot be met: the queue alone takes {_seconds(queue_ns)} s"
            return self._refuse("deadline", 503, message, service_class)
        if config.max_queued_per_tenant and self._num_of(request.tenant) >= config.max_queued_per_tenant:
            message = f"{config.max_queued_per_tenant} requests of this key wait already; no more are taken"
            return self._refuse("tenant_queue_full", 429, message, service_class)
        if len(self) >= self._most(service_class) and not self._make_room(request):
            message = f"{len(self)} requests wait; no more {service_class} ones are taken"
            return self._refuse("queue_full", 429, message, service_class)
        return None

    def room(self, service_class: str) -> int:
        """How many requests of a class may be added to the queue: up to its share of it, and for each one of a less
        important class that must make room."""
        less_important = SERVICE_CLASSES[SERVICE_CLASSES.index(service_class) + 1 :]
        displaced = sum(len(self._queues[other].entries) for other in less_important)
        return max(0, self._most(service_class) - len(self)) + displaced

    def _most(self, service_class: str) -> int:
        """Requests that may wait when one of this class is added."""
        return self._config.max_queued * self._classes[service_class].queue_percent // 100

    def _make_room(self, request: QueuedRequest) -> bool:
        """Let the youngest request of the least important class go, if it is less important than the newcomer's."""
        for service_class in reversed(SERVICE_CLASSES[SERVICE_CLASSES.index(request.service_class) + 1 :]):
            entries = self._queues[service_class].entries
            if entries:
                request_id = next(reversed(entries))
                self.remove(request_id)
                message = f"the queue is full and a more important request came than this {service_class} one"
                self._displaced.append((request_id, self._refuse("displaced", 429, message, service_class)))
                return True
        return False

    def _refuse(self, reason: RefusalReason, status: int, message: str, service_class: str) -> Refusal:
        """A refusal with Retry-After: when the queue is likely to have passed, between 1 s and a minute."""
        retry_s = float(max(1, min(MAX_RETRY_S, -(-self.queue_ns(service_class) // NS_PER_S))))
        return Refusal(reason, status, message, retry_s)

    def _num_of(self, tenant: str) -> int:
        return sum(queue.num_of(tenant) for queue in self._queues.values())

    def _end_ns(self, request: QueuedRequest) -> int:
        end_ns = request.arrival_ns + self._classes[request.service_class].max_queue_ns
        deadline_ns = request.deadline_ns
        return end_ns if deadline_ns is None else min(end_ns, deadline_ns - request.service_ns)

    def _request(self, request_id: str) -> QueuedRequest:
        return self._queues[self._class_of[request_id]].entries[request_id][1]

    def _is_alive(self, item: tuple[int, int, str]) -> bool:
        service_class = self._class_of.get(item[2])
        return service_class is not None and self._queues[service_class].entries[item[2]][0] == item[1]

    def _tidy(self) -> None:
        """Drop entries of requests that are gone when they outnumber those that wait."""
        if len(self._ends) > 2 * len(self._class_of) + 16:
            self._ends = [item for item in self._ends if self._is_alive(item)]
            heapify(self._ends)

    def _drop_dead(self) -> bool:
        """Drop leading entries of requests that are gone. Returns whether any request waits."""
        while self._ends and not self._is_alive(self._ends[0]):
            heappop(self._ends)
        return bool(self._ends)


def _seconds(time_ns: int) -> str:
    return f"{time_ns / NS_PER_S:.1f}"
