"""One script, two drivers: the live Fleet over workers of this process, and the simulator. What they tell their
ClusterCores must be the same, event for event, to the nanosecond."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec
import pytest
from fleet_scripts import BYTES_PER_TOKEN, MS, SLO, Script, play, prompt_of, random_script, request
from in_process_fleet import ALWAYS, BLOCK_SIZE, engine_options
from in_process_worker import COST, MAX_MODEL_LEN, Host
from tests.laws import law
from virtual_time import in_virtual_time, virtual_time

from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.cluster.cluster_events import (
    CLUSTER_EVENT_CLASSES,
    Cancelled,
    DrainStarted,
    Reported,
    RoleChanged,
    WorkerDown,
    WorkerUp,
)
from diptych.control.cluster.cluster_recording import RecordingClusterCore, Row, canonical_command
from diptych.control.commands import End, Restarted
from diptych.control.compute_share import ComputeShare
from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.slo import NS_PER_S
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.simulation.fleet.links import LINKS
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.fleet.simulated_executor import block_hashes
from diptych.simulation.fleet.warmed_up_model import warmed_up_model
from diptych.simulation.scenario import WorkerChange

# -- the two drivers --------------------------------------------------------------------------------------------------


def simulated(script: Script, *, fast_forward: bool, depth: int = 1) -> list[Row]:
    """What the simulator's core was told, and what it said."""
    rows: list[Row] = []
    cluster = SimulatedCluster(replace(script.scenario(fast_forward=fast_forward), depth=depth))
    cluster.core = RecordingClusterCore(cluster.core.config, rows.append)
    cluster.run()
    cluster.core.check_idle()
    return rows


def live(script: Script, *, depth: int = 1) -> list[Row]:
    """The same of the live fleet."""
    rows: list[Row] = []

    @in_virtual_time
    async def run() -> None:
        time, scenario = virtual_time(), script.scenario(fast_forward=False)
        host = Host(
            time, model=lambda config: warmed_up_model(config, COST), bytes_per_token=BYTES_PER_TOKEN, depth=depth
        )
        if script.transfer == "tcp":
            bytes_per_s, latency_ns = LINKS[script.link]
            host.travel_ns = lambda num_bytes: 2 * latency_ns + -(-num_bytes * NS_PER_S // bytes_per_s)
        fleet = Fleet(
            engine_options(slo=script.slo, max_model_len=MAX_MODEL_LEN),
            script.workers,
            host,
            clock=time.clock,
            processor=script.machine,
        )
        await fleet.start()
        fleet.core = RecordingClusterCore(scenario.cluster_config, rows.append)
        await play(script, fleet, host)
        fleet.core.check_idle()
        await fleet.stop()

    run()
    return rows


# -- what is compared -------------------------------------------------------------------------------------------------


def block_names(script: Script) -> dict[bytes, bytes]:
    """The simulator's name of each block that the live fleet hashes."""
    names: dict[bytes, bytes] = {}
    for number, spec in enumerate(script.requests):
        hashes = hash_blocks(prompt_of(number, spec), BLOCK_SIZE)
        names |= dict(zip(hashes, block_hashes(spec, spec.prompt_tokens, BLOCK_SIZE), strict=True))
    return names


def in_one_order(rows: list[Row]) -> list[Row]:
    """Reports of one nanosecond that brought no commands by their workers' numbers: which is first must not matter."""

    def worker_of(row: Row) -> int:
        return row[1].worker if isinstance(row[1], Reported) and not row[2] else -1

    ordered: list[Row] = []
    for (_, is_report), tied in groupby(rows, key=lambda row: (row[0], worker_of(row) >= 0)):
        reports = list(tied)
        ordered += sorted(reports, key=worker_of) if is_report else reports
    return ordered


def plain(row: Row, names: Mapping[bytes, bytes], *, has_losses: bool = False) -> tuple[Any, ...]:
    """A row as data: when, what, its contents, and the commands. Left out is what the drivers know differently:

    why a worker is down that has not crashed: in words, of the process that has seen it
    the host of a worker: in the simulator each is on one of its own, where they share no memory
    of a handoff, how much travelled and for how long: measured by the receiver, or by the sender
    of the progress at a loss or a change, all requests but those that lose their attempt
    with has_losses, how many tokens a client has that leaves: where its worker has just died, the simulator only knows
    of the first
    """
    now, event, commands = row
    fields: Any = msgspec.to_builtins(event, builtin_types=(bytes,))
    if isinstance(event, Reported):
        named = zip(event.events, fields["events"], strict=True)
        for happened in fields["events"]:
            for name in ("num_bytes", "transfer_ns", "wire_ns"):
                happened.pop(name, None)
        fields["events"] = [(type(happened).__name__, values) for happened, values in named]
    elif isinstance(event, WorkerUp):
        del fields["info"]["host"]
    elif isinstance(event, WorkerDown | RoleChanged | DrainStarted):
        lost = {command.request_id for command in commands if isinstance(command, Restarted | End)}
        if isinstance(event, WorkerDown) and not event.crashed:
            del fields["why"]
        fields["progress"] = {name: count for name, count in event.progress.items() if count and name in lost}
    elif isinstance(event, Cancelled) and has_losses:
        del fields["num_tokens"]
    said = [canonical_command(command) for command in commands]
    return now, type(event).__name__, _renamed(fields, names), said


def _renamed(value: Any, names: Mapping[bytes, bytes]) -> Any:
    if isinstance(value, bytes):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: _renamed(inner, names) for key, inner in value.items()}
    return [_renamed(inner, names) for inner in value] if isinstance(value, list | tuple) else value


def compare(script: Script, *, fast_forward: bool, depth: int = 1) -> None:
    """Run both and compare."""
    names, has_losses = block_names(script), bool(script.losses)
    told_live = live(script, depth=depth)
    told_simulated = simulated(script, fast_forward=fast_forward, depth=depth)
    expected = [plain(row, names, has_losses=has_losses) for row in in_one_order(told_simulated)]
    actual = [plain(row, names, has_losses=has_losses) for row in in_one_order(told_live)]
    for at, (here, there) in enumerate(zip(actual, expected, strict=False)):
        before = "\n".join(str(row[:2]) for row in actual[max(0, at - 5) : at])
        assert here == there, f"row {at}\nlive:      {here}\nsimulated: {there}\nafter\n{before}"
    assert len(actual) == len(expected), (actual[len(expected) :], expected[len(actual) :])


# -- scripts ----------------------------------------------------------------------------------------------------------


SERVED = (
    request(1, 70, 12, stem=1),
    request(3.3, 200, 20, stem=1, shared_blocks=2),
    request(4.1, 1000, 3, priority=1),
    request(30, 40, 22, slo=SLO),
    request(31, 330, 20, stem=2, abort_after_ns=40 * MS),
    request(90, 64, 30, max_tokens=31, stem=3),
    request(91, 70, 15, stem=1, max_tokens=25),
    request(300, 900, 1, stem=2, shared_blocks=4),
    request(301, 5, 20, abort_after_ns=500),
)
SMALL_STEPS = SchedulerConfig(budget=BudgetConfig(max_batched_tokens=128), max_num_seqs=2)
SCRIPTS: dict[str, Script] = {
    "one worker": Script(SERVED, both=1),
    "two workers": Script(SERVED, both=2),
    "by load": Script(SERVED, both=2, cluster=cluster_config(routing="round_robin")),
    "one untouched request per worker": Script(
        SERVED, both=2, cluster=cluster_config(max_prefills_in_flight_per_worker=1)
    ),
    "prefill and decode": Script(SERVED, prefill=1, decode=1, cluster=ALWAYS),
    "prefill and decode where it is cheaper": Script(SERVED, prefill=1, decode=2, both=1),
    "a lost worker": Script(SERVED, both=2, losses=((45 * MS, 0, 100 * MS), (320 * MS, 1, 30 * MS))),
    "all workers lost": Script(SERVED, both=2, losses=((45 * MS, 0, 200 * MS), (46 * MS, 1, 250 * MS))),
    "a lost prefill worker": Script(SERVED, prefill=1, decode=1, cluster=ALWAYS, losses=((35 * MS, 0, 100 * MS),)),
    "a lost decode worker": Script(SERVED, prefill=1, decode=1, cluster=ALWAYS, losses=((35 * MS, 1, 100 * MS),)),
    "a decode worker lost before the prefill begins": Script(
        (request(1, 1000, 3), request(5, 40, 20)), prefill=1, decode=1, cluster=ALWAYS, losses=((15 * MS, 1, 100 * MS),)
    ),
    "copied KV, whose leases are renewed": Script(
        SERVED[3:],
        prefill=1,
        decode=1,
        link="ib400",
        cluster=replace(ALWAYS, lease_ns=12 * MS),
        losses=((306 * MS, 1, 50 * MS),),
    ),
    "no worker in time": Script(
        SERVED,
        both=1,
        cluster=replace(ClusterConfig(), max_prefills_in_flight_per_worker=0, park_ns=60 * MS),
        losses=((80 * MS, 0, 200 * MS),),
    ),
    "roles that change": Script(
        SERVED,
        prefill=1,
        decode=2,
        cluster=ALWAYS,
        changes=(WorkerChange(20 * MS, 1, "prefill"), WorkerChange(95 * MS, 0, "decode")),
    ),
    "workers that are drained and used again": Script(
        SERVED,
        prefill=1,
        decode=2,
        changes=(
            WorkerChange(33 * MS, 1, is_draining=True),
            WorkerChange(93 * MS, 1, is_draining=False),
            WorkerChange(94 * MS, 2, is_draining=True),
        ),
    ),
    "schedulers that change": Script(
        SERVED,
        both=2,
        losses=((95 * MS, 0, 50 * MS),),
        changes=(WorkerChange(5 * MS, 0, scheduler=SMALL_STEPS), WorkerChange(92 * MS, 1, scheduler=SMALL_STEPS)),
    ),
    "cores that move": Script(
        SERVED,
        both=2,
        changes=(
            WorkerChange(5 * MS, 0, share=ComputeShare((0, 1), 2)),
            WorkerChange(92 * MS, 0, share=ComputeShare((0,), 1)),
        ),
    ),
    "streams that give way": Script(
        (*(request(2 + number, 288 + number, 31 - number) for number in range(5)), request(65, 1500, 3)),
        groups=(
            WorkerGroup(name="small", max_model_len=512, kv_cache_tokens=256 * BLOCK_SIZE),
            WorkerGroup(name="large", max_model_len=2048, kv_cache_tokens=80 * BLOCK_SIZE),
        ),
        link="ib400",
        losses=((1 * MS, 0, 40 * MS),),
    ),
}


@pytest.mark.parametrize("fast_forward", [False, True], ids=["steps", "strides"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_drivers_tell_their_cores_the_same(name: str, fast_forward: bool) -> None:
    compare(SCRIPTS[name], fast_forward=fast_forward)


def test_the_scripts_hold_every_event_of_a_cluster() -> None:
    seen = {type(event) for script in SCRIPTS.values() for _, event, _ in live(script)}
    assert seen == set(CLUSTER_EVENT_CLASSES.values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_drivers_plan_alike_where_two_steps_are_under_way(name: str) -> None:
    compare(SCRIPTS[name], fast_forward=False, depth=2)


@law(weight=1.5)
def test_both_drivers_tell_their_cores_the_same_at_depth_2_at_random(seed: int) -> None:
    compare(random_script(seed), fast_forward=seed % 2 == 0, depth=2)


@law(weight=1.5)
def test_both_drivers_tell_their_cores_the_same_at_random(seed: int) -> None:
    compare(random_script(seed), fast_forward=seed % 2 == 0)
