"""Descriptions of the formats in which common models write reasoning and tool calls, for models that bring none.

Each is a response template (see response_template.py); recognise.py says which model has which. ``calls``: how a
grammar writes a call. ``generic`` is no model's own: see generic_tools.py.
"""

from typing import Any

from diptych.serving.answers.response.newer_templates import NEWER

_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_CHATML = ["<|im_start|>assistant\n", "<|im_start|>assistant"]
_ANY_ASSISTANT = [
    *_CHATML,
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|header_start|>assistant<|header_end|>\n\n",
    "[/INST]",
    "<｜Assistant｜>",
    "<|assistant|>\n",
    "<|assistant|>",
    "<|Assistant|>",
    "<|turn>model\n",
    "<start_of_turn>model\n",
    "]~b]ai\n",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<seed:bos>assistant\n",
]
_FUNCTION_IN_CONTENT = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TAGGED_JSON = {
    "begin": '<tool_call>\n{"name": ',
    "between": ', "arguments": ',
    "end": "}\n</tool_call>",
    "separator": "\n",
}

TEMPLATES: dict[str, dict[str, Any]] = {
    **{name: {"start_anchor": _ANY_ASSISTANT, **spec} for name, spec in NEWER.items()},
    "hermes": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION_IN_CONTENT,
            },
            "content": {"content": "text"},
        },
        "calls": _TAGGED_JSON,
    },
    "qwen_xml": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>",
                "close_pattern": r"\s*</tool_call>",
                "repeats": True,
                "content": "tags",
                "content_args": {
                    "key": r"<parameter=(?P<key>[^<>\n]+)>",
                    "key_mark": "<parameter=",
                    "value_close": "</parameter>",
                    "end": "</function>",
                    "wrapper": "<tool_call>",
                    "wrapper_close": "</tool_call>",
                    "next": "<function=",
                    "is_trimmed": True,
                },
                "transform": _NAMED,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "begin": "<tool_call>\n<function=",
            "between": ">\n",
            "end": "</function>\n</tool_call>",
            "separator": "\n",
            "quotes_name": False,
            "arguments": "tags",
            "twin": "<function=",
        },
    },
    "llama3_json": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "tool_calls": {
                "open_pattern": (
                    r"\A\s*(?:<\|python_tag\|>\s*)?"
                    r"(?=\{\s*\"(?:name|type|function|parameters|arguments)\")"
                ),
                "content": "json",
                "transform": {
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
                "needs_arguments": True,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "begin": '{"name": ',
            "between": ', "parameters": ',
            "end": "}",
            "separator": "; ",
            "is_whole": True,
        },
    },
    "pythonic": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "tool_calls": {
                "open_pattern": r"\A\s*(?:<\|python_start\|>\s*)?(?=\[[A-Za-z_][\w.]*\()",
                "close": ["<|python_end|>"],
                "content": "python-calls",
                "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "first": "[",
            "begin": "",
            "between": "(",
            "end": ")",
            "separator": ", ",
            "last": "]",
            "quotes_name": False,
            "arguments": "python",
            "is_whole": True,
        },
    },
    "mistral": {
        "start_anchor": _ANY_ASSISTANT,
        "id_length": 9,
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=[\[{])",
                "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "first": "[TOOL_CALLS][",
            "begin": '{"name": ',
            "between": ', "arguments": ',
            "end": "}",
            "separator": ", ",
            "last": "]",
        },
    },
    "mistral_args": {
        "start_anchor": _ANY_ASSISTANT,
        "id_length": 9,
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
                "close_pattern": r"\s*(?=\[TOOL_CALLS\])",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {"content": "text"},
        },
        "calls": {"begin": "[TOOL_CALLS]", "between": "[ARGS]", "end": "", "quotes_name": False},
    },
    "harmony": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": (
                    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\."
                    r"(?P<name>[\w.-]+)(?:<\|channel\|>(?:commentary|analysis))?"
                    r"(?: ?(?:<\|constrain\|>)?(?:json|code))?"
                    r"<\|message\|>"
                ),
                "close": ["<|call|>", "<|end|>"],
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {
                "open_pattern": (
                    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                    r"(?: ?<\|constrain\|>[\w]+)?<\|message\|>"
                ),
                "close": ["<|end|>", "<|return|>"],
                "content": "text",
            },
            "other_content": {"content": "text"},
        },
        "calls": {
            "begin": "<|channel|>commentary to=functions.",
            "between": " <|constrain|>json<|message|>",
            "end": "",
            "separator": None,
            "quotes_name": False,
            "before": (
                ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
                ("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
            ),
            "final": "<|channel|>final<|message|>",
        },
    },
    "deepseek": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": (
                    r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
                    r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n"
                ),
                "close_pattern": r"\n```<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "first": "<｜tool▁calls▁begin｜>",
            "begin": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "between": "\n```json\n",
            "end": "\n```<｜tool▁call▁end｜>",
            "separator": "\n",
            "last": "<｜tool▁calls▁end｜>",
            "quotes_name": False,
        },
    },
    "deepseek_v31": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": (
                    r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>"
                ),
                "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {"content": "text"},
        },
        "calls": {
            "first": "<｜tool▁calls▁begin｜>",
            "begin": "<｜tool▁call▁begin｜>",
            "between": "<｜tool▁sep｜>",
            "end": "<｜tool▁call▁end｜>",
            "last": "<｜tool▁calls▁end｜>",
            "quotes_name": False,
        },
    },
    "generic": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*(?=\{)",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION_IN_CONTENT,
                "exact": True,
                "needs_arguments": True,
            },
            "content": {"content": "text"},
        },
        "calls": _TAGGED_JSON,
    },
    "thinking": {
        "start_anchor": _ANY_ASSISTANT,
        "fields": {"reasoning_content": _THINK, "content": {"content": "text"}},
    },
}
