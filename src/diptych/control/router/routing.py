"""The interface of routing: settings, request, route, and the protocol of a router."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.length_predictor import DEFAULT_TOKENS
from diptych.control.request import PeerRun, Submission
from diptych.control.router.topology import LinkCosts, Role, WorkerInfo
from diptych.control.slo import NS_PER_MS

RoutingName = Literal["kv_aware", "round_robin"]
ROUTINGS: tuple[RoutingName, ...] = get_args(RoutingName)
Disaggregate = Literal["auto", "always", "never"]
LocalPrefill = Literal["short", "objective"]
RouteReason = Literal[
    "remote",  # prefill here, decode there
    "both",  # one worker whose role is both
    "one_token",  # there is nothing to decode
    "never",  # separating is switched off
    "whole",  # this request must stay on one worker
    "only_worker",  # there is no other worker to share with
    "prefill_keeps",  # a prefill worker decodes it as well: the answer is short
    "local_idle_decode",  # a decode worker without streams computes the prompt as well
    "local_cached",  # a decode worker holds half of the prompt or more
    "local_backlog",  # a decode worker, because prefill workers have too much to do
    "local_short",  # a decode worker, because the prompt is not worth a handoff
    "moved",  # a stream leaves the worker where it runs
]


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How to route.

    routing: by predicted cost and prefix hits (kv_aware), or each worker in turn (round_robin). disaggregate: separate
    prefill from decode when that is cheaper ("auto"), whenever it is possible ("always": workers of one role do their
    own job only), or never. kv_price_ns: what a worker costs more when its KV memory would be half full.
    max_local_tokens: more uncached tokens than that are never computed on a decode worker where streams run (0: the
    costs decide). local_prefill: the prompts that such a worker computes; "short": those of at most max_local_tokens,
    where that costs less; "objective": any, and its streams lose little by it as long as their objective leaves room
    (after arXiv 2607.02043, where the chunks must keep it).
    """

    routing: RoutingName = "kv_aware"
    disaggregate: Disaggregate = "auto"
    kv_price_ns: int = 50 * NS_PER_MS
    max_local_tokens: int = 256
    local_prefill: LocalPrefill = "short"
    links: LinkCosts = field(default_factory=LinkCosts)

    def __post_init__(self) -> None:
        for name, known in (("routing", RoutingName), ("disaggregate", Disaggregate), ("local_prefill", LocalPrefill)):
            if getattr(self, name) not in get_args(known):
                text = f"{name} is {getattr(self, name)!r}; one of {', '.join(get_args(known))}"
                raise ConfigError(text, param=name)
        for name in ("kv_price_ns", "max_local_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0", param=name)


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request that needs workers. num_output_tokens: of its answer, that exist already and belong to the prompt now.
    num_expected: of its answer, that are expected to come. avoid: workers that get it only when no other can.
    must_stay_whole: two workers may not share it. leaves: the worker where it runs, which is to hand it to another that
    decodes; no route when there is none."""

    submission: Submission
    num_output_tokens: int = 0
    num_expected: int = DEFAULT_TOKENS
    avoid: frozenset[int] = frozenset()
    must_stay_whole: bool = False
    leaves: int | None = None

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.submission.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to have in the KV cache before the next one is sampled."""
        return self.submission.num_prompt_tokens + self.num_output_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens still to come at most."""
        return self.submission.max_tokens - self.num_output_tokens

    @property
    def hands_off(self) -> bool:
        """Whether two workers may share it."""
        return self.submission.hands_off and not self.must_stay_whole

    @property
    def is_prefill_only(self) -> bool:
        """Whether there is nothing to decode: one token, or an embedding."""
        return self.max_tokens == 1


@dataclass(frozen=True, slots=True)
class Route:
    """Which worker computes the prompt and which the answer; the same one twice serves the request whole. cost_ns: what
    was expected (0 where the routing knows no costs). num_cached_tokens: prompt tokens expected in the cache.
    prefill_peer, decode_peer: what these workers may read from others of their hosts."""

    prefill: int
    decode: int
    num_cached_tokens: int
    cost_ns: int
    reason: RouteReason
    prefill_peer: PeerRun | None = None
    decode_peer: PeerRun | None = None


class Router(Protocol):
    """Chooses workers for requests. All workers are named by their numbers; one that is not up gets no request.

    The cluster calls a router with everything that happens; a router calls nothing. Requests count as sent from
    ``route`` until ``on_ended``.
    """

    @property
    def alarm(self) -> str:
        """What is wrong with the router's picture of the fleet, as text; empty while nothing is."""
        ...

    def set_up(self, info: WorkerInfo) -> None:
        """A worker came up, holding nothing (known before, or new)."""
        ...

    def set_down(self, worker: int) -> None:
        """A worker is gone."""
        ...

    def set_role(self, worker: int, role: Role) -> None:
        """A worker that is up has another role from now on."""
        ...

    def on_load(self, worker: int, report: LoadReport) -> None:
        """A worker's load. Its events of the same report come first: the load covers what they say."""
        ...

    def on_kv_events(
        self,
        worker: int,
        sequence: int,
        stored: Iterable[bytes] = (),
        evicted: Sequence[bytes] = (),
        tier: Tier = "device",
    ) -> bool:
        """Changes of what one tier of a worker holds, numbered from 1 in each; False: some before them are missing, ask
        for a snapshot."""
        ...

    def on_kv_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes], tier: Tier = "device") -> None:
        """All that one tier of a worker holds, as of its changes number ``sequence``."""
        ...

    def on_queued(self, request_id: str, worker: int) -> None:
        """A worker took the request into its queue: its next load report counts it."""
        ...

    def on_admitted(self, request_id: str, worker: int, num_cached_tokens: int, num_tier_tokens: int = 0) -> None:
        """Take in that a worker gave the request (or its reservation) blocks and found ``num_cached_tokens`` tokens, of
        which ``num_tier_tokens`` in the tiers below its cache."""
        ...

    def on_first_token(self, request_id: str) -> None:
        """Take in that a prompt is computed: it no longer waits at its prefill worker."""
        ...

    def on_transfer(self, prefill: int, decode: int, num_bytes: int, wire_ns: int, now: int) -> None:
        """A handoff arrived, whose KV was on its way from worker to worker for ``wire_ns``."""
        ...

    def on_ended(self, request_id: str) -> None:
        """The request is over, or this attempt is."""
        ...

    def route(self, request: RoutingRequest, now: int) -> Route | None:
        """The workers for a request; None when none is up. An earlier route of the same request is over, unless there
        is no other worker for a request that is to leave one."""
        ...
