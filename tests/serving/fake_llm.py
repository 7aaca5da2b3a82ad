"""An AsyncLLM without workers, for tests of the HTTP side in one process: token i after p prompt tokens is p + i."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI

from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, RequestOptions, SamplingParams
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.grammar.grammar_checker import TriedGrammar
from diptych.serving.answers.grammar.grammar_text import Grammar
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions
from diptych.serving.link.messages import Loading, Ready
from diptych.serving.long_work import LongWork
from diptych.serving.metrics.serving_metrics import ServingMetrics
from diptych.timeline.ring import Timeline

TOKENIZER = Tokenizer(BUNDLED_MODEL)
LATENCY = LatencyBreakdown(queue_ns=1_000_000, prefill_ns=2_000_000, decode_ns=3_000_000, num_output_tokens=3)


@dataclass
class Submitted:
    """One call of ``submit``."""

    prompts: Sequence[list[int]]
    sampling: SamplingParams
    options: RequestOptions
    generation: Generation
    is_aborted: bool = False


class FakeLLM:
    """What the routes need of an AsyncLLM. error: every request fails with it, after ``fail_after`` tokens.
    pause_after: tokens after which an answer waits for ``go_on``. admits: a worker begins with every request at once.
    refusal: what a text to encode raises. answer: what every answer says, as far as max_tokens allows."""

    def __init__(
        self,
        *,
        error: Exception | None = None,
        fail_after: int = 0,
        pause_after: int | None = None,
        admits: bool = False,
        refusal: BaseException | None = None,
        answer: str | None = None,
        tokenizer: Tokenizer = TOKENIZER,
    ) -> None:
        self.options = EngineOptions()
        self.tokenizer = tokenizer
        self.long_work = LongWork()
        self._answer_ids = None if answer is None else tokenizer.encode(answer, add_special_tokens=False)
        self.metrics = ServingMetrics()
        self.timeline = Timeline()
        self.journal = None
        self.fleet = Fleet(self.options)  # without workers
        self.ready: Ready | None = Ready(4096, 8192, 100_000, 64, 16, [0], "a fake model", embedding_size=8)
        self.loading = Loading("pretending")
        self.state = "ready"
        self.is_routable = True
        self.app: FastAPI | None = None  # see dialect_calls.py
        self.num_open = 0
        self.submitted: list[Submitted] = []
        self.grammars: list[Grammar] = []  # that were tried; each passes
        self.go_on = asyncio.Event()
        self._refusal = refusal
        self._admits = admits
        self._error, self._fail_after, self._pause_after = error, fail_after, pause_after
        self._tasks: set[asyncio.Task[None]] = set()

    def health(self) -> tuple[int, dict[str, str | None]]:
        return 200, {"status": "ok", "detail": None}

    def readiness(self) -> tuple[int, dict[str, str | None]]:
        if self.is_routable:
            return 200, {"status": "ready", "detail": None}
        return 503, {"status": "not ready", "detail": self.state}

    def require_ready(self) -> Ready:
        assert self.ready is not None
        return self.ready

    async def encode(self, text: str, **options: Any) -> list[int]:
        return (await self.encode_all([text], **options))[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        limit: int | None = None,
        tenant: str = "",
    ) -> list[list[int]]:
        if self._refusal is not None:
            raise self._refusal
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens, param=param, limit=limit)
        return await self.long_work.run(lambda: [encode(text) for text in texts], sum(map(len, texts)), tenant)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        size, tenant = options.pop("size", None) or 0, options.pop("tenant", "")
        return await self.long_work.run(lambda: self.tokenizer.encode_chat(messages, **options), size, tenant)

    async def try_grammar(self, grammar: Grammar) -> TriedGrammar:
        self.grammars.append(grammar)
        return TriedGrammar(grammar.text, grammar.left_out)

    async def decode_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[str]:
        tenant, decode = options.pop("tenant", ""), self.tokenizer.decode
        work = partial(lambda: [decode(prompt, **options) for prompt in prompts])
        return await self.long_work.run(work, sum(map(len, prompts)), tenant)

    async def submit_in_turn(self, *arguments: Any, **more: Any) -> Generation:
        return self.submit(*arguments, **more)

    def submit(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        request_id: str,
        options: RequestOptions,
        shown: Mapping[int, str] = {},
        resumed: None = None,
    ) -> Generation:
        streams = [
            AnswerStream(
                f"{request_id}-{number}", number, prompts[number // sampling.n], sampling, self.tokenizer, shown=shown
            )
            for number in range(len(prompts) * sampling.n)
        ]
        generation = Generation(request_id, streams)
        self.submitted.append(Submitted(prompts, sampling, options, generation))
        task = asyncio.get_running_loop().create_task(self._answer(generation, sampling))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    def abort(self, generation: Generation) -> None:
        for submitted in self.submitted:
            if submitted.generation is generation and not generation.is_exhausted:
                submitted.is_aborted = True

    async def _answer(self, generation: Generation, sampling: SamplingParams) -> None:
        if self._admits:
            generation.admit()
        for stream in generation.streams:
            if sampling.prompt_logprobs is not None:
                stream.add_prompt_logprobs(1, [_logprobs(token, 1) for token in stream.prompt_token_ids[1:]])
        if sampling.pooling is not None:
            self._embed(generation)
            return
        scripted = self._answer_ids
        num_tokens = sampling.max_tokens if scripted is None else min(sampling.max_tokens, len(scripted))
        for step in range(num_tokens):
            if step == self._pause_after:
                await self.go_on.wait()
            if self._error is not None and step == self._fail_after:
                generation.fail(self._error)
                return
            await asyncio.sleep(0)
            for stream in generation.streams:
                token_id = len(stream.prompt_token_ids) + step if scripted is None else scripted[step]
                logprobs = None if sampling.logprobs is None else _logprobs(token_id, sampling.logprobs)
                stream.push(token_id, logprobs=logprobs)
                stream.mark()
                if step == num_tokens - 1:
                    num_prompt = len(stream.prompt_token_ids)
                    is_whole = scripted is not None and num_tokens == len(scripted)
                    reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
                    stream.end(RequestFinished(0, stream.request_id, reason, num_prompt, 1, 0, LATENCY, None))
            generation.deliver()

    def _embed(self, generation: Generation) -> None:
        """Number i of a vector is (length of the prompt + i) / 100: of no length in particular."""
        if self._error is not None:
            generation.fail(self._error)
            return
        for stream in generation.streams:
            num_prompt = len(stream.prompt_token_ids)
            stream.embedding = array("f", [(num_prompt + place) / 100 for place in range(8)]).tobytes()
            stream.end(RequestFinished(0, stream.request_id, FinishReason.LENGTH, num_prompt, 1, 0, LATENCY, None))
            stream.mark().wake()


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token itself is the best; its successors follow."""
    return TokenLogprobs(token_id, -0.5, [(token_id + rank, -0.5 - rank) for rank in range(count)])
