"""Workers inside the test's process: the second implementation of WorkerHandle, Launcher and KVConnector.

Everything but the process is real: WorkerCore, EngineCore, RequestIntake, ConnectorDriver, and the messages as bytes.
The model is make-believe (FakeRunner: token i after a prompt of p tokens is p + i), time is virtual, and a step takes
as long as ``cost`` says. What a worker is sent while some worker reports leaves one nanosecond later, as in the
simulator: which of two workers ends its step first within a nanosecond does not matter.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fake_worker import EOS_TOKEN, VOCAB_SIZE, FakeRunner
from tests.simulation.linear_cost import LinearCost
from virtual_time import VirtualTime

from diptych.control.commands import Prefill, Reserve, Resize, Serve
from diptych.control.compute_share import ComputeShare
from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.reports import LoadReport
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.engine.worker_core import ChunkArrived, TransferBroken, WorkerCore
from diptych.control.errors import DiptychError, ErrorRecord, WorkerError
from diptych.control.events import Event
from diptych.control.slo import NS_PER_MS
from diptych.control.step import SchedulerOutput, StepTokens
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.transfer.connector import Committed, ConnectorEvent
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.worker_handle import WorkerListener, WorkerSite, WorkerState, hand_over
from diptych.serving.link.engine_options import EngineOptions, parse_cores
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.messages import (
    Failed,
    FrontendMessage,
    Order,
    Orders,
    Ready,
    StepReport,
    WorkerMessage,
    decode_from_frontend,
    decode_from_worker,
    encode,
    pack_events,
    unpack_command,
)
from diptych.serving.worker.connector_driver import ConnectorDriver
from diptych.serving.worker.request_intake import RequestIntake
from diptych.serving.worker.worker_loop import HeldBackTokens
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.environment import MESSAGE, STEP_END

COST = LinearCost(base_ns=5e6, prefill_token_ns=1e4, decode_seq_ns=1e5, decode_token_ns=10)
MAX_MODEL_LEN = 2048
DETECTION_NS, RESTART_NS = 10 * NS_PER_MS, 50 * NS_PER_MS


@dataclass
class Host:
    """What the workers of a test share. num_blocks: of each, where the options do not say it. model: what warm-up has
    taught one of these settings. refusal: an error with which a worker refuses to start, by number. bytes_per_token,
    travel_ns: of KV, and how long its bytes travel."""

    time: VirtualTime
    cost: CostModel = COST
    num_blocks: int = 256
    model: Callable[[EngineConfig], StepTimeModel] = lambda config: StepTimeModel()
    bytes_per_token: int = 0
    travel_ns: Callable[[int], int] = lambda num_bytes: NS_PER_MS
    refusal: dict[int, DiptychError] = field(default_factory=dict)
    depth: int = 1
    is_reporting: bool = False
    workers: "list[InProcessWorker]" = field(default_factory=list)

    async def open(self, join_port: int) -> None:
        """Nothing is to be opened."""

    async def close(self) -> None:
        """Nothing is to be closed."""

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> "InProcessWorker":
        worker = InProcessWorker(number, options, self)
        self.workers.append(worker)
        return worker


class InProcessWorker:
    """A WorkerHandle in this process. ``lose`` ends the engine, as a crash ends a process."""

    def __init__(self, number: int, options: EngineOptions, host: Host) -> None:
        self.number = number
        self.state = WorkerState.STARTING
        self.num_restarts = 0
        self.site = WorkerSite()
        self.ready: asyncio.Future[Ready] | None = None
        self.engine: InProcessEngine | None = None  # None while the worker is lost
        self._options = options
        self._host = host
        self._listener: WorkerListener
        self._last_ns = -1  # when the newest message arrives
        self._life = 0

    def start(self, listener: WorkerListener) -> None:
        self._listener = listener
        self.state = WorkerState.STARTING
        self.ready = asyncio.get_running_loop().create_future()
        self._host.time.at(self._host.time.now, MESSAGE, self._begin)

    def send(self, message: FrontendMessage) -> None:
        """Send a message. Messages keep their order, and never arrive within the call."""
        if self.engine is None:
            return
        time, data = self._host.time, encode(message)
        self._last_ns = max(time.now + int(self._host.is_reporting), self._last_ns)
        time.at(self._last_ns, MESSAGE, partial(self._arrive, self._life, data))

    def pulse(self) -> Pulse | None:
        return None

    def kill(self, because: str) -> None:
        self.lose(because, crashed=False)

    async def stop(self, *, is_removed: bool = False) -> None:
        self._end_engine()
        self.state = WorkerState.STOPPED

    def lose(self, because: str = "it crashed", *, crashed: bool = True, restart_ns: int = RESTART_NS) -> None:
        """The engine is gone. The loss is known after DETECTION_NS, and another engine is ready after restart_ns."""
        assert self.engine is not None, "it is lost already"
        time, back_ns = self._host.time, self._host.time.now + restart_ns
        self._end_engine()
        loss = Loss(WorkerError(f"worker {self.number} was lost: {because}"), crashed)
        time.at(time.now + DETECTION_NS, MESSAGE, partial(self._report_loss, loss, back_ns))

    def report(self, *events: Event, load: LoadReport | None = None) -> None:
        """Say what a test makes up."""
        self.say(StepReport(pack_events(events), load=load))

    def say(self, message: WorkerMessage) -> None:
        """A message to the listener, by way of its bytes."""
        assert not self._host.is_reporting, "a report within a report"
        self._host.is_reporting = True
        try:
            hand_over(self._listener, self.number, decode_from_worker(encode(message)))
        finally:
            self._host.is_reporting = False

    def _begin(self) -> None:
        assert self.ready is not None
        if self.state is WorkerState.STOPPED:
            return
        if refusal := self._host.refusal.get(self.number):
            self._listener.on_message(self.number, Failed(ErrorRecord.of(refusal)))
            self.ready.set_exception(refusal)
            return
        engine = self.engine = InProcessEngine(self, self._options, self._host)
        self.state = WorkerState.READY
        data = encode(engine.ready())
        ready = decode_from_worker(data)
        assert isinstance(ready, Ready)
        if not self.ready.done():
            self.ready.set_result(ready)
        self._listener.on_message(self.number, ready)
        self._host.time.at(self._host.time.now, MESSAGE, engine.turn)  # behind the orders that it was sent at once

    def _arrive(self, life: int, data: bytes) -> None:
        if life == self._life and self.engine is not None:
            message = decode_from_frontend(data)
            if isinstance(message, Orders):
                self.engine.take(message.orders)

    def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.is_over = True
            self.engine.connector.close()
        self.engine = None
        self._life += 1
        self._last_ns = -1

    def _report_loss(self, loss: Loss, back_ns: int) -> None:
        if self.state is WorkerState.STOPPED:
            return
        self.state = WorkerState.LOST
        self.num_restarts += 1
        self._listener.on_lost(self.number, loss)
        self._host.time.at(max(back_ns, self._host.time.now + 1), MESSAGE, self._begin)


class InProcessEngine:
    """One life of a worker: the turns of serving.worker.worker_loop as events."""

    def __init__(self, worker: InProcessWorker, options: EngineOptions, host: Host) -> None:
        self.is_over = False
        self.connector = InProcessConnector(worker.number, host)
        place = options.place
        pool = place.pool if place else None
        geometry = read_kv_geometry(options.model, options.device.dtype, options.memory.block_size)
        own = geometry.blocks_within(options.memory.kv_cache_bytes or 0) or host.num_blocks
        num_blocks, first_block = (pool.num_blocks, pool.first_block) if pool else (own, 0)
        names = options.explains_misses
        cache = CacheConfig(num_blocks, options.memory.block_size, first_block=first_block, names_evictors=names)
        length = options.max_model_len or MAX_MODEL_LEN
        config = EngineConfig(cache, options.scheduler, options.slo, length)
        publishes_kv = names or (place is not None and place.publishes_blocks)
        self.core = WorkerCore(EngineCore(config, host.model(config)), publishes_kv=publishes_kv)
        self.runner = FakeRunner()
        self._intake = RequestIntake(self.core, self.runner)
        self._transfers = ConnectorDriver(self.core, self._intake, self.connector if place else None)
        self._worker = worker
        self._host = host
        self._held_back = HeldBackTokens(self.core)
        self._share = ComputeShare()
        if options.device.cores is not None:
            cpus = parse_cores(options.device.cores)
            self._share = ComputeShare(cpus, options.device.threads or len(cpus))
        self._first_share = self._share
        self._slowness = 1000  # per mille
        self._inbox: deque[Order] = deque()
        self._step: SchedulerOutput | None = None  # under way
        self._ahead: SchedulerOutput | None = None  # planned behind it

    def ready(self) -> Ready:
        """What it holds."""
        config = self.core.engine.config
        cache, scheduler = config.cache, config.scheduler
        return Ready(
            VOCAB_SIZE,
            config.max_model_len,
            self.core.engine.kv.capacity_tokens,
            scheduler.max_waiting,
            scheduler.max_num_seqs,
            [EOS_TOKEN],
            "a worker of this process",
            address=self.connector.address,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            share=self._share,
        )

    def take(self, orders: Iterable[Order]) -> None:
        """Orders came: carry them out now, or when the step under way has ended."""
        self._inbox.extend(orders)
        self.turn()

    def turn(self) -> None:
        """Something came, or it is time, or a step has ended: see WorkerCore for the order."""
        core, now = self.core, self._host.time.now
        if self.is_over or self._step is not None:
            return
        for event in self._transfers.poll():
            self._transfers.on_event(event, now)
        while self._inbox:
            self._take(self._inbox.popleft(), now)
        core.end_turn(now)
        self._flush(self._held_back.release())
        while (output := self._next_plan(now)) is not None:
            self._flush()
            if output.is_compute:
                self._step = output
                self._ahead = core.begin_step(now) if self._host.depth > 1 else None
                end_ns = now + max(1, self._host.cost.step_ns(output) * self._slowness // 1000)
                self._host.time.at(end_ns, STEP_END + self._worker.number, self._end_step)
                return
            core.end_step(output, self.runner.execute(output), now)
            self._flush()
        self._flush()
        if (wake_ns := core.next_wake_ns) is not None:
            self._host.time.at(max(wake_ns, now), MESSAGE, self._on_time)

    def _next_plan(self, now: int) -> SchedulerOutput | None:
        ahead, self._ahead = self._ahead, None
        return self.core.begin_step(now) if ahead is None else ahead

    def _on_time(self) -> None:
        wake_ns = self.core.next_wake_ns
        if wake_ns is not None and wake_ns <= self._host.time.now:
            self.turn()

    def _end_step(self) -> None:
        output, self._step = self._step, None
        if self.is_over or output is None:
            return
        result = self.runner.execute(output)
        assert result.payload is not None
        tokens = result.payload.of_open(self.core.engine.requests)
        self.core.end_step(output, result, self._host.time.now)
        self._flush(self._held_back.hold_back(tokens))
        self.turn()

    def _take(self, order: Order, now: int) -> None:
        command = unpack_command(order.command)
        if isinstance(command, Serve | Reserve | Prefill):
            assert order.tokens is not None
            if isinstance(command, Prefill):
                self._transfers.set_address(command.attempt_id, order.address)
            self._intake.begin(command, order.tokens, now)
        elif isinstance(command, Resize):
            ratio = self._share.num_units / command.share.num_units
            self._share = command.share
            self._slowness = round(1000 * self._first_share.num_units / command.share.num_units)
            self.core.on_resized(self._share, ratio, now)
        else:
            self.core.handle(command, now)

    def _flush(self, tokens: StepTokens | None = None) -> None:
        now = self._host.time.now
        if tokens is not None and tokens.is_empty:
            tokens = None
        while not (outbox := self.core.take_outbox()).is_empty or tokens is not None:
            for action in outbox.before:
                self._transfers.act(action, tokens, now)
            if outbox.events or outbox.load is not None or tokens is not None:
                self._intake.forget_ended(outbox.events)
                first_tokens, self._transfers.first_tokens = self._transfers.first_tokens, {}
                events, stats = pack_events(outbox.events), self.core.engine.stats()
                self._worker.say(StepReport(events, tokens, first_tokens, outbox.load, stats))
            for action in outbox.after:
                self._transfers.act(action, tokens, now)
            tokens = None


@dataclass
class _Receiving:
    num_tokens: int
    num_here: int
    first_ns: int = -1


@dataclass
class _Sending:
    target: int
    last_ns: int = 0  # when the newest arrives


class InProcessConnector:
    """A KVConnector that moves no bytes, only the news of them. Its peers are found by their numbers."""

    def __init__(self, number: int, host: Host) -> None:
        self.address = f"worker:{number}"
        self._number = number
        self._host = host
        self._receiving: dict[str, _Receiving] = {}
        self._sending: dict[str, _Sending] = {}
        self._events: list[ConnectorEvent] = []

    def expect(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        assert attempt_id not in self._receiving, attempt_id
        assert not num_tokens or block_ids
        self._receiving[attempt_id] = _Receiving(start + num_tokens, start)

    def forget(self, attempt_id: str) -> None:
        self._receiving.pop(attempt_id, None)
        self._events = [event for event in self._events if event.attempt_id != attempt_id]

    def open(self, attempt_id: str, address: str, start: int) -> None:
        assert attempt_id not in self._sending, attempt_id
        self._sending[attempt_id] = _Sending(int(address.removeprefix("worker:")))

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        self._post(attempt_id, start + num_tokens, num_tokens * self._host.bytes_per_token)

    def commit(self, attempt_id: str, payload: bytes) -> None:
        self._post(attempt_id, 0, 0, payload)

    def cancel(self, attempt_id: str) -> None:
        self._sending.pop(attempt_id, None)

    def is_sending(self, attempt_id: str) -> bool:
        """Whether a transfer of it is open here."""
        return attempt_id in self._sending

    def break_off(self, attempt_id: str) -> None:
        """The sender cannot go on, as if the link were gone."""
        self._sending.pop(attempt_id)
        self._happened(TransferBroken(attempt_id, True, "the link is gone"))

    def poll(self) -> list[ConnectorEvent]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        """No descriptor: there is no file; news asks for a turn instead."""
        return -1

    def close(self) -> None:
        """Close it. What is on its way is lost."""
        self._sending.clear()

    def _post(self, attempt_id: str, end: int, num_bytes: int, payload: bytes | None = None) -> None:
        if (sending := self._sending.get(attempt_id)) is not None:
            at_ns = self._host.time.now + self._host.travel_ns(num_bytes)
            sending.last_ns = max(sending.last_ns, at_ns)  # a commit does not pass the KV
            self._host.time.at(sending.last_ns, MESSAGE, partial(self._deliver, sending, attempt_id, end, payload))

    def _deliver(self, sending: _Sending, attempt_id: str, end: int, payload: bytes | None) -> None:
        engine = self._host.workers[sending.target].engine
        if engine is not None and self._sending.get(attempt_id) is sending:  # else it was cancelled on its way
            if payload is not None:
                del self._sending[attempt_id]
            engine.connector.receive(attempt_id, end, payload)

    def receive(self, attempt_id: str, end: int, payload: bytes | None) -> None:
        """KV up to the token ``end`` is here, or the commit."""
        now, receiving = self._host.time.now, self._receiving.get(attempt_id)
        if receiving is None:
            return
        if payload is None:
            receiving.num_here = max(receiving.num_here, end)
            receiving.first_ns = now if receiving.first_ns < 0 else receiving.first_ns
            self._happened(ChunkArrived(attempt_id, receiving.num_here))
            return
        assert receiving.num_here >= receiving.num_tokens, f"{attempt_id}: KV is missing"
        del self._receiving[attempt_id]
        first_ns = now if receiving.first_ns < 0 else receiving.first_ns
        self._happened(Committed(attempt_id, payload, 0, first_ns, now))

    def _happened(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        engine = self._host.workers[self._number].engine
        if engine is not None:
            engine.turn()
