"""Workers that a cluster manager starts on its hosts, and that join then.

The cluster manager places a process, stops it and reports its end; everything else goes over the connection that the
worker makes. A lost connection is noticed by the front end's own signs of life, long before a cluster manager finds out
that a host is dead: requests go on elsewhere at once, and a worker that can reach the front end again comes back. Only
when the cluster manager says that the process has ended, another is started.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from diptych.control.errors import DiptychError, WorkerError
from diptych.control.router.topology import Role
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.joined_worker import JoinedWorker
from diptych.serving.fleet.worker_handle import WorkerListener, WorkerSite, WorkerState
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.ray.ray_options import RayOptions

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.5, 30.0, 60.0  # between two starts
END_S = 10.0  # for a worker that was asked to end
PROGRAM = ("-c", "from diptych.cli.entry_point import main; main()", "worker")  # of the Python there


class Job(Protocol):
    """A process that was placed on a host."""

    async def wait(self) -> str:
        """Wait until the job has ended. Returns why, in words."""
        ...

    async def kill(self) -> None:
        """End it at once, wherever it is. One that has ended is left alone."""
        ...


class Jobs(Protocol):
    """A cluster manager."""

    async def open(self) -> str:
        """Connect; the address of this host, as the others see it. Raises ConfigError."""
        ...

    async def begin(self, name: str, arguments: Sequence[str]) -> Job:
        """Run Python with these arguments where there is room. Raises WorkerError when there is none, or it cannot."""
        ...

    async def close(self) -> None:
        """Disconnect; every job ends."""
        ...


class LaunchedWorker(JoinedWorker):
    """A WorkerHandle: one job after the other, and the connections that its agent makes. arguments: of the job whose
    agent has this identity."""

    def __init__(self, number: int, role: Role, jobs: Jobs, arguments: Callable[[bytes], Sequence[str]]) -> None:
        super().__init__(number, WorkerSite(role=role), secrets.token_bytes(16))
        self._jobs = jobs
        self._arguments = arguments
        self._job: Job | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, listener: WorkerListener) -> None:
        super().start(listener)
        self.state, self.agent = WorkerState.STARTING, secrets.token_bytes(16)
        name = f"the job of worker {self.number}"
        self._running = start_watched(self._run(), name, partial(listener.on_defect, name))

    async def stop(self, *, is_removed: bool = False) -> None:
        """Stop the worker; one that is removed is asked first. The process does not outlive its front end either."""
        await super().stop(is_removed=is_removed)
        running, self._running = self._running, None
        if running is None:
            return
        if is_removed and self._job is not None:
            await asyncio.wait([running], timeout=END_S)
        job = self._job
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        if job is not None:
            await job.kill()

    async def _run(self) -> None:
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            try:
                self._job = await self._jobs.begin(self._name, self._arguments(self.agent))
                why = await self._job.wait()
            except DiptychError as error:
                why = error.message
            self._job = None
            if self.state is WorkerState.STOPPED:
                return
            if self.ready is not None and not self.ready.done():
                self.state = WorkerState.STOPPED
                self.ready.set_exception(WorkerError(f"worker {self.number} never became ready: {why}"))
                return
            self._lose(why)
            pause_s = FIRST_PAUSE_S if loop.time() - begun_s > HEALTHY_S else pause_s
            logger.error("worker %d: %s; starting another in %.1f s", self.number, why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @property
    def _name(self) -> str:
        return f"diptych-worker-{self.number}-{secrets.token_hex(4)}"


class JobLauncher:
    """A Launcher: workers are jobs of a cluster manager. program: what Python runs there, before its options."""

    def __init__(self, jobs: Jobs, ray: RayOptions, join: JoinOptions, program: Sequence[str] = PROGRAM) -> None:
        self._jobs = jobs
        self._ray = ray
        self._join = join
        self._program = tuple(program)
        self._front_end = ""

    async def open(self, join_port: int) -> None:
        own = await self._jobs.open()
        host = own if self._join.is_everywhere else self._join.host
        self._front_end = f"[{host}]:{join_port}" if ":" in host else f"{host}:{join_port}"

    async def close(self) -> None:
        await self._jobs.close()

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> LaunchedWorker:
        """Start a worker through the cluster manager. The model and the key lie under the same paths on every host."""
        role: Role = options.place.role if options.place is not None else "both"
        device, threads = options.device.device, options.device.threads or int(self._ray.num_cpus)

        def arguments(agent: bytes) -> list[str]:
            own = {
                "join": self._front_end,
                "key-file": str(self._ray.key_file.absolute()),
                "model": options.model,
                "model-impl": options.model_impl,
                "role": role,
                "agent": agent.hex(),
                "device": "cuda" if self._ray.num_gpus else device,
            }
            if threads and not self._ray.num_gpus:
                own["threads"] = str(threads)
            named = [word for name, value in own.items() for word in (f"--{name}", value)]
            return [*self._program, *named, "--end-with-stdin"]

        return LaunchedWorker(number, role, self._jobs, arguments)
