"""The requests of a run with their bodies, some made ahead: making a long prompt takes longer than sending it."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from diptych.bench.conversations import Conversations
from diptych.bench.objectives import LatencyObjectives
from diptych.control.slo import NS_PER_S
from diptych.workload.spec import RequestSpec

PREPARED, MOST_PREPARED = 64, 4096  # bodies made ahead, the second for requests that are due within SOON_NS
SOON_NS = NS_PER_S


class PreparedRequests:
    """Iterates over (number, request, body), in order. The body is None if an answer that belongs into it is still on
    its way: it must be made when the request is due (``Conversations.delayed_body``)."""

    def __init__(
        self,
        conversations: Conversations,
        workload: Iterable[RequestSpec],
        slo: Callable[[RequestSpec], LatencyObjectives],
    ) -> None:
        self._conversations = conversations
        self._specs = enumerate(workload)
        self._slo = slo
        self._ready: deque[tuple[int, RequestSpec, bytes | None]] = deque()

    def __iter__(self) -> Iterator[tuple[int, RequestSpec, bytes | None]]:
        return self

    def __next__(self) -> tuple[int, RequestSpec, bytes | None]:
        """The next request, made now if it was not made ahead."""
        if not self._ready and not self._make():
            raise StopIteration
        return self._ready.popleft()

    def prepare(self, now_ns: int) -> bool:
        """Make another body ahead; returns False if there are enough. now_ns: since the start of the run."""
        ready = self._ready
        is_far = len(ready) >= PREPARED and ready[-1][1].arrival_ns > now_ns + SOON_NS
        return not is_far and len(ready) < MOST_PREPARED and self._make()

    def num_due(self, before_ns: int) -> int:
        """Requests made ahead that are due before that time of the run."""
        return bisect_right(self._ready, before_ns, key=lambda prepared: prepared[1].arrival_ns)

    def _make(self) -> bool:
        number, spec = next(self._specs, (0, None))
        if spec is None:
            return False
        body = None
        if self._conversations.can_be_made(spec):
            body = self._conversations.body(number, spec, self._slo(spec))
        else:
            self._conversations.delay(spec)
        self._ready.append((number, spec, body))
        return True
