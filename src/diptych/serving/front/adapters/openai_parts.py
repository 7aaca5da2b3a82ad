"""What all kinds of engines have in common: OpenAI's API, and a page of Prometheus metrics."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from diptych.serving import edge_limits
from diptych.serving.front.capabilities import EngineNotReadyError
from diptych.serving.front.engine_connection import ConnectionPool, ReplyTooLongError, ask
from diptych.serving.front.engine_load import EngineGauges, gauges_of
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_request import RelayRequest, encode_json
from diptych.serving.front.reply_chunks import error_message
from diptych.serving.front.tokenized_prompt import TokenizedPrompt, read_rendered

LOOK_S = 20.0  # that an engine may take for one token, when it is asked for a sign of life
TOKENIZE_S = 10.0
Reply = TypeVar("Reply", bound=msgspec.Struct)


async def get_json(pool: ConnectionPool, path: str) -> Any:
    """The JSON at a path; None where there is none. Raises EngineNotReadyError when the engine does not answer."""
    try:
        status, body = await ask(pool, "GET", path, timeout_s=LOOK_S)
    except TimeoutError:
        raise EngineNotReadyError(f"{path}: no reply within {LOOK_S:g} s") from None
    except (ConnectionError, ReplyTooLongError) as error:
        raise EngineNotReadyError(f"{path}: {error}") from None
    if status in (401, 403):
        raise EngineNotReadyError(f"{path}: status {status}; the engine asks for another key (api_key_env)")
    if status != 200:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


async def get_fields(pool: ConnectionPool, path: str) -> dict[str, Any]:
    """The JSON object at a path; {} where there is none. Raises EngineNotReadyError."""
    found = await get_json(pool, path)
    return found if isinstance(found, dict) else {}


async def model_of(pool: ConnectionPool, spec: EngineSpec) -> dict[str, Any]:
    """What /v1/models says of the model that the engine is to serve, or of its first one. Raises
    EngineNotReadyError."""
    listed = (await get_fields(pool, "/v1/models")).get("data")
    models = (
        [model for model in listed if isinstance(model, dict) and "id" in model] if isinstance(listed, list) else []
    )
    if spec.model:
        models = [model for model in models if model["id"] == spec.model]
    if not models:
        raise EngineNotReadyError(f"/v1/models does not name {spec.model or 'any model'}")
    return models[0]


async def real_token(pool: ConnectionPool, model: str) -> bytes:
    """Ask for one token (of a completion, of a chat, else for an embedding). Returns the reply. Raises
    EngineNotReadyError."""
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0}),
        ("/v1/embeddings", {"input": "1"}),
    )
    said = ""
    for path, fields in asked:
        try:
            status, body = await ask(pool, "POST", path, encode_json({"model": model, **fields}), timeout_s=LOOK_S)
        except TimeoutError:
            raise EngineNotReadyError(f"{path}: no token within {LOOK_S:g} s") from None
        except (ConnectionError, ReplyTooLongError) as error:
            raise EngineNotReadyError(f"{path}: {error}") from None
        if status == 200 and has_token(body):
            return body
        said = said or f"{path}: status {status}: {error_message(body, 'no token in the reply')}"
    raise EngineNotReadyError(said)


def has_token(body: bytes) -> bool:
    """Whether a whole reply has an answer in it."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(content, dict) and bool(content.get("choices") or content.get("data"))


def usage_wanted(request: RelayRequest) -> dict[str, Any]:
    """Streams end with usage, whether their clients asked or not."""
    if not request.is_stream:
        return {}
    options = request.body.stream_options
    wanted: dict[str, Any] = {"include_usage": True}
    if options is not None and options.continuous_usage_stats:
        wanted["continuous_usage_stats"] = True
    return {"stream_options": wanted}


class GaugePage:
    """Reads a few samples of a metrics page, added up over their labels, without reading the rest. names: of samples,
    by field of EngineGauges."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._fields = {name.encode(): field for field, name in names.items()}
        every = b"|".join(re.escape(name) for name in self._fields)
        self._pattern = re.compile(rb"^(" + every + rb")(?:\{[^}\n]*\})? ([0-9.eE+-]+|NaN)", re.MULTILINE)

    def read(self, page: bytes) -> EngineGauges | None:
        """None where none of the samples is there."""
        values: dict[str, float] = {}
        for name, text in self._pattern.findall(page):
            try:
                value = float(text)
            except ValueError:  # a sample that is no number is none
                continue
            if value == value:  # not NaN
                field = self._fields[name]
                values[field] = values.get(field, 0.0) + value
        return gauges_of(values) if values else None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


async def post_tokens(pool: ConnectionPool, path: str, fields: Mapping[str, Any]) -> TokenizedPrompt | None:
    """The tokens of a reply {"tokens": [...]}; None where the engine refuses. Raises ConnectionError, TimeoutError."""
    found = await _post(pool, path, fields, _Tokens)
    return None if found is None else TokenizedPrompt.of_text(tuple(found.tokens))


async def post_text(pool: ConnectionPool, path: str, fields: Mapping[str, Any]) -> str | None:
    """The text of a reply {"prompt": "..."}; None where the engine refuses. Raises ConnectionError, TimeoutError."""
    found = await _post(pool, path, fields, _Text)
    return None if found is None else found.prompt


async def post_rendered(pool: ConnectionPool, path: str, fields: Mapping[str, Any]) -> TokenizedPrompt | None:
    """A chat as the engine renders it; None where it refuses. Raises ConnectionError, TimeoutError."""
    body = await _body_of(pool, path, fields)
    return None if body is None else await asyncio.to_thread(read_rendered, body)


async def _body_of(pool: ConnectionPool, path: str, fields: Mapping[str, Any]) -> bytes | None:
    try:
        status, body = await ask(
            pool, "POST", path, encode_json(fields), timeout_s=TOKENIZE_S, limit=edge_limits.ENGINE_TOKENS_BYTES
        )
    except ReplyTooLongError:
        return None
    return body if status == 200 else None


async def _post(pool: ConnectionPool, path: str, fields: Mapping[str, Any], kind: type[Reply]) -> Reply | None:
    body = await _body_of(pool, path, fields)
    if body is None:
        return None
    try:
        return await asyncio.to_thread(msgspec.json.decode, body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
