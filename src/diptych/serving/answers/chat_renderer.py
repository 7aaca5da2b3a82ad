"""Conversations to prompts: the chat templates of a model with what each of them takes.

A conversation is given to a template in the form of its profile; where the template refuses it, in the other forms of
template_messages.relaxed, and only then refused, with the template's words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2

from diptych.control.errors import ChatTemplateError, InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.answers.chat_template import ChatTemplate, OutOfTimeError, check_time, limited, said, within
from diptych.serving.answers.template_messages import Message, Messages, fitted, is_whole, readable, relaxed
from diptych.serving.answers.template_profile import TemplateProfile, probe

PROBE_LIMIT_S = 1.0  # of processor time, for all probes of a template
_END = (
    "CONTINUED_MESSAGE_ENDS_HERE "  # in front of the space: where the prompt ends. Behind it: whether spaces are kept
)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A template and its profile. template: None where it cannot be used at all, for the reason in profile.error."""

    template: ChatTemplate | None
    profile: TemplateProfile


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """The chat templates of a model. sources: by name; "default" is rendered, or "tool_use" where a request has tools
    and there is one. special_tokens: texts by the names that templates use."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    _loaded: dict[str, _Loaded] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            self._loaded[name] = _load(source, self.special_tokens)

    @property
    def profile(self) -> TemplateProfile | None:
        """Profile of the template that is rendered without tools; None if there is no such template."""
        return self._loaded[self._name({})].profile if self._loaded else None

    @property
    def tools_profile(self) -> TemplateProfile | None:
        """Profile of the template that is rendered with tools."""
        return self._loaded[self._name({"tools": True})].profile if self._loaded else None

    @property
    def is_usable(self) -> bool:
        """Whether there is a template that a conversation can be rendered with."""
        return any(loaded.template is not None for loaded in self._loaded.values())

    @property
    def complaints(self) -> list[str]:
        """What a user should know of the templates when the server starts, a sentence each."""
        said = []
        for name, loaded in self._loaded.items():
            which = "the chat template of this model" + (f" ({name})" if len(self._loaded) > 1 else "")
            if loaded.template is None:
                said.append(f"{which} cannot be used ({loaded.profile.error}): chats are refused, completions served")
            elif loaded.profile.error:
                said.append(f"{which} renders no plain conversation ({loaded.profile.error})")
            said += [f"{which} {warning}" for warning in loaded.profile.warnings]
        return said

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any], *, continues: bool = False) -> str:
        """The prompt of a conversation. arguments: variables of the template. continues: the last message is not
        closed, so that an answer goes on with its text.

        Raises InvalidRequestError, with the template's words where it refuses; ChatTemplateError where the template
        itself is at fault."""
        if not self._loaded:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        loaded = self._loaded[self._name(arguments)]
        if loaded.template is None:
            raise ChatTemplateError(
                f"the chat template of this model cannot be used: {loaded.profile.error}; use /v1/completions"
            )
        variables = {**self.special_tokens, **arguments}
        variables.pop("messages", None)
        try:
            with limited(edge_limits.CHAT_PROCESSOR_S):
                known = readable(messages)
                if not continues:
                    return _rendered(loaded, known, variables)
                return _cut(_rendered(loaded, _marked(known), {**variables, "add_generation_prompt": False}))
        except OutOfTimeError:
            limit_s = edge_limits.CHAT_PROCESSOR_S
            raise InvalidRequestError(
                f"the chat template needs more than {limit_s:g} s of processor time for these {len(messages)} messages",
                param="messages",
                code="conversation_too_long",
            ) from None

    def _name(self, arguments: Mapping[str, Any]) -> str:
        if arguments.get("tools") is not None and "tool_use" in self._loaded:
            return "tool_use"
        return "default" if "default" in self._loaded else next(iter(self._loaded))


def _load(source: str, special_tokens: Mapping[str, str]) -> _Loaded:
    def load() -> _Loaded:
        template = ChatTemplate(source)
        profile = probe(lambda messages, **given: template.render(messages, **{**special_tokens, **given}), source)
        lacks = [f"calls {name}(), which no renderer has" for name in template.missing]
        return _Loaded(template, replace(profile, warnings=tuple(lacks)))

    try:
        return within(PROBE_LIMIT_S, load)
    except OutOfTimeError:
        error = f"it does not end within {PROBE_LIMIT_S:g} s of processor time"
    except Exception as failure:
        error = said(failure)
    return _Loaded(None, TemplateProfile(error=error))


def _rendered(loaded: _Loaded, messages: Messages, variables: Mapping[str, Any]) -> str:
    template, profile = loaded.template, loaded.profile
    assert template is not None
    try:
        return template.render(fitted(messages, profile), **variables)
    except Exception as error:  # raised by the code of the template
        first = error
    incomplete: list[str] = []  # renderings that lack a text of the conversation
    for form in relaxed(messages):
        check_time()
        try:
            text = template.render(fitted(form, profile), **variables)
        except Exception:  # its own code raised; the first error is the one that is reported
            continue
        if is_whole(text, messages):
            return text
        incomplete.append(text)
    if incomplete:
        return incomplete[0]
    raise _refusal(first, loaded)


def _refusal(error: Exception, loaded: _Loaded) -> InvalidRequestError | ChatTemplateError:
    words = said(error)
    is_own = isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.TemplateRuntimeError)
    if is_own:
        return InvalidRequestError(f"the chat template refused: {words}", param="messages")
    lacks = loaded.template is not None and any(f"'{name}' is undefined" in words for name in loaded.template.missing)
    if lacks or loaded.profile.error:
        return ChatTemplateError(f"the chat template of this model failed: {words}; use /v1/completions")
    return InvalidRequestError(f"the chat template failed: {words}", param="messages")


def _marked(messages: Messages) -> Messages:
    """The messages with a mark at the end of the last one's text."""
    where = f"messages.{len(messages) - 1}"
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _END}]
    if not content:
        raise InvalidRequestError("the last message has no content that an answer could continue", param=where)
    *before, part = content
    return [*messages[:-1], {**last, "content": [*before, {**part, "text": part["text"] + _END}]}]


def _cut(text: str) -> str:
    """The prompt up to the mark; where the template has taken white space from the end of the message, without it."""
    mark = _END.rstrip()
    at = text.rfind(mark)
    if at < 0:
        raise InvalidRequestError(
            "the chat template does not write the last message, which cannot be continued", param="messages"
        )
    kept = text[:at]
    return kept if text.startswith(_END, at) else kept.rstrip()
