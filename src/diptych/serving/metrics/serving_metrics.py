"""Prometheus metrics: vLLM's names, so that its dashboards work, and Diptych's own.

Owns the counts. Costs a few additions per step: gaps between tokens are gathered per step, where most sequences share
one value, and added in bulk; the text format is made when Prometheus asks for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.control.engine.reports import EngineStats
from diptych.control.events import RequestFinished
from diptych.control.misses.miss_explainer import MissExplainer
from diptych.control.misses.prefix_miss import NEW, REPEATED, ROUNDING, MissReason
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S
from diptych.serving.metrics.fleet_metrics import FleetMetrics
from diptych.serving.metrics.histogram import Histogram

_NO_CAUSES = (MissReason.NONE, MissReason.NEVER_SEEN)  # nothing was computed for it; its tokens are new
CAUSES = (*(str(reason) for reason in MissReason if reason not in _NO_CAUSES), REPEATED, ROUNDING, NEW)


def miss_families(explainer: MissExplainer, model: str) -> Iterator[Metric]:
    """Every family with its present value; all labels from the start."""
    summary = explainer.summary
    requests = CounterMetricFamily(
        "diptych:prefix_miss_requests", "Prompts by why they left what was cached", labels=["model_name", "reason"]
    )
    for reason in MissReason:
        requests.add_metric([model, str(reason)], summary.requests[reason])
    yield requests
    tokens = CounterMetricFamily(
        "diptych:prefill_tokens_by_cause", "Prompt tokens that were computed", labels=["model_name", "cause"]
    )
    for cause in CAUSES:
        tokens.add_metric([model, cause], summary.tokens[cause])
    yield tokens
    blocks = GaugeMetricFamily("diptych:prefix_history_blocks", "Blocks that are remembered", labels=["model_name"])
    blocks.add_metric([model], len(explainer.history))
    yield blocks


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_LENGTHS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class ServingMetrics(Collector):
    """All counts of one front end."""

    def __init__(self, model_name: str = "default") -> None:
        self.model_name = model_name
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)
        self.time_per_output_token = Histogram(_ITL)
        self.latencies = {
            name: Histogram(_LATENCY)
            for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")
        }
        self.prompt_lengths = Histogram(_LENGTHS)
        self.output_lengths = Histogram(_LENGTHS)
        self.num_ended = dict.fromkeys(FinishReason, 0)
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_with_slo = 0
        self.num_meeting_slo = 0
        self.fleet = FleetMetrics()
        self.misses: MissExplainer | None = None  # where prefix misses are explained
        self.more_families: list[Callable[[str], Iterable[Metric]]] = []  # of parts that some front ends have, by model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_gaps(self, gaps: Mapping[float, int], num_tokens: int) -> None:
        """A step is over; it gave ``num_tokens``. gaps: seconds since the token before -> how many sequences had it."""
        self.num_generated_tokens += num_tokens
        for gap_s, count in gaps.items():
            self.inter_token_latency.observe(gap_s, count)

    def on_finished(self, end: RequestFinished, e2e_s: float) -> None:
        """A request ended."""
        self.num_ended[end.reason] += 1
        if end.slo_met is not None and end.reason is not FinishReason.ABORT:
            self.num_with_slo += 1
            self.num_meeting_slo += end.slo_met
        if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        latency = end.latency
        self.num_prompt_tokens += end.num_prompt_tokens
        self.num_cached_tokens += end.num_cached_tokens
        self.prompt_lengths.observe(end.num_prompt_tokens)
        self.output_lengths.observe(latency.num_output_tokens)
        self.latencies["e2e_request_latency"].observe(e2e_s)
        self.latencies["request_queue_time"].observe(latency.queue_ns / NS_PER_S)
        self.latencies["request_prefill_time"].observe(latency.prefill_ns / NS_PER_S)
        self.latencies["request_decode_time"].observe((latency.decode_ns + latency.handoff_ns) / NS_PER_S)
        if latency.tpot_ns is not None:
            self.time_per_output_token.observe(latency.tpot_ns / NS_PER_S)

    def on_aborted(self, count: int) -> None:
        """Clients left this many answers unread."""
        self.num_ended[FinishReason.ABORT] += count

    def on_failed(self, *, had_slo: bool) -> None:
        """A request ended with an error; with an objective, it has missed it."""
        self.num_ended[FinishReason.ERROR] += 1
        self.num_with_slo += had_slo

    @property
    def worker(self) -> EngineStats:
        """What the workers report of themselves, added up."""
        return self.fleet.joint

    @property
    def num_worker_losses(self) -> int:
        """Times that a worker process was lost."""
        return self.fleet.losses.total()

    def on_stats(self, worker: int, stats: EngineStats) -> None:
        """A snapshot of a worker came."""
        self.fleet.workers[worker] = stats

    def on_transfer(self, num_bytes: int, transfer_ns: int) -> None:
        """A decode worker took over a request."""
        self.fleet.on_transfer(num_bytes, transfer_ns)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families are made on demand."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family with its present value."""
        yield from self._gauges()
        yield from self._counters()
        model = self.model_name
        yield self.time_to_first_token.family("vllm:time_to_first_token_seconds", "Arrival to first token", model)
        yield self.inter_token_latency.family("vllm:inter_token_latency_seconds", "Between two tokens", model)
        text = "Mean time per token after the first, per request"
        yield self.time_per_output_token.family("vllm:request_time_per_output_token_seconds", text, model)
        yield self.inter_token_latency.family("vllm:time_per_output_token_seconds", "Between two tokens", model)
        for name, histogram in self.latencies.items():
            yield histogram.family(f"vllm:{name}_seconds", name.replace("_", " "), model)
        yield from self.fleet.families(model)
        if self.misses is not None:
            yield from miss_families(self.misses, model)
        for families in self.more_families:
            yield from families(model)
        yield self.prompt_lengths.family("vllm:request_prompt_tokens", "Prompt tokens of a request", model)
        yield self.output_lengths.family("vllm:request_generation_tokens", "Output tokens of a request", model)

    def _gauges(self) -> Iterator[Metric]:
        worker = self.worker
        waiting = worker.num_waiting + self.fleet.view().num_queued
        running = worker.num_prefilling + worker.num_decoding
        values = (
            ("vllm:num_requests_running", "Requests that hold blocks", running),
            ("vllm:num_requests_waiting", "Requests that hold no blocks yet", waiting),
            ("vllm:num_requests_swapped", "Requests in the host tier", worker.num_swapped),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", worker.kv_usage),
            ("diptych:num_requests_prefilling", "Requests in their prefill", worker.num_prefilling),
            ("diptych:num_requests_decoding", "Requests in the decode batch", worker.num_decoding),
            ("diptych:num_requests_resting", "Requests of class batch set aside for others", worker.num_resting),
            (
                "diptych:step_time_model_error",
                "Recent mean relative error of predicted step times",
                worker.step_time_error,
            ),
            (
                "diptych:goodput_ratio",
                "Share of requests with an objective that met it (1 before the first)",
                self.num_meeting_slo / self.num_with_slo if self.num_with_slo else 1.0,
            ),
        )
        for name, text, value in values:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
        if (ready := self.fleet.view().ready) is not None:  # an inference gateway sizes its prefix index by it
            labels = ["model_name", "block_size", "num_gpu_blocks"]
            info = GaugeMetricFamily("vllm:cache_config_info", "Blocks of the KV cache, on any device", labels=labels)
            info.add_metric([self.model_name, str(ready.block_size), str(ready.num_blocks)], 1)
            yield info

    def _counters(self) -> Iterator[Metric]:
        accepted_at = self.fleet.accepted_at()
        values = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", self.fleet.count("prefix_queried_tokens")),
            ("vllm:prefix_cache_hits", "Prompt tokens found", self.fleet.count("prefix_hit_tokens")),
            ("vllm:num_preemptions", "Decodes that lost their blocks", self.fleet.count("num_preemptions")),
            ("vllm:prompt_tokens", "Prompt tokens of completed requests", self.num_prompt_tokens),
            ("vllm:prompt_tokens_cached", "Of these, found in the prefix cache", self.num_cached_tokens),
            ("vllm:generation_tokens", "Tokens sampled", self.num_generated_tokens),
            ("vllm:spec_decode_num_drafts", "Guesses that were verified", self.fleet.count("num_drafts")),
            ("vllm:spec_decode_num_draft_tokens", "Tokens of these", self.fleet.count("num_draft_tokens")),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, those that were right", sum(accepted_at.values())),
            (
                "diptych:forced_tokens_computed",
                "Tokens that a constraint forced, computed beside others of their answer",
                self.fleet.count("num_forced_tokens"),
            ),
            ("diptych:requests_with_slo", "Ended requests that had an objective", self.num_with_slo),
            ("diptych:requests_meeting_slo", "Of these, those that met it", self.num_meeting_slo),
            ("diptych:worker_losses", "Times that the worker process was lost", self.num_worker_losses),
        )
        for name, text, value in values:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by place in their guess",
            labels=["model_name", "position"],
        )
        for place, count in accepted_at.items():
            places.add_metric([self.model_name, str(place)], count)
        yield places
        ended = CounterMetricFamily("vllm:request_success", "Ended requests", labels=["model_name", "finished_reason"])
        for reason, count in self.num_ended.items():
            ended.add_metric([self.model_name, str(reason)], count)
        yield ended
