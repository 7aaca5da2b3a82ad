"""Gathers the deltas of one prompt's sequences into a growing RequestOutput, as library users read it.

Owns the accumulated texts and tokens of one Generation.
"""

from collections.abc import Iterable, Sequence

from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Delta, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.outputs import CompletionOutput, LogprobsAtPosition, RequestMetrics, RequestOutput, logprobs_at


class OutputBuilder:
    """Accumulates. Each ``output`` holds its own lists, so that a caller may keep it."""

    def __init__(self, generation: Generation, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._texts: list[list[str]] = [[] for _ in generation.streams]  # pieces that their outputs do not have yet
        self._of_prompt: list[tuple[TokenLogprobs | None, LogprobsAtPosition | None]] = []  # as they came, and shown
        self._outputs = [
            CompletionOutput(stream.index, logprobs=None if stream.sampling.logprobs is None else [])
            for stream in generation.streams
        ]

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take in what is new."""
        for delta in deltas:
            output = self._outputs[delta.index]
            self._texts[delta.index].append(delta.text)
            output.token_ids.extend(delta.token_ids)
            if output.logprobs is not None:
                output.logprobs.extend(logprobs_at(entry, self._tokenizer.token_text) for entry in delta.logprobs)
            if delta.finish_reason is not None:
                output.finish_reason = delta.finish_reason
                output.stop_reason = self.generation.streams[delta.index].stop_reason

    def output(self) -> RequestOutput:
        """The request as it is now."""
        sequences = self.generation.streams
        first = sequences[0]
        finished = all(output.finished for output in self._outputs)
        return RequestOutput(
            request_id=self.generation.request_id,
            prompt=self._prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[self._copy(output) for output in self._outputs],
            finished=finished,
            num_cached_tokens=first.cached_tokens,
            prompt_logprobs=None if first.prompt_logprobs is None else self._shown_of_prompt(first.prompt_logprobs),
            metrics=request_metrics(sequences) if finished else None,
        )

    def _shown_of_prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[LogprobsAtPosition | None]:
        """The prompt's log probabilities as shown; what is unchanged since the last output is not looked up again."""
        before = self._of_prompt or [(None, None)] * len(entries)
        self._of_prompt = [
            known
            if known[0] is entry
            else (entry, None if entry is None else logprobs_at(entry, self._tokenizer.token_text))
            for known, entry in zip(before, entries, strict=True)
        ]
        return [shown for _, shown in self._of_prompt]

    def _copy(self, output: CompletionOutput) -> CompletionOutput:
        pieces = self._texts[output.index]
        output.text = "".join([output.text, *pieces])
        pieces.clear()
        return CompletionOutput(
            output.index,
            output.text,
            list(output.token_ids),
            None if output.logprobs is None else list(output.logprobs),
            output.finish_reason,
            output.stop_reason,
        )


def request_metrics(sequences: Sequence[AnswerStream]) -> RequestMetrics | None:
    """The metrics of the sequence that ended last."""
    ends = [sequence.finished for sequence in sequences if sequence.finished is not None]
    if not ends:
        return None
    slowest = max(ends, key=lambda end: end.latency.total_ns)
    met = [end.slo_met for end in ends if end.slo_met is not None]
    return RequestMetrics(slowest.latency, sum(end.num_preemptions for end in ends), all(met) if met else None)
