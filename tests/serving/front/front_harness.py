"""A front over fake engines, all in this process, and a client for it over ASGI."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fake_engine import FakeEngine

from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.serving.api.front_app import build_front_app
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions
from diptych.serving.front.external_fleet import ExternalFleet
from diptych.serving.front.served_engines import EngineFront

QUICK = {"probe_s": 0.05, "silence_s": 0.3, "block_size": 16, "bytes_per_token": 1.0}


@dataclass
class Answer:
    """What a client got. error: of a refusal or of the stream."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    headers: httpx.Headers | None = None
    events: list[Any] | None = None
    is_done: bool = False


class FrontClient:
    """Sends requests to a front."""

    def __init__(self, front: EngineFront, http: httpx.AsyncClient, engines: Sequence[FakeEngine]) -> None:
        self.front = front
        self.http = http
        self.engines = engines

    async def complete(self, prompt: Any, max_tokens: int = 8, *, stream: bool = True, **more: Any) -> Answer:
        """POST /v1/completions."""
        body = {"model": "fake-model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        return await self.post("/v1/completions", {**body, **more})

    async def chat(self, content: str, max_tokens: int = 8, *, stream: bool = True, **more: Any) -> Answer:
        """POST /v1/chat/completions."""
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        return await self.post("/v1/chat/completions", {**body, **more})

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """Any request, read to its end."""
        reply = await self.http.post(path, json=body, headers=headers)
        if "text/event-stream" in reply.headers["content-type"]:
            return read_stream(reply)
        content = reply.json()
        answer = Answer(reply.status_code, headers=reply.headers, error=content.get("error"))
        if choices := content.get("choices"):
            answer.text = choices[0]["text"] if "text" in choices[0] else choices[0]["message"]["content"]
            answer.finish_reason, answer.usage = choices[0]["finish_reason"], content.get("usage")
        answer.events = [content]
        return answer

    async def until_up(self, count: int) -> None:
        """Wait until the front knows ``count`` engines that serve."""
        async with asyncio.timeout(10):
            while len(self.front.fleet.core.members.up) < count:
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Until nothing is left of any request, here and at the workers."""
        async with asyncio.timeout(10):
            while self.front.num_open or any(engine.exchanges for engine in self.front.external.engines):
                await asyncio.sleep(0.01)
        self.front.fleet.core.check_idle()


def read_stream(reply: httpx.Response) -> Answer:
    """The answer of a whole stream."""
    answer = Answer(reply.status_code, headers=reply.headers, events=[])
    assert answer.events is not None
    for line in reply.text.split("\n\n"):
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            answer.is_done = True
            continue
        event = json.loads(line[6:])
        answer.events.append(event)
        answer.error = event.get("error") or answer.error
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return answer


@asynccontextmanager
async def fronted(
    *engines: FakeEngine,
    cluster: ClusterConfig | None = None,
    app: dict[str, Any] | None = None,
    record: Path | None = None,
    **options: Any,
) -> AsyncIterator[FrontClient]:
    """A front that is ready. engines: are started here, and stopped."""
    for engine in engines:
        await engine.start()
    specs = options.pop("specs", None) or [EngineSpec(engine.kind, engine.url) for engine in engines]  # type: ignore[arg-type]
    fleet = ExternalFleet(
        FrontOptions(tuple(specs), **{**QUICK, **options}), cluster or cluster_config(), record=record
    )
    front = EngineFront(fleet)
    try:
        await front.start(wait=False)
        if all(engine.is_ready for engine in engines):
            async with asyncio.timeout(10):
                while len(fleet.core.members.up) < len(engines):
                    await asyncio.sleep(0.005)
                await fleet.first_starts()
        transport = httpx.ASGITransport(build_front_app(front, **(app or {})), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=30) as http:
            yield FrontClient(front, http, engines)
    finally:
        await front.shutdown()
        for engine in engines:
            await engine.stop()
