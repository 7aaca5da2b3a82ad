"""Processes that Ray places on the hosts of its cluster: one actor each (see Jobs in serving.fleet.launched_worker).

Owns the connection to Ray. Ray's calls wait, so they are made in threads; its answers come as futures.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from diptych.control.errors import ConfigError, WorkerError
from diptych.serving.ray.ray_options import RayOptions
from diptych.serving.ray.worker_actor import WorkerActor


def import_ray() -> Any:
    """The package. Raises ConfigError without it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        cure = "pip install '.[ray]' in the checkout"
        message = f"launcher is ray and the package ray cannot be imported ({error}): {cure}"
        raise ConfigError(message, param="launcher") from error


class RayJob:
    """A Job: one actor and its child. ``ended``: the reference of the call that waits for the child."""

    def __init__(self, ray: Any, actor: Any, ended: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._ended = ended

    async def wait(self) -> str:
        try:
            status = await _answer(self._ended)
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor has ended ({_first_line(error)})"
        await self.kill()
        return f"it has ended with status {status}"

    async def kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # it is gone already
            await asyncio.to_thread(self._ray.kill, self._actor, no_restart=True)


class RayJobs:
    """The Jobs of a Ray cluster. ray: the package (a stand-in, in tests)."""

    def __init__(self, options: RayOptions, ray: Any = None) -> None:
        self._options = options
        self._ray = ray or import_ray()
        self._actor_type: Any = None

    async def open(self) -> str:
        """Connect to the cluster. Raises ConfigError when there is no such cluster."""
        ray, address = self._ray, self._options.address
        try:  # (outside of the main thread Ray leaves the handlers of signals alone)
            await asyncio.to_thread(ray.init, address=address, namespace="diptych", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            message = f"ray_address is {address}, and no Ray cluster can be had there: {_first_line(error)}"
            raise ConfigError(message, param="ray_address") from error
        self._actor_type = ray.remote(WorkerActor)
        own = await asyncio.to_thread(ray.util.get_node_ip_address)
        return str(own)

    async def begin(self, name: str, arguments: Sequence[str]) -> RayJob:
        options, ray = self._options, self._ray
        made = self._actor_type.options(
            name=name,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        try:
            actor = await asyncio.to_thread(made.remote)
        except (ValueError, ray.exceptions.RayError) as error:
            raise WorkerError(f"Ray makes no actor {name}: {_first_line(error)}") from error
        job = RayJob(ray, actor, None)
        try:
            await _answer(actor.begin.remote(list(arguments)), options.wait_s)
        except TimeoutError:
            await job.kill()
            message = f"Ray has had no room for {name} ({options.needs}) for {options.wait_s:g} s"
            raise WorkerError(message) from None
        except (OSError, ray.exceptions.RayError) as error:
            await job.kill()
            raise WorkerError(f"Ray cannot start {name}: {_first_line(error)}") from error
        except asyncio.CancelledError:
            await job.kill()
            raise
        return RayJob(ray, actor, actor.wait.remote())

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)


async def _answer(reference: Any, timeout_s: float | None = None) -> Any:
    """What an actor's call returns. Raises TimeoutError, and what the call raises. Ray's own future is never cancelled:
    Ray sets it all the same."""
    future = asyncio.wrap_future(reference.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.wait_for(asyncio.shield(future), timeout_s)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
