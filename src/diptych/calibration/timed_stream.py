"""One streamed completion as its client sees it: when it was sent, when the first token came, what its usage says."""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_S = 600.0


@dataclass(slots=True)
class TimedAnswer:
    """Times in nanoseconds; first_ns 0: no token came."""

    sent_ns: int = 0
    first_ns: int = 0
    usage: dict[str, Any] = field(default_factory=dict)


async def timed_stream(
    address: tuple[str, int],
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] = {},
    tls: ssl.SSLContext | None = None,
    on_first: Callable[[], None] | None = None,
) -> TimedAnswer:
    """POST /v1/completions, read to its end. body: asks for a stream that ends with usage. Raises OSError, also when it
    takes longer than LONGEST_S."""
    host, port = address
    answer, payload = TimedAnswer(), json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n{more}"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22, ssl=tls)
    try:
        async with asyncio.timeout(LONGEST_S):
            answer.sent_ns = time.monotonic_ns()
            writer.write(head + payload)
            async for line in reader:
                if line.startswith((b"data: [DONE]", b'data: {"error"')):  # without usage it is no answer
                    break
                if not line.startswith(b"data: {"):
                    continue
                if not answer.first_ns:
                    answer.first_ns = time.monotonic_ns()
                    if on_first:
                        on_first()
                if b'"usage":{' in line or b'"usage": {' in line:
                    answer.usage = json.loads(line[6:])["usage"]
    finally:
        writer.close()
    return answer
