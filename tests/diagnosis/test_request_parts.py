"""The parts of a request sum to what was measured, to the nanosecond, whatever happened to it."""

import random
from dataclasses import replace

from diptych.control.errors import ConfigError
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import Slo
from diptych.diagnosis.adapters.recorded_file import records_of
from diptych.diagnosis.adapters.timeline_records import TimelineSource, end_of, newest, observe
from diptych.diagnosis.observed_arrivals import arrivals_of
from diptych.diagnosis.request_parts import PartsReader
from diptych.diagnosis.step_sums import NUM_USES, StepSums, split_step
from diptych.simulation.run import simulate_with_log
from diptych.timeline.records import AnswerRecord, RequestRecord, StepRecord
from tests.diagnosis.simulated_servers import Server, chat, server_with
from tests.laws import law
from tests.simulation.scenarios import random_scenario

TERMS = (1e6, 1e4, 1.0, 1e5, 10.0)


@law(weight=0.8)
def test_parts_sum_to_the_latencies_of_random_scenarios(seed: int) -> None:
    try:
        _, log = simulate_with_log(replace(random_scenario(seed), record_events=True))
    except ConfigError:
        return
    assert log is not None
    events = list(log)
    ends = {  # as the workers have it: the front end says an end of its own where it cannot hear of theirs
        event.request_id: event for worker, event in events if isinstance(event, RequestFinished) and worker >= 0
    }
    found = {parts.request_id: parts for parts in PartsReader(records_of(events, {}), {}, Slo()).requests()}
    completed = (FinishReason.LENGTH, FinishReason.STOP)
    assert found.keys() >= {name for name, end in ends.items() if end.reason in completed and "~" not in name}
    for parts in found.values():
        end = ends.get(parts.request_id)
        if end is None or any(name.startswith(f"{parts.request_id}~") for name in ends):
            continue  # tried again: its last attempt's latency is not the request's
        whole = parts.ttft_ns + parts.decode_ns
        assert whole == end.time_ns - parts.arrival_ns
        assert all(value >= 0 for account, value in parts.ttft.items()), parts
        assert all(value >= 0 for account, value in parts.decode.items()), parts
        if not end.latency.handoff_ns and end.latency.total_ns == whole:
            assert parts.ttft_ns == end.latency.ttft_ns


def test_the_sums_of_neighbouring_intervals_add_up() -> None:
    steps, now = [], 0
    rng = random.Random(3)
    for number in range(50):
        now += rng.choice([0, 0, 300_000])
        end = now + rng.randrange(10**5, 10**7)
        prefills = (("a", 0, rng.randrange(1, 300)),) if rng.random() < 0.4 else ()
        decodes = rng.randrange(1, 20) if not prefills or rng.random() < 0.6 else 0
        steps.append(StepRecord(number, 0, number, now, end, "", decodes, 50 * decodes, 0, prefills))
        now = end
    sums = StepSums([split_step(step, TERMS, 8, lambda request_id: False) for step in steps])
    for _ in range(200):
        early, middle, late = sorted(rng.randrange(-(10**6), now + 10**6) for _ in range(3))
        whole, first, second = sums.between(early, late), sums.between(early, middle), sums.between(middle, late)
        assert sum(whole[:NUM_USES]) == late - early
        assert all(a + b == c for a, b, c in zip(first, second, whole, strict=True))


def test_an_answer_adds_what_the_front_end_saw() -> None:
    seen = Server(chat(20, 100))
    records = list(seen.records())
    first = next(record for record in records if isinstance(record, RequestRecord) and record.what == "first_token")
    end = next(
        record
        for record in records
        if isinstance(record, RequestRecord) and record.what == "finished" and record.request_id == first.request_id
    )
    queued = next(record for record in records if getattr(record, "request_id", "") == first.request_id)
    assert isinstance(queued, RequestRecord)
    answer = AnswerRecord(
        10**6, 0, end.time_ns + 9000, first.request_id, queued.time_ns - 5000, first.time_ns + 2000,
        end.time_ns + 3000, num_output_tokens=40, reason="length",
    )  # fmt: skip
    parts = {parts.request_id: parts for parts in PartsReader([*records, answer], {}, Slo()).requests()}
    mine = parts[first.request_id]
    assert mine.ttft_ns == answer.first_token_ns - answer.submitted_ns
    assert mine.decode_ns == answer.last_token_ns - answer.first_token_ns
    assert (mine.ttft["delivery"], mine.decode["delivery"]) == (2000, 1000)


def test_a_worker_that_reads_its_clock_before_the_request_came_loses_no_nanosecond() -> None:
    records = [
        RequestRecord(1, 0, 100, "queued", "a", detail={"num_prompt_tokens": 8}),
        RequestRecord(2, 0, 100, "admitted", "a", detail={"num_cached_tokens": 0, "is_first": True}),
        StepRecord(3, 0, 0, 100, 1100, "prefill", 0, 0, 0, (("a", 0, 8),)),
        RequestRecord(4, 0, 1100, "first_token", "a"),
        RequestRecord(5, 0, 1100, "finished", "a", detail={"reason": "length", "num_output_tokens": 1}),
        AnswerRecord(6, 0, 1300, "a", 150, 1200, 1200, 8, 0, 1, "length"),
    ]
    [parts] = PartsReader(records, {}, Slo()).requests()
    assert parts.ttft_ns == 1050
    assert parts.ttft["prefill_own"] + parts.ttft["prefill_slow"] == 950


def test_newest_keeps_the_whole_life_of_what_ended_in_the_window() -> None:
    records = list(Server(chat(60, 120)).records())
    late, since_ns = newest(records, 2.0)
    whole = {parts.request_id: parts for parts in observe(records, TimelineSource(source="")).requests}
    found = observe(late, TimelineSource(source=""), since_ns)
    for parts in found.requests:
        assert parts.ttft_ns == whole[parts.request_id].ttft_ns
    assert 3 < len(found.requests) < 60


def test_arrivals_are_all_that_came_also_what_has_not_ended() -> None:
    def queued(at: int, name: str) -> RequestRecord:
        return RequestRecord(1, 0, at, "queued", name, detail={"num_prompt_tokens": 8})

    def step(end: int, *prefills: tuple[str, int, int], decodes: int = 0) -> StepRecord:
        return StepRecord(1, 0, 0, end - 10, end, "x", decodes, 0, 0, prefills)

    records = [
        queued(100, "early"),
        RequestRecord(1, 0, 101, "admitted", "early", detail={"num_cached_tokens": 3, "is_first": True}),
        step(110, ("early", 3, 5)),
        RequestRecord(1, 0, 110, "first_token", "early"),
        RequestRecord(1, 0, 150, "finished", "early", detail={"reason": "length", "num_output_tokens": 5}),
        queued(200, "ends"),
        step(210, ("ends", 0, 8)),
        RequestRecord(1, 0, 210, "first_token", "ends"),
        queued(220, "runs"),
        step(230, ("runs", 0, 8), decodes=1),
        RequestRecord(1, 0, 230, "first_token", "runs"),
        step(240, decodes=2),
        step(250, decodes=2),
        RequestRecord(1, 0, 250, "finished", "ends", detail={"reason": "stop", "num_output_tokens": 4}),
        queued(255, "waits"),
    ]
    own = Slo(5, 6)
    found = {arrival.request_id: arrival for arrival in arrivals_of(records, own, since_ns=160)}
    assert list(found) == ["early", "ends", "runs", "waits"]
    assert [arrival.is_early for arrival in found.values()] == [True, False, False, False]
    assert all(arrival.judged == own and arrival.spec.slo is None for arrival in found.values())
    assert found["early"].spec.prompt_tokens == 5
    more = (5 + 4 + 3) // 2  # tokens so far, over the answers that ended
    assert [arrival.spec.output_tokens for arrival in found.values()] == [5, 4, 3 + more, more]


def test_newest_keeps_what_has_not_ended_and_what_it_ran_beside() -> None:
    records = list(Server(chat(60, 120)).records())
    last = max(record.time_ns for record in records if isinstance(record, RequestRecord) and record.what == "queued")
    cut = [record for record in records if end_of(record) <= last]
    late, since_ns = newest(cut, 1.0)
    seen = observe(late, TimelineSource(source=""), since_ns)
    ended = {parts.request_id for parts in seen.requests}
    assert ended and all(arrival.request_id in ended for arrival in seen.arrivals[:-20] if not arrival.is_early)
    assert {arrival.request_id for arrival in seen.arrivals} > ended


def test_a_handoff_is_its_own_account() -> None:
    seen = server_with("slow_transfer").observe()
    assert sum(parts.decode["handoff"] for parts in seen.requests) > 10**9
    assert seen.signals["transfer_s"] > 0.1
