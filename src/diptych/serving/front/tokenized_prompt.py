"""The tokens of a prompt as an engine will see them, and the request by which it takes them: tokens in, tokens out.

vLLM renders a chat into its own request for tokens (``/v1/chat/completions/render``), with the template applied and the
sampling parameters resolved. An engine that gets this one (``/inference/v1/generate``) neither applies the template nor
tokenises again, and computes just the tokens that the front has hashed. It answers with text and tokens, without what
its chat endpoint adds; so only requests whose answers are plain text go that way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

GENERATE_PATH = "/inference/v1/generate"
RENDER_PATH = "/v1/chat/completions/render"
Raw = msgspec.Raw


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """token_ids: all of it. num_plain: leading tokens that are text (what follows stands for images, which have names
    of their own in a cache). question: the engine's request for these tokens, by field; None: it cannot be asked so."""

    token_ids: tuple[int, ...]
    num_plain: int
    question: Mapping[str, Raw] | None = None

    @classmethod
    def of_text(cls, token_ids: tuple[int, ...]) -> "TokenizedPrompt":
        """Tokens alone."""
        return cls(token_ids, len(token_ids))


class _Range(msgspec.Struct):
    offset: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Range]] = {}


class _Sampling(msgspec.Struct):
    skip_special_tokens: bool | None = None


class _Rendered(msgspec.Struct):
    """What is read of a rendered request."""

    token_ids: list[int]
    sampling_params: _Sampling
    features: _Features | None = None
    content_parts: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None

    @property
    def num_plain(self) -> int:
        """Leading tokens that are text (TokenizedPrompt.num_plain)."""
        placeholders = self.features.mm_placeholders if self.features is not None else {}
        return min([len(self.token_ids), *(found.offset for ranges in placeholders.values() for found in ranges)])

    @property
    def is_text(self) -> bool:
        """Whether its answer is what the chat endpoint would give: no images, no parser of what the model thinks."""
        parts = (self.features, self.content_parts, self.reasoning_ended, self.reasoning_parser_kwargs)
        return all(part is None for part in parts) and self.sampling_params.skip_special_tokens is not False


_rendered_decoder = msgspec.json.Decoder(_Rendered)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


def read_rendered(body: bytes) -> TokenizedPrompt | None:
    """A rendered chat; None for anything else."""
    try:
        found = _rendered_decoder.decode(body)
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not found.token_ids or not all(0 <= token_id < 1 << 32 for token_id in found.token_ids):
        return None
    return TokenizedPrompt(tuple(found.token_ids), found.num_plain, fields if found.is_text else None)


def generate_fields(question: Mapping[str, Raw], model: str, attempt_id: str, *, is_stream: bool) -> dict[str, Any]:
    """The body of a request for tokens. attempt_id: by which the engine knows it (no other attempt has it)."""
    options = {"include_usage": True} if is_stream else None
    own: dict[str, Any] = {"request_id": attempt_id, "model": model, "stream": is_stream, "stream_options": options}
    return {**question, **own, "output_mode": "text"}
