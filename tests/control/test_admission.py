"""The admission queue: who is let in, who goes next, who has waited too long."""

import random
from collections import Counter
from typing import Any

import pytest

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.admission.admission_queue import SERVICE_CLASSES, AdmissionQueue, QueuedRequest
from diptych.control.admission.fair_queue import FairQueue
from diptych.control.errors import ConfigError, InvalidRequestError, OverloadedError
from diptych.control.request import RequestOptions, Submission
from diptych.control.slo import NS_PER_S
from tests.laws import law

PLENTY = 1000
OPEN = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S)


def entry(
    request_id: str,
    service_class: str = "standard",
    tenant: str = "",
    tokens: int = 100,
    *,
    arrival_ns: int = 0,
    service_ns: int = 0,
    **options: Any,
) -> QueuedRequest:
    """options: of RequestOptions."""
    given = RequestOptions(service_class=service_class, tenant=tenant, **options)
    return QueuedRequest(Submission(request_id, tokens, 100, options=given), arrival_ns, service_ns)


def queue_of(*entries: QueuedRequest, **config: Any) -> AdmissionQueue:
    queue = AdmissionQueue(AdmissionConfig(**config))
    for request in entries:
        assert queue.offer(request, request.arrival_ns) is None
    return queue


def drain(queue: AdmissionQueue, now: int = 0, headroom: int = PLENTY) -> list[str]:
    """All that may be dispatched, in order."""
    names = []
    while (name := queue.next(now, headroom)) is not None:
        names.append(name)
    return names


def reasons(queue: AdmissionQueue, now: int) -> dict[str, str]:
    return {name: refusal.reason for name, refusal in queue.expired(now)}


# -- laws --------------------------------------------------------------------------------------------------------------


@law(weight=0.4)
def test_every_request_is_refused_dispatched_expired_or_removed_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    service_class = ServiceClassConfig(100 * NS_PER_S, 20 * NS_PER_S, promote_ns=5 * NS_PER_S)
    queue = AdmissionQueue(
        AdmissionConfig(
            service_class, service_class, ServiceClassConfig(50 * NS_PER_S, 30 * NS_PER_S, 50), max_queued=40
        )
    )
    ends: Counter[str] = Counter()
    waiting: set[str] = set()
    offered = now = 0
    for _ in range(2000):
        now += rng.randrange(NS_PER_S // 10)
        queue.on_load(float(rng.randrange(2_000_000)))
        kind = rng.random()
        if kind < 0.6:
            name, offered = str(offered), offered + 1
            deadline_ns = rng.choice((None, rng.randrange(1, 40 * NS_PER_S)))
            request = entry(
                name,
                rng.choice(SERVICE_CLASSES),
                rng.choice("abcd"),
                rng.randrange(1, 9000),
                arrival_ns=now,
                priority=rng.randrange(3),
                deadline_ns=deadline_ns,
            )
            if queue.offer(request, now) is not None:
                ends[name] += 1
            else:
                waiting.add(name)
        elif kind < 0.7 and waiting:
            name = rng.choice(sorted(waiting))
            queue.remove(name)
            waiting.discard(name)
            ends[name] += 1
        elif kind < 0.85:
            at = queue.next_time()
            gone = [name for name, _ in queue.expired(now)]
            assert bool(gone) == (at is not None and at <= now)
            waiting.difference_update(gone)
            ends.update(gone)
        elif (chosen := queue.next(now, rng.randrange(4))) is not None:
            waiting.discard(chosen)
            ends[chosen] += 1
            queue.on_service(rng.choice("abcd"), rng.randrange(500), rng.choice(SERVICE_CLASSES))
        assert len(queue) <= 40 + 1
        assert len(queue) == sum(queue.num_waiting(service_class) for service_class in SERVICE_CLASSES)
    left = [name for name, _ in queue.expired(now)] + drain(queue, now)
    ends.update(left)
    assert len(queue) == 0 and queue.next_time() is None
    assert ends == Counter(map(str, range(offered)))


@law(weight=0.3)
def test_two_backlogged_tenants_never_differ_by_more_than_one_request(seed: int) -> None:
    rng = random.Random(seed)
    longest, answer = 5000, 300
    queue = queue_of(interactive=OPEN, standard=OPEN, max_queued=10**6)
    sizes = {"small": 50, "large": longest}
    tenant_of = {}
    for number in range(4000):
        tenant = rng.choice(("small", "large", "large"))
        tenant_of[str(number)] = tenant
        tokens = rng.randrange(1, sizes[tenant] + 1)
        assert queue.offer(entry(str(number), tenant=tenant, tokens=tokens, arrival_ns=number), number) is None
    served = Counter[str]()
    while queue._queues["standard"].num_of("small") and queue._queues["standard"].num_of("large"):
        name = queue.next(0, PLENTY)
        assert name is not None
        served[tenant_of[name]] += 1
        queue.on_service(tenant_of[name], rng.randrange(answer + 1))
        assert abs(queue.service("small") - queue.service("large")) <= longest + 2 * answer
    assert served["small"] > served["large"]


@law(weight=0.2)
def test_nobody_starves_below_a_flood_of_more_important_requests(seed: int) -> None:
    rng = random.Random(seed)
    standard = ServiceClassConfig(3600 * NS_PER_S, 3600 * NS_PER_S, 100, promote_ns=NS_PER_S)
    queue = queue_of(entry("patient"), interactive=OPEN, standard=standard, max_queued=10**6)
    number = 0
    for step in range(1, 40):
        now = step * NS_PER_S // 10
        for _ in range(rng.randrange(1, 6)):
            number += 1
            assert queue.offer(entry(str(number), "interactive", arrival_ns=now), now) is None
        if queue.next(now, PLENTY) == "patient":
            break
    assert NS_PER_S <= now <= NS_PER_S + 4 * NS_PER_S // 10


def test_inside_a_tenant_priority_counts_and_waiting_outweighs_it() -> None:
    queue = queue_of(
        entry("old", priority=1, arrival_ns=0),
        entry("urgent", priority=0, arrival_ns=5 * NS_PER_S),
        entry("late", priority=0, arrival_ns=11 * NS_PER_S),
    )
    assert drain(queue, 11 * NS_PER_S) == ["urgent", "old", "late"]


# -- who goes next -----------------------------------------------------------------------------------------------------


def test_classes_are_strict_and_batch_only_gets_what_others_leave() -> None:
    queue = queue_of(entry("b", "batch"), entry("s"), entry("i", "interactive"))
    assert queue.next(0, 0) is None
    assert [queue.next(0, 1) for _ in range(3)] == ["i", "s", None]
    assert queue.next(0, 2) == "b"


def test_a_tenant_with_less_service_goes_first_although_it_came_later() -> None:
    queue = queue_of(
        *(entry(f"a{number}", tenant="a", arrival_ns=number) for number in range(4)), entry("b0", tenant="b")
    )
    assert drain(queue) == ["a0", "b0", "a1", "a2", "a3"]
    queue = queue_of(entry("a0", tenant="a"), entry("a1", tenant="a"), entry("b0", tenant="b"), entry("b1", tenant="b"))
    queue.on_service("a", 1000)
    assert drain(queue) == ["b0", "b1", "a0", "a1"]


def test_output_tokens_weigh_twice_and_a_prompt_is_charged_when_it_is_dispatched() -> None:
    queue = queue_of(entry("a", tenant="a", tokens=70))
    assert queue.service("a") == 0
    queue.next(0, PLENTY)
    queue.on_service("a", 10)
    assert queue.service("a") == 70 + 2 * 10


def test_a_tenant_that_was_away_saves_up_nothing() -> None:
    queue = queue_of(*(entry(f"a{number}", tenant="a", arrival_ns=number) for number in range(50)))
    for _ in range(20):
        queue.next(0, PLENTY)
    for number in range(20):
        assert queue.offer(entry(f"b{number}", tenant="b"), 0) is None
    assert queue.service("b") == queue.service("a") == 2000
    names = [queue.next(0, PLENTY) for _ in range(10)]
    assert sum(name is not None and name.startswith("b") for name in names) == 5


def test_a_tenant_that_comes_back_still_owes_what_it_took() -> None:
    queue = queue_of(entry("a0", tenant="a", tokens=5000), entry("b0", tenant="b"), entry("b1", tenant="b"))
    assert queue.next(0, PLENTY) == "a0"
    assert queue.offer(entry("a1", tenant="a"), 0) is None
    assert drain(queue) == ["b0", "b1", "a1"]


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
    queue = queue_of(batch=OPEN, max_queued=10**6)
    for number in range(5000):
        assert queue.offer(entry(str(number), SERVICE_CLASSES[number % 3], f"t{number % 3}"), 0) is None
        if number >= 20:
            queue.remove(str(number - 20))
    queues = queue._queues.values()
    assert len(queue) == 20
    assert len(queue._ends) <= 2 * 20 + 17
    assert sum(len(state.waiting) for queue in queues for state in queue._active.values()) <= 9 * (2 * 20 + 17)
    assert sum(len(queue._order) for queue in queues) <= 100


# -- who is refused ----------------------------------------------------------------------------------------------------


def test_load_is_shed_by_predicted_wait_batch_first_and_interactive_last() -> None:
    limits = {
        service_class: ServiceClassConfig(wait * NS_PER_S, 3600 * NS_PER_S)
        for service_class, wait in zip(SERVICE_CLASSES, (30, 20, 10), strict=True)
    }
    refused = []
    for wait_s in (5, 15, 25, 35):
        queue = queue_of(entry("first", "interactive", tokens=1000), **limits)
        queue.on_load(wait_s * NS_PER_S / 1000)
        for service_class in SERVICE_CLASSES:
            refusal = queue.offer(entry(service_class, service_class, tokens=0), 0)
            if refusal is not None:
                assert (refusal.reason, refusal.status) == ("overloaded", 429)
                refused.append((wait_s, service_class))
    everybody = [(35, service_class) for service_class in SERVICE_CLASSES]
    assert refused == [(15, "batch"), (25, "standard"), (25, "batch"), *everybody]


def test_the_predicted_wait_is_the_prompts_that_wait_before_at_the_fleets_price_of_a_token() -> None:
    queue = queue_of(entry("i", "interactive", tokens=100), entry("s", tokens=10), entry("b", "batch", tokens=1))
    queue.on_load(2.0)
    assert [queue.queue_ns(service_class) for service_class in SERVICE_CLASSES] == [200, 220, 222]
    queue.next(0, PLENTY)
    assert queue.queue_ns("batch") == 22


def test_a_full_queue_sheds_by_class_and_the_youngest_least_important_makes_room() -> None:
    queue = AdmissionQueue(AdmissionConfig(max_queued=10))
    for number in range(6):
        refusal = queue.offer(entry(f"b{number}", "batch"), 0)
        assert (refusal is None) == (number < 5)
    for number in range(5):
        assert queue.offer(entry(f"s{number}"), 0) is None
    assert reasons(queue, 0) == {"b4": "displaced", "b3": "displaced"}
    for number in range(10):
        assert queue.offer(entry(f"i{number}", "interactive"), 0) is None
    assert queue.next_time() == 0
    assert list(reasons(queue, 0)) == ["b2", "b1", "b0", "s4", "s3", "s2", "s1", "s0"]
    refusal = queue.offer(entry("i10", "interactive"), 0)
    assert refusal is not None and refusal.reason == "queue_full" and len(queue) == 10


def test_one_tenant_cannot_fill_the_queue() -> None:
    queue = queue_of(entry("a0", tenant="a"), entry("a1", "batch", tenant="a"), max_queued_per_tenant=2)
    refusal = queue.offer(entry("a2", tenant="a"), 0)
    assert refusal is not None and refusal.reason == "tenant_queue_full"
    assert queue.offer(entry("b0", tenant="b"), 0) is None


def test_a_deadline_that_cannot_be_met_is_refused_at_once_or_as_soon_as_that_is_certain() -> None:
    queue = queue_of(entry("first", tokens=1000))
    queue.on_load(NS_PER_S / 100)
    refusal = queue.offer(entry("late", deadline_ns=9 * NS_PER_S, arrival_ns=NS_PER_S), NS_PER_S)
    assert refusal is not None and refusal.reason == "deadline"
    tight = entry("tight", deadline_ns=15 * NS_PER_S, service_ns=3 * NS_PER_S, arrival_ns=NS_PER_S)
    assert queue.offer(tight, NS_PER_S) is None
    assert queue.next_time() == 13 * NS_PER_S
    assert reasons(queue, 13 * NS_PER_S - 1) == {}
    assert reasons(queue, 13 * NS_PER_S) == {"tight": "deadline"}


def test_no_request_waits_longer_than_the_limit_of_its_class() -> None:
    queue = queue_of(entry("s"), entry("i", "interactive"), standard=ServiceClassConfig(NS_PER_S, 5 * NS_PER_S))
    assert queue.next_time() == 5 * NS_PER_S
    assert reasons(queue, 5 * NS_PER_S) == {"s": "queue_timeout"}
    assert "i" in queue and "s" not in queue


def test_a_refusal_says_when_to_come_back() -> None:
    for wait_s, after_s in ((61.2, 60.0), (60.5, 60.0)):
        queue = queue_of(entry("first", tokens=1000))
        queue.on_load(wait_s * NS_PER_S / 1000)
        refusal = queue.offer(entry("a"), 0)
        assert refusal is not None and isinstance(refusal.error, OverloadedError)
        assert refusal.retry_after_s == refusal.error.retry_after_s == after_s
        assert refusal.error.code == "overloaded"


@pytest.mark.parametrize(("queue_s", "after_s"), [(0.0, 1), (0.4, 1), (1.0, 1), (1.2, 2), (59.5, 60)])
def test_a_full_queue_asks_for_whole_seconds_until_it_has_passed_and_for_one_at_least(
    queue_s: float, after_s: int
) -> None:
    queue = queue_of(entry("first", tokens=1000), max_queued=2)
    queue.on_load(queue_s * NS_PER_S / 1000)
    refusal = queue.offer(entry("a"), 0)
    assert refusal is not None and refusal.reason == "queue_full"
    assert refusal.retry_after_s == after_s


def test_wrong_settings_and_double_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_queued is 0"):
        AdmissionConfig(max_queued=0)
    with pytest.raises(ConfigError, match="queue_percent is 101"):
        ServiceClassConfig(1, 1, 101)
    with pytest.raises(InvalidRequestError, match="service_class is 'gold'"):
        entry("a", "gold")
    queue = queue_of(entry("a"))
    with pytest.raises(ConfigError, match="in use"):
        queue.offer(entry("a"), 0)
    queue.remove("unknown")


def test_passing_by_an_empty_queue_charges_what_waiting_there_would() -> None:
    rng = random.Random(3)
    waited, passed = AdmissionQueue(), AdmissionQueue()
    for number in range(200):
        tenant = f"tenant {rng.randrange(5)}"
        request = entry(str(number), tenant=tenant, tokens=rng.randrange(1, 500), arrival_ns=number)
        assert waited.offer(request, number) is None
        assert waited.next(number, 10**6) == str(number)
        assert passed.pass_by(request, number) is None
        tokens = rng.randrange(200)
        for queue in (waited, passed):
            queue.on_service(tenant, tokens)
        tenants = [f"tenant {other}" for other in range(5)]
        assert [waited.service(other) for other in tenants] == [passed.service(other) for other in tenants]


@law(weight=0.1)
def test_whether_newcomers_pass_by_an_empty_queue_changes_no_dispatch(seed: int) -> None:
    rng = random.Random(seed)
    waited, passed = AdmissionQueue(), AdmissionQueue()
    for number in range(120):
        now, headroom = number * NS_PER_S, rng.randrange(4)
        for_batch = headroom - rng.randrange(3)
        service_class, tenant = rng.choice(SERVICE_CLASSES), f"tenant {rng.randrange(3)}"
        request = entry(str(number), service_class, tenant, rng.randrange(1, 500), arrival_ns=now)
        assert waited.offer(request, now) is None
        dispatched: list[list[str]] = [[], []]
        if passed.may_pass_by(service_class, headroom, for_batch):
            assert passed.pass_by(request, now) is None
            dispatched[1].append(request.request_id)
        else:
            assert passed.offer(request, now) is None
        for queue, names in zip((waited, passed), dispatched, strict=True):
            room = (headroom - len(names), for_batch - len(names))
            while (name := queue.next(now, *room)) is not None:
                names.append(name)
                room = (room[0] - 1, room[1] - 1)
        assert dispatched[0] == dispatched[1]


def test_equal_requests_go_in_the_order_in_which_they_came_whatever_their_names() -> None:
    names = ["m", "z", "a", "q"]
    assert drain(queue_of(*(entry(name) for name in names))) == names


def test_a_request_that_left_and_came_again_waits_from_its_second_arrival() -> None:
    queue = queue_of(entry("a", priority=-5), entry("b"), standard=ServiceClassConfig(NS_PER_S, 5 * NS_PER_S))
    queue.remove("a")
    assert queue.offer(entry("a", arrival_ns=NS_PER_S), NS_PER_S) is None
    assert reasons(queue, 5 * NS_PER_S) == {"b": "queue_timeout"}
    assert reasons(queue, 6 * NS_PER_S - 1) == {}
    assert reasons(queue, 6 * NS_PER_S) == {"a": "queue_timeout"}
    queue = queue_of(entry("a", priority=-5), entry("b"))
    queue.remove("a")
    assert queue.offer(entry("a"), 0) is None
    assert drain(queue) == ["b", "a"]


@law(weight=0.2)
def test_requests_expire_exactly_when_their_time_is_up_whatever_left_before_them(seed: int) -> None:
    rng = random.Random(seed)
    queue = AdmissionQueue(AdmissionConfig(standard=OPEN))
    due = {str(number): rng.randrange(1, 1000) * NS_PER_S for number in range(300)}
    for name, deadline_ns in due.items():
        assert queue.offer(entry(name, deadline_ns=deadline_ns), 0) is None
    for name in rng.sample(sorted(due), 260):
        queue.remove(name)
        del due[name]
    while due:
        now = queue.next_time()
        assert now == min(due.values())
        assert set(reasons(queue, now - 1)) == set()
        expired = set(reasons(queue, now))
        assert expired == {name for name, deadline_ns in due.items() if deadline_ns == now}
        for name in expired:
            del due[name]
    assert queue.next_time() is None


@law(weight=0.05)
def test_room_is_how_many_requests_of_a_class_are_taken(seed: int) -> None:
    rng = random.Random(seed)
    classes = [
        ServiceClassConfig(OPEN.max_wait_ns, OPEN.max_queue_ns, queue_percent=rng.choice((30, 80, 100))) for _ in "abc"
    ]
    queue = AdmissionQueue(AdmissionConfig(*classes, max_queued=rng.randint(1, 30)))
    for number in range(rng.randint(0, 40)):
        queue.offer(entry(f"before-{number}", rng.choice(SERVICE_CLASSES)), 0)
    service_class = rng.choice(SERVICE_CLASSES)
    room = queue.room(service_class)
    taken = [queue.offer(entry(f"new-{number}", service_class), 0) is None for number in range(60)]
    assert taken == [True] * room + [False] * (60 - room)
