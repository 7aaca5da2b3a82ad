"""the admission queue: who is let in, who goes next, who has waited too long."""

import random
from collections import Counter
from typing import Any

import pytest

from diptych.control.admission.admission_queue import (
    SERVICE_CLASSES,
    AdmissionConfig,
    AdmissionQueue,
    QueuedRequest,
    ServiceClassConfig,
)
from diptych.control.admission.fair_queue import FairQueue
from diptych.control.errors import ConfigError, OverloadedError, UnavailableError
from diptych.control.slo import NS_PER_S

PLENTY = 1000
OPEN = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S)


def entry(
    request_id: str, service_class: str = "standard", tenant: str = "", tokens: int = 100, **more: Any
) -> QueuedRequest:
    return QueuedRequest(request_id, tokens, 100, service_class=service_class, tenant=tenant, **more)


def edge(*entries: QueuedRequest, **config: Any) -> AdmissionQueue:
    made = AdmissionQueue(AdmissionConfig(**config))
    for one in entries:
        assert made.offer(one, one.arrival_ns) is None
    return made


def drain(made: AdmissionQueue, now: int = 0, headroom: int = PLENTY) -> list[str]:
    """All that may be dispatched, in order."""
    names = []
    while (name := made.next(now, headroom)) is not None:
        names.append(name)
    return names


def reasons(made: AdmissionQueue, now: int) -> dict[str, str]:
    return {name: refusal.reason for name, refusal in made.expired(now)}


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_refused_dispatched_expired_or_removed_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    service_class = ServiceClassConfig(100 * NS_PER_S, 20 * NS_PER_S, promote_ns=5 * NS_PER_S)
    made = AdmissionQueue(
        AdmissionConfig(
            service_class, service_class, ServiceClassConfig(50 * NS_PER_S, 30 * NS_PER_S, 50), max_queued=40
        )
    )
    ends: Counter[str] = Counter()
    waiting: set[str] = set()
    offered = now = 0
    for _ in range(2000):
        now += rng.randrange(NS_PER_S // 10)
        made.on_load(rng.randrange(60 * NS_PER_S), 1e6)
        kind = rng.random()
        if kind < 0.6:
            name, offered = str(offered), offered + 1
            deadline_ns = rng.choice((None, now + rng.randrange(40 * NS_PER_S)))
            one = entry(name, rng.choice(SERVICE_CLASSES), rng.choice("abcd"), rng.randrange(1, 9000), arrival_ns=now,
                        priority=rng.randrange(3), deadline_ns=deadline_ns)  # fmt: skip
            if made.offer(one, now) is not None:
                ends[name] += 1
            else:
                waiting.add(name)
        elif kind < 0.7 and waiting:
            name = rng.choice(sorted(waiting))
            made.remove(name)
            waiting.discard(name)
            ends[name] += 1
        elif kind < 0.85:
            at = made.next_time()
            gone = [name for name, _ in made.expired(now)]
            assert bool(gone) == (at is not None and at <= now)
            waiting.difference_update(gone)
            ends.update(gone)
        elif (chosen := made.next(now, rng.randrange(4))) is not None:
            waiting.discard(chosen)
            ends[chosen] += 1
            made.on_service(rng.choice("abcd"), 0, rng.randrange(500), rng.choice(SERVICE_CLASSES))
        assert len(made) <= 40 + 1
        assert len(made) == sum(made.num_waiting(service_class) for service_class in SERVICE_CLASSES)
    left = [name for name, _ in made.expired(now)] + drain(made, now)
    ends.update(left)
    assert len(made) == 0 and made.next_time() is None
    assert ends == Counter(map(str, range(offered)))


@pytest.mark.parametrize("seed", range(10))
def test_two_backlogged_tenants_never_differ_by_more_than_one_request(seed: int) -> None:
    rng = random.Random(seed)
    longest, answer = 5000, 300
    made = edge(interactive=OPEN, standard=OPEN, max_queued=10**6)
    sizes = {"small": 50, "large": longest}
    tenant_of = {}
    for number in range(4000):
        tenant = rng.choice(("small", "large", "large"))
        tenant_of[str(number)] = tenant
        tokens = rng.randrange(1, sizes[tenant] + 1)
        assert made.offer(entry(str(number), tenant=tenant, tokens=tokens, arrival_ns=number), number) is None
    served = Counter[str]()
    while made._queues["standard"].num_of("small") and made._queues["standard"].num_of("large"):
        name = made.next(0, PLENTY)
        assert name is not None
        served[tenant_of[name]] += 1
        made.on_service(tenant_of[name], 0, rng.randrange(answer + 1))
        assert abs(made.service("small") - made.service("large")) <= longest + 2 * answer
    assert served["small"] > served["large"]


@pytest.mark.parametrize("seed", range(10))
def test_nobody_starves_below_a_flood_of_more_important_requests(seed: int) -> None:
    rng = random.Random(seed)
    standard = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S, 100, promote_ns=NS_PER_S)
    made = edge(entry("patient"), interactive=OPEN, standard=standard, promote_every=4, max_queued=10**6)
    number = 0
    for step in range(1, 40):
        now = step * NS_PER_S // 10
        for _ in range(rng.randrange(1, 6)):
            number += 1
            assert made.offer(entry(str(number), "interactive", arrival_ns=now), now) is None
        if made.next(now, PLENTY) == "patient":
            break
    assert NS_PER_S <= now <= NS_PER_S + 4 * NS_PER_S // 10


def test_inside_a_tenant_priority_counts_and_waiting_outweighs_it() -> None:
    made = edge(
        entry("old", priority=1, arrival_ns=0),
        entry("urgent", priority=0, arrival_ns=5 * NS_PER_S),
        entry("late", priority=0, arrival_ns=11 * NS_PER_S),
    )
    assert drain(made, 11 * NS_PER_S) == ["urgent", "old", "late"]


# -- who goes next -----------------------------------------------------------------------------------------------------


def test_bands_are_strict_and_batch_only_gets_what_others_leave() -> None:
    made = edge(entry("b", "batch"), entry("s"), entry("i", "interactive"), batch_reserve=2)
    assert made.next(0, 0) is None
    assert [made.next(0, 1) for _ in range(3)] == ["i", "s", None]
    assert made.next(0, 2) is None
    assert made.next(0, 3) == "b"


def test_a_tenant_with_less_service_goes_first_whoever_came_first() -> None:
    made = edge(*(entry(f"a{number}", tenant="a", arrival_ns=number) for number in range(4)), entry("b0", tenant="b"))
    assert drain(made) == ["a0", "b0", "a1", "a2", "a3"]
    made = edge(entry("a0", tenant="a"), entry("a1", tenant="a"), entry("b0", tenant="b"), entry("b1", tenant="b"))
    made.on_service("a", 0, 1000)
    assert drain(made) == ["b0", "b1", "a0", "a1"]


def test_output_tokens_weigh_twice_and_a_prompt_is_charged_when_it_is_dispatched() -> None:
    made = edge(entry("a", tenant="a", tokens=70))
    assert made.service("a") == 0
    made.next(0, PLENTY)
    made.on_service("a", 0, 10)
    assert made.service("a") == 70 + 2 * 10
    made.on_service("a", 5, 0)
    assert made.service("a") == 95


def test_a_tenant_that_was_away_saves_up_nothing() -> None:
    made = edge(*(entry(f"a{number}", tenant="a", arrival_ns=number) for number in range(50)))
    for _ in range(20):
        made.next(0, PLENTY)
    for number in range(20):
        assert made.offer(entry(f"b{number}", tenant="b"), 0) is None
    assert made.service("b") == made.service("a") == 2000
    names = [made.next(0, PLENTY) for _ in range(10)]
    assert sum(name is not None and name.startswith("b") for name in names) == 5


def test_a_tenant_that_comes_back_still_owes_what_it_took() -> None:
    made = edge(entry("a0", tenant="a", tokens=5000), entry("b0", tenant="b"), entry("b1", tenant="b"))
    assert made.next(0, PLENTY) == "a0"
    assert made.offer(entry("a1", tenant="a"), 0) is None
    assert drain(made) == ["b0", "b1", "a1"]


def test_the_memory_of_tenants_is_bounded() -> None:
    queue: FairQueue[QueuedRequest] = FairQueue(max_tenants=10)
    for number in range(100):
        queue.add(entry(str(number), tenant=f"key{number}"), number, 0)
        queue.serve(f"other{number}", 5)
    assert (len(queue._active), len(queue._idle)) == (100, 10)  # those that wait are all remembered
    while queue.pop(1):
        pass
    assert (len(queue._active), len(queue._idle)) == (0, 10)


def test_what_is_remembered_of_the_dead_stays_small() -> None:
    made = edge(batch=OPEN, max_queued=10**6)
    for number in range(5000):
        assert made.offer(entry(str(number), SERVICE_CLASSES[number % 3], f"t{number % 3}"), 0) is None
        if number >= 20:
            made.remove(str(number - 20))
    queues = made._queues.values()
    assert len(made) == 20
    assert len(made._ends) <= 2 * 20 + 17
    assert sum(len(state.waiting) for queue in queues for state in queue._active.values()) <= 9 * (2 * 20 + 17)
    assert sum(len(queue._order) for queue in queues) <= 100


# -- who is refused ----------------------------------------------------------------------------------------------------


def test_load_is_shed_by_predicted_wait_batch_first_and_interactive_last() -> None:
    limits = {
        service_class: ServiceClassConfig(wait * NS_PER_S, 3600 * NS_PER_S)
        for service_class, wait in zip(SERVICE_CLASSES, (30, 20, 10), strict=True)
    }
    made = AdmissionQueue(AdmissionConfig(**limits))
    refused = []
    for backlog_s in (5, 15, 25, 35):
        made.on_load(backlog_s * NS_PER_S, 0.0)
        for service_class in SERVICE_CLASSES:
            refusal = made.offer(entry(f"{service_class}{backlog_s}", service_class), 0)
            if refusal is not None:
                assert (refusal.reason, refusal.status) == ("overloaded", 429)
                refused.append((backlog_s, service_class))
    everybody = [(35, service_class) for service_class in SERVICE_CLASSES]
    assert refused == [(15, "batch"), (25, "standard"), (25, "batch"), *everybody]


def test_the_predicted_wait_is_the_workers_backlog_and_all_that_waits_before() -> None:
    made = edge(entry("i", "interactive", tokens=100), entry("s", tokens=10), entry("b", "batch", tokens=1))
    made.on_load(1000, 2.0)
    assert [made.queue_ns(service_class) for service_class in SERVICE_CLASSES] == [1200, 1220, 1222]
    made.next(0, PLENTY)
    assert made.queue_ns("batch") == 1022


def test_a_full_queue_sheds_by_band_and_the_youngest_least_important_makes_room() -> None:
    made = AdmissionQueue(AdmissionConfig(max_queued=10))
    for number in range(6):
        refusal = made.offer(entry(f"b{number}", "batch"), 0)
        assert (refusal is None) == (number < 5)
    for number in range(5):
        assert made.offer(entry(f"s{number}"), 0) is None
    assert reasons(made, 0) == {"b4": "displaced", "b3": "displaced"}
    for number in range(10):
        assert made.offer(entry(f"i{number}", "interactive"), 0) is None
    assert made.next_time() == 0
    assert list(reasons(made, 0)) == ["b2", "b1", "b0", "s4", "s3", "s2", "s1", "s0"]
    refusal = made.offer(entry("i10", "interactive"), 0)
    assert refusal is not None and refusal.reason == "queue_full" and len(made) == 10


def test_one_tenant_cannot_fill_the_queue() -> None:
    made = edge(entry("a0", tenant="a"), entry("a1", "batch", tenant="a"), max_queued_per_tenant=2)
    refusal = made.offer(entry("a2", tenant="a"), 0)
    assert refusal is not None and refusal.reason == "tenant_queue_full"
    assert made.offer(entry("b0", tenant="b"), 0) is None


def test_a_deadline_that_cannot_be_met_is_refused_at_once_or_as_soon_as_that_is_certain() -> None:
    made = edge()
    made.on_load(10 * NS_PER_S, 0.0)
    refusal = made.offer(entry("late", deadline_ns=9 * NS_PER_S), 0)
    assert refusal is not None and refusal.reason == "deadline"
    assert made.offer(entry("tight", deadline_ns=15 * NS_PER_S, service_ns=3 * NS_PER_S), 0) is None
    assert made.next_time() == 12 * NS_PER_S
    assert reasons(made, 12 * NS_PER_S - 1) == {}
    assert reasons(made, 12 * NS_PER_S) == {"tight": "deadline"}


def test_nobody_waits_longer_than_the_limit_of_the_band() -> None:
    made = edge(entry("s"), entry("i", "interactive"), standard=ServiceClassConfig(NS_PER_S, 5 * NS_PER_S))
    assert made.next_time() == 5 * NS_PER_S
    assert reasons(made, 5 * NS_PER_S) == {"s": "queue_timeout"}
    assert "i" in made and "s" not in made


def test_a_missed_ttft_is_shed_when_that_is_wanted() -> None:
    one = entry("a", ttft_slo_ns=NS_PER_S)
    for wanted in (False, True):
        made = edge(shed_missed_ttft=wanted)
        made.on_load(2 * NS_PER_S, 0.0)
        refusal = made.offer(one, 0)
        assert (refusal is not None and refusal.reason == "ttft") == wanted


def test_a_closed_edge_refuses_newcomers_and_serves_those_who_wait() -> None:
    made = edge(entry("a"))
    made.close("the server is draining")
    refusal = made.offer(entry("b"), 0)
    assert refusal is not None and isinstance(refusal.error, UnavailableError)
    assert (refusal.status, refusal.error.status, refusal.error.message) == (503, 503, "the server is draining")
    assert drain(made) == ["a"]
    made.open()
    assert made.offer(entry("b"), 0) is None


def test_a_refusal_says_when_to_come_back() -> None:
    made = edge()
    made.on_load(100 * NS_PER_S, 0.0)
    for waits_s, after_s in ((61.2, 60.0), (60.5, 60.0)):
        made.on_load(int(waits_s * NS_PER_S), 0.0)
        refusal = made.offer(entry("a"), 0)
        assert refusal is not None and isinstance(refusal.error, OverloadedError)
        assert refusal.retry_after_s == refusal.error.retry_after_s == after_s
        assert refusal.error.code == "overloaded"


def test_wrong_settings_and_double_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="promote_every is 1"):
        AdmissionConfig(promote_every=1)
    with pytest.raises(ConfigError, match="queue_percent is 101"):
        ServiceClassConfig(1, 1, 101)
    with pytest.raises(ConfigError, match="service_class is 'gold'"):
        entry("a", "gold")
    made = edge(entry("a"))
    with pytest.raises(ConfigError, match="in use"):
        made.offer(entry("a"), 0)
    made.remove("unknown")


def test_passing_by_an_empty_edge_charges_what_waiting_there_would() -> None:
    rng = random.Random(3)
    waited, passed = AdmissionQueue(), AdmissionQueue()
    for number in range(200):
        tenant = f"tenant {rng.randrange(5)}"
        entry = QueuedRequest(
            request_id=str(number),
            num_prompt_tokens=rng.randrange(1, 500),
            max_tokens=10,
            arrival_ns=number,
            tenant=tenant,
        )
        assert waited.offer(entry, number) is None
        assert waited.next(number, 10**6) == str(number)
        assert passed.pass_by(entry, number) is None
        tokens = rng.randrange(200)
        for edge in (waited, passed):
            edge.on_service(tenant, 0, tokens)
        assert [waited.service(f"tenant {one}") for one in range(5)] == [
            passed.service(f"tenant {one}") for one in range(5)
        ]
