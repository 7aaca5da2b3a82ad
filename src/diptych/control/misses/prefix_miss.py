"""Why a prompt was computed: the reason of one request, and what its tokens were computed for."""

from dataclasses import dataclass
from enum import StrEnum


class MissReason(StrEnum):
    """Why the prompt leaves what was cached where it does."""

    NONE = "none"  # all that a cache can give was found
    DIFFERS = "differs"  # the nearest conversation has other tokens there
    NEVER_SEEN = "never_seen"  # no conversation that is remembered begins so, or goes on so far
    EVICTED = "evicted"  # it was cached, and its blocks were needed
    WORKER_LOST = "worker_lost"  # it was cached on a worker that has ended
    ROUTED_ELSEWHERE = "routed_elsewhere"  # another worker's cache holds it
    OTHER_SALT = "other_salt"  # it was sent before, under another cache_salt
    BEING_COMPUTED = "being_computed"  # another request was computing it at that moment
    NOT_KEPT = "not_kept"  # sent before, and never cached: it ended before, or its blocks were taken at once
    CACHE_NOT_READ = (
        "cache_not_read"  # the request asks for what only a computation gives (prompt_logprobs, mean pooling)
    )


NEW = "new"  # not sent before
REPEATED = "repeated"  # text of other prompts, behind a beginning that no conversation leaves there
ROUNDING = "block_rounding"  # seen, but in no full block, or the last token, which is always computed


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMiss:
    """One request, when its prompt began to be computed on ``worker``.

    first_token: position at which the prompt leaves what could be used, for ``reason`` (None: it does not).
    num_seen_tokens: leading tokens that an earlier conversation had, under the same salt. spent: what the tokens that
    were computed were computed for, (a reason, NEW, REPEATED or ROUNDING; tokens); they add up to the prompt
    without ``num_cached_tokens``. nearest, nearest_tenant: the conversation that it left, or the one with another salt.
    holders: workers whose caches hold what is missing. lost_ns, lost_worker, evicted_for: of what was evicted, when,
    where and for which request ("": not known). num_differing_tokens: about how many tokens differ until text comes
    that was computed before (None: none comes). group: equal for misses at the same place, before the same text. key:
    of the block in the history that differs (b"": there is none).
    """

    time_ns: int
    request_id: str
    tenant: str
    worker: int
    num_prompt_tokens: int
    num_cached_tokens: int
    reason: MissReason
    first_token: int | None
    num_seen_tokens: int
    block_size: int
    spent: tuple[tuple[str, int], ...]
    nearest: str = ""
    nearest_tenant: str = ""
    holders: tuple[int, ...] = ()
    lost_ns: int | None = None
    lost_worker: int | None = None
    evicted_for: str = ""
    num_differing_tokens: int | None = None
    group: bytes = b""
    key: bytes = b""

    @property
    def num_again_tokens(self) -> int:
        """Tokens that were computed although they had been computed before."""
        return sum(count for cause, count in self.spent if cause not in (NEW, ROUNDING))
