"""``/cache/misses``: why prompts were not found in a cache, for operators; under ``/admin`` with the texts that differ.

Texts are prompts of clients, so they are only given to those who may administer the server.
"""

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from diptych.control.errors import InvalidRequestError, NotFoundError
from diptych.serving import edge_limits
from diptych.serving.api.bodies import tenant_in
from diptych.serving.api.miss_views import MissesReply, misses_reply, tenants_reply
from diptych.serving.fleet.fleet import Fleet

DEFAULT_RECENT = 32

Limit = Annotated[str | None, Query(description=f"So many of the latest misses: 0 to {edge_limits.SHOWN_MISSES}")]


def add_miss_routes(
    app: FastAPI, fleet: Fleet, documented: dict[int | str, dict[str, Any]], *, has_tenants: bool
) -> None:
    """Add both routes. documented: replies from 400 on. has_tenants: whether there are several API keys."""
    refusals: dict[int | str, dict[str, Any]] = {status: documented[status] for status in (400, 401, 403, 404)}

    def reply(limit: str | None, *, with_text: bool, tenant: str = "") -> Response:
        if fleet.misses is None:
            raise NotFoundError("prefix misses are not explained; start the server with --explain-misses on")
        if has_tenants and not with_text:
            content = tenants_reply(fleet.misses, _number(limit), tenant)
        else:
            content = misses_reply(fleet.misses, _number(limit), with_text=with_text)
        return Response(content.model_dump_json(), media_type="application/json")

    @app.get("/cache/misses", responses={**refusals, 200: {"model": MissesReply}})
    async def misses(request: Request, limit: Limit = None) -> Response:
        """Why prompts were computed that a cache could have held, since the start, and the latest of them; on a server
        with several API keys only the latest of the own key."""
        return reply(limit, with_text=False, tenant=tenant_in(request))

    @app.get("/admin/cache/misses", responses={**refusals, 200: {"model": MissesReply}})
    async def misses_with_texts(limit: Limit = None) -> Response:
        """The same with the texts that differ, where the server keeps texts."""
        return reply(limit, with_text=True)


def _number(limit: str | None) -> int:
    if limit is None:
        return DEFAULT_RECENT
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and int(limit) <= edge_limits.SHOWN_MISSES):
        raise InvalidRequestError(
            f"limit is {limit[:40]!r}; it must be in [0, {edge_limits.SHOWN_MISSES}]", param="limit"
        )
    return int(limit)
