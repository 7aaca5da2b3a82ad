"""POST /v1/messages: Anthropic's body, and what it says as a chat request.

Blocks become messages: results of tools are messages of their own, calls and reasoning belong to the assistant's. What
stands in ``cache_control`` changes nothing: every prefix is cached. Lines of the system prompt that are addressed to
the API, and change from request to request, are left out (VOLATILE): they would make every prefix a new one.
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import MAX_TOOLS, ChatBody, Count, Finite, Items

VOLATILE = re.compile(r"\A\s*x-anthropic-[a-z-]+:[^\n]*\n?")
Blocks = str | Items[dict[str, Any]]
_UNSUPPORTED = ("mcp_servers", "container", "context_management")


class InputMessage(BaseModel):
    """A turn of the conversation."""

    model_config = Finite

    role: Annotated[str, Field(pattern="^(user|assistant|system)$")]
    content: Blocks


class InputTool(BaseModel):
    """A tool; only functions of the client are served."""

    model_config = Finite

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class TokenCountBody(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = Finite

    model: str | None = None
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: Blocks | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, none, or a tool by its name.")
    thinking: dict[str, Any] | None = Field(None, description="enabled (with budget_tokens) or disabled.")
    output_config: dict[str, Any] | None = Field(None, description="format: a JSON schema of the answer.")


class MessagesBody(TokenCountBody):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None


def as_chat(body: TokenCountBody) -> ChatBody:
    """The same as a chat request. Raises InvalidRequestError that names what cannot be served."""
    for name in _UNSUPPORTED:
        if (body.model_extra or {}).get(name):
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
    fields: dict[str, Any] = {"model": body.model, "messages": list(_messages(body))}
    if body.tools:
        fields["tools"] = [_tool(number, tool) for number, tool in enumerate(body.tools)]
    fields.update(
        _choice(body.tool_choice or {}), **_thinking(body.thinking or {}), **_format(body.output_config or {})
    )
    if isinstance(body, MessagesBody):
        fields.update(
            max_tokens=body.max_tokens,
            stream=body.stream,
            stop=[text for text in body.stop_sequences or [] if text] or None,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
        )
    last = fields["messages"][-1]
    if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
        fields["continue_final_message"] = True  # as with Anthropic: the answer goes on with this text
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from None


def _messages(body: TokenCountBody) -> Iterator[dict[str, Any]]:
    if body.system is not None:
        blocks = [body.system] if isinstance(body.system, str) else _texts(body.system, "system")
        texts = [VOLATILE.sub("", text) for text in blocks]
        if system := "\n\n".join(text for text in texts if text.strip()):
            yield {"role": "system", "content": system}
    for number, message in enumerate(body.messages):
        where = f"messages.{number}.content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, where)
        else:
            yield from _user(message.role, message.content, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", f"{where}.{number}"))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", f"{where}.{number}"))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _refused(kind, f"{where}.{number}")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _user(role: str, blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            inner = f"{where}.{number}.content"
            text = content if isinstance(content, str) else "\n".join(_texts(content, inner))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}
        else:
            texts += _texts([block], f"{where}.{number}")
    if texts:
        yield {"role": role, "content": "\n\n".join(texts)}


def _texts(blocks: Any, where: str) -> list[str]:
    if not isinstance(blocks, list):
        raise InvalidRequestError(f"{where} is no text and no list of blocks", param=where)
    texts = []
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _refused(block.get("type") if isinstance(block, dict) else block, where)
        texts.append(_text(block, "text", where))
    return texts


def _text(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{name} is no text", param=f"{where}.{name}")
    return text


def _refused(kind: Any, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has the type {str(kind)[:40]!r}, which is not supported", param=where, code="unsupported"
    )


def _tool(number: int, tool: InputTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(
            f"tools.{number}.type is {tool.type[:40]!r}; the tools of the client are supported",
            param=f"tools.{number}.type",
            code="unsupported",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    if not choice:
        return {}
    kind, name = choice.get("type"), choice.get("name")
    known: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": str(name)}},
    }
    if kind not in known:
        raise InvalidRequestError(
            f"tool_choice.type is {str(kind)[:40]!r}; one of {', '.join(known)}", param="tool_choice.type"
        )
    return {"tool_choice": known[kind], "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _thinking(thinking: dict[str, Any]) -> dict[str, Any]:
    if not thinking:
        return {}
    is_wanted = thinking.get("type") != "disabled"
    wanted: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": is_wanted, "thinking": is_wanted}}
    if is_wanted and thinking.get("budget_tokens") is not None:
        wanted["thinking_token_budget"] = thinking["budget_tokens"]
    return wanted


def _format(config: dict[str, Any]) -> dict[str, Any]:
    wanted = config.get("format")
    if not wanted:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidRequestError("output_config.format.type is not json_schema", param="output_config.format.type")
    described = {"name": "answer", "schema": wanted.get("schema", {})}
    return {"response_format": {"type": "json_schema", "json_schema": described}}
