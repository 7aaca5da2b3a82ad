"""vLLM's metrics (V1 engine; names as of 0.32, which has them all on /metrics of the API server).

vLLM with --disable-log-stats exports none of them. Its limit of sequences is not exported: it is seen only where the
batch stays at one size while requests wait.
"""

from typing import Final

from diptych.base.engine_load_metrics import VLLM_LOAD
from diptych.diagnosis.adapters.metric_names import MetricNames
from diptych.diagnosis.observation import Missing

VLLM: Final = MetricNames(
    engine="vllm",
    prefix="vllm:",
    ttft=VLLM_LOAD.ttft,
    itl="vllm:inter_token_latency_seconds",
    tpot="vllm:request_time_per_output_token_seconds",
    queue="vllm:request_queue_time_seconds",
    prefill="vllm:request_prefill_time_seconds",
    transfer="vllm:nixl_xfer_time_seconds",
    running=VLLM_LOAD.running,
    waiting=VLLM_LOAD.waiting,
    kv_usage=VLLM_LOAD.kv_usage,
    preemptions=VLLM_LOAD.preemptions,
    prefix_queries="vllm:prefix_cache_queries",
    prefix_hits="vllm:prefix_cache_hits",
    prompt_tokens="vllm:request_prompt_tokens",
    output_tokens="vllm:request_generation_tokens",
    step_tokens="vllm:iteration_tokens_total",
    generated="vllm:generation_tokens",
    computed="vllm:request_prefill_kv_computed_tokens",
    refused="vllm:admission_rejections",
    missing=(
        Missing(("decode_batch", "slow_model"), "the time of a step with one stream"),
        Missing(("prefill_interference", "other stalls"), "the duration of each step and what it computed"),
        Missing(("prefix_misses", "prefill_queueing"), "which prompts had been computed before"),
        Missing(("slow_client", "healthy"), "what clients have not read"),
        Missing(("too_few_prefill_workers", "too_few_decode_workers", "capacity"), "how busy each role is"),
    ),
    known=frozenset(
        f"vllm:{name}"
        for name in (
            "cache_config", "e2e_request_latency_seconds", "engine_sleep_state",
            "num_requests_waiting_by_reason", "prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached",
            "request_decode_time_seconds", "request_inference_time_seconds", "request_max_num_generation_tokens",
            "request_num_preemptions", "request_params_max_tokens", "request_params_n", "request_success",
            "corrupted_requests", "external_prefix_cache_hits", "mm_cache_hits",
            "external_prefix_cache_queries", "mm_cache_queries", "lora_requests", "time_per_output_token_seconds",
            "iteration_tokens", "prompt_tokens_cached_by_source", "watermark_requests", "num_requests_swapped",
        )
    ),
)  # fmt: skip
