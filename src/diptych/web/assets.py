"""The static files of the pages, as routes of a Starlette application.

Owns the files under ``static/`` (and the palette, which reports share), read and compressed once, and the headers that
browsers get with them: content types, ETags and a content security policy under which nothing comes from another host
and no script stands in a page.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from diptych.report.pages import PALETTE

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
SECURITY = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent. packed: gzip of ``body``, the same bytes at every start."""

    body: bytes
    packed: bytes
    media_type: str
    etag: str


def asset(name: str) -> Asset | None:
    """The file of this path under ``static/``; None when there is none (nothing outside of it is ever read)."""
    parts = PurePosixPath(name).parts
    path = PALETTE if name == "common/palette.css" else STATIC.joinpath(*parts)
    if not parts or name.startswith("/") or ".." in parts or path.suffix not in MEDIA_TYPES:
        return None
    try:
        return _read(path, path.stat().st_mtime_ns) if path.is_file() else None
    except OSError:  # a name that is too long for the file system
        return None


@cache
def _read(path: Path, version: int) -> Asset:
    return packed(path.read_bytes(), MEDIA_TYPES[path.suffix])


def packed(body: bytes, media_type: str) -> Asset:
    """An asset to send again and again."""
    tag = hashlib.blake2b(body, digest_size=12).hexdigest()
    return Asset(body, gzip.compress(body, 9, mtime=0), media_type, f'"{tag}"')


def respond(request: Request, name: str) -> Response:
    """The file as a reply: 304 when the browser has this version; compressed if it may be. Raises HTTPException (404)
    when there is none, which the application answers in its own format."""
    found = asset(name)
    if found is None:
        raise HTTPException(404)
    return send(request, found)


def send(request: Request, found: Asset) -> Response:
    """The same for something that was made elsewhere."""
    headers = SECURITY | {"etag": found.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.packed, headers=headers | {"content-encoding": "gzip"}, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)


def static_routes() -> list[Route]:
    """``/static/...``: every file there is."""

    async def static(request: Request) -> Response:
        return respond(request, request.path_params["name"])

    return [Route("/static/{name:path}", static, methods=["GET"], include_in_schema=False)]


def without_slash(path: str) -> Route:
    """A route from ``path/``, which people type, to the page at ``path``. The way there is relative: a proxy may serve
    all of this below an address of its own."""

    async def answer(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"../{path.rpartition('/')[2]}{query}", 308)

    return Route(f"{path}/", answer, methods=["GET"], include_in_schema=False)


def page_route(path: str, name: str) -> Route:
    """A route for one page: the file ``name`` under ``static/``."""

    async def page(request: Request) -> Response:
        return respond(request, name)

    return Route(path, page, methods=["GET"], include_in_schema=False)
