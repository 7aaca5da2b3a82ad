"""HEAD: what GET would answer, without its body. Clients and monitors ask so whether a server is there."""

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Serves HEAD by the route of GET. Whatever the route would send behind its head ends there, a stream, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_head = False

        async def until_head() -> Message:
            return {"type": "http.disconnect"} if has_head else await receive()

        async def only_head(message: Message) -> None:
            nonlocal has_head
            if message["type"] == "http.response.start":
                has_head = True
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif message.get("more_body"):
                raise _HeadSentError

        with contextlib.suppress(_HeadSentError):  # our own sign that the head is sent
            await self._app({**scope, "method": "GET"}, until_head, only_head)


class _HeadSentError(Exception):
    """Ends a stream whose head was all that was asked for."""
