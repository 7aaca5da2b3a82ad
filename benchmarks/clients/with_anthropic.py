"""Calls of anthropic-python, to /v1/messages."""

from typing import Any, Literal

from anthropic import Anthropic, BadRequestError
from calls import ENDLESS, KEY, MODEL, QUESTION, ROOT, TOO_LONG, call, expect, expect_abort, expect_choice, run
from pydantic import BaseModel, Field

client = Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0}}


class Choice(BaseModel, extra="forbid"):
    """A choice of a colour and a number."""

    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


TOOL: Any = {"name": "choose", "input_schema": Choice.model_json_schema()}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3000}
PROPERTIES = {"type": "object", "properties": {"digits": DIGITS}, "required": ["digits"], "additionalProperties": False}
LONG: Any = {"type": "json_schema", "schema": PROPERTIES}  # an answer that does not end by itself


@call("chat")
def chat() -> None:
    reply = client.messages.create(**ASKED, system="Be brief.", metadata={"user_id": "me"})
    expect(reply.content[0].type == "text" and reply.content[0].text, reply)
    expect(reply.stop_reason == "max_tokens" and reply.usage.output_tokens == 12, reply)
    expect(client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 3, "no tokens counted")


@call("stream")
def stream() -> None:
    with client.messages.stream(**ASKED) as events:
        text = "".join(events.text_stream)
        end = events.get_final_message()
    expect(text and end.usage.output_tokens == 12 and end.usage.input_tokens > 3, end)


@call("tools")
def tools() -> None:
    asked: Any = {**ASKED, "max_tokens": 100, "tools": [TOOL]}
    reply = client.messages.create(**asked, tool_choice={"type": "tool", "name": "choose"})
    [made] = [block for block in reply.content if block.type == "tool_use"]
    expect_choice(made.input)
    with client.messages.stream(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as events:
        [streamed] = [block for block in events.get_final_message().content if block.type == "tool_use"]
    expect_choice(streamed.input)
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "done"}
    turns = [*MESSAGES, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    end = client.messages.create(**{**asked, "messages": turns, "max_tokens": 8})
    expect(end.usage.output_tokens, end)


@call("structured")
def structured() -> None:
    expect_choice(client.messages.parse(**{**ASKED, "max_tokens": 60}, output_format=Choice).parsed_output)


@call("abort")
def abort() -> None:
    endless: Any = {**ASKED, "max_tokens": ENDLESS, "output_config": {"format": LONG}}
    with client.messages.stream(**endless) as events:
        next(iter(events.text_stream))
        expect_abort(events.close)


@call("request id")
def request_id() -> None:
    expect(client.messages.create(**ASKED)._request_id, "no id")


@call("too long")
def too_long() -> None:
    try:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": TOO_LONG}]})
    except BadRequestError as error:
        body: Any = error.body
        expect(body["error"]["type"] == "invalid_request_error" and "too long" in body["error"]["message"], error)
    else:
        raise AssertionError("it was answered")


run()
