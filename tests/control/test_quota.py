"""What a name may use: laws by virtual time, against a list of all that ever happened."""

import random
from dataclasses import dataclass

import pytest

from diptych.control.admission.quota import DAY_NS, MINUTE_NS, Quota, QuotaLimits
from diptych.control.admission.rate_window import NUM_SLOTS, RateWindow
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S


@pytest.mark.parametrize("seed", range(40))
def test_a_window_never_counts_less_than_its_period_saw_nor_more_than_a_slot_longer(seed: int) -> None:
    rng = random.Random(seed)
    period = MINUTE_NS if seed % 2 else DAY_NS
    window, history, now = RateWindow(period), [], rng.randrange(10**15)
    for _ in range(400):
        now += rng.choice((0, 1, period // 977, period // NUM_SLOTS, period // 7, period))
        if rng.random() < 0.7:
            units = rng.randrange(1, 1000)
            window.charge(now, units)
            history.append((now, units))
        least = sum(units for time, units in history if now - time < period)
        most = sum(units for time, units in history if now - time < period + period // NUM_SLOTS)
        assert least <= window.used(now) <= most
        limit = rng.randrange(2000)
        wait = window.wait_ns(now, limit)
        assert 0 <= wait <= period + period // NUM_SLOTS
        assert (wait == 0) == (window.used(now) <= limit)
        left = [units for time, units in history if now + wait - time < period]
        assert sum(left) <= limit, "after the wait there is room"
        if wait:
            assert RateWindowCopy(history, period).used(now + wait - 1) > limit, "no sooner"
        assert window.reset_ns(now) == 0 or window.used(now) > 0


class RateWindowCopy:
    """The window of a history, made anew."""

    def __init__(self, history: list[tuple[int, int]], period: int) -> None:
        self._window = RateWindow(period)
        for time, units in history:
            self._window.charge(time, units)

    def used(self, now: int) -> int:
        return self._window.used(now)


@dataclass
class Running:
    """A request that was admitted."""

    ends: int
    held: int
    used: int
    counts_open: bool


@pytest.mark.parametrize("seed", range(60))
def test_no_window_exceeds_a_limit_by_more_than_the_last_request(seed: int) -> None:
    rng = random.Random(seed)
    limits = QuotaLimits(
        max_requests=rng.choice((None, 1, 4)),
        requests_per_minute=rng.choice((None, 1, 30)),
        tokens_per_minute=rng.choice((None, 1, 5000)),
        tokens_per_day=rng.choice((None, 100_000)),
    )
    quota, now = Quota(limits), rng.randrange(10**12)
    running: list[Running] = []
    admitted: list[int] = []
    charged: list[tuple[int, int]] = []
    for _ in range(600):
        now += rng.choice((0, 1, NS_PER_S // 3, NS_PER_S, 20 * NS_PER_S, MINUTE_NS))
        for request in [each for each in running if each.ends <= now]:
            running.remove(request)
            quota.end(now, request.held, request.used, counts_open=request.counts_open)
            charged.append((now, request.used))
        held = rng.randrange(1, 3000)
        counts_open = rng.random() < 0.8
        before = (quota.num_open, quota.held_tokens, quota.requests(now), quota.tokens(now))
        refusal = quota.admit(now, held, counts_open=counts_open)
        if refusal is None:
            admitted.append(now)
            running.append(Running(now + rng.randrange(90 * NS_PER_S), held, rng.randint(0, held), counts_open))
        else:
            assert before == (quota.num_open, quota.held_tokens, quota.requests(now), quota.tokens(now))
            assert refusal.used >= refusal.limit
    for request in sorted(running, key=lambda each: each.ends):
        now = max(now, request.ends)
        quota.end(now, request.held, request.used, counts_open=request.counts_open)
        charged.append((now, request.used))
    assert quota.num_open == quota.held_tokens == 0
    if limits.requests_per_minute is not None:
        assert all(
            sum(begin <= time < begin + MINUTE_NS for time in admitted) <= limits.requests_per_minute
            for begin in admitted
        )
    for limit, period in ((limits.tokens_per_minute, MINUTE_NS), (limits.tokens_per_day, DAY_NS)):
        for begin, _ in charged if limit is not None else ():
            inside = [used for time, used in charged if begin <= time < begin + period]
            assert sum(inside) < limit + max(inside)


def test_many_requests_that_come_at_once_do_not_pass_by_the_same_room() -> None:
    quota = Quota(QuotaLimits(tokens_per_minute=1000))
    assert [quota.admit(0, 300) is None for _ in range(8)] == [True] * 4 + [False] * 4
    refusal = quota.admit(0, 300)
    assert refusal is not None and (refusal.limit_name, refusal.used, refusal.retry_ns) == (
        "tokens_per_minute",
        1200,
        0,
    )
    quota.end(0, 300, 10)
    assert quota.admit(0, 300) is None, "what was not used is given back"


def test_the_wait_is_that_of_the_limit_that_is_longest_full() -> None:
    quota = Quota(QuotaLimits(requests_per_minute=1, tokens_per_minute=10, tokens_per_day=10))
    assert quota.admit(0, 5) is None
    quota.end(0, 5, 50)
    refusal = quota.admit(1, 5)
    assert refusal is not None and refusal.limit_name == "tokens_per_day"
    assert DAY_NS <= refusal.retry_ns <= DAY_NS + DAY_NS // NUM_SLOTS
    assert quota.admit(1 + refusal.retry_ns, 5) is None


def test_limits_that_change_keep_what_was_used() -> None:
    quota = Quota(QuotaLimits())
    for _ in range(3):
        assert quota.admit(0, 10) is None
        quota.end(0, 10, 100)
    assert quota.requests(0) is None and quota.tokens(0) is None
    quota.limits = QuotaLimits(requests_per_minute=4, tokens_per_minute=301, max_queued=1)
    requests, tokens = quota.requests(0), quota.tokens(0)
    assert requests is not None and tokens is not None
    assert (requests.remaining, tokens.remaining) == (1, 1)
    refusal = quota.admit(0, 10, num_waiting=1)
    assert refusal is not None and refusal.limit_name == "max_queued"
    assert quota.admit(0, 10, num_waiting=1, counts_open=False) is None, "lines of batches have limits of their own"
    assert quota.num_open == 0


@pytest.mark.parametrize("value", [0, -1, 10**15 + 1])
def test_limits_are_positive(value: int) -> None:
    with pytest.raises(ConfigError, match=f"tokens_per_day is {value}; it must be in"):
        QuotaLimits(tokens_per_day=value)
