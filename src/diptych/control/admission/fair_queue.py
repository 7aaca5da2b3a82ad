"""Fair sharing of a queue by attained service: the tenant with the least is next, at O(log n) an operation.

Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Owns the waiting requests
of one service class and the service that each tenant has attained; the caller decides whether a request may go.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What is queued."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...


Entry = TypeVar("Entry", bound=Queued)


@dataclass(slots=True)
class _Tenant:
    """One tenant in one service class. waiting: heap of (aged priority, arrival number, request id), with dead
    entries."""

    service: int = 0
    waiting: list[tuple[int, int, str]] = field(default_factory=list)
    num_waiting: int = 0
    number: int = 0


class FairQueue(Generic[Entry]):
    """The waiting requests of one service_class: the tenant with the least service first (VTC).

    ``order`` holds each active tenant once, under the service it had when it was pushed. Service only grows, so an
    outdated entry is too early, never too late: it is pushed again when it comes up.
    """

    def __init__(self, max_tenants: int) -> None:
        self.entries: OrderedDict[str, tuple[int, Entry]] = OrderedDict()  # by arrival, with its number
        self.num_tokens = 0  # prompt tokens that wait
        self._max_tenants = max_tenants
        self._active: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()  # service of tenants with nothing waiting, oldest first
        self._order: list[tuple[int, int, str]] = []
        self._floor = 0  # the least service at the last dispatch: where a new tenant starts when no tenant is active

    def num_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        state = self._active.get(tenant)
        return state.num_waiting if state else 0

    def service(self, tenant: str) -> int:
        """Attained service, weighted tokens."""
        state = self._active.get(tenant)
        return state.service if state else self._idle.get(tenant, 0)

    def add(self, entry: Entry, number: int, key: int) -> None:
        """A request waits."""
        state = self._active.get(entry.tenant)
        if state is None:
            least = self._peek()
            floor = self._floor if least is None else least.service
            state = _Tenant(max(self._idle.pop(entry.tenant, 0), floor), number=number)
            self._active[entry.tenant] = state
            heappush(self._order, (state.service, number, entry.tenant))
        heappush(state.waiting, (key, number, entry.request_id))
        state.num_waiting += 1
        self.entries[entry.request_id] = (number, entry)
        self.num_tokens += entry.num_prompt_tokens

    def pop(self, prompt_weight: int) -> Entry | None:
        """The next one, whose prompt is charged to its tenant."""
        state = self._peek()
        if state is None:
            return None
        while True:
            _, number, request_id = heappop(state.waiting)
            found = self.entries.get(request_id)
            if found is not None and found[0] == number:
                break
        entry = found[1]
        self._floor = max(self._floor, state.service)
        state.service += prompt_weight * entry.num_prompt_tokens
        self._take(entry, state)
        return entry

    def pass_by(self, tenant: str, service: int) -> None:
        """A request of this tenant is dispatched while none waits: charged as by ``add`` and ``pop``."""
        self._floor = max(self._idle.get(tenant, 0), self._floor)
        self._idle[tenant] = self._floor + service
        self._idle.move_to_end(tenant)
        self._forget()

    def remove(self, request_id: str) -> Entry | None:
        """The request leaves without being dispatched."""
        found = self.entries.get(request_id)
        if found is None:
            return None
        entry = found[1]
        state = self._active[entry.tenant]
        self._take(entry, state)
        if len(state.waiting) > 2 * state.num_waiting + 16:
            state.waiting = [item for item in state.waiting if self.entries.get(item[2], (-1,))[0] == item[1]]
            heapify(state.waiting)
        return entry

    def serve(self, tenant: str, service: int) -> None:
        """A tenant attained service."""
        state = self._active.get(tenant)
        if state is not None:
            state.service += service
            return
        self._idle[tenant] = self._idle.get(tenant, self._floor) + service
        self._idle.move_to_end(tenant)
        self._forget()

    def _take(self, entry: Entry, state: _Tenant) -> None:
        del self.entries[entry.request_id]
        self.num_tokens -= entry.num_prompt_tokens
        state.num_waiting -= 1
        if not state.num_waiting:
            del self._active[entry.tenant]
            self._idle[entry.tenant] = state.service
            self._forget()

    def _peek(self) -> _Tenant | None:
        order = self._order
        while order:
            service, number, tenant = order[0]
            state = self._active.get(tenant)
            if state is None or state.number != number:
                heappop(order)
            elif state.service > service:
                heappop(order)
                heappush(order, (state.service, number, tenant))
            else:
                return state
        return None

    def _forget(self) -> None:
        while len(self._idle) > self._max_tenants:
            self._idle.popitem(last=False)
