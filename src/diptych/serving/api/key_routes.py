"""What operators and Prometheus see of the keys: ``/admin/keys``, and the part of ``/metrics`` that is about names.

Shows names, limits and counts; never a key, nor the hash of one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from diptych.control.admission.quota import Allowance
from diptych.control.slo import NS_PER_S
from diptych.serving.api.bodies import key_in
from diptych.serving.api.key_limits import KeyLimits
from diptych.serving.keys.key_record import KeyRecord
from diptych.serving.keys.keyring import Keyring


class AllowanceReply(BaseModel):
    """What is left of a limit. reset_s: until all of it is there again, if nothing more is used."""

    limit: int
    remaining: int
    reset_s: float


class UsageReply(BaseModel):
    """Since the start of the server. Tokens: of requests that ended. refused: requests by the limit that did."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    refused: dict[str, int]
    last_request: str | None


class KeyReply(BaseModel):
    """One name. models: null: any. limits: those that are set. usage: null: it has made no request yet, or there are
    too many names to count each. open_requests: of clients, without lines of batches."""

    name: str
    tenant: str
    admin: bool
    metrics: bool
    expires: str | None
    is_expired: bool
    models: list[str] | None
    limits: dict[str, int]
    open_requests: int
    requests: AllowanceReply | None
    tokens: AllowanceReply | None
    usage: UsageReply | None


class KeysReply(BaseModel):
    """The reply of /admin/keys. file: null: keys are given by --api-key alone. complaint: why the file, as it is now,
    is not used, and the one before it still is (null: it is used). unknown_key_requests: with a wrong key, or none."""

    file: str | None
    loaded: str | None
    complaint: str | None
    unknown_key_requests: int
    keys: list[KeyReply]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families are made on demand."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield from self._families


def serve_keys(
    app: FastAPI,
    keys: Keyring | None,
    paths: Collection[str],
    default_model: Callable[[], str],
    documented: dict[int | str, dict[str, Any]],
) -> None:
    """Hold the names of ``keys`` to their limits at ``paths``, and add ``/admin/keys``. Call it before the lines of
    batches are served, which count, too. Sets ``app.state.keys``, which the server starts and stops. default_model: of
    requests that name none. documented: replies from 400 on."""
    app.state.keys, app.state.default_model = keys, default_model
    if keys is not None:
        app.add_middleware(KeyLimits, keys=keys, paths=paths)
    refusals: dict[int | str, dict[str, Any]] = {status: documented[status] for status in (401, 403)}

    @app.get("/admin/keys", responses={**refusals, 200: {"model": KeysReply}})
    async def usage() -> Response:
        """Every name that may use the server: its limits, what is left of them, and what it used."""
        return Response(_view(keys or Keyring()).model_dump_json(), media_type="application/json")


def key_metrics(request: Request, model: str) -> bytes:
    """The families of /metrics about names: all of them for keys that may see them, else those of the caller's own."""
    keys: Keyring | None = request.app.state.keys
    if keys is None:
        return b""
    key = key_in(request)
    only = None if key is None or key.sees_all else key.name
    registry = CollectorRegistry()
    registry.register(_Families(keys.families(model, only)))
    return generate_latest(registry)


def _view(keys: Keyring) -> KeysReply:
    return KeysReply(
        file=None if keys.path is None else str(keys.path),
        loaded=None if keys.path is None else _time(keys.loaded_s),
        complaint=keys.complaint or None,
        unknown_key_requests=keys.usage.num_unknown,
        keys=[_key(keys, record) for record in keys.records()],
    )


def _key(keys: Keyring, record: KeyRecord) -> KeyReply:
    quota, now, usage = keys.quota(record), keys.now_ns(), keys.usage.known(record.name)
    return KeyReply(
        name=record.name,
        tenant=record.tenant,
        admin=record.is_admin,
        metrics=record.sees_all,
        expires=None if record.expires_s is None else _time(record.expires_s),
        is_expired=keys.is_expired(record),
        models=None if record.models is None else list(record.models),
        limits={name: value for name, value in asdict(record.limits).items() if value is not None},
        open_requests=quota.num_open,
        requests=_allowance(quota.requests(now)),
        tokens=_allowance(quota.tokens(now)),
        usage=None
        if usage is None
        else UsageReply(
            requests=usage.requests,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            refused=dict(sorted(usage.refused.items())),
            last_request=_time(usage.used_s) if usage.used_s else None,
        ),
    )


def _allowance(found: Allowance | None) -> AllowanceReply | None:
    if found is None:
        return None
    return AllowanceReply(limit=found.limit, remaining=found.remaining, reset_s=found.reset_ns / NS_PER_S)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
