"""What a chat template takes, found by rendering small conversations with it once, when a model is loaded.

Conversations are then given to the template in the form that it reads (template_messages.py). Imports neither torch
nor transformers. Compiling and probing a published template takes 30 ms (median; at most 0.16 s).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from diptych.serving.answers.chat_template import said

Fate = Literal["taken", "left out", "refused"]
NullContent = Literal["absent", "null", "empty"]  # how a message without text has its content
ArgumentsForm = Literal["object", "text"]  # of a call
Render = Callable[..., str]
ROLES = ("system", "user", "assistant", "tool")

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probes",
        "parameters": {"type": "object", "properties": {"probe_city": {"type": "string"}}, "required": ["probe_city"]},
    },
}
_ARGUMENTS = {"probe_city": "probe_bern", "probe_days": 3}
_ARGUMENTS_TEXT = '{"probe_city": "probe_bern", "probe_days": 3}'
_CUT = '{"probe_city": "probe_b'
_DOCUMENT = {"title": "probe_title", "text": "probe_document", "contents": "probe_document"}
_PRINTED_PART = re.compile(r"""["']text["']\s*:\s*["']probe_""")


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What a template does with conversations.

    error: what it says of the plainest conversation, where it renders none; else "". warnings: what it needs and no
    renderer has. null_content: how a message without content but with calls is given. arguments: of calls, the form it
    reads; text_arguments: it also writes a text that is no object. parts: roles whose content may be a list of several
    parts; only_parts: roles whose content must be a list. system (in front), later_system, several_systems, developer,
    same_role (two messages of the user in a row): what becomes of such messages. tools, calls, results, documents:
    whether it writes them. reasoning: the field in which it reads the reasoning of earlier answers; None where it
    writes none. answers: the format in which its model answers, as tool calls and reasoning are read; None where it
    shows no known one.
    """

    error: str = ""
    warnings: tuple[str, ...] = ()
    null_content: NullContent = "absent"
    arguments: ArgumentsForm = "object"
    text_arguments: bool = False
    parts: tuple[str, ...] = ()
    only_parts: tuple[str, ...] = ()
    system: Fate = "refused"
    later_system: Fate = "refused"
    several_systems: Fate = "refused"
    developer: Fate = "refused"
    same_role: Fate = "refused"
    tools: bool = False
    calls: bool = False
    results: bool = False
    documents: bool = False
    reasoning: str | None = None
    answers: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def probe(render: Render, source: str) -> TemplateProfile:
    """The profile of a template. render: messages and variables to text; raises what the template raises. source: of
    the template. answers: see TemplateProfile."""
    prober = _Prober(render)
    failure = prober.failure()
    prober.find_roles(_CONVERSATIONS)
    null_content, arguments, calls = prober.call_form()
    history = prober.history(null_content, arguments)
    prober.find_roles({"tool": lambda content: [*history, {**_RESULT, "content": content}]})
    return TemplateProfile(
        error=failure,
        null_content=null_content,
        arguments=arguments,
        text_arguments=calls and prober.writes_text_arguments(null_content),
        parts=tuple(prober.parts),
        only_parts=tuple(prober.only_parts),
        system=prober.fate("probe_system", _said("system", "probe_system"), _USER),
        later_system=prober.fate("probe_system", _USER, _ASSISTANT, _said("system", "probe_system"), _USER),
        several_systems=prober.fate(
            "probe_second", _said("system", "probe_first"), _said("system", "probe_second"), _USER
        ),
        developer=prober.fate("probe_developer", _said("developer", "probe_developer"), _USER),
        same_role=prober.fate("probe_second", _said("user", "probe_first"), _said("user", "probe_second")),
        tools=prober.writes_tools(source),
        calls=calls,
        results="probe_result" in prober.text(*history, _RESULT, tools=[_TOOL]),
        documents="probe_document" in prober.text(_USER, documents=[_DOCUMENT]),
        reasoning=prober.reasoning_field(source, history),
    )


def reads_only_parts(role: str, only_parts: Sequence[str]) -> bool:
    """Whether the content of a role must be a list. Other roles than those known are read as the system is."""
    return (role if role in ROLES else "system") in only_parts


def _said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_USER, _ASSISTANT = _said("user", "probe_user"), _said("assistant", "probe_answer")
_RESULT = _said("tool", "probe_result", tool_call_id="abcdefghi", name="probe_tool")
_CONVERSATIONS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {  # a message with this content, by its role
    "user": lambda content: [_said("user", content)],
    "assistant": lambda content: [_USER, _said("assistant", content), _USER],
    "system": lambda content: [_said("system", content), _USER],
}


class _Prober:
    """Renders small conversations; a template that raises has no text. parts, only_parts: see TemplateProfile."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.parts: list[str] = []
        self.only_parts: list[str] = []

    def text(self, *messages: Mapping[str, Any], **variables: Any) -> str:
        """What the template writes; "" where it refuses."""
        return self._rendered(messages, variables) or ""

    def _rendered(self, messages: Any, variables: Mapping[str, Any]) -> str | None:
        try:
            return self._render([self._form(message) for message in messages], **variables)
        except Exception:
            return None

    def _form(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, str) or not reads_only_parts(str(message["role"]), self.only_parts):
            return message
        return {**message, "content": [{"type": "text", "text": content}]}

    def failure(self) -> str:
        """What the template says of the plainest conversations, where it renders none of them; else ""."""
        first: Exception | None = None
        for messages in ([_USER], [_said("system", "probe_system"), _USER], [_USER, _ASSISTANT, _USER]):
            for only_parts in ((), ROLES):
                self.only_parts = list(only_parts)
                try:
                    self._render([self._form(message) for message in messages])
                except Exception as error:
                    first = first or error
                    continue
                finally:
                    self.only_parts = []
                return ""
        return said(first) if first is not None else ""

    def find_roles(self, conversations: Mapping[str, Callable[[Any], list[dict[str, Any]]]]) -> None:
        """Fill in parts and only_parts: a role takes parts when the texts of two are written, and not the list itself;
        it takes nothing else when a mere text is lost and a list with it is not."""
        first, second = {"type": "text", "text": "probe_one"}, {"type": "text", "text": "probe_two"}
        for role, conversation in conversations.items():
            tools = [_TOOL] if role == "tool" else None
            if "probe_one" not in self.text(*conversation("probe_one"), tools=tools):
                # beside a message of this role, the other roles may want lists, too
                for others in (self.only_parts, list(ROLES)):
                    known, self.only_parts = self.only_parts, others
                    text = self.text(*conversation([first]), tools=tools)
                    self.only_parts = known
                    if "probe_one" in text and not _PRINTED_PART.search(text):
                        self.only_parts = [*self.only_parts, role]
                        break
            text = self.text(*conversation([first, second]), tools=tools)
            if "probe_one" in text and "probe_two" in text and not _PRINTED_PART.search(text):
                self.parts.append(role)

    def writes_tools(self, source: str) -> bool:
        """Whether tools are written; of a template that refuses them with this message alone, whether it names them."""
        text = self._rendered([_USER], {"tools": [_TOOL]})
        return "probe_tool" in text if text is not None else "tools" in source

    def fate(self, word: str, *messages: Mapping[str, Any]) -> Fate:
        """What becomes of a message with this word."""
        text = self._rendered(messages, {})
        return "refused" if text is None else "taken" if word in text else "left out"

    def history(self, null_content: str, arguments: str) -> list[dict[str, Any]]:
        """A call in the form that the template takes."""
        given = _ARGUMENTS if arguments == "object" else _ARGUMENTS_TEXT
        return [dict(_USER), _calling(null_content, given)]

    def call_form(self) -> tuple[NullContent, ArgumentsForm, bool]:
        """How content that is null and arguments are given so that the call is written, and whether it is at all.

        Without the key first, as transformers gives it; arguments first as an object, which a template that only
        prints them would write as Python does."""
        nulls: tuple[NullContent, ...] = ("absent", "null", "empty")
        forms: tuple[ArgumentsForm, ...] = ("object", "text")
        for null_content in nulls:
            for arguments in forms:
                history = self.history(null_content, arguments)
                text = self.text(*history, _RESULT, tools=[_TOOL]) or self.text(*history, tools=[_TOOL])
                if "probe_bern" in text and "probe_tool" in text and repr(_ARGUMENTS) not in text:
                    if arguments == "text" and _ARGUMENTS_TEXT not in text:
                        continue
                    return null_content, arguments, True
        return "absent", "object", False

    def writes_text_arguments(self, null_content: str) -> bool:
        """Whether a text of arguments is written, as it is or as JSON's string, so that it need not be an object."""
        history = [_USER, _calling(null_content, _CUT)]
        text = self.text(*history, _RESULT, tools=[_TOOL]) or self.text(*history, tools=[_TOOL])
        return _CUT in text or json.dumps(_CUT) in text

    def reasoning_field(self, source: str, history: list[dict[str, Any]]) -> str | None:
        """The name under which reasoning is read, where it is written in the turn that goes on or in earlier ones."""
        thought = {"reasoning_content": "probe_thought", "thinking": "probe_thought"}
        answer = {**_ASSISTANT, **thought}
        texts = (
            self.text(history[0], {**history[1], **thought}, _RESULT, tools=[_TOOL]),
            self.text(_USER, answer),
            self.text(_USER, answer, _USER),
        )
        if not any("probe_thought" in text for text in texts):
            return None
        return next((name for name in ("reasoning_content", "thinking") if name in source), None)


def _calling(null_content: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    return message if null_content == "absent" else {**message, "content": None if null_content == "null" else ""}
