"""POST /v1/responses: OpenAI's newer body, and what it says as a chat request.

Items become messages; with ``previous_response_id`` they follow the items of that response's conversation, in the same
order and with the same text, so that its prefix is cached. Items of reasoning belong to the assistant's message behind
them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.bodies import OWN_FIELDS
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import ChatBody, Count, Fields, Items, Metadata, Turns
from diptych.serving.api.responses_items import ItemReader, take_found_tools
from diptych.serving.api.responses_tools import ClientTools

Item = dict[str, Any]
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "modalities": (["text"],),
}
SEALED_REASONING = "reasoning.encrypted_content"  # of ``include``


class ResponsesBody(Fields):
    """POST /v1/responses. null means: not given."""

    without_effect: ClassVar = frozenset((*_UNSUPPORTED, *OWN_FIELDS, "max_tool_calls", "truncation"))

    model: str | None = None
    input: str | Turns[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="false: the response cannot be continued by its id.")
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[Items[Item], Field(max_length=edge_limits.TOOLS)] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: Item | None = Field(None, description="format: text, json_object or json_schema.")
    reasoning: Item | None = Field(
        None, description="effort: for the chat template. summary: reasoning comes as one, too."
    )
    metadata: Metadata | None = None
    include: Items[str] | None = Field(
        None, description=f"{SEALED_REASONING}: items of reasoning carry it; anything else has no effect."
    )


def as_chat(body: ResponsesBody, earlier: Sequence[Item], new: Sequence[Item]) -> tuple[ChatBody, ClientTools]:
    """The same as a chat request, and the tools as the client knows them. earlier, new: the items of the conversation
    so far and those of the request, without references. Raises InvalidRequestError."""
    for name, harmless in _UNSUPPORTED.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
    tools = ClientTools()
    if (body.model_extra or {}).get("truncation") not in (None, "disabled"):
        tools.note("truncation")  # what does not fit is refused all the same
    tools.add(body.tools or [], "tools")
    items = [*earlier, *new]
    take_found_tools(items, tools, len(earlier))
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += ItemReader(tools).read(items, len(earlier))
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": tools.functions or None,
        "tool_choice": tools.choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format((body.text or {}).get("format") or {}),
        "metadata": body.metadata,
        **{name: (body.model_extra or {}).get(name) for name in OWN_FIELDS},
    }
    if body.reasoning and body.reasoning.get("effort"):
        fields["reasoning_effort"] = body.reasoning["effort"]
    try:
        return ChatBody.model_validate(fields), tools
    except ValidationError as error:
        raise invalid_body(error) from None


def input_items(body: ResponsesBody) -> list[Item]:
    """What is new in the conversation."""
    return [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def wants_sealed_reasoning(body: ResponsesBody) -> bool:
    """Whether the client sends reasoning back by its encrypted_content only."""
    return SEALED_REASONING in (body.include or [])


def wants_summary(body: ResponsesBody) -> bool:
    """Whether the client wants to show the reasoning."""
    wanted = body.reasoning or {}
    return bool(wanted.get("summary") or wanted.get("generate_summary"))


def _format(wanted: Any) -> dict[str, Any] | None:
    if not wanted:
        return None
    if not isinstance(wanted, dict):
        raise InvalidRequestError("text.format is no object", param="text.format")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: wanted.get(name) for name in ("name", "schema", "strict")}}
