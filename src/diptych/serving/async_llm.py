"""AsyncLLM: submit, stream, abort. The front end as a library, without torch.

Owns the checks of requests and the fleet of workers, one or many. Computes no tokens, and does not decide what runs
where.
"""

import asyncio
import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import ContextLengthError, InvalidRequestError, OverloadedError
from diptych.control.request import DEFAULT_OPTIONS, MAX_SEED, RequestOptions, SamplingParams, Submission
from diptych.control.slo import Slo
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.grammar.grammar_checker import GrammarChecker, TriedGrammar, is_installed
from diptych.serving.answers.grammar.grammar_text import Grammar
from diptych.serving.answers.stream_journal import StreamJournal, StreamRecord, replay
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions
from diptych.serving.link.messages import Ready
from diptych.serving.long_work import LONG, check_wanted
from diptych.serving.metrics.store_metrics import journal_families
from diptych.serving.output_builder import OutputBuilder
from diptych.serving.outputs import RequestOutput
from diptych.serving.served_fleet import ServedFleet

Prompt = str | Sequence[int]

SUBMITTED_AT_ONCE = 64  # answers of one request, in one turn of the event loop: a few milliseconds


class AsyncLLM(ServedFleet):
    """A served model. ``start`` it inside the event loop that will use it, ``shutdown`` it in the same loop.

    ``async for output in llm.generate(prompt, SamplingParams(...))`` yields growing RequestOutputs. Leaving the loop
    (or cancelling the task) aborts the request at the worker before its next step.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,
        fleet: Fleet | None = None,
        journal: StreamJournal | None = None,
    ) -> None:
        options = options or EngineOptions()
        super().__init__(options, fleet or Fleet(options))
        self.tokenizer = Tokenizer(Path(self.options.model), self.options.tool_format)
        self._grammars: GrammarChecker | None = None
        self._streams = self.fleet.streams
        self.journal = journal
        if journal is not None:
            self._streams.on_news = journal.write
            self.metrics.more_families.append(lambda model: journal_families(journal.num_not_recorded, model))
        if self.fleet.misses is not None and self.tokenizer.has_text:
            self.fleet.misses.decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        fleet_options = self.fleet.fleet
        reads_hashes = fleet_options.cluster.routing.routing == "kv_aware" and len(fleet_options.slots) > 1
        self._needs_hashes = reads_hashes and self.options.memory.prefix_cache

    async def shutdown(self) -> None:
        """Stop the workers; requests that still run fail with UnavailableError."""
        if self._grammars is not None:
            await self._grammars.close()
        await super().shutdown()
        if self.journal is not None:
            self.journal.end()

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
    def has_text(self) -> bool:
        """Whether the model has a tokenizer."""
        return self.tokenizer.has_text

    @property
    def has_chat(self) -> bool:
        """Whether the model takes conversations. The bundled model has a chat template, and was not trained to follow
        it."""
        return self.tokenizer.has_chat_template and Path(self.options.model) != BUNDLED_MODEL

    def shape_of(self, worker: int) -> str:
        return self.fleet.changes.shape(worker)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        slo: Slo | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Growing outputs of one prompt (text or token ids), the last one ``finished``. options: instead of priority
        and slo, for every option of a request.

        Raises InvalidRequestError, ContextLengthError, OverloadedError, UnavailableError or WorkerError.
        """
        sampling = sampling or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        options = options or RequestOptions(priority=priority, slo=slo)
        generation = await self.submit_in_turn([token_ids], sampling, request_id, options)
        builder = OutputBuilder(generation, text, self.tokenizer)
        try:
            while not generation.is_exhausted:
                builder.add(await generation.read())
                yield builder.output()
        finally:
            self.abort(generation)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None, tenant: str = ""
    ) -> list[int]:
        """Token ids of a text, off the event loop when it is long. Raises InvalidRequestError when it has none."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens, limit=limit, tenant=tenant))[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        limit: int | None = None,
        tenant: str = "",
    ) -> list[list[int]]:
        """The same for several texts. param: what the client calls them. limit: see Tokenizer.encode. tenant: whose
        turn it takes. Raises ContextLengthError for the first that is too long, and OverloadedError."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens, param=param, limit=limit)
        size = sum(map(len, texts))

        def work() -> list[list[int]]:
            encoded = []
            for text in texts:
                check_wanted()
                encoded.append(encode(text))
            return encoded

        return await self.long_work.run(work, size, tenant)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
        tenant: str = "",
        size: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, off the event loop when it is long. size: of the conversation, where it is
        known."""
        encode = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_arguments=template_arguments,
            limit=limit,
        )
        if size is None:
            fields = (*messages, template_arguments or {})
            size = sum(_size(value) for part in fields for value in part.values())
        return await self.long_work.run(encode, size, tenant)

    async def decode_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
        param: str = "prompt",
        tenant: str = "",
    ) -> list[str]:
        """Texts of lists of token ids, off the event loop when they are long."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=skip_special_tokens, param=param)
        size = sum(map(len, prompts))
        return await self.long_work.run(lambda: [decode(prompt) for prompt in prompts], size, tenant)

    async def try_grammar(self, grammar: Grammar) -> TriedGrammar:
        """A grammar whose text SamplingParams take, when it compiles in time. Raises InvalidRequestError or
        UnavailableError."""
        if not is_installed():
            raise InvalidRequestError(
                f"{grammar.param} needs llguidance: pip install '.[structured]' in the checkout",
                param=grammar.param,
                code="unsupported",
            )
        if self._grammars is None:
            ready, tokenizer = self.require_ready(), self.tokenizer
            vocab_size = max(ready.vocab_size, tokenizer.vocab_size)
            self._grammars = GrammarChecker(tokenizer.fast.to_str(), list(ready.eos_token_ids), vocab_size)
        return await self._grammars.check(grammar)

    async def submit_in_turn(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        shown: Mapping[int, str] = {},
        resumed: StreamRecord | None = None,
    ) -> Generation:
        """Send every prompt n times; sequence number i is answer ``i % n`` of prompt ``i // n``. shown: special tokens
        that are part of the text. resumed: the stream goes on (one prompt, one answer).

        Long prompts are checked and hashed off the event loop in the turn of their tenant. Raises OverloadedError while
        too much waits for that, or while not all of these would be taken."""
        ready = self.require_ready()
        count = len(prompts) * sampling.n
        check_count(count, ready)
        self._check_room(count, options, ready)  # before prompts are hashed, and answers made
        work = partial(self._checked, prompts, sampling, options.cache_salt, ready)
        hashes = await self.long_work.run(work, sum(map(len, prompts)), options.tenant)
        return await self._submit(prompts, sampling, request_id, options, shown, resumed, hashes)

    async def _submit(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        request_id: str | None,
        options: RequestOptions,
        shown: Mapping[int, str],
        resumed: StreamRecord | None,
        hashes: Sequence[tuple[bytes, ...]],
    ) -> Generation:
        """Submit checked prompts, SUBMITTED_AT_ONCE answers in a turn of the loop: what is served goes on beside a
        request of thousands. Takes back what it has submitted when it is cancelled or fails."""
        ready = self.require_ready()
        count = len(prompts) * sampling.n
        if sampling.stop and not self.tokenizer.has_text:
            raise InvalidRequestError("stop needs text, and this model has no tokenizer.json", param="stop")
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        streams: list[AnswerStream] = []
        for number in range(count):
            if number and not number % SUBMITTED_AT_ONCE:
                await asyncio.sleep(0)
            own_id = request_id if count == 1 else f"{request_id}-{number}"
            if resumed is not None:  # no attempt of before has this id, wherever it may still be on its way
                own_id = f"{own_id}.{uuid.uuid4().hex}"
            child = replace(sampling, n=1, seed=derive_seed(seed, number))
            prompt = prompts[number // sampling.n]
            streams.append(AnswerStream(own_id, number, prompt, child, self.tokenizer, options, shown))
        self._check_room(count, options, ready)  # others may have come meanwhile
        for stream in streams:
            if stream.request_id in self._streams:
                raise InvalidRequestError(f"request id {stream.request_id!r} is in use", param="request_id")
        generation = Generation(request_id, streams)
        if resumed is not None:
            replay(streams[0], resumed)
            if resumed.finished is not None:
                return generation
        self._streams.add(streams)
        try:
            for first in range(0, count, SUBMITTED_AT_ONCE):
                if first:
                    await asyncio.sleep(0)
                if generation.has_failed:
                    break
                part = enumerate(streams[first : first + SUBMITTED_AT_ONCE], first)
                submissions = [self._submission(stream, hashes[at // sampling.n]) for at, stream in part]
                self.fleet.submit(submissions, streams[0].num_tokens)
        except BaseException:
            self.abort(generation)
            generation.close()
            raise
        return generation

    def _check_room(self, count: int, options: RequestOptions, ready: Ready) -> None:
        """Raise OverloadedError where ``count`` answers more would not all be taken now, before any of them is made."""
        untouched = self._streams.num_awaiting_first_token
        if untouched + count > ready.max_waiting + ready.max_num_seqs:
            raise OverloadedError(f"{untouched} requests are waiting for their first token already")
        if (room := self.fleet.room(options.service_class)) < count > 1:
            raise OverloadedError(f"{count} answers in one request; there is room for {room} more")

    def abort(self, generation: Generation) -> None:
        if self.journal is not None:
            self.journal.close(generation)
        super().abort(generation)

    def _checked(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, salt: str | None, ready: Ready
    ) -> list[tuple[bytes, ...]]:
        """The hashes of each prompt's blocks, where there is a choice of workers. Raises what check_prompt does."""
        block_size = self.options.memory.block_size
        hashes: list[tuple[bytes, ...]] = []
        for prompt in prompts:
            check_wanted()
            check_prompt(prompt, sampling, ready)
            hashes.append(hash_blocks(prompt, block_size, salt) if self._needs_hashes else ())
        return hashes

    def _submission(self, stream: AnswerStream, hashes: tuple[bytes, ...]) -> Submission:
        """A request as the cluster knows it."""
        return Submission(
            stream.request_id,
            len(stream.prompt_token_ids),
            stream.sampling.max_tokens,
            hashes,
            stream.options,
            hands_off=stream.sampling.hands_off,
        )


def check_prompt(prompt: Sequence[int], sampling: SamplingParams, ready: Ready, param: str = "prompt") -> None:
    """Raise the error that names what does not fit: token ids, context length, KV cache. param: what the client calls
    the prompt."""
    if not prompt:
        raise InvalidRequestError("the prompt has 0 tokens; it must have at least 1", param=param)
    if len(prompt) >= ready.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {ready.max_model_len} tokens; the prompt is too long: it has "
            f"{len(prompt)}, and at least 1 is for the answer",
            param=param,
        )
    if min(prompt) < 0 or max(prompt) >= ready.vocab_size:  # a list that is no longer than the context
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < ready.vocab_size)
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary of {ready.vocab_size} tokens", param=param
        )
    needed = min(len(prompt) + sampling.max_tokens, ready.max_model_len)
    if needed > ready.kv_capacity_tokens:
        raise ContextLengthError(
            f"prompt and max_tokens make {needed} tokens; the KV cache holds {ready.kv_capacity_tokens}",
            param="max_tokens" if sampling.pooling is None else param,
        )
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", tuple(sampling.logit_bias))):
        if any(not 0 <= token_id < ready.vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"{name} holds a token id outside the vocabulary of {ready.vocab_size} tokens", param=name
            )


def check_count(count: int, ready: Ready, param: str = "prompt") -> None:
    """Raise InvalidRequestError for a request that asks for no answer, or for more than may wait and run."""
    limit = ready.max_waiting + ready.max_num_seqs
    if not 0 < count <= limit:
        raise InvalidRequestError(f"{count} answers in one request; between 1 and {limit}", param=param)


def _size(value: Any) -> int:
    """Characters of a value that a chat template is given. A list or an object counts as long; it is not inspected."""
    if isinstance(value, list | dict):
        return LONG
    return len(value) if isinstance(value, str) else 1


def derive_seed(seed: int, number: int) -> int:
    """The seed of sequence ``number``: the given one for the first, a hash of both for the others."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
