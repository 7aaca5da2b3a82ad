"""One request of a name, from its admission to its end: what it holds of the quota, and what it used.

Knows tokens, never texts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diptych.control.admission.quota import Quota
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.keys.key_usage import KeyUsage


class TokensUsed(NamedTuple):
    """Tokens of a request. A prompt counts once, however many answers it has."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class KeyMeter:
    """held: what the request is expected to use until its tokens are known. on_end: called when it is over."""

    def __init__(
        self,
        quota: Quota,
        usage: KeyUsage,
        held: int,
        clock: Callable[[], int],
        on_end: Callable[["KeyMeter"], None],
        *,
        counts_open: bool,
    ) -> None:
        self._quota, self._usage, self._clock, self._on_end = quota, usage, clock, on_end
        self._counts_open = counts_open
        self._held = held
        self._generation: Generation | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no worker has begun with it."""
        return self._generation is None or not self._generation.is_begun

    def begin(self, generation: Generation) -> None:
        """Begin when the prompts are known. Holds from now on what they take, and what is expected of the answers."""
        self._generation = generation
        prompt, _ = _prompt(generation)
        expected = prompt + sum(_expected(stream) for stream in generation.streams)
        self._quota.hold(expected - self._held)
        self._held = expected

    def used(self) -> TokensUsed:
        """Tokens used until now; none if no worker had begun with the request."""
        generation = self._generation
        if generation is None or self.is_waiting:
            return TokensUsed()
        return TokensUsed(*_prompt(generation), sum(stream.num_used_tokens for stream in generation.streams))

    def end(self) -> None:
        """End, however the request ended."""
        used, usage = self.used(), self._usage
        usage.prompt += used.prompt
        usage.cached += used.cached
        usage.completion += used.completion
        self._quota.end(self._clock(), self._held, used.prompt + used.completion, counts_open=self._counts_open)
        self._generation = None
        self._on_end(self)


def _prompt(generation: Generation) -> tuple[int, int]:
    """Tokens of its prompts, and how many of them were cached. An earlier request has paid for the prompt of a stream
    that goes on."""
    firsts = [stream for stream in _first_of_each_prompt(generation.streams) if not stream.num_resumed]
    return sum(stream.num_prompt_tokens for stream in firsts), sum(stream.cached_tokens for stream in firsts)


def _first_of_each_prompt(streams: Sequence[AnswerStream]) -> list[AnswerStream]:
    """Answers to one prompt share its list of token ids."""
    return list({id(stream.prompt_token_ids): stream for stream in reversed(streams)}.values())


def _expected(stream: AnswerStream) -> int:
    return stream.num_answers * min(stream.sampling.max_tokens, edge_limits.HELD_TOKENS)
