"""A generation on its way to a client that reads, leaves, or gets an error, without a server."""

import asyncio
import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fake_llm import FakeLLM

from diptych.control.errors import ContextLengthError, DiptychError, OverloadedError, WorkerError
from diptych.control.request import RequestOptions, SamplingParams
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.api.api_flavour import CHAT, chat_failure
from diptych.serving.api.direct_body import DIRECT_BODY
from diptych.serving.api.responses import GenerationResponse

pytestmark = pytest.mark.asyncio
DONE = CHAT.done


class Words:
    """A Writer that lists token ids."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def opening(self) -> bytes:
        return b"head;"

    def pause(self) -> bytes:
        return b"pause;"

    def failure(self, error: DiptychError) -> bytes:
        return chat_failure(error)

    def events(self, deltas: Iterable[Delta]) -> bytes:
        if self._fails:
            raise RuntimeError("a bug")
        return b"".join(b"%d;" % token for delta in deltas for token in delta.token_ids)

    def last_events(self) -> bytes:
        return b"usage;"

    def body(self, deltas: Iterable[Delta]) -> bytes:
        return json.dumps([token for delta in deltas for token in delta.token_ids]).encode()


class Client:
    """The other side of one ASGI call. on_sent: called with each message before it counts as sent."""

    def __init__(self, on_sent: Callable[[Any], None] = lambda message: None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._on_sent = on_sent
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self._on_sent(message)
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", self.sent[-1]["type"].endswith("start"))


class Direct:
    """A DirectBody that takes everything at once. is_full: it takes nothing."""

    def __init__(self, is_full: bool = False) -> None:
        self.written: list[bytes] = []
        self._is_full = is_full

    def count_unsent(self) -> int:
        return 0

    def writes(self, take: Callable[[], bytes]) -> Callable[[], bool]:
        def write() -> bool:
            if self._is_full:
                return False
            if body := take():
                self.written.append(body)
            return True

        return write


def response(llm: FakeLLM, *, stream: bool, writer: Words | None = None, max_tokens: int = 4) -> GenerationResponse:
    generation = llm.submit([[7, 7]], SamplingParams(max_tokens=max_tokens), "id", RequestOptions())
    return GenerationResponse(llm, generation, writer or Words(), stream=stream)  # type: ignore[arg-type]


async def run(answer: GenerationResponse, client: Client, **extensions: Any) -> None:
    scope = {"type": "http", "method": "POST", "extensions": extensions}
    await asyncio.wait_for(answer(scope, client.receive, client.send), 10)


async def test_a_whole_reply_is_one_body() -> None:
    llm, client = FakeLLM(), Client()
    await run(response(llm, stream=False), client)
    assert (client.status, client.body, client.is_complete) == (200, b"[2, 3, 4, 5]", True)
    assert not llm.submitted[0].is_aborted


async def test_a_stream_is_its_events_the_last_ones_and_done() -> None:
    llm, client = FakeLLM(), Client()
    await run(response(llm, stream=True), client)
    assert (client.status, client.body, client.is_complete) == (200, b"head;2;3;4;5;usage;" + DONE, True)
    assert dict(client.sent[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize("is_full", [True, False])
async def test_what_a_connection_takes_at_once_is_written_at_once(is_full: bool) -> None:
    llm, client, direct = FakeLLM(), Client(), Direct(is_full)
    await run(response(llm, stream=True), client, **{DIRECT_BODY: {"body": direct}})
    assert bool(direct.written) != is_full
    sent = b"".join(sorted([*client.body.split(b";"), *b"".join(direct.written).split(b";")]))
    assert sent == b"".join(sorted([*b"head;2;3;4;5;usage;".split(b";"), DONE]))


class Lines(Words):
    """A Writer of events whose texts have what ``str.splitlines`` takes for the end of a line."""

    text = "a\x85b\u2028c\u2029d\u2027é"

    def opening(self) -> bytes:
        return self.last_events()

    def events(self, deltas: Iterable[Delta]) -> bytes:
        return b"".join(self.last_events() for delta in deltas for _ in delta.token_ids)

    def last_events(self) -> bytes:
        return b"data: " + json.dumps({"text": self.text}, ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize("direct", [None, Direct()])
async def test_events_are_whole_lines_for_every_reader(direct: Direct | None) -> None:
    client = Client()
    extensions = {DIRECT_BODY: {"body": direct}} if direct else {}
    await run(response(FakeLLM(), stream=True, writer=Lines()), client, **extensions)
    text = (client.body.removesuffix(DONE) + b"".join(direct.written if direct else [])).decode()
    lines = [line for line in text.splitlines() if line]
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == [{"text": Lines.text}] * 6


class OddWords(Words):
    """A Writer that keeps even tokens to itself."""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        return b"".join(b"%d;" % token for delta in deltas for token in delta.token_ids if token % 2)


async def test_a_delta_that_gives_no_event_writes_nothing() -> None:
    for direct in (Direct(is_full=False), None):
        client = Client()
        await run(
            response(FakeLLM(), stream=True, writer=OddWords()),
            client,
            **({DIRECT_BODY: {"body": direct}} if direct else {}),
        )
        assert b"" not in (direct.written if direct else [])
        assert all(message.get("body") != b"" for message in client.sent)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"), [(ContextLengthError("too long", param="prompt"), 400), (OverloadedError("full"), 429)]
)
async def test_an_error_before_the_first_token_is_the_reply(stream: bool, error: DiptychError, status: int) -> None:
    llm, client = FakeLLM(error=error), Client()
    await run(response(llm, stream=stream), client)
    assert (client.status, client.is_complete) == (status, True)
    assert json.loads(client.body)["error"]["message"] == error.message
    assert (b"retry-after" in dict(client.sent[0]["headers"])) == (status == 429)


async def test_an_error_within_a_stream_is_its_last_event() -> None:
    llm, client = FakeLLM(error=WorkerError("the worker died"), fail_after=2), Client()
    await run(response(llm, stream=True), client)
    *_, event = client.body.removesuffix(b"\n\n" + DONE).split(b"data: ")
    assert json.loads(event)["error"]["code"] == "worker_failed"
    assert (client.status, client.is_complete) == (200, True)


async def test_an_error_within_a_whole_reply_is_the_reply() -> None:
    llm, client = FakeLLM(error=WorkerError("the worker died"), fail_after=2), Client()
    await run(response(llm, stream=False), client)
    assert (client.status, json.loads(client.body)["error"]["code"]) == (500, "worker_failed")


async def test_a_bug_within_a_stream_is_logged_and_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    llm, client = FakeLLM(), Client()
    with caplog.at_level(logging.ERROR):
        await run(response(llm, stream=True, writer=Words(fails=True)), client)
    assert b"internal error" in client.body
    assert client.body.endswith(DONE)
    assert "a stream failed" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause_after", [0, 2])
async def test_a_client_that_leaves_aborts_its_request(stream: bool, pause_after: int) -> None:
    llm, client = FakeLLM(pause_after=pause_after), Client()
    running = asyncio.create_task(run(response(llm, stream=stream, max_tokens=1000), client))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not llm.submitted[0].is_aborted
    client.leave()
    await running
    assert llm.submitted[0].is_aborted
    assert not client.is_complete


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_reply_that_is_over_is_freed_without_a_search_for_garbage(leaves: bool) -> None:
    llm, client = FakeLLM(pause_after=2 if leaves else 0), Client()
    gc.collect()
    gc.disable()
    try:
        reply = response(llm, stream=True)
        freed = weakref.ref(reply)
        running = asyncio.create_task(run(reply, client))
        for _ in range(20):
            await asyncio.sleep(0)
        client.leave()
        await running
        del running, reply
        await asyncio.sleep(0)
        assert freed() is None
    finally:
        gc.enable()


async def test_a_reply_that_cannot_be_sent_aborts_its_request() -> None:
    def refuse(message: Any) -> None:
        raise OSError("broken pipe")

    llm = FakeLLM(pause_after=1)
    with pytest.raises(OSError, match="broken pipe"):
        await run(response(llm, stream=True), Client(refuse))
    assert llm.submitted[0].is_aborted
