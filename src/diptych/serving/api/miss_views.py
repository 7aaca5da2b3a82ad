"""Prefix misses as JSON: what the client of a request may know, and what the operator may.

Caches are shared by all requests of one cache_salt, also those of different API keys. To the token exact is only what a
client learns about conversations of its own key: else it could guess the prompts of others token by token. About
others it learns what ``cached_tokens`` says anyway.
"""

from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from diptych.control.misses.miss_summary import MissPlace, MissSummary
from diptych.control.misses.prefix_miss import NEW, REPEATED, ROUNDING, MissReason, PrefixMiss
from diptych.control.slo import NS_PER_S
from diptych.serving.misses.difference import TextDifference
from diptych.serving.misses.miss_recorder import ExplainedMiss, MissRecorder

MAX_SHOWN_PLACES = 10
_OWN_ONLY = "The latest misses of this API key; those of all keys are at /admin/cache/misses."
_OF_CONVERSATIONS = (MissReason.DIFFERS, MissReason.NEVER_SEEN, MissReason.OTHER_SALT)
_OF_TEXTS = (MissReason.DIFFERS, MissReason.OTHER_SALT, REPEATED, ROUNDING)
_WORDS = {
    MissReason.DIFFERS: "was computed before, and is computed again because the prompt differs before it",
    MissReason.EVICTED: "was cached, and was evicted for other requests",
    MissReason.ROUTED_ELSEWHERE: "was cached on another worker",
    MissReason.WORKER_LOST: "was cached on a worker that has ended",
    MissReason.OTHER_SALT: "was computed under another cache_salt",
    MissReason.BEING_COMPUTED: "was being computed by another request at that moment",
    MissReason.NOT_KEPT: "was sent before, and was not cached",
    MissReason.CACHE_NOT_READ: "was cached, and the request did not read the cache (prompt_logprobs, mean pooling)",
}


class PrefixMissReply(BaseModel):
    """Why the prompt of a request was not found in a cache. first_token: position at which it leaves what was cached,
    for this reason. seen_tokens: leading tokens that were sent before. computed: tokens by what they were computed for;
    they add up to prompt_tokens without cached_tokens. differing_tokens: about how many tokens differ at first_token
    until text comes that was computed before."""

    reason: MissReason
    first_token: int | None
    seen_tokens: int
    computed: dict[str, int]
    differing_tokens: int | None = None


class DifferenceReply(BaseModel):
    """Texts at the place where two prompts part: before it, in the earlier prompt and in the later one, and what these
    look like."""

    before: str
    was: str
    now: str
    kind: str


class ExplainedMissReply(PrefixMissReply):
    """The same for the operator, with the other requests that have to do with it."""

    request_id: str
    tenant: str
    age_s: float
    worker: int
    prompt_tokens: int
    cached_tokens: int
    nearest_request: str
    cached_on_workers: list[int]
    evicted_s_ago: float | None
    evicted_on_worker: int | None
    evicted_for: str
    text: DifferenceReply | None = None


class MissPlaceReply(BaseModel):
    """Prompts that leave earlier conversations before the same text. share: of all prompt tokens that were computed."""

    requests: int
    again_tokens: int
    share: float
    first_token: int
    last_token: int
    differing_tokens: int
    example_request: str
    words: str
    text: DifferenceReply | None = None


class HistoryReply(BaseModel):
    """What is remembered: blocks of block_size tokens. forgotten_blocks: so far; what is forgotten counts as never
    seen. keeps_text: whether token ids can be read."""

    blocks: int
    max_blocks: int
    block_size: int
    forgotten_blocks: int
    keeps_text: bool


class MissesReply(BaseModel):
    """The reply of /cache/misses: since the start of the server, and the latest misses."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    reasons: dict[str, int]
    computed: dict[str, int]
    words: list[str]
    places: list[MissPlaceReply]
    recent: list[ExplainedMissReply]
    history: HistoryReply


def client_view(miss: PrefixMiss | None) -> dict[str, Any] | None:
    """What the client of the request may know."""
    return None if miss is None else _for_client(miss).model_dump(mode="json")


def _for_client(miss: PrefixMiss) -> PrefixMissReply:
    if _is_of_own_key(miss):
        return _exact(miss)
    computed = {cause: count for cause, count in miss.spent if cause not in (*_OF_TEXTS, NEW)}
    rest = sum(count for cause, count in miss.spent if cause in (*_OF_TEXTS, NEW))
    seen = miss.num_seen_tokens // miss.block_size * miss.block_size
    is_of_others = miss.reason in _OF_CONVERSATIONS
    return PrefixMissReply(
        reason=MissReason.NEVER_SEEN if is_of_others else miss.reason,
        first_token=seen if is_of_others else miss.first_token,
        seen_tokens=seen,
        computed=computed | ({NEW: rest} if rest else {}),
    )


def _is_of_own_key(miss: PrefixMiss) -> bool:
    """Whether it tells nothing of the conversations of other keys."""
    return miss.nearest_tenant == miss.tenant or not miss.nearest


def tenants_reply(watch: MissRecorder, limit: int, tenant: str) -> MissesReply:
    """What the holder of one of several API keys may know: the latest misses of its own requests, each as in their
    usage. Sums over all requests would tell of each request by their difference: they are left out."""
    whole = misses_reply(watch, limit=0, with_text=False)
    own = [explained.miss for explained in watch.recent if explained.miss.tenant == tenant][::-1][:limit]
    recent = []
    for miss in own:
        known = miss if _is_of_own_key(miss) else replace(miss, nearest="", evicted_for="")
        recent.append(_explained(ExplainedMiss(known, None), watch.now_ns, with_text=False, shown=_for_client(miss)))
    return whole.model_copy(
        update={"reasons": {}, "computed": {}, "words": [_OWN_ONLY], "places": [], "recent": recent}
    )


def misses_reply(watch: MissRecorder, limit: int, *, with_text: bool) -> MissesReply:
    """What the operator may know; texts only where ``with_text``. limit: of the latest misses."""
    explainer = watch.explainer
    summary, now_ns = explainer.summary, watch.now_ns
    texts = watch.texts if with_text else {}
    places = [
        _place(place, summary, texts.get(group)) for group, place in list(summary.places.items())[:MAX_SHOWN_PLACES]
    ]
    recent = list(watch.recent)[::-1][:limit]
    return MissesReply(
        requests=summary.num_requests,
        prompt_tokens=summary.num_prompt_tokens,
        cached_tokens=summary.num_cached_tokens,
        reasons={str(reason): summary.requests[reason] for reason in MissReason if summary.requests[reason]},
        computed=dict(summary.tokens.most_common()),
        words=[*_sentences(summary), *(place.words for place in places[:3])],
        places=places,
        recent=[_explained(explained, now_ns, with_text=with_text) for explained in recent],
        history=HistoryReply(
            blocks=len(explainer.history),
            max_blocks=explainer.history.max_blocks,
            block_size=explainer.block_size,
            forgotten_blocks=explainer.history.num_forgotten,
            keeps_text=watch.keeps_text,
        ),
    )


def _exact(miss: PrefixMiss) -> PrefixMissReply:
    return PrefixMissReply(
        reason=miss.reason,
        first_token=miss.first_token,
        seen_tokens=miss.num_seen_tokens,
        computed=dict(miss.spent),
        differing_tokens=miss.num_differing_tokens,
    )


def _explained(
    explained: ExplainedMiss, now_ns: int, *, with_text: bool, shown: PrefixMissReply | None = None
) -> ExplainedMissReply:
    miss = explained.miss
    return ExplainedMissReply(
        **(shown or _exact(miss)).model_dump(),
        request_id=miss.request_id,
        tenant=miss.tenant,
        age_s=(now_ns - miss.time_ns) / NS_PER_S,
        worker=miss.worker,
        prompt_tokens=miss.num_prompt_tokens,
        cached_tokens=miss.num_cached_tokens,
        nearest_request=miss.nearest,
        cached_on_workers=list(miss.holders),
        evicted_s_ago=None if miss.lost_ns is None else (miss.time_ns - miss.lost_ns) / NS_PER_S,
        evicted_on_worker=miss.lost_worker,
        evicted_for=miss.evicted_for,
        text=_text(explained.text) if with_text else None,
    )


def _place(place: MissPlace, summary: MissSummary, text: TextDifference | None) -> MissPlaceReply:
    share = place.num_again_tokens / max(1, summary.num_computed_tokens)
    return MissPlaceReply(
        requests=place.num_requests,
        again_tokens=place.num_again_tokens,
        share=share,
        first_token=place.first_token,
        last_token=place.last_token,
        differing_tokens=place.num_differing_tokens,
        example_request=place.example,
        words=_place_in_words(place, share, text),
        text=_text(text),
    )


def _place_in_words(place: MissPlace, share: float, text: TextDifference | None) -> str:
    at = f"token {place.first_token}"
    if place.last_token > place.first_token:
        at = f"tokens {place.first_token} to {place.last_token}"
    prompts = "1 prompt differs" if place.num_requests == 1 else f"{place.num_requests:,} prompts differ"
    what = f"about {place.num_differing_tokens} tokens"
    if text is not None:
        kind = f"{text.kind}, " if text.kind else ""
        what = f"{kind}{len(text.now)} characters: {text.was!r}, then {text.now!r}"
    return f"{_percent(share)} of the prefill work computes again what follows after {at}, where {prompts} ({what})."


def _sentences(summary: MissSummary) -> list[str]:
    """What the prefill work was spent on, in words, the largest part first."""
    computed = summary.num_computed_tokens
    if not computed:
        return []
    cached = _percent(summary.num_cached_tokens / summary.num_prompt_tokens)
    lines = [
        f"Of {summary.num_prompt_tokens:,} prompt tokens, {cached} were cached and {computed:,} were computed; "
        f"{_percent(summary.tokens[NEW] / computed)} of these were new."
    ]
    for cause, count in summary.tokens.most_common():
        words = _WORDS.get(cause)  # type: ignore[call-overload]
        if words and count / computed >= 0.005:
            lines.append(f"{_percent(count / computed)} of the prefill work {words}.")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _text(text: TextDifference | None) -> DifferenceReply | None:
    if text is None:
        return None
    return DifferenceReply(before=text.before, was=text.was, now=text.now, kind=text.kind)
