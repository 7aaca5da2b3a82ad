"""POST /v1/messages: Anthropic's body, and what it says as a chat request.

What stands in ``cache_control`` changes nothing: every prefix is cached. Lines of the system prompt that are addressed
to the API, and change from request to request, are left out (VOLATILE): they would make every prefix a new one.
"""

import re
from collections.abc import Iterator, Sequence, Set
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.bodies import OWN_FIELDS
from diptych.serving.api.context_edits import Turn, after_compaction
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.messages_blocks import messages_of, texts_of
from diptych.serving.api.protocol import ChatBody, Count, Fields, Items, ToolBody, Turns
from diptych.serving.api.tools import function_tool

VOLATILE = re.compile(r"\A\s*x-anthropic-[a-z-]+:[^\n]*\n?")
Blocks = str | Items[dict[str, Any]]
LEFT_OUT = ("mcp_servers", "container")
# Fields that say how and where Anthropic serves a request, not what is asked.
WITHOUT_EFFECT = (
    *("betas", "billing_policy", "cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id"),
    *("diagnostics", "fallbacks", "fallback_credit_token"),
)
_OF_ANSWERS = ("max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k")  # nothing for a prompt


class InputMessage(Fields):
    """A turn of the conversation."""

    role: Annotated[str, Field(pattern="^(user|assistant|system)$")]
    content: Blocks


class InputTool(Fields):
    """A tool; only functions of the client are served, and others left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class TokenCountBody(Fields):
    """POST /v1/messages/count_tokens."""

    without_effect: ClassVar = frozenset((*LEFT_OUT, *WITHOUT_EFFECT, *_OF_ANSWERS, *OWN_FIELDS))

    model: str | None = None
    messages: Annotated[Turns[InputMessage], Field(min_length=1)]
    system: Blocks | None = None
    tools: Annotated[list[InputTool], Field(max_length=edge_limits.TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, none, or a tool by its name.")
    thinking: dict[str, Any] | None = Field(None, description="enabled (with budget_tokens) or disabled.")
    output_config: dict[str, Any] | None = Field(
        None, description="format: a JSON schema of the answer. effort: for the chat template."
    )
    context_management: dict[str, Any] | None = Field(
        None, description="edits: clear_tool_uses_20250919 and clear_thinking_20251015."
    )


class MessagesBody(TokenCountBody):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=edge_limits.STOP_TEXTS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None


Body = TypeVar("Body", bound=TokenCountBody)


def as_chat(body: TokenCountBody, turns: Sequence[Turn]) -> tuple[ChatBody, list[str]]:
    """The same as a chat request with these turns, and what is left out of it. Raises InvalidRequestError that names
    what cannot be served."""
    tools, left_out = _tools(body, turns)
    left_out += [name for name in LEFT_OUT if (body.model_extra or {}).get(name)]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": list(_messages(body, turns)),
        "tools": tools or None,
        **{name: (body.model_extra or {}).get(name) for name in OWN_FIELDS},
        **_choice(body.tool_choice or {}, {tool.function.name for tool in tools}, body.tools or []),
        **_thinking(body.thinking or {}, body.output_config or {}),
        **_format(body.output_config or {}),
    }
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
        return ChatBody.model_validate(fields), left_out
    except ValidationError as error:
        raise invalid_body(error) from None


def effort_of(body: TokenCountBody) -> Any:
    """How much the model is to think."""
    return (body.output_config or {}).get("effort")


def without_effort(body: Body) -> Body:
    """The same without it."""
    config = {name: value for name, value in (body.output_config or {}).items() if name != "effort"}
    return body.model_copy(update={"output_config": config})


def turns_of(body: TokenCountBody) -> Sequence[Turn]:
    """The conversation as the client wrote it, from its last compaction on."""
    return after_compaction([{"role": message.role, "content": message.content} for message in body.messages])


def _messages(body: TokenCountBody, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    if body.system is not None:
        blocks = [body.system] if isinstance(body.system, str) else texts_of(body.system, "system")
        texts = [VOLATILE.sub("", text) for text in blocks]
        if system := "\n\n".join(text for text in texts if text.strip()):
            yield {"role": "system", "content": system}
    for number, turn in enumerate(turns, start=len(body.messages) - len(turns)):
        content = turn["content"]
        if isinstance(content, str):
            yield {"role": turn["role"], "content": content}
        else:
            yield from messages_of(turn["role"], content, f"messages.{number}.content")


def _tools(body: TokenCountBody, turns: Sequence[Turn]) -> tuple[list[ToolBody], list[str]]:
    """The functions among the tools, those that are defined in the course of the conversation included, and the types
    of the others: they run on Anthropic's servers, or are defined there."""
    given = [(f"tools.{number}", tool) for number, tool in enumerate(body.tools or [])]
    for number, turn in enumerate(turns, start=len(body.messages) - len(turns)):
        for index, block in enumerate(turn["content"] if isinstance(turn["content"], list) else []):
            added = block.get("tool") if block.get("type") == "tool_addition" else None
            if isinstance(added, dict) and isinstance(added.get("definition"), dict):
                given.append((f"messages.{number}.content.{index}.tool.definition", _defined(added["definition"])))
    tools: dict[str, ToolBody] = {}
    left_out: list[str] = []
    for place, tool in given:
        if tool.type not in (None, "custom"):
            left_out.append(f"tools.{tool.type}")
            continue
        if tool.name in tools:
            if not place.startswith("tools"):
                continue
            raise InvalidRequestError(f"{place}.name is {tool.name!r}, as that of another tool", param=f"{place}.name")
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        tools[tool.name or ""] = function_tool(function, place)
    return list(tools.values()), list(dict.fromkeys(left_out))


def _defined(definition: dict[str, Any]) -> InputTool:
    try:
        return InputTool.model_validate(definition)
    except ValidationError as error:
        raise invalid_body(error) from None


def _choice(choice: dict[str, Any], offered: Set[str], tools: Sequence[InputTool]) -> dict[str, Any]:
    """offered: the tools that can be called. tools: all that the client names."""
    if not choice:
        return {}
    kind, name = choice.get("type"), choice.get("name")
    missing = [tool.type for tool in tools if tool.name not in offered and (kind == "any" or tool.name == name)]
    if missing and (kind == "tool" or (kind == "any" and not offered)):
        raise InvalidRequestError(
            f"tool_choice demands {', '.join(map(str, missing[:5]))}, which this server cannot run",
            param="tool_choice",
            code="unsupported",
        )
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


def _thinking(thinking: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """effort goes to the chat template, as reasoning_effort does; whether there is reasoning, ``thinking`` says."""
    arguments: dict[str, Any] = {}
    if isinstance(config.get("effort"), str):
        arguments["reasoning_effort"] = config["effort"]
    if not thinking:
        return {"chat_template_kwargs": arguments} if arguments else {}
    is_wanted = thinking.get("type") != "disabled"
    arguments |= {"enable_thinking": is_wanted, "thinking": is_wanted}
    budget = thinking.get("budget_tokens") if is_wanted else None
    return {"chat_template_kwargs": arguments, **({} if budget is None else {"thinking_token_budget": budget})}


def _format(config: dict[str, Any]) -> dict[str, Any]:
    wanted = config.get("format")
    if not wanted:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidRequestError("output_config.format.type is not json_schema", param="output_config.format.type")
    described = {"name": "answer", "schema": wanted.get("schema", {}), "strict": wanted.get("strict")}
    return {"response_format": {"type": "json_schema", "json_schema": described}}
