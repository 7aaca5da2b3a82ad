"""Which bundled format a model has, from the texts of its chat templates.

A format is recognised by marks that no other family has; a mark that several share counts only without what tells the
others apart. A template with none of them has no format: its tools are served in the generic one.
"""

from collections.abc import Iterable
from typing import NamedTuple


class _Rule(NamedTuple):
    """A format, the texts that its templates have, all of them, and texts of others, which they do not have."""

    name: str
    marks: tuple[str, ...]
    others: tuple[str, ...] = ()


_RULES = (
    _Rule("harmony", ("<|channel|>", "<|message|>")),
    _Rule("gemma4", ("<|tool_call>call:",)),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    _Rule("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    _Rule("deepseek_v32", ("｜DSML｜", "function_calls", "invoke")),
    _Rule("deepseek_v4", ("｜DSML｜", "tool_calls", "invoke")),
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("cohere", ("<|START_ACTION|>", "tool_name")),
    _Rule("command_r", ("Action:", "```json", "tool_name")),
    _Rule("glm47", ("<tool_call>", "</arg_key><arg_value>")),
    _Rule("glm", ("<tool_call>", "<arg_key>")),
    _Rule("qwen_xml", ("<tool_call>", "<function=")),
    _Rule("functionary_v31", ("<function=", "</function>"), ("<tool_call>", "<parameter")),
    _Rule("functionary_v32", (">>>all", ">>>")),
    _Rule("granite", ("<|tool_call|>", "JSON list")),
    _Rule("granite_20b", ("<function_call>", "no_function")),
    _Rule("nemotron_v2", ("<TOOLCALL>",)),
    _Rule("minimax_m1", ("<tool_calls>\\n{",)),
    _Rule("tool_calls", ("<tool_calls>[",)),
    _Rule("hermes", ("<tool_call>",), ("<invoke name=", "yaml object", "<|tool_call_start|>")),
    _Rule("deepseek", ("<｜tool▁call▁begin｜>", "```json")),
    _Rule("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    _Rule("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    _Rule("lfm2", ("<|tool_list_start|>",)),
    _Rule("lfm2", ("List of tools: [", "<|im_start|>", "keep_past_thinking")),
    _Rule("functools", ("functools[",)),
    _Rule("internlm2", ("<|action_start|>", "<|plugin|>")),
    _Rule("xlam", ('[{"name": "tool_call_name", "arguments":',)),
    _Rule("pythonic", ("func_name1(param",)),
    _Rule("pythonic", ("<|python_start|>",)),
    _Rule("llama3_json", ('"parameters": dictionary of argument name and its value', "tools")),
    _Rule("llama3_json", ("<|python_tag|>",), ("<function=",)),
    _Rule("thinking", ("</think>",)),
)


def recognise(chat_templates: Iterable[str]) -> str | None:
    """The name of the format of a model with these chat templates, the first that fits; None when none is known."""
    text = "\n".join(chat_templates)
    for rule in _RULES:
        if all(mark in text for mark in rule.marks) and not any(other in text for other in rule.others):
            return rule.name
    return None
