"""Answers as models write them, in each format: their texts, and the calls in them."""

import json
import random
from typing import Any

WORDS = (
    "the",
    "weather in",
    "Zürich",
    "is",
    "5 < 6",
    "{braces}",
    '"quoted"',
    "back\\slash",
    "日本",
    "a]b",
    "[list]",
    "\n",
    "  ",
)
NAMES = ("get_weather", "search.web", "f")
FORMATS = (
    "hermes",
    "qwen_xml",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_args",
    "harmony",
    "deepseek",
    "deepseek_v31",
)


def _words(rnd: random.Random, most: int = 6) -> str:
    return " ".join(rnd.choice(WORDS) for _ in range(rnd.randrange(1, most)))


def _value(rnd: random.Random, depth: int = 0) -> Any:
    kind = rnd.randrange(7 if depth < 2 else 5)
    if kind == 5:
        return [_value(rnd, depth + 1) for _ in range(rnd.randrange(3))]
    if kind == 6:
        return {f"k{number}": _value(rnd, depth + 1) for number in range(rnd.randrange(3))}
    return (_words(rnd), rnd.randrange(1000), rnd.random(), rnd.random() < 0.5, None)[kind]


def _arguments(rnd: random.Random, texts_only: bool) -> dict[str, Any]:
    make = (lambda: _words(rnd).strip() or "x") if texts_only else (lambda: _value(rnd))
    return {rnd.choice(("city", "days", "query", "path"))[: 2 + number]: make() for number in range(rnd.randrange(3))}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def written(name: str, rnd: random.Random) -> tuple[str, str, str, list[tuple[str, dict[str, Any]]]]:
    """A text in the format ``name``, its content, its reasoning, and its calls."""
    has_reasoning = name not in ("llama3_json", "pythonic", "mistral", "mistral_args") and rnd.random() < 0.6
    is_bare = name in ("llama3_json", "pythonic")  # content or calls, never both
    num_calls = rnd.choice((0, 1, 1, 2, 3))
    reasoning = _words(rnd).strip() if has_reasoning else ""
    content = _words(rnd).strip() if (not num_calls if is_bare else rnd.random() < 0.7) else ""
    content = content.replace("[", "(") if name == "pythonic" else content
    texts_only = name == "qwen_xml"
    calls = [(rnd.choice(NAMES), _arguments(rnd, texts_only)) for _ in range(num_calls)]
    if name == "harmony":
        return _harmony(rnd, content, reasoning, calls), content, reasoning, calls
    text = f"<think>\n{reasoning}\n</think>\n\n" if has_reasoning else ""
    return text + content + _calls(name, rnd, calls), content, reasoning, calls


def _calls(name: str, rnd: random.Random, calls: list[tuple[str, dict[str, Any]]]) -> str:
    if not calls:
        return ""
    as_objects = [{"name": called, "arguments": arguments} for called, arguments in calls]
    if name == "hermes":
        return "".join(f"\n<tool_call>\n{_dump(call)}\n</tool_call>" for call in as_objects)
    if name == "qwen_xml":
        tags = [
            "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call["arguments"].items())
            for call in as_objects
        ]
        pairs = zip(calls, tags, strict=True)
        return "".join(
            f"\n<tool_call>\n<function={call[0]}>\n{inside}</function>\n</tool_call>" for call, inside in pairs
        )
    if name == "llama3_json":
        made = "; ".join(f'{{"name": "{called}", "parameters": {_dump(arguments)}}}' for called, arguments in calls)
        return rnd.choice(("", "<|python_tag|>")) + made
    if name == "pythonic":
        made = ", ".join(
            f"{called}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for called, arguments in calls
        )
        return f"[{made}]"
    if name == "mistral":
        return f"[TOOL_CALLS]{_dump(as_objects)}"
    if name == "mistral_args":
        return "".join(f"[TOOL_CALLS]{called}[ARGS]{_dump(arguments)}" for called, arguments in calls)
    old = name == "deepseek"
    made = "\n".join(
        f"<｜tool▁call▁begin｜>{'function<｜tool▁sep｜>' if old else ''}{called}"
        + (f"\n```json\n{_dump(arguments)}\n```" if old else f"<｜tool▁sep｜>{_dump(arguments)}")
        + "<｜tool▁call▁end｜>"
        for called, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def _harmony(rnd: random.Random, content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    messages = []
    if reasoning:
        messages.append(f"<|channel|>analysis<|message|>{reasoning}<|end|>")
    if content:
        messages.append(f"<|channel|>final<|message|>{content}<|{'end' if calls else 'return'}|>")
    for name, arguments in calls:
        head = rnd.choice(
            (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json",
                f" to=functions.{name}<|channel|>commentary json",
            )
        )
        messages.append(f"{head}<|message|>{_dump(arguments)}<|call|>")
    return "<|start|>assistant".join(messages)
