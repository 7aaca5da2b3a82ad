"""How many tokens lines took: read from their replies, and summed over a batch. Pure."""

from typing import Any

import msgspec


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """Token usage by the names of completions and embeddings, or by those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None
    input_tokens_details: _TokenDetails | None = None
    output_tokens_details: _TokenDetails | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Reply)


class LineUsage(msgspec.Struct, frozen=True):
    """Tokens. cached: of the input. reasoning: of the output."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "LineUsage") -> "LineUsage":
        return LineUsage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )

    def json(self) -> dict[str, Any]:
        """The usage as clients see it."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


NO_USAGE = LineUsage()


def usage_of(body: bytes) -> LineUsage:
    """What a reply says; zeros where it says nothing."""
    try:
        usage = _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_USAGE
    if usage is None:
        return NO_USAGE
    before = usage.prompt_tokens_details or usage.input_tokens_details or _TokenDetails()
    after = usage.completion_tokens_details or usage.output_tokens_details or _TokenDetails()
    return LineUsage(
        usage.prompt_tokens or usage.input_tokens,
        before.cached_tokens or 0,
        usage.completion_tokens or usage.output_tokens,
        after.reasoning_tokens or 0,
    )
