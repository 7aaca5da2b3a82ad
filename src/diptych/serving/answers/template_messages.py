"""Messages in the form that a chat template reads, and what is tried where it refuses them.

A message here is OpenAI's: a role, content (a text, a list of text parts, or None), and what else it has. ``fitted``
gives a template what its profile says it takes. ``relaxed`` are the other forms of the same conversation, in the order
in which they are tried; what they have in common is that no text is lost. docs/api.md has the rule for users.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.chat_template import check_time
from diptych.serving.answers.template_profile import TemplateProfile, reads_only_parts

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first that a message has is its reasoning
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
INCOMPLETE = "incomplete"  # the argument that holds the text of a call which is no JSON object
_SYSTEM = ("system", "developer")
_BETWEEN = "\n\n"  # what stands between messages that become one
_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHORT_ID = 9  # what the templates of Mistral want


def readable(messages: Sequence[Message]) -> Messages:
    """The messages with parts of text alone. Raises InvalidRequestError for what is no message, and for parts that are
    no text; those of results of tools become a text that says so."""
    return [_readable(message, f"messages.{number}") for number, message in enumerate(messages)]


def fitted(messages: Messages, profile: TemplateProfile) -> Messages:
    """The messages as a template of this profile reads them. Fields that are null are left out."""
    return [_fitted(message, profile) for message in messages]


def relaxed(messages: Messages) -> Iterator[Messages]:
    """Other forms of a conversation that a template has refused, each to be fitted and tried in turn."""
    tried = [messages]
    for steps in _RULES:
        changed = messages
        for step in steps:
            changed = step(changed)
        if changed not in tried:
            tried.append(changed)
            yield changed


def is_whole(text: str, messages: Messages) -> bool:
    """Whether a prompt has the texts of all messages but the assistant's, of which templates leave parts out.

    A template keeps the order of messages, or puts those of the system in front: each text is first looked for behind
    the one before of its kind, so that a prompt is read twice, not once for each message."""
    known: set[str] = set()
    ends = {True: 0, False: 0}  # behind the last text of the system, and of the others
    for message in messages:
        if message.get("role") == "assistant":
            continue
        content = message.get("content")
        texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        is_system = message.get("role") in _SYSTEM
        for piece in map(str.strip, texts):
            if piece in known:
                continue
            check_time()
            begin = ends[is_system]
            at = text.find(piece, begin)
            if at < 0 and (at := text.find(piece, 0, begin + len(piece))) < 0:
                return False
            ends[is_system] = max(begin, at + len(piece))
            known.add(piece)
    return True


def flatten_content(content: Any, param: str) -> str:
    """The text of a message's content: a string, None, or parts of which only text is served."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return _text_of(text_parts(content, param))


def _text_of(parts: Sequence[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)


def text_parts(content: Any, param: str, *, leaves_out: bool = False) -> list[dict[str, str]]:
    """Parts of text, in the form that templates know. leaves_out: parts of other kinds become a text that says so.
    Raises InvalidRequestError."""
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            if not leaves_out or not isinstance(kind, str) or kind in TEXT_PARTS:
                raise InvalidRequestError(
                    f"content part {number} has type {kind!r}; this model reads text parts only",
                    param=f"{param}.{number}",
                )
            text = left_out(kind)
        parts.append({"type": "text", "text": text})
    return parts


def left_out(kind: str) -> str:
    """The text in the place of a part that the model cannot read. kind: its type, in any API's words."""
    word = next((word for word in ("image", "audio", "video", "document", "file") if word in kind), kind[:40])
    return f"[{word} left out: this model reads text only]"


def _readable(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is no object", param=where)
    content = message.get("content")
    if isinstance(content, str | None):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{where}.content is no text and no list of parts", param=f"{where}.content")
    return {**message, "content": text_parts(content, f"{where}.content", leaves_out=message.get("role") == "tool")}


def _fitted(message: Message, profile: TemplateProfile) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if value is not None}
    role, content = str(message.get("role")), fields.get("content")
    calls = fields.get("tool_calls")
    if content is None and calls and profile.null_content != "absent":
        fields["content"] = None if profile.null_content == "null" else ""
    elif content is not None:
        fields["content"] = _fitted_content(role, content, profile)
    if isinstance(calls, list):
        fields["tool_calls"] = [_fitted_call(call, profile) for call in calls]
    reasoning = next((fields[name] for name in REASONING_NAMES if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _fitted_content(role: str, content: Any, profile: TemplateProfile) -> Any:
    if isinstance(content, list) and role not in profile.parts:
        content = _text_of(content)
    if isinstance(content, str) and reads_only_parts(role, profile.only_parts):
        return [{"type": "text", "text": content}]
    return content


def _fitted_call(call: Any, profile: TemplateProfile) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _fitted_arguments(function["arguments"], profile)}}


def _fitted_arguments(given: Any, profile: TemplateProfile) -> Any:
    """Arguments as the template takes them. What is no JSON object stays the text that it was, where the template
    writes a text; else it is the value of INCOMPLETE."""
    known = given
    if isinstance(given, str):
        known = read_arguments(given)
        if known is None:
            return given if profile.arguments == "text" or profile.text_arguments else {INCOMPLETE: given}
    elif not isinstance(given, Mapping):
        return _fitted_arguments("{}" if given is None else _json(given), profile)
    return known if profile.arguments == "object" else given if isinstance(given, str) else _json(known)


def read_arguments(text: str) -> dict[str, Any] | None:
    """The object that a text of arguments is; raw control characters in its strings are taken. None: it is none."""
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        return None
    return {} if value is None else value if isinstance(value, dict) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(messages: Messages) -> Messages:
    """All content is text."""
    return [{**message, "content": flatten_content(message.get("content"), "messages")} for message in messages]


def _systems_first(messages: Messages) -> Messages:
    """The messages of the system and of the developer, as one of the system in front."""
    texts = [str(message["content"]) for message in messages if message.get("role") in _SYSTEM]
    others = [message for message in messages if message.get("role") not in _SYSTEM]
    return [{"role": "system", "content": _joined_text(texts)}, *others] if texts else others


def _neighbours_joined(messages: Messages) -> Messages:
    """Neighbours of one role are one message. Results of tools stay apart: each belongs to its call."""
    joined: Messages = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        check_time()
        neighbours = list(group)
        joined += [_joined(neighbours)] if role in ("user", "assistant") else neighbours
    return joined


def _joined(messages: Messages) -> dict[str, Any]:
    """One message of several, all at once: to add one after the other would copy the first so often."""
    if len(messages) == 1:
        return messages[0]
    joined: dict[str, Any] = {}
    for message in messages:
        joined |= message
    joined["content"] = _joined_text([message["content"] for message in messages])
    for name in REASONING_NAMES:
        texts = [message[name] for message in messages if isinstance(message.get(name), str)]
        if texts:
            joined[name] = _joined_text(texts)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {**joined, "tool_calls": calls} if calls else joined


def _joined_text(texts: Sequence[str]) -> str:
    return _BETWEEN.join(text for text in texts if text)


def _behind_results(messages: Messages) -> Messages:
    """What a user says right behind the results of tools belongs to the last of them."""
    joined: Messages = []
    said: list[str] = []  # behind the last result
    for message in messages:
        if joined and message.get("role") == "user" and joined[-1].get("role") == "tool":
            said.append(message["content"])
            continue
        _add_text(joined, said)
        said = []
        joined.append(message)
    _add_text(joined, said)
    return joined


def _add_text(messages: Messages, texts: Sequence[str]) -> None:
    """Put texts behind that of the last message."""
    if texts:
        messages[-1] = {**messages[-1], "content": _joined_text([messages[-1]["content"], *texts])}


def _system_in_user(messages: Messages) -> Messages:
    """The message of the system stands in front of what the user says first."""
    if not messages or messages[0].get("role") != "system":
        return messages
    system, *others = messages
    for number, message in enumerate(others):
        if message.get("role") == "user":
            others[number] = {**message, "content": _joined_text([system["content"], message["content"]])}
            return others
    return [{**system, "role": "user"}, *others]


def _short_ids(messages: Messages) -> Messages:
    """Ids of calls with nine letters and digits; those that have them stay."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [
            {**call, "id": short_id(str(call.get("id", number)))} if isinstance(call, Mapping) else call
            for number, call in enumerate(calls)
        ]
    return changed


def short_id(given: str) -> str:
    """An id of a call in nine letters and digits; one that is such stays."""
    if len(given) == _SHORT_ID and given.isascii() and given.isalnum():
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
    characters = []
    for _ in range(_SHORT_ID):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[digit])
    return "".join(characters)


def _reasoning_in_content(messages: Messages) -> Messages:
    """Reasoning beside content and calls stands in front of the content."""
    changed = []
    for message in messages:
        known = [message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)]
        if known and message.get("content") and message.get("tool_calls"):
            message = {name: value for name, value in message.items() if name not in REASONING_NAMES}
            message["content"] = _joined_text([known[0], message["content"]])
        changed.append(message)
    return changed


_Step = Callable[[Messages], Messages]
_ORDERED: tuple[_Step, ...] = (_plain, _systems_first, _neighbours_joined)
_RULES: tuple[tuple[_Step, ...], ...] = (
    (_plain,),
    (_plain, _short_ids),
    (_plain, _reasoning_in_content),
    _ORDERED,
    (*_ORDERED, _short_ids),
    (*_ORDERED, _reasoning_in_content),
    (*_ORDERED, _behind_results),
    (*_ORDERED, _behind_results, _short_ids),
    (*_ORDERED, _system_in_user, _neighbours_joined),
    (*_ORDERED, _system_in_user, _neighbours_joined, _behind_results, _short_ids),
)
