"""The front end over engines that others run: takes clients' requests, and gives each a stream that an engine feeds."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.control.errors import ConflictError, OverloadedError
from diptych.control.request import Submission
from diptych.control.slo import NS_PER_S
from diptych.serving import edge_limits
from diptych.serving.front.engine_pages import DIAGNOSED_KINDS
from diptych.serving.front.external_fleet import ENGINE_STATES, ExternalFleet
from diptych.serving.front.external_worker import ExternalWorker
from diptych.serving.front.relay_request import CHAT_PATH, COMPLETION_PATH, RelayRequest, options_for
from diptych.serving.front.relay_stream import RelayGeneration, RelayStream
from diptych.serving.front.tokenized_prompt import TokenizedPrompt
from diptych.serving.served_fleet import ServedFleet
from diptych.timeline.watched_server import WatchedEngine

MAX_TOKENISING = 1024  # requests that engines tokenise at once
ID_PREFIXES = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}


class EngineFront(ServedFleet):
    """A ServedFleet of engines."""

    def __init__(self, fleet: ExternalFleet) -> None:
        super().__init__(fleet.options, fleet)
        self.external = fleet
        self.front = fleet.front
        self._next_tokenizer = self._num_tokenising = 0
        self.metrics.more_families.append(lambda model: engine_families(fleet.engines, model))
        self.metrics.more_families.append(lambda model: [engine_states(fleet, model)])

    @property
    def scheduling(self) -> str:
        return "by the engines"

    @property
    def kv_capacity_tokens(self) -> int | None:
        says = [engine.facts is not None and engine.facts.num_blocks > 0 for engine in self.external.engines]
        return super().kv_capacity_tokens if all(says) else None

    @property
    def engine_models(self) -> list[str]:
        """What the engines call the model, each name once."""
        facts = [engine.facts for engine in self.external.engines]
        return list(dict.fromkeys(found.model for found in facts if found is not None))

    async def submit(self, request: RelayRequest, tenant: str) -> RelayGeneration:
        """Send a request to an engine. Raises InvalidRequestError, OverloadedError or UnavailableError."""
        self.require_ready()
        if self.num_open >= edge_limits.OPEN_AT_FRONT:
            raise OverloadedError(f"{self.num_open} requests are open already; at most {edge_limits.OPEN_AT_FRONT}")
        options, begun_ns = options_for(request.body, tenant), self.external.clock()
        request = replace(request, tokenized=await self._tokenized(request, options.deadline_ns))
        if options.deadline_ns is not None:
            left_ns = options.deadline_ns - (self.external.clock() - begun_ns)
            options = replace(options, deadline_ns=max(1, left_ns))
        self.require_ready()
        front = self.front
        hashes: tuple[bytes, ...] = ()
        if len(front.engines) > 1 and (request.token_ids is not None or not front.reads_events):
            found = await self.long_work.run(
                lambda: request.hashes(front.block_size, front.bytes_per_token), request.num_bytes, tenant
            )
            self.require_ready()
            hashes = self._cacheable(request, found)
        request_id = f"{ID_PREFIXES.get(request.path, 'req')}-{uuid.uuid4().hex}"
        stream = RelayStream(request_id, request, options, request.estimated_tokens(front.bytes_per_token), hashes)
        generation = RelayGeneration(stream)
        self.fleet.streams.add([stream])
        submission = Submission(
            request_id,
            stream.num_estimated_tokens,
            request.max_tokens,
            hashes,
            options,
            hands_off=self._hands_off(request),
            is_resumable=self._resumes(request),
        )
        try:
            self.fleet.submit([submission])
        except Exception:
            self.abort(generation)
            generation.close()
            raise
        return generation

    def recovery_of(self, stream: RelayStream) -> str:
        """What becomes of this stream when its engine is lost in the middle of it, in one word for a header. exact: it
        goes on with the tokens that there would have been, at an engine of the same build. resampled: it goes on with
        others. none: it ends with an error. (Before its first token: by what its engine can do; without one, by what
        all can.)"""
        if not self._resumes(stream.request) or not stream.can_resume:
            return "none"
        if not stream.num_tokens:
            engine = self.engine_of(stream)
            engines = self.external.engines if engine is None else [engine]
            if not all(each.facts is not None and each.facts.capabilities.tokens_out for each in engines):
                return "none"
        return "exact" if stream.request.is_greedy else "resampled"

    def engine_of(self, stream: RelayStream) -> ExternalWorker | None:
        """The engine that gives this stream, or is to give it; None while it waits for one."""
        request = self.fleet.core.requests.get(stream.request_id)
        worker = stream.worker if request is None or request.attempt is None else request.attempt.decode
        engines = self.external.engines
        return engines[worker] if 0 <= worker < len(engines) else None

    def watched(self) -> list[WatchedEngine]:
        """What the metrics of the engines said in the last minute. Raises ConflictError where none can be read so."""
        engines = self.external.engines
        found = [watched for engine in engines if (watched := engine.watched()) is not None]
        if found:
            return found
        kinds = {engine.spec.kind for engine in engines}
        if kinds & set(DIAGNOSED_KINDS):
            words = "no engine has shown its metrics for a moment yet, or none exports any (/engines says what is off)"
        elif "llamacpp" in kinds:
            urls = " ".join(engine.spec.url for engine in engines if engine.spec.kind == "llamacpp")
            words = f"llama.cpp says too little in its metrics alone; run: diptych diagnose {urls}"
        else:
            words = "of the kind openai no metrics are known"
        raise ConflictError(f"nothing can be said of what limits these engines: {words}", code="no_engine_metrics")

    def _resumes(self, request: RelayRequest) -> bool:
        names_tokens = [
            engine.facts is not None and engine.facts.capabilities.tokens_out for engine in self.external.engines
        ]
        return not request.is_stream or (self.front.recovery and request.is_stateless and any(names_tokens))

    def _cacheable(self, request: RelayRequest, hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The blocks of a prompt that an engine may find in its cache: it holds whole blocks of its own size, and
        computes the last token always. All blocks, where prompts are not known as tokens."""
        size = self.front.block_size
        facts = [engine.facts for engine in self.external.engines if engine.facts is not None]
        largest = max((found.block_size for found in facts), default=0)
        if request.token_ids is None or largest < size or largest % size:
            return hashes
        return hashes[: (len(request.token_ids) - 1) // largest * (largest // size)]

    def _hands_off(self, request: RelayRequest) -> bool:
        """Whether two engines may share it."""
        is_answer = request.path in (CHAT_PATH, COMPLETION_PATH) and request.num_choices == 1
        return self.front.hands_off and is_answer and not request.body_echoes

    async def _tokenized(self, request: RelayRequest, limit_ns: int | None) -> TokenizedPrompt | None:
        """The prompt as an engine sees it, where prompts are to be known as tokens; None where no engine can say, or
        not in time: such a request is placed by load alone. Memory: at most MAX_TOKENISING requests wait for that."""
        known = request.tokenized
        if known is not None or not self.front.reads_events or self._num_tokenising >= MAX_TOKENISING:
            return known
        self._num_tokenising += 1
        try:
            async with asyncio.timeout(None if limit_ns is None else limit_ns / NS_PER_S):
                return await self._ask_tokens(request)
        except TimeoutError:
            return None
        finally:
            self._num_tokenising -= 1

    async def _ask_tokens(self, request: RelayRequest) -> TokenizedPrompt | None:
        """Ask an engine for the prompt's tokens, and a second one if it fails."""
        engines = [
            engine
            for engine in self.external.engines
            if engine.number in self.fleet.core.members.up
            and engine.facts is not None
            and engine.facts.capabilities.tokenizes
        ]
        self._next_tokenizer += 1
        for turn in range(min(2, len(engines))):
            engine = engines[(self._next_tokenizer + turn) % len(engines)]
            found = await engine.tokenize(request)
            if found is not None:
                return found
        return None


_GAUGES = (
    ("diptych:engine_requests_open", "Requests of this front at the engine"),
    ("diptych:engine_saturated", "1 while the engine refuses, or does not say how busy it is"),
    ("diptych:engine_index_exact", "1 while all that its prefix cache holds is known from its events"),
    ("diptych:engine_index_blocks", "Blocks that its prefix cache is known, or assumed, to hold"),
)
_COUNTERS = (
    ("diptych:engine_index_gaps", "Events that were lost and not repeated"),
    ("diptych:engine_steps", "Steps that it reported"),
    ("diptych:engine_steps_missed", "Reports of its steps that did not come"),
)


def engine_states(fleet: ExternalFleet, model: str) -> Metric:
    """Where each engine is in its life: one of its series is 1."""
    text = "1 for the state that the engine is in: drained has nothing left and may be stopped, lost does not answer"
    family = GaugeMetricFamily("diptych:engine_state", text, labels=["model_name", "engine", "state"])
    for engine in fleet.engines:
        now = fleet.state_of(engine.number)
        for state in ENGINE_STATES:
            family.add_metric([model, engine.name, state], int(state == now))
    return family


def engine_families(engines: Sequence[ExternalWorker], model: str) -> Iterator[Metric]:
    """Every family with its present value."""
    for name, text in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
        for engine in engines:
            family.add_metric([model, engine.name], _values(engine)[name])
        yield family
    for name, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["model_name", "engine"])
        for engine in engines:
            counter.add_metric([model, engine.name], _values(engine)[name])
        yield counter


def _values(engine: ExternalWorker) -> dict[str, float]:
    return {
        "diptych:engine_requests_open": engine.load.num_held,
        "diptych:engine_saturated": engine.load.is_saturated(engine.clock()),
        "diptych:engine_index_exact": engine.cache.kind == "exact",
        "diptych:engine_index_blocks": engine.cache.num_blocks,
        "diptych:engine_index_gaps": engine.cache.num_gaps,
        "diptych:engine_steps": engine.steps.num_seen,
        "diptych:engine_steps_missed": engine.steps.num_missed,
    }
