"""One request of a workload, as the simulator and the load generator read it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from diptych.control.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Who arrives when with what. Lengths in tokens, times in nanoseconds from the start of the workload.

    output_tokens: what the model will answer (the scheduler does not know it). max_tokens: what the client allows
    (None: exactly output_tokens, as a benchmark with ignore_eos does).
    hash_ids: identities of the leading blocks of ``hash_block_tokens`` tokens of prompt *and answer*; the same id at
    the same place means the same tokens up to its end (each id stands for the whole prefix), as in Mooncake's traces.
    Empty: nothing is shared.
    kind: the class that reports group by (for example "chat", "long"). session: turns of one conversation.
    abort_after_ns: the client goes away this long after it asked.
    is_running: its prompt was computed before it comes: it begins as a stream of a worker that decodes, which needs
    blocks for it and nothing else. service_class: see RequestOptions.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    priority: int = 0
    slo: Slo | None = None
    kind: str = ""
    session: int = -1
    abort_after_ns: int | None = None
    is_running: bool = False
    service_class: str = "standard"


class Workload(Protocol):
    """Open loop: a repeatable sequence of requests in order of arrival. Iterating twice gives the same requests."""

    def __iter__(self) -> Iterator[RequestSpec]: ...

    def __len__(self) -> int:
        """How many requests there will be."""
        ...


@runtime_checkable
class ClosedLoop(Protocol):
    """Closed loop: ``concurrency`` clients, each sends its next request ``think_ns`` after its last answer ended."""

    concurrency: int

    def next_request(self, client: int, now: int) -> RequestSpec | None:
        """The next request of this client (its arrival_ns says when, >= now); None: it has no more."""
        ...

    def __len__(self) -> int: ...
