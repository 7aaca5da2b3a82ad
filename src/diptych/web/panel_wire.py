"""What the process that serves pages and the process that computes them say to each other, over pipes.

Owns the messages and their frames: four bytes of length, then MessagePack. Must never import what computes: the serving
process reads this file too.
"""

from typing import IO, Literal, TypeVar

import msgspec

LENGTH_BYTES = 4

Message = TypeVar("Message", bound=msgspec.Struct)


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``page``: a page's HTML (``name``: its template and chapter). ``panel``: a panel's JSON. ``begin``: the first
    event of a panel that answers in events; ``next``: the one after it; ``drop``: nobody wants more of them. packs:
    the asker can read gzip."""

    kind: Literal["page", "panel", "begin", "next", "drop"]
    name: str = ""
    query: dict[str, str] = {}
    stream: int = 0
    packs: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """status: of HTTP. body: HTML or JSON, gzip of it if ``is_packed``; of ``next``, empty when there are no more
    events."""

    status: int = 200
    body: bytes = b""
    stream: int = 0
    is_packed: bool = False


def send(pipe: IO[bytes], message: Call | Reply) -> None:
    """Write one message. Raises BrokenPipeError when nobody reads."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    pipe.flush()


def receive(pipe: IO[bytes], kind: type[Message]) -> Message:
    """Read one message. Raises EOFError when the other side is gone."""
    length = _exactly(pipe, LENGTH_BYTES)
    return msgspec.msgpack.decode(_exactly(pipe, int.from_bytes(length, "big")), type=kind)


def _exactly(pipe: IO[bytes], num_bytes: int) -> bytes:
    data = pipe.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError("the other process is gone")
    return data
