"""The operator's routes: what each worker is for, which workers there are.

Owns ``/admin/...`` and who may use it: with an admin key, those who have it; without one, programs on this machine that
call the server by one of its own names, whatever else is set. A web page of another origin is refused in either case,
since the browser of a user of this machine would carry its request.
"""

import hmac
from collections.abc import Collection
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.control.cluster.core_split import CoreSplit, parse_core_split
from diptych.control.compute_share import ComputeShare, cpu_ranges
from diptych.control.config import PresetName
from diptych.control.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    PermissionDeniedError,
    RequestError,
)
from diptych.control.router.topology import Role
from diptych.serving.api import error_responses as errors
from diptych.serving.api.bodies import read_checked
from diptych.serving.api.cross_origin import ADMIN_PREFIX, unknown_host
from diptych.serving.api.http_policy import is_loopback, is_own_name
from diptych.serving.api.middleware import given_key
from diptych.serving.api.other_scopes import HTTP, is_refused
from diptych.serving.fleet.worker_changes import WorkerChanges
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.keys.keyring import Keyring
from diptych.serving.served_fleet import ServedFleet

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")  # a proxy on this machine speaks for somebody else


class ChangeBody(BaseModel):
    """What is to change about a worker; what is left out stays. drain: true gives it nothing new and hands its streams
    to others, false uses it again. An engine behind a front is used again by itself when it was started again after
    true; "hold" keeps it out until false. (A worker of this server stays out in both cases.) cores: CPUs to compute on,
    such as 0-3, a thread on each; multiprocessors: how many of its GPU's. pin: whether the planner leaves the worker as
    it is (left out: true with a role or a shape). With ``cores`` it leaves the rule that divides the cores."""

    model_config = ConfigDict(extra="forbid")

    role: Role | None = None
    shape: PresetName | None = None
    drain: bool | Literal["hold"] | None = None
    cores: str | None = None
    multiprocessors: int | None = Field(default=None, ge=1)
    pin: bool | None = None


class AdminWorker(BaseModel):
    """A worker as operators see it. open_requests: attempts that it holds a part of. cores, threads: what it computes
    on (null: not on a processor). multiprocessors: of its GPU (null: no GPU, or one that cannot be divided).
    max_sequence_tokens: of prompt and answer together (null: it was never ready). is_pinned: the planner leaves it as
    it is."""

    worker: int
    role: Role
    state: Literal["starting", "ready", "draining", "lost", "stopped"]
    restarts: int
    open_requests: int
    cores: str | None
    threads: int | None
    multiprocessors: int | None
    is_pinned: bool
    max_sequence_tokens: int | None = None


class AdminWorkers(BaseModel):
    """All workers that there are or were. max_workers: how many there may be at once. core_split: the rule by which
    cores are divided when a role changes, or a worker comes or goes (null: they are not). is_core_split_pinned: the
    planner leaves it as it is."""

    workers: list[AdminWorker]
    max_workers: int
    core_split: str | None
    is_core_split_pinned: bool


class SplitBody(BaseModel):
    """split: the weights of the roles, such as prefill=3,decode=1. pin: whether the planner leaves the rule as it is
    (left out: true with a split)."""

    model_config = ConfigDict(extra="forbid")

    split: str | None = None
    pin: bool | None = None


class AdminAccess:
    """Lets through to ``/admin/`` requests with ``Authorization: Bearer KEY``, or without a key those that come from
    this machine's loopback address under one of its names or ``hosts``; and none that a page of another origin has
    made. A name that is made to resolve to 127.0.0.1 would make its page count as this server's own (DNS rebinding).
    key: of --admin-key. keys: those of a file may be admin keys; where there is a file, a key is asked for, whatever
    the file says by now."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str] = (), keys: Keyring | None = None) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._expected = None if key is None else key.encode("utf-8", "surrogateescape")
        self._keys = keys
        self._needs_key = asks_admin_key(key, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await is_refused(scope, send):
            return
        if scope["type"] == HTTP and scope["path"].startswith(ADMIN_PREFIX):
            headers = Headers(scope=scope)
            if self._needs_key:
                error = self._refused_key(scope, given_key(headers))
                if error is not None:
                    await errors.error_response(error)(scope, receive, send)
                    return
            elif not is_local(scope):
                denied = PermissionDeniedError("without --admin-key, /admin answers only programs on this machine")
                await errors.error_response(denied)(scope, receive, send)
                return
            elif not is_own_name(headers.get("host", ""), self._hosts):
                await errors.error_response(unknown_host(headers["host"]))(scope, receive, send)
                return
            if not _is_same_origin(headers):
                denied = PermissionDeniedError(f"/admin does not answer pages of {headers['origin']}")
                await errors.error_response(denied)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused_key(self, scope: Scope, given: bytes) -> RequestError | None:
        if self._expected is not None and hmac.compare_digest(given, self._expected):
            return None
        record = None if self._keys is None else self._keys.find(given)
        if record is None or record.is_option or self._keys is None or self._keys.is_expired(record):
            return AuthenticationError("the admin key is missing or wrong (Authorization: Bearer ...)")
        scope.setdefault("state", {}).update(key=record, tenant=record.tenant)
        return None if record.is_admin else PermissionDeniedError(f"the key {record.name!r} is no admin key")


def asks_admin_key(key: str | None, keys: Keyring | None) -> bool:
    """Whether /admin asks for a key, from wherever a request comes. See AdminAccess."""
    return key is not None or (keys is not None and keys.path is not None)


def is_operator(scope: Scope, hosts: Collection[str]) -> bool:
    """Whether /admin would answer a page of this server without a key. hosts: see AdminAccess."""
    return is_local(scope) and is_own_name(Headers(scope=scope).get("host", ""), {host.lower() for host in hosts})


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine's loopback address, and no proxy says that it hands it on."""
    headers = Headers(scope=scope)
    is_forwarded = any(name in headers for name in FORWARDED)
    return is_loopback(str((scope.get("client") or ("",))[0])) and not is_forwarded


def _is_same_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def add_admin_routes(app: FastAPI, llm: ServedFleet, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add ``/admin/workers``. documented: replies from 400 on."""
    changes = llm.fleet.changes
    refusals: dict[int | str, dict[str, Any]] = {status: documented[status] for status in (400, 401, 403, 404, 409)}

    @app.get("/admin/workers", responses={**refusals, 200: {"model": AdminWorkers}})
    async def workers() -> Response:
        """All workers."""
        return _reply(_workers(llm))

    @app.post("/admin/workers", status_code=201, responses={**refusals, 201: {"model": AdminWorker}})
    async def add() -> Response:
        """Start one more worker; the reply comes when it serves."""
        llm.require_ready()
        return _reply(_worker(llm, await changes.add()), 201)

    @app.post("/admin/workers/{worker:int}", responses={**refusals, 200: {"model": AdminWorker}})
    async def change(worker: int, request: Request) -> Response:
        """Change the role, the shape or the compute units of a worker, drain it, or use it again. The reply comes at
        once; what runs moves after it, and another share counts from the next step on."""
        llm.require_ready()
        _change(changes, worker, await read_checked(request, ChangeBody))
        return _reply(_worker(llm, worker))

    @app.post("/admin/core_split", responses={**refusals, 200: {"model": AdminWorkers}})
    async def divide(request: Request) -> Response:
        """Divide the cores among all workers by the weights of their roles, now and after each change of roles or
        workers."""
        llm.require_ready()
        _change_split(changes, await read_checked(request, SplitBody))
        return _reply(_workers(llm))

    @app.delete("/admin/workers/{worker:int}", responses={**refusals, 200: {"model": AdminWorker}})
    async def remove(worker: int) -> Response:
        """Drain a worker and stop it; the reply comes when it has stopped."""
        llm.require_ready()
        await changes.remove(worker)
        return _reply(_worker(llm, worker))


def _change(changes: WorkerChanges, worker: int, wanted: ChangeBody) -> None:
    """Raises before anything is changed where the body is at fault."""
    if wanted == ChangeBody():
        raise InvalidRequestError(
            "nothing is to change; give role, shape, cores, multiprocessors, drain or pin", param="role"
        )
    share = _wanted_share(changes, wanted)
    if share is not None:
        changes.check_share(worker, share)
    if wanted.role is not None:
        changes.change_role(worker, wanted.role)
    if wanted.shape is not None:
        changes.change_shape(worker, wanted.shape)
    if share is not None:
        changes.change_share(worker, share)
        changes.pin_split(True)
    if wanted.drain is False:
        changes.use_again(worker)
    elif wanted.drain is not None:
        changes.drain(worker, is_held=wanted.drain == "hold")
    is_pinned = wanted.pin
    if is_pinned is None and (wanted.role is not None or wanted.shape is not None):
        is_pinned = True
    if is_pinned is not None:
        changes.pin(worker, is_pinned)


def _wanted_share(changes: WorkerChanges, wanted: ChangeBody) -> ComputeShare | None:
    if wanted.cores is not None and wanted.multiprocessors is not None:
        raise InvalidRequestError("give cores or multiprocessors, not both", param="cores")
    if wanted.multiprocessors is not None:
        return ComputeShare(num_sms=wanted.multiprocessors)
    return None if wanted.cores is None else changes.cores.share_of(wanted.cores)


def _change_split(changes: WorkerChanges, wanted: SplitBody) -> None:
    if wanted == SplitBody():
        raise InvalidRequestError("nothing is to change; give split or pin", param="split")
    if wanted.split is not None:
        changes.change_split(_wanted_split(wanted.split))
    changes.pin_split(wanted.split is not None if wanted.pin is None else wanted.pin)


def _wanted_split(text: str) -> CoreSplit:
    try:
        return parse_core_split(text)
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="split") from None


def _workers(llm: ServedFleet) -> AdminWorkers:
    fleet = llm.fleet
    split, cores = fleet.changes.cores.split, fleet.changes.divided
    return AdminWorkers(
        workers=[_worker(llm, worker.number) for worker in fleet.workers],
        max_workers=len(fleet.fleet.slots),
        core_split=None if split is None else str(split),
        is_core_split_pinned=cores is not None and cores.is_pinned,
    )


def _worker(llm: ServedFleet, number: int) -> AdminWorker:
    fleet = llm.fleet
    port = fleet.workers[number]
    info = fleet.members.infos.get(number)
    share = info.share if info else ComputeShare()
    is_draining = port.state is WorkerState.READY and fleet.changes.is_draining(number)
    return AdminWorker(
        worker=number,
        role=fleet.role(number),
        state="draining" if is_draining else port.state.value,
        restarts=port.num_restarts,
        open_requests=fleet.core.attempts.count_of(number),
        cores=cpu_ranges(share.cpus) or None,
        threads=share.num_threads or None,
        multiprocessors=share.num_sms or None,
        max_sequence_tokens=info.max_sequence_tokens if info else None,
        is_pinned=number in fleet.changes.pinned,
    )


def _reply(content: BaseModel, status: int = 200) -> Response:
    return Response(content.model_dump_json(), status, media_type="application/json")
