"""A Fleet over workers of this process in virtual time, and a client for it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from in_process_worker import Host
from virtual_time import VirtualTime, virtual_time

from diptych.base.processor import Processor
from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.request import DEFAULT_OPTIONS, RequestOptions, SamplingParams, Submission
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.link.engine_options import BUNDLED_MODEL, DeviceOptions, EngineOptions, MemoryOptions

BLOCK_SIZE, NUM_BLOCKS = 32, 256
TOKENIZER = Tokenizer(BUNDLED_MODEL)
ALWAYS = cluster_config(disaggregate="always")


def engine_options(**changes: Any) -> EngineOptions:
    """Options of workers with NUM_BLOCKS blocks each, also where they share one memory."""
    options = EngineOptions(device=DeviceOptions(device="cpu"))
    geometry = read_kv_geometry(options.model, options.device.dtype, BLOCK_SIZE)
    memory = MemoryOptions(block_size=BLOCK_SIZE, kv_cache_bytes=NUM_BLOCKS * geometry.block_bytes)
    return EngineOptions(**({"device": options.device, "memory": memory} | changes))


class Client:
    """Sends requests to a fleet, as AsyncLLM does, and keeps what it gets. Prompts are token ids."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.generations: dict[str, Generation] = {}
        settings = fleet.fleet
        self._needs_hashes = settings.cluster.routing.routing == "kv_aware" and len(settings.roles) > 1

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        options: RequestOptions = DEFAULT_OPTIONS,
        **sampling: Any,
    ) -> AnswerStream:
        """One answer to one prompt."""
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
        stream = AnswerStream(request_id, 0, list(prompt), params, TOKENIZER, options)
        generation = self.generations[request_id] = Generation(request_id, [stream])
        self.fleet.streams.add([stream])
        hashes = hash_blocks(list(prompt), BLOCK_SIZE, options.cache_salt) if self._needs_hashes else ()
        submission = Submission(request_id, len(prompt), params.max_tokens, hashes, options, hands_off=params.hands_off)
        self.fleet.submit([submission])
        return generation.streams[0]

    def leave(self, request_id: str) -> None:
        """The client wants no more of it."""
        self.fleet.abort(self.generations[request_id])

    async def read(self, request_id: str) -> list[int]:
        """All tokens of an answer, once it has ended. Raises its error."""
        generation, token_ids = self.generations[request_id], []
        while not generation.is_exhausted:
            for delta in await generation.read():
                token_ids += delta.token_ids
        return token_ids


class InProcessFleet:
    """The fleet, its workers, its client and the time."""

    def __init__(self, fleet: Fleet, host: Host) -> None:
        self.fleet = fleet
        self.host = host
        self.workers = host.workers
        self.client = Client(fleet)
        self.time: VirtualTime = host.time

    async def when(self, condition: Callable[[], object], patience_ns: int = 10**12) -> None:
        """Let time pass until something is true."""
        end_ns = self.time.now + patience_ns
        while not condition():
            assert self.time.now < end_ns, "it never happened"
            await self.time.until(self.time.now + 10_000)

    async def check_nothing_is_left(self) -> None:
        """After some time for the last words: the core is idle, and so are the workers."""
        await self.time.until(self.time.now + 10**9)
        self.fleet.core.check_idle()
        for worker in self.workers:
            assert worker.engine is not None
            assert worker.engine.core.is_idle
            assert worker.engine.core.engine.kv.pool.num_used == 0
            assert worker.engine.runner.num_requests == 0


@asynccontextmanager
async def in_process_fleet(
    *,
    cluster: ClusterConfig | None = None,
    options: EngineOptions | None = None,
    processor: Processor | None = None,
    **workers: Any,
) -> AsyncIterator[InProcessFleet]:
    """A fleet that is ready; ``workers``: how many of which kind (see FleetOptions)."""
    settings = FleetOptions(**workers)
    if cluster is not None:
        settings = replace(settings, cluster=cluster)
    time = virtual_time()
    host = Host(time)
    fleet = Fleet(options or engine_options(), settings, host, clock=time.clock, processor=processor)
    await fleet.start()
    try:
        assert fleet.ready is not None
        await fleet.ready
        yield InProcessFleet(fleet, host)
    finally:
        await fleet.stop()


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The answer of the make-believe model."""
    return [len(prompt) + at for at in range(count)]
