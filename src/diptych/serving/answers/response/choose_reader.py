"""Which reader a field of calls has."""

from collections.abc import Mapping
from typing import Any

from diptych.serving.answers.response.call_readers import CallReader, JsonCalls, NamedCall, Tools
from diptych.serving.answers.response.response_template import ResponseField, Source
from diptych.serving.answers.response.tagged_calls import TaggedCall
from diptych.serving.answers.response.whole_calls import PythonCalls, WholeCalls

_JSON_ARGUMENTS = {"allow_non_json", "unquoted_keys", "string_delims"}


def reader_of(field: ResponseField, mark: str, captures: Mapping[str, str], tools: Tools) -> CallReader | None:
    """The reader of a field that was opened by this mark, with these captures. None where the mark names a tool that
    the request does not have."""
    is_named = len(field.name_source) == 1 and field.name_source[0] in captures
    is_named = is_named and field.arguments_source == ("content",)
    name = captures[field.name_source[0]].strip() if is_named else ""
    if is_named and name not in tools:
        return None
    if field.tags is not None:
        wrapper = field.tags.form.wrapper
        return TaggedCall(name, field.tags, tools[name], is_wrapped=bool(wrapper) and wrapper in mark)
    if field.content == "python-calls":
        return PythonCalls(tools)
    if field.content == "json" and set(field.content_args) <= _JSON_ARGUMENTS:
        marks = [(str(pair[0]), str(pair[1])) for pair in field.content_args.get("string_delims", ())]
        if is_named:
            return NamedCall(name, field.close, marks)
        depth = 1 if field.each else 2
        if len(field.name_source) == len(field.arguments_source) == depth:
            keys = (field.name_source[-1], field.arguments_source[-1])
            needs = field.needs_arguments
            return JsonCalls(keys, tools, field.close, marks, needs_arguments=needs)

    def read(element: Any) -> tuple[str, Any]:
        scope = {**captures, **(element if field.each else {"content": element})}
        return str(_follow(scope, field.name_source)).strip(), _follow(scope, field.arguments_source)

    return WholeCalls(field.content, field.content_args, read, tools, field.close, is_list=field.each)


def _follow(scope: Mapping[str, Any], source: Source) -> Any:
    value: Any = scope
    for key in source:
        value = value[key]
    return value
