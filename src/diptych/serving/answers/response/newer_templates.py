"""More descriptions of formats (see bundled_templates.py): of families with marks of their own."""

from typing import Any

_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_IN_CONTENT = {"type": "function", "function": "{content}"}
_EACH = {"function": {"name": "{name}", "arguments": "{arguments}"}}
_TEXT = {"content": "text"}


def _json(opening: str, close: str = "", transform: Any = _IN_CONTENT, **more: Any) -> dict[str, Any]:
    """A field of calls in JSON."""
    ends = {"close": close} if close else {}
    return {"open_pattern": opening, **ends, "repeats": True, "content": "json", "transform": transform, **more}


def _list_form(first: str, last: str, begin: str = '{"name": ', between: str = ', "arguments": ') -> dict[str, Any]:
    """How a grammar writes a JSON list of calls."""
    return {"first": first, "begin": begin, "between": between, "end": "}", "separator": ", ", "last": last}


_GLM_TAGS = {
    "key": r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>",
    "key_mark": "<arg_key>",
    "value_close": "</arg_value>",
    "end": "</tool_call>",
    "next": "<tool_call>",
}


def _glm(break_: str) -> dict[str, Any]:
    """GLM's tags, with this between them."""
    opening = r"\s*<tool_call>\s*(?P<name>[\w.:-]+)\s*(?=<arg_key>|</tool_call>)"
    return {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {"open_pattern": opening, "content": "tags", "content_args": _GLM_TAGS, "transform": _NAMED},
            "content": _TEXT,
        },
        "calls": {
            "begin": "<tool_call>",
            "between": break_,
            "end": "</tool_call>",
            "separator": "\n",
            "quotes_name": False,
            "arguments": "tags",
            "tags": {
                "begin": "<arg_key>",
                "middle": f"</arg_key>{break_}<arg_value>",
                "end": "</arg_value>",
                "gap": break_,
            },
        },
    }


def _xml(wrapper: str, prefix: str = "", think: Any = _THINK) -> dict[str, Any]:
    """``<invoke name="f"><parameter name="k">v</parameter></invoke>`` within a wrapper."""
    typed = r'(?: string="(?P<is_text>true|false)")?' if prefix else ""
    named = r'"(?P<name>[^"<>\n]+)"'
    return {
        "fields": {
            "reasoning_content": think,
            "tool_calls": {
                "open_pattern": rf"\s*(?:<{wrapper}>\s*)?<{prefix}invoke name={named}>",
                "close_pattern": rf"\s*</{wrapper}>",
                "content": "tags",
                "content_args": {
                    "key": rf'<{prefix}parameter name="(?P<key>[^"<>\n]+)"{typed}>',
                    "key_mark": f"<{prefix}parameter name=",
                    "value_close": f"</{prefix}parameter>",
                    "end": f"</{prefix}invoke>",
                    "wrapper": f"<{wrapper}>",
                    "wrapper_close": f"</{wrapper}>",
                    "next": f"<{prefix}invoke name=",
                },
                "transform": _NAMED,
            },
            "content": _TEXT,
        },
    }


NEWER: dict[str, dict[str, Any]] = {
    "gemma4": {
        "fields": {
            "reasoning_content": {
                "open": "<|channel>thought\n", "close": "<channel|>", "content": "text", "anywhere": True,
            },
            "tool_calls": _json(
                r"\s*<\|tool_call>\s*call:(?P<name>[\w.:-]+)\s*(?=\{)", "<tool_call|>", _NAMED,
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            "content": _TEXT,
        },
        "calls": {
            "begin": "<|tool_call>call:", "between": "", "end": "<tool_call|>", "quotes_name": False,
            "arguments": "marked", "string_mark": '<|"|>',
        },
    },
    "functiongemma": {
        "fields": {
            "tool_calls": _json(
                r"\s*<start_function_call>\s*call:(?P<name>[\w.:-]+)\s*(?=\{)", "<end_function_call>", _NAMED,
                content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            ),
            "content": _TEXT,
        },
        "calls": {
            "begin": "<start_function_call>call:", "between": "", "end": "<end_function_call>", "quotes_name": False,
            "arguments": "marked", "string_mark": "<escape>",
        },
    },
    "glm": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": {
        **_xml("minimax:tool_call"),
        "calls": {
            "first": "<minimax:tool_call>\n",
            "begin": '<invoke name="',
            "between": '">\n',
            "end": "</invoke>",
            "separator": "\n",
            "last": "\n</minimax:tool_call>",
            "quotes_name": False,
            "arguments": "tags",
            "tags": {"begin": '<parameter name="', "middle": '">', "end": "</parameter>", "gap": "\n"},
        },
    },
    "deepseek_v32": _xml("｜DSML｜function_calls", "｜DSML｜"),
    "deepseek_v4": _xml("｜DSML｜tool_calls", "｜DSML｜"),
    "seed_oss": {
        "fields": {
            "reasoning_content": {"open": "<seed:think>", "close": "</seed:think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*(?:<seed:tool_call>\s*)?<function=(?P<name>[^<>\n]+)>",
                "close_pattern": r"\s*</seed:tool_call>",
                "content": "tags",
                "content_args": {
                    "key": r"<parameter=(?P<key>[^<>\n]+)>",
                    "key_mark": "<parameter=",
                    "value_close": "</parameter>",
                    "end": "</function>",
                    "wrapper": "<seed:tool_call>",
                    "wrapper_close": "</seed:tool_call>",
                    "next": "<function=",
                },
                "transform": _NAMED,
            },
            "content": _TEXT,
        },
        "calls": {
            "begin": "<seed:tool_call>\n<function=",
            "between": ">\n",
            "end": "</function>\n</seed:tool_call>",
            "separator": "\n",
            "quotes_name": False,
            "arguments": "tags",
            "tags": {"begin": "<parameter=", "middle": ">", "end": "</parameter>", "gap": "\n"},
            "twin": "<function=",
        },
    },
    "kimi_k2": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": (
                    r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
                    r"(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
                ),
                "close_pattern": r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
                "content": "json",
                "transform": _NAMED,
            },
            "content": _TEXT,
        },
        "calls": {
            "first": "<|tool_calls_section_begin|>",
            "begin": "<|tool_call_begin|>functions.",
            "between": ":0<|tool_call_argument_begin|>",
            "end": "<|tool_call_end|>",
            "last": "<|tool_calls_section_end|>",
            "quotes_name": False,
        },
    },
    "lfm2": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<\|tool_call_start\|>\s*(?=\[)",
                "close": "<|tool_call_end|>",
                "content": "python-calls",
                "transform": _EACH,
                "transform_each": True,
            },
            "content": _TEXT,
        },
        "calls": {
            "first": "<|tool_call_start|>[",
            "begin": "",
            "between": "(",
            "end": ")",
            "separator": ", ",
            "last": "]<|tool_call_end|>",
            "quotes_name": False,
            "arguments": "python",
        },
    },
    "granite": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": _json(r"\s*<\|tool_call\|>\s*(?=\[)", "", _EACH, transform_each=True),
            "content": _TEXT,
        },
        "calls": _list_form("<|tool_call|>[", "]"),
    },
    "granite_20b": {
        "fields": {
            "tool_calls": _json(r"\s*<function_call>\s*(?=\{)", needs_arguments=True),
            "content": _TEXT,
        },
        "calls": {
            "begin": '<function_call> {"name": ', "between": ', "arguments": ', "end": "}", "separator": "\n",
        },
    },
    "xlam": {
        "fields": {
            "tool_calls": _json(r"\A\s*(?=\[\s*\{\s*\")", "", _EACH, transform_each=True, needs_arguments=True),
            "content": _TEXT,
        },
        "calls": {**_list_form("[", "]"), "is_whole": True},
    },
    "functionary_v31": {
        "fields": {
            "tool_calls": _json(r"\s*<function=(?P<name>[^<>\n]+)>\s*(?=\{)", "</function>", _NAMED),
            "content": _TEXT,
        },
        "calls": {
            "begin": "<function=", "between": ">", "end": "</function>", "separator": "\n", "quotes_name": False,
        },
    },
    "functionary_v32": {
        "fields": {
            "content": {"open_pattern": r"(?:\A|>>>)all\n", "content": "text"},  # before calls: "all" is no tool
            "tool_calls": _json(r"\s*(?:\A|>>>)(?P<name>[\w.-]+)\n(?=\s*\{)", "", _NAMED),
            "other_content": _TEXT,
        },
        "calls": {"begin": "", "between": "\n", "end": "", "separator": ">>>", "quotes_name": False,
                  "is_whole": True, "final": "all\n"},
    },
    "cohere": {
        "fields": {
            "reasoning_content": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
            "tool_calls": _json(
                r"\s*<\|START_ACTION\|>\s*(?=[\[{])", "<|END_ACTION|>",
                {"function": {"name": "{tool_name}", "arguments": "{parameters}"}}, transform_each=True,
            ),
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"},
            "other_content": _TEXT,
        },
        "calls": {
            **_list_form("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>",
                         '{"tool_call_id": "0", "tool_name": ', ', "parameters": '),
            "separator": ",\n    ",
        },
    },
    "command_r": {
        "fields": {
            "tool_calls": _json(
                r"\s*Action:\s*```json\s*(?=\[)", "```",
                {"function": {"name": "{tool_name}", "arguments": "{parameters}"}}, transform_each=True,
            ),
            "content": _TEXT,
        },
        "calls": {
            **_list_form("Action: ```json\n[\n    ", "\n]```",
                         '{\n        "tool_name": ', ',\n        "parameters": '),
            "end": "\n    }",
            "separator": ",\n    ",
        },
    },
    "nemotron_v2": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": _json(r"\s*<TOOLCALL>\s*(?=[\[{])", "</TOOLCALL>", _EACH, transform_each=True),
            "content": _TEXT,
        },
        "calls": _list_form("<TOOLCALL>[", "]</TOOLCALL>"),
    },
    "tool_calls": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": _json(r"\s*<tool_calls>\s*(?=[\[{])", "</tool_calls>", _EACH, transform_each=True),
            "content": _TEXT,
        },
        "calls": _list_form("<tool_calls>[", "]</tool_calls>"),
    },
    "minimax_m1": {
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": _json(r"\s*<tool_calls>\s*(?=[\[{])", "</tool_calls>", _EACH, transform_each=True),
            "content": _TEXT,
        },
        "calls": {**_list_form("<tool_calls>\n", "\n</tool_calls>"), "separator": "\n"},
    },
    "functools": {
        "fields": {
            "tool_calls": _json(r"\s*functools\s*(?=\[)", "", _EACH, transform_each=True, needs_arguments=True),
            "content": _TEXT,
        },
        "calls": _list_form("functools[", "]"),
    },
    "internlm2": {
        "fields": {
            "tool_calls": _json(r"\s*<\|action_start\|>\s*<\|plugin\|>\s*(?=\{)", "<|action_end|>"),
            "content": _TEXT,
        },
        "calls": {
            "begin": '<|action_start|><|plugin|>\n{"name": ', "between": ', "parameters": ',
            "end": "}<|action_end|>", "separator": "\n",
        },
    },
}  # fmt: skip
