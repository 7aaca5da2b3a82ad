"""Calls of langchain-openai."""

from typing import Any, Literal

from calls import ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, call, expect, expect_abort, expect_choice, run
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


def chat_model(max_tokens: int = 12, **more: Any) -> ChatOpenAI:
    """The chat model of the server."""
    fields: Any = {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(**fields, max_tokens=max_tokens, **more)


class Choice(BaseModel, extra="forbid"):
    """A choice of a colour and a number."""

    colour: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


@tool(args_schema=Choice)
def choose(colour: str, count: int) -> str:
    """Choose a colour and a number."""
    return f"{count} {colour}"


@call("chat")
def chat() -> None:
    reply = chat_model().invoke(QUESTION)
    expect(reply.content and reply.usage_metadata and reply.usage_metadata["output_tokens"] == 12, reply)
    expect(len(chat_model().batch([QUESTION, "Hello"])) == 2, "no batch")


@call("stream")
def stream() -> None:
    parts = list(chat_model(stream_usage=True).stream(QUESTION))
    text = "".join(str(part.content) for part in parts)
    expect(text == chat_model().invoke(QUESTION).content, text)
    expect(any(part.usage_metadata for part in parts), "no usage")


@call("completions")
def completions() -> None:
    fields: Any = {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0, "max_tokens": 8}
    expect(OpenAI(**fields).invoke("import os\n"), "no text")


@call("n")
def several() -> None:
    [found] = chat_model(n=2).generate([[HumanMessage(QUESTION)]]).generations
    expect(len(found) == 2, found)


@call("logprobs")
def logprobs() -> None:
    found = chat_model(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
    expect(len(found["content"]) == 12, found)


@call("tools")
def tools() -> None:
    bound = chat_model(100).bind_tools([choose], tool_choice="choose", strict=True)
    [made] = bound.invoke(QUESTION).tool_calls
    expect_choice(made["args"])
    whole: Any = None
    anything = chat_model(100).bind_tools([choose], tool_choice="any", strict=True, parallel_tool_calls=False)
    for part in anything.stream(QUESTION):
        whole = part if whole is None else whole + part
    expect_choice(whole.tool_calls[0]["args"])
    turns = [("user", QUESTION), whole, choose.invoke({**whole.tool_calls[0], "type": "tool_call"})]
    expect(chat_model(8).bind_tools([choose]).invoke(turns).usage_metadata, "no answer to the result")


@call("structured")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        expect_choice(chat_model(100).with_structured_output(Choice, method=method).invoke(QUESTION))  # type: ignore[arg-type]
    raw: Any = chat_model(40).with_structured_output(Choice, method="json_mode", include_raw=True).invoke(QUESTION)
    expect(str(raw["raw"].content).startswith("{"), raw)  # the schema is not sent


@call("responses")
def responses() -> None:
    model = chat_model(16, use_responses_api=True)
    expect(model.invoke(QUESTION).text, "no text")
    expect("".join(part.text for part in model.stream(QUESTION)), "no text in a stream")


@call("embeddings")
def embeddings() -> None:
    fields: Any = {"model": MODEL, "base_url": URL, "api_key": KEY}
    found = OpenAIEmbeddings(**fields, check_embedding_ctx_length=False).embed_documents(["one", "two"])
    expect(len(found) == 2 and len(found[0]) > 1, "no vectors")


@call("abort")
def abort() -> None:
    parts: Any = chat_model(ENDLESS, extra_body={"ignore_eos": True}).stream(QUESTION)
    next(parts)
    expect_abort(parts.close)


@call("request id")
def request_id() -> None:
    headers = chat_model(include_response_headers=True).invoke(QUESTION).response_metadata["headers"]
    expect(headers.get("x-request-id"), headers)


@call("too long")
def too_long() -> None:
    try:
        chat_model().invoke(TOO_LONG)
    except ContextOverflowError as error:
        expect("maximum context length" in str(error), error)
    else:
        raise AssertionError("it was answered")


run()
