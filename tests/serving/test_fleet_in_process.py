"""The fleet over workers of this process: what reaches the core, what reaches the workers, what reaches the client."""

import logging
from array import array

import pytest
from in_process_fleet import ALWAYS, TOKENIZER, InProcessFleet, engine_options, expected, in_process_fleet
from in_process_worker import Host
from virtual_time import in_virtual_time, virtual_time

from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import ClusterEvent, Reported
from diptych.control.cluster.cluster_recording import RecordingClusterCore
from diptych.control.compute_share import ComputeShare
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError, UnavailableError, WorkerError
from diptych.control.events import (
    EVENT_CLASSES,
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    HandoffRevoked,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    Resized,
    TransferFailed,
)
from diptych.control.request import FinishReason
from diptych.control.router.hit_rate_monitor import MIN_ADMISSIONS
from diptych.control.slo import NS_PER_MS, NS_PER_S, LatencyBreakdown
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.worker_handle import WorkerState

PROMPT = list(range(100, 190))
LATENCY = LatencyBreakdown(1, 2, 3, 4)

EXAMPLES: dict[type, Event] = {
    type(event): event
    for event in (
        RequestQueued(1, "x", 2),
        RequestAdmitted(1, "x", 0, True),
        HandoffReserved(1, "x", 0, ((1, 2),)),
        HandoffRevoked(1, "x"),
        HandoffDelivered(1, "x", 10, 20),
        HandoffReleased(1, "x"),
        HandoffExpired(1, "x", True),
        TransferFailed(1, "x", False, "the link is gone"),
        FirstToken(1, "x"),
        RequestFinished(1, "x", FinishReason.LENGTH, 2, 0, 0, LATENCY, None),
        KVEvents(1, 1, (b"a",), ()),
        KVSnapshot(1, 1, (b"a",)),
        PeerForgotten(1, 1),
        Resized(1, ComputeShare((0,), 1)),
    )
}


class Spy:
    """What a ClusterCore is told."""

    def __init__(self, config: ClusterConfig) -> None:
        self.seen: list[ClusterEvent] = []
        self.core = RecordingClusterCore(config, lambda row: self.seen.append(row[1]))

    def reported(self) -> list[Event]:
        return [event for report in self.seen if isinstance(report, Reported) for event in report.events]


def spy_on(setup: InProcessFleet) -> Spy:
    """From now on the fleet asks a core whose inputs are remembered, and that knows the same workers."""
    fleet = setup.fleet
    spy = Spy(fleet.core.config)
    fleet.core = spy.core
    for worker in setup.workers:
        assert worker.engine is not None
        fleet.on_message(worker.number, worker.engine.ready())
    spy.seen.clear()
    return spy


# -- a request, served and handed over --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "cluster"), [({"both": 1}, cluster_config()), ({"prefill": 1, "decode": 1}, ALWAYS)]
)
@in_virtual_time
async def test_a_client_learns_that_a_worker_begins_with_its_prompt_before_it_is_computed(
    workers: dict[str, int], cluster: ClusterConfig
) -> None:
    async with in_process_fleet(cluster=cluster, **workers) as fleet:
        stream = fleet.client.submit("a", PROMPT)
        generation = fleet.client.generations["a"]
        assert not generation.is_admitted
        await fleet.when(lambda: generation.is_admitted)
        assert not stream.num_tokens
        assert await fleet.client.read("a") == expected(PROMPT, 8)


@in_virtual_time
async def test_a_request_is_served() -> None:
    async with in_process_fleet() as setup:
        stream = setup.client.submit("a", PROMPT)
        assert await setup.client.read("a") == expected(PROMPT, 8)
        assert (stream.finish_reason, stream.worker) == ("length", 0)
        assert stream.finished is not None and stream.finished.latency.num_output_tokens == 8
        await setup.check_nothing_is_left()


def test_an_embedding_is_computed_by_a_prefill_worker_and_again_when_that_is_lost() -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(prefill=2, decode=1, cluster=ALWAYS, transfer="tcp") as setup:
            streams = [setup.client.submit(f"v{at}", PROMPT, max_tokens=1, pooling="last") for at in range(4)]
            await setup.when(lambda: all(stream.worker >= 0 for stream in streams))
            assert {stream.worker for stream in streams} == {0, 1}
            setup.workers[0].lose("it is lost")
            for stream in streams:
                assert await setup.client.read(stream.request_id) == []
                assert array("f", stream.embedding).tolist() == [len(PROMPT), sum(PROMPT)]
                assert (stream.finish_reason, stream.num_tokens) == ("length", 0)
            assert setup.fleet.core.counts["handoffs"] == 0
            await setup.when(lambda: setup.workers[0].engine is not None)
            await setup.check_nothing_is_left()

    scenario()


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_the_prefill_worker_hands_over_to_the_decode_worker(transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(prefill=1, decode=1, cluster=ALWAYS, transfer=transfer) as setup:
            spy = spy_on(setup)
            stream = setup.client.submit("a", PROMPT)
            assert await setup.client.read("a") == expected(PROMPT, 8)
            assert stream.worker == 1
            await setup.check_nothing_is_left()
            kinds = [type(event) for event in spy.reported() if not isinstance(event, KVEvents)]
            assert kinds == [
                HandoffReserved, RequestQueued, RequestAdmitted, FirstToken, HandoffDelivered, HandoffReleased,
                RequestFinished,
            ]  # fmt: skip
            assert spy.core.counts["handoffs"] == 1
            assert setup.fleet.metrics.fleet.num_transfers == 1

    scenario()


@in_virtual_time
async def test_many_requests_at_once_get_their_own_tokens() -> None:
    async with in_process_fleet(prefill=1, decode=1, both=1) as setup:
        prompts = {f"r{number}": list(range(300, 300 + 20 * number + 5)) for number in range(12)}
        for request_id, prompt in prompts.items():
            setup.client.submit(request_id, prompt, max_tokens=15)
        for request_id, prompt in prompts.items():
            assert await setup.client.read(request_id) == expected(prompt, 15)
        await setup.check_nothing_is_left()


@in_virtual_time
async def test_a_second_prompt_finds_the_first_ones_blocks() -> None:
    async with in_process_fleet(both=2) as setup:
        setup.client.submit("a", PROMPT)
        await setup.client.read("a")
        stream = setup.client.submit("b", PROMPT)
        await setup.client.read("b")
        assert stream.cached_tokens == 64


@in_virtual_time
async def test_a_stop_string_ends_the_request_at_the_worker_too() -> None:
    async with in_process_fleet() as setup:
        text = TOKENIZER.decode(expected(PROMPT, 20))
        stream = setup.client.submit("a", PROMPT, max_tokens=500, stop=(text[9:13],))
        await setup.client.read("a")
        assert (stream.finish_reason, stream.stop_reason) == ("stop", text[9:13])
        assert stream.num_tokens < 20
        await setup.check_nothing_is_left()


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
@pytest.mark.parametrize("after", [None, HandoffReserved, RequestQueued, FirstToken, HandoffDelivered, HandoffReleased])
def test_a_cancel_in_each_state_frees_everything(after: type[Event] | None, transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(prefill=1, decode=1, cluster=ALWAYS, transfer=transfer) as setup:
            spy = spy_on(setup)
            setup.client.submit("a", PROMPT, max_tokens=100)
            if after is not None:
                await setup.when(lambda: any(isinstance(event, after) for event in spy.reported()))
            setup.client.leave("a")
            assert len(setup.fleet.streams) == 0
            await setup.check_nothing_is_left()
            setup.client.submit("b", PROMPT)
            assert await setup.client.read("b") == expected(PROMPT, 8)

    scenario()


# -- workers that are lost --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_lost_workers_request_goes_on_with_its_tokens_so_far() -> None:
    async with in_process_fleet(both=2) as setup:
        stream = setup.client.submit("a", PROMPT, max_tokens=30)
        await setup.when(lambda: stream.num_tokens == 7)
        lost = stream.worker
        setup.workers[lost].lose()
        assert await setup.client.read("a") == expected(PROMPT, 30)
        assert (stream.worker, stream.attempt_id) == (1 - lost, "a~1")
        assert stream.finished is not None and stream.finished.latency.num_output_tokens == 30
        await setup.when(lambda: len(setup.fleet.core.members.up) == 2)
        assert setup.fleet.num_restarts == 1
        assert setup.fleet.metrics.num_worker_losses == 1
        await setup.check_nothing_is_left()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("after", [HandoffReserved, FirstToken, HandoffDelivered])
@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_either_worker_of_a_handoff_may_be_lost_at_any_time(after: type[Event], lost: int, transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(prefill=1, decode=1, cluster=ALWAYS, transfer=transfer) as setup:
            spy = spy_on(setup)
            setup.client.submit("a", PROMPT, max_tokens=20)
            await setup.when(lambda: any(isinstance(event, after) for event in spy.reported()))
            setup.workers[lost].lose()
            assert await setup.client.read("a") == expected(PROMPT, 20)
            await setup.when(lambda: len(spy.core.members.up) == 2)
            await setup.check_nothing_is_left()

    scenario()


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_a_prompt_whose_blocks_a_stream_needs_is_served_by_its_next_attempt(transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(prefill=1, decode=1, cluster=ALWAYS, transfer=transfer) as setup:
            spy = spy_on(setup)
            setup.client.submit("a", PROMPT, max_tokens=20)
            await setup.when(lambda: any(isinstance(event, HandoffReserved) for event in spy.reported()))
            setup.workers[1].report(HandoffRevoked(setup.time.now, "a"))
            assert await setup.client.read("a") == expected(PROMPT, 20)
            assert spy.core.counts["revoked"] == spy.core.counts["handoffs"] == 1
            assert not spy.core.counts["retried"]
            await setup.check_nothing_is_left()

    scenario()


@in_virtual_time
async def test_without_any_worker_a_request_waits_for_the_next_one() -> None:
    async with in_process_fleet() as setup:
        setup.workers[0].lose()
        await setup.when(lambda: not setup.fleet.is_routable)
        setup.client.submit("a", PROMPT)
        assert await setup.client.read("a") == expected(PROMPT, 8)


@in_virtual_time
async def test_a_request_that_no_worker_takes_in_time_fails_by_the_fleets_timer() -> None:
    async with in_process_fleet(
        cluster=ClusterConfig(park_ns=5 * NS_PER_S, max_prefills_in_flight_per_worker=0)
    ) as setup:
        setup.workers[0].lose(restart_ns=60 * NS_PER_S)
        await setup.when(lambda: not setup.fleet.is_routable)
        begun_ns = setup.time.now
        setup.client.submit("a", PROMPT)
        with pytest.raises(UnavailableError, match="no worker"):
            await setup.client.read("a")
        assert 0 <= setup.time.now - begun_ns - 5 * NS_PER_S <= NS_PER_MS


@in_virtual_time
async def test_a_broken_transfer_begins_another_attempt() -> None:
    async with in_process_fleet(prefill=1, decode=1, cluster=ALWAYS, transfer="tcp") as setup:
        spy = spy_on(setup)
        setup.client.submit("a", PROMPT)
        engine = setup.workers[0].engine
        assert engine is not None
        await setup.when(lambda: engine.connector.is_sending("a"))
        engine.connector.break_off("a")
        assert await setup.client.read("a") == expected(PROMPT, 8)
        assert spy.core.counts["lost_transfer"] == 1
        await setup.check_nothing_is_left()


@in_virtual_time
async def test_with_on_failure_fail_the_client_gets_the_error() -> None:
    async with in_process_fleet(cluster=cluster_config(on_failure="fail")) as setup:
        stream = setup.client.submit("a", PROMPT, max_tokens=30)
        await setup.when(lambda: stream.num_tokens == 3)
        setup.workers[0].lose()
        with pytest.raises(WorkerError, match="on_failure is fail"):
            await setup.client.read("a")


@in_virtual_time
async def test_a_worker_that_refuses_to_start_refuses_the_fleet() -> None:
    time = virtual_time()
    host = Host(time, refusal={1: ConfigError("the model is not there", param="model")})
    fleet = Fleet(engine_options(), FleetOptions(both=2), host, clock=time.clock)
    await fleet.start()
    assert fleet.ready is not None
    with pytest.raises(ConfigError, match="not there"):
        await fleet.ready
    assert not fleet.is_routable
    await fleet.stop()


# -- roles, alarms, and what the core hears ---------------------------------------------------------------------------


@in_virtual_time
async def test_a_changed_role_sends_the_next_request_elsewhere_and_survives_a_restart() -> None:
    async with in_process_fleet(prefill=1, decode=1, both=1, cluster=ALWAYS) as setup:
        setup.fleet.changes.change_role(1, "prefill")
        setup.fleet.changes.change_role(0, "decode")
        setup.fleet.changes.change_role(2, "decode")
        stream = setup.client.submit("a", PROMPT, max_tokens=20)
        assert stream.request_id in setup.fleet.streams
        await setup.client.read("a")
        assert stream.worker != 1 and setup.fleet.core.counts["handoffs"] == 1
        assert setup.fleet.timeline.workers[1].role == "prefill"
        setup.workers[1].lose()
        await setup.when(lambda: setup.workers[1].num_restarts == 1 and 1 in setup.fleet.core.members.up)
        assert setup.fleet.core.members.infos[1].role == "prefill"
        assert list(setup.fleet.metrics.fleet.view().roles) == ["decode", "prefill", "decode"]


@in_virtual_time
async def test_the_log_says_when_the_routers_picture_is_wrong_and_when_it_is_right_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with in_process_fleet(both=2) as setup:
        with caplog.at_level(logging.WARNING, logger="diptych.serving.fleet.fleet"):
            for number in range(MIN_ADMISSIONS):
                stream = setup.client.submit(f"wrong{number}", [number + 7] * 64)
                wrong = RequestAdmitted(setup.time.now, stream.request_id, 64, True)
                setup.workers[stream.worker].report(wrong)  # the cache holds nothing of it
                setup.client.leave(stream.request_id)
            assert len(caplog.records) == 1 and "predicted wrongly" in caplog.text
            assert setup.fleet.metrics.fleet.view().alarm
            for number in range(MIN_ADMISSIONS):
                setup.client.submit(f"right{number}", [number + 100] * 1500, max_tokens=1)
                await setup.client.read(f"right{number}")
            assert len(caplog.records) == 2 and "right again" in caplog.records[-1].message
        assert not setup.fleet.metrics.fleet.view().alarm


def test_there_is_an_example_of_every_event_that_the_core_reads() -> None:
    assert set(EXAMPLES) == ClusterCore().reads


@pytest.mark.parametrize("kind", sorted(ClusterCore().reads, key=lambda kind: kind.__name__))
def test_every_event_that_the_core_reads_is_delivered(kind: type) -> None:
    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(both=2) as setup:
            spy = spy_on(setup)
            setup.workers[1].report(EXAMPLES[kind])
            assert spy.seen == [Reported(1, [EXAMPLES[kind]])]

    scenario()


@in_virtual_time
async def test_events_and_load_reach_the_core_together_in_their_order_and_others_are_left_out() -> None:
    async with in_process_fleet(both=2) as setup:
        spy = spy_on(setup)
        load = LoadReport(1, 2, 3, 4, 5.0, 6.0)
        known = list(EXAMPLES.values())
        others = [kind for kind in EVENT_CLASSES.values() if kind not in spy.core.reads]
        assert others, "the core reads everything: then the filter in Fleet can go"
        setup.workers[0].report(*known, load=load)
        assert spy.seen == [Reported(0, known, load)]


@in_virtual_time
async def test_the_timeline_keeps_the_states_of_a_workers_life() -> None:
    async with in_process_fleet() as setup:
        timeline = setup.fleet.timeline
        assert timeline.workers[0].state == WorkerState.READY
        setup.workers[0].lose("it fell over")
        await setup.when(lambda: timeline.workers[0].state == WorkerState.LOST)
        assert "it fell over" in timeline.workers[0].detail
        await setup.when(lambda: timeline.workers[0].state == WorkerState.READY)
    assert timeline.workers[0].state == WorkerState.STOPPED
