"""No request holds the event loop for long: what the loop does between two of its turns does not grow with what a
client sends, or with what it asks for.

The measure is calls, of functions of Python and of C, that the loop's thread makes in one turn: it is the same on every
machine. What a single call of C does is bounded elsewhere (see test_sliced_json.py).
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tests.serving.fake_llm import FakeLLM
from tests.serving.tool_model import tool_model

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import InvalidRequestError, OverloadedError
from diptych.control.request import SamplingParams
from diptych.serving import async_llm, edge_limits, long_work, sliced_json
from diptych.serving.answers import template_messages
from diptych.serving.answers.generic_tools import with_generic_tools
from diptych.serving.answers.output_streams import OutputStreams
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app
from diptych.serving.api.protocol import ChatBody
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.front.relay_request import read_request
from diptych.serving.long_work import LONG, LongWork, UnwantedWorkError, check_wanted

pytestmark = pytest.mark.anyio
MORE_CALLS = 3000  # in one turn than for a short request: a millisecond or less
COUNT = 2000  # messages, parts, items, biases: each costs more than two calls somewhere
NUM_PROMPT = 500  # tokens with twenty log-probabilities each
TURN = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MADE = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
EDITS = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}]}
HISTORY = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}] * COUNT
PARTS = [{"type": "text", "text": "a"}] * COUNT
CHATS: dict[str, list[Any]] = {
    "messages": [TURN] * COUNT,
    "parts": [{"role": "user", "content": PARTS}],
    "calls": [TURN, {"role": "assistant", "content": None, "tool_calls": [CALL] * COUNT}, TURN],
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat, {name}": ("/v1/chat/completions", {"messages": found}) for name, found in CHATS.items()},
    **{f"tokenize, {name}": ("/tokenize", {"messages": found}) for name, found in CHATS.items()},
    "chat, prediction": (
        "/v1/chat/completions",
        {"messages": [TURN], "prediction": {"type": "content", "content": PARTS}},
    ),
    "chat, tools": (
        "/v1/chat/completions",
        {
            "messages": [TURN],
            "tools": [{**TOOL, "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(1000)],  # type: ignore[dict-item]
        },
    ),
    "chat, log-probabilities": (
        "/v1/chat/completions",
        {"messages": [TURN], "logprobs": True, "top_logprobs": 20, "max_tokens": 500},
    ),
    "completions, log-probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 500}),
    "completions, prompt": ("/v1/completions", {"prompt": [1] * NUM_PROMPT, "prompt_logprobs": 20, "max_tokens": 1}),
    "completions, prompt of a stream": (
        "/v1/completions",
        {"prompt": [1] * NUM_PROMPT, "prompt_logprobs": 20, "max_tokens": 1, "stream": True},
    ),
    "completions, echo of a stream": (
        "/v1/completions",
        {"prompt": [1] * NUM_PROMPT, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True},
    ),
    "completions, biases": ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(COUNT)}}),
    "messages": ("/v1/messages", {"messages": [TURN] * COUNT, "max_tokens": 1}),
    "messages, history": ("/v1/messages", {"messages": HISTORY, "max_tokens": 1}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": HISTORY}),
    "count_tokens, edits": ("/v1/messages/count_tokens", {"messages": HISTORY, "context_management": EDITS}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * COUNT, "max_output_tokens": 1}),
    "responses, calls": ("/v1/responses", {"input": [MADE, OUTPUT] * COUNT, "max_output_tokens": 1}),
    "responses, references": (
        "/v1/responses",
        {
            "input": [{"id": "i", "role": "user", "content": "a"}, *[{"type": "item_reference", "id": "i"}] * COUNT],
            "max_output_tokens": 1,
        },
    ),
    "tokenize": ("/tokenize", {"prompt": "a b " * COUNT}),
    "detokenize": ("/detokenize", {"tokens": [5] * 40 * COUNT}),
    "embeddings": ("/v1/embeddings", {"input": [1] * COUNT}),
}


SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [TURN], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


class Turns:
    """The most calls that the thread which made this has made in one turn of its loop."""

    def __init__(self) -> None:
        self.most = self._now = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within."""
        run = asyncio.events.Handle._run

        def counting(handle: asyncio.Handle) -> None:
            self._now = 0
            run(handle)
            self.most = max(self.most, self._now)

        def count(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                self._now += 1

        asyncio.events.Handle._run = counting  # type: ignore[method-assign]
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
            asyncio.events.Handle._run = run  # type: ignore[method-assign]


class Client:
    """Sends one body to an application. tenant: of its key."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], tenant: str = "") -> None:
        self._app = app
        data = msgspec.json.encode(body)
        self._messages = [{"type": "http.request", "body": data, "more_body": False}]
        self._has_left = asyncio.Event()
        self.status = 0
        self.text = b""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000), "extensions": {}, "state": {"tenant": tenant},
            "headers": [(b"host", b"127.0.0.1:8000"), *headers],
        }  # fmt: skip

    def leave(self) -> None:
        """Close the connection."""
        self._has_left.set()

    async def run(self) -> int:
        """The status of the reply."""
        await self._app(self._scope, self._receive, self._send)
        return self.status

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.text += message.get("body", b"")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("turns") / "model"))


@pytest.mark.parametrize("name", BODIES)
async def test_a_turn_does_not_grow_with_a_body_or_a_reply(name: str, tokenizer: Tokenizer) -> None:
    path, body = BODIES[name]
    if path in ("/v1/chat/completions", "/v1/completions"):
        body = {"max_tokens": 1, **body}
    llm = FakeLLM(tokenizer=tokenizer)
    assert llm.ready is not None
    llm.ready = msgspec.structs.replace(llm.ready, max_model_len=1 << 20, kv_capacity_tokens=1 << 22)
    app = build_app(llm, "m")  # type: ignore[arg-type]
    for _ in range(2):  # the first one makes what all use
        short = Turns()
        with short.counted():
            assert await Client(app, path, SHORT[path]).run() == 200
    turns, client = Turns(), Client(app, path, body)
    with turns.counted():
        status = await client.run()
    assert status == 200, client.text[:300]
    assert turns.most < short.most + MORE_CALLS


def test_the_front_reads_a_list_of_token_ids_without_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = list(range(100_000))
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    data = msgspec.json.encode({"prompt": numbers})
    sys.setprofile(count)
    try:
        request = read_request("/v1/completions", data)
    finally:
        sys.setprofile(None)
    assert request.token_ids == tuple(numbers)
    assert num_calls < len(numbers) / 20


ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a " * LONG}]},
    "/v1/completions": {"prompt": "a " * LONG},
    "/v1/responses": {"input": "a " * LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": "a " * LONG}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a " * LONG}]},
    "/v1/embeddings": {"input": "a " * LONG},
    "/tokenize": {"prompt": "a " * LONG},
    "/detokenize": {"tokens": [1] * LONG},
}


class Gate:
    """Holds all threads of a queue of long work until it is opened."""

    def __init__(self, llm: FakeLLM) -> None:
        self._open = threading.Event()
        self._held = [asyncio.ensure_future(llm.long_work.run(self._open.wait, LONG, "other")) for _ in range(2)]

    async def open(self) -> None:
        """Let them go on."""
        self._open.set()
        await asyncio.gather(*self._held)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks do."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", ROUTES)
async def test_what_waits_for_its_turn_is_dropped_when_its_client_leaves(path: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(tokenizer=tokenizer)
    app, gate = build_app(llm, "m"), Gate(llm)  # type: ignore[arg-type]
    client = Client(app, path, ROUTES[path])
    answer = asyncio.ensure_future(client.run())
    await until(lambda: llm.long_work.num_waiting == 1)
    client.leave()
    await until(answer.done)
    assert llm.long_work.num_waiting == 0 and client.status == 499 and not llm.submitted
    await gate.open()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_tenant_waits_for_one_of_anothers_and_not_for_all(path: str, tokenizer: Tokenizer) -> None:
    llm = FakeLLM(tokenizer=tokenizer)
    app, gate = build_app(llm, "m"), Gate(llm)  # type: ignore[arg-type]
    order: list[str] = []

    async def run(tenant: str) -> None:
        await Client(app, path, ROUTES[path], tenant).run()
        order.append(tenant)

    many = [asyncio.ensure_future(run("many")) for _ in range(12)]
    await until(lambda: llm.long_work.num_waiting == 12)
    one = asyncio.ensure_future(run("one"))
    await until(lambda: llm.long_work.num_waiting == 13)
    await gate.open()
    await asyncio.gather(*many, one)
    assert order.index("one") < 11


async def test_a_full_queue_takes_from_the_tenant_that_has_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "LONG_WORK_WAITING", 4)
    llm = FakeLLM()
    gate, queue = Gate(llm), llm.long_work
    await asyncio.sleep(0)
    many = [asyncio.ensure_future(queue.run(list, LONG, "many")) for _ in range(4)]
    await until(lambda: queue.num_waiting == 4)
    few = [asyncio.ensure_future(queue.run(list, LONG, "few")) for _ in range(2)]
    await until(lambda: many[2].done() and many[3].done())
    for refused in (many[2], many[3], asyncio.ensure_future(queue.run(list, LONG, "few"))):
        with pytest.raises(OverloadedError):
            await refused
    with pytest.raises(OverloadedError):
        await queue.run(list, LONG, "many")
    reply = asyncio.ensure_future(queue.run(list, LONG, "many", is_reply=True))  # what was served is written
    await gate.open()
    assert await asyncio.gather(*many[:2], *few, reply) == [[]] * 5
    assert (queue.num_waiting, queue.num_bytes) == (0, 0)


async def test_long_work_ends_at_its_next_step_when_its_caller_is_gone() -> None:
    queue, begun, gone, ended = LongWork(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gone.wait()
        try:
            check_wanted()
        except UnwantedWorkError:
            ended.set()
            raise

    caller = asyncio.ensure_future(queue.run(work, LONG))
    await until(begun.is_set)
    caller.cancel()
    await asyncio.wait([caller])
    gone.set()
    await until(lambda: not queue.num_bytes)
    assert ended.is_set()
    check_wanted()  # elsewhere, nobody is gone
    assert await queue.run(lambda: check_wanted() or 1, LONG) == 1  # type: ignore[func-returns-value]


@pytest.mark.parametrize("work", ["decode", "encode", "render", "validate"])
async def test_reading_writing_and_rendering_go_in_steps(work: str, tokenizer: Tokenizer) -> None:
    """Each asks more than once whether it is still wanted, and ends there."""
    messages = [TURN] * COUNT
    data = msgspec.json.encode({"messages": messages})
    works: dict[str, Callable[[], Any]] = {
        "decode": lambda: sliced_json.decode(data),
        "encode": lambda: sliced_json.encode({"tokens": list(range(1 << 16))}),
        "render": lambda: tokenizer.render_chat(messages),
        "validate": lambda: ChatBody.model_validate({"messages": messages}),
    }
    for most in (0, 1, 2):
        asked = Countdown(most)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(long_work, "_current", asked)
            if work == "decode":
                patch.setattr(sliced_json, "DIRECT_BYTES", 0)
                patch.setattr(sliced_json, "SMALL_BYTES", 0)
            with pytest.raises(UnwantedWorkError):
                works[work]()


class Countdown:
    """What a thread knows of its caller: it is gone after a number of questions."""

    def __init__(self, left: int) -> None:
        self._left = left

    @property
    def is_unwanted(self) -> threading.Event:
        """Set when the questions are over."""
        event = threading.Event()
        if self._left <= 0:
            event.set()
        self._left -= 1
        return event


async def posted(path: str, body: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, dict[str, Any]]:
    """The status and the error of a reply."""
    client = Client(build_app(FakeLLM(tokenizer=tokenizer), "m"), path, body)  # type: ignore[arg-type]
    status = await client.run()
    return status, msgspec.json.decode(client.text).get("error") or {}


async def test_the_limits_of_what_takes_long(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(edge_limits, "BIASES", 4)
    for count, status in ((2, 200), (3, 400)):
        biases = {str(number): 1 for number in range(count)}
        found, error = await posted("/v1/completions", {"prompt": "a", "n": 2, "logit_bias": biases}, tokenizer)
        assert found == status and (status == 200 or "at most 4 in all" in error["message"])
    monkeypatch.setattr(edge_limits, "CONTEXT_EDITS", 2)
    for count, status in ((2, 200), (3, 400)):
        body = {"messages": [TURN], "context_management": {"edits": EDITS["edits"] * count}}
        found, error = await posted("/v1/messages/count_tokens", body, tokenizer)
        assert found == status and (status == 200 or "at most 2" in error["message"])
    most = edge_limits.MESSAGES
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        found, error = await posted(path, {**SHORT[path], name: [TURN] * (most + 1)}, tokenizer)
        assert found == 400 and error["param"] == name and str(most) in error["message"]
    assert len(ChatBody.model_validate({"messages": [TURN] * most}).messages) == most
    num_tokens = len(tokenizer.encode("a b c d e f"))
    for limit, status in ((num_tokens + 1, 200), (num_tokens, 400)):
        monkeypatch.setattr(edge_limits, "TOKEN_IDS", limit)
        found, error = await posted("/tokenize", {"prompt": "a b c d e f"}, tokenizer)
        assert found == status and (status == 200 or error["param"] == "prompt")
    assert (await posted("/v1/chat/completions", SHORT["/v1/chat/completions"], tokenizer))[0] == 200
    monkeypatch.setattr(edge_limits, "CHAT_PROCESSOR_S", -1.0)  # over before it begins
    found, error = await posted("/v1/chat/completions", SHORT["/v1/chat/completions"], tokenizer)
    assert (found, error["code"], error["param"]) == (400, "conversation_too_long", "messages")


def steps_of(work: Callable[[], Any]) -> int:
    """How often a function that joins texts is called."""
    joins = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal joins
        joins += event == "call" and "join" in frame.f_code.co_name

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return joins


def test_what_belongs_together_is_joined_once() -> None:
    """A text to which others are added one by one would be copied as often."""
    users = [{"role": "user", "content": f"{number}"} for number in range(500)]
    results = [{"role": "tool", "tool_call_id": "c", "content": "r"}, *users]
    assert steps_of(lambda: list(template_messages.relaxed(users))) < 50
    assert steps_of(lambda: list(template_messages.relaxed([TURN, *results]))) < 50
    assert steps_of(lambda: with_generic_tools(results, [], takes_system=True)) < 5
    [joined] = template_messages._neighbours_joined(users)
    assert joined["content"] == "\n\n".join(str(number) for number in range(500))


async def test_long_prompts_are_checked_and_hashed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, threads = FakeLLM(), set[int]()
    llm: Any = object.__new__(AsyncLLM)
    llm.long_work, llm.options, llm._needs_hashes = fake.long_work, fake.options, True
    llm.require_ready = fake.require_ready
    submitted: list[Any] = []

    async def submit(*arguments: Any) -> None:
        submitted.append(arguments)

    llm._submit, llm._check_room = submit, lambda *_: None

    def noted(*arguments: Any) -> tuple[bytes, ...]:
        threads.add(threading.get_ident())
        return hash_blocks(*arguments)

    monkeypatch.setattr(async_llm, "hash_blocks", noted)
    prompts, sampling = [[1] * 1000, [2] * 1000] * 10, SamplingParams(max_tokens=1)
    await llm.submit_in_turn(prompts, sampling)
    assert threads and threading.get_ident() not in threads
    hashes = submitted[0][-1]
    assert hashes == [hash_blocks(prompt, llm.options.memory.block_size) for prompt in prompts]
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        await llm.submit_in_turn([[1] * 4000, [1] * 999, [10**9]], sampling)
    await llm.submit_in_turn([[1]], sampling)
    assert len(submitted) == 2


class FleetOfNumbers:
    """Takes requests as far as there is room, and remembers in which turn of the loop they came."""

    def __init__(self, room: int) -> None:
        self.left, self.sizes, self.aborted = room, list[int](), 0

    def room(self, service_class: str) -> int:
        return self.left

    def submit(self, submissions: list[Any], num_tokens: int = 0) -> None:
        self.left -= len(submissions)
        self.sizes.append(len(submissions))

    def abort(self, generation: Any) -> None:
        self.aborted += 1


def llm_with(fleet: FleetOfNumbers) -> Any:
    fake = FakeLLM()
    llm: Any = object.__new__(AsyncLLM)
    llm.long_work, llm.options, llm.tokenizer, llm._needs_hashes = fake.long_work, fake.options, fake.tokenizer, False
    llm.require_ready = lambda: msgspec.structs.replace(fake.require_ready(), max_waiting=4096)
    llm._streams, llm.fleet, llm.journal = OutputStreams(Mock()), fleet, None
    return llm


async def test_a_request_of_many_answers_is_submitted_in_turns() -> None:
    fleet, turns = FleetOfNumbers(10**6), 0
    count = 5 * async_llm.SUBMITTED_AT_ONCE + 3
    task = asyncio.create_task(llm_with(fleet).submit_in_turn([[1]] * count, SamplingParams(max_tokens=1)))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert sum(fleet.sizes) == count == len(task.result().streams)
    assert max(fleet.sizes) == async_llm.SUBMITTED_AT_ONCE and turns >= 2 * 5


async def test_more_answers_than_there_is_room_for_are_refused_before_any_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FleetOfNumbers(99)
    llm = llm_with(fleet)
    with monkeypatch.context() as patched, pytest.raises(OverloadedError, match="room for 99 more"):
        patched.delattr(async_llm, "AnswerStream")
        patched.setattr(AsyncLLM, "_checked", None)  # no prompt is hashed
        await llm.submit_in_turn([[1]] * 100, SamplingParams(max_tokens=1))
    assert not fleet.sizes
    assert len((await llm.submit_in_turn([[1]] * 99, SamplingParams(max_tokens=1))).streams) == 99


async def test_a_client_that_leaves_while_its_answers_are_submitted_takes_them_back() -> None:
    fleet = FleetOfNumbers(10**6)
    llm = llm_with(fleet)
    task = asyncio.create_task(llm.submit_in_turn([[1]] * 1000, SamplingParams(max_tokens=1)))
    while not fleet.sizes:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(fleet.sizes) < 1000 and fleet.aborted == 1
