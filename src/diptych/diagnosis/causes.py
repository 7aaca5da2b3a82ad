"""From accounts to causes: what each second of a request points to, given what else was seen.

An account says where the time went; only the evidence says why. ``Evidence`` holds the decisions that are the same for
all requests of a window; ``lost_to`` gives each account's time to one cause, or splits it. Time that a request would
also have taken alone (its own prompt, a step with one stream) goes to UNAVOIDABLE.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.diagnosis.observation import Observation
from diptych.diagnosis.request_parts import RequestParts

Lost = tuple[defaultdict[str, float], defaultdict[str, float]]  # by cause: before the first token, and after it

UNAVOIDABLE: Final = "unavoidable"
FULL_KV = 0.85  # share of the KV cache from which it limits
PREEMPTED = 0.02  # per request, from which memory is full
BUSY, NOT_BUSY = 0.9, 0.6  # shares of a worker's time
WAITS_FOR_CORES = 0.3  # share of a thread's time without a core
SLOW, VERY_SLOW = 0.3, 0.5  # share of the step time that the model does not explain (the second: if waits are known)
YOUNG_S = 120.0  # age of a worker whose cache may be cold
MOST = 0.5  # of the computed prompt tokens
BURST = 4.0  # arrivals in a tenth of the time in which they came, over the mean
DRAINS = 0.7  # arrivals over first tokens: at that, more came at once before than come now
MANY_CHUNKS = 4.0  # steps that a prompt token's prompt needs
NOT_COMPUTING = ("reserve", "preempted", "retried", "handoff", "queue_seats", "queue_memory")
DISTINCT = 0.3  # of the prompt tokens: from that difference on, the share of hits has grown


@dataclass(frozen=True, slots=True)
class Evidence:
    """What holds for the whole window. lacks_cores: threads wait for cores, or steps are unevenly slow. is_saturated:
    no worker is idle and requests wait. core_wait: share of a thread's time without a core, where they are lacking.
    Other shares: of computed prompt tokens."""

    lacks_cores: bool = False
    is_saturated: bool = False
    kv_is_full: bool = False
    prefill_pool_limits: bool = False
    decode_pool_limits: bool = False
    is_cold: bool = False
    is_flooded: bool = False
    transfer_limits: bool = True
    chunks_are_small: bool = False
    core_wait: float = 0.0
    batch_share: float = 0.0
    long_share: float = 0.0
    reread_share: float = 0.0
    reread_evicted: float = 0.0


def evidence_of(observation: Observation) -> Evidence:
    """The decisions, by the thresholds above. A signal that is not known decides nothing."""
    known = observation.signals.get
    waiting = known("waiting", 0.0)
    idle_prefill = known("busy_prefill", 1.0) < NOT_BUSY
    idle_decode = known("busy_decode", 1.0) < NOT_BUSY
    batch_share = known("batch_share", 0.0)
    drains = known("arrived_share", 1.0) <= DRAINS and waiting >= known("running", 0.0)
    burst = waiting >= 1.0 and (known("burst", 0.0) >= BURST or drains)
    late, early = known("hit_share_late", 0.0), known("hit_share_early", 0.0)
    reread = known("reread_share", 0.0)
    core_wait = known("cpu_wait", 0.0) if known("cpu_wait", 0.0) >= WAITS_FOR_CORES else 0.0
    too_slow = VERY_SLOW if "cpu_wait" in observation.signals else SLOW
    return Evidence(
        lacks_cores=core_wait > 0 or known("slow_share", 0.0) >= too_slow,
        core_wait=core_wait,
        is_saturated=known("busy", 0.0) >= BUSY and waiting >= 1.0,
        kv_is_full=known("kv_usage_max", 0.0) >= FULL_KV or known("preemptions", 0.0) >= PREEMPTED,
        prefill_pool_limits=known("busy_prefill", 0.0) >= BUSY and idle_decode,
        decode_pool_limits=known("busy_decode", 0.0) >= BUSY and idle_prefill,
        is_cold=known("worker_age_s", YOUNG_S) < YOUNG_S and late - early >= DISTINCT,
        is_flooded=batch_share >= MOST or burst,
        transfer_limits=known("transfer_s", 1.0) > 0.001,
        chunks_are_small=known("chunks_per_prompt", 1.0) >= MANY_CHUNKS
        and MANY_CHUNKS * known("step_tokens_p95", 1e9) < known("prompt_p95", 0.0),
        batch_share=batch_share if batch_share else float(burst),
        long_share=known("long_share", 0.0),
        reread_evicted=known("reread_evicted", 0.0),
        reread_share=max(reread, max(0.0, late - early) if known("worker_age_s", YOUNG_S) < YOUNG_S else 0.0),
    )


def lost_to(parts: RequestParts, evidence: Evidence) -> Lost:
    """Nanoseconds that one request lost to each cause before its first token, and after it. Sums to its parts."""
    before: defaultdict[str, float] = defaultdict(float)
    after: defaultdict[str, float] = defaultdict(float)
    for account, value in parts.ttft.items():
        for cause, share in _shares(account, parts, evidence).items():
            before[cause] += value * share
    for account, value in parts.decode.items():
        for cause, share in _shares(account, parts, evidence).items():
            after[cause] += value * share
    return before, after


def _shares(account: str, parts: RequestParts, evidence: Evidence) -> Mapping[str, float]:
    """The causes of an account and their shares, which sum to 1. Where cores are lacking, they are the cause of that
    part of all computing in which its threads had none."""
    shares = _shares_with_cores(account, parts, evidence)
    if not evidence.core_wait or account in NOT_COMPUTING:
        return shares
    left = 1 - evidence.core_wait
    lacking = {cause: share * left for cause, share in shares.items()}
    lacking["oversubscribed_cores"] = lacking.get("oversubscribed_cores", 0.0) + evidence.core_wait
    return lacking


def _shares_with_cores(account: str, parts: RequestParts, evidence: Evidence) -> Mapping[str, float]:
    match account:
        case "queue_prefill" | "prefill_others":
            return _prompts_of_others(parts, evidence)
        case "queue_streams" | "prefill_streams":
            return {"small_chunks": 1.0} if evidence.chunks_are_small else _prompts_of_others(parts, evidence)
        case "queue_seats":
            return {"sequence_limit": 1.0}
        case "queue_memory":
            return {"too_few_decode_workers" if evidence.decode_pool_limits else "kv_cache_full": 1.0}
        case "reserve":
            return {_short_decode(evidence): 1.0}
        case "prefill_own":
            return _computed_again(evidence, UNAVOIDABLE)
        case "mixed_prefill" | "stalled_by_prefill":
            return _interference(parts, evidence)
        case "decode_floor":
            return {UNAVOIDABLE: 1.0}
        case "decode_batch":
            pool = "too_few_decode_workers" if evidence.decode_pool_limits else "decode_batch"
            return {"batch_flood" if evidence.is_flooded and parts.service_class != "batch" else pool: 1.0}
        case "preempted":
            return {"kv_cache_full": 1.0}
        case "retried":
            return {"worker_losses": 1.0}
        case "handoff":
            return {"slow_transfer" if evidence.transfer_limits else _short_decode(evidence): 1.0}
        case "queue_slow" | "prefill_slow" | "decode_slow":
            return {"oversubscribed_cores" if evidence.lacks_cores else UNAVOIDABLE: 1.0}
        case _:  # idle, delivery
            return {"oversubscribed_cores" if evidence.lacks_cores else "front_end": 1.0}


def _short_decode(evidence: Evidence) -> str:
    """Why a decode worker was waited for: it has too much to do or no blocks, or it was messages and a step's end."""
    return "too_few_decode_workers" if evidence.decode_pool_limits or evidence.kv_is_full else "front_end"


def _prompts_of_others(parts: RequestParts, evidence: Evidence) -> Mapping[str, float]:
    """Waiting for the prompts of others: too many of them, too long ones, or those of a batch job."""
    if evidence.prefill_pool_limits:
        return {"too_few_prefill_workers": 1.0}
    if evidence.is_flooded and parts.service_class != "batch":
        return {"batch_flood": 1.0}
    waited = parts.ttft["queue_prefill"] + parts.ttft["prefill_others"]
    long = _share_of(parts.marked_ttft_ns, waited)
    shares = _computed_again(evidence, "capacity" if evidence.is_saturated else "prefill_queueing")
    shares = {cause: share * (1 - long) for cause, share in shares.items()}
    shares["prefill_queueing"] = shares.get("prefill_queueing", 0.0) + long
    return shares


def _share_of(marked_ns: int, lost_ns: int) -> float:
    """The share that long prompts took of the time that was lost to other requests' prompts."""
    return min(1.0, marked_ns / lost_ns) if lost_ns > 0 else 0.0


def _computed_again(evidence: Evidence, rest: str) -> dict[str, float]:
    """The causes of prompt tokens that had been computed before; what had not been is given to ``rest``."""
    again, evicted = evidence.reread_share, evidence.reread_evicted
    causes = {"cold_cache" if evidence.is_cold else "prefix_misses": again * (1 - evicted), rest: 1 - again}
    if again * evicted:
        causes["kv_cache_full"] = again * evicted
    return causes


def _interference(parts: RequestParts, evidence: Evidence) -> Mapping[str, float]:
    if evidence.is_flooded and evidence.batch_share >= MOST and parts.service_class != "batch":
        return {"batch_flood": 1.0}
    if not evidence.is_saturated:
        return {"prefill_interference": 1.0}
    # who has more work than time keeps no objective by sharing it out in another way, unless a few prompts are the work
    stalled = parts.decode["mixed_prefill"] + parts.decode["stalled_by_prefill"]
    long = _share_of(parts.marked_decode_ns, stalled)
    return {"prefill_interference": long, "capacity": 1 - long}


def lost_to_of_means(observation: Observation, evidence: Evidence) -> Lost:
    """The same in seconds for the mean request of an engine that is not split request by request.

    Where threads wait for cores, all that is computed takes 1 / (1 - core_wait) times as long, and what waits for it at
    least the square of that (Pollaczek-Khinchine: the work that is found grows with the square of the service time)."""
    before: defaultdict[str, float] = defaultdict(float)
    after: defaultdict[str, float] = defaultdict(float)
    known = observation.signals.get
    ttft, itl = observation.ttft, observation.itl
    free = 1 - evidence.core_wait
    if ttft is not None:
        queue, prefill = ttft.parts_s.get("queue", 0.0), ttft.parts_s.get("prefill", 0.0)
        before["oversubscribed_cores"] += queue * (1 - free**2) + prefill * (1 - free)
        before[_queue_cause(observation, evidence)] += queue * free**2
        again = evidence.reread_share
        before["cold_cache" if evidence.is_cold else "prefix_misses"] += prefill * free * again
        before[UNAVOIDABLE] += prefill * free * (1 - again)
        before["slow_transfer"] += ttft.parts_s.get("transfer", 0.0)
        before["oversubscribed_cores" if evidence.lacks_cores else "front_end"] += ttft.parts_s.get("rest", 0.0)
    if itl is not None:
        tokens = max(0.0, known("output_mean", 1.0) - 1)
        stalls = itl.parts_s.get("stalls", 0.0) * tokens
        preempted = known("preemptions", 0.0) > PREEMPTED
        after["kv_cache_full" if preempted else _stall_cause(observation, evidence)] += stalls
        floor, rest = itl.parts_s.get("decode_floor", 0.0) * tokens, itl.parts_s.get("rest", 0.0) * tokens
        after["oversubscribed_cores"] += floor * (1 - free)
        after[UNAVOIDABLE] += floor * free
        after["oversubscribed_cores" if evidence.lacks_cores else "decode_batch"] += rest
    return before, after


def _queue_cause(observation: Observation, evidence: Evidence) -> str:
    """Why requests of another engine wait: memory, places, a flood, long prompts, or too much of everything."""
    known = observation.signals.get
    places, most = known("max_num_seqs", 0.0), known("running_max", 0.0)
    if evidence.prefill_pool_limits:
        return "too_few_prefill_workers"
    if evidence.kv_is_full:
        return "kv_cache_full"
    if places and most >= places:
        return "sequence_limit"
    if evidence.is_flooded:
        return "batch_flood"
    return "capacity" if _has_too_much(observation, evidence) else "prefill_queueing"


def _has_too_much(observation: Observation, evidence: Evidence) -> bool:
    """More requests wait than run, and not for a few long prompts."""
    known = observation.signals.get
    few_are_long = evidence.long_share >= MOST or known("prompt_p95", 0.0) > 4 * max(1.0, known("prompt_p50", 0.0))
    return not few_are_long and known("waiting", 0.0) >= max(1.0, known("running", 0.0))


def _stall_cause(observation: Observation, evidence: Evidence) -> str:
    if evidence.lacks_cores:
        return "oversubscribed_cores"
    if evidence.is_flooded and evidence.batch_share >= MOST:
        return "batch_flood"
    return "capacity" if _has_too_much(observation, evidence) else "prefill_interference"
