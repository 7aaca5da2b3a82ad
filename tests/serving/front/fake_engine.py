"""Servers that speak the protocols of vLLM, SGLang, llama.cpp and OpenAI, and misbehave when they are told to.

The model: a token is a character, and the next one is a function of all before it, so that an answer that is continued
elsewhere can be compared with one that was not. ``python fake_engine.py KIND [PORT]`` serves until it is killed.
"""

import asyncio
import contextlib
import json
import sys
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fake_events import FakePublisher, removed, stored

BLOCK = 16
ANSWERS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
TRANSFERS: dict[str, list[int]] = {}  # what vLLMs hold for each other
ROOMS: dict[int, dict[str, asyncio.Event]] = {}  # where SGLangs meet


@dataclass
class Fault:
    """What goes wrong with one generation. at: the number of tokens before it (-1: before the head of the reply)."""

    kind: str
    at: int = -1
    status: int = 500
    retry_after: str = ""


@dataclass
class FakeEngine:
    """One engine. faults: taken one by one by requests for answers. delay_s: between two tokens."""

    kind: str = "vllm"
    model: str = "fake-model"
    other_models: tuple[str, ...] = ()  # that it lists first
    delay_s: float = 0.0
    prefill_s: float = 0.0
    api_key: str = ""
    names_tokens: bool = True
    shows_text: bool = True  # else each token is a part of a character
    parts: str = ""  # letters that are parts of characters: their text comes with the next other letter
    merges: int = 1  # tokens of a chunk
    takes_tokens: bool = False  # renders chats, and takes what it has rendered
    render_s: float = 0.0
    detokenizes: bool = True
    detokenize_s: float = 0.0
    indents: bool = False  # its events, over several lines
    after: str = ""  # follows every second letter, as it is (not as an escape)
    reasons: bool = False  # the first token of a chat is reasoning
    reports_cache: bool = True
    says_usage: bool = True
    has_metrics: bool = True
    started_s: float | None = None  # of its process, as its metrics say
    answer_tokens: int = 12  # before the model stops by itself (0: never)
    capacity: int = 4096
    faults: deque[Fault] = field(default_factory=deque)
    is_ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)  # that came with POSTs
    tokenized: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_aborted: int = 0
    blocks: dict[bytes, None] = field(default_factory=dict)
    phase: str = "both"
    gives_parameters: bool = True
    publisher: FakePublisher | None = None
    cached: list[tuple[int, int]] = field(default_factory=list)  # (found, prompt) tokens of each answer
    ranks: list["FakeEngine"] = field(default_factory=list)  # of data parallelism behind this server
    turn: int = 0  # of these, where a request names none
    more_information: dict[str, Any] = field(default_factory=dict)  # of an SGLang's /server_info
    is_stopped: bool = False
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    url: str = ""

    async def start(self, port: int = 0) -> "FakeEngine":
        """Listen on a port of loopback."""
        self.is_stopped = False
        self.server = await asyncio.start_server(self._client, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """Close everything at once, as the end of a process does."""
        assert self.server is not None
        self.is_stopped = True
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        self.blocks.clear()
        await asyncio.sleep(0)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        if self.is_stopped:
            writer.transport.abort()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *headers = head.decode().split("\r\n")
                method, path, _ = line.split(" ")
                fields = {key.lower(): value for key, _, value in (one.partition(": ") for one in headers if one)}
                if "x-request-id" in fields:
                    self.request_ids.append(fields["x-request-id"])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if self.api_key and fields.get("authorization") != f"Bearer {self.api_key}":
                    await self._json(writer, {"error": {"message": "no key"}}, 401)
                    continue
                content = json.loads(body) if body else {}
                engine = self._ranked(
                    fields.get("x-data-parallel-rank"), asks=path in ANSWERS and not is_probe(content)
                )
                await engine._route(method, path, content, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    def _ranked(self, rank: str | None, *, asks: bool) -> "FakeEngine":
        """The rank that takes a request. asks: it is for an answer: those without a rank go to each rank in turn; what
        a front asks for by itself, whenever it does, turns nothing."""
        if not self.ranks:
            return self
        if rank is not None:
            return self.ranks[int(rank)]
        self.turn += asks
        return self.ranks[self.turn % len(self.ranks) if asks else 0]

    # -- routes -------------------------------------------------------------------------------------------------------

    async def _route(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        plain = self._information(path)
        if plain is not None:
            await self._json(writer, plain)
        elif path == "/metrics" and self.has_metrics:
            await self._bytes(writer, self._metrics(), "text/plain")
        elif path == "/tokenize" and self.kind != "openai":
            self.tokenized += 1
            text = body.get("content") or body.get("prompt") or self._render(body)
            await self._json(writer, {"tokens": [ord(letter) for letter in text], "count": len(text)})
        elif path == "/v1/chat/completions/render" and self.takes_tokens:
            await asyncio.sleep(self.render_s)
            await self._json(writer, *self._rendered(body))
        elif path == "/inference/v1/generate" and self.takes_tokens:
            await self._generate(path, body, writer)
        elif path == "/detokenize" and self.kind == "vllm" and self.detokenizes:
            await asyncio.sleep(self.detokenize_s)
            text = "".join(map(chr, body["tokens"]))
            whole = text.rstrip(self.parts) if self.parts else text
            await self._json(writer, {"prompt": whole + "\ufffd" * (len(text) - len(whole))})
        elif path == "/apply-template" and self.kind == "llamacpp":
            await self._json(writer, {"prompt": self._render(body)})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._generate(path, body, writer)
        elif path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            await self._json(writer, {"data": data, "usage": {"prompt_tokens": 4, "total_tokens": 4}})
        else:
            await self._json(writer, {"error": {"message": f"no {path}"}}, 404)

    def _information(self, path: str) -> Any:
        if path == "/v1/models":
            names = [*self.other_models, self.model]
            return {"data": [{"id": name, "max_model_len": 32768} for name in names]}
        if self.kind == "vllm" and path == "/version":
            return {"version": "0.32.0-fake"}
        if self.kind == "vllm" and path == "/kv_event_sources" and self.publisher is not None:
            return {str(rank): engine._source() for rank, engine in enumerate(self.ranks or [self])}
        if self.kind == "sglang" and path == "/server_info":
            return {"version": "0.5.23-fake", "page_size": BLOCK, "max_total_num_tokens": BLOCK * self.capacity,
                    "enable_cache_report": self.reports_cache, **self.more_information}  # fmt: skip
        if self.kind == "sglang" and path == "/health_generate" and self.is_ready:
            return {}
        if self.kind == "llamacpp" and path == "/props":
            return {"build_info": "b9000-fake", "total_slots": 4, "default_generation_settings": {"n_ctx": 8192}}
        return None

    def _source(self) -> dict[str, Any]:
        assert self.publisher is not None
        events, replay = (
            f"tcp://*:{url.rpartition(':')[2]}" for url in (self.publisher.address, self.publisher.replay)
        )
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay,
                "topic": ""}  # fmt: skip

    def _samples(self, rank: int) -> tuple[str, ...]:
        labels, usage = f'engine="{rank}",model_name="m"', len(self.blocks) / self.capacity
        return (
            f"vllm:num_requests_running{{{labels}}} {self.num_running}",
            f"vllm:num_requests_waiting{{{labels}}} {self.num_waiting}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
            f'vllm:cache_config_info{{block_size="{BLOCK}",engine="{rank}",num_gpu_blocks="{self.capacity}"}} 1.0',
        )

    def _metrics(self) -> bytes:
        names = {
            "vllm": tuple(line for rank, each in enumerate(self.ranks or [self]) for line in each._samples(rank)),
            "sglang": (f"sglang:num_running_reqs {self.num_running}", f"sglang:num_queue_reqs {self.num_waiting}"),
            "llamacpp": (f"llamacpp:requests_processing {self.num_running}",),
        }  # fmt: skip
        started = () if self.started_s is None else (f"process_start_time_seconds {self.started_s}",)
        return "\n".join(("# HELP x y", *started, *names.get(self.kind, ()), "")).encode()

    @staticmethod
    def _render(body: dict[str, Any]) -> str:
        turns = [f"<{turn['role']}>{turn['content']}" for turn in body.get("messages", [])]
        return "".join([*turns, "<assistant>"])

    def _rendered(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """A request for tokens, as vLLM 0.32 gives it, and the status."""
        if "messages" not in body:
            return {"error": {"message": "messages: field required", "code": 422}}, 422
        self.tokenized += 1
        ids = [ord(letter) for letter in self._render(body)]
        sampling = {"temperature": body.get("temperature", 1.0), "max_tokens": body.get("max_tokens", 4000)}
        return {
            "request_id": f"chatcmpl-{len(ids)}", "token_ids": ids, "features": None,
            "content_parts": None, "sampling_params": sampling, "model": self.model, "reasoning_ended": None,
            "reasoning_parser_kwargs": {} if self.reasons else None, "return_token_ids": None, "output_mode": "tokens",
            "stream": body.get("stream", False), "stream_options": body.get("stream_options"),
        }, 200  # fmt: skip

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        is_chat = path.endswith("chat/completions")
        if path.endswith("generate"):
            body = {**body, **body["sampling_params"], "prompt": body["token_ids"], "return_token_ids": True}
        prompt = body.get("prompt", "")
        text = self._render(body) if is_chat else prompt
        ids = [ord(letter) for letter in text] if isinstance(text, str) else list(text)
        probes = is_probe(body)
        if probes:
            if not self.is_ready:
                await self._json(writer, {"error": {"message": "still loading"}}, 503)
                return
            fault = None
        else:
            self.requests.append(body)
            fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.at < 0 and await self._misbehave(fault, writer):
            return
        self.num_running += 1
        try:
            cached = 0 if probes else await self._compute(ids)
            await asyncio.sleep(self.prefill_s)
            reply = _Reply(self, body, is_chat, ids, cached)
            if not probes and not await self._meet(reply, writer):
                return
            if body.get("stream"):
                await self._stream(reply, fault, writer)
            else:
                await self._whole(reply, fault, writer)
        except ConnectionError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    async def _compute(self, ids: list[int]) -> int:
        """Tokens that the prefix cache has; all full blocks are in it after this."""
        parent, found, is_hit = b"", 0, True
        events: list[dict[str, Any]] = []
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            before, tokens = parent, ids[end - BLOCK : end]
            parent = blake2b(before + json.dumps(tokens).encode(), digest_size=8).digest()
            is_hit = is_hit and parent in self.blocks
            found += BLOCK if is_hit else 0
            if parent not in self.blocks:
                events.append(stored([parent], before or None, tokens, BLOCK))
            self.blocks.pop(parent, None)
            self.blocks[parent] = None
        while len(self.blocks) > self.capacity:
            oldest = next(iter(self.blocks))
            del self.blocks[oldest]
            events.append(removed([oldest]))
        if self.publisher is not None and events:
            await self.publisher.publish(*events)
        found = min(found, len(ids) - 1)
        self.cached.append((found, len(ids)))
        return found

    async def _meet(self, reply: "_Reply", writer: asyncio.StreamWriter) -> bool:
        """Hand over, or take over. Returns whether there is an answer."""
        asked = reply.body.get("kv_transfer_params") or {}
        if asked.get("do_remote_decode") and self.gives_parameters:
            key = f"{self.url}/{len(TRANSFERS)}/{len(self.requests)}"
            TRANSFERS[key] = reply.prompt
            reply.more = {"kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": key}}
        elif asked.get("do_remote_prefill"):
            if TRANSFERS.pop(asked.get("remote_request_id", ""), None) != reply.prompt:
                await self._json(writer, {"error": {"message": "no such transfer"}}, 500)
                return False
            reply.cached = len(reply.prompt)
        if (room := reply.body.get("bootstrap_room")) is not None and self.phase != "both":
            both = ROOMS.setdefault(room, {"prefill": asyncio.Event(), "decode": asyncio.Event()})
            both[self.phase].set()
            await both["decode" if self.phase == "prefill" else "prefill"].wait()
        return True

    async def _misbehave(self, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        """Before the head of a reply. Returns whether that was all."""
        if fault.kind == "status":
            more = f"Retry-After: {fault.retry_after}\r\n" if fault.retry_after else ""
            await self._json(writer, {"error": {"message": "as told", "code": fault.status}}, fault.status, more)
        elif fault.kind == "reset":
            writer.transport.abort()
            raise ConnectionResetError
        elif fault.kind == "close":
            raise asyncio.IncompleteReadError(b"", 1)
        elif fault.kind == "not_http":
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif fault.kind == "stall":
            await asyncio.sleep(3600)
        elif fault.kind == "long_head":
            writer.write(b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * 100_000)
            await writer.drain()
            await asyncio.sleep(3600)
        elif fault.kind == "not_json":
            await self._bytes(writer, b"<html>", "text/html")
        else:
            return False
        return True

    async def _stream(self, reply: "_Reply", fault: Fault | None, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if reply.is_chat:
            await self._event(writer, reply.opening())
        count = 0
        while fault is None or fault.kind != "stall" or count < fault.at:
            if fault is not None and count == fault.at and await self._break(fault, reply, writer):
                return
            is_endless = fault is not None and fault.kind == "endless" and count >= fault.at
            chunk, is_last = reply.next(is_endless=is_endless)
            await self._event(writer, chunk)
            count += 1
            if is_last:
                break
            await asyncio.sleep(self.delay_s)
        else:
            await asyncio.sleep(3600)
        if fault is not None and fault.kind == "no_done":
            await writer.drain()
            raise asyncio.IncompleteReadError(b"", 1)
        if reply.body.get("stream_options", {}).get("include_usage") and self.says_usage:
            await self._event(writer, {**reply.head(), "choices": [], "usage": reply.usage()})
        await self._event(writer, "[DONE]")
        if fault is None or fault.kind != "no_terminator":
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _break(self, fault: Fault, reply: "_Reply", writer: asyncio.StreamWriter) -> bool:
        """In the middle of a stream. Returns whether the reply is over."""
        if fault.kind == "reset":
            writer.transport.abort()
            raise ConnectionResetError
        if fault.kind == "close":
            await writer.drain()
            raise asyncio.IncompleteReadError(b"", 1)
        if fault.kind == "no_finish":  # it says that it is done, and the answer is not
            await self._event(writer, "[DONE]")
        elif fault.kind == "error_event":
            await self._event(writer, {"error": {"message": "out of memory", "code": fault.status}})
        elif fault.kind == "abort_reason":
            choice = {"index": 0, "finish_reason": "abort", "delta": {}, "text": ""}
            await self._event(writer, {**reply.head(), "choices": [choice]})
        elif fault.kind == "garbage":
            writer.write(b"7\r\ndata: {\r\n2\r\n\n\n\r\n")
        elif fault.kind != "ends":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _whole(self, reply: "_Reply", fault: Fault | None, writer: asyncio.StreamWriter) -> None:
        text, reason = "", ""
        while not reason:
            _, is_last = reply.next()
            text += reply.letter
            reason = reply.reason if is_last else ""
            await asyncio.sleep(self.delay_s)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if reply.is_chat else {"text": text}
        usage = {"usage": reply.usage()} if self.says_usage else {}
        body = json.dumps({**reply.head(), "choices": [choice], **usage, **reply.more}).encode()
        if fault is not None and fault.kind == "truncated":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n" + body)
            await writer.drain()
            raise asyncio.IncompleteReadError(b"", 1)
        await self._bytes(writer, body, "application/json")

    # -- bytes --------------------------------------------------------------------------------------------------------

    async def _event(self, writer: asyncio.StreamWriter, content: Any) -> None:
        indent = 1 if self.indents else None
        text = content if isinstance(content, str) else json.dumps(content, indent=indent, ensure_ascii=not self.after)
        data = b"data: " + text.replace("\n", "\ndata: ").encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        if writer.transport.is_closing():
            raise ConnectionResetError

    async def _json(self, writer: asyncio.StreamWriter, content: Any, status: int = 200, more: str = "") -> None:
        await self._bytes(writer, json.dumps(content).encode(), "application/json", status, more)

    async def _bytes(
        self, writer: asyncio.StreamWriter, body: bytes, kind: str, status: int = 200, more: str = ""
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


class _Reply:
    """One answer while it grows."""

    def __init__(self, engine: FakeEngine, body: dict[str, Any], is_chat: bool, ids: list[int], cached: int) -> None:
        self.engine, self.body, self.is_chat, self.prompt, self.cached = engine, body, is_chat, ids, cached
        self.ids = list(ids)
        self.letter = self.reason = ""
        self.more: dict[str, Any] = {}
        self._is_first = True
        self._limit = body.get("max_completion_tokens") or body.get("max_tokens") or 64

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - len(self.prompt)

    def head(self) -> dict[str, Any]:
        kind = ("chat.completion" if self.is_chat else "text_completion") + (
            ".chunk" if self.is_chat and self.body.get("stream") else ""
        )
        return {"id": "engine-id", "object": kind, "created": 7, "model": self.engine.model}

    def opening(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        found = {**self.head(), "choices": [choice]}
        if self.body.get("return_token_ids") and self.engine.names_tokens:
            found["prompt_token_ids"] = self.prompt
        return found

    def next(self, *, is_endless: bool = False) -> tuple[dict[str, Any], bool]:
        """The next chunk, and whether it is the last."""
        tokens = []
        self.letter = ""
        while len(tokens) < self.engine.merges and not self.reason:
            tokens.append(next_token(self.ids))
            self.letter += self._text_of(tokens[-1])
            self.ids.append(tokens[-1])
            stops = self.engine.answer_tokens and len(self.ids) >= self.stop_at
            self.reason = "stop" if stops else "length" if self.num_tokens >= self._limit else ""
            if is_endless:
                self.reason = ""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason or None, "logprobs": None}
        choice |= {"delta": {"content": self.letter}} if self.is_chat else {"text": self.letter}
        if self.engine.reasons and self.is_chat and self._is_first:
            choice["delta"] = {"reasoning_content": self.letter}
        chunk = {**self.head(), "choices": [choice]}
        if self.body.get("return_token_ids") and self.engine.names_tokens:
            choice["token_ids"] = tokens
            if self._is_first and not self.is_chat:
                choice["prompt_token_ids"] = self.prompt
        self._is_first = False
        return chunk, bool(self.reason)

    def _text_of(self, token: int) -> str:
        """What its token adds to the text. After a prompt that ends within a character, the whole prompt comes with it,
        as vLLM has it."""
        letter = chr(token) + self.engine.after * (len(self.ids) % 2)
        if not self.engine.shows_text or letter in self.engine.parts:
            return ""
        text = "".join(map(chr, self.ids))
        whole = text.rstrip(self.engine.parts) if self.engine.parts else text
        if len(whole) < len(self.prompt):
            return text + letter
        return text[len(whole) :] + letter

    @property
    def stop_at(self) -> int:
        """The length of prompt and answer at which the model stops: the same, wherever the answer is continued."""
        text = "".join(map(chr, self.prompt))
        return len(text.split("|")[0]) + 1 + self.engine.answer_tokens if "|" in text else 1 << 30

    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self.num_tokens,
            "total_tokens": len(self.ids),
        }
        if self.engine.reports_cache:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return found


def is_probe(body: dict[str, Any]) -> bool:
    """Whether a request for an answer is the front's question whether the engine can answer at all."""
    if body.get("max_tokens") != 1:
        return False
    return body.get("prompt") in ("1", [49]) or body.get("messages") == [{"role": "user", "content": "1"}]


def next_token(ids: list[int]) -> int:
    """A letter that follows from the tokens before it, and from how many there are."""
    return 97 + blake2b(json.dumps([len(ids), *ids[-16:]]).encode(), digest_size=2).digest()[0] % 26


def answer_to(prompt: str, num_tokens: int) -> str:
    """What every engine answers."""
    ids = [ord(letter) for letter in prompt]
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return "".join(map(chr, ids[len(prompt) :]))


async def _main() -> None:
    engine = FakeEngine(sys.argv[1], delay_s=float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    await engine.start(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("fake engine at", engine.url, flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
