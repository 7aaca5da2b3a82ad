"""Calls of openai-python."""

from typing import Any, Literal

from calls import ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, call, expect, expect_abort, expect_choice, run
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}


class Choice(BaseModel, extra="forbid"):
    """A choice of a colour and a number."""

    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


TOOL: Any = {"type": "function", "function": {"name": "choose", "parameters": Choice.model_json_schema()}}
FORCED: Any = {"type": "function", "function": {"name": "choose"}}


@call("models")
def models() -> None:
    expect(MODEL in [model.id for model in client.models.list()], "the model is not listed")
    expect(client.models.retrieve(MODEL).id == MODEL, "another model")


@call("chat")
def chat() -> None:
    developer = [{"role": "developer", "content": "Be brief."}, *ASKED["messages"]]
    more: Any = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": 1}
    reply = client.chat.completions.create(**{**ASKED, "messages": developer, **more})
    expect(reply.choices[0].message.content and reply.choices[0].finish_reason == "length", reply)
    expect(reply.usage and reply.usage.completion_tokens == 12, reply.usage)


@call("stream")
def stream() -> None:
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(**ASKED).choices[0].message.content
    expect(text == whole, f"{text!r} as a stream, else {whole!r}")
    expect(chunks[-1].usage and chunks[-1].usage.completion_tokens == 12, chunks[-1])
    with client.chat.completions.stream(**{**ASKED, "max_tokens": 60}, response_format=Choice) as events:
        expect_choice(events.get_final_completion().choices[0].message.parsed)


@call("completions")
def completions() -> None:
    reply = client.completions.create(model=MODEL, prompt=["import os\n", "def f(x):\n"], max_tokens=8, temperature=0)
    expect([bool(choice.text) for choice in reply.choices] == [True, True], reply)
    parts = client.completions.create(model=MODEL, prompt="import os\n", max_tokens=8, temperature=0, stream=True)
    text = "".join(part.choices[0].text for part in parts if part.choices)
    expect(text == reply.choices[0].text, f"{text!r} as a stream, else {reply.choices[0].text!r}")


@call("n")
def several() -> None:
    reply = client.chat.completions.create(**{**ASKED, "temperature": 1}, n=3)
    expect([choice.index for choice in reply.choices] == [0, 1, 2], reply)


@call("logprobs")
def logprobs() -> None:
    found = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3).choices[0].logprobs
    expect(found and found.content and len(found.content) == 12, found)
    expect(found and found.content and len(found.content[0].top_logprobs) == 3, found)


@call("tools")
def tools() -> None:
    asked: Any = {**ASKED, "max_tokens": 100, "tools": [TOOL], "parallel_tool_calls": False}
    reply = client.chat.completions.create(**asked, tool_choice=FORCED).choices[0].message
    [made] = reply.tool_calls or ()
    expect_choice(Choice.model_validate_json(made.function.arguments))  # type: ignore[union-attr]
    with client.chat.completions.stream(**asked, tool_choice="required") as events:
        [streamed] = events.get_final_completion().choices[0].message.tool_calls or ()
    expect_choice(Choice.model_validate_json(streamed.function.arguments))
    result = {"role": "tool", "tool_call_id": made.id, "content": "done"}
    messages = [*ASKED["messages"], reply.model_dump(exclude_none=True), result]
    end = client.chat.completions.create(**{**asked, "messages": messages, "max_tokens": 8}).choices[0]
    expect(end.message.content, end)


@call("structured")
def structured() -> None:
    asked: Any = {**ASKED, "max_tokens": 60}
    expect_choice(client.chat.completions.parse(**asked, response_format=Choice).choices[0].message.parsed)
    found = client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0].message.content
    expect(found and found.startswith("{"), found)


@call("responses")
def responses() -> None:
    reply = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=12, temperature=0)
    expect(reply.output_text, reply)
    expect(client.responses.retrieve(reply.id).id == reply.id, "it is not stored")
    more: Any = {"previous_response_id": reply.id, "max_output_tokens": 8, "temperature": 0}
    events: Any = list(client.responses.create(model=MODEL, input="And of three?", stream=True, **more))
    kinds = [event.type for event in events]
    expect(kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds)
    expect(events[-1].response.output_text, events[-1])
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Choice, max_output_tokens=60)
    expect_choice(parsed.output_parsed)
    client.responses.delete(reply.id)


@call("embeddings")
def embeddings() -> None:
    found = client.embeddings.create(model=MODEL, input=["one", "two"]).data
    expect(len(found) == 2 and len(found[0].embedding) == len(found[1].embedding) > 1, found)
    asked = client.embeddings.create(model=MODEL, input="one", encoding_format="float").data[0].embedding
    expect(max(abs(a - b) for a, b in zip(asked, found[0].embedding, strict=True)) < 1e-3, "base64 differs from float")


@call("abort")
def abort() -> None:
    endless: Any = {**ASKED, "max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
    open_stream = client.chat.completions.create(**endless, stream=True)
    next(iter(open_stream))
    expect_abort(open_stream.close)


@call("request id")
def request_id() -> None:
    expect(client.chat.completions.create(**ASKED)._request_id, "no id")
    given = client.chat.completions.create(**ASKED, extra_headers={"X-Request-Id": "mine-1"})
    expect(given._request_id == "mine-1", given._request_id)


@call("too long")
def too_long() -> None:
    try:
        client.chat.completions.create(**{**ASKED, "messages": [{"role": "user", "content": TOO_LONG}]})
    except BadRequestError as error:
        expect(error.code == "context_length_exceeded", error)
        expect("maximum context length" in str(error), error)
    else:
        raise AssertionError("it was answered")


run()
