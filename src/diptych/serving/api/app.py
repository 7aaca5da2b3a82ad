"""The routes of the OpenAI-compatible server.

Owns paths and their OpenAPI. Knows no sockets and no processes: it is given an AsyncLLM.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from diptych import __version__
from diptych.base import compiled_modules
from diptych.control.errors import ContextLengthError, InvalidRequestError
from diptych.serving import edge_limits, sliced_json
from diptych.serving.answers.grammar.grammar_checker import NO_GRAMMAR
from diptych.serving.answers.grammar.grammar_text import GrammarWriter
from diptych.serving.answers.stream_journal import StreamHead, StreamRecord
from diptych.serving.api import error_responses as errors
from diptych.serving.api import protocol
from diptych.serving.api.access_log import AccessLog, open_log
from diptych.serving.api.admin_routes import AdminAccess, add_admin_routes, asks_admin_key
from diptych.serving.api.bodies import (
    REF,
    check_key,
    in_turn,
    num_bytes,
    read_body,
    takes,
    tenant_in,
    usable,
    while_client_waits,
)
from diptych.serving.api.chat import ChatWriter
from diptych.serving.api.completions import CompletionWriter
from diptych.serving.api.conversation import chat_prompt, chat_size, start_chat
from diptych.serving.api.cross_origin import CrossOrigin
from diptych.serving.api.embeddings import EmbeddingsBody, add_embeddings_routes
from diptych.serving.api.head_requests import HeadRequests
from diptych.serving.api.http_policy import HttpPolicy
from diptych.serving.api.key_routes import key_metrics, serve_keys
from diptych.serving.api.messages_routes import MESSAGES_BODIES, add_messages_routes
from diptych.serving.api.middleware import ApiKey, BodyLimit, NativePanics
from diptych.serving.api.miss_routes import add_miss_routes
from diptych.serving.api.model_list import model_list, one_model
from diptych.serving.api.parameters import (
    check_model,
    context_limit,
    given_prompts,
    max_tokens_of,
    options_of,
    refuse_unsupported,
    sampling_of,
    shown_tokens,
    truncated,
)
from diptych.serving.api.reply import ReplyContext, encode_json
from diptych.serving.api.reply_headers import ReplyHeaders
from diptych.serving.api.response_store import ResponseStore
from diptych.serving.api.responses import GenerationResponse, Writer
from diptych.serving.api.responses_request import ResponsesBody
from diptych.serving.api.responses_routes import add_responses_routes
from diptych.serving.api.resumable import Body, is_resumable, recorded, resumable_body, with_seed
from diptych.serving.api.settings_routes import add_settings_routes
from diptych.serving.api.structured import wanted_grammar, wants_structure
from diptych.serving.api.timeline_routes import add_timeline_routes
from diptych.serving.api.ui_routes import add_ui_routes
from diptych.serving.async_llm import AsyncLLM, check_count, check_prompt
from diptych.serving.batches.app_lines import serve_lines
from diptych.serving.batches.batch_routes import BatchBody, add_batch_routes, upload_limits
from diptych.serving.batches.batch_service import BatchService
from diptych.serving.keys.keyring import Keyring

BODIES: tuple[type[BaseModel], ...] = (
    protocol.CompletionBody,
    protocol.ChatBody,
    protocol.TokenizeBody,
    protocol.DetokenizeBody,
    *MESSAGES_BODIES,
    ResponsesBody,
    EmbeddingsBody,
    BatchBody,
)
# The paths that lines of batches may have.
LINE_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
# By reference, since of a model FastAPI makes a validator anew for each status of each route.
ERROR_REPLY = {"application/json": {"schema": {"$ref": REF.format(model=protocol.ErrorReply.__name__)}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": ERROR_REPLY, "description": text}
    for status, text in {
        400: "A field is wrong; param names it",
        401: "API key missing or wrong",
        403: "Not for this caller",
        404: "Unknown model",
        409: "Not in the present state of the server",
        413: "Body too large",
        429: "A queue limit is reached; see Retry-After",
        500: "The worker failed",
        501: "The chat template of the model cannot be used",
        503: "Not ready, or draining; see Retry-After",
    }.items()
}


class Service:
    """What the routes need: the model, its public names and when it began to be served. Replies have the first name."""

    def __init__(self, llm: AsyncLLM, names: Sequence[str]) -> None:
        self.llm = llm
        self.names = names
        self.model_name = model_name = names[0]
        self.created = int(time.time())
        llm.metrics.model_name = model_name

    async def completions(
        self, body: protocol.CompletionBody, tenant: str = "", resumed: StreamRecord | None = None, size: int = 0
    ) -> GenerationResponse:
        """Submit a completion request. resumed: its stream goes on. size: of its body in bytes."""
        llm, body = self.llm, self._recordable(body)
        self._check(body)
        ready = llm.require_ready()
        texts, prompts = given_prompts(body)
        check_count(max(len(texts), len(prompts)) * (body.n or 1), ready)  # before they are encoded
        if texts:
            is_special, limit = body.add_special_tokens is not False, context_limit(body, ready)
            prompts = await llm.encode_all(texts, add_special_tokens=is_special, limit=limit, tenant=tenant)
        if resumed is not None:
            prompts = [resumed.head.prompt]
        if body.truncate_prompt_tokens is not None:
            prompts, texts = truncated(body, prompts, ready, body.max_tokens), []
        max_tokens = max_tokens_of(body, max(map(len, prompts)), ready)
        grammar = None
        if wants_structure(body):
            grammars = GrammarWriter(llm.tokenizer.special_token_ids)
            grammar = await asyncio.to_thread(wanted_grammar, body, grammars)
        tried = NO_GRAMMAR if grammar is None else await llm.try_grammar(grammar)
        scored = body.logprobs if body.echo and body.logprobs is not None else None
        sampling = await llm.long_work.run(
            lambda: sampling_of(body, max_tokens, body.logprobs, scored, tried.text),
            size if body.logit_bias else 0,
            tenant,
        )
        recordable = await self._recordable_json(body, size, tenant)
        if body.echo and not texts:
            for prompt in prompts:
                check_prompt(prompt, sampling, ready)
            texts = await llm.decode_all(prompts, tenant=tenant)
        generation = await llm.submit_in_turn(
            prompts,
            sampling,
            f"cmpl-{uuid.uuid4().hex}" if resumed is None else resumed.stream_id,
            options_of(body, tenant),
            shown=shown_tokens(llm.tokenizer, body),
            resumed=resumed,
        )
        generation.not_enforced = tried.left_out
        created = int(time.time()) if resumed is None else resumed.head.created
        context = ReplyContext(generation, body, llm.tokenizer, self.model_name, created)
        completion_writer = CompletionWriter(context, body, texts)
        writer = self._recorded(completion_writer, context, recordable, ("cmpl", tenant), resumed)
        return GenerationResponse(llm, generation, writer, stream=bool(body.stream))

    def _recordable(self, body: Body) -> Body:
        return with_seed(body) if self.llm.journal is not None and is_resumable(body) else body

    async def _recordable_json(self, body: protocol.GenerationBody, size: int, tenant: str) -> bytes:
        """The body as it is recorded; empty where it is not."""
        if self.llm.journal is None or not is_resumable(body):
            return b""
        return await self.llm.long_work.run(lambda: body.model_dump_json(exclude_unset=True).encode(), size, tenant)

    def _recorded(
        self,
        writer: Writer,
        context: ReplyContext,
        body: bytes,
        owner: tuple[str, str],
        resumed: StreamRecord | None,
    ) -> Writer:
        """The writer of a stream, which is recorded where that is wanted and can be. body: see _recordable_json. owner:
        kind of reply, tenant."""
        journal = self.llm.journal
        if journal is None or not body:
            return writer
        prompt = context.generation.streams[0].prompt_token_ids
        head = StreamHead(*owner, body, context.created, prompt)
        return recorded(journal, context.generation, writer, head, resumed)

    async def chat(
        self, body: protocol.ChatBody, tenant: str = "", resumed: StreamRecord | None = None, size: int = 0
    ) -> GenerationResponse:
        """Submit a chat request. resumed: its stream goes on. size: of its body in bytes."""
        llm, body = self.llm, self._recordable(body)
        self._check(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        recordable = await self._recordable_json(body, size, tenant)
        started = await start_chat(llm, body, self.model_name, tenant, "chatcmpl-", size, resumed=resumed)
        chat_writer = ChatWriter(started.context, body, started.reader, started.id_length)
        writer = self._recorded(chat_writer, started.context, recordable, ("chatcmpl", tenant), resumed)
        return GenerationResponse(llm, started.generation, writer, stream=bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body, tenant = await read_body(request, protocol.TokenizeBody), tenant_in(request)
        check_model(body.model, self.names)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        most, param = edge_limits.TOKEN_IDS, "prompt" if body.messages is None else "messages"
        try:
            if body.messages is not None:
                chat = await in_turn(request, lambda: _as_chat(body))
                size = chat_size(chat, await num_bytes(request))
                _, tokens = await chat_prompt(self.llm, chat, size, tenant, most)
            else:
                is_special, text = body.add_special_tokens is not False, body.prompt or ""
                tokens = await self.llm.encode(text, add_special_tokens=is_special, limit=most, tenant=tenant)
        except ContextLengthError:
            message = f"{param} has {most} tokens or more, and a reply has fewer"
            raise InvalidRequestError(message, param=param) from None
        reply = {"count": len(tokens), "max_model_len": self.llm.require_ready().max_model_len, "tokens": tokens}
        return await self._long_json(reply, len(tokens), tenant)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body, tenant = await read_body(request, protocol.DetokenizeBody), tenant_in(request)
        check_model(body.model, self.names)
        known = self.llm.require_ready().vocab_size
        if await in_turn(request, lambda: any(max(part) >= known for part in protocol.parts_of(body.tokens))):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {known} tokens", param="tokens")
        [text] = await self.llm.decode_all([body.tokens], skip_special_tokens=False, param="tokens", tenant=tenant)
        return await self._long_json({"prompt": text}, len(text), tenant)

    async def _long_json(self, content: Any, size: int, tenant: str) -> Response:
        """A reply that may be long. size: of its content, in characters or numbers."""
        pieces = await self.llm.long_work.run(lambda: sliced_json.encode(content), size, tenant, is_reply=True)
        return Response(b"".join(pieces), media_type="application/json")

    def card(self, name: str) -> dict[str, Any]:
        """The served model by one of its names."""
        ready = self.llm.ready
        return protocol.ModelCard(
            id=name,
            created=self.created,
            root=self.llm.options.model,
            max_model_len=ready.max_model_len if ready else None,
        ).model_dump()

    def _check(self, body: protocol.GenerationBody) -> None:
        check_model(body.model, self.names)
        refuse_unsupported(body)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        if body.return_prefix_misses and self.llm.fleet.misses is None:
            message = "return_prefix_misses needs a server that was started with --explain-misses on"
            raise InvalidRequestError(message, param="return_prefix_misses", code="unsupported")


def build_app(
    llm: AsyncLLM,
    model_name: str,
    *,
    also_served_as: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    max_body_bytes: int = edge_limits.BODY_BYTES,
    http_policy: HttpPolicy | None = None,
    store: ResponseStore | None = None,
    batches: BatchService | None = None,
    keys: Keyring | None = None,
) -> FastAPI:
    """The ASGI application around a model that is being served. also_served_as: more names that clients may call it by;
    replies have ``model_name``. admin_key: see AdminAccess. store: in memory
    without one. batches, keys: to be started by the server. keys: instead of api_keys."""
    app = FastAPI(title="Diptych", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.long_work = llm.long_work
    names = tuple(dict.fromkeys((model_name, *also_served_as)))
    keys = keys or (Keyring(api_keys) if api_keys else None)
    service = Service(llm, names)
    http_policy = http_policy or HttpPolicy()
    errors.install(app)
    _add_generation_routes(app, service)
    add_messages_routes(app, llm, names, ERRORS)
    add_embeddings_routes(app, llm, names, ERRORS)
    add_responses_routes(app, llm, names, ERRORS, store or ResponseStore())
    add_batch_routes(app, batches, ERRORS)
    _add_information_routes(app, service)
    add_timeline_routes(app, llm.timeline, ERRORS)
    add_ui_routes(app, llm, model_name, ERRORS, has_admin_key=asks_admin_key(admin_key, keys))
    add_settings_routes(app, llm, model_name, ERRORS)
    add_admin_routes(app, llm, ERRORS)
    add_miss_routes(app, llm.fleet, ERRORS, has_tenants=keys is not None and keys.has_tenants)
    app.add_middleware(NativePanics)
    serve_keys(app, keys, LINE_ENDPOINTS, lambda: names[0], ERRORS)
    serve_lines(app, batches, llm, lambda: names, LINE_ENDPOINTS, workers_have_best_effort=True)
    app.add_middleware(
        BodyLimit, max_bytes=max_body_bytes, larger=upload_limits(batches), on_end=llm.long_work.freed.note
    )
    if keys is not None:
        app.add_middleware(ApiKey, keys=keys)
    app.add_middleware(AdminAccess, key=admin_key, hosts=http_policy.allowed_hosts, keys=keys)
    add_http_policy(app, http_policy)
    describe(app, BODIES)
    return app


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]] = ()) -> None:
    """Let ``/openapi.json`` hold what the routes only refer to: the error reply, and these bodies."""
    app.openapi = lambda: _openapi(app, bodies)  # type: ignore[method-assign]


def add_http_policy(app: FastAPI, http_policy: HttpPolicy) -> None:
    """The layers around everything that ``app`` has so far. Raises ConfigError for a log that cannot be opened."""
    app.state.is_strict, app.state.allowed_hosts = http_policy.is_strict, http_policy.allowed_hosts
    app.add_middleware(HeadRequests)
    app.add_middleware(CrossOrigin, origins=http_policy.cors_origins, hosts=http_policy.hosts)
    app.add_middleware(ReplyHeaders)
    if http_policy.access_log is not None:
        app.add_middleware(AccessLog, file=open_log(http_policy.access_log))


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"content": {"text/event-stream": {"schema": event}}}  # the schema is one event's

    @app.post(
        "/v1/completions",
        responses={**ERRORS, 200: {"model": protocol.CompletionReply, **stream}},
        openapi_extra=takes(protocol.CompletionBody),
    )
    @while_client_waits
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body, resumed = await resumable_body(request, service.llm, protocol.CompletionBody, "cmpl")
        return await service.completions(body, tenant_in(request), resumed, await num_bytes(request))

    @app.post(
        "/v1/chat/completions",
        responses={**ERRORS, 200: {"model": protocol.ChatReply, **stream}},
        openapi_extra=takes(protocol.ChatBody),
    )
    @while_client_waits
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body, resumed = await resumable_body(request, service.llm, protocol.ChatBody, "chatcmpl")
        return await service.chat(body, tenant_in(request), resumed, await num_bytes(request))

    @app.post(
        "/tokenize",
        responses={**ERRORS, 200: {"model": protocol.TokenizeReply}},
        openapi_extra=takes(protocol.TokenizeBody),
    )
    @while_client_waits
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        return await service.tokenize(request)

    @app.post(
        "/detokenize",
        responses={**ERRORS, 200: {"model": protocol.DetokenizeReply}},
        openapi_extra=takes(protocol.DetokenizeBody),
    )
    @while_client_waits
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await service.detokenize(request)


def _add_information_routes(app: FastAPI, service: Service) -> None:
    llm = service.llm
    no_key: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}
    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": protocol.StatusReply, "description": "Not now"}}

    @app.get("/v1/models", responses={**no_key, 200: {"model": protocol.ModelList}})
    async def models(request: Request) -> Response:
        """The served model by each of its names; Anthropic's form for clients that send anthropic-version."""
        cards = [service.card(name) for name in usable(request, service.names)]
        return _json(model_list(cards, request.headers))

    @app.get("/v1/models/{name:path}", responses={**no_key, 404: ERRORS[404], 200: {"model": protocol.ModelCard}})
    async def model(request: Request, name: str) -> Response:
        """One model by its name."""
        check_model(name, service.names)
        check_key(request, name)
        return _json(one_model(service.card(name), request.headers))

    @app.get("/health", responses={200: {"model": protocol.StatusReply}, **not_ready})
    async def health() -> Response:
        """Whether nothing of this process has failed by a defect (not: whether it takes requests; see /ready)."""
        status, content = llm.health()
        return _json(content, status)

    @app.get("/ready", responses={200: {"model": protocol.StatusReply}, **not_ready})
    async def ready() -> Response:
        """Whether a request sent now would be taken."""
        status, content = llm.readiness()
        return _json(content, status)

    @app.get("/version", responses={**no_key, 200: {"model": protocol.VersionReply}})
    async def version() -> Response:
        """The version of this server and how its control code runs; once it is loaded, its processor, the instruction
        set of its CPU kernels and the formats of its weights."""
        known = llm.ready
        names = ("instruction_set", "processor", "weights")
        machine = {name: getattr(known, name, "") or None for name in names}
        profile = llm.tokenizer.template_profile
        template = {"chat_template": profile.as_dict() if profile is not None else None}
        return _json({"version": __version__, "control": compiled_modules.what_runs(), **machine, **template})

    @app.get("/metrics", responses={**no_key, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        text = llm.metrics.text() + key_metrics(request, service.model_name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _as_chat(body: protocol.TokenizeBody) -> protocol.ChatBody:
    fields = set(protocol.TokenizeBody.model_fields) & set(protocol.ChatBody.model_fields)
    given = {name: getattr(body, name) for name in fields & body.model_fields_set}
    try:
        return protocol.ChatBody.model_validate(given)
    except ValidationError as error:  # of what a chat request must have besides
        raise errors.invalid_body(error) from None


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")


def _openapi(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(protocol.ErrorReply, "serialization")]
        models += [(model, "validation") for model in bodies]
        _, found = models_json_schema(models, ref_template=REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
