"""the admission queue: who is let in, who is dispatched next, who has waited too long. In front of any placement.

    offer -> waiting in its service class -> next (dispatched) | expired (refused late) | remove (the client went away)
         `-> a Refusal at once

Service classes are strict: interactive before standard before batch; a service class that has waited too long gets one
dispatch in so many, and batch is dispatched only while workers have room to spare. Inside a service class tenants share
by attained service: the one with the least is next (virtual token counters: Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024), and a tenant that comes back starts at the least of those who are active. Inside a tenant:
priority, aged. Owns the waiting requests of the front end and the counters; must never know workers, tokens or sockets.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from diptych.control.admission.fair_queue import FairQueue
from diptych.control.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from diptych.control.slo import NS_PER_S

SERVICE_CLASSES: tuple[str, ...] = ("interactive", "standard", "batch")
MAX_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class ServiceClassConfig:
    """One service class. max_wait_ns: shed at once when the predicted queue time is longer. max_queue_ns: refused after
    waiting so long. queue_percent: shed when the queue is so full. promote_ns: a service class whose oldest request has
    waited so long gets a share of the dispatches (0: never)."""

    max_wait_ns: int
    max_queue_ns: int
    queue_percent: int = 100
    promote_ns: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_wait_ns", 1), ("max_queue_ns", 1), ("queue_percent", 1), ("promote_ns", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", param=name)
        if self.queue_percent > 100:
            raise ConfigError(f"queue_percent is {self.queue_percent}; it must be at most 100", param="queue_percent")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """max_queued: requests that wait in all. max_queued_per_tenant: of one tenant (0: no limit of its own).
    promote_every: one dispatch in so many may go to a service class that has waited too long. batch_reserve: room that
    must be left for others when batch is dispatched. prompt_weight, output_weight: what a token counts in attained
    service. priority_ns: how much waiting one step of priority is worth. shed_missed_ttft: refuse at once whoever would
    wait longer than its TTFT objective. max_tenants: counters kept of tenants that have nothing waiting."""

    interactive: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(120 * NS_PER_S, 300 * NS_PER_S, 100)
    )
    standard: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(60 * NS_PER_S, 300 * NS_PER_S, 80, 10 * NS_PER_S)
    )
    batch: ServiceClassConfig = field(
        default_factory=lambda: ServiceClassConfig(3600 * NS_PER_S, 24 * 3600 * NS_PER_S, 50)
    )
    max_queued: int = 4096
    max_queued_per_tenant: int = 0
    promote_every: int = 4
    batch_reserve: int = 1
    prompt_weight: int = 1
    output_weight: int = 2
    priority_ns: int = 10 * NS_PER_S
    max_tenants: int = 1024
    shed_missed_ttft: bool = False

    def __post_init__(self) -> None:
        least = {
            "max_queued": 1, "max_queued_per_tenant": 0, "promote_every": 2, "batch_reserve": 0, "prompt_weight": 0,
            "output_weight": 0, "priority_ns": 0, "max_tenants": 1,
        }  # fmt: skip
        for name, limit in least.items():
            value = getattr(self, name)
            if value < limit:
                raise ConfigError(f"{name} is {value}; it must be at least {limit}", param=name)


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in the admission queue. tenant: the API key, or what stands for it. priority: smaller goes first,
    inside the tenant. deadline_ns: when the answer is of no more use. service_ns: the least time that serving it takes;
    a deadline nearer than that cannot be met any more. ttft_slo_ns: its objective."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_ns: int = 0
    tenant: str = ""
    service_class: str = "standard"
    priority: int = 0
    deadline_ns: int | None = None
    service_ns: int = 0
    ttft_slo_ns: int | None = None

    def __post_init__(self) -> None:
        if self.service_class not in SERVICE_CLASSES:
            raise ConfigError(
                f"service_class is {self.service_class!r}; one of {', '.join(SERVICE_CLASSES)}", param="service_class"
            )


RefusalReason = Literal[
    "closed", "queue_full", "tenant_queue_full", "overloaded", "displaced", "queue_timeout", "deadline", "ttft"
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served. status: 429 (too much is asked for) or 503 (it cannot be done now)."""

    reason: RefusalReason
    status: int
    message: str
    retry_after_s: float

    @property
    def error(self) -> RequestError:
        """As the exception that the HTTP layer answers with."""
        kind = OverloadedError if self.status == 429 else UnavailableError
        return kind(self.message, retry_after_s=self.retry_after_s, code=self.reason)


class AdmissionQueue:
    """All requests that the front end has accepted and not dispatched."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self._config = config or AdmissionConfig()
        self._classes: dict[str, ServiceClassConfig] = {
            service_class: getattr(self._config, service_class) for service_class in SERVICE_CLASSES
        }
        self._queues: dict[str, FairQueue[QueuedRequest]] = {
            service_class: FairQueue(self._config.max_tenants) for service_class in SERVICE_CLASSES
        }
        self._class_of: dict[str, str] = {}
        self._num_arrivals = 0
        self._ends: list[tuple[int, int, str]] = []  # heap of (when it expires, arrival number, request id)
        self._displaced: list[tuple[str, Refusal]] = []
        self._since_promotion = 0
        self._backlog_ns = 0
        self._token_ns = 0.0
        self._closed = ""

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._class_of

    def num_waiting(self, service_class: str) -> int:
        """Requests that wait in a service class."""
        return len(self._queues[service_class].entries)

    def service(self, tenant: str, service_class: str = "standard") -> int:
        """Attained service of a tenant in a service class, in weighted tokens."""
        return self._queues[service_class].service(tenant)

    def close(self, reason: str) -> None:
        """Refuse all that come from now on (503): draining, or no worker is there. Those who wait go on waiting."""
        self._closed = reason

    def open(self) -> None:
        """Take requests again."""
        self._closed = ""

    def on_load(self, backlog_ns: int, token_ns: float) -> None:
        """The fleet as it is now: how long until a request that is dispatched now begins, and the price of one more
        waiting prompt token for the whole fleet (a worker's, divided by how many compute prompts)."""
        self._backlog_ns = backlog_ns
        self._token_ns = token_ns

    def queue_ns(self, service_class: str) -> int:
        """Predicted time until a newcomer of this service class begins: the workers' backlog, and all that wait before
        it."""
        num_tokens = 0
        for other in SERVICE_CLASSES[: SERVICE_CLASSES.index(service_class) + 1]:
            num_tokens += self._queues[other].num_tokens
        return self._backlog_ns + int(self._token_ns * num_tokens)

    def offer(self, entry: QueuedRequest, now: int) -> Refusal | None:
        """A request arrives: it waits (None), or is refused at once."""
        if entry.request_id in self._class_of:
            raise ConfigError(f"request id {entry.request_id!r} is in use", param="request_id")
        refusal = self._refusal(entry, now)
        if refusal is not None:
            return refusal
        number = self._num_arrivals
        self._num_arrivals += 1
        key = entry.arrival_ns + entry.priority * self._config.priority_ns
        self._queues[entry.service_class].add(entry, number, key)
        self._class_of[entry.request_id] = entry.service_class
        heappush(self._ends, (self._end_ns(entry), number, entry.request_id))
        return None

    def pass_by(self, entry: QueuedRequest, now: int) -> Refusal | None:
        """A request arrives while nobody waits and there is room: it goes on (None), or is refused at once."""
        refusal = self._refusal(entry, now)
        if refusal is None:
            self._queues[entry.service_class].pass_by(
                entry.tenant, self._config.prompt_weight * entry.num_prompt_tokens
            )
        return refusal

    def next(self, now: int, headroom: int) -> str | None:
        """The request to dispatch now; None when nothing may be. headroom: how many more requests the workers should
        be given. Charges the prompt to its tenant."""
        if headroom < 1:
            return None
        service_class = self._next_class(now, headroom)
        if service_class is None:
            return None
        entry = self._queues[service_class].pop(self._config.prompt_weight)
        assert entry is not None
        del self._class_of[entry.request_id]
        self._tidy()
        return entry.request_id

    def expired(self, now: int) -> list[tuple[str, Refusal]]:
        """Who has waited too long, cannot meet its deadline any more, or had to make room: refused, and forgotten."""
        refused, self._displaced = self._displaced, []
        while self._drop_dead() and self._ends[0][0] <= now:
            request_id = self._ends[0][2]
            entry = self._entry(request_id)
            self.remove(request_id)
            limit_ns = self._classes[entry.service_class].max_queue_ns
            if entry.arrival_ns + limit_ns <= now:
                message = f"the request waited {_seconds(limit_ns)} s, the limit of {entry.service_class} requests"
                refused.append((request_id, self._refuse("queue_timeout", 503, message, entry.service_class)))
            else:
                message = "the deadline of the request cannot be met any more"
                refused.append((request_id, self._refuse("deadline", 503, message, entry.service_class)))
        return refused

    def on_service(self, tenant: str, prompt_tokens: int, output_tokens: int, service_class: str = "standard") -> None:
        """A tenant attained service. A prompt was charged when it was dispatched: give 0, or what is computed again."""
        config = self._config
        service = config.prompt_weight * prompt_tokens + config.output_weight * output_tokens
        if service > 0:
            self._queues[service_class].serve(tenant, service)

    def remove(self, request_id: str) -> None:
        """The client went away; unknown ids are ignored."""
        service_class = self._class_of.pop(request_id, None)
        if service_class is not None:
            self._queues[service_class].remove(request_id)
            self._tidy()

    def next_time(self) -> int | None:
        """When ``expired`` has something next, if nothing else happens (0: now)."""
        if self._displaced:
            return 0
        return self._ends[0][0] if self._drop_dead() else None

    def _next_class(self, now: int, headroom: int) -> str | None:
        waiting = [service_class for service_class in SERVICE_CLASSES if self._queues[service_class].entries]
        if not waiting:
            return None
        first = waiting[0]
        self._since_promotion += 1
        if self._since_promotion >= self._config.promote_every:
            for service_class in waiting[1:]:
                promote_ns = self._classes[service_class].promote_ns
                oldest = next(iter(self._queues[service_class].entries.values()))[1]
                if promote_ns and now - oldest.arrival_ns >= promote_ns:
                    self._since_promotion = 0
                    return service_class
        if first == "batch" and headroom <= self._config.batch_reserve:
            return None
        return first

    def _refusal(self, entry: QueuedRequest, now: int) -> Refusal | None:
        config, service_class = self._config, entry.service_class
        if self._closed:
            return self._refuse("closed", 503, self._closed, service_class)
        queue_ns = self.queue_ns(service_class)
        limit_ns = self._classes[service_class].max_wait_ns
        if queue_ns > limit_ns:
            message = (
                f"a {service_class} request would wait {_seconds(queue_ns)} s; the limit is {_seconds(limit_ns)} s"
            )
            return self._refuse("overloaded", 429, message, service_class)
        if entry.deadline_ns is not None and now + queue_ns + entry.service_ns > entry.deadline_ns:
            message = f"the deadline cannot be met: the queue alone takes {_seconds(queue_ns)} s"
            return self._refuse("deadline", 503, message, service_class)
        if (
            config.shed_missed_ttft
            and entry.ttft_slo_ns is not None
            and queue_ns + entry.service_ns > entry.ttft_slo_ns
        ):
            message = f"the queue takes {_seconds(queue_ns)} s, longer than the request's TTFT objective"
            return self._refuse("ttft", 429, message, service_class)
        if config.max_queued_per_tenant and self._num_of(entry.tenant) >= config.max_queued_per_tenant:
            message = f"{config.max_queued_per_tenant} requests of this key wait already; no more are taken"
            return self._refuse("tenant_queue_full", 429, message, service_class)
        if len(self) >= config.max_queued * self._classes[service_class].queue_percent // 100 and not self._make_room(
            entry
        ):
            return self._refuse(
                "queue_full", 429, f"{len(self)} requests wait; no more {service_class} ones are taken", service_class
            )
        return None

    def _make_room(self, entry: QueuedRequest) -> bool:
        """Let the youngest request of the least important service class go, if it is less important than the
        newcomer's."""
        for service_class in reversed(SERVICE_CLASSES[SERVICE_CLASSES.index(entry.service_class) + 1 :]):
            entries = self._queues[service_class].entries
            if entries:
                request_id = next(reversed(entries))
                self.remove(request_id)
                message = f"the queue is full and a more important request came than this {service_class} one"
                self._displaced.append((request_id, self._refuse("displaced", 429, message, service_class)))
                return True
        return False

    def _refuse(self, reason: RefusalReason, status: int, message: str, service_class: str) -> Refusal:
        """Come back when the queue is likely to have passed: between 1 s and a minute."""
        return Refusal(
            reason, status, message, float(max(1, min(MAX_RETRY_S, -(-self.queue_ns(service_class) // NS_PER_S))))
        )

    def _num_of(self, tenant: str) -> int:
        return sum(queue.num_of(tenant) for queue in self._queues.values())

    def _end_ns(self, entry: QueuedRequest) -> int:
        end_ns = entry.arrival_ns + self._classes[entry.service_class].max_queue_ns
        return end_ns if entry.deadline_ns is None else min(end_ns, entry.deadline_ns - entry.service_ns)

    def _entry(self, request_id: str) -> QueuedRequest:
        return self._queues[self._class_of[request_id]].entries[request_id][1]

    def _is_alive(self, item: tuple[int, int, str]) -> bool:
        service_class = self._class_of.get(item[2])
        return service_class is not None and self._queues[service_class].entries[item[2]][0] == item[1]

    def _tidy(self) -> None:
        """Keep what is remembered of the dead in proportion to the living."""
        if len(self._ends) > 2 * len(self._class_of) + 16:
            self._ends = [item for item in self._ends if self._is_alive(item)]
            heapify(self._ends)

    def _drop_dead(self) -> bool:
        """Whether anybody waits; the first in ``_ends`` is then alive."""
        while self._ends and not self._is_alive(self._ends[0]):
            heappop(self._ends)
        return bool(self._ends)


def _seconds(time_ns: int) -> str:
    return f"{time_ns / NS_PER_S:.1f}"
