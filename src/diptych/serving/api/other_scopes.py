"""Connections that are neither HTTP's nor the server's own life, such as WebSocket's: the layers that decide who may
ask what know nothing of them, and refuse them all, whatever routes there are or will be."""

from starlette.types import Scope, Send

HTTP, LIFESPAN = "http", "lifespan"
POLICY_VIOLATION = 1008  # the close code of RFC 6455; before the connection is accepted, servers make a 403 of it


async def is_refused(scope: Scope, send: Send) -> bool:
    """Whether a layer is to leave this connection alone, since it was refused here. Raises RuntimeError for a kind for
    which ASGI knows no refusal."""
    kind = scope["type"]
    if kind in (HTTP, LIFESPAN):
        return False
    if kind != "websocket":
        raise RuntimeError(f"connections of the kind {kind!r} are not served")
    await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "this server speaks HTTP alone"})
    return True
