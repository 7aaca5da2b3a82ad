"""Names of the metrics of other engines that several parts read: the front end for its routing, a diagnosis for its
evidence. What a diagnosis alone reads stands in diagnosis/adapters/.

Counters are named without the ``_total`` that an exposition adds, histograms without ``_count`` and ``_sum``.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """How busy an engine is. running, waiting: gauges of requests. kv_usage: a gauge, a share of 1. preemptions: a
    counter; ttft: a histogram ("": the engine has none)."""

    running: str
    waiting: str
    kv_usage: str
    preemptions: str = ""
    ttft: str = ""

    def series(self) -> dict[str, str]:
        """The lines of an exposition by what they say: gauges as they are, counters and counts of histograms with their
        suffix."""
        found = {"num_running": self.running, "num_waiting": self.waiting, "kv_usage": self.kv_usage}
        if self.preemptions:
            found["num_preemptions"] = f"{self.preemptions}_total"
        if self.ttft:
            found["num_first_tokens"] = f"{self.ttft}_count"
        return found


VLLM_LOAD: Final = LoadMetrics(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_usage="vllm:kv_cache_usage_perc",
    preemptions="vllm:num_preemptions",
    ttft="vllm:time_to_first_token_seconds",
)
SGLANG_LOAD: Final = LoadMetrics(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    kv_usage="sglang:token_usage",
    preemptions="sglang:num_retracted_requests",
    ttft="sglang:time_to_first_token_seconds",
)
LLAMACPP_LOAD: Final = LoadMetrics(
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
    kv_usage="llamacpp:kv_cache_usage_ratio",
)
