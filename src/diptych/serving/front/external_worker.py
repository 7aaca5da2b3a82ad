"""A WorkerHandle for an external engine. It never starts the engine; it polls until the engine answers.

STARTING: asked for a real token, again and again ---> READY ---> LOST: it does not answer ---> asked again ...

Owns the life of the connection, the exchanges that are under way, and what is known of the engine's load and cache. A
request that breaks off is given back to the core when the engine still answers, and with all others when it does not:
so every request ends, or goes on elsewhere.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.commands import AskKVSnapshot, Drop, Prefill, Release, Reserve, Serve, WorkerCommand
from diptych.control.errors import CoreFailedError, DiptychError, ErrorRecord, WorkerError
from diptych.control.events import Event, HandoffReleased, RequestAdmitted, RequestFinished, StepFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S, LatencyBreakdown
from diptych.control.step import StepFeatures, StepTokens
from diptych.serving.failures.failure_recording import error_words
from diptych.serving.failures.restart_pause import RestartPause
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.worker_handle import WorkerListener, WorkerSite, WorkerState, hand_over
from diptych.serving.front.adapters import ADAPTERS
from diptych.serving.front.capabilities import UNKNOWN_BLOCKS, EngineFacts, EngineNotReadyError, HandoffKind, described
from diptych.serving.front.engine_cache import EngineCache
from diptych.serving.front.engine_connection import ReplyTooLongError, ask, pool_to
from diptych.serving.front.engine_exchange import EngineExchange
from diptych.serving.front.engine_handoff import PrefillLeg
from diptych.serving.front.engine_load import EngineLoad, LearnedPrices
from diptych.serving.front.engine_pages import DIAGNOSED_KINDS, EnginePages, EngineProcess, page_of_rank
from diptych.serving.front.engine_request import RequestFields, fields_of, token_fields_of
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions
from diptych.serving.front.engine_step_feeds import EngineStepFeeds
from diptych.serving.front.handoff_attempts import HandoffAttempts
from diptych.serving.front.relay_request import RelayRequest
from diptych.serving.front.relay_stream import RelayStream
from diptych.serving.front.reply_chunks import EngineUsage
from diptych.serving.front.resume_point import TextBoundaries
from diptych.serving.front.tokenized_prompt import TokenizedPrompt
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.messages import (
    FrontendMessage,
    Loading,
    Orders,
    Ready,
    StepReport,
    pack_events,
    unpack_command,
)
from diptych.timeline.watched_server import WatchedEngine

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
ALIVE_S = 2.0  # for a sign of life
MAX_ENGINE_BLOCKS = 1 << 20  # of which events are kept, of such an engine
STALE_PROBES = 4


class ExternalWorker:
    """A WorkerHandle for an external engine. relay_of: the open stream of a request. on_gaps: called for lost KV events
    (see ServingMetrics). num_up: how many engines there are to try. prices: those of all engines. leave: writes down
    what is known of a failure, and returns where. is_draining: whether an operator has taken it out: it may be started
    again soon, and is looked at more often."""

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        options: FrontOptions,
        relay_of: Callable[[str], RelayStream | None],
        on_gaps: Callable[[Mapping[float, int], int], None],
        num_up: Callable[[], int],
        clock: Callable[[], int],
        prices: LearnedPrices,
        leave: Callable[[str, BaseException], str],
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number, self.name, self._log = number, spec.name, LimitedLog(logger)
        self.spec = spec
        self.site = WorkerSite()
        self.state = WorkerState.STOPPED
        self.num_restarts = 0
        self.ready: asyncio.Future[Ready] | None = None
        self.facts: EngineFacts | None = None
        self.clock = clock
        self.exchanges: dict[str, EngineExchange] = {}
        self._adapter = ADAPTERS[spec.kind]
        self._options = options
        self._relay_of = relay_of
        self._on_gaps = on_gaps
        self._num_up = num_up
        self._is_draining = is_draining
        self._prices = prices
        self._listener: WorkerListener | None = None
        self._life: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._lost_words, self._has_crashed = "", False
        self._lost_ns: int | None = None  # None: it was never lost, or is back
        self._looked_ns = 0  # when it was last asked for a sign of life
        self.has_restarted = False  # before it was last ready, its process was seen to have ended
        self._leave = leave
        self._failed: tuple[CoreFailedError, str] | None = None  # by a defect; its recording
        self._restart = RestartPause()
        self._suspects: dict[str, str] = {}  # attempts that broke off, until it is known whether the engine lives
        self._check: asyncio.Task[None] | None = None
        self._scraping: asyncio.Task[None] | None = None
        self.pool = pool_to(*spec.address, spec.headers, is_tls=spec.is_tls)
        self.load = EngineLoad(UNKNOWN_BLOCKS, options.block_size, 0, clock(), prices)
        self.cache = EngineCache(options, spec, clock)
        self.cache.on_defect = self._on_task_failed
        self.steps = EngineStepFeeds(spec, self._on_step, clock)
        self.handoffs = HandoffAttempts(self)
        self._boundaries = TextBoundaries(self)
        self._pages = EnginePages()
        self._process = EngineProcess()

    @property
    def bytes_per_token(self) -> float:
        return self._options.bytes_per_token

    # -- WorkerHandle --------------------------------------------------------------------------------------------------

    def start(self, listener: WorkerListener) -> None:
        assert self._life is None, "started twice"
        self._listener = listener
        self.ready = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.state = WorkerState.STARTING
        self._life = start_watched(self._live(), self.name, lambda error: listener.on_defect(self.name, error))

    def send(self, message: FrontendMessage) -> None:
        if isinstance(message, Orders) and self.state is WorkerState.READY:
            for order in message.orders:
                command = unpack_command(order.command)
                try:
                    self.obey(command)
                except Exception as error:  # the other orders are carried out
                    self.on_defect(getattr(command, "attempt_id", ""), error)

    def pulse(self) -> Pulse | None:
        """None: an engine is asked for a sign of life, and stamps no file here."""
        return None

    def kill(self, because: str) -> None:
        """Engines of others are not killed: this one counts as lost."""
        self._lose(because)

    async def stop(self, *, is_removed: bool = False) -> None:
        """Let go of the engine, which runs on."""
        self.state = WorkerState.STOPPED
        tasks = [task for task in (self._life, self._check, self._scraping) if task is not None]
        self._life = self._check = self._scraping = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop_exchanges()
        self.pool.close()
        await self.cache.close()
        await self.steps.close()
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(WorkerError(f"stopped before {self.name} was ready"))

    async def tokenize(self, request: RelayRequest) -> TokenizedPrompt | None:
        """A prompt as this engine sees it; None where it cannot say, or does not answer."""
        if self.facts is None:
            return None
        try:
            return await self._adapter.tokenize(self.pool, request, self.facts)
        except (ConnectionError, TimeoutError) as error:
            why = str(error) or "no reply"
            self._log.warning("tokenise", "%s: a prompt could not be tokenised: %s", self.name, why)
            self._check_soon()
            return None

    def described(self) -> dict[str, Any]:
        """What was found out about it, for people."""
        return {
            **described(self.facts),
            "prefix_index": self.cache.kind,
            "steps": self.steps.described(),
        }

    def watched(self) -> WatchedEngine | None:
        """What its metrics said lately; None: nothing that could be diagnosed."""
        return None if self.facts is None else self._pages.watched(self.spec, self.facts.version)

    async def _live(self) -> None:
        while True:
            await self._until_ready()
            await self._watch()
            if self._failed is not None:
                self._failed = None
                await asyncio.sleep(self._restart.next_s())

    async def _until_ready(self) -> None:
        """Ask for a real token until there is one."""
        assert self._listener is not None and self.ready is not None
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            hand_over(self._listener, self.number, Loading(f"asking {self.name} for a token"))
            try:
                facts = await self._adapter.look(self.pool, self.spec)
                break
            except EngineNotReadyError as error:
                words = str(error)
                self._has_crashed = self._has_crashed or isinstance(error.__context__, ConnectionError)
            except Exception as error:  # a defect of the adapter must not end the worker's life in silence
                self._log.error(kind_of(error), "%s: its replies could not be read", self.name, error=error)
                words = f"{type(error).__name__}: {error}"
            if words != said:
                logger.warning("%s is not ready: %s", self.name, words)
                said = words
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._begin(facts)
        message = facts.ready(self.spec.url, self._options.block_size)
        self._say_that_it_serves(message.description)
        if facts.degraded:
            logger.warning("%s lacks: %s", self.name, "; ".join(facts.degraded))
        hand_over(self._listener, self.number, message)
        if not self.ready.done():
            self.ready.set_result(message)
        self._report_load()

    def _say_that_it_serves(self, description: str) -> None:
        lost_ns, self._lost_ns = self._lost_ns, None
        if lost_ns is None:
            logger.info("%s is ready: %s", self.name, description)
        else:
            away_s = (self.clock() - lost_ns) / NS_PER_S
            how = "its process was started again" if self.has_restarted else "the same process, as far as it shows"
            logger.warning("%s is back after %.1f s (%s): %s", self.name, away_s, how, description)

    def _begin(self, facts: EngineFacts) -> None:
        """The engine holds nothing of ours."""
        self.has_restarted, self._has_crashed = self._has_crashed, False
        self.facts, self.state = facts, WorkerState.READY
        self._lost.clear()
        self._restart.begun()
        due_s = STALE_PROBES * self._options.probe_s + 1.0 if facts.capabilities.gauges else 0.0
        blocks = self.num_blocks
        due_ns = int(due_s * NS_PER_S)
        self.load = EngineLoad(blocks, self._options.block_size, due_ns, self.clock(), self._prices)
        self.cache.begin(blocks, facts.num_blocks or MAX_ENGINE_BLOCKS, self.report, facts.kv_sources)
        self.steps.begin()
        self._pages.clear()
        self._process.begin()

    @property
    def num_blocks(self) -> int:
        """Size of the engine's KV cache, in blocks of ours."""
        return UNKNOWN_BLOCKS if self.facts is None else self.facts.num_blocks_of(self._options.block_size)

    async def _watch(self) -> None:
        """Look after it while it serves; returns when it is lost, and has told the fleet."""
        assert self._listener is not None
        while self.state is WorkerState.READY and not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._options.probe_s)
            if not self._lost.is_set():
                try:
                    self._look_after()
                except Exception as error:
                    self.on_defect("", error)
        if self.state is not WorkerState.READY:
            return
        if self._is_draining():
            logger.warning("%s is gone while it drains: %s", self.name, self._lost_words)
        else:
            logger.error("%s is lost: %s", self.name, self._lost_words)
        self.state, self._lost_ns = WorkerState.LOST, self.clock()
        self.num_restarts += 1
        self._drop_exchanges()
        self.pool.close()
        headers = self.spec.headers_again(self.pool.headers)
        self.pool = pool_to(*self.spec.address, headers, is_tls=self.spec.is_tls)
        await self.cache.close()
        await self.steps.close()
        loss = Loss(WorkerError(f"{self.name}: {self._lost_words}"), self._has_crashed)
        if self._failed is not None:
            loss = Loss(self._failed[0], False, True, self._failed[1])
        self._listener.on_lost(self.number, loss)

    def _look_after(self) -> None:
        """A tick: gauges, limits of silence, the load."""
        now = self.clock()
        if self._scraping is None or self._scraping.done():
            self._scraping = start_watched(self._scrape(), "gauges", self._on_task_failed)
        silent_ns = self._options.silence_s * NS_PER_S
        newest, is_mute = 0, False
        for exchange in list(self.exchanges.values()):
            if exchange.stream.is_full:  # it is not read: its client is slow, not the engine
                exchange.last_ns = now
            newest = max(newest, exchange.last_ns)
            limit_s = self._options.idle_s if exchange.first_ns else self._options.first_byte_s
            if now - exchange.last_ns > limit_s * NS_PER_S:
                exchange.break_off(f"nothing came for {limit_s:g} s")
                is_mute = is_mute or bool(exchange.first_ns)
        if is_mute and now - newest > self._options.idle_s * NS_PER_S:  # its server may answer all the same
            self._lose(f"no stream got a token for {self._options.idle_s:g} s")
        self.handoffs.break_off_overdue(now, self._options.first_byte_s)
        if self.exchanges:
            is_silent = now - newest > silent_ns
        else:  # nothing would break off if it went away
            is_silent = self._is_draining() or now - self._looked_ns > silent_ns
        if is_silent:
            self._check_soon()
        self.cache.tick(now)
        self._report_load()

    async def _scrape(self) -> None:
        path = self._adapter.gauge_path
        if not path or self.facts is None or not self.facts.capabilities.gauges:
            return
        try:
            status, page = await ask(self.pool, "GET", path, timeout_s=ALIVE_S)
        except ReplyTooLongError:
            return
        except (ConnectionError, TimeoutError):
            self._check_soon()
            return
        if status == 200 and self._process.is_another(page):
            self._lose("another process answers at its address", crashed=True)
        page = page_of_rank(page, self.spec.rank)
        if status == 200 and self.spec.kind in DIAGNOSED_KINDS:
            self._pages.add(page, self.clock())
        gauges = self._adapter.read_gauges(page) if status == 200 else None
        if gauges is not None:
            self.load.on_gauges(gauges, self.clock())

    def _check_soon(self) -> None:
        """Find out whether it lives."""
        if self.state is WorkerState.READY and (self._check is None or self._check.done()):
            self._check = start_watched(self._check_life(), "a sign of life", self._on_task_failed)

    async def _check_life(self) -> None:
        """Any reply to a small question is a sign of life; what broke off is given back then."""
        self._looked_ns = self.clock()
        try:
            await ask(self.pool, "GET", "/v1/models", timeout_s=ALIVE_S)
        except (ConnectionError, TimeoutError, ReplyTooLongError) as error:
            has_ended = isinstance(error, ConnectionError)
            self._lose(str(error) or f"no sign of life within {ALIVE_S:g} s", crashed=has_ended)
            return
        suspects, self._suspects = self._suspects, {}
        if suspects:
            now = self.clock()
            self.report([HandoffReleased(now, attempt_id) for attempt_id in suspects])

    def on_defect(self, attempt_id: str, error: BaseException) -> None:
        """End the attempt's request with an error (attempt_id "": no request): what its client has of the answer may
        not be counted. The port counts as lost, and begins anew; other requests go on where they can."""
        core = f"the connection to {self.name}"
        logger.error("%s has failed", core, exc_info=error)
        failed = CoreFailedError(f"{core} has failed by a defect of the server: {error_words(error)}")
        if self._failed is None:
            self._failed = (failed, self._leave(core, error))
        self.exchanges.pop(attempt_id, None)
        if attempt_id:
            self._end_with(attempt_id, failed)
        self._lose(failed.message)

    def _on_task_failed(self, error: BaseException) -> None:
        self.on_defect("", error)

    def _lose(self, words: str, *, crashed: bool = False) -> None:
        """crashed: its process has ended, maybe of what it was computing."""
        if self.state is WorkerState.READY and not self._lost.is_set():
            self._lost_words, self._has_crashed = words, crashed
            self._lost.set()

    def _drop_exchanges(self) -> None:
        for exchange in list(self.exchanges.values()):
            exchange.cancel()
        self.handoffs.drop_all()
        self._boundaries.drop_all()
        self._suspects.clear()

    def _report_load(self) -> None:
        assert self._listener is not None
        load, stats = self.load.report(self.clock()), self.load.stats()
        hand_over(self._listener, self.number, StepReport([], load=load, stats=stats))

    # -- commands -----------------------------------------------------------------------------------------------------

    def obey(self, command: WorkerCommand) -> None:
        """Carry it out, now or when it is known where the text of its answer ends (see ResumePointOwner)."""
        if self._boundaries.awaits(command, self._relay_of):
            return
        match command:
            case Serve():
                self._serve(command)
            case Drop():
                self._drop(command)
            case AskKVSnapshot():
                self.cache.snapshot()
            case Reserve():
                self.handoffs.reserve(command)
            case Prefill():
                self.handoffs.prefill(command)
            case Release():
                self.handoffs.release(command.attempt_id)
            case _:  # Send, Renew: the engines' own protocols do that; settings: an operator cannot give them here
                pass

    def _serve(self, command: Serve) -> None:
        stream = self._relay_of(command.request_id)
        assert self.facts is not None
        if stream is None:
            self.report([HandoffReleased(self.clock(), command.attempt_id)])
            return
        if not stream.can_resume:
            self._cannot(command.attempt_id, "the answer cannot be continued at another engine")
            return
        if self.spec.role != "both" and self.handoff_kind == "bootstrap":
            self._cannot(command.attempt_id, f"{self.name} serves only one phase, and there is no engine for the other")
            return
        fields = self._asked_by_tokens(stream, command.attempt_id) or self.asked(stream)
        exchange = EngineExchange(self, command.attempt_id, stream, fields.question(stream))
        self.exchanges[command.attempt_id] = exchange
        is_whole = not stream.request.is_stream
        self.load.on_sent(command.attempt_id, stream.num_estimated_tokens, self.clock(), is_whole=is_whole)
        exchange.begin(self.pool)

    def _drop(self, command: Drop) -> None:
        exchange = self.exchanges.get(command.attempt_id)
        if exchange is not None:
            exchange.cancel()
        self.handoffs.drop(command.attempt_id)
        self._boundaries.drop(command.attempt_id)
        self._suspects.pop(command.attempt_id, None)
        self.report([HandoffReleased(self.clock(), command.attempt_id)])

    def _cannot(self, attempt_id: str, words: str) -> None:
        self._end_with(attempt_id, WorkerError(words, code="answer_lost"))

    def _end_with(self, attempt_id: str, error: DiptychError) -> None:
        latency, record = LatencyBreakdown(0, 0, 0, 0), ErrorRecord.of(error)
        self.report([RequestFinished(self.clock(), attempt_id, FinishReason.ERROR, 0, 0, 0, latency, None, record)])

    @property
    def handoff_kind(self) -> HandoffKind:
        return self.facts.capabilities.handoff if self.facts is not None else ""

    def stream_of(self, request_id: str) -> RelayStream | None:
        return self._relay_of(request_id)

    def asked(self, stream: RelayStream) -> RequestFields:
        assert self.facts is not None
        return fields_of(
            stream, self.facts.model, self._adapter.changes(stream.request, self.facts), self.facts.max_model_len
        )

    def _asked_by_tokens(self, stream: RelayStream, attempt_id: str) -> RequestFields | None:
        assert self.facts is not None
        takes_tokens = self.facts.capabilities.tokens_in
        return token_fields_of(stream, self.facts.model, attempt_id) if takes_tokens else None

    # -- what exchanges tell (see ExchangeOwner) ----------------------------------------------------------------------

    def report(self, events: Sequence[Event], tokens: StepTokens | None = None) -> None:
        if self._listener is not None and self.state is WorkerState.READY:
            hand_over(self._listener, self.number, StepReport(pack_events(events), tokens))

    def on_gaps(self, attempt_id: str, gaps: Mapping[float, int], num_tokens: int) -> None:
        self.load.on_gaps(attempt_id, gaps, num_tokens)
        self._on_gaps(gaps, num_tokens)

    def report_completed_handoff(self, events: Sequence[Event], attempt_id: str, token_id: int) -> None:
        if self._listener is not None and self.state is WorkerState.READY:
            report = StepReport(pack_events(events), first_tokens={attempt_id: (token_id, None)})
            hand_over(self._listener, self.number, report)

    def on_first_token(self, exchange: EngineExchange) -> None:
        self.load.on_first_token(exchange.attempt_id, exchange.first_ns)

    def on_prompt_computed(self, stream: RelayStream) -> None:
        """Report a prompt as computed. The client gets its token first: the blocks of long prompts are many."""
        asyncio.get_running_loop().call_soon(self._note_computed, stream.hashes, self.clock())

    def _note_computed(self, hashes: Sequence[bytes], now: int) -> None:
        try:
            self.cache.on_computed(hashes, now)
        except Exception as error:  # the loop would log it, and the router would go on with what is half noted
            self.on_defect("", error)

    def on_usage(self, exchange: EngineExchange, usage: EngineUsage) -> int:
        cached = self.cached_of(exchange.stream, usage)
        if not exchange.stream.request.is_stream:
            computed = exchange.stream.num_estimated_tokens - cached
            self.load.on_whole(exchange.attempt_id, computed, exchange.num_tokens, self.clock())
        return cached

    def cached_of(self, stream: RelayStream, usage: EngineUsage) -> int:
        """Cached tokens of the prompt, scaled from the engine's tokens to the estimate that the core knows."""
        said = usage.cached_tokens
        estimated, num_said = stream.num_estimated_tokens, usage.all_prompt_tokens
        stream.note_prompt(num_said, said or 0)
        cached = min(estimated, max(0, said or 0) * estimated // max(1, num_said))
        self.load.on_prompt(estimated, None if said is None else cached, num_said)
        return cached

    def _on_step(self, step: StepFinished, features: StepFeatures, duration_ns: int) -> None:
        self.load.on_step(features, duration_ns)
        events: list[Event] = []
        for attempt_id, start, _ in step.prefills:
            exchange = self.exchanges.get(attempt_id)
            if exchange is not None and exchange.awaits_admission:
                exchange.awaits_admission = False
                events.append(RequestAdmitted(step.start_ns, attempt_id, start, is_first=True))
        self.report([*events, step])

    def on_over(self, exchange: EngineExchange) -> None:
        self.exchanges.pop(exchange.attempt_id, None)
        self.load.on_over(exchange.attempt_id, self.clock())

    def on_lost(self, exchange: EngineExchange, words: str) -> None:
        self.on_silent(exchange.attempt_id, words)

    def on_silent(self, attempt_id: str, words: str) -> None:
        self._log.warning("broke off", "%s: request %s broke off: %s", self.name, attempt_id, words)
        self._suspects[attempt_id] = words
        self._check_soon()

    async def text_of(self, token_ids: Sequence[int]) -> str | None:
        assert self.facts is not None
        return await self._adapter.text_of(self.pool, token_ids, self.facts.model)

    def on_refused(self, exchange: EngineExchange, status: int) -> bool:
        """Try a refused exchange elsewhere, each engine once. Returns whether it is tried."""
        self.load.on_refused(self.clock())
        refused_by = exchange.stream.refused_by
        refused_by.add(self.number)
        if len(refused_by) >= self._num_up():
            return False
        self._log.warning("refused", "%s: status %d for a request; trying another", self.name, status)
        self._report_load()
        self.report([HandoffReleased(self.clock(), exchange.attempt_id)])
        return True

    # -- what prefill legs tell (see PrefillOwner) --------------------------------------------------------------------

    def on_leg_computed(self, leg: PrefillLeg) -> None:
        self.handoffs.on_computed(leg)

    def on_leg_lost(self, leg: PrefillLeg, words: str) -> None:
        self.handoffs.on_over(leg)
        self.on_silent(leg.attempt_id, words)

    def on_leg_refused(self, leg: PrefillLeg, status: int, body: bytes) -> None:
        self.handoffs.on_refused(leg, status, body)
