"""What form a request wants its answer to have: response_format, and vLLM's structured_outputs and guided_* fields."""

import json
from collections.abc import Iterator
from typing import Any

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.grammar_text import Grammar, GrammarWriter
from diptych.serving.answers.grammar.schema_parts import Schema
from diptych.serving.api.protocol import GenerationBody

_FORMS = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def wants_structure(body: GenerationBody) -> bool:
    """Whether a request has any of the fields that make a grammar."""
    return any(getattr(body, name) is not None for name in ("response_format", "structured_outputs", *_GUIDED))


def wanted_grammar(body: GenerationBody, writer: GrammarWriter) -> Grammar | None:
    """The grammar that a request asks for; None where it asks for none. Raises InvalidRequestError."""
    wishes = list(_wishes(body))
    if not wishes:
        return None
    if len(wishes) > 1:
        first, second = wishes[0][0], wishes[1][0]
        raise InvalidRequestError(f"{first} and {second} exclude each other", param=second)
    param, form, value = wishes[0]
    whitespace = (body.structured_outputs or {}).get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        raise InvalidRequestError("structured_outputs.whitespace_pattern is no text", param="structured_outputs")
    if form == "json":
        described = (body.response_format or {}).get("json_schema") if param.startswith("response_format") else None
        is_strict = not isinstance(described, dict) or described.get("strict") is not False
        return writer.schema(_schema(value, param), param, whitespace, is_strict=is_strict)
    if form == "json_object":
        return writer.schema({"type": "object"}, param, whitespace)
    if form == "choice":
        if (
            not isinstance(value, list)
            or not 0 < len(value) <= edge_limits.CHOICES
            or not all(isinstance(x, str) for x in value)
        ):
            raise InvalidRequestError(f"{param} is no list of 1 to {edge_limits.CHOICES} texts", param=param)
        return writer.choice(value, param)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{param} is no text", param=param)
    if form == "regex":
        return writer.regex(value, param)
    return Grammar("", param=param, foreign=value)


def _wishes(body: GenerationBody) -> Iterator[tuple[str, str, Any]]:
    """(field, form, value) of everything that is asked for."""
    wanted = body.response_format or {}
    kind = wanted.get("type", "text")
    if kind == "json_schema":
        described = wanted.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise InvalidRequestError(
                "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
            )
        yield "response_format.json_schema.schema", "json", described["schema"]
    elif kind == "json_object":
        yield "response_format", "json_object", True
    elif kind != "text":
        raise InvalidRequestError(
            f"response_format.type is {str(kind)[:40]!r}; one of text, json_object, json_schema",
            param="response_format.type",
        )
    for name, value in (body.structured_outputs or {}).items():
        if value is None or value is False:
            continue
        if name in _FORMS:
            yield f"structured_outputs.{name}", name, value
        elif name == "structural_tag":
            raise InvalidRequestError(
                "structured_outputs.structural_tag is not supported", param="structured_outputs", code="unsupported"
            )
    for name, form in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            yield name, form, value


def _schema(given: Any, param: str) -> Schema:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{param} is no valid JSON", param=param) from None
    if not isinstance(given, dict | bool):
        raise InvalidRequestError(f"{param} is no JSON schema", param=param)
    return given
