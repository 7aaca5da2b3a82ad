"""The diagnosis table as data: for each cause what users see, what speaks for it and against it, and what to do.

The order of rows is that of documents; the order of a diagnosis comes from seconds. ``alert`` is the condition that a
Prometheus server can watch: it cannot attribute seconds, so an alert says where to look, and ``diptych diagnose`` says
whether it matters. {w} stands for the window of the rates, {server} for the labels of one server: each is judged alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Phase = Literal["prefill", "decode", "both", "transfer", "client"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRow:
    """One cause. evidence, counter_evidence: signals that a diagnosis prints for it. needs: signals without which it
    cannot be told from others. alert: PromQL ("": nothing to watch)."""

    cause: str
    phase: Phase
    symptom: str
    evidence: str
    counter_evidence: str
    pressure_point: str
    inspect: str
    action: str
    signals: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    alert: str = ""


ROWS: Final[tuple[CauseRow, ...]] = (
    CauseRow(
        cause="prefill_queueing",
        phase="prefill",
        symptom="TTFT jumps, most of all when long prompts arrive",
        evidence="requests wait while the prompts of others are computed; a few prompts hold most of the tokens",
        counter_evidence="workers are idle while requests wait; all prompts have about the same length",
        pressure_point="prefill queue",
        inspect="histogram of prompt tokens; order and batch policy of the prefill queue",
        action="short prompts first, or fewer long prompts at a time; then more prefill capacity",
        signals=("waiting", "long_share", "prompt_p50", "prompt_p95"),
        alert=(
            "histogram_quantile(0.95, sum by (le, {server}) (rate(vllm:request_queue_time_seconds_bucket[{w}]))) > 1"
        ),
    ),
    CauseRow(
        cause="prefill_interference",
        phase="decode",
        symptom="chats stutter while documents are uploaded",
        evidence="gaps between tokens fall together with prompts of others in the same or the next step",
        counter_evidence="the slowest gaps come without any prompt being computed",
        pressure_point="steps shared by prompts and streams",
        inspect="tokens per step; gaps between tokens during prefills",
        action="smaller prefill chunks, or prefill on workers of its own",
        signals=("stall_s", "long_share", "step_tokens_p95"),
        alert=(
            "histogram_quantile(0.99, sum by (le, {server}) (rate(vllm:inter_token_latency_seconds_bucket[{w}])))"
            " > on ({server}) 5 *"
            " histogram_quantile(0.5, sum by (le, {server}) (rate(vllm:inter_token_latency_seconds_bucket[{w}])))"
        ),
    ),
    CauseRow(
        cause="decode_batch",
        phase="decode",
        symptom="streams start fast and then are slow, all of them evenly",
        evidence="the batch is large, and a step takes much longer than with one stream",
        counter_evidence="steps are as fast as with one stream",
        pressure_point="decode batch",
        inspect="TPOT p95 and p99; running requests; step time by batch size",
        action="a smaller batch per worker, or more decode workers",
        signals=("running", "running_max", "max_num_seqs"),
        alert=(  # of each engine: those of Diptych are counted by worker
            "(avg by ({server}) (vllm:num_requests_running) unless on ({server}) diptych:worker_up) > 64"
            " or avg by ({server}) (diptych:worker_requests_decoding) > 64"
        ),
    ),
    CauseRow(
        cause="kv_cache_full",
        phase="both",
        symptom="memory fills while the processor looks idle; streams pause and come back",
        evidence="the KV cache is full, streams are preempted, requests wait though the batch has places",
        counter_evidence="KV usage stays low; no preemptions",
        pressure_point="KV cache",
        inspect="active sequences, KV usage, preemptions, evictions",
        action="more memory for the KV cache, fewer sequences at once, or shorter contexts",
        signals=("kv_usage", "kv_usage_max", "preemptions", "waiting"),
        alert=(
            "max by ({server}) (vllm:kv_cache_usage_perc) > 0.95"
            " or sum by ({server}) (rate(vllm:num_preemptions_total[{w}]))"
            " > on ({server}) 0.02 * sum by ({server}) (rate(vllm:time_to_first_token_seconds_count[{w}]))"
        ),
    ),
    CauseRow(
        cause="sequence_limit",
        phase="prefill",
        symptom="requests wait though memory and processor have room",
        evidence="the batch has as many requests as it may have, and the KV cache is not full",
        counter_evidence="places of the batch are free while requests wait",
        pressure_point="places of the batch",
        inspect="the limit of sequences; running and waiting requests",
        action="a higher limit of sequences",
        signals=("running_max", "max_num_seqs", "waiting", "kv_usage"),
        needs=("max_num_seqs",),
        alert=(
            "sum by ({server}) (vllm:num_requests_waiting) > on ({server}) 0.1 * sum by ({server})"
            " (vllm:num_requests_running) and on ({server}) max by ({server}) (vllm:kv_cache_usage_perc) < 0.5"
        ),
    ),
    CauseRow(
        cause="prefix_misses",
        phase="prefill",
        symptom="sessions of several turns get dearer with each turn",
        evidence="prompt tokens are computed again that had been computed before",
        counter_evidence="prompts share nothing, or most of their tokens are found",
        pressure_point="prefix cache",
        inspect="share of hits; which token leaves the cached prefix; routing affinity",
        action="keep what changes (a time stamp, an id) behind what stays; route sessions to where their prefix is",
        signals=("hit_share", "reread_share", "prompt_mean"),
        needs=("reread_share",),
        alert=(
            "sum by ({server}) (rate(vllm:prefix_cache_hits_total[{w}]))"
            " / on ({server}) sum by ({server}) (rate(vllm:prefix_cache_queries_total[{w}])) < 0.1"
            " and on ({server}) sum by ({server}) (rate(vllm:prefix_cache_queries_total[{w}])) > 1000"
        ),
    ),
    CauseRow(
        cause="cold_cache",
        phase="prefill",
        symptom="TTFT is bad after a start and gets better by itself",
        evidence="the worker is young, and the share of hits grows within the window",
        counter_evidence="the share of hits has been as low for long",
        pressure_point="prefix cache",
        inspect="age of the workers; share of hits over time",
        action="wait; keep the cache over restarts",
        signals=("worker_age_s", "hit_share_early", "hit_share_late"),
        alert="",
    ),
    CauseRow(
        cause="capacity",
        phase="both",
        symptom="both phases are slow, and get slower",
        evidence="workers are never idle, requests wait, and prompts are of ordinary length",
        counter_evidence="workers are idle while requests wait",
        pressure_point="arithmetic and memory bandwidth",
        inspect="busy share of the workers; arrivals against completions",
        action="more workers or a faster one; diptych plan says how many",
        signals=("busy", "rate", "waiting", "running"),
        alert=(
            "sum by ({server}) (vllm:num_requests_waiting)"
            " > on ({server}) 2 * sum by ({server}) (vllm:num_requests_running)"
        ),
    ),
    CauseRow(
        cause="slow_transfer",
        phase="transfer",
        symptom="the second token comes late",
        evidence="the time between first token and decode worker is that of the transfer",
        counter_evidence="transfers are short, and the decode worker takes over late",
        pressure_point="link between the pools",
        inspect="bytes and seconds per handoff; connector; codec",
        action="a faster connector, a codec, or no handoff for short prompts",
        signals=("transfer_s", "transfer_bytes"),
        alert=(
            "histogram_quantile(0.9, sum by (le, {server}) (rate(diptych:kv_transfer_seconds_bucket[{w}]))) > 0.5"
            " or histogram_quantile(0.9, sum by (le, {server}) (rate(vllm:nixl_xfer_time_seconds_bucket[{w}]))) > 0.5"
        ),
    ),
    CauseRow(
        cause="too_few_prefill_workers",
        phase="prefill",
        symptom="TTFT is bad while decode workers idle",
        evidence="workers that prefill are busy and have a queue, those that decode are not busy",
        counter_evidence="decode workers are busy, too",
        pressure_point="ratio of the pools",
        inspect="busy share by role",
        action="one more prefill worker in place of a decode worker",
        signals=("busy_prefill", "busy_decode"),
        alert=(
            'avg by ({server}) (diptych:worker_requests_waiting{{role="prefill"}}) > 4 and'
            ' on ({server}) avg by ({server}) (diptych:worker_requests_decoding{{role="decode"}}) < 2'
        ),
    ),
    CauseRow(
        cause="too_few_decode_workers",
        phase="decode",
        symptom="prefill workers idle, and prompts wait for blocks of the decode workers",
        evidence="requests wait for blocks of a decode worker; decode workers are busy, prefill workers are not",
        counter_evidence="prefill workers are busy, too",
        pressure_point="ratio of the pools",
        inspect="busy share by role; KV usage of the decode workers",
        action="one more decode worker in place of a prefill worker",
        signals=("busy_decode", "busy_prefill", "kv_usage_max"),
        alert=(
            'avg by ({server}) (diptych:worker_kv_usage_ratio{{role="decode"}}) > 0.95 and'
            ' on ({server}) avg by ({server}) (diptych:worker_requests_prefilling{{role="prefill"}}) < 0.5'
        ),
    ),
    CauseRow(
        cause="slow_client",
        phase="client",
        symptom="single clients see slow streams, the server's own latencies are good",
        evidence="tokens wait in the front end because the client does not read",
        counter_evidence="sent bytes are taken at once",
        pressure_point="the client's connection",
        inspect="unread bytes per connection; the client's event loop",
        action="nothing on the server; look at the client and at proxies between",
        signals=("unread_share",),
        needs=("unread_share",),
        alert="",
    ),
    CauseRow(
        cause="oversubscribed_cores",
        phase="both",
        symptom="everything is slower than it was, unevenly",
        evidence="steps take longer than their size explains; threads are ready and have no core",
        counter_evidence="steps take what the step-time model says",
        pressure_point="cores of the host",
        inspect="threads per core, quotas of containers, other processes on the host",
        action="fewer threads or workers than cores, cores of their own (--cores), or other processes elsewhere",
        signals=("cpu_wait", "slow_share"),
        needs=("cpu_wait",),
        alert="sum by (worker, {server}) (rate(diptych:worker_cpu_wait_seconds_total[{w}])) > 0.2",
    ),
    CauseRow(
        cause="batch_flood",
        phase="both",
        symptom="interactive requests are slow since a batch job began",
        evidence="most of the work belongs to batch requests, or arrived in one burst",
        counter_evidence="the arrivals are even",
        pressure_point="admission",
        inspect="arrivals per second; service classes; tenants",
        action="send batch work as service_class batch, or limit its rate",
        signals=("batch_share", "burst", "waiting"),
        alert=(
            "sum by ({server}) (deriv(vllm:num_requests_waiting[{w}])) > 1"
            " and on ({server}) sum by ({server}) (vllm:num_requests_waiting) > 50"
        ),
    ),
    CauseRow(
        cause="small_chunks",
        phase="prefill",
        symptom="long prompts take very long though nothing waits",
        evidence="a prompt is computed in many steps, most of whose time belongs to streams",
        counter_evidence="most of a step's time belongs to the prompt",
        pressure_point="tokens or time per step",
        inspect="chunk size; time per step",
        action="larger chunks, or prefill on workers of its own",
        signals=("chunks_per_prompt", "step_tokens_p95", "prompt_p95"),
        alert="",
    ),
    CauseRow(
        cause="front_end",
        phase="both",
        symptom="the engine is fast, its clients wait",
        evidence="time between arrival and engine, between steps, or between engine and client",
        counter_evidence="the engine's own times explain what clients see",
        pressure_point="front end, tokeniser, proxies",
        inspect="CPU of the front end; length of prompts in bytes",
        action="a core for the front end; fewer, larger requests",
        signals=("rate", "busy"),
        alert="",
    ),
    CauseRow(
        cause="worker_losses",
        phase="both",
        symptom="streams pause for seconds, then continue",
        evidence="attempts were lost and begun again",
        counter_evidence="no worker was lost",
        pressure_point="worker processes",
        inspect="log of the front end; restarts; memory",
        action="find why the worker ends (memory limit, crash)",
        alert="sum by ({server}) (increase(diptych:worker_losses_total[{w}])) > 0",
    ),
    CauseRow(
        cause="slow_model",
        phase="both",
        symptom="objectives are missed even when nothing else runs",
        evidence="one stream alone, or the request's own prompt, takes longer than the objective",
        counter_evidence="a request alone meets its objectives",
        pressure_point="weights read per step; arithmetic per prompt token",
        inspect="step time with one stream; seconds per prompt token",
        action="a faster machine, smaller or quantised weights, or other objectives",
        alert="",
    ),
)
BY_CAUSE: Final[Mapping[str, CauseRow]] = {row.cause: row for row in ROWS}
