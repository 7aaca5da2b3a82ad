"""LLM: offline batches in this process, for scripts and notebooks. ``LLM(path).generate(prompts, params)``.

A LocalEngine computes, and text is made of its tokens here: no threads, no processes, no sockets.
"""

import logging
import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.base.terminal_text import own
from diptych.control.config import DTypeName, KVDTypeName, ModelImplName, PresetName, QuantizeName, shape_preset
from diptych.control.errors import BrokenInvariantError, ConfigError, CoreFailedError, WorkerError
from diptych.control.events import Event, RequestAdmitted, RequestFinished
from diptych.control.request import FinishReason, Pooling, SamplingParams
from diptych.runtime.models.model_place import find_model
from diptych.runtime.required_packages import require_packages
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.async_llm import check_prompt, derive_seed
from diptych.serving.embedding_recipe import read_embedding_recipe
from diptych.serving.failures.failure_recording import error_words, folder_of
from diptych.serving.failures.recorded_cores import engine_failure
from diptych.serving.link.engine_options import (
    BUNDLED_MODEL,
    DeviceName,
    DeviceOptions,
    EngineOptions,
    InstructionSetName,
    MemoryOptions,
    SpeculationName,
    parse_cores,
)
from diptych.serving.output_builder import OutputBuilder
from diptych.serving.outputs import RequestOutput
from diptych.serving.worker.load_engine import load_engine

if TYPE_CHECKING:
    from diptych.runtime.local_engine import StepOutcome

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model in this process.

    model: a Hugging Face directory, a GGUF file, or a name of the Hub that is in its cache; None takes the bundled one.
    shape: chunked or unified.
    threads: of the model while it computes; the program keeps its own, and its CPUs (but where ``options`` name cores:
    then it is kept to these until ``close``, which ``with`` calls). kv_cache_bytes None: a share of the free memory.
    instruction_set, quantize: see DeviceOptions. kv_dtype: see MemoryOptions. model_impl, speculation: see
    EngineOptions. ``ready`` says what was loaded. Raises ConfigError for what cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_impl: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        instruction_set: str = "auto",
        quantize: str = "none",
        kv_dtype: str = "auto",
        speculation: str = "auto",
        shape: str = "chunked",
        max_model_len: int | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        require_packages()
        if options is None:
            options = EngineOptions(
                model=str(find_model(model or BUNDLED_MODEL)),
                model_impl=cast(ModelImplName, model_impl),
                device=DeviceOptions(
                    device=cast(DeviceName, device),
                    dtype=cast(DTypeName, dtype),
                    threads=threads,
                    instruction_set=cast(InstructionSetName, instruction_set),
                    quantize=cast(QuantizeName, quantize),
                ),
                memory=MemoryOptions(kv_dtype=cast(KVDTypeName, kv_dtype)),
                scheduler=shape_preset(cast(PresetName, shape), max_waiting=2**31),
                max_model_len=max_model_len,
                speculation=cast(SpeculationName, speculation),
            )
        self.options = options
        self.tokenizer = Tokenizer(Path(options.model))
        from diptych.runtime.device.threads import BorrowedThreads
        from diptych.runtime.local_engine import LocalEngine

        self._threads = BorrowedThreads()
        cores = parse_cores(options.device.cores) if options.device.cores else None
        try:
            loaded = load_engine(options, lambda stage, fraction=None: None, owns_process=False)
        except BaseException:
            self._threads.loaded(cores)
            self._threads.give_back()
            raise
        self._threads.loaded(cores)
        self.ready = loaded.ready

        self._engine = LocalEngine(
            loaded.engine, loaded.runner, grammars=loaded.grammars, tiers=loaded.tiers, pipeline=loaded.pipeline
        )
        self._recent = loaded.recent
        self._failure: CoreFailedError | None = None  # why nothing can be computed any more
        self._open: dict[str, AnswerStream] = {}
        self._num_requests = 0

    def close(self) -> None:
        """Finish what is being written to a disk tier, and let the program run on all its CPUs again. Needed only where
        ``options`` name a tier or cores."""
        with self._threads:
            if self._failure is None:
                self._engine.close()
        self._threads.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: a text, token ids, or a list of those; params for all or one each.

        Raises InvalidRequestError or ContextLengthError before anything is computed, CoreFailedError when the engine
        has failed by a defect, now or before.
        """
        batch = _as_batch(prompts)
        sampling = _one_each(params, len(batch))
        builders = []
        try:
            for prompt, wanted in zip(batch, sampling, strict=True):
                builders.append(self._submit(prompt, wanted))
            self._run(progress)
        finally:
            self._clear()
        outputs = []
        for builder in builders:
            builder.add(builder.generation.take())
            outputs.append(builder.output())
        return outputs

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        progress: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Like ``generate``, for one conversation (a list of messages) or several. continue_final_message: the answer
        goes on with the text of the last message."""
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [cast(Conversation, conversations)]
        prompts: list[Prompt] = [
            self.tokenizer.encode_chat(
                cast(Conversation, conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, params, progress=progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        *,
        prompt_name: str | None = None,
        progress: bool = True,
    ) -> list[list[float]]:
        """A vector of length 1 for each prompt (a text, token ids, or a list of those): the hidden state behind the
        final norm of its last token, or the mean of those of all its tokens.

        pooling, prompt_name: as of /v1/embeddings; None: as the model's files say. Raises what ``generate`` raises, and
        InvalidRequestError for files that ask for more than there is here.
        """
        recipe, batch = read_embedding_recipe(Path(self.options.model)), _as_batch(prompts)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=recipe.pooling(pooling))
        before = recipe.prompt(prompt_name, recipe.pooling(pooling))
        batch = [before + prompt if isinstance(prompt, str) else prompt for prompt in batch]
        try:
            streams = [self._submit(prompt, params).generation.streams[0] for prompt in batch]
            self._run(progress)
        finally:
            self._clear()
        return [array("f", stream.embedding).tolist() for stream in streams]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece."""
        try:
            builder = self._submit(prompt, params or SamplingParams())
            for _ in self._steps():
                for delta in builder.generation.take():
                    if delta.index == 0 and delta.text:
                        yield delta.text
        finally:
            self._clear()

    def _submit(self, prompt: Prompt, params: SamplingParams) -> OutputBuilder:
        if self._failure is not None:
            raise self._failure
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_prompt(token_ids, params, self.ready)
        request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
        seed = random.getrandbits(63) if params.seed is None else params.seed
        sequences = [
            AnswerStream(
                f"{request_id}-{number}",
                number,
                token_ids,
                replace(params, n=1, seed=derive_seed(seed, number)),
                self.tokenizer,
            )
            for number in range(params.n)
        ]
        for sequence in sequences:
            self._engine.add(sequence.request_id, token_ids, sequence.sampling)
            self._open[sequence.request_id] = sequence
        return OutputBuilder(Generation(request_id, sequences), text, self.tokenizer)

    def _run(self, progress: bool) -> None:
        total = len(self._open)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(file=own(sys.stderr))
        with Progress(*columns, console=console) if progress and console.is_terminal else nullcontext() as bar:
            task = bar.add_task("generating", total=total) if bar else None
            for _ in self._steps():
                if bar and task is not None:
                    bar.update(task, completed=total - len(self._open))

    def _steps(self) -> Iterator[None]:
        """One step each time, until every request has ended."""
        while self._open:
            with self._failing_loudly():
                with self._threads:
                    outcome = self._engine.step()
                if outcome is None:
                    raise BrokenInvariantError("the scheduler has work but no step for it")
            self._take(outcome)
            yield

    @contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """An exception in here is a defect of the engine: what it holds cannot be relied on any more."""
        try:
            yield
        except Exception as error:
            core = f"the engine of {self.options.model}"
            self._failure = CoreFailedError(f"{core} has failed: {error_words(error)}; make another LLM")
            folder = folder_of(self.options.failures)
            recording = engine_failure(folder, core, error, self._engine.core.config, self._recent)
            logger.critical("%s has failed (recording: %s)", core, recording or "none")
            raise self._failure from error

    def _take(self, outcome: "StepOutcome") -> None:
        tokens = outcome.tokens
        ended = {event.request_id: event for event in outcome.events if isinstance(event, RequestFinished)}
        for event in outcome.events:
            if isinstance(event, RequestAdmitted) and event.is_first and event.request_id in self._open:
                self._open[event.request_id].cached_tokens = event.num_cached_tokens
        for request_id, (first, entries) in tokens.prompt_logprobs.items():
            if sequence := self._open.get(request_id):
                sequence.add_prompt_logprobs(first, entries)
        for request_id, vector in tokens.embeddings.items():
            if sequence := self._open.get(request_id):
                sequence.embedding = vector
        matched = []
        for index, (request_id, token_id) in enumerate(zip(tokens.request_ids, tokens.token_ids, strict=True)):
            if (sequence := self._open.get(request_id)) is None:
                continue
            logprobs = tokens.logprobs.get(index)
            end = ended.get(request_id)
            is_stop_token = end is not None and end.reason is FinishReason.STOP and tokens.is_last(index)
            if sequence.push(token_id, is_stop_token=is_stop_token, logprobs=logprobs):
                matched.append(request_id)
            sequence.mark()
        self._end(ended.values())
        for request_id in matched:
            self._end(self._engine.abort(request_id, FinishReason.STOP))

    def _end(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, RequestFinished) and (sequence := self._open.pop(event.request_id, None)):
                if event.reason is FinishReason.ERROR:
                    raise WorkerError(f"request {event.request_id} failed: {event.message}")
                sequence.end(event)
                sequence.mark()

    def _clear(self) -> None:
        """Abort whatever is left (after an error or an interrupt), so that the next call finds an empty engine."""
        opened, self._open = self._open, {}
        if self._failure is not None:
            return
        with self._failing_loudly(), self._threads:
            for request_id in opened:
                self._engine.abort(request_id)
            while self._engine.step() is not None:
                pass


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _one_each(params: Params, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"there are {count} prompts and {len(params)} params; one for all, or one each")
    return list(params)
