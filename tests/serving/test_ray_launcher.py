"""Workers that Ray starts: the real launcher, actor, agents and connections; a make-believe Ray and model. At the end
the real Ray, where it is installed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_joining_worker import PROGRAM
from fake_ray import FakeRay
from test_join import ask, expected, ready, tokens, until

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.errors import ConfigError, WorkerError
from diptych.control.planner.planner_events import AddWorker, RemoveWorker
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.failures.planner_guard import PlannerGuard, PlannerParts
from diptych.serving.fleet import launched_worker
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_planner import FleetPlanner
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.launched_worker import JobLauncher, LaunchedWorker
from diptych.serving.fleet.launchers import launcher_of
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.link.engine_options import EngineOptions, MemoryOptions
from diptych.serving.ray.ray_jobs import RayJobs, import_ray
from diptych.serving.ray.ray_options import RayOptions
from diptych.serving.ray.worker_actor import WorkerActor
from diptych.tls.shared_key import read_key_file

OPTIONS = EngineOptions(memory=MemoryOptions(kv_cache_bytes=32 * 2**20))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_worker, "FIRST_PAUSE_S", 0.05)


@asynccontextmanager
async def fleet_on(ray: Any, key_file: Path, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """A front end whose workers Ray starts."""
    own = {name: settings.pop(name) for name in ("address", "num_cpus", "wait_s") if name in settings}
    program = settings.pop("program", PROGRAM)
    options = RayOptions(key_file=key_file, **{"address": "here", **own})
    join = JoinOptions("127.0.0.1:0", read_key_file(key_file))
    decisions = cluster_config(disaggregate=settings.pop("disaggregate", "auto"))
    settings = {"heartbeat_timeout_s": 2.0, **settings}
    fleet = FleetOptions(join=join, ray=options, cluster=decisions, **settings)
    launcher = JobLauncher(RayJobs(options, ray), options, join, program)
    llm = AsyncLLM(OPTIONS, Fleet(OPTIONS, fleet, launcher))
    await llm.start(wait=False)
    try:
        yield llm
    finally:
        await llm.shutdown()


def child(ray: FakeRay, number: int) -> int:
    """The process id that the actor of this number in time has started."""
    return int(ray.actors[number].instance._process.pid)


def is_running(pid: int) -> bool:
    """Whether a child of this process still runs."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@pytest.mark.system
@pytest.mark.asyncio
async def test_ray_starts_the_workers_and_they_end_with_the_front_end(key_file: Path) -> None:
    ray = FakeRay(num_cpus=2)
    async with fleet_on(ray, key_file, prefill=1, decode=1, disaggregate="always") as llm:
        await ready(llm)
        assert tokens(await ask(llm)) == expected()
        assert llm.fleet.core.counts["handoffs"] == 1
        assert [actor.options["scheduling_strategy"] for actor in ray.actors] == ["SPREAD"] * 2
        assert [llm.fleet.role(number) for number in (0, 1)] == ["prefill", "decode"]
        children = [actor.instance._process for actor in ray.actors]
    assert not ray.is_connected
    for process in children:
        await asyncio.to_thread(process.wait, 30)


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_worker_that_dies_is_started_again_and_its_streams_go_on(key_file: Path) -> None:
    ray = FakeRay(num_cpus=2)
    async with fleet_on(ray, key_file, both=2) as llm:
        await ready(llm)
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        streams = [asyncio.create_task(ask(llm, 400)) for _ in range(4)]
        await asyncio.sleep(0.1)
        os.kill(child(ray, 0), signal.SIGKILL)
        assert [tokens(output) for output in await asyncio.gather(*streams)] == [expected(400)] * 4
        await until(lambda: len(ray.actors) == 3 and len(llm.fleet.core.members.up) == 2)
        assert ray.actors[0].is_dead  # so that its CPU is free
        assert [port.number for port in llm.fleet.workers] == [0, 1]


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_dead_host_is_noticed_by_its_silence_before_ray_notices(key_file: Path) -> None:
    """Agent and worker stop at once, and Ray goes on to think that they are well."""
    ray = FakeRay(num_cpus=2)
    async with fleet_on(ray, key_file, both=2, heartbeat_timeout_s=1.0) as llm:
        await ready(llm)
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        streams = [asyncio.create_task(ask(llm, 400)) for _ in range(4)]
        await asyncio.sleep(0.1)
        os.kill(child(ray, 1), signal.SIGSTOP)
        assert [tokens(output) for output in await asyncio.gather(*streams)] == [expected(400)] * 4
        await until(lambda: llm.fleet.workers[1].state is WorkerState.LOST)
        assert len(ray.actors) == 2
        os.kill(child(ray, 1), signal.SIGCONT)  # it was not dead: it comes back as what it was
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        assert len(ray.actors) == 2


@pytest.mark.system
@pytest.mark.asyncio
async def test_an_actor_that_dies_takes_its_worker_with_it(key_file: Path) -> None:
    ray = FakeRay(num_cpus=2)
    async with fleet_on(ray, key_file, both=2) as llm:
        await ready(llm)
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        process = ray.actors[0].instance._process
        ray.actors[0].die()
        await asyncio.to_thread(process.wait, 30)
        await until(lambda: len(ray.actors) == 3 and len(llm.fleet.core.members.up) == 2)
        assert tokens(await ask(llm)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
async def test_workers_are_added_and_removed_through_ray(key_file: Path) -> None:
    ray = FakeRay(num_cpus=2)
    async with fleet_on(ray, key_file, both=1, max_workers=3) as llm:
        await ready(llm)
        changes = llm.fleet.changes
        assert await changes.add() == 1
        assert llm.fleet.core.members.is_usable(1)
        process = ray.actors[0].instance._process
        await changes.remove(0)
        assert await asyncio.to_thread(process.wait, 30) == 0  # it was asked to end
        assert ray.actors[0].is_dead
        assert tokens(await ask(llm)) == expected()
        assert await changes.add() == 0  # the number, and the room, of the one that was removed
        assert len(ray.actors) == 3


@pytest.mark.system
@pytest.mark.asyncio
async def test_the_planner_adds_and_removes_through_ray(key_file: Path, tmp_path: Path) -> None:
    ray = FakeRay(num_cpus=3)
    async with fleet_on(ray, key_file, both=1, max_workers=3) as llm:
        await ready(llm)
        told: list[Any] = []

        class Watch:
            def shape(self, worker: int) -> str:
                return "chunked"

        parts = PlannerParts(None, Watch())  # type: ignore[arg-type]
        guard = PlannerGuard(lambda: parts, llm.fleet.failures, tmp_path)
        planner = FleetPlanner(guard, llm.fleet.changes, None, lambda: 0)  # type: ignore[arg-type]
        planner._tell = told.append  # type: ignore[method-assign]
        await planner._change([AddWorker("both", "chunked")], parts)
        assert sorted(llm.fleet.core.members.up) == [0, 1]
        await planner._change([RemoveWorker(0)], parts)
        assert sorted(llm.fleet.core.members.up) == [1]
        assert [event.error for event in told] == ["", ""]


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_cluster_without_room_is_named(key_file: Path) -> None:
    ray = FakeRay(num_cpus=1)
    async with fleet_on(ray, key_file, both=1, max_workers=3, wait_s=1.0) as llm:
        await ready(llm)
        with pytest.raises(WorkerError, match=r"no room for diptych-worker-1-\w+ \(1 CPUs, 0 GPUs\) for 1 s"):
            await llm.fleet.changes.add()
        assert ray.actors[1].is_dead
        assert tokens(await ask(llm)) == expected()


@pytest.mark.asyncio
async def test_a_worker_that_cannot_start_is_the_fleets_failure(key_file: Path) -> None:
    ray = FakeRay(num_cpus=1)
    async with fleet_on(ray, key_file, both=1, program=("-c", "raise SystemExit(3)")) as llm:
        with pytest.raises(WorkerError, match="worker 0 never became ready: it has ended with status 3"):
            await ready(llm)


@pytest.mark.asyncio
async def test_a_cluster_that_is_not_there_is_named(key_file: Path) -> None:
    jobs = RayJobs(RayOptions(key_file=key_file, address="192.0.2.1:6379"), FakeRay(1))
    with pytest.raises(ConfigError, match=r"ray_address is 192.0.2.1:6379, and no Ray cluster can be had there: Could"):
        await jobs.open()


@pytest.mark.asyncio
async def test_nobody_else_gets_the_number_of_a_launched_worker(key_file: Path) -> None:
    join = JoinOptions("127.0.0.1:0", read_key_file(key_file))
    worker = LaunchedWorker(0, "both", RayJobs(RayOptions(key_file=key_file), FakeRay(0)), lambda agent: [])
    assert worker.site.role == "both"
    fleet = FleetOptions(join=join, ray=RayOptions(key_file=key_file))
    assert fleet.roles == ("both",)
    assert isinstance(launcher_of(FleetOptions()), LocalLauncher)


def test_the_actor_runs_python_and_reports_its_status() -> None:
    actor = WorkerActor()
    actor.leave = lambda: None  # type: ignore[method-assign]
    assert actor.begin(["-c", "import sys; sys.exit(len(sys.stdin.read()))"]) > 0
    assert actor._process is not None
    assert actor._process.stdin is not None
    actor._process.stdin.close()
    assert actor.wait() == 0


def test_settings_of_ray_are_checked(key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"ray_cpus is -1; it must be at least 0"):
        RayOptions(key_file=key_file, num_cpus=-1)
    with pytest.raises(ConfigError, match=r"ray_wait is 0; it must be more than 0"):
        RayOptions(key_file=key_file, wait_s=0)
    with pytest.raises(ConfigError, match="needs listen_workers"):
        FleetOptions(ray=RayOptions(key_file=key_file))
    join = JoinOptions("0.0.0.0:0", read_key_file(key_file))
    FleetOptions(ray=RayOptions(key_file=key_file), join=join)  # no worker is on this host
    with pytest.raises(ConfigError, match="ray_cpus says what a worker has"):
        FleetOptions(ray=RayOptions(key_file=key_file), join=join, cores_per_worker="2")


@contextmanager
def ray_cluster() -> Iterator[str]:
    """A real one on this host, with two CPUs; its address."""
    pytest.importorskip("ray", reason="ray is not installed (pip install '.[ray]')")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen([*command, f"--port={address.rpartition(':')[2]}"], env=environment)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


async def until_it_is_there(address: str) -> None:
    for _ in range(600):
        with socket.socket() as found:
            if found.connect_ex((address.partition(":")[0], int(address.rpartition(":")[2]))) == 0:
                await asyncio.sleep(5)  # for its first node
                return
        await asyncio.sleep(0.1)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(240)
async def test_the_real_ray_does_the_same(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, a completion; one is killed, its streams go on and Ray starts another; one is removed and added."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with ray_cluster() as address:
        await until_it_is_there(address)
        async with fleet_on(import_ray(), key_file, both=2, address=address, max_workers=2, wait_s=60.0) as llm:
            await asyncio.wait_for(asyncio.shield(llm.fleet.ready), 120)  # type: ignore[arg-type]
            await until(lambda: len(llm.fleet.core.members.up) == 2, 60)
            assert tokens(await ask(llm)) == expected()
            before = {port.number: port.agent for port in llm.fleet.workers if isinstance(port, LaunchedWorker)}
            streams = [asyncio.create_task(ask(llm, 400)) for _ in range(4)]
            await asyncio.sleep(0.1)
            os.kill(agent_process(before[0]), signal.SIGKILL)
            assert [tokens(output) for output in await asyncio.gather(*streams)] == [expected(400)] * 4
            await until(lambda: llm.fleet.num_restarts == 1 and len(llm.fleet.core.members.up) == 2, 60)
            await llm.fleet.changes.remove(1)
            assert tokens(await ask(llm)) == expected()
            assert await llm.fleet.changes.add() == 1
            children = [agent_process(port.agent) for port in llm.fleet.workers if isinstance(port, LaunchedWorker)]
        await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), 20)


def agent_process(agent: bytes) -> int:
    """The process id of ``diptych worker`` with this identity."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"--agent" in words and agent.hex().encode() in words:
                return int(path.parent.name)
    raise AssertionError("there is no such process")
