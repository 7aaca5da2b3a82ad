"""``diptych worker --join``: one worker on this host, for a front end on another.

Dials the front end, registers, runs the worker process with the options that it is given, and passes messages on. While
there is no front end, the process keeps its weights and its cache for a grace period, and drops what it computed, since
no front end reads it.
"""

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

import diptych
from diptych.control.config import ModelImplName
from diptych.control.errors import ConfigError, CoreFailedError, DiptychError, WorkerError
from diptych.control.router.topology import Role
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.weights.checkpoint import fingerprint
from diptych.serving import edge_limits
from diptych.serving.failures.failure_recording import default_folder, error_words, leave_alone
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.join.framed_link import FramedLink
from diptych.serving.join.hosted_worker import HostedWorker
from diptych.serving.join.join_messages import (
    PROTOCOL,
    Accepted,
    Ended,
    Kill,
    Leave,
    Leaving,
    Refused,
    Registration,
    read_from_door,
    told,
)
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions
from diptych.serving.link.host_clock import clock_identity
from diptych.tls.shared_key import SharedKey

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two tries; at most WARM_PAUSE_S while there is a process
WARM_PAUSE_S = 0.5
LONGEST_FAILURE_PAUSE_S, HEALTHY_S = 30.0, 60.0  # between two starts of a process that ends; shorter lives count
DIAL_S = 10.0
ABANDONED = 0  # the life of a process without a front end


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """host, port: of the front end. model, model_impl: as at the front end. device, kv_cache_bytes: of this host
    (kv_cache_bytes None: as the front end says). kv_listen: "tcp://ADDRESS:PORT" of the KV connector ("": the address
    from which the front end is dialled). grace_s: how long the process is kept without a front end. drain_s: for
    running requests after a request to end. agent: by which the front end knows it (b"": any). ends_with_stdin: it ends
    at once when its standard input is closed."""

    host: str
    port: int
    key: SharedKey = field(repr=False)
    model: str
    model_impl: ModelImplName = "auto"
    role: Role = "both"
    name: str = ""
    rack: str = ""
    device: DeviceOptions = field(default_factory=DeviceOptions)
    kv_cache_bytes: int | None = None
    kv_listen: str = ""
    num_cores: int = 0
    grace_s: float = 300.0
    drain_s: float = 30.0
    agent: bytes = b""
    ends_with_stdin: bool = False
    command: tuple[str, ...] = (sys.executable, "-m", "diptych.serving.worker")

    @property
    def where(self) -> str:
        """The front end, for people."""
        return f"{self.host}:{self.port}"


class _Parent(asyncio.Protocol):
    """The standard input, whose other end is what has started this process. Nothing comes from there but its end."""

    def __init__(self, on_left: Callable[[], None], cut: Callable[[str], None]) -> None:
        self._on_left = on_left
        self._cut = cut

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_left()
        self._cut("what has started this worker has ended")


class WorkerAgent:
    """``run`` it until the worker leaves. ``leave`` asks it to."""

    def __init__(self, options: AgentOptions) -> None:
        self.number: int | None = None  # of the worker, once a front end has given it one
        self._options = options
        self._agent = options.agent or secrets.token_bytes(16)
        self._model = fingerprint(read_model_config(options.model, options.model_impl))
        self._tls = options.key.client_tls("worker", "front end")
        self._worker = HostedWorker(options.command, self._relay, self._on_ended)
        self._link: FramedLink | None = None  # of the present front end
        self._lost: asyncio.Event = asyncio.Event()  # there is no front end
        self._left = asyncio.Event()  # there will be none
        self._defect: BaseException | None = None
        self._is_leaving = False
        self._pause_s = self._failure_pause_s = FIRST_PAUSE_S
        self._silence_s = 1.0
        self._started_s = 0.0
        self._is_stale = False  # the process has other options than the front end wants

    async def run(self) -> None:
        """Serve front ends, one after the other. Raises ConfigError for a refusal that another try would not change,
        and CoreFailedError when the agent has failed by a defect."""
        beating = start_watched(self._beat(), "signs of life", self.fail)
        try:
            if self._options.ends_with_stdin:
                await self._watch_stdin()
            while not self._left.is_set():
                if await self._join():
                    await self._lost.wait()
                    await self._pause(self._failure_pause_s if not self._worker.is_running else 0)
        except DiptychError:
            raise
        except Exception as error:
            self.fail(error)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)  # what it raised is known
            try:
                self._cut("the agent ends")
            finally:
                await self._worker.end()
        if self._defect is not None:
            raise CoreFailedError(f"the agent has failed: {error_words(self._defect)}") from self._defect

    def fail(self, error: BaseException) -> None:
        """Code of this process has failed, and what is passed on may have a gap now: end, and say why, here and to the
        front end."""
        if self._defect is not None:
            return
        self._defect = error
        core = "the agent" if self.number is None else f"the agent of worker {self.number}"
        logger.critical("%s has failed", core, exc_info=error)
        recording = leave_alone(default_folder(), core, error)
        self._left.set()
        if self._link is not None:
            self._link.tell(told(Ended(f"{core} has failed: {error_words(error)}", False, True, recording)))
        self._cut("the agent has failed", at_once=False)

    async def _watch_stdin(self) -> None:
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: _Parent(self._left.set, self._cut), sys.stdin)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "end_with_stdin is set and the standard input is no pipe", param="end_with_stdin"
            ) from error

    async def leave(self) -> None:
        """Let the front end drain the worker, and end; without a front end, or when asked again, at once."""
        if self._link is not None and not self._is_leaving:
            self._is_leaving = True
            self._link.tell(told(Leaving()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), self._options.drain_s)
        self._left.set()
        self._cut("the agent ends")

    # -- to a front end -----------------------------------------------------------------------------------------------

    async def _join(self) -> bool:
        """Dial until a front end takes this worker; False when the agent is to end. The process is ended when that
        takes longer than the grace period. Raises ConfigError for a refusal that stays one."""
        loop, said = asyncio.get_running_loop(), ""
        until_s = loop.time() + self._options.grace_s
        while not self._left.is_set():
            if self._is_stale:
                await self._worker.end()
                self._is_stale = False
            try:
                await self._introduce(await self._dial())
                return True
            except (OSError, TimeoutError, WorkerError) as error:
                why = str(error) or "no answer"
            if why != said and not self._is_stale:
                logger.warning("no front end at %s yet: %s", self._options.where, why)
                said = why
            if self._worker.is_running and loop.time() > until_s:
                logger.warning("no front end for %.0f s: the model is unloaded", self._options.grace_s)
                await self._worker.end()
            await self._pause(self._pause_s)
            self._pause_s = min(2 * self._pause_s, WARM_PAUSE_S if self._worker.is_running else LONGEST_PAUSE_S)
        return False

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), seconds)

    async def _dial(self) -> FramedLink:
        """Raises OSError (also for another key) and TimeoutError."""
        loop, options = asyncio.get_running_loop(), self._options
        async with asyncio.timeout(DIAL_S):
            _, link = await loop.create_connection(
                FramedLink,
                options.host,
                options.port,
                ssl=self._tls,
                ssl_handshake_timeout=edge_limits.WORKER_HANDSHAKE_S,
            )
        return link

    async def _introduce(self, link: FramedLink) -> None:
        """Register. Raises ConfigError when it is refused for good, WorkerError when it may be taken later."""
        answer: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()

        def on_told(data: bytes) -> None:
            if answer.done():  # it is given up
                return
            try:
                message = read_from_door(data)
            except msgspec.DecodeError as error:
                answer.set_exception(WorkerError(f"its answer cannot be read: {error}"))
                return
            if isinstance(message, Accepted):
                try:
                    self._begin(link, message)
                    answer.set_result(None)
                except WorkerError as error:
                    answer.set_exception(error)
            elif isinstance(message, Refused):
                answer.set_result(message)

        def on_closed(why: str) -> None:
            if not answer.done():
                answer.set_exception(WorkerError(why))

        def on_defect(error: BaseException) -> None:
            on_closed("what it said could not be handled")
            self.fail(error)

        link.on_told, link.on_closed, link.on_defect = on_told, on_closed, on_defect
        link.introduced()
        link.tell(told(self._registration()))
        try:
            async with asyncio.timeout(DIAL_S):
                refused = await answer
        except BaseException:
            link.on_closed = lambda why: None
            link.close("no answer to the registration")
            raise
        if refused is not None:
            link.on_closed = lambda why: None
            link.close("refused")
            message = f"the front end at {self._options.where} refuses this worker: {refused.message}"
            raise ConfigError(message, param="join") if refused.is_final else WorkerError(message)

    def _registration(self) -> Registration:
        own = self._options
        return Registration(
            protocol=PROTOCOL,
            version=diptych.__version__,
            model=self._model,
            model_name=own.model.rpartition("/")[2],
            model_impl=own.model_impl,
            agent=self._agent,
            host=own.name,
            rack=own.rack,
            role=own.role,
            num_cores=own.num_cores,
            number=self.number,
            is_warm=self._worker.is_running,
            clock=clock_identity(),
        )

    # -- with a front end ---------------------------------------------------------------------------------------------

    def _begin(self, link: FramedLink, accepted: Accepted) -> None:
        """This front end has taken the worker: frames for it may follow at once. Raises WorkerError when the process
        must be ended first."""
        options = self._localized(accepted.options, link.own_host)
        self.number, self._silence_s = accepted.number, accepted.silence_s
        if self._worker.is_running and self._worker.options != options:
            self._is_stale = True
            raise WorkerError("it wants other options than those that the worker process was started with")
        self._link = link
        self._lost.clear()
        self._pause_s = FIRST_PAUSE_S
        link.on_told, link.on_relayed, link.on_closed = self._take, self._worker.send, self._cut
        if self._worker.is_running:
            logger.warning("worker %d of %s, with what it holds", accepted.number, self._options.where)
            self._worker.start_over(accepted.life)
        else:
            logger.warning("worker %d of %s: starting", accepted.number, self._options.where)
            self._started_s = asyncio.get_running_loop().time()
            self._worker.start(options)

    def _localized(self, options: EngineOptions, own_host: str) -> EngineOptions:
        """What the front end wants, with what is this host's."""
        own, place = self._options, options.place
        assert place is not None
        address = f"[{own_host}]" if ":" in own_host else own_host
        # The number is the front end's; another gives another, and here there is one worker.
        place = msgspec.structs.replace(place, number=0, listen=own.kv_listen or f"tcp://{address}:0")
        memory = options.memory  # the front end's dtype of the cache, too
        if own.kv_cache_bytes is not None:
            memory = msgspec.structs.replace(memory, kv_cache_bytes=own.kv_cache_bytes)
        device = msgspec.structs.replace(own.device, dtype=options.device.dtype, quantize=options.device.quantize)
        return msgspec.structs.replace(options, model=own.model, device=device, memory=memory, place=place)

    def _take(self, data: bytes) -> None:
        try:
            message = read_from_door(data)
        except msgspec.DecodeError as error:
            self._cut(f"the front end sent something unreadable: {error}")
            return
        if isinstance(message, Kill):
            self._worker.kill(message.because)
        elif isinstance(message, Leave):
            logger.warning("worker %s was removed", self.number)
            self._left.set()
            self._cut("removed")

    def _relay(self, data: bytes) -> None:
        if self._link is not None:
            self._link.relay(data)

    def _on_ended(self, ended: Ended) -> None:
        """The process has ended: the front end learns it, and the next life begins with another registration."""
        is_healthy = asyncio.get_running_loop().time() - self._started_s > HEALTHY_S
        self._failure_pause_s = FIRST_PAUSE_S if is_healthy else min(2 * self._failure_pause_s, LONGEST_FAILURE_PAUSE_S)
        logger.error("%s; joining again in %.1f s", ended.message, self._failure_pause_s)
        if self._link is not None:
            self._link.tell(told(ended))
        self._cut(ended.message, at_once=False)

    def _cut(self, why: str, *, at_once: bool = True) -> None:
        """The front end is lost: what was computed for it is dropped."""
        link, self._link = self._link, None
        if link is not None:
            logger.warning("the front end at %s is lost: %s", self._options.where, why)
            link.on_told = link.on_relayed = lambda data: None
            link.on_closed = lambda reason: None
            link.close(why, at_once=at_once)
        self._lost.set()
        if self._is_leaving:  # there is no front end that could drain it
            self._left.set()
        if link is not None:
            self._worker.start_over(ABANDONED)

    async def _beat(self) -> None:
        """Signs of life to the front end, and a look at its own."""
        while True:
            link, silence_s = self._link, 1.0
            if link is not None:
                silence_s = self._silence_s
                if link.silent_s() > silence_s:
                    self._cut(f"no sign of life for {link.silent_s():.1f} s")
                else:
                    link.tell(told(self._worker.vital()))
            await asyncio.sleep(silence_s / 5)
