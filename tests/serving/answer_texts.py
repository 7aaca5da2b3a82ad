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
    "gemma4",
    "functiongemma",
    "glm",
    "glm47",
    "minimax_m2",
    "deepseek_v32",
    "deepseek_v4",
    "seed_oss",
    "kimi_k2",
    "lfm2",
    "granite",
    "granite_20b",
    "xlam",
    "functionary_v31",
    "functionary_v32",
    "cohere",
    "command_r",
    "nemotron_v2",
    "tool_calls",
    "minimax_m1",
    "functools",
    "internlm2",
)
THOUGHTS = {
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "mistral_args": ("[THINK]", "[/THINK]"),
    **dict.fromkeys(
        ("hermes", "qwen_xml", "deepseek", "deepseek_v31", "glm", "glm47", "minimax_m2", "deepseek_v32", "deepseek_v4",
         "kimi_k2", "lfm2", "granite", "nemotron_v2", "tool_calls", "minimax_m1"), ("<think>\n", "\n</think>\n\n"),
    ),
}  # fmt: skip
BARE = ("llama3_json", "pythonic", "xlam", "functionary_v32")  # content or calls, never both
TAGS = ("qwen_xml", "glm", "glm47", "minimax_m2", "deepseek_v32", "deepseek_v4", "seed_oss")


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
    has_reasoning = (name in THOUGHTS or name == "harmony") and rnd.random() < 0.6
    num_calls = rnd.choice((0, 1, 1, 2, 3))
    reasoning = _words(rnd).strip() if has_reasoning else ""
    content = _words(rnd).strip() if (not num_calls if name in BARE else rnd.random() < 0.7) else ""
    content = content.replace("[", "(") if name in ("pythonic", "xlam") else content
    calls = [(rnd.choice(NAMES), _arguments(rnd, name in TAGS)) for _ in range(num_calls)]
    if name == "harmony":
        return _harmony(rnd, content, reasoning, calls), content, reasoning, calls
    begin, end = THOUGHTS.get(name, ("", ""))
    text = f"{begin}{reasoning}{end}" if has_reasoning else ""
    if name == "functionary_v32" and content:
        text += "all\n"
    elif name == "cohere" and content:
        return (
            f"{text}<|START_RESPONSE|>{content}<|END_RESPONSE|>" + _calls(name, rnd, calls),
            content,
            reasoning,
            calls,
        )
    return text + content + _calls(name, rnd, calls), content, reasoning, calls


JSON_FORMS = {  # what stands before, between and behind the name and the arguments of each call
    "deepseek_v31": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]", ""),
    "kimi_k2": ("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "functionary_v31": ("<function=", ">", "</function>"),
    "granite_20b": ('<function_call> {"name": "', '", "arguments": ', "}"),
    "internlm2": ('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"),
    "hermes": ('\n<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
}
LISTS = {  # what stands around a list of calls
    "mistral": ("[TOOL_CALLS][", ", ", "]"),
    "granite": ("<|tool_call|>[", ", ", "]"),
    "xlam": ("[", ",\n", "]"),
    "nemotron_v2": ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "tool_calls": ("\n<tool_calls>[", ", ", "]</tool_calls>"),
    "minimax_m1": ("<tool_calls>\n", "\n", "\n</tool_calls>"),
    "functools": ("functools[", ", ", "]"),
    "cohere": ("<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>"),
    "command_r": ("Action: ```json\n[\n", ",\n", "\n]```"),
}


def _calls(name: str, rnd: random.Random, calls: list[tuple[str, dict[str, Any]]]) -> str:
    if not calls:
        return ""
    if name in JSON_FORMS:
        before, between, behind = JSON_FORMS[name]
        made = "".join(f"{before}{called}{between}{_dump(arguments)}{behind}" for called, arguments in calls)
        sections = {"kimi_k2": "<|tool_calls_section_%s|>", "deepseek_v31": "<｜tool▁calls▁%s｜>"}
        return sections[name] % "begin" + made + sections[name] % "end" if name in sections else made
    if name in LISTS:
        before, between, behind = LISTS[name]
        keys = ("tool_name", "parameters") if name in ("cohere", "command_r") else ("name", "arguments")
        objects = [_dump({keys[0]: called, keys[1]: arguments}) for called, arguments in calls]
        return before + between.join(objects) + behind
    if name in TAGS:
        return _tags(name, calls)
    if name == "llama3_json":
        made = "; ".join(f'{{"name": "{called}", "parameters": {_dump(arguments)}}}' for called, arguments in calls)
        return rnd.choice(("", "<|python_tag|>")) + made
    if name in ("pythonic", "lfm2"):
        made = ", ".join(
            f"{called}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for called, arguments in calls
        )
        return f"<|tool_call_start|>[{made}]<|tool_call_end|>" if name == "lfm2" else f"[{made}]"
    if name in ("gemma4", "functiongemma"):
        begin, end, mark = ("<|tool_call>", "<tool_call|>", '<|"|>') if name == "gemma4" else (
            "<start_function_call>", "<end_function_call>", "<escape>")  # fmt: skip
        return "".join(f"{begin}call:{called}{_marked(arguments, mark)}{end}" for called, arguments in calls)
    if name == "functionary_v32":
        return ">>>".join(f"{called}\n{_dump(arguments)}" for called, arguments in calls)
    assert name == "deepseek"
    made = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{called}\n```json\n{_dump(arguments)}\n```<｜tool▁call▁end｜>"
        for called, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def _marked(value: Any, mark: str) -> str:
    """A value as Gemma writes it."""
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_marked(item, mark)}" for key, item in value.items()) + "}"
    return f"[{','.join(_marked(item, mark) for item in value)}]" if isinstance(value, list) else _dump(value)


def _tags(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls with a tag for each argument."""
    if name in ("glm", "glm47"):
        gap = "\n" if name == "glm" else ""
        pair = f"<arg_key>%s</arg_key>{gap}<arg_value>%s</arg_value>{gap}"
        before, between, behind, first, last = "\n<tool_call>", gap, "</tool_call>", "", ""
    elif name == "qwen_xml":
        pair = "<parameter=%s>\n%s\n</parameter>\n"
        before, between, behind, first, last = "\n<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "", ""
    elif name == "seed_oss":
        pair = "<parameter=%s>%s</parameter>\n"
        before, between, first, last = "\n<seed:tool_call>\n<function=", ">\n", "", ""
        behind = "</function>\n</seed:tool_call>"
    else:
        prefix = "" if name == "minimax_m2" else "｜DSML｜"
        typed = ' string="true"' if prefix else ""
        wrapper = {
            "": "minimax:tool_call",
            "deepseek_v32": "｜DSML｜function_calls",
            "deepseek_v4": "｜DSML｜tool_calls",
        }
        first, last = (f"{mark}{wrapper[name if prefix else '']}>" for mark in ("\n<", "\n</"))
        pair = f'<{prefix}parameter name="%s"{typed}>%s</{prefix}parameter>\n'
        before, between, behind = f'\n<{prefix}invoke name="', '">\n', f"</{prefix}invoke>"
    made = "".join(
        before + called + between + "".join(pair % item for item in arguments.items()) + behind
        for called, arguments in calls
    )
    return first + made + last


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
