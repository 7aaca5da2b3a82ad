"""Memory that is kept by the allocator goes back some time after much was freed."""

import asyncio
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from tests.serving.fake_llm import FakeLLM

from diptych.serving import freed_memory, sliced_json
from diptych.serving.api.app import build_app
from diptych.serving.api.middleware import BodyLimit
from diptych.serving.freed_memory import MUCH_BYTES, FreedMemory
from diptych.serving.long_work import LONG, VERY_LONG, LongWork

pytestmark = pytest.mark.anyio


class Allocator:
    """Counts how often it was asked; a call ends when it is let go."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def give_back(self) -> None:
        self.num_calls += 1
        self._loop.call_soon_threadsafe(self.asked.set)
        self.may_end.wait()

    async def was_asked(self) -> None:
        await self.asked.wait()
        self.asked.clear()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "WAIT_S", 0.0)


async def test_many_notes_are_one_call_and_none_is_forgotten() -> None:
    allocator = Allocator()
    with ThreadPoolExecutor(1) as threads:
        freed = FreedMemory(threads, allocator.give_back)
        freed.note(MUCH_BYTES - 1)  # little
        allocator.may_end.clear()
        for _ in range(10):
            freed.note(MUCH_BYTES)
        await allocator.was_asked()
        for _ in range(10):
            freed.note(MUCH_BYTES)  # this call may have missed it
        assert allocator.num_calls == 1
        allocator.may_end.set()
        await allocator.was_asked()
        assert allocator.num_calls == 2
        freed.close()


async def test_nothing_is_called_after_the_end() -> None:
    allocator = Allocator()
    with ThreadPoolExecutor(1) as threads:
        freed = FreedMemory(threads, allocator.give_back)
        freed.note(MUCH_BYTES)
        freed.close()
        freed.note(MUCH_BYTES)
    await asyncio.sleep(0)
    assert allocator.num_calls == 0


async def test_very_long_work_notes_its_input_when_its_caller_has_the_result() -> None:
    queue, noted = LongWork(), []
    queue.freed.note = noted.append  # type: ignore[method-assign]
    assert await queue.run(lambda: "done", VERY_LONG) == "done"
    assert noted == [VERY_LONG]
    queue.close()


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_body_is_noted_when_its_request_is_over(is_left: bool) -> None:
    parts = [b"x" * MUCH_BYTES, b"y"]
    noted: list[int] = []

    async def receive() -> dict[str, object]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": True}
        if is_left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def app(scope: object, receive: object, send: object) -> None:
        while (await receive()).get("more_body"):  # type: ignore[operator]
            assert not noted

    layer = BodyLimit(app, 10 * MUCH_BYTES, {}, noted.append)  # type: ignore[arg-type]
    await layer({"type": "http", "path": "/v1/completions", "headers": []}, receive, receive)  # type: ignore[arg-type]
    assert noted == [MUCH_BYTES + 1]


class Content(dict[str, Any]):
    """A body that says when it is freed."""


async def freed(*contents: "weakref.ref[Content]") -> None:
    """Wait for them: a thread lets go of its work a moment after it has told of the end."""
    while any(content() is not None for content in contents):
        await asyncio.sleep(0.01)


LONG_TEXT = "word " * 2000
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a field of another kind": ("/v1/completions", {"prompt": LONG_TEXT, "max_tokens": "x"}),
    "a chat beyond the context": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT * 9}]}),
    "a model that is not here": ("/v1/completions", {"prompt": LONG_TEXT, "model": "other"}),
    "a wrong message": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": 5}, LONG_TEXT]}),
    "a wrong item": ("/v1/responses", {"input": [{"type": "none", "text": LONG_TEXT}]}),
    "a wrong input": ("/v1/embeddings", {"input": [LONG_TEXT, 5]}),
    "a text that is none": ("/tokenize", {"prompt": [LONG_TEXT]}),
    "counted beyond the context": ("/v1/messages/count_tokens", {"messages": [{"role": "user"}, LONG_TEXT]}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_body_is_freed_without_a_search_for_garbage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = REFUSED[name]
    kept: list[weakref.ref[Content]] = []

    def decode(data: bytes, *limits: int) -> Content:
        content = Content(json.loads(data))
        kept.append(weakref.ref(content))
        return content

    monkeypatch.setattr(sliced_json, "decode", decode)
    app = build_app(FakeLLM(), "fake")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    data = json.dumps(body).encode()
    assert len(data) > LONG
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        gc.collect()
        gc.disable()
        try:
            reply = await client.post(path, content=data)
            assert 400 <= reply.status_code < 500
            assert kept
            await freed(*kept)
        finally:
            gc.enable()


async def test_work_that_fails_is_freed_without_a_search_for_garbage() -> None:
    queue, content = LongWork(), Content()
    kept = weakref.ref(content)

    def work(content: Content) -> None:
        raise ValueError("no")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            await queue.run(partial(work, content), LONG)
        del content
        await freed(kept)
    finally:
        gc.enable()
    queue.close()
