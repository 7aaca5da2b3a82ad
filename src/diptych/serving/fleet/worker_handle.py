"""A worker as the fleet sees it: it takes messages, sends messages, and may be lost.

The protocols on both sides, and of what starts a worker. supervisor.py has the worker that is a process of this host.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from diptych.control.errors import DiptychError
from diptych.control.router.topology import Role
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.messages import FrontendMessage, Ready, WorkerMessage

logger = logging.getLogger(__name__)


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"  # will be started again
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerSite:
    """Where a worker is. role: what it came for (None: what the fleet has planned for its number)."""

    host: str = "local"
    rack: str = ""
    role: Role | None = None


class WorkerListener(Protocol):
    """What a port calls: the fleet."""

    def on_message(self, worker: int, message: WorkerMessage) -> None:
        """The worker sent this."""
        ...

    def on_lost(self, worker: int, loss: Loss) -> None:
        """The worker has ended for certain; everything that it sent before has been passed on."""
        ...

    def on_defect(self, where: str, error: BaseException) -> None:
        """Code of this process has failed where it must not, so that nothing can be relied on any more."""
        ...


def hand_over(listener: WorkerListener, worker: int, message: WorkerMessage) -> None:
    """Pass a worker's message on. What the listener refuses is logged; any other failure is a defect, after which
    tokens may be missing: it must not go on."""
    try:
        listener.on_message(worker, message)
    except DiptychError as error:  # it was refused as a whole, and has changed nothing
        logger.error("worker %d: %s", worker, error.message)
    except Exception as error:
        listener.on_defect(f"a message of worker {worker}", error)


class WorkerHandle(Protocol):
    """Worker ``number`` for the life of the front end: one engine after the other, wherever it runs."""

    number: int
    state: WorkerState
    num_restarts: int
    site: WorkerSite
    ready: asyncio.Future[Ready] | None
    """How the first start went: what the worker holds, or why it refuses."""

    def start(self, listener: WorkerListener) -> None:
        """Begin its life, and begin it again whenever it is lost; returns at once."""
        ...

    def send(self, message: FrontendMessage) -> None:
        """Pass a message to the worker; nothing happens when it is lost (its loss is reported on its own)."""
        ...

    def pulse(self) -> Pulse | None:
        """The worker's newest heartbeat, on this host's clock; None where there is none to read."""
        ...

    def kill(self, because: str) -> None:
        """End a worker that does not answer; its loss is reported like any other."""
        ...

    async def stop(self, *, is_removed: bool = False) -> None:
        """End it for good. is_removed: the fleet goes on without it (else the front end ends)."""
        ...


class Launcher(Protocol):
    """Makes ports: how and where the workers of a fleet run. Each port starts its worker, stops it, and reports its
    end. supervisor.py: processes of this host; launched_worker.py: those that a cluster manager places. Workers that
    join by themselves have ports and no launcher."""

    async def open(self, join_port: int) -> None:
        """Prepare the first launch. join_port: where workers of other hosts join (0: none may). Raises ConfigError."""
        ...

    async def close(self) -> None:
        """Release everything, after the last port was stopped."""
        ...

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> WorkerHandle:
        """A worker that is not started yet. pass_fds: file descriptors that ``options`` names."""
        ...
