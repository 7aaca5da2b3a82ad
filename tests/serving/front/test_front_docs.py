"""The table of docs/front.md is what the adapters found out about servers that speak these protocols."""

from dataclasses import asdict
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from front_harness import fronted

from diptych.serving.front.engine_spec import KINDS

DOCUMENT = Path(__file__).parents[3] / "docs" / "front.md"
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "openai": "other OpenAI servers"}
REPORTERS = {"vllm": "with Diptych's plugin", "sglang": "forward-pass metrics"}
ROWS = {
    "tokenizes": "its tokenizer can be asked",
    "takes": "renders a chat once, and takes it as these tokens",
    "tokens_out": "names the tokens of its answers: a stream that it loses goes on elsewhere",
    "cached_tokens": "says how many prompt tokens were cached",
    "gauges": "says how busy it is",
    "events": "publishes what its prefix cache holds (`kv_events=`)",
    "handoff": "hands prompts over (`role=prefill`, `role=decode`)",
    "steps": "says how long its steps take (`step_events=`)",
}


def table(found: dict[str, dict[str, object]]) -> str:
    """Markdown."""
    lines = ["| | " + " | ".join(NAMES[kind] for kind in found) + " |", "|---|" + "---|" * len(found)]
    for row, words in ROWS.items():
        lines.append(f"| {words} | " + " | ".join(str(found[kind][row] or "no") for kind in found) + " |")
    return "\n".join(lines)


@pytest.mark.asyncio
async def test_the_table_of_engines_is_what_was_found() -> None:
    found: dict[str, dict[str, object]] = {}
    for kind in KINDS:
        async with fronted(FakeEngine(kind, takes_tokens=kind == "vllm")) as client:
            facts = client.front.external.engines[0].facts
            assert facts is not None
            cells = {name: "yes" if value is True else value for name, value in asdict(facts.capabilities).items()}
            found[kind] = {**cells, "events": "yes" if kind in ("vllm", "sglang") else ""}
            found[kind]["takes"] = "with `--enable-scale-out`" if facts.capabilities.tokens_in else ""
            found[kind]["steps"] = REPORTERS.get(kind, "")
    assert table(found) in DOCUMENT.read_text(), f"docs/front.md should have:\n{table(found)}"
