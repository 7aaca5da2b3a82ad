"""The tools of a request: what the chat template renders, what the parser of answers needs, and how often and which of
them the model may call. Limits and refusals of single tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.protocol import ChatBody, ToolBody

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """rendered: for the chat template. schemas: of the arguments, by name. choice: one of CHOICES; with ``name`` this
    very tool. max_calls: None without a limit. strict: tools whose arguments must follow their schema."""

    rendered: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    choice: str = "auto"
    name: str | None = None
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
    def enforced_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of strict tools; any object for the others."""
        anything: Mapping[str, Any] = {"type": "object"}
        return {name: schema if name in self.strict else anything for name, schema in self.schemas.items()}

    @property
    def callable_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the tools that may be called."""
        return self.schemas if self.name is None else {self.name: self.schemas[self.name]}


def requested_tools(body: ChatBody, tokenizer: Tokenizer) -> ToolRequest | None:
    """The tools of a chat request; None where it has none. Raises InvalidRequestError that names the field."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools, and the request has none", param="tool_choice")
        return None
    choice, name = _choice(body.tool_choice)
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(body.tools):
        _check(number, tool, schemas)
        schemas[tool.function.name] = tool.function.parameters or {"type": "object", "properties": {}}
    if name is not None and name not in schemas:
        known = ", ".join(list(schemas)[:10])
        raise InvalidRequestError(f"tool_choice names {name!r}; the tools are {known}", param="tool_choice")
    if choice != "none":
        if not tokenizer.takes_tools:
            raise InvalidRequestError(
                "the chat template of this model takes no tools", param="tools", code="unsupported"
            )
        if tokenizer.response_template is None:
            raise InvalidRequestError(f"tools: {tokenizer.response_template_error}", param="tools", code="unsupported")
    return ToolRequest(
        [tool.model_dump(exclude_none=True) for tool in body.tools],
        schemas,
        choice,
        name,
        1 if body.parallel_tool_calls is False or name is not None else None,
        frozenset(tool.function.name for tool in body.tools if tool.function.strict),
    )


def _choice(given: str | dict[str, Any] | None) -> tuple[str, str | None]:
    """The choice, and the name of the tool that must be called."""
    if given is None:
        return "auto", None
    if isinstance(given, str):
        if given not in CHOICES:
            known = ", ".join(CHOICES)
            raise InvalidRequestError(
                f"tool_choice is {given[:40]!r}; one of {known}, or a function", param="tool_choice"
            )
        return given, None
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else given.get("name")
    if given.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice is an object but not {"type": "function", "function": {"name": ...}}', param="tool_choice"
        )
    return "required", name


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
