"""Which bundled format a model has, from the texts of its chat templates."""

from collections.abc import Iterable

# A format is recognised by all of these texts together in a chat template; the first that fits.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("qwen_xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("func_name1(params_name1",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ('"parameters":', "tools")),
    ("llama3_json", ("<|python_tag|>",)),
    ("thinking", ("</think>",)),
)


def recognise(chat_templates: Iterable[str]) -> str | None:
    """The name of the format of a model with these chat templates; None when none is known."""
    text = "\n".join(chat_templates)
    return next((name for name, marks in _MARKS if all(mark in text for mark in marks)), None)
