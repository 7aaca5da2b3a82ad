"""POST /v1/responses: OpenAI's newer body, and what it says as a chat request.

Items become messages; with ``previous_response_id`` they follow the items of that response's conversation, in the same
order and with the same text, so that its prefix is cached. Items of reasoning belong to the assistant's message behind
them.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import MAX_TOOLS, ChatBody, Count, Finite, Items, Metadata

Item = dict[str, Any]
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "modalities": (["text"],),
}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


OWN_FIELDS = ("service_class", "gives_way_ms", "priority", "deadline_ms", "ttft_slo_ms", "tpot_slo_ms", "cache_salt")


class ResponsesBody(BaseModel):
    """POST /v1/responses. null means: not given."""

    model_config = Finite

    model: str | None = None
    input: str | Items[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="false: the response cannot be continued by its id.")
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[Items[Item], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: Item | None = Field(None, description="format: text, json_object or json_schema.")
    reasoning: Item | None = Field(None, description="effort: for the chat template.")
    metadata: Metadata | None = None


def as_chat(body: ResponsesBody, earlier: Sequence[Item]) -> ChatBody:
    """The same as a chat request, behind the items of the conversation so far. Raises InvalidRequestError."""
    for name, harmless in _UNSUPPORTED.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += _messages([*earlier, *input_items(body)])
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format((body.text or {}).get("format") or {}),
        "metadata": body.metadata,
        **{name: (body.model_extra or {}).get(name) for name in OWN_FIELDS},
    }
    if body.tools:
        fields["tools"] = [_tool(number, tool) for number, tool in enumerate(body.tools)]
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning and body.reasoning.get("effort"):
        fields["reasoning_effort"] = body.reasoning["effort"]
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from None


def input_items(body: ResponsesBody) -> list[Item]:
    """What is new in the conversation."""
    return [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def _messages(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Messages of items: those of the assistant that follow one another are a single message."""
    assistant: dict[str, Any] = {}
    for number, item in enumerate(items):
        where, kind = f"input.{number}", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            if assistant:
                yield _assistant(assistant)
                assistant = {}
            role = "system" if item.get("role") == "developer" else item.get("role")
            yield {"role": str(role), "content": _text(item.get("content"), f"{where}.content")}
        elif kind == "message":
            assistant["content"] = assistant.get("content", "") + _text(item.get("content"), f"{where}.content")
        elif kind == "reasoning":
            if "content" in assistant or "calls" in assistant:
                yield _assistant(assistant)
                assistant = {}
            assistant["reasoning"] = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            assistant.setdefault("calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            if assistant:
                yield _assistant(assistant)
                assistant = {}
            output = _text(item.get("output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output}
        else:
            raise InvalidRequestError(
                f"{where} has the type {str(kind)[:40]!r}, which is not supported",
                param=f"{where}.type",
                code="unsupported",
            )
    if assistant:
        yield _assistant(assistant)


def _assistant(parts: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": parts.get("content", "")}
    if parts.get("reasoning"):
        message["reasoning_content"] = parts["reasoning"]
    return {**message, "tool_calls": parts["calls"]} if "calls" in parts else message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is no text and no list of parts", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = (part.get("text") or part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str | None):
            raise InvalidRequestError(
                f"{where}.{number} has the type {str(kind)[:40]!r}; text is supported",
                param=f"{where}.{number}",
                code="unsupported",
            )
        texts.append(text or "")
    return "\n".join(texts)


def _tool(number: int, tool: Item) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"tools.{number}.type is {str(tool.get('type'))[:40]!r}; 'function' is supported",
            param=f"tools.{number}.type",
            code="unsupported",
        )
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": function}


def _choice(choice: str | Item | None) -> str | Item | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(wanted: Any) -> dict[str, Any] | None:
    if not wanted:
        return None
    if not isinstance(wanted, dict):
        raise InvalidRequestError("text.format is no object", param="text.format")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: wanted.get(name) for name in ("name", "schema", "strict")}}
