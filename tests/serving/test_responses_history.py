"""What stands in the history of a /v1/responses conversation: references, and items of this server and of others."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from dialect_calls import ask, events_of, last_prompt
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.response_store import ResponseStore
from diptych.serving.api.responses_items import ItemReader, sealed_reasoning
from diptych.serving.api.responses_tools import ClientTools

pytestmark = pytest.mark.asyncio
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = (
    '<think>\nBern.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
LEFT_OUT = "[image left out: this model reads text only]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


async def test_references_mean_the_items_that_were_stored(tokenizer: Tokenizer) -> None:
    llm, store = FakeLLM(answer=CALL, tokenizer=tokenizer), ResponseStore()
    user = {"role": "user", "content": "Weather?"}

    async def said(items: list[Any], **fields: Any) -> tuple[Any, str]:
        reply = await ask(llm, "/v1/responses", {"input": items, "tools": [TOOL], **fields}, store=store)
        assert reply.status_code == 200, reply.text
        return reply.json(), last_prompt(llm)

    first, _ = await said([user])
    output = first["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "sun"}
    _, whole = await said([user, *output, result])
    last, referred = await said([user, *({"type": "item_reference", "id": item["id"]} for item in output), result])
    _, untyped = await said([user, *({"id": item["id"]} for item in output), result])
    assert whole == referred == untyped
    await store.delete(first["id"], "")
    await said([{"type": "item_reference", "id": output[0]["id"]}])  # other responses have it, too
    _, continued = await said([user], previous_response_id=last["id"])
    assert continued.startswith(referred.removesuffix("<|im_start|>assistant\n"))  # it was stored without references
    _, doubled = await said([{**user, "id": "mine"}, {"type": "item_reference", "id": "mine"}], store=False)
    assert doubled.count("Weather?") == 2


async def test_a_reference_that_nothing_has_is_named() -> None:
    llm = FakeLLM(answer="x")
    server: Any = {"api_keys": ["a", "b"], "store": ResponseStore()}
    kept = (await ask(llm, "/v1/responses", {"input": "x"}, key="a", **server)).json()
    not_kept = (await ask(llm, "/v1/responses", {"input": "x", "store": False}, key="a", **server)).json()
    ids = [reply["output"][0]["id"] for reply in (kept, not_kept)]
    for key, unknown in (("b", ids[0]), ("a", ids[1]), ("a", "nothing"), ("a", 7)):
        items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": unknown}]
        reply = await ask(llm, "/v1/responses", {"input": items}, key=key, **server)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "input.1.id", "item_not_found")
        assert repr(str(unknown)) in error["message"]


async def test_items_of_a_file_of_an_older_version_are_found(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    old = sqlite3.connect(path)
    old.execute(
        "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, "
        "items BLOB NOT NULL, reply BLOB NOT NULL, expires_s REAL NOT NULL)"
    )
    items = [{"id": "fc_1", "type": "function_call"}, {"role": "user"}, {"id": None}]
    old.execute("INSERT INTO responses VALUES ('r', 'me', NULL, ?, '{}', 1e12)", (json.dumps(items).encode(),))
    old.commit()
    old.close()
    for _ in range(2):
        store = ResponseStore(path)
        assert await store.items(["fc_1", "x"], "me") == {"fc_1": items[0]}
        assert await store.items(["fc_1"], "other") == {}
        store.close()


# An item of a history, and what the prompt says of it.
ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "function_call", "call_id": "c", "name": "gone", "arguments": "{}"}, '"name": "gone"'),
    ({"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"}, '"name": "n__f"'),
    ({"type": "function_call_output", "call_id": "c", "output": None}, "<|im_start|>tool\n<|im_end|>"),
    (
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "hm"}, IMAGE]},
        LEFT_OUT,
    ),
    ({"type": "function_call_output", "call_id": "c", "output": {"content": "seen"}}, '{"content": "seen"}'),
    ({"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "A\nB"}, '{"input": "A\\nB"}'),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "patched"}, "tool\npatched<"),
    ({"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}, '"command": ["ls"]'),
    ({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}, "tool\na.txt<"),
    ({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}, '"commands": ["ls"]'),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "b.txt", "stderr": ""}]}, "b.txt"),
    ({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "q"}}, "delete_file"),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}, "<|im_start|>tool\n"),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}}, "click"),
    ({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}, "left out"),
    ({"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "output": "found it"}, "tool\nfound it<"),
    ({"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "error": "no luck"}, "tool\nno luck<"),
    ({"type": "code_interpreter_call", "id": "c", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}, "logs"),
    ({"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"text": "page 3"}]}, "page 3"),
    ({"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}}, "tool_search"),
    ({"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": []}, "No tools were found"),
    ({"type": "additional_tools", "role": "developer", "tools": [{**TOOL, "name": "added"}]}, '"name": "added"'),
    ({"type": "image_generation_call", "id": "i", "result": "AAAA", "status": "completed"}, LEFT_OUT),
    ({"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "psst"}]}, "psst"),
    ({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": sealed_reasoning("Hm.")}, ""),
    ({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA of another server"}, ""),
    ({"type": "reasoning", "id": "r", "summary": [], "content": None}, ""),
    ({"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}, ""),
    ({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}, ""),
    ({"type": "mcp_approval_request", "id": "m", "name": "f", "arguments": "{}", "server_label": "s"}, ""),
    ({"type": "mcp_approval_response", "approval_request_id": "m", "approve": True}, ""),
    ({"type": "compaction", "encrypted_content": "gAAAA"}, ""),
    ({"type": "configuration_update"}, ""),
]


@pytest.mark.parametrize(("item", "words"), ITEMS)
async def test_items_of_every_kind_are_read_from_a_history(item: Any, words: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer="x", tokenizer=tokenizer)
    user = {"role": "user", "content": "Go on."}
    reply = await ask(llm, "/v1/responses", {"input": [user, item, user]})
    assert reply.status_code == 200, reply.text
    assert words in last_prompt(llm)
    assert last_prompt(llm).count("Go on.") == 2
    is_left_out = reply.headers.get("x-ignored-fields") == f"input.{item['type']}"
    assert is_left_out == (not words and item["type"] != "reasoning")


async def test_reasoning_comes_back_sealed_where_the_client_asks_for_that(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=CALL, tokenizer=tokenizer)
    body = {"input": "x", "include": ["reasoning.encrypted_content"], "store": False}
    sealed = (await ask(llm, "/v1/responses", body)).json()["output"][0]
    plain = (await ask(llm, "/v1/responses", {"input": "x"})).json()["output"][0]
    assert sealed["encrypted_content"] == sealed_reasoning("Bern.")
    assert (plain["type"], plain.get("encrypted_content")) == ("reasoning", None)
    [message] = ItemReader(ClientTools()).read([{**sealed, "content": []}])
    assert message["reasoning_content"] == "Bern."


async def test_fields_that_change_nothing_are_taken_and_those_that_might_are_named() -> None:
    silent: Any = {
        "truncation": "disabled",
        "max_tool_calls": 3,
        "background": False,
        "include": ["message.output_text.logprobs"],
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "service_class": "batch",
    }
    llm = FakeLLM(answer="x")
    reply = await ask(llm, "/v1/responses", {"input": "x", **silent})
    assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, None)
    assert llm.submitted[0].options.service_class == "batch"
    named = {"truncation": "auto", "context_management": [{"type": "compaction"}]}
    reply = await ask(FakeLLM(answer="x"), "/v1/responses", {"input": "x", **named})
    assert set(reply.headers["x-ignored-fields"].split(", ")) == set(named)
    for refused in ({"conversation": "c"}, {"prompt": {"id": "p"}}, {"background": True}):
        reply = await ask(FakeLLM(), "/v1/responses", {"input": "x", **refused})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, *refused)


@pytest.mark.parametrize("wanted", [None, "auto", "detailed"])
async def test_a_summary_that_the_client_wants_is_the_reasoning(wanted: str | None, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=CALL, tokenizer=tokenizer)
    body = {"input": "x", "reasoning": {"summary": wanted}}
    item = (await ask(llm, "/v1/responses", body)).json()["output"][0]
    events = events_of(await ask(llm, "/v1/responses", {**body, "stream": True}))
    assert item["summary"] == events[-1]["response"]["output"][0]["summary"]
    assert item["summary"] == ([{"type": "summary_text", "text": "Bern."}] if wanted else [])
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in events if "summary_index" in event]
    deltas = [kind for kind in kinds if kind == "text.delta"]
    assert kinds == (["part.added", *deltas, "text.done", "part.done"] if wanted else [])
    assert "".join(event["delta"] for event in events if event["type"].endswith("summary_text.delta")) == (
        "Bern." if wanted else ""
    )
    [message] = ItemReader(ClientTools()).read([item])
    assert message["reasoning_content"] == "Bern."  # once


async def test_reasoning_belongs_to_the_message_behind_it_and_none_is_no_message() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}] if text else [],
        }

    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    items = [user, thought(""), user, thought("a"), thought("b"), answer, thought("c"), answer]
    messages = ItemReader(ClientTools()).read(items)
    assert [message["role"] for message in messages] == ["user", "user", "assistant", "assistant"]
    assert [message.get("reasoning_content") for message in messages] == [None, None, "a\nb", "c"]


async def test_several_texts_of_a_message_stay_parts_and_images_of_users_are_refused() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    [message] = ItemReader(ClientTools()).read([{"role": "user", "content": parts}])
    assert message["content"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    [message] = ItemReader(ClientTools()).read([{"role": "developer", "content": parts}])
    assert message == {"role": "system", "content": "one\ntwo"}
    reply = await ask(FakeLLM(), "/v1/responses", {"input": [{"role": "user", "content": [*parts, IMAGE]}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input.0.content.2")
