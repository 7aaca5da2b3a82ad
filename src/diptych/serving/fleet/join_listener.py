"""Where workers of other hosts come in: checks who they are, and gives each a number.

Owns the listening socket, the refusals and the beats. Must never decide what a worker does: the fleet does.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

import diptych
from diptych.control.config import ModelImplName, prefill_scheduler
from diptych.control.errors import ConfigError, DiptychError
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.weights.checkpoint import fingerprint
from diptych.serving import edge_limits
from diptych.serving.failures.watched_tasks import WatchedTasks
from diptych.serving.fleet.handshake_port import HandshakePort
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.joined_worker import JoinedWorker
from diptych.serving.fleet.launched_worker import LaunchedWorker
from diptych.serving.fleet.worker_handle import WorkerHandle, WorkerSite, WorkerState
from diptych.serving.join.framed_link import FramedLink
from diptych.serving.join.join_messages import PROTOCOL, Accepted, Refused, Registration, read_from_agent, told
from diptych.serving.link.engine_options import EngineOptions

logger = logging.getLogger(__name__)


class JoiningFleet(Protocol):
    """What the door needs of the fleet."""

    workers: list[WorkerHandle]

    def take_in(self, port: JoinedWorker) -> None:
        """A port for a number that is free."""
        ...

    def options_of(self, worker: int) -> EngineOptions:
        """What worker ``number`` is told to begin with."""
        ...

    async def remove_joined(self, worker: int) -> None:
        """Drain a worker whose agent is asked to end, and stop it."""
        ...

    async def stop_worker(self, worker: int) -> None:
        """Stop a worker as it is."""
        ...

    def on_defect(self, where: str, error: BaseException) -> None:
        """Report a defect, as a WorkerListener does."""
        ...


@dataclass(frozen=True, slots=True)
class Expected:
    """What a worker must be to join: the same version, and the same model, computed by the same."""

    version: str
    model: str
    model_name: str
    model_impl: ModelImplName = "auto"

    def refusal(self, registration: Registration) -> str:
        """Why this worker cannot join; "" when it can. Both sides' values are in it."""
        if registration.protocol != PROTOCOL:
            return f"the front end speaks version {PROTOCOL} of the protocol, the worker {registration.protocol}"
        if registration.version != self.version:
            return f"the front end is diptych {self.version}, the worker diptych {registration.version}"
        if registration.model_impl != self.model_impl:
            own, other = self.model_impl, registration.model_impl
            return f"model_impl is {own} at the front end, {other} at the worker (--model-impl)"
        if registration.model != self.model:
            here, there = self.model[:12], registration.model[:12]
            return (
                f"the models differ: {self.model_name} ({here}) at the front end, {registration.model_name} ({there}) "
                "at the worker"
            )
        return ""


def expected_of(options: EngineOptions) -> Expected:
    """What workers of a fleet with these options must be. Raises ConfigError for a model that cannot be read."""
    config = read_model_config(options.model, options.model_impl)
    return Expected(diptych.__version__, fingerprint(config), Path(options.model).name, options.model_impl)


class JoinListener:
    """One fleet's. numbers: that workers may get. silence_s: after which either end gives the other up."""

    def __init__(
        self, fleet: JoiningFleet, options: JoinOptions, expected: Expected, numbers: range, silence_s: float
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.port = 0  # that it listens on
        self._fleet = fleet
        self._options = options
        self._expected = expected
        self._numbers = numbers
        self._silence_s = silence_s
        self._lives = 0
        self._listening: HandshakePort | None = None
        self._unknown: dict[FramedLink, asyncio.TimerHandle] = {}
        self._on_defect = partial(fleet.on_defect, "the door for workers")
        self._tasks = WatchedTasks(self._on_defect)

    async def open(self) -> None:
        """Take workers from now on. Raises ConfigError when the address cannot be had."""
        tls = self._options.key.server_tls("front end", "worker")
        try:
            self._listening = HandshakePort(self._options.host, self._options.port, tls, self._connect)
        except OSError as error:
            message = f"listen_workers is {self._options.listen}, which cannot be had: {error.strerror or error}"
            raise ConfigError(message, param="listen_workers") from error
        self.port = self._listening.port
        self._listening.start()
        self._tasks.start(self._beat(), "signs of life")

    async def close(self) -> None:
        """Take no more. The ports end their own connections."""
        await self._tasks.close()
        for link in list(self._unknown):
            link.close("the front end ends")
        if self._listening is not None:
            await self._listening.close()

    @property
    def joined(self) -> Sequence[JoinedWorker]:
        """All workers that have ever joined."""
        return [port for port in self._fleet.workers if isinstance(port, JoinedWorker)]

    async def _beat(self) -> None:
        while True:
            for port in self.joined:
                port.beat()
            await asyncio.sleep(self._silence_s / 5)

    def _connect(self) -> FramedLink:
        link = FramedLink()
        link.on_defect = self._on_defect
        link.on_connected = lambda: self._greet(link)
        return link

    def _greet(self, link: FramedLink) -> None:
        """Wait for the hello of a link that has proved the key."""
        if len(self._unknown) >= edge_limits.UNREGISTERED_WORKERS:
            self._forget(next(iter(self._unknown)), "too many connections without a registration")
        loop = asyncio.get_running_loop()
        self._unknown[link] = loop.call_later(
            edge_limits.WORKER_HANDSHAKE_S, self._forget, link, "it did not register in time"
        )
        link.on_closed = lambda why: self._forget(link, why)
        link.on_told = lambda data: self._register(link, data)
        link.on_relayed = lambda data: self._forget(link, "it sent something else than its registration")

    def _forget(self, link: FramedLink, why: str) -> None:
        if (timer := self._unknown.pop(link, None)) is not None:
            timer.cancel()
            link.close(why)

    def _register(self, link: FramedLink, data: bytes) -> None:
        try:
            registration = read_from_agent(data)
            if not isinstance(registration, Registration):
                raise ConfigError("the first word is not a registration")
        except (msgspec.DecodeError, ConfigError) as error:
            self._refuse(link, "unreadable", f"the registration cannot be read: {error}", is_final=True)
            return
        if message := self._expected.refusal(registration):
            self._refuse(link, "incompatible", message, is_final=True)
            return
        port = self._port_for(registration)
        if port is None:
            message = f"there are {len(self._numbers)} workers, and may be no more (--max-workers)"
            self._refuse(link, "full", message, is_final=False)
            return
        self._unknown.pop(link).cancel()
        link.introduced()
        self._lives += 1
        options = localized(self._fleet.options_of(port.number), port.role)
        accepted = Accepted(number=port.number, life=self._lives, options=options, silence_s=self._silence_s)
        link.tell(told(accepted))
        logger.warning("worker %d joined: %s, on %s", port.number, registration.role, registration.host)
        port.attach(link, registration, self._lives)

    def _refuse(self, link: FramedLink, kind: str, message: str, *, is_final: bool) -> None:
        logger.error("a worker at %s is refused: %s", link.peer, message)
        self.refused[kind] += 1
        link.tell(told(Refused(message, is_final)))
        self._unknown.pop(link).cancel()
        link.on_closed = lambda why: None
        link.close("refused", at_once=False)

    def _port_for(self, registration: Registration) -> JoinedWorker | None:
        """The port of the worker that this was, or of one that is lost and was alike, or a new one, or of any that is
        lost. None: there are enough."""
        away = (WorkerState.LOST, WorkerState.STOPPED)
        gone = [port for port in self.joined if port.state in away and not isinstance(port, LaunchedWorker)]
        alike = (registration.host, registration.role)
        choices: tuple[Callable[[JoinedWorker], bool], ...] = (
            lambda port: port.number == registration.number and (port.site.host, port.role) == alike,
            lambda port: (port.site.host, port.role) == alike,
        )
        for port in self.joined:
            if port.agent == registration.agent:
                if isinstance(port, LaunchedWorker) and port.state is WorkerState.STOPPED:
                    return None
                return self._renewed(port, registration)
        for is_wanted in choices:
            for port in gone:
                if is_wanted(port):
                    return self._renewed(port, registration)
        free = [number for number in self._numbers if number >= len(self._fleet.workers)]
        stopped = [port.number for port in self._fleet.workers if port.state is WorkerState.STOPPED]
        if free or stopped:
            return self._renewed(None, registration, min([*free[:1], *stopped]))
        return self._renewed(gone[0], registration) if gone else None

    def _renewed(self, port: JoinedWorker | None, registration: Registration, number: int = 0) -> JoinedWorker:
        """The port, in the fleet: a removed worker begins again as a new one."""
        if port is None or port.state is WorkerState.STOPPED:
            site = WorkerSite(registration.host, registration.rack, registration.role)
            port = JoinedWorker(number if port is None else port.number, site, registration.agent)
            self._fleet.take_in(port)
        leaver = port.number
        port.on_leaving = lambda: self._let_go_soon(leaver)
        return port

    def _let_go_soon(self, worker: int) -> None:
        self._tasks.start(self._let_go(worker), f"the drain of worker {worker}")

    async def _let_go(self, worker: int) -> None:
        try:
            await self._fleet.remove_joined(worker)
        except DiptychError as error:
            logger.warning("worker %d leaves without a drain: %s", worker, error.message)
            await self._fleet.stop_worker(worker)


def localized(options: EngineOptions, role: str) -> EngineOptions:
    """The options of a worker on another host with this role, as far as they do not depend on that host."""
    assert options.place is not None
    place = msgspec.structs.replace(options.place, role=role)
    scheduler = prefill_scheduler(options.scheduler, options.slo) if role == "prefill" else options.scheduler
    return msgspec.structs.replace(options, place=place, scheduler=scheduler, record=None, failures="")
