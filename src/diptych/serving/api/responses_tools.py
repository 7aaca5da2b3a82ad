"""The tools of /v1/responses as functions of a chat request, and the way back from a function that was called.

Functions are taken as they are, those in a namespace under a name made of both; a custom tool, whose input is free
text, is a function with one text; a search for tools that the client carries out is a function. Tools that OpenAI's
servers run are left out and noted by their type, unless the request demands one of them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.protocol import ToolBody
from diptych.serving.api.tools import function_tool

Item = dict[str, Any]
ToolKind = Literal["function", "custom", "tool_search"]
CUSTOM_INPUT = "input"  # the one argument of a custom tool
SEARCH: Final = "tool_search"
MAX_NAME = 128
_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The whole input, as plain text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_SEARCH_SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client knows it. kind: decides what items its calls are."""

    kind: ToolKind
    name: str
    namespace: str | None = None


class ClientTools:
    """The tools of one request. functions: for the chat request. left_out: what the server cannot do of the request,
    for the reply's header."""

    def __init__(self) -> None:
        self.functions: list[ToolBody] = []
        self.left_out: list[str] = []
        self._by_callable: dict[str, ClientTool] = {}
        self._callable_of: dict[ClientTool, str] = {}

    def add(self, tools: Sequence[Any], where: str, *, are_found: bool = False) -> None:
        """Take the tools of a list. are_found: in the course of the conversation, where the same may come again.
        Raises InvalidRequestError that names the tool."""
        for number, tool in enumerate(tools):
            place = f"{where}.{number}"
            if not isinstance(tool, dict):
                raise InvalidRequestError(f"{place} is no object", param=place)
            self._add(tool, place, None, are_found)

    def called(self, function: str) -> ClientTool:
        """The tool behind a function that was called."""
        return self._by_callable.get(function) or ClientTool("function", function)

    def callable_name(self, tool: ClientTool) -> str:
        """The name of a tool's function, also of one that the request does not offer any more."""
        return self._callable_of.get(tool) or _joined(tool)

    def note(self, name: str) -> None:
        """Name something that is left out."""
        if name not in self.left_out:
            self.left_out.append(name)

    def choice(self, given: str | Item | None) -> str | Item | None:
        """tool_choice of the chat request. Raises InvalidRequestError where it demands what is left out."""
        if isinstance(given, dict):
            return self._allowed(given) if given.get("type") == "allowed_tools" else self._demanded(given)
        left_out = ", ".join(name.removeprefix("tools.") for name in self.left_out if name.startswith("tools."))
        if given == "required" and not self.functions and left_out:
            raise _cannot_run(f"tool_choice is 'required', and this server cannot run the tools given: {left_out}")
        return given

    def _demanded(self, given: Item) -> Item:
        kind, name = given.get("type"), given.get("name")
        if kind not in ("function", "custom"):
            raise _cannot_run(f"tool_choice demands {str(kind)[:40]!r}, which this server cannot run")
        if not isinstance(name, str):
            raise InvalidRequestError("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": next(self._named(given), name)}}

    def _allowed(self, given: Item) -> str | Item:
        mode, tools = given.get("mode", "auto"), given.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list):
            raise InvalidRequestError(
                "tool_choice of the type allowed_tools needs mode (auto or required) and tools, a list",
                param="tool_choice",
            )
        names = [name for tool in tools if isinstance(tool, dict) for name in self._named(tool)]
        if not names and mode == "required":
            raise _cannot_run(
                "tool_choice allows only tools that the request does not offer, or this server cannot run"
            )
        if not names:
            return "none"
        allowed = [{"type": "function", "function": {"name": name}} for name in dict.fromkeys(names)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    def _named(self, wanted: Item) -> Iterator[str]:
        """The functions of a tool, or of a whole namespace, that tool_choice names."""
        kind, name, namespace = wanted.get("type"), wanted.get("name"), wanted.get("namespace")
        for tool, function in self._callable_of.items():
            if kind == "namespace":
                is_meant = tool.namespace == name
            else:
                is_meant = tool.kind == kind and name in (tool.name, function) and namespace in (None, tool.namespace)
            if is_meant:
                yield function

    def _add(self, tool: Item, place: str, namespace: str | None, are_found: bool) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner, name = tool.get("tools"), tool.get("name")
            if not isinstance(inner, list) or not isinstance(name, str):
                raise InvalidRequestError(f"{place} needs name and tools, a list", param=place)
            for number, part in enumerate(inner):
                if not isinstance(part, dict):
                    raise InvalidRequestError(f"{place}.tools.{number} is no object", param=f"{place}.tools.{number}")
                self._add(part, f"{place}.tools.{number}", name, are_found)
        elif kind == "function":
            self._offer(ClientTool("function", _name(tool, place), namespace), tool, place, are_found)
        elif kind == "custom":
            self._offer(ClientTool("custom", _name(tool, place), namespace), self._custom(tool), place, are_found)
        elif kind == SEARCH and tool.get("execution") == "client":
            described = {name: value for name, value in tool.items() if value is not None}
            self._offer(ClientTool(SEARCH, SEARCH), {"parameters": _SEARCH_SCHEMA, **described}, place, are_found)
        elif isinstance(kind, str):
            self.note(f"tools.{kind}")
        else:
            raise InvalidRequestError(f"{place}.type is missing", param=f"{place}.type")

    def _custom(self, tool: Item) -> Item:
        """A custom tool as a function: its grammar is told to the model, and not enforced."""
        description, form = str(tool.get("description") or ""), tool.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            self.note(f"tools.{tool.get('name')}.format")
            grammar: Item = form["grammar"] if isinstance(form.get("grammar"), dict) else form
            description += f"\n\nThe input follows this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
        description += f"\n\nGive the whole input as the text of the argument `{CUSTOM_INPUT}`."
        return {"description": description.strip(), "parameters": _CUSTOM_SCHEMA}

    def _offer(self, tool: ClientTool, described: Item, place: str, are_found: bool) -> None:
        if tool in self._callable_of:
            if are_found:
                return
            raise InvalidRequestError(f"{place}.name is {tool.name!r}, as that of another tool", param=f"{place}.name")
        if len(self.functions) == edge_limits.TOOLS:
            raise InvalidRequestError(f"{place} is one tool too many; at most {edge_limits.TOOLS}", param=place)
        name = _joined(tool)
        if name in self._by_callable and tool.namespace is None:
            raise InvalidRequestError(f"{place}.name is {tool.name!r}, as that of another tool", param=f"{place}.name")
        while name in self._by_callable:
            name = _shortened(f"{name}_")
        fields = {field: described.get(field) for field in ("description", "parameters", "strict")}
        self.functions.append(function_tool({"name": name, **fields}, place))
        self._by_callable[name] = tool
        self._callable_of[tool] = name


def _name(tool: Item, place: str) -> str:
    if not isinstance(tool.get("name"), str):
        raise InvalidRequestError(f"{place}.name is missing", param=f"{place}.name")
    return str(tool["name"])


def _joined(tool: ClientTool) -> str:
    if tool.namespace is None:
        return tool.name
    namespace = re.sub(r"[^a-zA-Z0-9_.-]", "_", tool.namespace)
    return _shortened(f"{namespace}{'' if namespace.endswith('__') else '__'}{tool.name}")


def _shortened(name: str) -> str:
    """A name that is too long has a hash for its end."""
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 17]}_{blake2b(name.encode(), digest_size=8).hexdigest()}"


def _cannot_run(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice", code="unsupported")
