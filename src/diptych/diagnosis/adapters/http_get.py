"""Reading from a server over HTTP: a GET with a limit of time and size, and errors in words.

A server on this machine is called directly, whatever proxy the environment names (HTTP_PROXY): the proxy would look for
it on a machine of its own.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from diptych.control.errors import ConfigError

MAX_BYTES, PART_BYTES = 64 * 2**20, 2**16
LONGEST = 4  # times the time without a byte: for a whole reply
LOOPBACK = ("localhost", "127.", "::1")


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an error: the key is for the server that was named, and not for another."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: its status is the reply."""


def open_url(request: Request, timeout_s: float, *, follows: bool = True) -> Any:
    """The reply to a request. follows: redirects, too. Raises what urllib raises."""
    direct = (ProxyHandler({}),) if (urlsplit(request.full_url).hostname or "").startswith(LOOPBACK) else ()
    return build_opener(*direct, *(() if follows else (_NoRedirects,))).open(request, timeout=timeout_s)


@dataclass(frozen=True, slots=True)
class Site:
    """A server. url: its root, without a slash at the end. key: sent as Authorization: Bearer."""

    url: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 4.0

    @classmethod
    def of(cls, text: str, key: str | None = None) -> "Site":
        """The server that ``text`` names; a path such as /metrics or /v1 at its end is cut off. Raises ConfigError."""
        url = (text if "://" in text else f"http://{text}").rstrip("/")
        for ending in ("/metrics", "/v1"):
            url = url.removesuffix(ending)
        parts = urlsplit(url)
        try:
            is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(f"url is {text!r}; expected one such as http://localhost:8000", param="url")
        return cls(url, key)

    @property
    def local_port(self) -> int | None:
        """The port, when the server is on this machine."""
        parts = urlsplit(self.url)
        is_local = (parts.hostname or "").startswith(LOOPBACK)
        return (parts.port or {"http": 80, "https": 443}[parts.scheme]) if is_local else None

    def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """The body. Raises ConfigError for any reply but 200, and when there is none."""
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with open_url(Request(url, headers=headers), self.timeout_s, follows=False) as reply:
                return _read(reply, time.monotonic() + LONGEST * self.timeout_s)
        except HTTPError as error:
            error.close()  # it is a reply, too
            hint = "; give its key with --api-key" if error.code == 401 else ""
            raise ConfigError(f"{url} answered {error.code}{hint}", param="url") from None
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"cannot reach {url}: {reason}", param="url") from None

    def text(self, path: str) -> str:
        """The same as text. Raises ConfigError, also for what is no UTF-8."""
        try:
            return self.get(path).decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.url}{path} is no text", param="url") from None

    def find(self, path: str, query: Mapping[str, str] | None = None) -> bytes | None:
        """The same; None where ``get`` raises."""
        try:
            return self.get(path, query)
        except ConfigError:
            return None

    def find_json(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """What the body says; None without a reply, or when it is not JSON."""
        body = self.find(path, query)
        try:
            return None if body is None else json.loads(body)
        except ValueError:
            return None


def _read(reply: HTTPResponse, end_s: float) -> bytes:
    """The whole body. Raises OSError when it is too long, or not there at that time of the monotonic clock."""
    parts, size = [], 0
    while part := reply.read1(PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise OSError(f"the reply is longer than {MAX_BYTES // 2**20} MiB")
        if time.monotonic() > end_s:
            raise TimeoutError("the reply takes too long")
    return b"".join(parts)
