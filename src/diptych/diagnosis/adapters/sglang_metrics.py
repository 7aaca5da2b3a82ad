"""SGLang's metrics (names as of 0.5.23; the server must run with --enable-metrics).

Read from recorded pages only: SGLang has no build for CPUs that could be run here.
"""

from typing import Final

from diptych.base.engine_load_metrics import SGLANG_LOAD
from diptych.diagnosis.adapters.metric_names import MetricNames
from diptych.diagnosis.observation import Missing

SGLANG: Final = MetricNames(
    engine="sglang",
    prefix="sglang:",
    ttft=SGLANG_LOAD.ttft,
    itl="sglang:inter_token_latency_seconds",
    queue="sglang:queue_time_seconds",
    running=SGLANG_LOAD.running,
    waiting=SGLANG_LOAD.waiting,
    kv_usage=SGLANG_LOAD.kv_usage,
    preemptions=SGLANG_LOAD.preemptions,
    hit_rate="sglang:cache_hit_rate",
    prompt_tokens="sglang:prompt_tokens_histogram",
    output_tokens="sglang:generation_tokens_histogram",
    refused="sglang:num_aborted_requests",
    missing=(
        Missing(("decode_batch", "slow_model"), "the time of a step with one stream"),
        Missing(("prefill_interference", "other stalls"), "the duration of each step and what it computed"),
        Missing(("prefix_misses", "prefill_queueing"), "which prompts had been computed before"),
        Missing(("slow_client", "healthy"), "what clients have not read"),
        Missing(("too_few_prefill_workers", "too_few_decode_workers", "capacity"), "how busy each role is"),
    ),
    known=frozenset(
        f"sglang:{name}"
        for name in (
            "e2e_request_latency_seconds", "prompt_tokens", "generation_tokens", "cached_tokens", "gen_throughput",
            "num_requests", "num_used_tokens", "full_token_usage", "swa_token_usage", "spec_accept_length",
            "spec_accept_rate", "num_retracted_reqs", "num_paused_reqs", "num_grammar_queue_reqs", "utilization",
            "per_stage_req_latency_seconds", "num_prefill_prealloc_queue_reqs", "num_prefill_inflight_queue_reqs",
            "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "kv_transfer_speed_gb_s",
            "kv_transfer_latency_ms", "max_total_num_tokens", "evicted_tokens", "uncached_prompt_tokens_histogram",
            "kv_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "fwd_occupancy", "new_token_ratio",
        )
    ),
)  # fmt: skip
