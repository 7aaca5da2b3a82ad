"""What agents send to /v1/messages besides texts and calls: blocks of other servers, documents, images, tools."""

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_calls import ask, call_of, last_prompt
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.messages_blocks import messages_of

pytestmark = pytest.mark.asyncio
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
TEXT_FILE = {
    "type": "document",
    "title": "a.txt",
    "source": {"type": "text", "media_type": "text/plain", "data": "line"},
}
SERVER_CALL = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
USER = {"role": "user", "content": "Go on."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": content}


def of_server(kind: str, content: Any) -> list[dict[str, Any]]:
    return [SERVER_CALL, {"type": kind, "tool_use_id": "s", "content": content}, {"type": "text", "text": "So."}]


# Who says it, a block or several, and what the prompt has of it.
BLOCKS: list[tuple[str, Any, str]] = [
    ("user", result([IMAGE]), "tool\n[image left out: this model reads text only]<"),
    ("user", result([{"type": "text", "text": "hm"}, PDF]), "hm\n[document left out: this model reads text only]"),
    ("user", result([TEXT_FILE]), "tool\na.txt\nline<"),
    ("user", result([{"type": "tool_reference", "tool_name": "look"}]), "Found tool: look"),
    ("user", result([{"type": "search_result", "title": "t", "content": [{"type": "text", "text": "p"}]}]), "t\np"),
    ("user", result([{"type": "browser_state", "tabs": [{"title": "tab-1"}]}]), "tab-1"),
    ("user", result(None), "<|im_start|>tool\n<|im_end|>"),
    ("user", [TEXT_FILE, {"type": "text", "text": "Read it."}], "a.txt\nline"),
    ("user", {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "own"}]}}, "own"),
    (
        "user",
        {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "p"}]},
        "t\ns\np",
    ),
    ("assistant", {"type": "redacted_thinking", "data": "AAAA"}, ""),
    ("assistant", {"type": "thinking", "thinking": "hm", "signature": "AAAA"}, ""),
    ("assistant", {"type": "fallback", "from": {}, "to": {}}, ""),
    ("assistant", {"type": "compaction", "content": None}, ""),
    ("assistant", {"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []}, ""),
    ("user", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}, ""),
    ("assistant", of_server("web_search_tool_result", [{"type": "web_search_result", "title": "page-1"}]), "page-1"),
    ("assistant", of_server("web_search_tool_result", {"type": "web_search_tool_result_error"}), "_error"),
    ("assistant", of_server("web_fetch_tool_result", {"type": "web_fetch_result", "content": TEXT_FILE}), "line"),
    ("assistant", of_server("bash_code_execution_tool_result", {"stdout": "out-1", "stderr": ""}), "out-1"),
    (
        "assistant",
        of_server("code_execution_tool_result", {"encrypted_stdout": "x", "return_code": 7}),
        '"return_code": 7',
    ),
    ("assistant", of_server("tool_search_tool_result", {"tool_references": [{"tool_name": "look"}]}), "look"),
    ("assistant", of_server("advisor_tool_result", {"text": "advice"}), "advice"),
    (
        "assistant",
        [
            {"type": "mcp_tool_use", "id": "m", "name": "read", "server_name": "s", "input": {}},
            {
                "type": "mcp_tool_result",
                "tool_use_id": "m",
                "is_error": False,
                "content": [{"type": "text", "text": "m-1"}],
            },
        ],
        "tool\nm-1<",
    ),
]


@pytest.mark.parametrize(("role", "blocks", "words"), BLOCKS)
async def test_blocks_of_every_kind_are_read_from_a_history(
    role: str, blocks: Any, words: str, tokenizer: Tokenizer
) -> None:
    llm = FakeLLM(answer="x", tokenizer=tokenizer)
    content = blocks if isinstance(blocks, list) else [blocks]
    messages = [USER, {"role": role, "content": content}, USER]
    body = {"messages": messages, "max_tokens": 9, "tools": [TOOL]}
    reply = await ask(llm, "/v1/messages", body)
    assert reply.status_code == 200, reply.text
    prompt = last_prompt(llm)
    assert words in prompt
    assert prompt.count("Go on.") == 2
    assert "AAAA" not in prompt  # nothing that the model could not read
    counted = await ask(llm, "/v1/messages/count_tokens", body)
    assert counted.json() == {"input_tokens": len(llm.submitted[-1].prompts[0])}


async def test_results_of_servers_part_the_assistants_message() -> None:
    blocks = [{"type": "text", "text": "I search."}, *of_server("web_search_tool_result", [{"title": "t"}])]
    first, found, last = messages_of("assistant", blocks, "here")
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("I search.", "web_search")
    assert (found["role"], found["tool_call_id"], found["content"]) == ("tool", "s", '[{"title": "t"}]')
    assert last == {"role": "assistant", "content": "So."}
    [silent] = messages_of("assistant", [{"type": "tool_use", "id": "t", "name": "look", "input": {}}], "here")
    assert silent["content"] is None


SERVER_TOOLS = ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset", "new_20270101")


@pytest.mark.parametrize("kind", SERVER_TOOLS)
async def test_tools_that_the_server_cannot_run_are_left_out_and_named(kind: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=call_of("look", {}), tokenizer=tokenizer)
    body: Any = {"messages": [USER], "max_tokens": 200, "tools": [{"type": kind, "name": "x"}, TOOL]}
    for choice in (None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "look"}):
        reply = await ask(llm, "/v1/messages", {**body, "tool_choice": choice})
        assert reply.json()["content"][0]["name"] == "look"
        assert reply.headers["x-ignored-fields"] == f"tools.{kind}"
    counted = await ask(llm, "/v1/messages/count_tokens", body)
    assert counted.headers["x-ignored-fields"] == f"tools.{kind}"
    only = await ask(FakeLLM(answer="x"), "/v1/messages", {**body, "tools": [{"type": kind}]})
    assert only.json()["content"] == [{"type": "text", "text": "x"}]


async def test_tools_of_the_conversation_are_offered(tokenizer: Tokenizer) -> None:
    definition = {"name": "late", "input_schema": {"type": "object", "properties": {}}}
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    llm = FakeLLM(answer=call_of("late", {}), tokenizer=tokenizer)
    messages = [USER, {"role": "system", "content": [block]}, USER]
    reply = await ask(llm, "/v1/messages", {"messages": messages, "max_tokens": 200, "tools": [TOOL]})
    assert reply.json()["content"][0]["name"] == "late"


async def test_fields_that_say_how_to_serve_a_request_change_nothing_and_others_are_named() -> None:
    body = {"messages": [USER], "max_tokens": 9}
    silent = {
        "betas": ["context-management-2025-06-27"],
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u" * 600},
        "service_tier": "auto",
        "speed": "fast",
        "inference_geo": "eu",
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "max"},
        "context_management": {"edits": []},
        "container": None,
    }
    reply = await ask(FakeLLM(answer="x"), "/v1/messages", {**body, **silent})
    assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, None)
    named = {"mcp_servers": [{"type": "url", "name": "s", "url": "u"}], "container": "c", "novelty": 1}
    reply = await ask(FakeLLM(answer="x"), "/v1/messages", {**body, **named, "output_config": {"effort": "utmost"}})
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {*named, "output_config.effort"}


async def test_an_effort_goes_to_the_template_unless_that_refuses_it(tmp_path: Path) -> None:
    model = tool_model(tmp_path / "refusing")
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = (
        "{% if reasoning_effort is defined and reasoning_effort != 'high' %}{{ raise_exception('high only') }}"
        "{% endif %}[{{ reasoning_effort }}]"
    )
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    refusing = Tokenizer(model)
    for effort, words, ignored in (("high", "[high]", None), ("low", "[]", "output_config.effort")):
        llm = FakeLLM(answer="x", tokenizer=refusing)
        body = {"messages": [USER], "max_tokens": 9, "output_config": {"effort": effort}}
        reply = await ask(llm, "/v1/messages", body)
        assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, ignored)
        assert last_prompt(llm).startswith(words)
