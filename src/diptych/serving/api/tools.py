"""The tools of a request: what the chat template renders, what the parser of answers needs, and how often and which of
them the model may call. Limits and refusals of single tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import ChatBody, FunctionBody, ToolBody

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """rendered: for the chat template. schemas: of the arguments, by name, in the order of the request. choice: one of
    CHOICES. allowed: the names of those that may be called. max_calls: None without a limit. strict: tools whose
    arguments must follow their schema."""

    rendered: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    choice: str = "auto"
    allowed: frozenset[str] = frozenset()
    max_calls: int | None = None
    strict: frozenset[str] = frozenset()

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for in the answer."""
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.choice == "required"

    @property
    def callable_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of the tools that may be called."""
        return {name: schema for name, schema in self.schemas.items() if name in self.allowed}

    @property
    def enforced_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of the tools that may be called: those of strict ones, any object for the others."""
        anything: Mapping[str, Any] = {"type": "object"}
        return {name: schema if name in self.strict else anything for name, schema in self.callable_schemas.items()}

    @property
    def positions(self) -> Mapping[str, int]:
        """Where each tool stands in the request."""
        return {name: number for number, name in enumerate(self.schemas)}


def requested_tools(body: ChatBody, tokenizer: Tokenizer) -> ToolRequest | None:
    """The tools of a chat request; None where it has none. Raises InvalidRequestError that names the field."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools, and the request has none", param="tool_choice")
        return None
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(body.tools):
        _check(number, tool, schemas)
        schemas[tool.function.name] = tool.function.parameters or {"type": "object", "properties": {}}
    choice, names = _choice(body.tool_choice)
    for name in names or ():
        if name not in schemas:
            known = ", ".join(list(schemas)[:10])
            raise InvalidRequestError(f"tool_choice names {name!r}; the tools are {known}", param="tool_choice")
    if choice != "none" and tokenizer.answer_format.tools_error:
        raise InvalidRequestError(f"tools: {tokenizer.answer_format.tools_error}", param="tools", code="unsupported")
    is_single = body.parallel_tool_calls is False or _is_named(body.tool_choice)
    return ToolRequest(
        [tool.model_dump(exclude_none=True) for tool in body.tools],
        schemas,
        choice,
        frozenset(schemas if names is None else names),
        1 if is_single else None,
        frozenset(tool.function.name for tool in body.tools if tool.function.strict),
    )


def _is_named(given: str | dict[str, Any] | None) -> bool:
    """Whether a single function must be called."""
    return isinstance(given, dict) and given.get("type") == "function"


def _choice(given: str | dict[str, Any] | None) -> tuple[str, list[str] | None]:
    """The choice, and the names of the tools that may be called; None for all of them."""
    if given is None:
        return "auto", None
    if given == "any":  # Mistral's clients say so
        return "required", None
    if isinstance(given, str):
        if given not in CHOICES:
            known = ", ".join(CHOICES)
            raise InvalidRequestError(
                f"tool_choice is {given[:40]!r}; one of {known}, or an object", param="tool_choice"
            )
        return given, None
    if given.get("type") == "allowed_tools":
        return _allowed(given)
    name = _function_name(given)
    if name is None:
        raise InvalidRequestError(
            'tool_choice is an object but neither {"type": "function", "function": {"name": ...}} nor '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
            param="tool_choice",
        )
    return "required", [name]


def _allowed(given: dict[str, Any]) -> tuple[str, list[str]]:
    """The mode and the names of ``allowed_tools``; its fields stand in an object of that name, or beside the type."""
    inner = given.get("allowed_tools", given)
    where = "tool_choice.allowed_tools" if "allowed_tools" in given else "tool_choice"
    if not isinstance(inner, dict):
        raise InvalidRequestError(f"{where} is no object", param="tool_choice")
    mode, tools = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{where}.mode is {str(mode)[:40]!r}; one of auto, required", param="tool_choice")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"{where}.tools is no list of tools", param="tool_choice")
    names = []
    for number, tool in enumerate(tools):
        name = _function_name(tool)
        if name is None:
            place = f"{where}.tools.{number}"
            raise InvalidRequestError(f"{place} is no function with a name", param="tool_choice")
        names.append(name)
    return mode, names


def _function_name(tool: Any) -> str | None:
    """The name in ``{"type": "function", ...}``: in an object ``function``, or beside the type."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def _check(number: int, tool: ToolBody, schemas: Mapping[str, Any]) -> None:
    if tool.type != "function":
        raise InvalidRequestError(
            f"tools.{number}.type is {tool.type[:40]!r}; 'function' is supported", param=f"tools.{number}.type"
        )
    if tool.function.name in schemas:
        raise InvalidRequestError(
            f"tools.{number}.function.name is {tool.function.name!r}, as that of another tool",
            param=f"tools.{number}.function.name",
        )


def function_tool(function: Mapping[str, Any], place: str) -> ToolBody:
    """A tool of a chat request. Raises InvalidRequestError that names the field below ``place``."""
    try:
        return ToolBody(function=FunctionBody.model_validate(function))
    except ValidationError as error:
        found = invalid_body(error)
        raise InvalidRequestError(f"{place}.{found.message}", param=f"{place}.{found.param}") from None
