"""Requests to routes without workers behind them, as JSON: for what the clients of a dialect would not let through."""

import json
from typing import Any

import httpx
from fake_llm import FakeLLM

from diptych.serving.api.app import build_app


async def ask(llm: FakeLLM, path: str, body: Any, *, key: str = "none", **options: Any) -> httpx.Response:
    """The reply of a server that is made for this llm, or with options (of build_app) for this call."""
    app = None if options else llm.app
    if app is None:
        app = llm.app = build_app(llm, "fake", **options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def last_prompt(llm: FakeLLM) -> str:
    """The text of the last prompt."""
    return llm.tokenizer.decode(llm.submitted[-1].prompts[0], skip_special_tokens=False)


def call_of(name: str, arguments: Any) -> str:
    """A call as the tool model writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
