"""Tools for models whose chat template takes none: described in the first message, and calls and results as text.

The form of a call is that of the format ``generic`` in response/bundled_templates.py. Messages are those of a chat
template; they are not changed, new ones are made.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_Message = dict[str, Any]
_HOW = """\
You can call tools. To call one, write a block of exactly this form, each of its marks at the beginning of a line:

<tool_call>
{"name": "name of the tool", "arguments": {"parameter": "value"}}
</tool_call>

"arguments" is a JSON object that follows the parameters of the tool. Several blocks call several tools; write nothing
behind the last one. The results come in the next message, each between <tool_response> and </tool_response>. Write such
a block only to call a tool; where none is needed, answer in plain words.

The tools, one on each line, as JSON:
"""


def has_tool_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are calls or results in these messages."""
    return any(message.get("tool_calls") or _is_result(message) for message in messages)


def with_generic_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[_Message]:
    """The messages with the tools in the first one, and without calls or results that are no text. takes_system:
    whether the first one may be a system message; else it is the first of the user."""
    made: list[_Message] = []
    names: dict[str, str] = {}
    behind: list[Any] = []  # contents that follow the last result, which are one message with it
    is_behind_result = False
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = str(call["function"]["name"])
        is_result = _is_result(message)
        if is_result:
            name = str(message.get("name") or names.get(str(message.get("tool_call_id")), ""))
            added: _Message = {"role": "user", "content": _result(name, message.get("content"))}
        elif message.get("tool_calls"):
            added = _spoken(message)
        else:
            added = dict(message)
        if is_behind_result and added["role"] == "user" and made:
            behind.append(added["content"])
        else:
            _close(made, behind)
            behind = []
            made.append(added)
        is_behind_result = is_result or (is_behind_result and added["role"] == "user")
    _close(made, behind)
    return _described(made, tools, takes_system) if tools else made


def _close(messages: list[_Message], behind: Sequence[Any]) -> None:
    """Put contents behind that of the last message, in one go."""
    if behind:
        messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], *behind)}


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("tool", "function")


def _described(messages: list[_Message], tools: Sequence[Mapping[str, Any]], takes_system: bool) -> list[_Message]:
    text = _HOW + "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    roles = ("system", "developer") if takes_system else ("user",)
    first = next((number for number, message in enumerate(messages) if message.get("role") in roles), None)
    if first is None or (takes_system and first > 0):
        return [{"role": "system" if takes_system else "user", "content": text}, *messages]
    content = messages[first].get("content")
    parts = (content, text) if takes_system else (text, content)
    changed = {**messages[first], "content": _joined(*parts)}
    return [*messages[:first], changed, *messages[first + 1 :]]


def _spoken(message: Mapping[str, Any]) -> _Message:
    """A message of the assistant with its calls as the text that they were."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {written or "{}"}}}\n</tool_call>')
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": _joined(message.get("content"), "\n".join(calls), mark="\n")}


def _result(name: str, content: Any) -> Any:
    mark = f"<tool_response>\n{f'{name}: ' if name else ''}"
    if isinstance(content, list):
        return _joined(mark, content, "\n</tool_response>", mark="")
    return f"{mark}{'' if content is None else content}\n</tool_response>"


def _joined(*contents: Any, mark: str = "\n\n") -> Any:
    """Contents as one: texts, lists of parts, or nothing."""
    given = [content for content in contents if content]
    if len(given) < 2:
        return given[0] if given else contents[-1]
    if all(isinstance(content, str) for content in given):
        return mark.join(given)
    parts: list[Any] = []
    for content in given:
        if parts and mark:
            parts.append({"type": "text", "text": mark})
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts
