"""Small judges of control at the numbers where they change their mind, each beside a plain model of what it says."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.base import compiled_modules
from diptych.control.admission.quota import Quota, QuotaLimits
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.engine.reports import LoadReport
from diptych.control.engine.scheduler.speculation import Speculation
from diptych.control.errors import ConfigError
from diptych.control.misses.miss_summary import MAX_PLACES, MissSummary
from diptych.control.misses.prefix_miss import MissReason, PrefixMiss
from diptych.control.planner import guards
from diptych.control.planner.edge_demand import Demand
from diptych.control.planner.planner_events import AnswerBegun, AnswerEnded, Demanded, PromptBegun
from diptych.control.router.costs import WorkerView
from diptych.control.router.hit_rate_monitor import HitRateMonitor
from diptych.control.router.idle_trials import IdleTrials, typical_ns
from diptych.control.router.topology import Level, LinkCost, LinkCosts, WorkerInfo, level
from diptych.control.slo import NS_PER_S, Slo
from tests.laws import law

S = NS_PER_S
with_fakes = pytest.mark.skipif(not compiled_modules.runs_sources(), reason="compiled classes take no fakes")

# -- hits -------------------------------------------------------------------------------------------------------------


@law(weight=0.1)
def test_the_alarm_begins_above_a_fifth_and_ends_at_a_tenth_of_the_last_256_prompts(seed: int) -> None:
    rng, watch = random.Random(seed), HitRateMonitor()
    seen: list[tuple[int, int, int]] = []
    is_alarmed = False
    for _ in range(3):
        if rng.random() < 0.9:
            wrong = rng.choice([0, 5, 9, 10, 11, 19, 20, 21, 40])
            break_at = rng.randint(1, 300)
            for _ in range(break_at):
                seen.append((100 - wrong, 100, 100) if rng.random() < 0.5 else (100 + wrong, 100, 100))
                watch.observe(*seen[-1])
                recent = seen[-256:]
                missed, prompt = sum(abs(p - a) for p, a, _ in recent), sum(n for *_, n in recent)
                limit = 10 if is_alarmed else 20
                is_alarmed = len(recent) >= 32 and 100 * missed > limit * prompt
                assert bool(watch.alarm) is is_alarmed and watch.error == pytest.approx(missed / prompt)


def test_an_alarm_says_what_was_expected_and_found() -> None:
    watch = HitRateMonitor()
    assert watch.error == 0.0
    for _ in range(32):
        assert watch.alarm == ""
        watch.observe(50, 20, 100)
    assert watch.alarm == (
        "of the last 32 prompts (3200 tokens) 1600 tokens were expected in a prefix cache and 640 were found; 30 % "
        "were predicted wrongly"
    )


# -- trials -----------------------------------------------------------------------------------------------------------

REPORT = LoadReport(time_ns=0, backlog_ns=0, num_blocks=100, used_blocks=0, token_ns=3.0, pair_ns=0.5, fixed_ns=1000.0,
                    sequence_ns=10.0, context_ns=0.25)  # fmt: skip


def test_workers_are_compared_by_a_prompt_of_512_and_an_answer_of_64_tokens() -> None:
    assert typical_ns(REPORT) == 1000 + 512 * 3 + 512 * 513 / 2 * 0.5 + 64 * (1000 + 10 + 512 * 0.25)


def trials(*factors: float, **changes: Any) -> tuple[IdleTrials, list[WorkerView]]:
    workers = [WorkerInfo(number, "both", 100, 16) for number in range(len(factors))]
    views = []
    for factor in factors:
        view = WorkerView(is_up=True)
        view.report = replace(REPORT, token_ns=0.0, pair_ns=0.0, sequence_ns=0.0, context_ns=0.0, fixed_ns=factor * 100)
        views.append(view)
    return IdleTrials(workers, views), views


def test_half_as_slow_again_may_be_noise_and_more_is_tried_after_5_s_and_then_twice_as_late() -> None:
    found, views = trials(1.0, 1.5, 1.51)
    assert found.due_ns == 5 * S
    assert found.review(5 * S - 1) == [] and found.due_ns == 10 * S - 1
    now, waits = 0, []
    slow = views[2].report
    assert slow is not None
    for _ in range(9):
        views[2].report = replace(slow, time_ns=now)
        wait = next(at for at in (5, 10, 20, 40, 80, 160, 320, 640) if found.review(now + at * S))
        waits.append(wait)
        assert views[2].report.fixed_ns == 100.0 and views[1].report is not None and views[1].report.fixed_ns == 150.0
        now += wait * S
    assert waits == [5, 10, 20, 40, 80, 160, 320, 320, 320]
    views[2].report = replace(slow, fixed_ns=150.0, time_ns=now)  # it has computed, and is not slow any more
    assert found.review(now + S) == []
    views[2].report = replace(slow, time_ns=now)
    assert found.review(now + 5 * S) == [views[2]]


@pytest.mark.parametrize("why", ["down", "no report", "busy", "backlog", "other role"])
def test_only_idle_workers_are_tried_and_compared_with_their_equals(why: str) -> None:
    found, views = trials(1.0, 9.0)
    report = views[1].report
    assert report is not None
    if why == "down":
        views[0].is_up = False
    elif why == "no report":
        views[0].report = None
    elif why == "busy":
        views[1].streams = 1
    elif why == "backlog":
        views[1].report = replace(report, backlog_ns=1)
    else:
        views[0].role = "decode"
    assert found.review(100 * S) == []


# -- paths ------------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_transfer_is_its_last_piece_or_what_the_link_could_not_carry() -> None:
    costs = LinkCosts(bytes_per_token=10, chunk_tokens=100)
    link = LinkCost(1000, 7)  # 10 ms a token
    for tokens, prefill_s, left_s in (
        (50, 0, 0.5),
        (50, 9, 0.5),
        (1000, 0, 10),
        (1000, 4, 6),
        (1000, 9, 1),
        (1000, 99, 1),
    ):
        assert costs.exposed_ns(link, tokens, prefill_s * S) == 7 + int(left_s * S)
    assert LinkCosts(bytes_per_token=10).exposed_ns(LinkCost(3, 0), 1, 0) == -(-10 * S // 3)  # rounded up
    assert costs.exposed_ns(None, 1000, 0) == 1_000_000
    assert [costs.link(at) for at in Level] == [None, costs.host, costs.network, costs.far]
    for wrong in ({"bytes_per_token": -1}, {"chunk_tokens": 0}, {"memory_latency_ns": -1}):
        with pytest.raises(ConfigError):
            LinkCosts(**wrong)
    LinkCosts(bytes_per_token=0, chunk_tokens=1, memory_latency_ns=0)
    LinkCost(1, 0)
    for rate, latency in ((0, 0), (1, -1)):
        with pytest.raises(ConfigError, match="at least 1 and 0"):
            LinkCost(rate, latency)


@pytest.mark.parametrize(("one", "two", "expected"), [
    ({"memory_domain": 1}, {"memory_domain": 1}, Level.MEMORY),
    ({"memory_domain": 1}, {"memory_domain": 2}, Level.HOST),
    ({}, {}, Level.HOST), ({"host": "a"}, {"host": "b"}, Level.NETWORK),
    ({"host": "a", "rack": "x"}, {"host": "b", "rack": "y"}, Level.FAR),
    ({"host": "a", "rack": "x"}, {"host": "b", "rack": "x"}, Level.NETWORK),
    ({"host": "a", "rack": "x"}, {"host": "b"}, Level.NETWORK),
    ({"host": "a", "rack": "x"}, {"host": "a", "rack": "y"}, Level.HOST),
])  # fmt: skip
def test_workers_are_as_near_as_the_nearest_thing_that_they_share(one: Any, two: Any, expected: Level) -> None:
    first, second = (WorkerInfo(at, "both", 1, 16, **more) for at, more in enumerate((one, two)))
    assert level(first, second) is level(second, first) is expected


# -- misses -----------------------------------------------------------------------------------------------------------


def miss(group: bytes, tokens: int, at: int = 0, differing: int | None = None, name: str = "r") -> PrefixMiss:
    return PrefixMiss(
        time_ns=0, request_id=name, tenant="", worker=0, num_prompt_tokens=tokens + 5, num_cached_tokens=5,
        reason=MissReason.DIFFERS, first_token=at, num_seen_tokens=at, block_size=16,
        spent=((MissReason.DIFFERS, tokens),), num_differing_tokens=differing, group=group,
    )  # fmt: skip


def test_a_place_has_the_range_the_sum_and_the_most_of_its_misses() -> None:
    summary = MissSummary()
    for at, differing, name in ((30, 4, "a"), (20, None, "b"), (25, 9, "c"), (22, 3, "d")):
        summary.add(miss(b"x", 10, at, differing, name))
    summary.add(miss(b"", 7))
    place = summary.places[b"x"]
    assert (place.first_token, place.last_token, place.num_requests, place.num_again_tokens) == (20, 30, 4, 40)
    assert (place.num_differing_tokens, place.example) == (9, "d")
    assert (summary.num_requests, summary.num_computed_tokens, summary.num_cached_tokens) == (5, 47, 25)
    assert summary.tokens == {MissReason.DIFFERS: 47} and summary.requests == {MissReason.DIFFERS: 5}


def test_64_places_are_kept_those_that_cost_the_most_the_costliest_first() -> None:
    summary = MissSummary()
    for number in range(MAX_PLACES + 2):
        summary.add(miss(b"%03d" % number, 100 + number % 7))
    places = list(summary.places.items())
    assert len(places) == MAX_PLACES == 64
    assert places == sorted(places, key=lambda item: (-item[1].num_again_tokens, item[0]))
    assert b"000" not in summary.places and b"007" not in summary.places and b"065" in summary.places


# -- speculation ------------------------------------------------------------------------------------------------------


@with_fakes
def test_counts_of_speculation_begin_at_nothing_and_are_those_of_the_extra_rows() -> None:
    made: Any = Speculation(None, None, None)  # type: ignore[arg-type]
    assert (made.num_drafts, made.num_draft_tokens, made.num_forced_tokens, made.accepted_at) == (0, 0, 0, [])
    assert made.step_ns == 0.0 and not made.has_offers

    class Rows:
        def __init__(self, num_tokens: int, num_forced: int, num_accepted: int) -> None:
            self.num_tokens, self.num_forced, self.num_accepted = num_tokens, num_forced, num_accepted

    for rows in (Rows(3, 3, 3), Rows(4, 1, 3), Rows(2, 0, 0)):
        made.count(rows)
    assert (made.num_drafts, made.num_draft_tokens, made.num_forced_tokens) == (2, 5, 4)
    assert made.accepted_at == [1, 1, 0]


@with_fakes
def test_what_a_step_takes_longer_with_extra_rows_is_learned_and_bounded() -> None:
    made: Any = Speculation(None, None, None)  # type: ignore[arg-type]
    made.measured(100, 140, has_extra=True)
    assert made.step_ns == pytest.approx(2.0)
    made.measured(100, 999, has_extra=True)  # the rest is somebody else's
    assert made.step_ns == pytest.approx(2.0 + 0.05 * 98.0)
    made.measured(100, 140, has_extra=False)
    assert made.step_ns == pytest.approx(2.0 + 0.05 * 98.0 - 2.0)
    made.measured(100, -999, has_extra=True)
    assert made.step_ns == 0.0


# -- the planner ------------------------------------------------------------------------------------------------------


def test_guards_at_their_bounds() -> None:
    assert [guards.is_cold(count, 3) for count in (2, 3)] == [True, False]
    assert [guards.is_cooling_down(now, 10, 5) for now in (14, 15)] == [True, False]
    assert not guards.is_cooling_down(0, None, 5)
    assert [guards.is_within_budget(count, 3) for count in (3, 4)] == [True, False]
    assert [guards.can_spare_a_worker(0.425, 2), guards.can_spare_a_worker(0.426, 2)] == [True, False]
    assert [guards.can_spare_a_worker(0.0, 1), guards.can_spare_a_worker(0.5, 3)] == [False, True]
    assert [guards.is_closed_loop([100] * count) for count in (31, 32)] == [False, True]
    assert [guards.is_closed_loop([100] * 31 + [least]) for least in (98, 97)] == [True, False]
    assert [guards.is_closed_loop([most] * 40) for most in (1, 2)] == [False, True]


def demanded(
    name: str, now: int, demand: Demand, prompt: int = 100, answer: int = 10, ttft_ns: int | None = None
) -> None:
    demand.on_demanded(Demanded(name, prompt, answer, Slo(ttft_ns=ttft_ns)), now)


def test_late_is_who_waits_for_longer_than_wanted() -> None:
    demand = Demand(60 * S, S)
    demanded("a", 0, demand, ttft_ns=5 * S)
    demanded("b", 0, demand)
    assert [demand.num_late(now) for now in (5 * S, 5 * S + 1)] == [0, 1]
    demand.on_answer_begun(AnswerBegun("a"), 5 * S)
    assert demand.num_late(99 * S) == 0 and demand.num_open == 2


def test_arrivals_older_than_the_window_are_forgotten_at_a_tick() -> None:
    demand = Demand(10 * S, S)
    for second in range(5):
        demanded(f"r{second}", second * S, demand)
    for now, left in ((10 * S, 5), (10 * S + 1, 4), (13 * S, 2), (99 * S, 0)):
        demand.on_tick(now)
        assert len(demand) == left == len(demand.latest(99))


def test_what_was_found_of_a_prompt_is_less_than_all_of_it() -> None:
    demand = Demand(60 * S, S)
    demanded("a", 0, demand, prompt=100, answer=0)
    demand.on_prompt_begun(PromptBegun("a", 100))
    [found] = demand.latest(1)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (1, 1)
    demand.on_answer_ended(AnswerEnded("a", 7))
    demand.on_answer_ended(AnswerEnded("a", 9))
    assert demand.latest(1)[0].num_output_tokens == 7 and demand.num_open == 0
    assert demand.replay(0.0, 9, S) == ((), 0, 0)


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_a_quota_is_left_until_it_is_used_and_refuses_by_its_number() -> None:
    quota = Quota(QuotaLimits(max_requests=2, max_queued=1, tokens_per_minute=10, tokens_per_day=100))
    assert quota.admit(0, 4) is None
    refused = quota.admit(0, 4, num_waiting=1)
    assert refused is not None and (refused.limit_name, refused.limit, refused.used, refused.retry_ns) == (
        "max_queued", 1, 1, 0,
    )  # fmt: skip
    assert quota.admit(0, 5) is None and quota.held_tokens == 9
    refused = quota.admit(0, 1)
    assert refused is not None and (refused.limit_name, refused.used) == ("max_requests", 2)
    assert quota.admit(0, 1, counts_open=False) is None and (quota.num_open, quota.held_tokens) == (2, 10)
    refused = quota.admit(0, 1, counts_open=False)
    assert refused is not None and (refused.limit_name, refused.used) == ("tokens_per_minute", 10)
    assert quota.admit(0, 0, counts_open=False) is None  # it computes none
    allowance = quota.tokens(0)
    assert allowance is not None and (allowance.limit, allowance.remaining) == (10, 0)
    quota.end(0, 4, 3)
    assert (quota.num_open, quota.held_tokens) == (1, 6)
    allowance = quota.tokens(0)
    assert allowance is not None and allowance.remaining == 1
    assert Quota(QuotaLimits()).tokens(0) is None and Quota(QuotaLimits()).requests(0) is None


@pytest.mark.parametrize(
    "name", ["max_requests", "max_queued", "requests_per_minute", "tokens_per_minute", "tokens_per_day"]
)
def test_a_limit_of_a_name_is_1_to_10_to_the_15(name: str) -> None:
    for value in (1, 10**15):
        assert getattr(QuotaLimits(**{name: value}), name) == value
    for value in (0, -1, 10**15 + 1):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            QuotaLimits(**{name: value})


# -- requests ---------------------------------------------------------------------------------------------------------


@with_fakes
def test_a_prompt_is_computed_until_its_first_token_and_only_the_first_one_has_a_time() -> None:
    entry: Any = SimpleNamespace(is_computing=True, first_token_ns=None, first_step_ns=None)
    OpenRequest.on_first_token(entry, 5)  # its RequestAdmitted is late
    assert (entry.is_computing, entry.first_token_ns, entry.first_step_ns) == (False, 5, 5)
    entry.is_computing = True
    OpenRequest.on_first_token(entry, 9)
    assert (entry.is_computing, entry.first_token_ns, entry.first_step_ns) == (False, 5, 5)
    known: Any = SimpleNamespace(is_computing=True, first_token_ns=None, first_step_ns=3)
    OpenRequest.on_first_token(known, 5)
    assert known.first_step_ns == 3
