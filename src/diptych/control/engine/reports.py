"""What a worker reports of itself: a snapshot for metrics, and the load for a router. Reads, never changes."""

from dataclasses import dataclass

from diptych.control.config import EngineConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.scheduler import Scheduler
from diptych.control.engine.scheduler.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load of a worker.

    backlog_ns: prompt work of all requests that wait or are half done there, as its step-time model sees it. token_ns,
    pair_ns, fixed_ns, sequence_ns, context_ns: that model's prices of a prompt token, of a (query, key) pair, of a
    step, of a decoding sequence and of a token of its context. output_tokens: generated so far by the requests that are
    there now. tpot_ns: how long a step may take while streams run there (0: whatever it takes). copy_block_ns: copying
    a block up from host memory. read_block_ns: reading one from disk (0: nothing is read from one now). read_wait_ns:
    until a load that is begun now has its turn. peer_block_ns, peer_wait_ns: the same of the host memories of other
    workers of the host. computed: requests whose prompts are taken to be computed there, though no token of theirs
    has come (engines of others, replies that come whole).
    """

    time_ns: int
    backlog_ns: int
    num_blocks: int
    used_blocks: int
    token_ns: float
    pair_ns: float
    fixed_ns: float = 0.0
    sequence_ns: float = 0.0
    context_ns: float = 0.0
    output_tokens: int = 0
    tpot_ns: int = 0
    copy_block_ns: int = 0
    read_block_ns: int = 0
    read_wait_ns: int = 0
    peer_block_ns: int = 0
    peer_wait_ns: int = 0
    computed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tiers of one worker. host_blocks_used: of ``num_host_blocks``, those that hold something. host_hit_tokens:
    copied up instead of computed (disk_hit_tokens and peer_hit_tokens of them, or more, were read from disk, or from
    the host memory of another worker, first). num_loading: requests that wait for a load. disk_blocks: that can be
    found on disk. stored_blocks, unstored_blocks: written, and wanted but not written. missed_blocks: that were on disk
    by the index and could not be read. damaged_blocks, disk_bytes: checksums that did not match, and what the folder
    takes (the driver fills them in). reads_peers: whether host memories of other workers are read. peer_missed_blocks:
    that a peer no longer had."""

    num_host_blocks: int = 0
    host_blocks_used: int = 0
    host_hit_tokens: int = 0
    has_disk: bool = False
    num_loading: int = 0
    disk_blocks: int = 0
    disk_hit_tokens: int = 0
    stored_blocks: int = 0
    unstored_blocks: int = 0
    missed_blocks: int = 0
    cancelled_loads: int = 0
    load_block_ns: int = 0
    damaged_blocks: int = 0
    disk_bytes: int = 0
    reads_peers: bool = False
    peer_hit_tokens: int = 0
    peer_missed_blocks: int = 0
    peer_block_ns: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one worker for metrics. num_resting: of class batch, set aside for others. kv_usage: 0 to 1.
    step_time_error: recent mean relative error of the step-time model, whose coefficients are in ns (a step, a prompt
    token, a pair, a sequence, a context token). num_drafts to accepted_draft_tokens: see Speculation. cpu_wait_ns: how
    long a thread of its process was ready to run and had no core (its driver fills it in)."""

    num_waiting: int = 0
    num_prefilling: int = 0
    num_decoding: int = 0
    num_swapped: int = 0
    num_resting: int = 0
    kv_usage: float = 0.0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    step_time_error: float = 0.0
    step_time_coefficients: tuple[float, ...] = ()
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_forced_tokens: int = 0
    accepted_draft_tokens: tuple[int, ...] = ()
    cpu_wait_ns: int = 0
    tiers: TierStats = TierStats()


NO_TIERS = TierStats()


def engine_stats(scheduler: Scheduler, kv: KVCacheManager, model: StepTimeModel) -> EngineStats:
    """The snapshot of now."""
    return EngineStats(
        num_waiting=scheduler.num_waiting + len(scheduler.incoming.waiting),
        num_prefilling=len(scheduler.prefilling),
        num_decoding=len(scheduler.batch) + len(scheduler.joining),
        num_swapped=len(scheduler.swapped),
        num_resting=len(scheduler.best_effort),
        kv_usage=kv.usage,
        prefix_queried_tokens=kv.queried_tokens,
        prefix_hit_tokens=kv.hit_tokens,
        num_preemptions=scheduler.preemption.num_preemptions,
        step_time_error=model.relative_error,
        step_time_coefficients=(*model.coefficients, model.expert_ns) if model.experts else model.coefficients,
        num_drafts=scheduler.speculation.num_drafts,
        num_draft_tokens=scheduler.speculation.num_draft_tokens,
        num_forced_tokens=scheduler.speculation.num_forced_tokens,
        accepted_draft_tokens=tuple(scheduler.speculation.accepted_at),
        tiers=tier_stats(kv) if kv.host.num_blocks else NO_TIERS,
    )


def tier_stats(kv: KVCacheManager) -> TierStats:
    """The snapshot of the tiers."""
    tiers, loads = kv.tiers, kv.tiers.loads
    return TierStats(
        num_host_blocks=kv.host.num_blocks,
        host_blocks_used=kv.host.num_blocks - kv.host.num_free,
        host_hit_tokens=tiers.host_hit_tokens,
        has_disk=tiers.has_disk,
        num_loading=loads.num_waiting,
        disk_blocks=loads.num_on_disk,
        disk_hit_tokens=loads.disk.loaded_blocks * kv.block_size,
        stored_blocks=tiers.num_stored_blocks,
        unstored_blocks=tiers.num_unstored_blocks,
        missed_blocks=loads.disk.missed_blocks,
        cancelled_loads=loads.num_cancelled,
        load_block_ns=loads.disk.load_block_ns,
        reads_peers=loads.peers.is_on,
        peer_hit_tokens=loads.peers.loaded_blocks * kv.block_size,
        peer_missed_blocks=loads.peers.missed_blocks,
        peer_block_ns=loads.peers.load_block_ns,
    )


def load_report(
    config: EngineConfig, scheduler: Scheduler, kv: KVCacheManager, model: StepTimeModel, now: int
) -> LoadReport:
    """The load of now. A step may take as long as the objective says, or the target where there is none."""
    budget = config.scheduler.budget
    fixed_ns, token_ns, pair_ns, sequence_ns, context_ns = model.coefficients
    if model.experts is not None:  # as a line through the steps of so many streams and of one more
        num_seqs = max(1, len(scheduler.batch))
        more_ns = model.experts_work_ns(1, num_seqs)
        fixed_ns += model.experts_work_ns(num_seqs, 0) - num_seqs * more_ns
        sequence_ns += more_ns
    return LoadReport(
        time_ns=now,
        backlog_ns=_backlog_ns(scheduler, kv, model),
        num_blocks=kv.pool.num_blocks,
        used_blocks=kv.pool.num_used,
        token_ns=token_ns,
        pair_ns=pair_ns,
        fixed_ns=fixed_ns,
        sequence_ns=sequence_ns,
        context_ns=context_ns,
        output_tokens=scheduler.batch.output_tokens,
        tpot_ns=0 if budget.kind == "whole" else config.slo.tpot_ns or budget.target_ns,
        copy_block_ns=kv.config.tiers.copy_block_ns,
        read_block_ns=kv.tiers.loads.disk.price_at(now),
        read_wait_ns=kv.tiers.loads.disk.wait_ns,
        peer_block_ns=kv.tiers.loads.peers.price_at(now),
        peer_wait_ns=kv.tiers.loads.peers.wait_ns,
    )


def _backlog_ns(scheduler: Scheduler, kv: KVCacheManager, model: StepTimeModel) -> int:
    """Prompt work of all that wait there or are half done."""
    work = model.prefill_work_ns
    waiting = sum(
        work(request.cached_tokens_at_arrival, request.num_tokens - request.cached_tokens_at_arrival)
        for request in (*scheduler.waiting, *scheduler.early_prefills.parked, *kv.tiers.loads.requests())
        if not request.is_remote_prefill
    )
    admitted = (*scheduler.prefilling.values(), *scheduler.best_effort.prompts.values())
    return waiting + sum(
        work(request.num_scheduled_tokens, request.num_tokens - request.num_scheduled_tokens) for request in admitted
    )
