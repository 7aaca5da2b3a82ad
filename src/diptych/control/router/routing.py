"""What placing is told and what it answers: settings, the question, the answer. Frozen; no decisions here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from diptych.control.errors import ConfigError
from diptych.control.router.topology import LinkCosts
from diptych.control.slo import NS_PER_MS

RoutingName = Literal["kv_aware", "round_robin", "least_loaded", "power_of_two"]
Disaggregate = Literal["auto", "always", "never"]
Reason = Literal[
    "remote",  # prefill here, decode there
    "both",  # one worker whose role is both
    "one_token",  # there is nothing to decode
    "never",  # separating is switched off
    "whole",  # this request must stay on one worker
    "only_worker",  # nobody is there to share with
    "prefill_keeps",  # a prefill worker decodes it as well: the answer is short
    "local_idle_decode",  # a decode worker without streams computes the prompt as well
    "local_cached",  # a decode worker holds half of the prompt or more
    "local_backlog",  # a decode worker, because prefill workers have too much to do
    "local_short",  # a decode worker, because the prompt is not worth a handoff
]


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How to place.

    disaggregate: separate prefill from decode when that is cheaper ("auto"), whenever it is possible ("always": workers
    of one role do their own job only), or never. kv_price_ns: what a worker costs more when its KV memory would be half
    full. stale_ns: a worker that has not reported for so long gets nothing (0: it does). long_prompt_tokens: prompts of
    so many go to the pool for long ones, where there is one (0: none do). max_local_tokens: more uncached tokens than
    that are never computed on a decode worker where streams run (0: the costs decide). seed: of power_of_two.
    """

    routing: RoutingName = "kv_aware"
    disaggregate: Disaggregate = "auto"
    kv_price_ns: int = 50 * NS_PER_MS
    stale_ns: int = 0
    long_prompt_tokens: int = 0
    max_local_tokens: int = 256
    links: LinkCosts = field(default_factory=LinkCosts)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("routing", RoutingName), ("disaggregate", Disaggregate)):
            if getattr(self, name) not in get_args(known):
                text = f"{name} is {getattr(self, name)!r}; one of {', '.join(get_args(known))}"
                raise ConfigError(text, param=name)
        for name in ("kv_price_ns", "stale_ns", "long_prompt_tokens", "max_local_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0", param=name)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placing needs to know. hashes: of the prompt's full blocks. service_class: it and the prompt's size say
    whose answers tell how long this one will be. avoid: workers that get it only if nobody else can. hands_off: whether
    two workers may share it."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    hashes: Sequence[bytes] = ()
    service_class: str = "standard"
    avoid: frozenset[int] = frozenset()
    hands_off: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Who computes the prompt and who the answer; the same worker twice: it serves the request whole. cost_ns: what
    was expected; 0 where the routing knows no costs. num_cached_tokens: prompt tokens expected in the cache."""

    prefill: int
    decode: int
    num_cached_tokens: int
    cost_ns: int
    reason: Reason

    @property
    def is_handoff(self) -> bool:
        """Whether KV changes workers."""
        return self.prefill != self.decode
