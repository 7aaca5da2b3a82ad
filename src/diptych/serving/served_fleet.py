"""A fleet that is being served: its start, its drain, its end, and whether it takes requests now.

What a server and its pages need of a front end, whatever the workers are: AsyncLLM for workers of ours, EngineFront for
engines that others run. Owns no requests.
"""

import asyncio

from diptych.control.errors import DrainingError, UnavailableError
from diptych.serving.answers.answer_stream import Generation
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import Loading, Ready
from diptych.serving.long_work import LongWork


class ServedFleet:
    """``start`` it inside the event loop that will use it, ``shutdown`` it in the same loop."""

    def __init__(self, options: EngineOptions, fleet: Fleet) -> None:
        self.options = options
        self.fleet = fleet
        self.metrics = fleet.metrics
        self.timeline = fleet.timeline
        self.long_work = LongWork()
        self.is_draining = False

    @property
    def has_text(self) -> bool:
        """Whether clients may send text."""
        return True

    @property
    def has_chat(self) -> bool:
        """Whether the model answers conversations, as far as it is known."""
        return True

    def shape_of(self, worker: int) -> str:
        """How this worker schedules prompts beside streams: unified or chunked ("": as its engine likes)."""
        return ""

    @property
    def scheduling(self) -> str:
        """How steps are made, in a word for people."""
        return "unified" if self.options.scheduler.budget.kind == "whole" else "chunked"

    @property
    def kv_capacity_tokens(self) -> int | None:
        """What the KV cache holds; None: not known (yet)."""
        ready = self.ready
        return ready.kv_capacity_tokens if ready else None

    async def start(self, *, wait: bool = True) -> None:
        """Start the workers; with ``wait`` until all are ready. Raises the error of a worker that cannot start."""
        await self.fleet.start()
        if wait:
            assert self.fleet.ready is not None
            await asyncio.shield(self.fleet.ready)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running at the timeout."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self.fleet.streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Stop the workers; requests that still run fail with DrainingError."""
        self.is_draining = True
        self.fleet.streams.fail_all(DrainingError())
        self.long_work.close()
        await self.fleet.stop()
        self.timeline.close()

    @property
    def loading(self) -> Loading:
        """How far the start is."""
        return self.fleet.loading

    @property
    def ready(self) -> Ready | None:
        """What the workers hold together; None before all were ready once."""
        return self.fleet.joint_ready

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self.fleet.streams)

    @property
    def is_routable(self) -> bool:
        """Whether a request sent now would be taken."""
        return not self.is_draining and self.fleet.is_routable

    def health(self) -> tuple[int, dict[str, str | None]]:
        """Status and content of the reply of /health."""
        return self.fleet.failures.health()

    def readiness(self) -> tuple[int, dict[str, str | None]]:
        """The same of /ready."""
        if self.is_routable:
            return 200, {"status": "ready", "detail": None}
        failure = self.fleet.failures.down
        return 503, {"status": "not ready", "detail": self.state if failure is None else failure.words}

    @property
    def state(self) -> str:
        """One word for a page: ready, draining, starting, lost (no worker can take a request) or failed (the
        process ends by a defect)."""
        if self.fleet.failures.final is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.fleet.is_routable:
            return "ready"
        return "starting" if self.fleet.is_starting else "lost"

    def require_ready(self) -> Ready:
        """What the workers hold together. Raises UnavailableError when no request can be taken now."""
        if (failure := self.fleet.failures.final) is not None:
            raise UnavailableError(f"{failure.words_for_clients}; it restarts", retry_after_s=5.0, code="core_failed")
        if self.is_draining:
            raise UnavailableError("the server is draining and takes no new requests", code="draining")
        ready = self.ready
        if ready is None:
            raise UnavailableError("the model is still loading", retry_after_s=2.0, code="loading")
        if not self.fleet.is_routable:
            raise UnavailableError("workers were lost and are being restarted", retry_after_s=2.0, code="worker_lost")
        return ready

    def abort(self, generation: Generation) -> None:
        """End what still runs of a request; its blocks are free for the workers' next step."""
        self.fleet.abort(generation)
