"""Dynamo's front end (names as of 1.6; what its workers export is vLLM's or SGLang's own).

Read from recorded pages only.
"""

from typing import Final

from diptych.diagnosis.adapters.metric_names import MetricNames
from diptych.diagnosis.observation import Missing

DYNAMO: Final = MetricNames(
    engine="dynamo",
    prefix="dynamo_",
    ttft="dynamo_frontend_time_to_first_token_seconds",
    itl="dynamo_frontend_inter_token_latency_seconds",
    running="dynamo_frontend_inflight_requests",
    waiting="dynamo_frontend_queued_requests",
    prompt_tokens="dynamo_frontend_input_sequence_tokens",
    output_tokens="dynamo_frontend_output_sequence_tokens",
    missing=(
        Missing(("prefill_queueing", "kv_cache_full", "sequence_limit"), "the workers' own /metrics (give their URLs)"),
        Missing(("prefill_interference", "decode_batch"), "the workers' own /metrics (give their URLs)"),
        Missing(("prefix_misses", "prefill_queueing"), "which prompts had been computed before"),
        Missing(("slow_client", "healthy"), "what clients have not read"),
        Missing(("too_few_prefill_workers", "too_few_decode_workers", "capacity"), "how busy each role is"),
    ),
    known=frozenset(
        f"dynamo_frontend_{name}"
        for name in (
            "requests", "request_duration_seconds", "output_tokens", "model_context_length", "disconnected_clients",
        )
    ),
)  # fmt: skip
