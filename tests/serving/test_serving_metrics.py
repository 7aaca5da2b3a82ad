"""What Prometheus reads: counts that add up, never fall, and say which worker they are of."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from diptych.control.engine.reports import EngineStats
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS, NS_PER_S, LatencyBreakdown
from diptych.serving.metrics.fleet_metrics import FleetView
from diptych.serving.metrics.histogram import Histogram
from diptych.serving.metrics.serving_metrics import ServingMetrics

Labels = tuple[tuple[str, str], ...]


def samples(metrics: ServingMetrics) -> dict[tuple[str, Labels], float]:
    """Everything in the exposition text, by name and labels (without model_name)."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "model_name"))
            assert (sample.name, labels) not in found, "two samples of one name"
            assert sample.labels["model_name"] == metrics.model_name
            found[sample.name, labels] = sample.value
    return found


def value(metrics: ServingMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def finished(reason: FinishReason = FinishReason.LENGTH, num_tokens: int = 5, **changes: Any) -> RequestFinished:
    latency = LatencyBreakdown(2 * NS_PER_S, 3 * NS_PER_S, 8 * NS_PER_MS, num_tokens, handoff_ns=4 * NS_PER_MS)
    fields: dict[str, Any] = {"num_prompt_tokens": 7, "num_cached_tokens": 3, "num_preemptions": 0, "slo_met": None}
    return RequestFinished(1, "a", reason, latency=latency, **{**fields, **changes})


# -- histograms -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=8, unique=True).map(sorted),
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 5)), max_size=30),
)
def test_a_bucket_counts_all_observations_up_to_its_bound(
    bounds: Sequence[float], observed: Sequence[tuple[float, int]]
) -> None:
    histogram = Histogram(bounds)
    for observation, count in observed:
        histogram.observe(observation, count)
    [*buckets, total] = [sample for sample in histogram.family("x", "x", "m").samples if sample.name == "x_bucket"]
    for bound, bucket in zip(bounds, buckets, strict=True):
        assert bucket.value == sum(count for observation, count in observed if observation <= bound)
    assert total.labels["le"] == "+Inf" and total.value == sum(count for _, count in observed)
    [summed] = [sample.value for sample in histogram.family("x", "x", "m").samples if sample.name == "x_sum"]
    assert summed == pytest.approx(sum(observation * count for observation, count in observed))


def test_who_follows_a_histogram_sees_what_is_observed_from_then_on() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    newest = histogram.follow(2)
    for observation in (1.0, 2.0, 3.0):
        histogram.observe(observation, 4)
    assert list(newest) == [(2.0, 4), (3.0, 4)]


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_completed_request_counts_in_every_family_with_its_own_numbers() -> None:
    metrics = ServingMetrics("a-model")
    metrics.on_finished(finished(), 5.5)
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total", ()] == 7
    assert seen["vllm:prompt_tokens_cached_total", ()] == 3
    assert seen["vllm:request_success_total", (("finished_reason", "length"),)] == 1
    assert seen["vllm:request_generation_tokens_sum", ()] == 5
    assert seen["vllm:e2e_request_latency_seconds_sum", ()] == 5.5
    assert seen["vllm:request_queue_time_seconds_sum", ()] == 2.0
    assert seen["vllm:request_prefill_time_seconds_sum", ()] == 3.0
    assert seen["vllm:request_decode_time_seconds_sum", ()] == pytest.approx(0.012)  # the handoff belongs to it
    assert seen["vllm:request_time_per_output_token_seconds_sum", ()] == pytest.approx(0.003)  # 12 ms, 4 gaps


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    metrics = ServingMetrics()
    metrics.on_finished(finished(num_tokens=1), 5.5)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_request_that_was_not_completed_says_nothing_about_latency(reason: FinishReason) -> None:
    metrics = ServingMetrics()
    metrics.on_finished(finished(reason, slo_met=False), 5.5)
    assert value(metrics, "vllm:request_success_total", finished_reason=str(reason)) == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(metrics, "diptych:requests_with_slo_total") == (reason is FinishReason.ERROR)


def test_goodput_is_the_share_of_requests_with_an_objective_that_met_it() -> None:
    metrics = ServingMetrics()
    assert value(metrics, "diptych:goodput_ratio") == 1.0
    for slo_met in (True, True, False, None):
        metrics.on_finished(finished(slo_met=slo_met), 1.0)
    metrics.on_failed(had_slo=True)
    metrics.on_failed(had_slo=False)
    metrics.on_finished(finished(FinishReason.ABORT, slo_met=False), 1.0)  # its client did not wait for it
    assert value(metrics, "diptych:goodput_ratio") == 0.5
    assert value(metrics, "diptych:requests_with_slo_total") == 4
    assert value(metrics, "diptych:requests_meeting_slo_total") == 2


def test_every_reason_has_a_count_from_the_start() -> None:
    metrics = ServingMetrics()
    metrics.on_aborted(3)
    counts = {reason: value(metrics, "vllm:request_success_total", finished_reason=reason) for reason in FinishReason}
    assert counts == {**dict.fromkeys(FinishReason, 0.0), FinishReason.ABORT: 3.0}


def test_gaps_of_a_step_are_added_in_bulk() -> None:
    metrics = ServingMetrics()
    metrics.on_gaps({0.02: 30, 0.5: 2}, 33)
    assert value(metrics, "vllm:generation_tokens_total") == 33
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 32
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(1.6)
    assert value(metrics, "vllm:time_per_output_token_seconds_count") == 32  # its name in older dashboards


# -- workers ----------------------------------------------------------------------------------------------------------


def test_all_workers_as_one_add_up_and_each_is_there_by_itself() -> None:
    metrics = ServingMetrics()
    metrics.fleet.view = lambda: FleetView(("prefill", "decode"), (True, False), (0, 4), num_queued=10)
    metrics.on_stats(0, EngineStats(num_waiting=1, num_prefilling=2, kv_usage=0.2, step_time_error=0.3))
    metrics.on_stats(1, EngineStats(num_decoding=5, num_swapped=1, kv_usage=0.6, step_time_error=0.1))
    assert value(metrics, "vllm:num_requests_running") == 7
    assert value(metrics, "vllm:num_requests_waiting") == 11  # those that no worker has been given, too
    assert value(metrics, "vllm:num_requests_swapped") == 1
    assert value(metrics, "vllm:kv_cache_usage_perc") == pytest.approx(0.4)
    assert value(metrics, "diptych:step_time_model_error") == 0.3
    decode = {"worker": "1", "role": "decode"}
    assert value(metrics, "diptych:worker_requests_decoding", **decode) == 5
    assert value(metrics, "diptych:worker_up", **decode) == 0
    assert value(metrics, "diptych:worker_restarts_total", **decode) == 4
    assert value(metrics, "diptych:worker_kv_usage_ratio", worker="0", role="prefill") == 0.2


def test_before_any_report_everything_is_zero_and_readable() -> None:
    assert value(ServingMetrics(), "vllm:num_requests_running") == 0
    assert value(ServingMetrics(), "vllm:kv_cache_usage_perc") == 0


Reports = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["grow", "die"]), st.integers(0, 50)), max_size=40)


@given(Reports)
def test_counts_of_workers_never_fall_and_lose_nothing_when_workers_die(
    reports: Sequence[tuple[int, str, int]],
) -> None:
    metrics = ServingMetrics()
    own: Counter[int] = Counter()
    total = before = deaths = 0
    for worker, what, amount in reports:
        if what == "die":
            metrics.fleet.on_worker_lost(worker)
            own[worker], deaths = 0, deaths + 1
        else:
            own[worker] += amount
            total += amount
            metrics.on_stats(worker, EngineStats(prefix_hit_tokens=own[worker], num_preemptions=own[worker]))
        now = metrics.fleet.count("prefix_hit_tokens")
        assert now >= before
        before = now
    assert metrics.fleet.count("prefix_hit_tokens") == metrics.fleet.count("num_preemptions") == total
    assert metrics.num_worker_losses == deaths


def test_speculation_counts_under_the_names_of_vllm_and_survives_its_workers() -> None:
    metrics = ServingMetrics()
    metrics.on_stats(
        0, EngineStats(num_drafts=3, num_draft_tokens=9, num_forced_tokens=4, accepted_draft_tokens=(2, 1))
    )
    metrics.on_stats(1, EngineStats(num_drafts=1, num_draft_tokens=4, accepted_draft_tokens=(1, 1, 1, 0)))
    metrics.fleet.on_worker_lost(0)
    metrics.on_stats(0, EngineStats(num_drafts=1, num_draft_tokens=1, accepted_draft_tokens=(1,)))
    text = metrics.text().decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{model_name="default"} 5.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="default"} 14.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="default"} 7.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="default",position="0"} 4.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="default",position="2"} 1.0',
        'diptych:forced_tokens_computed_total{model_name="default"} 4.0',
    ):
        assert line in text, line


def test_transfers_and_the_clusters_own_counts_are_there_with_their_reasons() -> None:
    metrics = ServingMetrics()
    counts = {
        "placed_remote": 3, "placed_both": 2, "lost_worker": 1, "refused_queue_full": 4, "expired_deadline": 5,
        "retried": 6, "poison": 7, "leases_expired": 8, "revoked": 9,
    }  # fmt: skip
    metrics.fleet.view = lambda: FleetView(counts=counts, alarm="the index is wrong", length_errors={"learned": 0.2})
    metrics.on_transfer(1000, 3 * NS_PER_MS)
    metrics.on_transfer(24, 5 * NS_PER_MS)
    assert value(metrics, "diptych:handoffs_total") == 2
    assert value(metrics, "diptych:kv_transfer_bytes_total") == 1024
    assert value(metrics, "diptych:kv_transfer_seconds_sum") == pytest.approx(0.008)
    assert value(metrics, "diptych:placements_total", reason="remote") == 3
    assert value(metrics, "diptych:placements_total", reason="both") == 2
    assert value(metrics, "diptych:attempts_lost_total", reason="worker") == 1
    assert value(metrics, "diptych:requests_refused_total", reason="queue_full") == 4
    assert value(metrics, "diptych:requests_refused_total", reason="deadline") == 5
    assert value(metrics, "diptych:request_retries_total") == 6
    assert value(metrics, "diptych:poison_requests_total") == 7
    assert value(metrics, "diptych:kv_leases_expired_total") == 8
    assert value(metrics, "diptych:handoffs_revoked_total") == 9
    assert value(metrics, "diptych:router_cache_alarm") == 1
    assert value(metrics, "diptych:output_length_error", expectation="learned") == 0.2
