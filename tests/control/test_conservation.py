"""Laws that hold for any sequence of arrivals, aborts and preemptions, under any combination of policies."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diptych.control.config import (
    BudgetConfig,
    BudgetName,
    CacheConfig,
    CapsConfig,
    EngineConfig,
    OrderName,
    PreemptionConfig,
    SchedulerConfig,
)
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS, Slo
from tests.control.driver import Driver, expect_answers
from tests.laws import law


def random_config(rng: random.Random) -> EngineConfig:
    """Any valid combination of policies over a cache that is small enough to hurt."""
    kind: BudgetName = rng.choice(("whole", "fixed", "slo", "slo"))
    tokens = rng.choice([16, 33, 64, 256])
    threshold = rng.choice([0, 5, 15])
    caps = CapsConfig()
    if kind != "whole":
        partial = rng.choice([0, 1, 2, 4])
        longs = rng.choice([0, 1, 2]) if threshold else 0
        caps = CapsConfig(partial, min(longs, partial) if partial else longs, threshold)
    order: OrderName = rng.choice(("fcfs", "priority", "shortest", "deadline"))
    preemption = PreemptionConfig(
        kind=rng.choice(["recompute", "swap"]),
        from_waiting=order == "priority" and rng.random() < 0.7,
        min_steps=rng.choice([1, 3]),
    )
    budget = BudgetConfig(kind, tokens, rng.choice([6, 10, 50]) * NS_PER_MS, min_chunk_tokens=rng.choice([1, 8, 16]))
    block_size = rng.choice([2, 4, 16])
    watermark = rng.choice([0, 1, 3])
    return EngineConfig(
        cache=CacheConfig(
            num_blocks=rng.choice([96, 160, 400]) // block_size + watermark,
            block_size=block_size,
            num_host_blocks=rng.choice([0, 8, 40]),
            watermark_blocks=watermark,
            enable_prefix_cache=rng.random() < 0.8,
        ),
        scheduler=SchedulerConfig(order, budget, caps, preemption, max_num_seqs=rng.choice([1, 3, 12])),
        slo=rng.choice([Slo(), Slo(100 * NS_PER_MS, 12 * NS_PER_MS)]),
        max_model_len=rng.choice([50, 96]),
    )


def class_of(seed: int, number: int) -> dict[str, Any]:
    """The class of a request: in two of three scenarios a part is batch, some of it with a limit to giving way."""
    rng = random.Random(1000 * seed + number)
    if seed % 3 == 0 or rng.random() < 0.5:
        return {}
    return {"service_class": "batch", "best_effort_ns": rng.choice([None, None, 0, 20 * NS_PER_MS, 500 * NS_PER_MS])}


def run_scenario(
    seed: int, config_of: Callable[[random.Random], EngineConfig] = random_config, make: type[Driver] = Driver
) -> Driver:
    """Random arrivals (with shared prefixes), aborts and steps; then run to the end."""
    rng = random.Random(seed)
    driver = make(config_of(rng), seed=seed)
    stems = [[rng.randrange(1000) for _ in range(60)] for _ in range(2)]
    alive: list[str] = []
    if rng.random() < 0.5:
        driver.executor.guesses = random.Random(seed)
    if rng.random() < 0.5:  # a core that expects short answers, admits too much and must preempt
        expect_answers(driver.core, 1)
    for number in range(rng.choice([3, 15, 40])):
        for _ in range(rng.choice([0, 0, 1, 5])):
            driver.step()
        stem = rng.choice(stems)[: rng.randrange(60)] if rng.random() < 0.5 else []
        prompt = stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.1 and driver.prompts:
            prompt = rng.choice(list(driver.prompts.values()))
        max_tokens = rng.choice([1, 2, 7, 30, 90])
        stop = rng.choice([None, None, 1, 5])
        slo = rng.choice([None, Slo(tpot_ns=rng.choice([1, 7, 20]) * NS_PER_MS)])
        limits: dict[str, Any] = {"priority": rng.choice([0, 0, 1, 5]), "slo": slo, **class_of(seed, number)}
        driver.add(f"r{number}", prompt, max_tokens, stop_after=stop, **limits)
        alive.append(f"r{number}")
        if rng.random() < 0.15:
            driver.abort(rng.choice(alive))
        if rng.random() < 0.03:
            other = random_config(rng).scheduler
            most = min(driver.config.scheduler.max_num_seqs, other.max_num_seqs)
            driver.configure(replace(other, max_num_seqs=most))
    driver.run()
    return driver


def check_length(driver: Driver, event: RequestFinished) -> None:
    """Preempted or not, an answer has as many tokens as its limit, its model and the context allow."""
    max_tokens, stop_after = driver.wanted[event.request_id]
    room = min(max_tokens, driver.config.max_model_len - len(driver.prompts[event.request_id]))
    whole = min(room, stop_after or room)
    num_tokens = event.latency.num_output_tokens
    if event.reason is FinishReason.LENGTH:
        assert num_tokens == whole == room
    elif event.reason is FinishReason.STOP:
        assert num_tokens == whole == stop_after
    else:
        assert num_tokens <= whole or event.reason is FinishReason.ERROR


def check_scenario(driver: Driver) -> None:
    """Each request ended exactly once, with the right tokens and a breakdown that sums exactly."""
    ended = driver.finished()
    assert set(ended) == set(driver.prompts)
    for event in ended.values():
        latency = event.latency
        assert min(latency.queue_ns, latency.prefill_ns, latency.decode_ns) >= 0
        assert latency.queue_ns + latency.prefill_ns + latency.decode_ns == latency.total_ns
        check_length(driver, event)
    for step in driver.steps():
        assert step.end_ns > step.start_ns


@law(weight=2.0, seeds=(1642934650,))  # a stream that gives way no longer, long after it has lost its blocks
def test_no_request_or_block_is_lost_whatever_happens(seed: int) -> None:
    check_scenario(run_scenario(seed))


@law(weight=0.5)
def test_two_runs_of_the_same_scenario_make_the_same_decisions(seed: int) -> None:
    first, second = run_scenario(seed), run_scenario(seed)
    assert first.outputs == second.outputs
    assert first.log == second.log
