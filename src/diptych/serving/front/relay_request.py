"""A client's request as the front passes it on: what is read of its body, and the body that an engine gets.

Only a few fields are read; all others go to the engine as they came. Fields that are the front's own (objectives,
class, deadline, labels) are taken out. Prompts are hashed by text in blocks of a fixed number of bytes, or by token
where they are known; never both in one fleet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from xxhash import xxh3_128

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import InvalidRequestError
from diptych.control.request import SERVICE_CLASSES, RequestOptions
from diptych.control.slo import NS_PER_MS, Slo
from diptych.serving import edge_limits, sliced_json
from diptych.serving.front.tokenized_prompt import TokenizedPrompt
from diptych.serving.long_work import check_wanted

RelayPath = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"]
CHAT_PATH: RelayPath = "/v1/chat/completions"
COMPLETION_PATH: RelayPath = "/v1/completions"
WHOLE_PATHS: tuple[RelayPath, ...] = ("/v1/embeddings", "/v1/rerank", "/v1/score")  # that are never streamed
OWN_FIELDS = frozenset(
    (
        "ttft_slo_ms", "tpot_slo_ms", "service_class", "gives_way_ms", "deadline_ms", "metadata", "priority",
        "return_latency",
    )
)  # fmt: skip
# Fields with which an answer can go on after some tokens at another engine: those that made the prompt, which is known
# as tokens by then, and those that are sent again. With any other (tools, schemas, stop strings, penalties ...) the
# state of a parser, of a grammar or of a search would be lost, or a field that is not known here would be.
PROMPT_FIELDS = frozenset(
    (
        "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents",
    )
)  # fmt: skip
SHAPE_FIELDS = ("tools", "chat_template_kwargs", "chat_template", "documents")  # of prompts, besides their messages
NEUTRAL = (b"null", b"[]", b"{}", b"false", b"0", b"0.0", b'""', b'"text"', b'{"type":"text"}')
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos", "stop_token_ids", "user",
    "cache_salt",
)  # fmt: skip
RESUMABLE_FIELDS = PROMPT_FIELDS | OWN_FIELDS | frozenset(SAMPLING_FIELDS) | {"min_tokens"}
DEFAULT_MAX_TOKENS = 1 << 16
MOST_TOKENS = 1 << 20  # of an answer to which its client sets no limit
Raw = msgspec.Raw


class AskedStreamOptions(msgspec.Struct):
    """What is read of stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RelayBody(msgspec.Struct):
    """The fields that the front reads."""

    model: str | None = None
    stream: bool | None = None
    stream_options: AskedStreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    deadline_ms: float | None = None
    metadata: dict[str, str] | None = None


LARGE_FIELDS = ("messages", "prompt", "input", "tools", "chat_template_kwargs")  # of RelayBody: read as they are
SMALL_FIELDS = tuple(name for name in RelayBody.__struct_fields__ if name not in LARGE_FIELDS)
_body_decoder = msgspec.json.Decoder(RelayBody)
MOST_BLOCKS = 1 << 14  # that are hashed: who has so much of a prompt is the right engine, whatever comes behind
_LONGEST_NEUTRAL = 64  # of NEUTRAL, with some spaces
_BLOCKS_AT_ONCE = 4096  # are hashed, or ids looked at, until it is asked whether the client is there
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """One request. fields: of its body by name, as JSON. tokenized: the prompt as an engine said that it sees it, or as
    the client gave it. num_prompts: of a completion, each with an answer of its own."""

    path: RelayPath
    body: RelayBody
    fields: Mapping[str, Raw]
    num_bytes: int
    tokenized: TokenizedPrompt | None = None
    num_prompts: int = 1

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Token ids of the prompt; None where they are not known."""
        return None if self.tokenized is None else self.tokenized.token_ids

    @property
    def is_stream(self) -> bool:
        """Whether the client reads a stream."""
        return bool(self.body.stream) and self.path not in WHOLE_PATHS

    @property
    def num_choices(self) -> int:
        """Answers that are asked for."""
        return (self.body.n or 1) * self.num_prompts

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for usage at the end of a stream."""
        options = self.body.stream_options
        return bool(options and (options.include_usage or options.continuous_usage_stats))

    @property
    def prompt(self) -> memoryview:
        """The JSON of what is to be read: messages, prompt or input. Not a copy: some are long."""
        return memoryview(self.body.messages or self.body.prompt or self.body.input)

    @property
    def prompt_head(self) -> bytes:
        """The prompt's first characters, which say what it is."""
        return bytes(self.prompt[:64]).lstrip()

    @property
    def max_tokens(self) -> int:
        """Most tokens of the answer that were asked for; one for what gives no tokens."""
        if self.path in WHOLE_PATHS:
            return 1
        wish = self.body.max_completion_tokens if self.body.max_completion_tokens is not None else self.body.max_tokens
        if wish is None:
            wish = 16 if self.path == COMPLETION_PATH else DEFAULT_MAX_TOKENS
        return max(1, wish)

    @property
    def most_tokens(self) -> int:
        """Most tokens of an answer that is still believed: what was asked for, if anything was. (Engines differ in what
        they give then.)"""
        asked = self.body.max_tokens is not None or self.body.max_completion_tokens is not None
        return self.max_tokens if asked or self.path in WHOLE_PATHS else MOST_TOKENS

    @property
    def is_greedy(self) -> bool:
        """Whether the same prompt gives the same answer on the same build."""
        return self.body.temperature == 0

    @property
    def is_stateless(self) -> bool:
        """Whether its answer, given so far as tokens, is all that another engine needs to continue it."""
        return self.is_stream and self.num_prompts == 1 and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether its answer is text that follows from the prompt and from sampling alone."""
        return all(
            name in RESUMABLE_FIELDS or bytes(memoryview(value)[:_LONGEST_NEUTRAL]).replace(b" ", b"") in _neutral(name)
            for name, value in self.fields.items()
        )

    @property
    def question(self) -> Mapping[str, Raw] | None:
        """The engine's own request for the tokens of a chat, where it can stand for this one; None: it cannot."""
        options = self.body.stream_options
        is_simple = self.is_plain and not (options and options.continuous_usage_stats)
        return self.tokenized.question if self.tokenized is not None and is_simple else None

    @property
    def body_echoes(self) -> bool:
        """Whether the reply repeats the prompt's text."""
        return "echo" in self.fields and bytes(self.fields["echo"]) not in NEUTRAL

    def estimated_tokens(self, bytes_per_token: float) -> int:
        """Prompt tokens: counted where they are known, else estimated."""
        if self.token_ids is not None:
            return max(1, len(self.token_ids))
        return max(1, int((len(self.prompt) or self.num_bytes) / bytes_per_token))  # rerank and score have no prompt

    def hashes(self, block_size: int, bytes_per_token: float) -> tuple[bytes, ...]:
        """The chained hashes of the full blocks of its prompt, MOST_BLOCKS at most. By text, a block is as many bytes
        as ``block_size`` tokens have by that ratio, which must stay the same for the life of an index."""
        if self.token_ids is not None:
            assert self.tokenized is not None
            num_hashed = min(self.tokenized.num_plain, MOST_BLOCKS * block_size)
            return () if self.body.cache_salt else hash_blocks(self.token_ids[:num_hashed], block_size)
        if self.path in WHOLE_PATHS:
            return ()
        width, data = max(1, int(block_size * bytes_per_token)), self.prompt
        before = (self.path, self.body.cache_salt or "", self.body.model or "")
        shapes = [f"{name}:".encode() + bytes(self.fields[name]) for name in SHAPE_FIELDS if name in self.fields]
        seed = b"\0".join(("\0".join(before).encode(), *shapes))
        # Not cryptographic, for speed: two texts of one hash would cost hits, and no text is taken for another.
        chain = xxh3_128(blake2b(seed).digest())
        found: list[bytes] = []
        for end in range(width, min(len(data), width * MOST_BLOCKS) + 1, width):
            if not len(found) % _BLOCKS_AT_ONCE:
                check_wanted()
            chain.update(data[end - width : end])
            found.append(chain.digest())  # of all that came before
        return tuple(found)

    def engine_fields(self, model: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The body for an engine that calls the model so, without the front's own fields."""
        fields: dict[str, Any] = {name: value for name, value in self.fields.items() if name not in OWN_FIELDS}
        return {**fields, "model": model, **changes}

    def continuation_fields(
        self, model: str, prompt_ids: Sequence[int], output_ids: Sequence[int], max_model_len: int
    ) -> dict[str, Any]:
        """A completion that goes on after ``output_ids`` of the answer, wherever the first ones came from.
        max_model_len: of the engine, which refuses to be asked for more (0: not known)."""
        fields: dict[str, Any] = {name: self.fields[name] for name in SAMPLING_FIELDS if name in self.fields}
        room = max_model_len - len(prompt_ids) - len(output_ids) if max_model_len else self.max_tokens
        if self.body.min_tokens is not None:
            fields["min_tokens"] = max(0, self.body.min_tokens - len(output_ids))
        return fields | {
            "model": model,
            "prompt": [*prompt_ids, *output_ids],
            "max_tokens": max(1, min(self.max_tokens - len(output_ids), room)),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def _neutral(name: str) -> tuple[bytes, ...]:
    """Values of a field that change nothing."""
    if name in ("n", "best_of", "repetition_penalty"):
        return (*NEUTRAL, b"1", b"1.0")
    return (b"null", b"false") if name in ("logprobs", "prompt_logprobs") else NEUTRAL


def read_request(path: RelayPath, data: bytes) -> RelayRequest:
    """The request of a body. Others get their turn while it works. Raises InvalidRequestError that names the field."""
    fields = sliced_json.decode_fields(data, edge_limits.BODY_FIELDS)
    try:
        body = _read_body(fields)
    except msgspec.ValidationError as error:
        words = str(error)
        param = words.rpartition("`$.")[2].rstrip("`").split(".")[0].split("[")[0] if "`$." in words else None
        raise InvalidRequestError(f"{param or 'body'}: {words}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    request = RelayRequest(path, body, fields, len(data))
    _check(request)
    if path == COMPLETION_PATH and request.prompt_head.startswith(b"["):
        return _with_list(request)
    return request


def _with_list(request: RelayRequest) -> RelayRequest:
    """A completion whose prompt is a list: of token ids, of texts, or of lists. What it is else, the engine refuses."""
    prompts = sliced_json.decode(bytes(request.prompt))
    if not all(type(first) is int for first in prompts[:1]):
        return replace(request, num_prompts=max(1, len(prompts)))
    if len(prompts) > edge_limits.TOKEN_IDS:
        message = f"prompt: at most {edge_limits.TOKEN_IDS} items, not {len(prompts)}"
        raise InvalidRequestError(message, param="prompt")
    for begin in range(0, len(prompts), _BLOCKS_AT_ONCE):
        check_wanted()
        part = prompts[begin : begin + _BLOCKS_AT_ONCE]
        if set(map(type, part)) != {int} or min(part) < 0 or max(part) >= 1 << 32:
            return request
    return replace(request, tokenized=TokenizedPrompt.of_text(tuple(prompts)))


def _read_body(fields: Mapping[str, Raw]) -> RelayBody:
    """The prompt is not parsed again."""
    body = _body_decoder.decode(encode_json({name: fields[name] for name in SMALL_FIELDS if name in fields}))
    for name in LARGE_FIELDS:
        if name in fields:
            setattr(body, name, fields[name])
    return body


def _check(request: RelayRequest) -> None:
    body = request.body
    wanted = {CHAT_PATH: ("messages", body.messages), COMPLETION_PATH: ("prompt", body.prompt)}
    if request.path in wanted and bytes(memoryview(wanted[request.path][1])[:5]) in (b"", b"null"):
        name = wanted[request.path][0]
        raise InvalidRequestError(f"{name}: this field is required", param=name)
    limits = (("max_tokens", body.max_tokens), ("max_completion_tokens", body.max_completion_tokens), ("n", body.n))
    for name, value in limits:
        if value is not None and not (0 if name != "n" else 1) <= value <= 1 << 24:
            raise InvalidRequestError(f"{name} is {value}; it must be in [1, {1 << 24}]", param=name)
    if body.service_class is not None and body.service_class not in SERVICE_CLASSES:
        known = ", ".join(SERVICE_CLASSES)
        raise InvalidRequestError(f"service_class is {body.service_class!r}; one of {known}", param="service_class")
    for name in ("ttft_slo_ms", "tpot_slo_ms", "deadline_ms"):
        value = getattr(body, name)
        if value is not None and not 0 < value <= 1e9:
            raise InvalidRequestError(f"{name} is {value}; it must be in (0, 1e9]", param=name)


def options_for(body: RelayBody, tenant: str) -> RequestOptions:
    """What the request asks of the front."""
    slo = None
    if body.ttft_slo_ms is not None or body.tpot_slo_ms is not None:
        slo = Slo(_ns(body.ttft_slo_ms), _ns(body.tpot_slo_ms))
    return RequestOptions(
        priority=body.priority or 0,
        slo=slo,
        service_class=body.service_class or "standard",
        tenant=tenant,
        deadline_ns=_ns(body.deadline_ms),
        cache_salt=body.cache_salt,
        metadata=body.metadata or {},
    )


def _ns(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else max(1, int(milliseconds * NS_PER_MS))
