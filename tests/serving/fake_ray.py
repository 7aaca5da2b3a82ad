"""Something like Ray on this host: actors are objects with a thread each, and hold CPUs of a cluster that has few.

Only what serving/ray uses. An actor that is killed closes its ends of pipes, as the kernel does for a process.
"""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """As ray.exceptions.RayError."""


class RayActorError(RayError):
    """As ray.exceptions.RayActorError."""


class FakeRef:
    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def future(self) -> "Future[Any]":
        return self._future


class FakeActor:
    """begin and wait are called as actor.begin.remote(...)."""

    def __init__(self, cluster: "FakeRay", actor_type: type, options: dict[str, Any]) -> None:
        self.options = options
        self.is_dead = False
        self.instance: Any = None
        self._cluster = cluster
        self._type = actor_type
        self._placed = threading.Event()
        self._open: list[Future[Any]] = []
        self.begin = SimpleNamespace(remote=lambda *given: self._call("begin", *given))
        self.wait = SimpleNamespace(remote=lambda *given: self._call("wait", *given))

    def place(self) -> None:
        """There is room for it."""
        self.instance = self._type()
        self.instance.leave = lambda: None  # it is a thread of the test
        self._placed.set()

    def die(self) -> None:
        """Its process is killed, or its host."""
        if self.is_dead:
            return
        self.is_dead = True
        process = self.instance._process if self.instance is not None else None
        if process is not None:
            process.stdin.close()
        self._placed.set()
        for future in self._open:
            if not future.done():
                future.set_exception(RayActorError("The actor died.\nThe reason follows."))
        self._cluster.freed(self)

    def _call(self, name: str, *given: Any) -> FakeRef:
        future: Future[Any] = Future()
        self._open.append(future)

        def work() -> None:
            self._placed.wait()
            if self.is_dead:
                return
            try:
                value = getattr(self.instance, name)(*given)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(value)

        threading.Thread(target=work, daemon=True).start()
        return FakeRef(future)


class FakeRay:
    """The module, and the cluster at the address "here"."""

    def __init__(self, num_cpus: float) -> None:
        self.actors: list[FakeActor] = []
        self.is_connected = False
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self._free = num_cpus
        self._waiting: list[FakeActor] = []
        self._lock = threading.RLock()

    def init(self, *, address: str, namespace: str, log_to_driver: bool) -> None:
        if address != "here":
            raise ConnectionError(f"Could not find any running Ray instance at {address}.")
        self.is_connected = True

    def shutdown(self) -> None:
        for actor in self.actors:
            actor.die()
        self.is_connected = False

    def remote(self, actor_type: type) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda: self._make(actor_type, given))

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        assert no_restart
        actor.die()

    def freed(self, actor: FakeActor) -> None:
        with self._lock:
            if actor in self._waiting:
                self._waiting.remove(actor)
            else:
                self._free += actor.options["num_cpus"]
            self._place()

    def _make(self, actor_type: type, given: dict[str, Any]) -> FakeActor:
        assert self.is_connected
        actor = FakeActor(self, actor_type, given)
        with self._lock:
            self.actors.append(actor)
            self._waiting.append(actor)
            self._place()
        return actor

    def _place(self) -> None:
        for actor in list(self._waiting):
            if actor.options["num_cpus"] <= self._free:
                self._free -= actor.options["num_cpus"]
                self._waiting.remove(actor)
                actor.place()
