"""The tools of /v1/responses: what the model is offered, what calls come back as, and what is left out by name."""

import itertools
import json
from typing import Any

import pytest
from dialect_calls import ask, call_of, events_of, last_prompt
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from tool_model import tool_model

from diptych.control.errors import InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.http_policy import HttpPolicy
from diptych.serving.api.responses_tools import ClientTool, ClientTools
from diptych.serving.api.text_argument import TextArgument
from diptych.serving.edge_limits import TOOLS

Item = dict[str, Any]
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "BEGIN"'},
}
SPACE: Any = {"type": "namespace", "name": "mcp__box", "tools": [{**FUNCTION, "name": "say"}, {**PATCH, "name": "cut"}]}
SEARCH: Any = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
HOSTED = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell"),
    *(
        "shell",
        "apply_patch",
        "computer",
        "computer_use_preview",
        "tool_search",
        "programmatic_tool_calling",
        "new_one",
    ),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


async def answered(llm: FakeLLM, tools: Any) -> tuple[list[Item], list[Item], str]:
    """The items of the answer; the events of the stream, whose items are the same; what is left out."""
    body = {"input": "x", "tools": tools}
    whole = await ask(llm, "/v1/responses", body)
    events = events_of(await ask(llm, "/v1/responses", {**body, "stream": True}))
    output, streamed = whole.json()["output"], events[-1]["response"]["output"]
    assert [without_ids(item) for item in output] == [without_ids(item) for item in streamed]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == streamed
    return output, events, whole.headers.get("x-ignored-fields", "")


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", HOSTED)
async def test_tools_that_the_server_cannot_run_are_left_out_and_named(kind: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=call_of("f", {}), tokenizer=tokenizer)
    output, _, left_out = await answered(llm, [{"type": kind}, FUNCTION])
    assert (output[0]["type"], output[0]["name"], left_out) == ("function_call", "f", f"tools.{kind}")
    body = {"input": "x", "tools": [{"type": kind}], "tool_choice": "auto"}
    plain = await ask(FakeLLM(answer="x"), "/v1/responses", body)  # of a template without tools
    assert plain.json()["output"][0]["content"][0]["text"] == "x"
    strict = await ask(FakeLLM(answer="x"), "/v1/responses", body, http_policy=HttpPolicy(is_strict=True))
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, f"tools.{kind}")


@pytest.mark.asyncio
async def test_a_function_in_a_namespace_is_called_by_the_names_that_its_client_gave(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=call_of("mcp__box__say", {"text": "hi"}), tokenizer=tokenizer)
    [call], _, left_out = await answered(llm, [SPACE, FUNCTION])
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__box", "say")
    assert call["arguments"] == '{"text": "hi"}'
    assert left_out == "tools.cut.format"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    await ask(llm, "/v1/responses", {"input": [call, result], "tools": [SPACE]})
    assert call_of("mcp__box__say", {"text": "hi"}) in last_prompt(llm)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["patch", "mcp__box__cut"])
async def test_a_custom_tool_is_called_with_a_text(name: str, tokenizer: Tokenizer) -> None:
    text = 'BEGIN\n+say "hi" \\ ü 😀\nEND\n'
    llm = FakeLLM(answer="I edit.\n" + call_of(name, {"input": text}), tokenizer=tokenizer)
    (_, call), events, _ = await answered(llm, [SPACE, PATCH])
    assert (call["type"], call["input"], call["status"]) == ("custom_tool_call", text, "completed")
    assert (call.get("namespace"), call["name"]) == (("mcp__box", "cut") if "box" in name else (None, "patch"))
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    assert len(deltas) > 3  # it comes as it is written
    assert [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"] == [text]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    await ask(llm, "/v1/responses", {"input": [call, result], "tools": [SPACE, PATCH]})
    assert call_of(name, {"input": text}) in last_prompt(llm)
    assert 'start: \\"BEGIN\\"' in last_prompt(llm)  # the model reads the grammar


@pytest.mark.asyncio
async def test_a_search_for_tools_is_the_clients_and_what_it_finds_can_be_called(tokenizer: Tokenizer) -> None:
    llm = FakeLLM(answer=call_of("tool_search", {"query": "say"}), tokenizer=tokenizer)
    [call], _, _ = await answered(llm, [SEARCH])
    assert (call["type"], call["execution"], call["arguments"]) == ("tool_search_call", "client", {"query": "say"})
    found = {"type": "tool_search_output", "call_id": call["call_id"], "execution": "client", "tools": [SPACE]}
    llm = FakeLLM(answer=call_of("mcp__box__say", {}), tokenizer=tokenizer)
    items = [{"role": "user", "content": "x"}, call, found, found]
    [said] = (await ask(llm, "/v1/responses", {"input": items, "tools": [SEARCH]})).json()["output"]
    assert (said["type"], said["namespace"], said["name"]) == ("function_call", "mcp__box", "say")
    assert "Found tools: mcp__box__say, mcp__box__cut" in last_prompt(llm)


def test_names_of_functions_are_unique_and_short_enough() -> None:
    tools = ClientTools()
    long = "n" * 100
    spaces = [{"type": "namespace", "name": name, "tools": [FUNCTION]} for name in ("a", "a__", long, long + "n")]
    tools.add([{**FUNCTION, "name": "a__f"}, *spaces], "tools")
    names = [tool.function.name for tool in tools.functions]
    assert len(set(names)) == len(names) == 5
    assert [tools.called(name).namespace for name in names] == [None, "a", "a__", long, long + "n"]
    assert tools.callable_name(ClientTool("function", "g", "a b")) == "a_b__g"  # not offered any more


def test_a_request_has_only_so_many_tools() -> None:
    inner = [{**FUNCTION, "name": f"f{number}"} for number in range(TOOLS)]
    tools = ClientTools()
    tools.add([{"type": "namespace", "name": "n", "tools": inner}], "tools")
    with pytest.raises(InvalidRequestError, match=r"tools\.0 is one tool too many; at most 1024"):
        tools.add([FUNCTION], "tools")


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "say"}, "mcp__box__say"),
    ],
)
def test_a_choice_names_the_function(choice: Any, wanted: str) -> None:
    tools = ClientTools()
    tools.add([FUNCTION, PATCH, SPACE], "tools")
    chosen = tools.choice(choice)
    assert (chosen if isinstance(chosen, str) else chosen and chosen["function"]["name"]) == wanted


@pytest.mark.parametrize(
    ("mode", "allowed", "wanted"),
    [
        ("auto", [{"type": "function", "name": "f"}, {"type": "web_search"}], ["f"]),
        ("required", [{"type": "namespace", "name": "mcp__box"}], ["mcp__box__say", "mcp__box__cut"]),
        ("auto", [{"type": "web_search"}], None),
    ],
)
def test_allowed_tools_are_those_of_the_chat_request(mode: str, allowed: Any, wanted: list[str] | None) -> None:
    tools = ClientTools()
    tools.add([FUNCTION, PATCH, SPACE, {"type": "web_search"}], "tools")
    chosen = tools.choice({"type": "allowed_tools", "mode": mode, "tools": allowed})
    if wanted is None:
        assert chosen == "none"
        return
    functions = [{"type": "function", "function": {"name": name}} for name in wanted]
    assert chosen == {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def test_a_choice_that_only_a_tool_of_the_servers_could_fulfil_is_refused() -> None:
    tools = ClientTools()
    tools.add([{"type": "web_search"}], "tools")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}
    for choice in ("required", {"type": "web_search"}, {"type": "mcp", "server_label": "x"}, allowed):
        with pytest.raises(InvalidRequestError) as caught:
            tools.choice(choice)
        assert caught.value.param == "tool_choice"


@given(
    st.text(),
    st.lists(st.integers(0, 60)),
    st.booleans(),
    st.sampled_from(['{"input": ', ' {\n "input":', '{"input" : ']),
)
def test_a_text_argument_is_read_however_it_is_cut(text: str, cuts: list[int], is_ascii: bool, head: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    whole = head + json.dumps(text, ensure_ascii=is_ascii) + "}"
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    argument = TextArgument()
    told = "".join(argument.feed(whole[start:end]) for start, end in itertools.pairwise(places))
    assert told == text
    assert argument.rest() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb', "a\nb"),  # cut
        ('{"input": "a\\u00', "a"),
        ('{"patch": "a"}', "a"),  # another name for the only argument
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ("BEGIN", "BEGIN"),
        ('"BEGIN"', "BEGIN"),
        ('{"input": "\\ud800"}', "�"),
    ],
)
def test_arguments_of_another_form_are_the_text_themselves(arguments: str, text: str) -> None:
    argument = TextArgument()
    assert argument.feed(arguments) + argument.rest() == text
