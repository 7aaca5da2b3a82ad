"""One HTTP server process: bind the port, start the workers, serve, drain on a stop signal, exit with
status 0.

Owns the listening socket, the event loop and the signals. Imports no torch.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from diptych.base.limited_log import LimitedErrors
from diptych.base.stop_signals import stop_signals
from diptych.control.errors import DiptychError
from diptych.runtime.device.garbage import leave_alone_what_is_loaded, without_collections
from diptych.runtime.device.thread_limits import switch_often
from diptych.serving import edge_limits
from diptych.serving.api.http_policy import HttpPolicy
from diptych.serving.api.listener import Listener, bind
from diptych.serving.batches.batch_service import BatchOptions, BatchService
from diptych.serving.descriptors import raise_descriptor_limit
from diptych.serving.failures.loop_defects import LoopDefects
from diptych.serving.link.messages import Loading, Ready
from diptych.serving.served_fleet import ServedFleet

if TYPE_CHECKING:
    from fastapi import FastAPI

    from diptych.serving.keys.keyring import Keyring

logger = logging.getLogger(__name__)

DATE_INTERVAL_S = 1.0
FAILED_S = 5.0  # for which a server that has failed says so, before it ends: no restart follows another at once


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The HTTP side. also_served_as: more names of the model; replies have the first. api_keys: the accepted keys; each
    is a tenant of its own (none given: no key is asked for). keys: instead of them. admin_key: asked for at /admin
    (None: only this machine's loopback address is answered there). drain_timeout_s: how long running requests may take
    after a stop signal. http_policy: towards clients. responses: the SQLite file of responses that can be continued
    (None: memory). max_responses_bytes: that they may take (None: as edge_limits says). batches: files and batches
    (None: not served)."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = "default"
    also_served_as: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = edge_limits.BODY_BYTES
    drain_timeout_s: float = 30.0
    log_level: str = "warning"
    http_policy: HttpPolicy = field(default_factory=HttpPolicy)
    responses: Path | None = None
    max_responses_bytes: int | None = None
    batches: BatchOptions | None = None
    keys: "Keyring | None" = None


class _QuietServer(uvicorn.Server):
    """uvicorn with our listener, without its own signal handling (we drain first) and without its ten wake-ups a
    second."""

    def __init__(self, config: uvicorn.Config, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections from now on."""
        await super().startup(sockets=[])
        self._listener.start(self._connect)

    def _connect(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, and wait for those that are open."""
        self._listener.stop()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        """Renew the date header once a second until ``stop``."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), DATE_INTERVAL_S)

    def stop(self) -> None:
        """Take no more connections, and end when the open ones have."""
        self.should_exit = True
        self._stopping.set()


@without_collections()  # until it is ready
def run_server(
    llm: ServedFleet,
    options: ServerOptions,
    on_loading: Callable[[Loading], None] = lambda loading: None,
    on_ready: Callable[[Ready, str], None] = lambda ready, url: None,
    make_app: "Callable[[], FastAPI] | None" = None,
) -> None:
    """Serve until a stop signal; a second one, of whichever kind, ends the drain. make_app: instead of the application
    around an AsyncLLM. Raises the error of a worker that cannot start, and CoreFailedError when the server has failed
    by a defect of its own."""
    limit = raise_descriptor_limit(len(llm.fleet.fleet.slots))
    listening = bind(options.host, options.port)
    switch_often()
    try:
        with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            make = make_app or _app_maker(llm, options, stack)  # what cannot be opened is said before a model is loaded
            runner.run(_serve(llm, options, Listener(listening, limit), on_loading, on_ready, make))
    finally:
        listening.close()


async def _serve(
    llm: ServedFleet,
    options: ServerOptions,
    listener: Listener,
    on_loading: Callable[[Loading], None],
    on_ready: Callable[[Ready, str], None],
    make_app: "Callable[[], FastAPI]",
) -> None:
    stop = asyncio.Event()
    stop_now = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop.set_exception_handler(LoopDefects(llm.fleet.failures))
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal)
    await llm.start(wait=False)  # the worker imports torch while we import the web framework
    try:
        app = make_app()
    except BaseException:
        await llm.shutdown()
        raise
    batches: BatchService | None = app.state.batches
    keys: Keyring | None = app.state.keys
    if batches is not None:
        batches.start(llm.fleet.failures)
    if keys is not None:
        keys.start()
    server = _make_server(app, options, listener)
    serving = asyncio.create_task(server.serve())
    starting = asyncio.create_task(_report_start(llm, listener.url, on_loading, on_ready))
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(llm.fleet.failures.ended.wait())
    try:
        await asyncio.wait((serving, stopping, starting, failing), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not failing.done():
            starting.result()
            await asyncio.wait((serving, stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        if batches is not None:
            await batches.stop()
        if (failure := llm.fleet.failures.final) is not None:
            await asyncio.wait((serving, stopping), timeout=FAILED_S, return_when=asyncio.FIRST_COMPLETED)
            raise failure.exception()
        await _drain(llm, options.drain_timeout_s, stop_now)
    finally:
        if keys is not None:
            keys.stop()
        if batches is not None:
            await batches.stop()
            batches.close()
        await llm.shutdown()
        app.state.panels.end()
        server.stop()
        await serving
        for task in (starting, stopping, failing):
            task.cancel()


def _app_maker(llm: ServedFleet, options: ServerOptions, stack: ExitStack) -> "Callable[[], FastAPI]":
    """stack: closes what was opened here. Raises ConfigError."""
    from diptych.serving.api.response_store import ResponseStore

    store = ResponseStore(options.responses, max_bytes=options.max_responses_bytes)
    stack.callback(store.close)
    batches = None if options.batches is None else BatchService(options.batches)

    def make_app() -> "FastAPI":
        from diptych.serving.api.app import build_app
        from diptych.serving.async_llm import AsyncLLM

        assert isinstance(llm, AsyncLLM)
        return build_app(
            llm,
            options.served_model_name,
            also_served_as=options.also_served_as,
            api_keys=options.api_keys,
            admin_key=options.admin_key,
            max_body_bytes=options.max_body_bytes,
            http_policy=options.http_policy,
            store=store,
            batches=batches,
            keys=options.keys,
        )

    return make_app


def _make_server(app: "FastAPI", options: ServerOptions, listener: Listener) -> _QuietServer:
    from diptych.serving.api.connection import Connection

    config = uvicorn.Config(
        app,
        http=Connection,
        proxy_headers=False,  # the client's address is not used
        ws="none",
        lifespan="off",
        access_log=False,
        log_level=options.log_level,
        use_colors=False,  # what is logged may hold texts of clients, and is shown as it is (see terminal_text.py)
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    logging.getLogger("uvicorn.error").addFilter(LimitedErrors())  # it repeats what an application raises
    return _QuietServer(config, listener)


async def _report_start(
    llm: ServedFleet,
    url: str,
    on_loading: Callable[[Loading], None],
    on_ready: Callable[[Ready, str], None],
) -> None:
    """Report the progress of the start until the workers are ready. Raises the error of a worker that cannot start."""
    starting = llm.fleet.ready
    assert starting is not None
    last = None
    while not starting.done():
        if llm.loading is not last:
            last = llm.loading
            on_loading(last)
        await asyncio.wait((starting,), timeout=0.05)
    ready = starting.result()
    leave_alone_what_is_loaded()
    on_ready(ready, url)


async def _drain(llm: ServedFleet, timeout_s: float, stop_now: asyncio.Event) -> None:
    """Let running requests end; a second signal or the timeout ends the wait."""
    if llm.num_open:
        logger.warning("draining: %d running, at most %.0f s", llm.num_open, timeout_s)
    draining = asyncio.create_task(llm.drain(timeout_s))
    hurry = asyncio.create_task(stop_now.wait())
    await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurry):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DiptychError):  # the server ends in any case
            await task
    await asyncio.sleep(0.05)  # let the last replies leave
