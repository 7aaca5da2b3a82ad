"""Settings: the least that each may be, what the presets and the command line make of them, what requests may ask."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    CapsConfig,
    EngineConfig,
    PreemptionConfig,
    SchedulerConfig,
    prefill_scheduler,
    scheduler_config,
    shape_preset,
)
from diptych.control.errors import ConfigError, InvalidRequestError
from diptych.control.request import SamplingParams
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import LinkCost, LinkCosts, WorkerInfo
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo

Build = Callable[..., object]


def cache(**settings: Any) -> CacheConfig:
    return CacheConfig(**{"num_blocks": 10, "watermark_blocks": 0, **settings})


def budget(**settings: Any) -> BudgetConfig:
    return BudgetConfig(**{"min_chunk_tokens": 1, **settings})


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(cache(), **settings)


def service_class(**settings: Any) -> ServiceClassConfig:
    return ServiceClassConfig(**{"max_wait_ns": 5, "max_queue_ns": 5, **settings})


def worker(**settings: Any) -> WorkerInfo:
    return WorkerInfo(**{"number": 0, "role": "both", "num_blocks": 5, "block_size": 5, **settings})


LEAST: list[tuple[Build, str, int]] = [
    (cache, "num_blocks", 1),
    (cache, "block_size", 1),
    (cache, "first_block", 0),
    (cache, "num_host_blocks", 0),
    (budget, "max_batched_tokens", 1),
    (budget, "target_ns", 1),
    (budget, "min_chunk_tokens", 1),
    (budget, "idle_target_ns", 1),
    (CapsConfig, "max_partial_prefills", 0),
    (CapsConfig, "max_long_partial_prefills", 0),
    (CapsConfig, "long_prefill_threshold", 0),
    (PreemptionConfig, "priority_gap", 1),
    (PreemptionConfig, "min_steps", 1),
    (PreemptionConfig, "max_per_request", 1),
    (SchedulerConfig, "max_num_seqs", 1),
    (SchedulerConfig, "max_waiting", 1),
    (engine, "max_model_len", 2),
    (service_class, "max_wait_ns", 1),
    (service_class, "max_queue_ns", 1),
    (service_class, "queue_percent", 1),
    (service_class, "promote_ns", 0),
    (AdmissionConfig, "max_queued", 1),
    (AdmissionConfig, "max_queued_per_tenant", 0),
    (ClusterConfig, "max_attempts", 1),
    (ClusterConfig, "lease_ns", 0),
    (ClusterConfig, "max_prefills_in_flight_per_worker", 0),
    (ClusterConfig, "park_ns", 1),
    (RoutingConfig, "kv_price_ns", 0),
    (RoutingConfig, "max_local_tokens", 0),
    (worker, "num_blocks", 1),
    (worker, "block_size", 1),
]


@pytest.mark.parametrize(("build", "name", "least"), LEAST, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_setting_may_be_its_least_and_nothing_below_it(build: Build, name: str, least: int) -> None:
    build(**{name: least})
    with pytest.raises(ConfigError) as caught:
        build(**{name: least - 1})
    assert caught.value.param == name
    assert str(least - 1) in caught.value.message


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda: cache(num_blocks=5, watermark_blocks=4), lambda: cache(num_blocks=4, watermark_blocks=4)),
        (lambda: cache(watermark_blocks=0), lambda: cache(watermark_blocks=-1)),
        (lambda: cache(admission="greedy"), lambda: cache(admission="generous")),
        (lambda: budget(kind="fixed"), lambda: budget(kind="flexible")),
        (lambda: budget(margin=1.0), lambda: budget(margin=1.01)),
        (lambda: budget(margin=0.01), lambda: budget(margin=0.0)),
        (lambda: BudgetConfig(max_batched_tokens=16), lambda: BudgetConfig(max_batched_tokens=15)),
        (lambda: CapsConfig(2, 2, 1), lambda: CapsConfig(2, 3, 1)),
        (lambda: CapsConfig(0, 3, 1), lambda: CapsConfig(0, 3, 0)),
        (lambda: PreemptionConfig("swap"), lambda: PreemptionConfig("drop")),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(aging=0.01), lambda: SchedulerConfig(aging=0.0)),
        (lambda: SchedulerConfig(max_num_seqs=2048), lambda: SchedulerConfig(max_num_seqs=2049)),
        (
            lambda: SchedulerConfig(budget=BudgetConfig("whole"), max_num_seqs=2049),
            lambda: SchedulerConfig(budget=BudgetConfig("fixed"), max_num_seqs=2049),
        ),
        (
            lambda: SchedulerConfig(caps=CapsConfig(0, 0, 2047)),
            lambda: SchedulerConfig(caps=CapsConfig(0, 0, 2048)),
        ),
        (
            lambda: SchedulerConfig(order="priority", preemption=PreemptionConfig(from_waiting=True)),
            lambda: SchedulerConfig(order="fcfs", preemption=PreemptionConfig(from_waiting=True)),
        ),
        (lambda: service_class(queue_percent=100), lambda: service_class(queue_percent=101)),
        (lambda: ClusterConfig(on_failure="local"), lambda: ClusterConfig(on_failure="hope")),  # type: ignore[arg-type]
        (lambda: RoutingConfig("round_robin"), lambda: RoutingConfig("nearest")),  # type: ignore[arg-type]
        (lambda: worker(role="prefill"), lambda: worker(role="reader")),
        (lambda: LinkCost(1, 0), lambda: LinkCost(0, 0)),
        (lambda: LinkCost(1, 0), lambda: LinkCost(1, -1)),
        (lambda: LinkCosts(0, 1, 0), lambda: LinkCosts(-1, 1, 0)),
        (lambda: LinkCosts(0, 1, 0), lambda: LinkCosts(0, 0, 0)),
        (lambda: LinkCosts(0, 1, 0), lambda: LinkCosts(0, 1, -1)),
    ],
)
def test_a_setting_is_taken_up_to_its_limit_and_refused_beyond_it(right: Build, wrong: Build) -> None:
    right()
    with pytest.raises(ConfigError):
        wrong()


def test_by_default_a_class_waits_and_is_shed_as_its_importance_says() -> None:
    """The limits that clients meet: predicted wait, time in the queue, share of the queue, promotion."""
    classes, minute, hour = AdmissionConfig(), 60 * NS_PER_S, 3600 * NS_PER_S
    assert classes.interactive == ServiceClassConfig(2 * minute, 5 * minute, 100, 0)
    assert classes.standard == ServiceClassConfig(minute, 5 * minute, 80, 10 * NS_PER_S)
    assert classes.batch == ServiceClassConfig(hour, 24 * hour, 50, 0)


def test_the_shapes_are_what_the_documents_say() -> None:
    unified, chunked = shape_preset("unified"), shape_preset("chunked")
    assert (unified.order, unified.budget.kind, unified.caps) == ("fcfs", "whole", CapsConfig())
    assert (chunked.order, chunked.budget.kind) == ("shortest", "slo")
    assert chunked.caps == CapsConfig(max_partial_prefills=8, max_long_partial_prefills=1, long_prefill_threshold=1024)
    assert shape_preset("chunked", max_waiting=7) == replace(chunked, max_waiting=7)


def test_options_of_the_scheduler_change_the_preset_one_by_one() -> None:
    assert scheduler_config("chunked") == shape_preset("chunked")
    given = scheduler_config(
        "chunked",
        order="priority",
        budget="fixed",
        max_batched_tokens=4096,
        step_target_ms=50,
        max_num_seqs=9,
        max_waiting=8,
        max_partial_prefills=7,
        max_long_partial_prefills=2,
        long_prefill_threshold=500,
        preemption="swap",
        preempt_for_priority=True,
    )
    assert (given.order, given.max_num_seqs, given.max_waiting) == ("priority", 9, 8)
    assert given.budget == BudgetConfig("fixed", 4096, 50 * NS_PER_MS)
    assert given.caps == CapsConfig(7, 2, 500)
    assert given.preemption == PreemptionConfig("swap", from_waiting=True)


def test_a_small_budget_lowers_the_threshold_of_long_prompts_with_it_unless_that_was_given() -> None:
    assert scheduler_config("chunked", max_batched_tokens=1025).caps.long_prefill_threshold == 1024
    assert scheduler_config("chunked", max_batched_tokens=1024).caps.long_prefill_threshold == 512
    with pytest.raises(ConfigError, match="long_prefill_threshold is 1024"):
        scheduler_config("chunked", max_batched_tokens=1024, long_prefill_threshold=1024)
    assert scheduler_config("chunked", budget="whole").caps == CapsConfig()


@pytest.mark.parametrize(("ttft_ms", "step_ms"), [(None, 400), (5, 100), (500, 100), (2000, 400), (50_000, 1000)])
def test_a_prefill_worker_takes_steps_of_a_fifth_of_the_ttft_objective(ttft_ms: int | None, step_ms: int) -> None:
    slo = Slo(None if ttft_ms is None else ttft_ms * NS_PER_MS)
    settings = prefill_scheduler(SchedulerConfig(), slo)
    assert settings.budget.idle_target_ns == step_ms * NS_PER_MS


def test_options_of_the_front_end_change_its_defaults_one_by_one() -> None:
    assert cluster_config() == ClusterConfig()
    given = cluster_config(
        routing="round_robin",
        disaggregate="never",
        local_prefill="objective",
        on_failure="fail",
        max_prefills_in_flight_per_worker=0,
        max_queued=5,
        max_queued_per_key=2,
    )
    assert (given.routing.routing, given.routing.disaggregate) == ("round_robin", "never")
    assert given.routing.local_prefill == "objective"
    assert (given.on_failure, given.max_prefills_in_flight_per_worker) == ("fail", 0)
    assert (given.admission.max_queued, given.admission.max_queued_per_tenant) == (5, 2)


@pytest.mark.parametrize(
    ("name", "low", "high", "step"),
    [
        ("max_tokens", 1, None, 1),
        ("min_tokens", 0, 16, 1),
        ("temperature", 0.0, 100.0, 0.01),
        ("top_p", 0.01, 1.0, 0.01),
        ("top_k", -1, None, 1),
        ("min_p", 0.0, 1.0, 0.01),
        ("presence_penalty", -2.0, 2.0, 0.01),
        ("frequency_penalty", -2.0, 2.0, 0.01),
        ("repetition_penalty", 0.01, 100.0, 0.01),
        ("n", 1, 128, 1),
        ("logprobs", 0, 20, 1),
        ("prompt_logprobs", 0, 20, 1),
        ("seed", -(2**63), 2**63 - 1, 1),
    ],
)
def test_a_sampling_parameter_is_taken_within_its_limits_and_refused_by_name_beyond_them(
    name: str, low: float, high: float | None, step: float
) -> None:
    SamplingParams(**{name: low})
    wrong = [low - step]
    if high is not None:
        SamplingParams(**{name: high})
        wrong.append(high + step)
    for value in wrong:
        with pytest.raises(InvalidRequestError, match=f"{name} is") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_sampling_that_is_not_asked_for_is_that_of_the_openai_api() -> None:
    assert SamplingParams() == SamplingParams(
        max_tokens=16,
        min_tokens=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        n=1,
    )


def test_an_embedding_has_one_token_and_nothing_that_tokens_have() -> None:
    for pooling, reads_cache in (("last", True), ("mean", False)):
        sampling = SamplingParams(max_tokens=1, pooling=pooling)  # type: ignore[arg-type]
        assert (sampling.reads_prefix_cache, sampling.hands_off) == (reads_cache, False)
    plain, scored = SamplingParams(), SamplingParams(prompt_logprobs=0)
    assert (plain.reads_prefix_cache, plain.hands_off) == (True, True)
    assert (scored.reads_prefix_cache, scored.hands_off) == (False, False)
    wrong: dict[str, Any] = {"max_tokens": 2, "n": 2, "logprobs": 0, "prompt_logprobs": 0, "grammar": "start: X"}
    for name, value in wrong.items():
        with pytest.raises(InvalidRequestError, match=f"{name} is .*with pooling it must be") as caught:
            SamplingParams(**({"max_tokens": 1, "pooling": "last"} | {name: value}))
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="pooling is 'cls'; one of last, mean"):
        SamplingParams(max_tokens=1, pooling="cls")  # type: ignore[arg-type]


def test_a_sampling_parameter_that_is_no_number_is_refused() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequestError, match="temperature is"):
            SamplingParams(temperature=value)
    for bias in (-100.01, 100.01):
        with pytest.raises(InvalidRequestError, match="logit_bias is"):
            SamplingParams(logit_bias={1: bias})
    SamplingParams(logit_bias={1: -100.0, 2: 100.0})


def test_stop_strings_may_be_one_or_many_and_none_of_them_empty() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="stop holds an empty string"):
        SamplingParams(stop=("a", ""))
