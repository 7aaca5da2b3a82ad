"""A small streaming client for OpenAI-compatible completion servers: raw sockets, time stamps, nothing else."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse


@dataclass
class Stream:
    """One streamed completion: when it was sent and when each token event arrived (seconds, monotonic)."""

    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps[0] - self.sent

    def gaps(self) -> list[tuple[float, float]]:
        """(start, end) between neighbouring tokens."""
        return list(zip(self.stamps, self.stamps[1:], strict=False))


async def run_stream(url: str, body: dict[str, Any], stream: Stream) -> None:
    """POST ``body`` with stream=true to /v1/completions and record the token events until the answer ends."""
    target = urlparse(url)
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(target.hostname, target.port, limit=1 << 22)
        stream.sent = time.perf_counter()
        writer.write(head + payload)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            stream.error = (status + await reader.read(2000)).decode(errors="replace")
            return
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter()
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if event.get("error"):
                stream.error = str(event["error"])
                break
            stream.usage = event.get("usage") or stream.usage
            choices = event.get("choices")
            if choices and (choices[0].get("text") or choices[0].get("token_ids")):
                stream.stamps.append(now)
                stream.first.set()
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        stream.error = repr(error)
    finally:
        if writer:
            writer.close()
        stream.first.set()


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between closest ranks; ``share`` in 0 .. 100."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    position = (len(ordered) - 1) * share / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
