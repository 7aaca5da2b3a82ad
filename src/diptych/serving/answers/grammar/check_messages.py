"""What the front end and the process that compiles grammars say to each other, one line of JSON each."""

from typing import Any

import msgspec


class CheckSettings(msgspec.Struct):
    """The tokenizer, as the text of its tokenizer.json, and the limit of time."""

    tokenizer: str
    eos_token_ids: list[int]
    vocab_size: int
    limit_s: float


class CheckRequest(msgspec.Struct):
    """A grammar; see grammar_text.Grammar."""

    text: str
    schemas: list[tuple[str, Any]]
    is_foreign: bool


class CheckReply(msgspec.Struct):
    """error: "" when it compiles; param: of the request, with the path in the schema. text: the grammar, in Lark."""

    error: str
    param: str = ""
    text: str = ""
    compile_s: float = 0.0
