"""Which format the answers of a model are read in, and whether its chat template or our own words describe tools."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diptych.control.errors import ConfigError
from diptych.serving.answers.response.bundled_templates import TEMPLATES
from diptych.serving.answers.response.recognise import recognise
from diptych.serving.answers.response.response_template import (
    FieldKind,
    ResponseTemplate,
    load_response_template,
)

GENERIC = "generic"
OWN_CHOICES = ("auto", GENERIC, "none")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """template: None where nothing but content is read. is_generic: tools are described in the first message, and calls
    of earlier turns are text (see generic_tools.py). tools_error: why a request cannot have tools; "": it can."""

    template: ResponseTemplate | None
    is_generic: bool = False
    tools_error: str = ""

    @property
    def name(self) -> str:
        """Name of the format of tool calls, for people."""
        if self.tools_error or self.template is None:
            return "none"
        return GENERIC if self.is_generic else self.template.name


def tool_formats() -> list[str]:
    """The names of all formats of calls."""
    return [name for name, spec in TEMPLATES.items() if "tool_calls" in spec["fields"] and name != GENERIC]


def check_tool_format(name: str) -> None:
    """Raise ConfigError for a format that there is not."""
    known = [*OWN_CHOICES, *sorted(tool_formats())]
    if name not in known:
        raise ConfigError(f"tool_format is {name!r}; one of {', '.join(known)}", param="tool_format")


def answer_format(
    chat_templates: Mapping[str, str], own: Any = None, tool_format: str = "auto", *, takes_tools: bool
) -> AnswerFormat:
    """The format of a model with these chat templates, by their names. own: the description that its files bring.
    tool_format: "auto", "generic", "none" or the name of a format. takes_tools: the chat template renders tools. Raises
    ConfigError for another format."""
    check_tool_format(tool_format)
    try:
        template = _native(chat_templates, own, tool_format)
    except ConfigError as error:
        return AnswerFormat(None, tools_error=error.message)
    if tool_format == "none":
        refusal = "this server serves no tools (--tool-format none)"
        return AnswerFormat(None if template is None else _without_calls(template), tools_error=refusal)
    if not chat_templates:
        return AnswerFormat(template, tools_error="this model has no chat template")
    if tool_format not in OWN_CHOICES and not takes_tools:
        refusal = "the chat template of this model takes no tools; --tool-format generic describes them in a message"
        return AnswerFormat(template, tools_error=refusal)
    has_calls = template is not None and template.has(FieldKind.CALLS)
    if tool_format != GENERIC and takes_tools and has_calls:
        return AnswerFormat(template)
    return AnswerFormat(_with_generic_calls(template), is_generic=True)


def _native(chat_templates: Mapping[str, str], own: Any, tool_format: str) -> ResponseTemplate | None:
    if tool_format not in OWN_CHOICES:
        return load_response_template(tool_format, TEMPLATES[tool_format])
    if own is not None:
        return load_response_template("of the model", own)
    name = recognise(chat_templates.values())
    return None if name is None else load_response_template(name, TEMPLATES[name])


def _without_calls(template: ResponseTemplate) -> ResponseTemplate:
    fields = tuple(field for field in template.fields if field.kind is not FieldKind.CALLS)
    return replace(template, fields=fields, calls=None, id_length=0)


def _with_generic_calls(template: ResponseTemplate | None) -> ResponseTemplate:
    """The generic format, with the reasoning and the content of this one."""
    generic = load_response_template(GENERIC, TEMPLATES[GENERIC])
    if template is None:
        return generic
    rest = _without_calls(template)
    calls = tuple(field for field in generic.fields if field.kind is FieldKind.CALLS)
    return replace(rest, fields=calls + rest.fields, calls=generic.calls, texts=rest.texts + generic.texts)
