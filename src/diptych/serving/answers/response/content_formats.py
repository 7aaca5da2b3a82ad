"""The formats that tool calls are written in, read whole: JSON and its dialects, tags, lines, Python calls.

Each reads the text of a closed field; text that it cannot read raises ValueError.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from diptych.serving.answers.response.pattern import find_all

MAX_PYTHON = 100_000  # characters that are given to the Python parser
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)(\s*:)")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def read_json(text: str, arguments: Mapping[str, Any]) -> Any:
    """JSON. unquoted_keys: keys may lack their quotes. string_delims: pairs of marks that strings may have instead.
    allow_non_json: other text is a string."""
    try:
        return _loads(_standard_json(text, arguments))
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _standard_json(text: str, arguments: Mapping[str, Any]) -> str:
    """The text with quoted keys and strings, outside of strings only."""
    pieces, at = [], 0
    marks = [(str(mark[0]), str(mark[1])) for mark in arguments.get("string_delims", ())]
    is_bare = bool(arguments.get("unquoted_keys"))
    if not marks and not is_bare:
        return text
    plain: list[str] = []

    def close_plain() -> None:
        outside = "".join(plain)
        plain.clear()
        pieces.append(_BARE_KEY.sub(r'\1"\2"\3', outside) if is_bare else outside)

    while at < len(text):
        mark = next((mark for mark in marks if text.startswith(mark[0], at)), None)
        if mark is not None:
            end = text.find(mark[1], at + len(mark[0]))
            if end < 0:
                raise ValueError(f"a string that begins with {mark[0]} has no end")
            close_plain()
            pieces.append(json.dumps(text[at + len(mark[0]) : end], ensure_ascii=False))
            at = end + len(mark[1])
        elif text[at] == '"' and (found := _STRINGS.match(text, at)):
            close_plain()
            pieces.append(found.group())
            at = found.end()
        else:
            plain.append(text[at])
            at += 1
    close_plain()
    return "".join(pieces)


def read_tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """<key>value</key>, as the tag_pattern says; merge_duplicates: values of a repeated key become a list."""
    read: dict[str, Any] = {}
    for match in find_all(arguments["tag_pattern"], text):
        key, value = (text[slice(*match.groups[name])] if name in match.groups else "" for name in ("key", "value"))
        value = _value(value, arguments)
        if key in read and arguments.get("merge_duplicates"):
            read[key] = [*(read[key] if isinstance(read[key], list) else [read[key]]), value]
        else:
            read[key] = value
    return read


def read_lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A key and a value on each line."""
    read = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, mark, value = line.partition(arguments.get("kv_sep", ":"))
        if mark:
            read[key.strip()] = _value(value.strip(), arguments)
    return read


def _value(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    return CONTENT_FORMATS[parser.get("name", "text")](text, parser.get("args", {})) if parser else text


def read_python_calls(text: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``[name(key=value, ...), ...]``, values as Python literals."""
    if len(text) > MAX_PYTHON:
        raise ValueError(f"more than {MAX_PYTHON} characters of calls")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(str(error)) from None


def _python_call(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("no call with named arguments")
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("arguments with **")
        values[keyword.arg] = ast.literal_eval(_with_constants(keyword.value))
    json.dumps(values, allow_nan=False)  # a set, bytes, a complex number or a key that JSON does not have
    return {"name": ast.unparse(call.func), "arguments": values}


def _with_constants(value: ast.expr) -> ast.expr:
    """JSON's true, false and null are names in Python."""
    known = {"true": True, "false": False, "null": None}
    for node in ast.walk(value):
        for name, child in ast.iter_fields(node):
            if isinstance(child, ast.Name) and child.id in known:
                setattr(node, name, ast.Constant(known[child.id]))
            elif isinstance(child, list):
                child[:] = [
                    ast.Constant(known[item.id]) if isinstance(item, ast.Name) and item.id in known else item
                    for item in child
                ]
    if isinstance(value, ast.Name) and value.id in known:
        return ast.Constant(known[value.id])
    return value


def _read_text(text: str, arguments: Mapping[str, Any]) -> str:
    return text.strip() if arguments.get("strip", True) else text


CONTENT_FORMATS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _read_text,
    "int": lambda text, arguments: int(text),
    "float": lambda text, arguments: float(text),
    "bool": lambda text, arguments: text.strip().lower() in ("true", "1"),
    "json": read_json,
    "xml-inline": read_tags,
    "kv-lines": read_lines,
    "python-calls": read_python_calls,
}
