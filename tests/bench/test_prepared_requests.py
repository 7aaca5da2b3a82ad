"""Bodies made ahead: how many, in which order, and those that must wait for an answer."""

from typing import Any

from diptych.bench.objectives import LatencyObjectives
from diptych.bench.prepared_requests import MOST_PREPARED, PREPARED, SOON_NS, PreparedRequests
from diptych.control.slo import NS_PER_MS
from diptych.workload.spec import RequestSpec


class CountedBodies:
    """Stands for Conversations. Requests of session 1 wait for an answer."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.delayed: list[int] = []

    def can_be_made(self, spec: RequestSpec) -> bool:
        return spec.session != 1

    def body(self, number: int, spec: RequestSpec, slo: LatencyObjectives) -> bytes:
        self.made.append(number)
        return b"%d" % number

    def delay(self, spec: RequestSpec) -> None:
        self.delayed.append(spec.arrival_ns)


def prepared(count: int, every_ns: int, session: int = -1) -> tuple[PreparedRequests, CountedBodies]:
    """Requests at equal distances, and what was made of them."""
    specs = (
        RequestSpec(arrival_ns=number * every_ns, prompt_tokens=1, output_tokens=1, session=session)
        for number in range(count)
    )
    bodies: Any = CountedBodies()
    return PreparedRequests(bodies, specs, lambda _: LatencyObjectives()), bodies


def prepare_all(requests: PreparedRequests, now_ns: int = 0) -> None:
    """As many ahead as it wants to."""
    while requests.prepare(now_ns):
        continue


def test_requests_come_in_order_with_their_bodies_made_once() -> None:
    requests, bodies = prepared(200, NS_PER_MS)
    prepare_all(requests)
    assert [(number, body) for number, _, body in requests] == [(number, b"%d" % number) for number in range(200)]
    assert bodies.made == list(range(200))


def test_of_rare_requests_a_few_are_made_ahead_and_of_frequent_ones_those_of_the_next_second() -> None:
    rare, bodies = prepared(10_000, SOON_NS)
    prepare_all(rare)
    assert len(bodies.made) == PREPARED
    frequent, bodies = prepared(10_000, NS_PER_MS)
    prepare_all(frequent)
    assert len(bodies.made) == SOON_NS // NS_PER_MS + 2
    burst, bodies = prepared(10_000, 0)
    prepare_all(burst)
    assert len(bodies.made) == MOST_PREPARED


def test_as_time_passes_more_are_made() -> None:
    requests, bodies = prepared(10_000, NS_PER_MS)
    prepare_all(requests)
    before = len(bodies.made)
    prepare_all(requests, 100 * NS_PER_MS)
    assert len(bodies.made) == before + 100


def test_those_that_are_due_are_counted() -> None:
    requests, _ = prepared(100, NS_PER_MS)
    prepare_all(requests)
    assert [requests.num_due(ms * NS_PER_MS) for ms in (-1, 0, 5, 1000)] == [0, 1, 6, 100]


def test_a_request_that_needs_an_answer_has_no_body_yet() -> None:
    requests, bodies = prepared(3, NS_PER_MS, session=1)
    assert [body for _, _, body in requests] == [None] * 3
    assert bodies.made == [] and bodies.delayed == [0, NS_PER_MS, 2 * NS_PER_MS]
