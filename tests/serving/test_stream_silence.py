"""When the bytes of a stream go out, in all dialects, with a clock that stands still while there is something to do."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from fake_llm import FakeLLM
from tool_model import tool_model
from virtual_time import in_virtual_time, virtual_time

from diptych.bench.token_stream import TokenStream
from diptych.control.errors import (
    ContextLengthError,
    DiptychError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WorkerError,
)
from diptych.control.request import RequestOptions, SamplingParams
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api import responses
from diptych.serving.api.api_flavour import CHAT, COMMENT, PING
from diptych.serving.api.app import build_app
from diptych.serving.api.completions import CompletionWriter
from diptych.serving.api.direct_body import DIRECT_BODY
from diptych.serving.api.protocol import CompletionBody
from diptych.serving.api.reply import ReplyContext
from diptych.serving.api.resumable import ResumableWriter
from diptych.serving.front.reply_chunks import EventSplitter

LONGEST_SILENCE_S = 15.0
ANSWER = "The answer has a few tokens."
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 40, "stream": True}
SAID: Any = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": ASKED | {"prompt": "Hi"},
    "/v1/chat/completions": ASKED | {"messages": SAID},
    "/v1/messages": ASKED | {"messages": SAID},
    "/v1/responses": {"model": "fake", "stream": True, "input": "Hi", "store": False},
}
FIRST = {
    "/v1/completions": COMMENT,
    "/v1/chat/completions": b'"role":"assistant"',
    "/v1/messages": b"event: message_start",
    "/v1/responses": b"event: response.in_progress",
}
ALL = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


@dataclass
class Client:
    """One call of an application. sent: what it got, each with the second at which it came; the head is one of them."""

    body: dict[str, Any]
    path: str
    sent: list[tuple[float, bytes]] = field(default_factory=list)
    status: int = 0
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    _has_asked: bool = False

    async def receive(self) -> dict[str, Any]:
        if self._has_asked:
            await asyncio.Event().wait()
        self._has_asked = True
        return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.sent.append((virtual_time().now / 1e9, message.get("body", b"")))
        await self.reads.wait()

    def wake_receive(self) -> None:
        """Nobody waits in ``receive``."""

    def count_unsent(self) -> int:
        return 0

    def writes(self, take: Callable[[], bytes]) -> Callable[[], bool]:
        def write() -> bool:
            if body := take():
                self.sent.append((virtual_time().now / 1e9, body))
            return True

        return write

    @property
    def content(self) -> bytes:
        return b"".join(data for _, data in self.sent)

    @property
    def longest_silence_s(self) -> float:
        times = [time_s for time_s, _ in self.sent]
        return max(after - before for before, after in pairwise(times))


class Asked:
    """A request that is under way, with the model and the client at its ends."""

    def __init__(
        self, path: str, tokenizer: Tokenizer, *, reads: bool = True, at_once: bool = False, **model: Any
    ) -> None:
        self.llm = FakeLLM(**{"answer": ANSWER, "tokenizer": tokenizer} | model)
        self.client = Client(BODIES[path], path)
        if reads:
            self.client.reads.set()
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "",
            "extensions": {DIRECT_BODY: {"body": self.client}} if at_once else {},
        }  # fmt: skip
        app: Any = build_app(self.llm, "fake")  # type: ignore[arg-type]
        self.call = asyncio.create_task(app(scope, self.client.receive, self.client.send))

    async def end(self) -> bytes:
        """Go on, and read the rest."""
        self.llm.go_on.set()
        await self.call
        return self.client.content


async def at(second: float) -> None:
    await virtual_time().until(round(second * 1e9))


def events_of(content: bytes) -> list[dict[str, Any]]:
    """The data of every event, but of what only fills a pause."""
    found = [json.loads(data) for data in EventSplitter().feed(content) if data != b"[DONE]"]
    created = [event for event in found if event.get("type") == "response.in_progress"][1:]
    return [event for event in found if event not in created and event.get("type") != "ping"]


def without_ids(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what differs from one answer to the next."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items() if name not in VARYING}
        return [plain(part) for part in value] if isinstance(value, list) else value

    return dict(plain(event))


VARYING = ("id", "item_id", "created", "created_at", "sequence_number")


def sequence_numbers(content: bytes) -> list[int]:
    return [json.loads(data)["sequence_number"] for data in EventSplitter().feed(content)]


@ALL
@in_virtual_time
async def test_a_stream_begins_when_a_worker_begins_with_its_prompt(path: str, tokenizer: Tokenizer) -> None:
    asked = Asked(path, tokenizer, admits=True, pause_after=0)
    await at(0.1)
    assert asked.client.status == 200
    await at(0.5)
    assert FIRST[path] in asked.client.content
    assert events_of(await asked.end())


@ALL
@in_virtual_time
async def test_a_stream_begins_after_a_second_in_the_queue(path: str, tokenizer: Tokenizer) -> None:
    asked = Asked(path, tokenizer, pause_after=0)
    await at(responses.OPEN_AFTER_S - 0.1)
    assert not asked.client.sent
    await at(responses.OPEN_AFTER_S + 0.1)
    assert asked.client.status == 200
    await at(responses.OPEN_AFTER_S + 0.5)
    assert FIRST[path] in asked.client.content
    assert events_of(await asked.end())


@ALL
@in_virtual_time
async def test_a_stream_whose_tokens_come_at_once_has_no_comment(path: str, tokenizer: Tokenizer) -> None:
    asked = Asked(path, tokenizer, admits=True, pause_after=0)
    await at(0.3)
    content = await asked.end()
    assert COMMENT not in content and b"event: ping" not in content


@ALL
@pytest.mark.parametrize("pause_after", [0, 2])
@in_virtual_time
async def test_a_stream_is_never_silent_for_long_and_says_what_it_would_have_said(
    path: str, pause_after: int, tokenizer: Tokenizer
) -> None:
    silent = Asked(path, tokenizer, admits=True, pause_after=pause_after)
    await at(1000)
    content = await silent.end()
    assert silent.client.longest_silence_s <= LONGEST_SILENCE_S
    assert len(silent.client.sent) < 2 * 1000 / responses.SILENCE_S
    swift = await Asked(path, tokenizer).end()
    told = [list(map(without_ids, events_of(reply))) for reply in (content, swift)]
    assert text_of(told[0]) == text_of(told[1]) == ANSWER
    assert told[0][-1] == told[1][-1]
    if path == "/v1/responses":
        assert sequence_numbers(content) == list(range(len(sequence_numbers(content))))


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of an answer, whatever its dialect."""
    text = ""
    for event in events:
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if event.get("type") == "content_block_delta":
            text += event["delta"]["text"]
        if event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return text


@ALL
@pytest.mark.parametrize("at_once", [True, False])
@in_virtual_time
async def test_a_pause_comes_late_after_a_token_whichever_way_it_was_written(
    path: str, at_once: bool, tokenizer: Tokenizer
) -> None:
    asked = Asked(path, tokenizer, at_once=at_once, pause_after=2)
    await at(responses.SILENCE_S - 1)
    assert not any(pause in asked.client.content for pause in (COMMENT, PING))
    await at(responses.SILENCE_S + 1)
    assert any(pause in asked.client.content for pause in (COMMENT, PING))
    assert text_of(events_of(await asked.end())) == ANSWER


@ALL
@in_virtual_time
async def test_nothing_is_added_for_a_client_that_does_not_read(path: str, tokenizer: Tokenizer) -> None:
    asked = Asked(path, tokenizer, reads=False, admits=True, pause_after=2)
    await at(1000)
    assert len(asked.client.sent) == 1
    asked.client.reads.set()
    await at(1001)
    assert len(asked.client.sent) > 1
    assert text_of(events_of(await asked.end())) == ANSWER


FAILURES = [
    WorkerError("the worker died"),
    UnavailableError("waited too long", code="queue_timeout"),
    RuntimeError("x"),
]


@ALL
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fail_after", [0, 2])
@in_virtual_time
async def test_what_fails_after_the_head_fails_in_the_stream(
    path: str, error: Exception, fail_after: int, tokenizer: Tokenizer
) -> None:
    asked = Asked(path, tokenizer, admits=True, pause_after=fail_after, fail_after=fail_after, error=error)
    await at(100)
    content = await asked.end()
    assert asked.client.status == 200
    message = error.message if isinstance(error, DiptychError) else "internal error; the server's log has the details"
    last = events_of(content)[-1]
    said = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert said["message"] == message
    if path == "/v1/messages":
        kind = "overloaded_error" if isinstance(error, UnavailableError) else "api_error"
        assert (last["type"], said["type"]) == ("error", kind)
        assert content.rpartition(b"event: ")[2].startswith(b"error\n")
    elif path == "/v1/responses":
        assert (last["type"], last["response"]["status"], said["code"]) == ("response.failed", "failed", "server_error")
        assert sequence_numbers(content) == list(range(len(sequence_numbers(content))))
    else:
        assert content.endswith(b"data: [DONE]\n\n")


@ALL
@pytest.mark.parametrize(
    ("error", "status"), [(OverloadedError("full", code="queue_full"), 429), (ContextLengthError("too long"), 400)]
)
@in_virtual_time
async def test_what_is_refused_at_once_has_a_status(
    path: str, error: DiptychError, status: int, tokenizer: Tokenizer
) -> None:
    asked = Asked(path, tokenizer, error=error)
    content = await asked.end()
    assert asked.client.status == status
    assert error.message in json.loads(content)["error"]["message"]


CODES = [
    (ContextLengthError("too long"), "context_length_exceeded", "too long"),
    (OverloadedError("full", retry_after_s=7), "rate_limit_exceeded", "full. Please try again in 7s."),
    (InvalidRequestError("wrong"), "invalid_prompt", "wrong"),
    (WorkerError("it kills workers", code="poison_request"), "invalid_prompt", "it kills workers"),
    (WorkerError("lost"), "server_error", "lost"),
]


@pytest.mark.parametrize(("error", "code", "message"), CODES, ids=[code for _, code, _ in CODES])
@in_virtual_time
async def test_a_response_that_fails_says_by_its_code_whether_to_ask_again(
    error: DiptychError, code: str, message: str, tokenizer: Tokenizer
) -> None:
    content = await Asked("/v1/responses", tokenizer, admits=True, fail_after=3, error=error).end()
    last = events_of(content)[-1]["response"]
    assert (last["error"]["code"], last["error"]["message"]) == (code, message)
    assert [item["status"] for item in last["output"]] == ["incomplete"]


@in_virtual_time
async def test_the_end_of_a_message_knows_the_cached_tokens_that_its_head_did_not(tokenizer: Tokenizer) -> None:
    asked = Asked("/v1/messages", tokenizer, admits=True, pause_after=0)
    await at(50)
    events = events_of(await asked.end())
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert (events[0]["type"], events[-2]["type"]) == ("message_start", "message_delta")
    assert (first["cache_read_input_tokens"], last["cache_read_input_tokens"]) == (0, 1)
    assert first["input_tokens"] == last["input_tokens"] + last["cache_read_input_tokens"]


# -- those who read such streams --------------------------------------------------------------------------------------


async def paused(path: str, tokenizer: Tokenizer) -> bytes:
    """A stream with pauses before its first token, and between tokens."""
    asked = Asked(path, tokenizer, admits=True, pause_after=0)
    await at(100)
    return await asked.end()


def replay(content: bytes) -> httpx.MockTransport:
    """A server that sends this, cut into pieces."""

    def pieces() -> Iterator[bytes]:
        for begin in range(0, len(content), 7):
            yield content[begin : begin + 7]

    headers = {"content-type": "text/event-stream"}
    return httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=pieces()))


def openai_texts(content: bytes, ask: Callable[[openai.OpenAI], Any]) -> list[Any]:
    with closing(httpx.Client(transport=replay(content))) as http:
        return list(ask(openai.OpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)))


@in_virtual_time
async def test_openai_s_client_reads_streams_with_pauses(tokenizer: Tokenizer) -> None:
    content = await paused("/v1/chat/completions", tokenizer)
    chunks = openai_texts(content, lambda client: client.chat.completions.create(**BODIES["/v1/chat/completions"]))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    content = await paused("/v1/completions", tokenizer)
    chunks = openai_texts(content, lambda client: client.completions.create(**BODIES["/v1/completions"]))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    content = await paused("/v1/responses", tokenizer)
    events = openai_texts(content, lambda client: client.responses.create(**BODIES["/v1/responses"]))
    assert events[-1].response.output_text == ANSWER


@in_virtual_time
async def test_anthropic_s_client_reads_streams_with_pauses_and_adds_up_their_usage(tokenizer: Tokenizer) -> None:
    anthropic = pytest.importorskip("anthropic")
    httpx2 = pytest.importorskip("httpx2")
    content = await paused("/v1/messages", tokenizer)
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=content))
    with httpx2.Client(transport=transport) as http:
        client = anthropic.Anthropic(base_url="http://test", api_key="none", max_retries=0, http_client=http)
        with client.messages.stream(model="fake", max_tokens=40, messages=SAID) as stream:
            reply = stream.get_final_message()
    assert reply.content[0].text == ANSWER
    assert reply.usage.cache_read_input_tokens == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_virtual_time
async def test_a_measurement_takes_no_pause_for_a_token(path: str, tokenizer: Tokenizer) -> None:
    content = await paused(path, tokenizer)
    stream = TokenStream(0)
    stream.status = 200
    for number in range(len(content)):
        stream.feed(content[number : number + 1], number)
    stream.finish(len(content))
    assert stream.is_complete
    assert len(stream.stamps) == len(tokenizer.encode(ANSWER, add_special_tokens=False))
    before = content[: stream.stamps[0]].count(b"keep-alive")
    assert before == content.count(b"keep-alive") > 2  # the first stamp is that of the first token


@in_virtual_time
async def test_a_pause_of_a_stream_with_ids_is_no_event_for_openai_s_client(tokenizer: Tokenizer) -> None:
    generation = FakeLLM(answer=ANSWER).submit([[1]], SamplingParams(), "cmpl", RequestOptions())
    body = CompletionBody(**BODIES["/v1/completions"])
    writer = ResumableWriter(CompletionWriter(ReplyContext(generation, body, tokenizer, "fake", 0), body, []), "cmpl")
    a, b = (writer.events([Delta(0, text, [1], [])]) for text in "ab")
    content = b"".join((writer.opening(), writer.pause(), a, writer.pause(), writer.pause(), b, CHAT.done))
    chunks = openai_texts(content, lambda client: client.completions.create(**BODIES["/v1/completions"]))
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b"]
