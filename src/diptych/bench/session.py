"""Measurements of a server: find it, warm it up, then a run, a series of rates, or the search for goodput.

Nothing is printed: callbacks get the progress.
"""

import asyncio
import gc
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec.structs
import uvloop

from diptych.base.stop_signals import stop_signals
from diptych.bench.conversations import Conversations
from diptych.bench.load import Load, LoadOptions, LoadProgress, LoadResult, Watcher, ramped
from diptych.bench.objectives import LatencyObjectives
from diptych.bench.request_records import verdicts
from diptych.bench.target import Target, TargetConfig, client_for
from diptych.control.errors import ConfigError
from diptych.search.goodput_search import GoodputResult, GoodputSearch, RateResult, SearchConfig
from diptych.workload.build import WorkloadConfig, build
from diptych.workload.spec import ClosedLoop, RequestSpec

Result = TypeVar("Result")
MIN_REQUESTS = 60  # in a run of a search, if they come within four times its length; fewer say little about 90 %
FEW_REQUESTS = 20


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The rate goes evenly from ``start`` to ``end`` requests per second in ``over_s`` seconds, and stays."""

    start: float
    end: float
    over_s: float

    def __post_init__(self) -> None:
        if min(self.start, self.end, self.over_s) <= 0:
            raise ConfigError("ramp: rates and seconds must be positive", param="ramp")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """slo: for requests that name none. warm_up: requests before the first that counts. salt: decides the texts of the
    prompts; equal salts and seeds give equal prompts. None: new ones, so that the server has nothing of them cached.
    settle_s: pause between two runs."""

    target: TargetConfig
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    slo: LatencyObjectives = field(default_factory=LatencyObjectives)
    seed: int = 0
    duration_s: float | None = None
    ramp: Ramp | None = None
    warm_up: int = 4
    salt: str | None = None
    settle_s: float = 0.5

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise ConfigError(f"warmup is {self.warm_up}; it must not be negative", param="warmup")
        if self.duration_s is not None and self.duration_s <= 0:
            raise ConfigError(f"duration is {self.duration_s}; it must be positive", param="duration")
        if self.ramp is not None:
            if self.workload.arrivals.kind == "closed" or self.workload.rate is not None:
                raise ConfigError("ramp takes the place of rate, in an open loop", param="ramp")
            if self.workload.trace is not None and self.workload.trace.scale != 1.0:
                raise ConfigError("ramp takes the place of trace.scale", param="ramp")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run of a search or series. known: of its rate, all runs together (a search only)."""

    rate: float
    result: LoadResult
    met: int
    judged: int
    known: RateResult | None = None

    @property
    def share(self) -> float | None:
        """Attainment; None if no request was judged."""
        return self.met / self.judged if self.judged else None


class Session:
    """A server that was found and warmed up. Setting ``stop`` ends a measurement early; ``broken``: the error that did.
    What was measured until then is kept."""

    def __init__(self, config: BenchConfig, target: Target, stop: asyncio.Event) -> None:
        self.config = config
        self.target = target
        self.stop = stop
        self.broken: ConfigError | None = None
        self.salt = config.salt if config.salt is not None else f"{time.time_ns():x}"
        self._num_runs = 0

    async def run(
        self,
        *,
        workload: WorkloadConfig | None = None,
        seed: int | None = None,
        watch: Watcher | None = None,
        give_up: Callable[[LoadProgress], bool] | None = None,
    ) -> LoadResult:
        """The workload once. Raises ConfigError for a workload that cannot be."""
        config = self.config
        description = workload or config.workload
        if config.ramp is not None:
            description = msgspec.structs.replace(description, rate=1.0)
        source = build(description, config.seed if seed is None else seed)
        options = LoadOptions(slo=config.slo, duration_s=config.duration_s, watch=watch, give_up=give_up)
        stop = asyncio.Event()
        forward = asyncio.create_task(_forward(self.stop, stop))
        maker = self.target.prompt_maker(f"{self.salt}/{self._num_runs}")
        load = Load(self.target, Conversations(self.target, maker, are_kept=converses(description)), options, stop)
        self._num_runs += 1
        try:
            with _without_collection():
                if isinstance(source, ClosedLoop):
                    return await load.closed_loop(source)
                specs: Iterable[RequestSpec] = source
                if config.ramp is not None:
                    specs = ramped(source, config.ramp.start, config.ramp.end, config.ramp.over_s)
                return await load.open_loop(specs, len(source))
        finally:
            forward.cancel()

    async def series(
        self, rates: Iterable[float], seconds: float | None, watch: Watcher | None, on_probe: Callable[[Probe], None]
    ) -> list[Probe]:
        """The workload at each rate in turn: ``seconds`` long, or as many requests as it has."""
        workload = self.config.workload
        probes: list[Probe] = []
        for rate in rates:
            if self.stop.is_set():
                break
            result = await self.run(workload=at_rate(workload, rate, seconds), watch=watch)
            met, judged = _counts(result)
            probes.append(Probe(rate=rate, result=result, met=met, judged=judged))
            on_probe(probes[-1])
            if not await self._has_settled():
                break
        return probes

    async def find_goodput(
        self,
        search_config: SearchConfig,
        *,
        start_rate: float | None,
        seconds: float,
        watch: Watcher | None = None,
        on_probe: Callable[[Probe, GoodputSearch], None] | None = None,
    ) -> tuple[GoodputResult, list[Probe]]:
        """The highest rate that meets the objectives often enough. Raises ConfigError without objectives."""
        workload = self.config.workload
        has_slo = self.config.slo.has_any or workload.slo.to_slo() or any(kind.slo for kind in workload.classes)
        if not has_slo and workload.trace is None:
            raise ConfigError("goodput needs objectives: --slo ttft=2s,tpot=50ms", param="slo")
        if workload.arrivals.kind == "closed" or self.config.ramp is not None:
            raise ConfigError("goodput is searched in an open loop of constant rate", param="find_goodput")
        search = GoodputSearch(search_config, start_rate or await self._first_rate())
        probes: list[Probe] = []
        runs: dict[float, int] = {}
        while not self.stop.is_set() and (rate := search.next_rate()) is not None:
            number = runs[rate] = runs.get(rate, 0) + 1
            result = await self.run(
                workload=at_rate(workload, rate, seconds),
                seed=self.config.seed + number - 1,
                watch=watch,
                give_up=lambda progress: search.is_hopeless(progress.judged - progress.met, progress.total),
            )
            if result.ended == "stopped" or not await self._has_settled():
                break
            met, judged = _counts(result)
            if not judged:
                raise ConfigError("no request of the workload has an objective: --slo ttft=2s,tpot=50ms", param="slo")
            known = search.add(rate, met, judged)
            probes.append(Probe(rate=rate, result=result, met=met, judged=judged, known=known))
            if on_probe is not None:
                on_probe(probes[-1], search)
        return search.found, probes

    async def settle(self) -> None:
        """Wait until the server has dropped the requests that were given up, and answers a short prompt."""
        if not self.stop.is_set():
            await asyncio.sleep(self.config.settle_s)
            await self.target.ask(self.target.prompt_maker(f"{self.salt}/settle/{self._num_runs}").fresh("", 16), 1)

    async def _has_settled(self) -> bool:
        """False if the server no longer answers: then the run before this says nothing about its rate."""
        try:
            await self.settle()
        except ConfigError as error:
            self.broken = error
            return False
        return True

    async def warm_up(self) -> None:
        """Requests like the workload's first, one after another and then together. Raises ConfigError."""
        maker = self.target.prompt_maker(f"{self.salt}/warm-up")
        specs = _first_specs(self.config, self.config.warm_up)
        for number, spec in enumerate(specs):
            await self.target.ask(maker.fresh(f"{number}", spec.prompt_tokens), min(8, spec.output_tokens))
        asks = [
            self.target.ask(maker.fresh(f"{number}/together", spec.prompt_tokens), min(8, spec.output_tokens))
            for number, spec in enumerate(specs)
        ]
        await asyncio.gather(*asks)

    async def _first_rate(self) -> float:
        """A guess from below: the rate of a single client that waits for its answers."""
        maker = self.target.prompt_maker(f"{self.salt}/first")
        specs = _first_specs(self.config, 3)
        before = time.monotonic()
        for number, spec in enumerate(specs):
            await self.target.ask(maker.fresh(f"{number}", spec.prompt_tokens), spec.output_tokens)
        return len(specs) / max(1e-3, time.monotonic() - before)


def at_rate(workload: WorkloadConfig, rate: float, seconds: float | None) -> WorkloadConfig:
    """The workload at a rate; with enough requests to judge it, unless ``seconds`` is None. Raises ConfigError."""
    if workload.arrivals.kind == "closed":
        raise ConfigError("a closed loop has no rate", param="rates")
    number = workload.num_requests
    if seconds is not None:
        number = max(FEW_REQUESTS, min(MIN_REQUESTS, round(4 * rate * seconds)), round(rate * seconds))
    trace = workload.trace
    if trace is not None:
        trace = msgspec.structs.replace(trace, scale=1.0)
    return msgspec.structs.replace(workload, rate=rate, num_requests=number, trace=trace)


@asynccontextmanager
async def open_session(config: BenchConfig) -> AsyncIterator[Session]:
    """Find the server and warm it up; the first stop signal stops what runs, and the next one ends it as
    ever. Raises ConfigError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    signals = stop_signals()

    def on_signal() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        stop.set()

    client = client_for(config.target)
    try:
        target = await Target.find(config.target, client)
        if converses(config.workload):
            target = await target.with_conversations()
        session = Session(config, target, stop)
        await session.warm_up()
        for number in signals:
            loop.add_signal_handler(number, on_signal)
        yield session
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await client.close()


def converses(workload: WorkloadConfig) -> bool:
    """Whether the workload has conversations of its own; those of a trace are what its identities say."""
    return workload.trace is None and workload.sessions.max_turns > 1


def drive(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a measurement on uvloop, with as many open connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return uvloop.run(main)


def _first_specs(config: BenchConfig, count: int) -> list[RequestSpec]:
    source = build(config.workload, config.seed)
    if isinstance(source, ClosedLoop):
        found = (source.next_request(0, 0) for _ in range(count))
        return [spec for spec in found if spec is not None]
    return [spec for _, spec in zip(range(count), source, strict=False)]


def _counts(result: LoadResult) -> tuple[int, int]:
    """(met, judged). Of a run that was given up only the misses are known: the rest counts as met, in its favour."""
    met, judged = verdicts(result.records)
    if result.ended != "given up":
        return met, judged
    return max(0, result.total - (judged - met)), result.total


async def _forward(first: asyncio.Event, second: asyncio.Event) -> None:
    await first.wait()
    second.set()


@contextmanager
def _without_collection() -> Iterator[None]:
    """No cycle collection during a run: it stops the client for milliseconds, and a run makes few cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
