"""Drawn workloads: portable numbers, the right distributions, repeatable requests, shared prefixes, closed loops."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S, Slo
from diptych.workload.build import (
    ArrivalConfig,
    ClassConfig,
    LengthConfig,
    LengthsConfig,
    LongConfig,
    PrefixConfig,
    SessionConfig,
    SloConfig,
    WorkloadConfig,
    build,
)
from diptych.workload.description import ArrivalKind
from diptych.workload.distributions import Stream, exp, log
from diptych.workload.spec import ClosedLoop, RequestSpec
from diptych.workload.synthetic import SyntheticWorkload

LOGNORMAL = LengthConfig(kind="lognormal", median=1000, sigma=1.0)
GOLDEN_EXPONENTIAL = ["0x1.1da90b51c573dp-2", "0x1.25c062bccfc77p-10", "0x1.9dda400f1db8ap+1"]
GOLDEN_NORMAL = ["0x1.1c1de8d8f977fp-1", "-0x1.62c8eead829d0p+0", "-0x1.6a9b32e313314p+0"]
GOLDEN_GAMMA = ["0x1.f4b323ea76899p-10", "0x1.757cea4028ed8p-9", "0x1.b03b4867c18bfp-13"]
GOLDEN_REQUESTS = [(3697108, 2201, 275), (27748594, 1565, 344), (48477226, 1025, 11), (48478163, 813, 285)]


def drawn(config: WorkloadConfig, seed: int = 1) -> list[RequestSpec]:
    workload = build(config, seed)
    assert isinstance(workload, SyntheticWorkload)
    requests = list(workload)
    assert len(requests) == len(workload)
    assert all(earlier.arrival_ns <= later.arrival_ns for earlier, later in pairwise(requests))
    return requests


def gaps_s(requests: list[RequestSpec]) -> list[float]:
    return [(later.arrival_ns - earlier.arrival_ns) / NS_PER_S for earlier, later in pairwise(requests)]


def test_log_and_exp_agree_with_the_c_library() -> None:
    rng = random.Random(1)
    for _ in range(20_000):
        x = math.ldexp(rng.random() + 0.5, rng.randrange(-1000, 1000))
        assert math.isclose(log(x), math.log(x), rel_tol=1e-13)
        near = 1 + (rng.random() - 0.5) / 100
        assert math.isclose(log(near), math.log(near), rel_tol=1e-13)
        y = rng.uniform(-700, 700)
        assert math.isclose(exp(y), math.exp(y), rel_tol=1e-13)
    assert exp(0.0) == 1.0
    assert log(1.0) == exp(-1000.0) == 0.0
    with pytest.raises(ValueError, match="must be positive"):
        log(0.0)


def test_the_first_numbers_are_the_same_on_every_platform() -> None:
    def first(name: str, draw: Callable[[Stream], float]) -> list[str]:
        stream = Stream(7, name)
        return [draw(stream).hex() for _ in range(3)]

    assert first("a", Stream.exponential) == GOLDEN_EXPONENTIAL
    assert first("b", Stream.normal) == GOLDEN_NORMAL
    assert first("c", lambda stream: stream.gamma(0.25)) == GOLDEN_GAMMA


def test_the_first_requests_are_the_same_on_every_platform() -> None:
    lengths = LengthsConfig(prompt=LOGNORMAL, output=LengthConfig(kind="uniform", min=1, max=400))
    config = WorkloadConfig(num_requests=4, rate=5.0, lengths=lengths, arrivals=ArrivalConfig(kind="gamma", cv=2))
    rows = [(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in drawn(config, seed=3)]
    assert rows == GOLDEN_REQUESTS


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (Stream.exponential, 1.0, 1.0),
        (Stream.normal, 0.0, 1.0),
        (lambda stream: stream.gamma(0.25), 0.25, 0.25),
        (lambda stream: stream.gamma(4.0), 4.0, 4.0),
        (lambda stream: stream.integer(1, 6), 3.5, 35 / 12),
    ],
)
def test_distributions_have_their_moments(draw: Callable[[Stream], float], mean: float, variance: float) -> None:
    stream = Stream(0, "moments")
    numbers = [draw(stream) for _ in range(40_000)]
    assert statistics.fmean(numbers) == pytest.approx(mean, abs=0.02 * max(1.0, mean))
    assert statistics.pvariance(numbers) == pytest.approx(variance, rel=0.06)


def test_a_normal_number_falls_below_each_decile_as_often_as_it_should() -> None:
    stream, normal = Stream(0, "deciles"), statistics.NormalDist()
    numbers = sorted(stream.normal() for _ in range(40_000))
    for decile in range(1, 10):
        assert normal.cdf(numbers[4_000 * decile]) == pytest.approx(decile / 10, abs=0.01)


@pytest.mark.parametrize(("kind", "cv", "expected"), [("poisson", 9, 1.0), ("gamma", 2.5, 2.5), ("constant", 9, 0.0)])
def test_arrivals_keep_their_rate_and_burstiness(kind: ArrivalKind, cv: float, expected: float) -> None:
    arrivals = ArrivalConfig(kind=kind, cv=cv)
    gaps = gaps_s(drawn(WorkloadConfig(num_requests=30_000, rate=20.0, arrivals=arrivals)))
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) * 20 == pytest.approx(expected, rel=0.08, abs=1e-6)


def test_bursts_come_while_on_and_nothing_while_off() -> None:
    arrivals = ArrivalConfig(kind="on_off", on_s=2, off_s=8)
    requests = drawn(WorkloadConfig(num_requests=5_000, rate=50.0, arrivals=arrivals))
    assert all(one.arrival_ns % (10 * NS_PER_S) < 2 * NS_PER_S for one in requests)
    assert requests[-1].arrival_ns / NS_PER_S == pytest.approx(5_000 / (50 * 0.2), rel=0.05)


def test_lengths_follow_their_distributions() -> None:
    def prompts(config: LengthConfig) -> list[int]:
        lengths = LengthsConfig(prompt=config)
        return [one.prompt_tokens for one in drawn(WorkloadConfig(num_requests=20_000, lengths=lengths))]

    assert set(prompts(LengthConfig(mean=77))) == {77}
    assert set(prompts(LengthConfig(kind="uniform", min=3, max=5))) == {3, 4, 5}
    assert statistics.median(prompts(LOGNORMAL)) == pytest.approx(1000, rel=0.04)
    mean = LengthConfig(kind="lognormal", mean=1000, sigma=0.5, min=10, max=50_000)
    assert statistics.fmean(prompts(mean)) == pytest.approx(1000, rel=0.03)
    two = Counter(prompts(LengthConfig(kind="bimodal", mean=100, long=LongConfig(share=0.2, mean=9000))))
    assert set(two) == {100, 9000}
    assert two[9000] == pytest.approx(4_000, rel=0.06)
    assert set(prompts(LengthConfig(kind="empirical", values=(5, 6, 900), max=800))) == {5, 6, 800}


def test_iterating_twice_gives_the_same_requests_and_another_seed_gives_others() -> None:
    config = WorkloadConfig(
        num_requests=500,
        rate=10.0,
        lengths=LengthsConfig(prompt=LOGNORMAL),
        prefix=PrefixConfig(prompts=5, choice="zipf"),
        sessions=SessionConfig(min_turns=1, max_turns=5, think_s=3.0),
    )
    workload = build(config, 1)
    assert isinstance(workload, SyntheticWorkload)
    assert list(workload) == list(workload)
    assert drawn(config, 1) != drawn(config, 2)


def test_a_change_of_lengths_does_not_move_the_arrivals() -> None:
    fixed = drawn(WorkloadConfig(num_requests=100))
    others = drawn(WorkloadConfig(num_requests=100, lengths=LengthsConfig(prompt=LOGNORMAL)))
    assert [one.arrival_ns for one in fixed] == [one.arrival_ns for one in others]


def test_a_million_requests_are_never_held_at_once() -> None:
    workload = build(WorkloadConfig(num_requests=10**12), 1)
    assert isinstance(workload, SyntheticWorkload)
    assert len(list(islice(workload, 10))) == 10


def test_a_popular_system_prompt_is_shared_by_more_requests() -> None:
    prefix = PrefixConfig(prompts=4, tokens=100, choice="zipf")
    requests = drawn(WorkloadConfig(num_requests=10_000, prefix=prefix))
    counts = Counter(one.hash_ids for one in requests)
    assert len(counts) == 4
    assert all(len(ids) == 100 // 32 for ids in counts)
    assert len({identity for ids in counts for identity in ids}) == 12
    assert {one.prompt_tokens for one in requests} == {612}
    weights = [1, 1 / 2, 1 / 3, 1 / 4]
    for (_, count), weight in zip(counts.most_common(), weights, strict=True):
        assert count / 10_000 == pytest.approx(weight / sum(weights), rel=0.08)


def test_a_turn_repeats_the_conversation_so_far_with_its_answers() -> None:
    config = WorkloadConfig(
        num_requests=2_000,
        rate=10.0,
        lengths=LengthsConfig(prompt=LengthConfig(mean=100), output=LengthConfig(mean=60)),
        prefix=PrefixConfig(prompts=2, tokens=70),
        sessions=SessionConfig(min_turns=2, max_turns=4, think_s=5.0),
    )
    requests = drawn(config)
    seconds = requests[-1].arrival_ns / NS_PER_S
    assert 2_000 / seconds == pytest.approx(10, rel=0.15)  # the rate counts requests, not conversations
    last: dict[int, RequestSpec] = {}
    turns: Counter[int] = Counter()
    for one in requests:
        assert len(one.hash_ids) == (one.prompt_tokens + one.output_tokens) // 32
        before = last.get(one.session)
        if before is None:
            assert one.prompt_tokens == 170
        else:
            assert one.prompt_tokens == before.prompt_tokens + 60 + 100
            assert one.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert one.arrival_ns >= before.arrival_ns + 60 * 30 * 10**6
        last[one.session] = one
        turns[one.session] += 1
    assert max(turns.values()) == 4
    own = [identity for one in last.values() for identity in one.hash_ids[2:]]
    assert len(own) == len(set(own))  # conversations share nothing but their system prompts


def test_a_conversation_ends_before_it_exceeds_its_context() -> None:
    sessions = SessionConfig(min_turns=9, max_turns=9, max_context_tokens=2_000)
    requests = drawn(WorkloadConfig(num_requests=300, sessions=sessions))
    assert max(one.prompt_tokens + one.output_tokens for one in requests) == 3 * 640


def test_a_mix_of_classes_keeps_shares_lengths_priorities_and_objectives() -> None:
    long = LengthsConfig(prompt=LengthConfig(mean=9000), output=LengthConfig(mean=10))
    config = WorkloadConfig(
        num_requests=10_000,
        slo=SloConfig(ttft_ms=500, tpot_ms=50),
        classes=(
            ClassConfig(kind="chat", share=3, priority=-1),
            ClassConfig(kind="long", share=1, lengths=long, slo=SloConfig(ttft_ms=5000), patience_s=9),
        ),
    )
    requests = drawn(config)
    kinds = Counter(one.kind for one in requests)
    assert kinds["chat"] / 10_000 == pytest.approx(0.75, rel=0.03)
    for one in requests:
        if one.kind == "chat":
            assert (one.prompt_tokens, one.priority, one.abort_after_ns) == (512, -1, None)
            assert one.slo == Slo(500_000_000, 50_000_000)
        else:
            assert (one.prompt_tokens, one.priority, one.abort_after_ns) == (9000, 0, 9 * NS_PER_S)
            assert one.slo == Slo(5_000_000_000)


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_closed_loop_asks_the_same_questions_whoever_is_quicker(max_turns: int) -> None:
    config = WorkloadConfig(
        num_requests=60,
        lengths=LengthsConfig(prompt=LOGNORMAL),
        arrivals=ArrivalConfig(kind="closed", concurrency=3, think_s=2.0),
        sessions=SessionConfig(max_turns=max_turns),
    )

    def first_questions(order: list[int]) -> list[int]:
        loop = build(config, 1)
        assert isinstance(loop, ClosedLoop)
        assert len(loop) == 60
        specs = [spec for client in order if (spec := loop.next_request(client, 10)) is not None]
        assert len(specs) == 60
        assert {spec.arrival_ns for spec in specs} <= {10, 10 + 2 * NS_PER_S}
        seen: set[int] = set()
        starts = [spec for spec in specs if spec.session == -1 or not (spec.session in seen or seen.add(spec.session))]
        return [spec.prompt_tokens for spec in starts]

    fair = first_questions([0, 1, 2] * 21)
    if max_turns == 1:
        assert fair == first_questions([0, 1, 2, *[1] * 60])
    assert all(fair)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrivalConfig(cv=0), "cv is 0; it must be in"),
        (lambda: LengthConfig(kind="uniform"), "max is not given"),
        (lambda: LengthConfig(kind="empirical"), "needs either values or path"),
        (lambda: LengthConfig(min=9, max=8), "max is 8"),
        (lambda: SessionConfig(min_turns=3, max_turns=2), "max_turns is 2"),
        (lambda: SloConfig(ttft_ms=-1), "ttft_ms is -1"),
        (lambda: WorkloadConfig(rate=0), "rate is 0"),
        (lambda: WorkloadConfig(rate=1.0, arrivals=ArrivalConfig(kind="closed")), "a closed loop has none"),
    ],
)
def test_an_impossible_setting_names_itself_and_its_limit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
