"""Calls of litellm."""

from typing import Any, Literal

import litellm
from calls import ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, call, expect, expect_abort, expect_choice, run
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
AT: Any = {"api_base": URL, "api_key": KEY, "num_retries": 0}


class Choice(BaseModel, extra="forbid"):
    """A choice of a colour and a number."""

    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


TOOL: Any = {"type": "function", "function": {"name": "choose", "parameters": Choice.model_json_schema()}}


def ask(provider: str = "openai", **more: Any) -> Any:
    """A completion of a chat."""
    return litellm.completion(model=f"{provider}/{MODEL}", **AT, **{**ASKED, **more})


@call("chat")
def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        reply = ask(provider)
        expect(reply.choices[0].message.content and reply.usage.completion_tokens == 12, reply)


@call("stream")
def stream() -> None:
    parts = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    expect(text == ask().choices[0].message.content, text)
    expect(any(getattr(part, "usage", None) for part in parts), "no usage")


@call("completions")
def completions() -> None:
    model = f"text-completion-openai/{MODEL}"
    expect(litellm.text_completion(model=model, prompt="import os\n", max_tokens=8, **AT).choices[0].text, "no text")


@call("n")
def several() -> None:
    expect(len(ask(n=2, temperature=1).choices) == 2, "another number of answers")


@call("logprobs")
def logprobs() -> None:
    expect(len(ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content) == 12, "no log probabilities")


@call("tools")
def tools() -> None:
    forced = {"type": "function", "function": {"name": "choose"}}
    [made] = ask(tools=[TOOL], tool_choice=forced, max_tokens=100).choices[0].message.tool_calls
    expect_choice(Choice.model_validate_json(made.function.arguments))


@call("structured")
def structured() -> None:
    reply = ask(response_format=Choice, max_tokens=60)
    expect_choice(Choice.model_validate_json(reply.choices[0].message.content))


@call("responses")
def responses() -> None:
    reply = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=12, **AT)
    expect(reply.output[0].content[0].text, reply)


@call("embeddings")
def embeddings() -> None:
    found = litellm.embedding(model=f"openai/{MODEL}", input=["one", "two"], **AT).data
    expect(len(found) == 2 and len(found[0]["embedding"]) > 1, found)


@call("abort")
def abort() -> None:
    parts: Any = ask(stream=True, max_tokens=ENDLESS, extra_body={"ignore_eos": True})
    next(parts)
    expect_abort(parts.completion_stream.response.close)


@call("request id")
def request_id() -> None:
    headers = ask()._response_headers or {}
    expect(headers.get("x-request-id"), dict(headers))


@call("too long")
def too_long() -> None:
    for provider in ("openai", "hosted_vllm"):
        try:
            ask(provider, messages=[{"role": "user", "content": TOO_LONG}])
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{provider}: it was answered")


run()
