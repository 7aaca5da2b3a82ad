"""The load that ``diptych calibrate --engine vllm=URL,step_events=...`` gives an engine: single requests while it is
idle, streams in known numbers and lengths, and prompts that arrive while others decode. All prompts are random tokens,
so that no prefix cache has them."""

import asyncio
import json
import random
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diptych.calibration.engine_calibration import ReportedSteps, worker_ns
from diptych.calibration.timed_stream import TimedAnswer, timed_stream
from diptych.control.errors import ConfigError, WorkerError
from diptych.serving.front.adapters import ADAPTERS
from diptych.serving.front.capabilities import EngineFacts, EngineNotReadyError
from diptych.serving.front.engine_connection import ConnectionPool
from diptych.serving.front.engine_spec import EngineSpec

IDLE_PROMPTS, IDLE_REPEATS = (16, 64, 256, 1024), 3
STREAM_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
STREAM_PROMPTS = (32, 384, 1536)
MIXED_STREAMS, MIXED_PROMPTS = (2, 8, 24), (16, 64, 256, 768, 2000)
ANSWER_TOKENS = 24
FIRST_TOKEN, LAST_TOKEN = 300, 1000  # of prompts: plain tokens in the vocabularies of all models
OTHERS_QUIET_S = 0.05
STEPS_COME_S = 1.0  # that lines about steps may take to come


class EngineStreams:
    """seconds: for which to go on, if that is enough for the single requests and one of each other kind."""

    def __init__(self, spec: EngineSpec, seconds: float, report: Callable[[str, float], None]) -> None:
        if spec.kind != "vllm":
            raise ConfigError(
                f"engine {spec.url} is of the kind {spec.kind}: a calibration needs the requests of each step and the "
                "rules of the scheduler, which only Diptych's plugin in vLLM reports",
                param="engine",
            )
        if not spec.step_events:
            raise ConfigError(
                f"engine {spec.url} has no step_events: where its plugin publishes steps, such as "
                "step_events=tcp://127.0.0.1:5559",
                param="engine",
            )
        self._spec = spec
        self._seconds = seconds
        self._report = report
        self._rng = random.Random(0)
        self._begun_s = time.monotonic()
        self._longest = 0
        self._model = ""
        self._headers = spec.headers
        self._tls = ssl.create_default_context() if spec.is_tls else None

    async def run(self, found: ReportedSteps) -> list[tuple[int, int]]:
        """All kinds, again and again. found: gets the steps meanwhile. Returns (prompt tokens, nanoseconds) that single
        requests waited besides the engine's steps. Raises WorkerError where the engine does not answer."""
        facts = await self._look()
        self._model, self._longest = facts.model, facts.max_model_len or 4096
        self._begun_s = time.monotonic()
        await self._stream(64, 4)
        idle = []
        for prompt in self._fitting(IDLE_PROMPTS) * IDLE_REPEATS:
            idle.append(await self._idle(prompt))
        most = found.about.max_num_seqs if found.about is not None else STREAM_COUNTS[-1]
        kinds: list[tuple[int, int]] = [
            (count, prompt) for count in STREAM_COUNTS if count <= most for prompt in self._fitting(STREAM_PROMPTS)
        ]
        kinds += [(count, 0) for count in MIXED_STREAMS if count <= most]
        while True:
            for count, prompt in self._rng.sample(kinds, len(kinds)):
                await (self._together(count, prompt) if prompt else self._mixed(count))
                passed = (time.monotonic() - self._begun_s) / self._seconds
                self._report(f"streams at {self._spec.name}", min(1.0, passed))
                if passed >= 1:
                    await asyncio.sleep(STEPS_COME_S)
                    return self._front_end(found, idle)

    async def _look(self) -> EngineFacts:
        host, port = self._spec.address
        pool = ConnectionPool(host, port, self._headers, self._tls)
        try:
            return await ADAPTERS[self._spec.kind].look(pool, self._spec)
        except EngineNotReadyError as error:
            raise WorkerError(f"{self._spec.name}: {error}") from None
        finally:
            pool.close()

    @staticmethod
    def _front_end(found: ReportedSteps, idle: Sequence[tuple[str, int, int]]) -> list[tuple[int, int]]:
        computed = worker_ns(found.steps, (request_id for request_id, _, _ in idle))
        return [(prompt, ttft_ns - computed[name]) for name, prompt, ttft_ns in idle if computed[name]]

    def _fitting(self, prompts: Iterable[int]) -> list[int]:
        return [prompt for prompt in prompts if prompt + ANSWER_TOKENS < self._longest]

    async def _idle(self, prompt: int) -> tuple[str, int, int]:
        """One request: its id, its prompt tokens, nanoseconds to its first token."""
        await asyncio.sleep(OTHERS_QUIET_S)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        answer = await self._stream(prompt, 2, request_id=request_id)
        return request_id, prompt, answer.first_ns - answer.sent_ns

    async def _together(self, count: int, prompt: int) -> None:
        """Streams that begin together, and decode together once all prompts are computed."""
        await asyncio.gather(*(self._stream(prompt, ANSWER_TOKENS + count) for _ in range(count)))

    async def _mixed(self, count: int) -> None:
        """Prompts of different lengths that arrive while streams decode."""
        first = asyncio.Event()
        streams = [asyncio.create_task(self._stream(64, 4 * ANSWER_TOKENS, first.set)) for _ in range(count)]
        try:
            await asyncio.wait([asyncio.create_task(first.wait()), *streams], return_when=asyncio.FIRST_COMPLETED)
            while not all(stream.done() for stream in streams):
                await self._stream(self._rng.choice(self._fitting(MIXED_PROMPTS)), 4)
        finally:
            first.set()
            await asyncio.gather(*streams)

    async def _stream(
        self, prompt: int, tokens: int, on_first: Callable[[], None] | None = None, request_id: str = ""
    ) -> TimedAnswer:
        body: dict[str, Any] = {
            "model": self._model, "prompt": [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(prompt)],
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        headers = self._headers | ({"X-Request-Id": request_id} if request_id else {})
        try:
            answer = await timed_stream(self._spec.address, body, headers=headers, tls=self._tls, on_first=on_first)
        except (OSError, json.JSONDecodeError) as error:
            raise WorkerError(f"{self._spec.name}: {error}") from None
        if not answer.usage:
            raise WorkerError(f"{self._spec.name} did not answer a prompt of {prompt} tokens")
        return answer


async def measure_engine(
    spec: EngineSpec, seconds: float, report: Callable[[str, float], None]
) -> tuple[ReportedSteps, list[tuple[int, int]]]:
    """What an engine's steps cost under this load, and what its front end adds to a first token (see
    EngineStreams.run). Raises ConfigError, WorkerError."""
    streams, found = EngineStreams(spec, seconds, report), ReportedSteps()
    reading = asyncio.create_task(found.follow(spec.step_events))
    try:
        await asyncio.sleep(0.2)  # a subscription takes a moment
        front_end = await streams.run(found)
        if reading.done():
            reading.result()
        return found, front_end
    finally:
        await found.stop(reading)
