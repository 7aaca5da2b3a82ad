"""The longest turn of the event loop while the largest body that a route takes is answered, and the longest gap that
others feel, for each route of ``diptych serve`` and ``diptych front``, in one process and without a model.

    python benchmarks/loop_gaps.py [--only WORD] [--json FILE]

turn: processor time of the loop's thread in one call of the loop. gap: by the clock, between two turns of a task that
does nothing (it includes what threads and other programs take).
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serving" / "front")]
from front_harness import fronted  # noqa: E402
from tests.serving.fake_llm import FakeLLM  # noqa: E402
from tests.serving.tool_model import tool_model  # noqa: E402

from diptych.runtime.device.garbage import leave_alone_what_is_loaded  # noqa: E402
from diptych.serving import edge_limits  # noqa: E402
from diptych.serving.answers.tokenizer import Tokenizer  # noqa: E402
from diptych.serving.api.app import build_app  # noqa: E402
from diptych.serving.batches.batch_records import BatchLimits  # noqa: E402
from diptych.serving.batches.batch_service import BatchOptions, BatchService  # noqa: E402
from diptych.serving.edge_limits import MESSAGES  # noqa: E402
from diptych.serving.front.engine_spec import EngineSpec  # noqa: E402

CASE_S = 60.0  # a reply that has not begun by then counts as none
MOST_BYTES = (16 << 20) - 65_536
RECEIVED_BYTES = 65_536  # that a connection hands on at once
BATCH_LINES = 4000  # of the batch that is run to its end
RUN_S = 45.0  # a batch that has not ended by then is cancelled
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Turns:
    """The longest turn of the running loop, and the longest gap, since ``begin``."""

    def __init__(self) -> None:
        self.turn_ms = self.gap_ms = 0.0
        self.what = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the turns of this thread's loop."""
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begin = time.thread_time()
            run(handle)
            took_ms = (time.thread_time() - begin) * 1e3
            if took_ms > self.turn_ms:
                self.turn_ms, self.what = took_ms, repr(handle)[:160]

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.events.Handle._run = run  # type: ignore[method-assign]

    async def tick(self) -> None:
        """Measure gaps until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.gap_ms, last = max(self.gap_ms, (now - last) * 1e3), now


@dataclass(frozen=True)
class Ask:
    """A request. piece_bytes: of its body, that arrive at once (0: all of it)."""

    path: str
    body: bytes = b""
    method: str = "POST"
    content_type: str = "application/json"
    piece_bytes: int = 0


def asks_of(cases: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Ask]]:
    """The requests of cases, each encoded when its turn comes."""
    for name, (path, body) in cases.items():
        yield name, Ask(path, msgspec.json.encode(body))


async def sent(app: Any, ask: Ask) -> tuple[int, int, bytes]:
    """The status of the reply, its length, and its first bytes."""
    path, _, query = ask.path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": ask.method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "extensions": {}, "state": {},
        "headers": [(b"host", b"127.0.0.1:8000"), (b"content-type", ask.content_type.encode()),
                    (b"content-length", str(len(ask.body)).encode())],
    }  # fmt: skip
    size, at, found, head = ask.piece_bytes or max(1, len(ask.body)), 0, [0, 0], bytearray()
    has_ended = False

    async def receive() -> dict[str, Any]:
        nonlocal at, has_ended
        if has_ended:
            await asyncio.Event().wait()
        piece, at = ask.body[at : at + size], at + size
        has_ended = at >= len(ask.body)
        return {"type": "http.request", "body": piece, "more_body": not has_ended}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found[0] = message["status"]
        body = message.get("body", b"")
        found[1] += len(body)
        if len(head) < RECEIVED_BYTES:
            head.extend(body)

    await app(scope, receive, send)
    return found[0], found[1], bytes(head)


def conversations(count: int, most: int) -> dict[str, dict[str, Any]]:
    """The largest lists of messages (most of them), each heavy in another way."""
    turn = {"role": "user", "content": "a"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    return {
        "messages": {"messages": [turn] * most},
        "refused roles": {"messages": [turn, {"role": "odd", "content": "a"}] * (most // 2)},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]},
        "long text": {"messages": [{"role": "user", "content": "word " * (MOST_BYTES // 5)}]},
        "calls": {"messages": asked * (most // 2), "tools": [TOOL]},
        "one role after the other": {"messages": [{"role": "user", "content": "a" * 900}] * most},
        "one message, many calls": {"messages": [turn, {**asked[0], "tool_calls": [call] * (count // 4)}]},
        "100 messages": {"messages": [turn] * 100},
    }


def serve_cases(count: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> path and body."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    few = {"max_tokens": 2}
    for name, body in conversations(count, MESSAGES).items():
        cases[f"chat, {name}"] = "/v1/chat/completions", {**body, **few}
        cases[f"tokenize, {name}"] = "/tokenize", body
    turn = {"role": "user", "content": "a"}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    anthropic = {
        "messages": [turn] * MESSAGES,
        "blocks": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}],
        "calls": [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}] * (MESSAGES // 2),
        "answer in parts": [
            turn,
            {"role": "assistant", "content": [{"type": "text", "text": "a" * 200}] * count},
            turn,
        ],
        "long text": [{"role": "user", "content": "word " * (MOST_BYTES // 5)}],
    }
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}]}
    for name, messages in anthropic.items():
        body = {"messages": messages}
        cases[f"messages, {name}"] = "/v1/messages", {**body, **few}
        cases[f"count_tokens, {name}"] = "/v1/messages/count_tokens", body
    cases["count_tokens, edits"] = (
        "/v1/messages/count_tokens",
        {"messages": anthropic["calls"], "context_management": edits},
    )
    item = {"type": "message", "role": "user", "content": "a"}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    cases["responses, items"] = "/v1/responses", {"input": [item] * MESSAGES}
    cases["responses, calls"] = "/v1/responses", {"input": [made, output] * (MESSAGES // 2)}
    spoken = {"type": "message", "role": "assistant", "content": "a" * 900}
    cases["responses, answers in a row"] = "/v1/responses", {"input": [item, *([spoken] * (MESSAGES - 2)), item]}
    cases["responses, long text"] = "/v1/responses", {"input": "word " * (MOST_BYTES // 5)}
    cases["completions, text"] = "/v1/completions", {"prompt": "word " * (MOST_BYTES // 5), **few}
    cases["completions, truncated text"] = (
        "/v1/completions",
        {"prompt": "word " * (MOST_BYTES // 50), "truncate_prompt_tokens": 10, **few},
    )
    cases["completions, ids"] = "/v1/completions", {"prompt": [1] * (1 << 22), **few}
    cases["completions, prompts"] = "/v1/completions", {"prompt": ["a " * 2000] * 64, **few}
    cases["completions, prompts of ids"] = "/v1/completions", {"prompt": [[1] * 4000] * 500, **few}
    cases["completions, n"] = "/v1/completions", {"prompt": [1] * 4000, "n": 80, **few}
    cases["completions, echo"] = "/v1/completions", {"prompt": [1] * 4000, "echo": True, "logprobs": 20, **few}
    cases["completions, prompt_logprobs"] = "/v1/completions", {"prompt": [1] * 4000, "prompt_logprobs": 20, **few}
    cases["completions, prompt_logprobs, stream"] = (
        "/v1/completions",
        {"prompt": [1] * 4000, "prompt_logprobs": 20, "stream": True, **few},
    )
    cases["completions, prompts with prompt_logprobs"] = (
        "/v1/completions",
        {"prompt": [[1] * 4000] * 16, "prompt_logprobs": 20, **few},
    )
    cases["chat, prompt_logprobs"] = (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a " * 2000}], "prompt_logprobs": 20, **few},
    )
    cases["chat, logprobs of a long answer"] = (
        "/v1/chat/completions",
        {"messages": [turn], "logprobs": True, "top_logprobs": 20, "max_tokens": 2000},
    )
    cases["completions, logit_bias"] = (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {str(number): 1 for number in range(count)}, **few},
    )
    cases["completions, metadata and unknown fields"] = (
        "/v1/completions",
        {"prompt": "a", **{f"field {number}": 1 for number in range(1000)}, **few},
    )
    cases["detokenize"] = "/detokenize", {"tokens": [5] * (1 << 21)}
    cases["tokenize, text"] = "/tokenize", {"prompt": "word " * (MOST_BYTES // 5)}
    cases["embeddings, texts"] = "/v1/embeddings", {"input": ["a " * 100] * 64}
    cases["embeddings, ids"] = "/v1/embeddings", {"input": [1] * (1 << 22)}
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"f{number}"}} for number in range(1024)]  # type: ignore[dict-item]
    cases["chat, tools"] = "/v1/chat/completions", {"messages": [turn], "tools": tools, **few}
    cases["chat, required tools"] = (
        "/v1/chat/completions",
        {"messages": [turn], "tools": tools[:256], "tool_choice": "required", **few},
    )
    return cases


def front_cases(count: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same for the front."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, body in conversations(count, count).items():
        cases[f"front chat, {name}"] = "/v1/chat/completions", {**body, "max_tokens": 2}
    few = {"max_tokens": 2}
    cases["front completions, text"] = "/v1/completions", {"prompt": "word " * (MOST_BYTES // 5), **few}
    cases["front completions, ids"] = "/v1/completions", {"prompt": [1] * (1 << 22), **few}
    cases["front completions, prompts"] = "/v1/completions", {"prompt": ["a"] * (1 << 18), **few}
    cases["front embeddings, texts"] = "/v1/embeddings", {"input": ["a"] * (1 << 18)}
    # The make-believe engines know neither of these: what they answer is 404, when all was read and sent on.
    documents = {"query": "a", "documents": ["a"] * (1 << 18)}
    cases["front rerank, documents"] = "/v1/rerank", documents
    cases["front rerank, long documents"] = "/v1/rerank", {"query": "a", "documents": ["word " * 50_000] * 60}
    cases["front score, texts"] = "/v1/score", {"text_1": "a", "text_2": ["a"] * (1 << 18)}
    cases["front chat, unknown fields"] = (
        "/v1/chat/completions",
        {"messages": [], **{f"field {number}": 1 for number in range(200_000)}},
    )
    return cases


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[EngineSpec]]:
    """Fake engines in processes of their own."""
    script = ROOT / "tests" / "serving" / "front" / "fake_engine.py"
    started = []
    try:
        for _ in range(count):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            started.append((port, await asyncio.create_subprocess_exec(sys.executable, script, "vllm", str(port))))
        yield [EngineSpec("vllm", f"http://127.0.0.1:{port}") for port, _ in started]
    finally:
        for _, process in started:
            process.kill()
            await process.wait()


def form_of(content: bytes, *, num_fields: int = 0) -> tuple[bytes, str]:
    """An upload as a client sends it, and its content type. num_fields: beside the purpose and the file."""
    bound = b"--loop-gaps\r\nContent-Disposition: form-data; name="
    parts = [bound + b'"purpose"\r\n\r\nbatch\r\n']
    parts += [bound + b'"field %d"\r\n\r\n%b\r\n' % (number, b"a" * 1000) for number in range(num_fields)]
    parts += [bound + b'"file"; filename="in.jsonl"\r\n\r\n', content, b"\r\n--loop-gaps--\r\n"]
    return b"".join(parts), "multipart/form-data; boundary=loop-gaps"


def lines_of(count: int, **body: Any) -> bytes:
    """A file of lines for a batch."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], "max_tokens": 2, **body}}
    return b"".join(msgspec.json.encode({"custom_id": f"line {number}", **line}) + b"\n" for number in range(count))


class BatchCases:
    """What is asked of the routes of files and batches, one after the other: a case uses what those before it made."""

    def __init__(self, app: Any, service: BatchService) -> None:
        self._app = app
        self._service = service

    def _upload(self, content: bytes, **more: int) -> Ask:
        body, content_type = form_of(content, **more)
        return Ask("/v1/files", body, content_type=content_type, piece_bytes=RECEIVED_BYTES)

    async def _kept(self, content: bytes) -> str:
        """The id of a file that was uploaded, with nothing measured."""
        _, _, reply = await sent(self._app, self._upload(content))
        return str(json.loads(reply)["id"])

    def _batch(self, file: str) -> Ask:
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return Ask("/v1/batches", msgspec.json.encode(body))

    def _many_files(self) -> None:
        """As many as are kept, of one line each."""
        store = self._service.store
        with store.tables.begin():
            for number in range(edge_limits.FILES - store.tables.count_files()[0]):
                file = self._service.new_file(f"file-{number:032x}", "", "in.jsonl", 0, None)
                store.path(file.id).touch(mode=0o600)
                store.tables.add_file(file)

    async def asks(self) -> AsyncIterator[tuple[str, Ask]]:
        """Name and request. What is asked of a batch is measured until it has ended."""
        largest = b"x" * 1000 + b"\n"
        yield "files, largest upload", self._upload(largest * (edge_limits.FILE_BYTES // len(largest)))
        yield "files, upload of one line", self._upload(b"x" * (64 << 20))
        yield "files, upload of many fields", self._upload(b"{}", num_fields=edge_limits.FORM_PARTS - 2)
        file = await self._kept(lines_of(200_000))
        yield "files, content", Ask(f"/v1/files/{file}/content", method="GET")
        yield "files, delete", Ask(f"/v1/files/{file}", method="DELETE")
        yield "batches, run", self._batch(await self._kept(lines_of(BATCH_LINES)))
        yield "batches, all lines refused", self._batch(await self._kept(lines_of(BATCH_LINES, max_tokens=-1)))
        yield "batches, most lines", self._batch(await self._kept(lines_of(edge_limits.BATCH_LINES)))
        yield "batches, no line is JSON", self._batch(await self._kept(b"x\n" * edge_limits.BATCH_LINES))
        yield "batches, long lines", self._batch(await self._kept(lines_of(4, prompt="word " * (MOST_BYTES // 5))))
        wrong = self._batch(await self._kept(b"x\n" * edge_limits.BATCH_FAULTS))
        for _ in range(edge_limits.LISTED_BATCHES):
            _, _, reply = await sent(self._app, wrong)
            await self.ended(reply)
        yield "batches, list", Ask(f"/v1/batches?limit={edge_limits.LISTED_BATCHES}", method="GET")
        await self._service.in_thread(self._many_files)
        yield "files, longest list", Ask(f"/v1/files?limit={edge_limits.LISTED_FILES}", method="GET")

    async def ended(self, reply: bytes) -> None:
        """Wait until a batch that was created has ended, or cancel it."""
        batch_id, end_s = json.loads(reply)["id"], time.monotonic() + RUN_S
        while True:
            if (await self._service.batch(batch_id, "")).status in ("completed", "failed", "expired", "cancelled"):
                return
            if time.monotonic() > end_s:
                end_s = float("inf")
                await sent(self._app, Ask(f"/v1/batches/{batch_id}/cancel"))
            await asyncio.sleep(0.05)


async def measured(app: Any, name: str, ask: Ask, until: Callable[[bytes], Any] | None = None) -> dict[str, Any]:
    """Figures of a case. until: what is waited for after the reply, from its bytes."""
    if ask.method == "POST":
        await sent(app, Ask(ask.path, b'{"x":'))  # what is made at the first request
    turns = Turns()
    with turns.watched():
        ticker = asyncio.create_task(turns.tick())
        await asyncio.sleep(0.01)
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(CASE_S):
                status, size, reply = await sent(app, ask)
                if until is not None and status == 200:
                    await until(reply)
        except TimeoutError:
            status, size = 0, 0
        took_s = time.perf_counter() - begin
        await asyncio.sleep(0.01)
        ticker.cancel()
    return {
        "name": name, "status": status, "sent": len(ask.body), "got": size, "s": round(took_s, 2),
        "turn_ms": round(turns.turn_ms, 1), "gap_ms": round(turns.gap_ms, 1), "what": turns.what,
    }  # fmt: skip


async def of_batches(only: str) -> AsyncIterator[dict[str, Any]]:
    """Figures of the routes of files and batches."""
    folder = Path(mkdtemp(prefix="loop-gaps-"))
    service = BatchService(BatchOptions(folder / "batches", BatchLimits()))
    try:
        app = build_app(FakeLLM(), "m", batches=service)  # type: ignore[arg-type]
        service.start()
        cases = BatchCases(app, service)
        async for name, ask in cases.asks():
            if only in name:
                until = cases.ended if ask.path == "/v1/batches" else None
                yield await measured(app, name, ask, until)
        await service.stop()
    finally:
        service.close()
        shutil.rmtree(folder)


async def main() -> None:
    """Measure, and print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names have this word")
    parser.add_argument("--count", type=int, default=65_536, help="messages, parts and biased tokens of the largest")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        words = f"{row['name']:<46}{row['status']:>4} {row['sent']:>10} {row['got']:>10} {row['s']:>7.2f} s"
        print(f"{words} turn {row['turn_ms']:>8.1f} ms, gap {row['gap_ms']:>8.1f} ms  {row['what'][:90]}", flush=True)

    directory = Path(given.json or "/tmp/loop_gaps.json").with_suffix(".model")
    model = directory if directory.exists() else tool_model(directory)
    leave_alone_what_is_loaded()  # as servers do
    app = build_app(FakeLLM(tokenizer=Tokenizer(model)), "m")  # type: ignore[arg-type]
    for name, ask in asks_of(serve_cases(given.count)):
        if given.only in name:
            show(await measured(app, name, ask))
    async for row in of_batches(given.only):
        show(row)
    leave_alone_what_is_loaded()
    async with engines(2) as specs, fronted(specs=specs) as client:
        front_app = client.http._transport.app  # type: ignore[attr-defined]
        for name, ask in asks_of(front_cases(given.count)):
            if given.only in name:
                show(await measured(front_app, name, ask))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
