"""The routes of a front over engines that others run: OpenAI's paths are passed on, the rest is about the front itself.

Owns paths and their headers. Knows no engine's protocol: it is given a EngineFront.
"""

import time
from collections.abc import Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych import __version__
from diptych.base import compiled_modules
from diptych.control.errors import ConflictError, NotFoundError
from diptych.serving import edge_limits
from diptych.serving.api import error_responses as errors
from diptych.serving.api import protocol
from diptych.serving.api.admin_routes import AdminAccess, add_admin_routes, asks_admin_key
from diptych.serving.api.app import ERRORS, add_http_policy, describe
from diptych.serving.api.bodies import check_key, in_turn, tenant_in, usable, while_client_waits
from diptych.serving.api.http_policy import HttpPolicy
from diptych.serving.api.key_routes import key_metrics, serve_keys
from diptych.serving.api.middleware import ApiKey, BodyLimit, NativePanics
from diptych.serving.api.model_list import model_list
from diptych.serving.api.reply import encode_json
from diptych.serving.api.timeline_routes import add_timeline_routes
from diptych.serving.api.ui_routes import add_ui_routes
from diptych.serving.batches.app_lines import serve_lines
from diptych.serving.batches.batch_routes import add_batch_routes, upload_limits
from diptych.serving.batches.batch_service import BatchService
from diptych.serving.front.relay_request import RelayPath, read_request
from diptych.serving.front.relay_stream import RelayResponse
from diptych.serving.front.served_engines import EngineFront
from diptych.serving.keys.keyring import Keyring
from diptych.timeline.watched_server import WatchedEngine

OBJECT: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}}}
OWN_NAME = "front"  # by which clients may call any model
LINE_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")  # of batches
BODY = {"requestBody": {"required": True, **OBJECT}}


class FrontService:
    """What the routes need: the engines, and the names of their model for clients (none: the engines' own)."""

    def __init__(self, front: EngineFront, names: Sequence[str]) -> None:
        self.front = front
        self.given_names = names
        self.created = int(time.time())

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.listed()[0]

    def listed(self) -> tuple[str, ...]:
        """The names that /v1/models shows."""
        return tuple(self.given_names) or (next(iter(self.front.engine_models), OWN_NAME),)

    def names(self) -> tuple[str, ...]:
        """The names by which clients may call the model."""
        return (*(self.given_names or (OWN_NAME,)), *self.front.engine_models)

    async def relay(self, path: RelayPath, request: Request) -> Response:
        """Pass a request on."""
        data = await request.body()
        asked = await in_turn(request, lambda: read_request(path, data))
        self.front.require_ready()
        name = asked.body.model
        if name is not None and name not in self.names():
            message = f"model {name!r} is not served here; {self.model_name!r} is"
            raise NotFoundError(message, param="model", code="model_not_found")
        check_key(request, name)
        generation = await self.front.submit(asked, tenant_in(request))
        stream = generation.relay

        def headers() -> list[tuple[bytes, bytes]]:
            engine = self.front.engine_of(stream)
            name = stream.served_by or (engine.name if engine is not None else "")
            found = [(b"x-diptych-engine", name.encode())] if name else []
            if asked.is_stream:
                found.append((b"x-diptych-recovery", self.front.recovery_of(stream).encode()))
            return found

        return RelayResponse(self.front, generation, stream=asked.is_stream, more_headers=headers)

    def card(self, name: str) -> dict[str, Any]:
        """The model by one of its names."""
        ready = self.front.ready
        return protocol.ModelCard(
            id=name,
            created=self.created,
            root=next(iter(self.front.engine_models), ""),
            max_model_len=ready.max_model_len if ready else None,
        ).model_dump()

    def engines(self) -> list[dict[str, Any]]:
        """Every engine, with what was found out about it."""
        return [self.engine(engine.number) for engine in self.front.external.engines]

    def engine(self, worker: int) -> dict[str, Any]:
        """One engine, with what was found out about it. Raises NotFoundError."""
        fleet = self.front.external
        if worker not in range(len(fleet.engines)):
            numbers = ", ".join(str(engine.number) for engine in fleet.engines)
            raise NotFoundError(f"engine is {worker}; there are {numbers}", param="worker")
        engine = fleet.engines[worker]
        return {
            "worker": engine.number,
            "name": engine.name,
            "kind": engine.spec.kind,
            "url": engine.spec.url,
            "rank": engine.spec.rank,
            "role": engine.spec.role,
            "state": fleet.state_of(worker),
            "is_up": worker in fleet.core.members.up,
            "is_used": fleet.core.members.is_usable(worker),
            "is_draining": fleet.changes.is_draining(worker),
            "is_held": fleet.changes.is_held(worker),
            "open_requests": fleet.core.attempts.count_of(worker),
            "losses": engine.num_restarts,
            **engine.described(),
        }


def build_front_app(
    front: EngineFront,
    model_name: str = "",
    *,
    also_served_as: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    max_body_bytes: int = edge_limits.BODY_BYTES,
    http_policy: HttpPolicy | None = None,
    batches: BatchService | None = None,
    keys: Keyring | None = None,
) -> FastAPI:
    """The ASGI application around engines that are being served. model_name, also_served_as: by which clients may call
    their model besides the engines' own name. batches, keys: to be started by the server. keys: instead of api_keys."""
    app = FastAPI(title="Diptych front", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    names = tuple(dict.fromkeys((model_name, *also_served_as))) if model_name else ()
    keys = keys or (Keyring(api_keys) if api_keys else None)
    app.state.long_work = front.long_work
    service = FrontService(front, names)
    front.metrics.model_name = model_name or OWN_NAME
    http_policy = http_policy or HttpPolicy()
    errors.install(app)
    for path in get_args(RelayPath):
        _add_relay(app, service, path)
    _add_information(app, service)
    _add_engines(app, service)
    add_batch_routes(app, batches, ERRORS)
    add_timeline_routes(app, front.timeline, ERRORS)
    has_key = asks_admin_key(admin_key, keys)
    add_ui_routes(app, front, model_name or OWN_NAME, ERRORS, has_admin_key=has_key, watched=front.watched)
    add_admin_routes(app, front, ERRORS)
    app.add_middleware(NativePanics)
    serve_keys(app, keys, get_args(RelayPath), lambda: service.model_name, ERRORS)
    serve_lines(app, batches, front, service.names, LINE_ENDPOINTS, workers_have_best_effort=False)
    app.add_middleware(
        BodyLimit, max_bytes=max_body_bytes, larger=upload_limits(batches), on_end=front.long_work.freed.note
    )
    if keys is not None:
        app.add_middleware(ApiKey, keys=keys)
    app.add_middleware(AdminAccess, key=admin_key, hosts=http_policy.allowed_hosts, keys=keys)
    add_http_policy(app, http_policy)
    describe(app)
    return app


def _add_relay(app: FastAPI, service: FrontService, path: RelayPath) -> None:
    @app.post(path, responses={**ERRORS, 200: OBJECT}, openapi_extra=BODY, operation_id=path.strip("/"))
    @while_client_waits
    async def relay(request: Request) -> Response:
        """Passed on to an engine."""
        return await service.relay(path, request)


def _add_information(app: FastAPI, service: FrontService) -> None:
    front = service.front
    no_key: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}

    @app.get("/v1/models", responses={**no_key, 200: {"model": protocol.ModelList}})
    async def models(request: Request) -> Response:
        """The model of the engines; Anthropic's form for clients that send anthropic-version."""
        cards = [service.card(name) for name in usable(request, service.listed())]
        return _json(model_list(cards, request.headers))

    @app.get("/health", responses={200: {"model": protocol.StatusReply}, 503: {"model": protocol.StatusReply}})
    async def health() -> Response:
        """Whether nothing of this process has failed by a defect (not: whether it takes requests; see /ready)."""
        status, content = front.health()
        return _json(content, status)

    @app.get("/ready", responses={200: {"model": protocol.StatusReply}, 503: {"model": protocol.StatusReply}})
    async def ready() -> Response:
        """Whether a request sent now would find an engine."""
        status, content = front.readiness()
        return _json(content, status)

    @app.get("/version", responses={**no_key, 200: OBJECT})
    async def version() -> Response:
        """The version of this server, and of its engines where they say it."""
        versions = {engine["url"]: engine["version"] for engine in service.engines()}
        return _json({"version": __version__, "control": compiled_modules.what_runs(), "engines": versions})

    @app.get("/metrics", responses={**no_key, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        text = front.metrics.text() + key_metrics(request, front.metrics.model_name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_engines(app: FastAPI, service: FrontService) -> None:
    front = service.front
    no_key: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}

    @app.get("/engines", responses={**no_key, 200: OBJECT})
    async def engines() -> Response:
        """Every engine: whether it is up, its version, what it can do, and what it lacks."""
        return _json({"engines": service.engines()})

    missing: dict[int | str, dict[str, Any]] = {404: ERRORS[404], **no_key, 200: OBJECT}

    @app.get("/engines/{worker:int}", responses=missing)
    async def engine(worker: int) -> Response:
        """One engine."""
        return _json(service.engine(worker))

    @app.get("/engines/{worker:int}/ready", responses={**missing, 503: OBJECT})
    async def engine_ready(worker: int) -> Response:
        """Whether new requests go to an engine: 200, else 503 with its state. Retry until 200."""
        return _in_state(service.engine(worker), "ready")

    @app.get("/engines/{worker:int}/drained", responses={**missing, 503: OBJECT})
    async def engine_drained(worker: int) -> Response:
        """Whether nothing is left at an engine that is drained, so that it may be stopped: 200, else 503 with its
        state. Retry until 200."""
        return _in_state(service.engine(worker), "drained")

    unknown: dict[int | str, dict[str, Any]] = {**missing, 409: ERRORS[409]}

    @app.get("/engines/{worker:int}/pages", responses=unknown)
    async def engine_pages(worker: int, request: Request) -> Response:
        """The pages of an engine's own metrics that are kept of the last minute, the oldest first."""
        service.engine(worker)
        watched = front.external.engines[worker].watched()
        if watched is None:
            words = (
                f"no metrics of engine {worker} are kept: its kind has none that are, or it has shown too little yet"
            )
            raise ConflictError(words, code="no_engine_metrics")
        size = sum(len(page) for _, page in watched.pages)
        reply = await front.long_work.run(lambda: encode_json(_pages(watched)), size, tenant_in(request))
        return Response(reply, media_type="application/json")


def _pages(watched: WatchedEngine) -> dict[str, Any]:
    pages = [{"at_s": at_s, "text": page.decode("utf-8", "replace")} for at_s, page in watched.pages]
    return {"name": watched.name, "version": watched.version, "pages": pages}


def _in_state(engine: dict[str, Any], state: str) -> Response:
    return _json(engine, 200 if engine["state"] == state else 503)


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
