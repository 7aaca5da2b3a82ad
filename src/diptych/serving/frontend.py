"""AsyncLLM: submit, stream, abort. The side of the service that talks to people, without torch.

Owns the sequences in flight and the worker's supervisor. Must never compute tokens or decide what runs next.
"""

import asyncio
import hashlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diptych.control.errors import (
    ContextLengthError,
    DiptychError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WorkerError,
)
from diptych.control.request import MAX_SEED, FinishReason, SamplingParams
from diptych.control.slo import Slo
from diptych.serving.metrics import ServingMetrics
from diptych.serving.options import EngineOptions
from diptych.serving.outputs import RequestOutput
from diptych.serving.results import OutputBuilder
from diptych.serving.sequence import Generation
from diptych.serving.sequence import Sequence as OneSequence
from diptych.serving.supervisor import Supervisor, WorkerState
from diptych.serving.timeline import Timeline
from diptych.serving.tokenizer import Tokenizer
from diptych.serving.wire import (
    Abort,
    Finished,
    Loading,
    Ready,
    Stats,
    Submit,
    Tokens,
    WireRequest,
    WorkerMessage,
    pack_tokens,
    unpack_error,
    unpack_events,
)

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
LONG_TEXT = 16_384  # characters that are encoded in a thread


class AsyncLLM:
    """A served model. ``start`` it inside the event loop that will use it, ``shutdown`` it in the same loop.

    ``async for output in llm.generate(prompt, SamplingParams(...))`` yields growing RequestOutputs. Leaving the loop
    (or cancelling the task) aborts the request at the worker before its next step.
    """

    def __init__(self, options: EngineOptions | None = None, supervisor: Supervisor | None = None) -> None:
        self.options = options or EngineOptions()
        self.supervisor = supervisor or Supervisor(self.options)
        self.tokenizer = Tokenizer(Path(self.options.model))
        self.metrics = ServingMetrics()
        self.timeline = Timeline()
        self.ready: Ready | None = None
        self.loading = Loading("starting")
        self.is_draining = False
        self._sequences: dict[str, OneSequence] = {}
        self._num_untouched = 0  # submitted, no token yet
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, *, wait: bool = True) -> None:
        """Start the worker; with ``wait`` until it is ready. Raises what the worker refused to start with."""
        await self.supervisor.start(self._on_message, self._on_lost)
        if wait:
            assert self.supervisor.ready is not None
            await asyncio.shield(self.supervisor.ready)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running at the timeout."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Stop the worker; requests that still run fail with UnavailableError."""
        self._fail_all(UnavailableError("the server is shutting down"))
        await self.supervisor.stop()
        self.timeline.close()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def is_routable(self) -> bool:
        """Whether a request sent now would be taken."""
        return not self.is_draining and self.supervisor.state is WorkerState.READY

    def require_ready(self) -> Ready:
        """What the worker holds. Raises UnavailableError when no request can be taken now."""
        if self.is_draining:
            raise UnavailableError("the server is draining and takes no new requests", code="draining")
        if self.ready is None or self.supervisor.state is not WorkerState.READY:
            if self.supervisor.state is WorkerState.STARTING:
                raise UnavailableError("the model is still loading", retry_after_s=2.0, code="loading")
            raise UnavailableError("the worker was lost and is being restarted", retry_after_s=2.0, code="worker_lost")
        return self.ready

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        slo: Slo | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Growing outputs of one prompt (text or token ids), the last one ``finished``.

        Raises InvalidRequestError, ContextLengthError, OverloadedError, UnavailableError or WorkerError.
        """
        sampling = sampling or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        generation = self.submit([token_ids], sampling, request_id, priority=priority, slo=slo)
        builder = OutputBuilder(generation, text, self.tokenizer)
        try:
            while not generation.is_exhausted:
                builder.add(await generation.read())
                yield builder.output()
        finally:
            self.abort(generation)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, off the event loop when it is long."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, off the event loop when it is long."""
        encode = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_arguments=template_arguments,
        )
        is_long = sum(len(message["content"]) for message in messages) >= LONG_TEXT
        return await asyncio.to_thread(encode) if is_long else encode()

    def submit(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        slo: Slo | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Send every prompt n times; sequence number i is answer ``i % n`` of prompt ``i // n``."""
        ready = self.require_ready()
        for prompt in prompts:
            check_prompt(prompt, sampling, ready)
        if sampling.stop and not self.tokenizer.has_text:
            raise InvalidRequestError("stop needs text, and this model has no tokenizer.json", param="stop")
        count, limit = len(prompts) * sampling.n, ready.max_waiting + ready.max_num_seqs
        if not 0 < count <= limit:
            raise InvalidRequestError(f"{count} answers in one request; between 1 and {limit}", param="prompt")
        if self._num_untouched + count > limit:
            raise OverloadedError(f"{self._num_untouched} requests are waiting for their first token already")
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        sequences = []
        for number in range(count):
            own_id = request_id if count == 1 else f"{request_id}-{number}"
            if own_id in self._sequences:
                raise InvalidRequestError(f"request id {own_id!r} is in use", param="request_id")
            child = replace(sampling, n=1, seed=derive_seed(seed, number))
            sequences.append(OneSequence(own_id, number, prompts[number // sampling.n], child, self.tokenizer))
        generation = Generation(request_id, sequences)
        now = asyncio.get_running_loop().time()
        wire = []
        for one in sequences:
            one.submitted_s = now
            self._sequences[one.request_id] = one
            packed, to_worker = pack_tokens(one.prompt_token_ids), replace(one.sampling, stop=())
            wire.append(WireRequest(one.request_id, packed, to_worker, priority, slo, cache_salt))
        self._num_untouched += len(sequences)
        self._idle.clear()
        self.supervisor.send(Submit(wire))
        return generation

    def abort(self, generation: Generation) -> None:
        """End what still runs of a request; its blocks are free for the worker's next step."""
        open_ids = [one.request_id for one in generation.sequences if one.request_id in self._sequences]
        if open_ids:
            self.supervisor.send(Abort(open_ids))
            for request_id in open_ids:
                self._forget(request_id)

    def _on_message(self, message: WorkerMessage) -> None:
        if isinstance(message, Tokens):
            self._on_tokens(message)
        elif isinstance(message, Stats):
            self.metrics.on_stats(message)
            self.timeline.on_events(0, unpack_events(message.events))
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Ready):
            self.ready = message

    def _on_tokens(self, message: Tokens) -> None:
        """A step's record: push every token, then close who ended. Metrics are added up per step."""
        now = asyncio.get_running_loop().time()
        sequences, stopped_by_text = self._sequences, []
        stopped = {end.request_id for end in message.finished if end.reason is FinishReason.STOP}
        for request_id, cached in message.cached.items():
            if one := sequences.get(request_id):
                one.cached_tokens = cached
        for request_id, (first, entries) in message.prompt_logprobs.items():
            if one := sequences.get(request_id):
                one.add_prompt_logprobs(first, entries)
        gaps, num_tokens = self.metrics.new_gaps(), 0
        for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
            one = sequences.get(request_id)
            if one is None:
                continue
            num_tokens += 1
            if one.last_token_s:
                gaps.add(now - one.last_token_s)
            else:
                self._num_untouched -= 1
                self.metrics.time_to_first_token.observe(now - one.submitted_s)
            one.last_token_s = now
            logprobs = message.logprobs.get(request_id) if message.logprobs else None
            try:
                if one.push(token_id, is_stop_token=request_id in stopped, logprobs=logprobs):
                    stopped_by_text.append(request_id)
                one.mark()
            except Exception as error:  # the text of one answer must not cost the others theirs
                self._fail_one(one, error)
        self.metrics.on_gaps(gaps, num_tokens)
        for end in message.finished:
            self._on_finished(end, now)
        stopped_by_text = [request_id for request_id in stopped_by_text if request_id in sequences]
        if stopped_by_text:
            self.supervisor.send(Abort(stopped_by_text, FinishReason.STOP))

    def _on_finished(self, end: Finished, now: float) -> None:
        one = self._sequences.get(end.request_id)
        self.metrics.on_finished(end, now - one.submitted_s if one else end.latency.total_ns / 1e9)
        if one is None:
            return
        self._forget(end.request_id)
        generation = one.generation
        assert generation is not None
        if end.error is not None:
            generation.fail(unpack_error(end.error))
            self.abort(generation)
            return
        one.end(end)
        one.mark()

    def _on_lost(self, error: DiptychError) -> None:
        self._fail_all(WorkerError(f"{error.message}; the request was lost with it"))
        self.metrics.on_worker_lost()

    def _fail_one(self, one: OneSequence, error: Exception) -> None:
        logger.error("request %s failed in the front end", one.request_id, exc_info=error)
        assert one.generation is not None
        one.generation.fail(DiptychError("internal error; the server's log has the details"))
        self.abort(one.generation)

    def _fail_all(self, error: DiptychError) -> None:
        for request_id, one in list(self._sequences.items()):
            self._forget(request_id)
            assert one.generation is not None
            one.generation.fail(error)

    def _forget(self, request_id: str) -> None:
        one = self._sequences.pop(request_id)
        if not one.last_token_s:
            self._num_untouched -= 1
        if not self._sequences:
            self._idle.set()


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, ready: Ready) -> None:
    """Raise the error that names what does not fit: token ids, context, cache."""
    if not prompt:
        raise InvalidRequestError("the prompt has 0 tokens; it must have at least 1", param="prompt")
    if min(prompt) < 0 or max(prompt) >= ready.vocab_size:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < ready.vocab_size)
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary of {ready.vocab_size} tokens", param="prompt"
        )
    if len(prompt) >= ready.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the context holds {ready.max_model_len}, of which at least 1 is "
            "for the answer",
            param="prompt",
        )
    needed = min(len(prompt) + sampling.max_tokens, ready.max_model_len)
    if needed > ready.kv_capacity_tokens:
        raise ContextLengthError(
            f"prompt and max_tokens make {needed} tokens; the KV cache holds {ready.kv_capacity_tokens}",
            param="max_tokens",
        )
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", tuple(sampling.logit_bias))):
        if any(not 0 <= token_id < ready.vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"{name} holds a token id outside the vocabulary of {ready.vocab_size} tokens", param=name
            )


def derive_seed(seed: int, number: int) -> int:
    """The seed of sequence ``number``: the given one for the first, a hash of both for the others."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
