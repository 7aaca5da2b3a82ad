"""What can be set on each engine against each cause, as data, with what it does to the twin.

A change of the twin returns None where the server is set so already, or cannot be. ``option`` names the values that the
change gives ({max_num_seqs} and so on, see engine_advice.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from diptych.control.config import CapsConfig, reshaped
from diptych.control.router.topology import Role
from diptych.diagnosis.predicted_gain import Change
from diptych.diagnosis.shape_choice import choose_shape
from diptych.diagnosis.twin_model import TwinModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One change. words: what to do. option: the text that does it on this engine's command line. change: for the twin
    (None: it cannot be simulated). can_change_live: without a restart. takes_hardware: it needs more of it."""

    name: str
    words: str
    option: str
    costs: str
    refuted_by: str
    change: Change | None = None
    can_change_live: bool = False
    takes_hardware: bool = False


def _seats(factor: float) -> Change:
    def change(model: TwinModel) -> TwinModel | None:
        now = model.engines[0].scheduler
        most = now.budget.max_batched_tokens if now.budget.kind != "whole" else 4096
        seats = min(most, max(1, round(now.max_num_seqs * factor)))
        return None if seats == now.max_num_seqs else model.with_scheduler(max_num_seqs=seats)

    return change


def _batch_that_meets(model: TwinModel) -> TwinModel | None:
    """The model with as many streams as keep the TPOT objective."""
    step_ns, _, _, stream_ns, _ = model.terms
    tpot_ns = model.asked.tpot_ns or model.engines[0].slo.tpot_ns or 2 * step_ns
    seats = max(1, int((0.9 * tpot_ns - step_ns) / stream_ns)) if stream_ns > 0 else 0
    now = model.engines[0].scheduler.max_num_seqs
    return model.with_scheduler(max_num_seqs=seats) if 0 < seats < now else None


def _chunked(model: TwinModel) -> TwinModel | None:
    if model.engines[0].scheduler.budget.kind != "whole":
        return None
    told = model.told()
    engines = tuple(replace(engine, scheduler=reshaped(engine.scheduler, "chunked")) for engine in told.engines)
    return replace(told, engines=engines)


def _shortest_first(model: TwinModel) -> TwinModel | None:
    return None if model.engines[0].scheduler.order == "shortest" else model.with_scheduler(order="shortest")


def _step_tokens(factor: float) -> Change:
    def change(model: TwinModel) -> TwinModel | None:
        now = model.engines[0].scheduler
        if now.budget.kind == "whole":
            return None
        tokens = max(now.max_num_seqs, now.budget.min_chunk_tokens, round(now.budget.max_batched_tokens * factor))
        caps = now.caps if now.caps.long_prefill_threshold < tokens else CapsConfig()
        budget = replace(now.budget, max_batched_tokens=tokens)
        return None if budget == now.budget else model.with_scheduler(budget=budget, caps=caps)

    return change


def _step_time(factor: float) -> Change:
    def change(model: TwinModel) -> TwinModel | None:
        budget = model.engines[0].scheduler.budget
        if budget.kind != "slo":
            return None
        return model.with_scheduler(budget=replace(budget, target_ns=max(1, round(budget.target_ns * factor))))

    return change


def _timed_steps(model: TwinModel) -> TwinModel | None:
    budget = model.engines[0].scheduler.budget
    return model.told().with_scheduler(budget=replace(budget, kind="slo")) if budget.kind == "fixed" else None


def _told(model: TwinModel) -> TwinModel | None:
    """Steps as long as the asked TPOT allows."""
    is_told = model.engines[0].slo.tpot_ns == model.asked.tpot_ns
    return None if is_told or model.engines[0].scheduler.budget.kind != "slo" else model.told()


def _threshold(model: TwinModel) -> TwinModel | None:
    """No more than a quarter of a step for one prompt: one long prompt at a time."""
    now = model.engines[0].scheduler
    if now.budget.kind == "whole" or now.caps.long_prefill_threshold:
        return None
    caps = CapsConfig(0, 1, max(1, now.budget.max_batched_tokens // 4))
    return model.with_scheduler(caps=caps)


def _memory(factor: int) -> Change:
    def change(model: TwinModel) -> TwinModel | None:
        engines = tuple(
            replace(engine, cache=replace(engine.cache, num_blocks=engine.cache.num_blocks * factor))
            for engine in model.engines
        )
        return replace(model, engines=engines)

    return change


def _one_more(role: Role) -> Change:
    def change(model: TwinModel) -> TwinModel | None:
        like = next((engine for own, engine in zip(model.roles, model.engines, strict=True) if own == role), None)
        if like is None:
            return None
        return replace(model, roles=(*model.roles, role), engines=(*model.engines, like))

    return change


def _turn(start: Role, end: Role) -> Change:
    """One worker of the first role takes the second, if it is not the last."""

    def change(model: TwinModel) -> TwinModel | None:
        if model.roles.count(start) < 2:
            return None
        at = model.roles.index(start)
        like = next(engine for own, engine in zip(model.roles, model.engines, strict=True) if own == end)
        roles = (*model.roles[:at], end, *model.roles[at + 1 :])
        return replace(model, roles=roles, engines=(*model.engines[:at], like, *model.engines[at + 1 :]))

    return change


def _apart(model: TwinModel) -> TwinModel | None:
    """The same workers, some for prompts only, where ``diptych advise`` would recommend it, too."""
    if set(model.roles) != {"both"} or len(model.roles) < 2:
        return None
    choice = choose_shape(model)
    return choice.model if choice.best.shape == "split" else None


DIPTYCH: Final[Mapping[str, tuple[Setting, ...]]] = {
    "prefill_queueing": (
        Setting(name="shape", words="compute prompts in chunks between decodes, short ones first",
                option="--shape chunked {slo}", costs="long prompts take longer",
                refuted_by="TTFT of short prompts stays as it is", change=_chunked, can_change_live=True),
        Setting(name="order", words="short prompts first", option="--order shortest", costs="long prompts wait longer",
                refuted_by="TTFT p50 stays as it is", change=_shortest_first),
        Setting(name="workers", words="one more worker", option="--workers {num_workers}", costs="its cores and memory",
                refuted_by="the queue stays as long",
                change=_one_more("both"), takes_hardware=True),
    ),
    "prefill_interference": (
        Setting(name="shape", words="compute prompts in chunks between decodes", option="--shape chunked {slo}",
                costs="long prompts take longer", refuted_by="the longest gaps stay as long", change=_chunked,
                can_change_live=True),
        Setting(name="budget", words="limit a step by time, not by tokens", option="--budget slo {slo}",
                costs="long prompts take longer", refuted_by="gaps during prefills stay as long", change=_timed_steps),
        Setting(name="slo", words="steps as long as the objective allows", option="{slo}",
                costs="more steps for each prompt, or longer gaps", refuted_by="gaps during prefills stay as they are",
                change=_told),
        Setting(name="step_target_ms", words="shorter steps", option="--step-target-ms {step_target_ms}",
                costs="more steps for each prompt, each of which reads the weights",
                refuted_by="gaps during prefills stay as long", change=_step_time(0.5)),
        Setting(name="max_batched_tokens", words="smaller chunks", option="--max-batched-tokens {max_batched_tokens}",
                costs="more steps for each prompt, each of which reads the weights",
                refuted_by="gaps during prefills stay as long", change=_step_tokens(0.5)),
        Setting(name="roles", words="prefill on a worker of its own",
                option="--prefill {num_prefill} --decode {num_decode}",
                costs="a handoff for each request, and cores that idle while no prompt comes",
                refuted_by="TTFT gets worse than the gaps get better", change=_apart),
    ),
    "decode_batch": (
        Setting(name="max_num_seqs", words="no more streams than keep the TPOT objective",
                option="--max-num-seqs {max_num_seqs}", costs="requests wait instead: TTFT grows",
                refuted_by="TTFT grows by more than the answers get faster", change=_batch_that_meets),
        Setting(name="workers", words="one more worker", option="--workers {num_workers}", costs="its cores and memory",
                refuted_by="TPOT stays as it is: the workers share a memory bus",
                change=_one_more("both"), takes_hardware=True),
    ),
    "kv_cache_full": (
        Setting(name="kv_cache_memory", words="twice the memory for the KV cache",
                option="--kv-cache-memory (twice the present size: {kv_blocks} blocks)", costs="memory",
                refuted_by="requests still wait while streams run", change=_memory(2)),
        Setting(name="workers", words="one more worker", option="--workers {num_workers}", costs="its cores and memory",
                refuted_by="requests still wait while streams run",
                change=_one_more("both"), takes_hardware=True),
    ),
    "sequence_limit": (
        Setting(name="max_num_seqs", words="more streams at once", option="--max-num-seqs {max_num_seqs}",
                costs="each step takes longer: TPOT grows", refuted_by="TPOT grows by more than the wait falls",
                change=_seats(4)),
        Setting(name="max_num_seqs", words="twice the streams at once", option="--max-num-seqs {max_num_seqs}",
                costs="each step takes longer: TPOT grows", refuted_by="TPOT grows by more than the wait falls",
                change=_seats(2)),
    ),
    "small_chunks": (
        Setting(name="max_batched_tokens", words="larger chunks", option="--max-batched-tokens {max_batched_tokens}",
                costs="longer gaps between tokens while prompts are computed", refuted_by="TTFT stays as it is",
                change=_step_tokens(4)),
        Setting(name="step_target_ms", words="longer steps", option="--step-target-ms {step_target_ms}",
                costs="longer gaps between tokens while prompts are computed", refuted_by="TTFT stays as it is",
                change=_step_time(2)),
    ),
    "capacity": (
        Setting(name="workers", words="one more worker", option="--workers {num_workers}", costs="its cores and memory",
                refuted_by="the queue stays as long: the workers share a memory bus",
                change=_one_more("both"), takes_hardware=True),
    ),
    "too_few_prefill_workers": (
        Setting(name="roles", words="one decode worker prefills",
                option='POST /admin/workers/N {{"role": "prefill"}}',
                costs="fewer streams at once", refuted_by="TPOT grows by more than TTFT falls",
                change=_turn("decode", "prefill"), can_change_live=True),
        Setting(name="prefill", words="one more prefill worker", option="--prefill {num_prefill}",
                costs="its cores and memory", refuted_by="TTFT stays as it is",
                change=_one_more("prefill"), takes_hardware=True),
    ),
    "too_few_decode_workers": (
        Setting(name="roles", words="one prefill worker decodes",
                option='POST /admin/workers/N {{"role": "decode"}}',
                costs="prompts wait longer", refuted_by="TTFT stays as it is", change=_turn("prefill", "decode"),
                can_change_live=True),
        Setting(name="decode", words="one more decode worker", option="--decode {num_decode}",
                costs="its cores and memory", refuted_by="TTFT stays as it is",
                change=_one_more("decode"), takes_hardware=True),
    ),
    "slow_transfer": (
        Setting(name="transfer", words="shared memory between workers of one host", option="--transfer auto",
                costs="none", refuted_by="the transfers stay as slow",
                change=lambda model: replace(model, link="shared_memory") if model.link != "shared_memory" else None),
        Setting(name="kv_codec", words="compress the KV that travels", option="--kv-codec int8",
                costs="rounded KV: tokens may differ", refuted_by="the second token comes as late"),
    ),
    "prefix_misses": (
        Setting(name="routing", words="send requests to where their prefix is", option="--routing kv_aware",
                costs="less even load", refuted_by="the share of hits stays as it is"),
        Setting(name="prompt", words="put what changes (times, ids) behind what stays", option="(in the client)",
                costs="none", refuted_by="the share of hits stays as it is"),
    ),
    "batch_flood": (
        Setting(name="service_class", words='send batch work with "service_class": "batch"', option="(in the client)",
                costs="batch work waits", refuted_by="interactive TTFT stays as it is"),
        Setting(name="max_prefills_in_flight_per_worker", words="let more requests wait where their class counts",
                option="--max-prefills-in-flight-per-worker 4", costs="workers know less of what comes",
                refuted_by="interactive TTFT stays as it is"),
    ),
    "oversubscribed_cores": (
        Setting(name="threads", words="as many threads as there are free cores", option="--threads 1",
                costs="slower steps where the cores were free", refuted_by="steps take as long as before"),
        Setting(name="cores", words="cores of their own for the workers", option="--cores 0-N",
                costs="other programs lose these cores", refuted_by="threads still wait for cores"),
    ),
}  # fmt: skip

VLLM: Final[Mapping[str, tuple[Setting, ...]]] = {
    "prefill_queueing": (
        Setting(name="long_prefill_token_threshold", words="cap the share of one prompt in a step",
                option="--long-prefill-token-threshold {quarter}", costs="long prompts take longer",
                refuted_by="TTFT p50 stays as it is", change=_threshold),
        Setting(name="replicas", words="one more replica", option="--data-parallel-size 2", costs="its hardware",
                refuted_by="the queue stays as long",
                change=_one_more("both"), takes_hardware=True),
    ),
    "prefill_interference": (
        Setting(name="max_num_batched_tokens", words="smaller chunks",
                option="--max-num-batched-tokens {max_batched_tokens}",
                costs="more steps for each prompt, each of which reads the weights",
                refuted_by="gaps during prefills stay as long", change=_step_tokens(0.25)),
        Setting(name="kv_role", words="prefill on an instance of its own",
                option="--kv-transfer-config (NixlConnector)",
                costs="a second instance, and a transfer for each request",
                refuted_by="TTFT gets worse than the gaps get better"),
    ),
    "decode_batch": (
        Setting(name="max_num_seqs", words="no more streams than keep the TPOT objective",
                option="--max-num-seqs {max_num_seqs}", costs="requests wait instead: TTFT grows",
                refuted_by="TTFT grows by more than the answers get faster", change=_batch_that_meets),
    ),
    "kv_cache_full": (
        Setting(name="kv_cache_memory", words="more memory for the KV cache",
                option="--gpu-memory-utilization, or VLLM_CPU_KVCACHE_SPACE on a CPU", costs="memory",
                refuted_by="preemptions go on", change=_memory(2)),
    ),
    "sequence_limit": (
        Setting(name="max_num_seqs", words="more streams at once", option="--max-num-seqs {max_num_seqs}",
                costs="each step takes longer: TPOT grows", refuted_by="TPOT grows by more than the wait falls",
                change=_seats(4)),
    ),
    "capacity": (
        Setting(name="replicas", words="one more replica", option="--data-parallel-size 2", costs="its hardware",
                refuted_by="the queue stays as long",
                change=_one_more("both"), takes_hardware=True),
    ),
    "prefix_misses": (
        Setting(name="prefix_caching", words="keep prefixes", option="--enable-prefix-caching", costs="none",
                refuted_by="the share of hits stays as it is"),
    ),
    "batch_flood": (
        Setting(name="scheduling_policy", words="interactive requests first",
                option='--scheduling-policy priority, and "priority": 1 in batch requests', costs="batch work waits",
                refuted_by="interactive TTFT stays as it is"),
    ),
    "oversubscribed_cores": (
        Setting(name="threads", words="cores of their own", option="VLLM_CPU_OMP_THREADS_BIND=0-N",
                costs="other programs lose these cores", refuted_by="threads still wait for cores"),
    ),
}  # fmt: skip

SGLANG: Final[Mapping[str, tuple[Setting, ...]]] = {
    "prefill_interference": (
        Setting(name="chunked_prefill_size", words="smaller chunks",
                option="--chunked-prefill-size {max_batched_tokens}",
                costs="more steps for each prompt", refuted_by="gaps during prefills stay as long",
                change=_step_tokens(0.25)),
    ),
    "kv_cache_full": (
        Setting(name="mem_fraction_static", words="more memory for the KV cache", option="--mem-fraction-static",
                costs="memory", refuted_by="retractions go on", change=_memory(2)),
    ),
    "sequence_limit": (
        Setting(name="max_running_requests", words="more streams at once",
                option="--max-running-requests {max_num_seqs}", costs="each step takes longer: TPOT grows",
                refuted_by="TPOT grows by more than the wait falls", change=_seats(4)),
    ),
    "decode_batch": (
        Setting(name="max_running_requests", words="no more streams than keep the TPOT objective",
                option="--max-running-requests {max_num_seqs}", costs="requests wait instead: TTFT grows",
                refuted_by="TTFT grows by more than the answers get faster", change=_batch_that_meets),
    ),
    "prefill_queueing": (
        Setting(name="schedule_policy", words="prompts with cached prefixes first", option="--schedule-policy lpm",
                costs="other prompts wait longer", refuted_by="TTFT p50 stays as it is"),
    ),
}  # fmt: skip

LLAMACPP: Final[Mapping[str, tuple[Setting, ...]]] = {
    "sequence_limit": (
        Setting(name="parallel", words="more slots", option="--parallel {max_num_seqs}",
                costs="less context for each slot, slower steps", refuted_by="requests are still deferred",
                change=_seats(4)),
    ),
    "prefill_interference": (
        Setting(name="batch_size", words="smaller batches of prompt tokens", option="--batch-size 256",
                costs="prompts take longer", refuted_by="gaps during prefills stay as long", change=_step_tokens(0.25)),
    ),
    "kv_cache_full": (
        Setting(name="ctx_size", words="a larger context", option="--ctx-size", costs="memory",
                refuted_by="requests are still deferred", change=_memory(2)),
    ),
    "oversubscribed_cores": (
        Setting(name="threads", words="as many threads as there are free cores", option="--threads 1",
                costs="slower steps where the cores were free", refuted_by="steps take as long as before"),
    ),
}  # fmt: skip
CATALOGUE: Final[Mapping[str, Mapping[str, tuple[Setting, ...]]]] = {
    "diptych": DIPTYCH, "vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP,
}  # fmt: skip
