"""The items of a conversation in /v1/responses as messages of a chat request.

Every item that this server writes is read, and those that other servers have written into a history: a call and its
result are a call of the assistant and a message of the tool, whatever kind of tool it was. What says nothing to a model
that reads text (a search without its results, a compaction that only its author can read) is left out and noted.
"""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.responses_tools import CUSTOM_INPUT, SEARCH, ClientTool, ClientTools, ToolKind
from diptych.serving.api.stand_ins import is_unreadable, readable_json, stand_in

Item = dict[str, Any]
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_SEALED = "diptych-reasoning:"  # how encrypted_content of this server begins
_BRINGS_TOOLS = ("tool_search_output", "additional_tools")

# Calls of tools that the request may not offer: the name of the tool, and the field with its arguments.
_FOREIGN_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "program": ("program", "code"),
}
# Calls that have their result in them: the name of the tool, and the fields with arguments and result.
_WHOLE_CALLS = {
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "file_search_call": ("file_search", "queries", "results"),
}
_OUTPUTS = {
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "computer_call_output": "output",
    "program_output": "result",
}
_LEFT_OUT = (
    "web_search_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "configuration_update",
    "ghost_snapshot",
)


def kind_of(item: Item) -> str:
    """The type of an item; clients leave out that of messages, and of references."""
    kind = item.get("type")
    if kind is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    return str(kind)


def take_found_tools(items: Sequence[Item], tools: ClientTools, num_earlier: int = 0) -> None:
    """Offer the tools that came up in the course of the conversation. num_earlier: items that are not of this
    request."""
    for number, item in enumerate(items, start=-num_earlier):
        if kind_of(item) in _BRINGS_TOOLS and isinstance(item.get("tools"), list):
            tools.add(item["tools"], f"input.{number}.tools", are_found=True)


def sealed_reasoning(text: str) -> str:
    """Reasoning for clients that send back only encrypted_content. It is no secret of the server: the same text stands
    in the item's content."""
    return _SEALED + base64.b64encode(text.encode()).decode()


class ItemReader:
    """Makes messages of items: those of the assistant that follow one another are a single message."""

    def __init__(self, tools: ClientTools) -> None:
        self._tools = tools
        self._messages: list[Item] = []
        self._assistant: dict[str, list[Any]] = {}  # content, reasoning, calls of the message that is being made
        self._readers: dict[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "agent_message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "tool_search_call": self._search,
            "tool_search_output": self._found,
            "additional_tools": lambda item, where: None,
            "image_generation_call": self._image,
            "mcp_call": self._mcp_call,
            **dict.fromkeys(_FOREIGN_CALLS, self._foreign_call),
            **dict.fromkeys(_WHOLE_CALLS, self._whole_call),
            **dict.fromkeys(_OUTPUTS, self._output),
            **dict.fromkeys(_LEFT_OUT, self._leave_out),
        }

    def read(self, items: Sequence[Item], num_earlier: int = 0) -> list[Item]:
        """The messages. num_earlier: items that are not of this request. Raises InvalidRequestError that names the
        item."""
        for number, item in enumerate(items, start=-num_earlier):
            where, kind = f"input.{number}", kind_of(item)
            reader = self._readers.get(kind)
            if reader is None:
                raise InvalidRequestError(
                    f"{where} has the type {kind[:40]!r}, which is not supported",
                    param=f"{where}.type",
                    code="unsupported",
                )
            reader(item, where)
        self._end_assistant()
        return self._messages

    def _end_assistant(self) -> None:
        parts, self._assistant = self._assistant, {}
        if not parts:
            return
        silence = None if "calls" in parts else ""
        message: Item = {"role": "assistant", "content": "".join(parts["content"]) if "content" in parts else silence}
        if "reasoning" in parts:
            message["reasoning_content"] = "\n".join(parts["reasoning"])
        if "calls" in parts:
            message["tool_calls"] = parts["calls"]
        self._messages.append(message)

    def _message(self, item: Item, where: str) -> None:
        role, content = item.get("role") or "user", item.get("content")
        if role == "assistant":
            self._assistant.setdefault("content", []).append("\n".join(_texts(content, f"{where}.content")))
            return
        self._end_assistant()
        texts = _texts(content, f"{where}.content")
        parts = [{"type": "text", "text": text} for text in texts]
        has_parts = role == "user" and len(parts) > 1  # templates that loop over parts do so for the user's
        message = {"role": "system" if role == "developer" else str(role)}
        self._messages.append({**message, "content": parts if has_parts else "\n".join(texts)})

    def _reasoning(self, item: Item, where: str) -> None:
        if "content" in self._assistant or "calls" in self._assistant:
            self._end_assistant()
        text = "\n".join(_texts(item.get("content") or [], f"{where}.content"))
        text = text or _unsealed(item.get("encrypted_content"))
        text = text or "\n".join(_texts(item.get("summary") or [], f"{where}.summary"))
        if text:
            self._assistant.setdefault("reasoning", []).append(text)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, item: Item, name: Any, arguments: Any) -> None:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {"id": _id(item), "type": "function", "function": {"name": name, "arguments": text}}
        self._assistant.setdefault("calls", []).append(call)

    def _function_call(self, item: Item, where: str) -> None:
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where}.name is no text", param=f"{where}.name")
        if isinstance(namespace, str):
            name = self._tools.callable_name(ClientTool("function", name, namespace))
        arguments = item.get("arguments")
        self._call(item, name, "{}" if arguments is None else arguments)

    def _custom_call(self, item: Item, where: str) -> None:
        name, text = item.get("name"), item.get("input")
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(f"{where} needs name and input, two texts", param=where)
        namespace = item.get("namespace") if isinstance(item.get("namespace"), str) else None
        self._call(item, self._tools.callable_name(ClientTool("custom", name, namespace)), {CUSTOM_INPUT: text})

    def _search(self, item: Item, where: str) -> None:
        self._call(item, SEARCH, item.get("arguments") or {})

    def _foreign_call(self, item: Item, where: str) -> None:
        name, field = _FOREIGN_CALLS[kind_of(item)]
        value = item.get(field) or item.get(f"{field}s")
        self._call(item, name, value if isinstance(value, dict) else {field: value})

    def _whole_call(self, item: Item, where: str) -> None:
        name, arguments, result = _WHOLE_CALLS[kind_of(item)]
        self._call(item, name, {arguments: item.get(arguments)})
        self._result(item, _result_text(item.get(result)))

    def _mcp_call(self, item: Item, where: str) -> None:
        self._call(item, str(item.get("name")), item.get("arguments") or "{}")
        self._result(item, _result_text(item.get("output") if item.get("error") is None else item["error"]))

    # -- results ------------------------------------------------------------------------------------------------------

    def _result(self, item: Item, text: str) -> None:
        self._end_assistant()
        self._messages.append({"role": "tool", "tool_call_id": _id(item), "content": text})

    def _output(self, item: Item, where: str) -> None:
        self._result(item, _result_text(item.get(_OUTPUTS[kind_of(item)])))

    def _found(self, item: Item, where: str) -> None:
        tools = [tool for tool in item.get("tools") or [] if isinstance(tool, dict)]
        spaces = {tool.get("name"): tool.get("tools") or [] for tool in tools if tool.get("type") == "namespace"}
        inner = [(part, name) for name, parts in spaces.items() for part in parts]
        found: list[str] = []
        for part, namespace in [*((tool, None) for tool in tools if tool.get("type") != "namespace"), *inner]:
            if isinstance(part.get("name"), str):
                kind: ToolKind = "custom" if part.get("type") == "custom" else "function"
                found.append(self._tools.callable_name(ClientTool(kind, part["name"], namespace)))
        self._result(item, f"Found tools: {', '.join(found)}" if found else "No tools were found.")

    def _image(self, item: Item, where: str) -> None:
        self._assistant.setdefault("content", []).append(stand_in("image"))

    def _leave_out(self, item: Item, where: str) -> None:
        self._tools.note(f"input.{kind_of(item)}")


def _id(item: Item) -> str:
    return str(item.get("call_id") or item.get("id"))


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
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
    return texts


def _result_text(value: Any) -> str:
    """The result of a tool as text: texts as they are, stand-ins for images and files, anything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    return "\n".join(map(_part_text, parts))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            return str(part["text"])
        if is_unreadable(part.get("type")):
            return stand_in(part["type"])
    return readable_json(part)


def _unsealed(sealed: Any) -> str:
    """Reasoning that this server has sealed; nothing for that of others."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
