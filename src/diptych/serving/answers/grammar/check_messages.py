"""What the front end and the process that compiles grammars say to each other, one line of JSON each."""

import msgspec


class CheckSettings(msgspec.Struct):
    """The tokenizer, as the text of its tokenizer.json, and the limits of a grammar: of processor time, by the
    clock, and of memory beside what the process has."""

    tokenizer: str
    eos_token_ids: list[int]
    vocab_size: int
    limit_s: float
    clock_limit_s: float
    memory_bytes: int


class CheckRequest(msgspec.Struct):
    """A grammar; see grammar_text.Grammar."""

    text: str
    is_foreign: bool


class CheckReply(msgspec.Struct):
    """error: "" when it compiles; param: of the request, with the path in the schema. text: the grammar, in Lark.
    left_out: paths of what it does not enforce. is_busy: the machine had no time or no memory for it: no word about the
    grammar."""

    error: str
    param: str = ""
    text: str = ""
    left_out: list[str] = []
    compile_s: float = 0.0
    is_busy: bool = False
