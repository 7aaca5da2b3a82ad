"""What one hostile client does, as data: the requests of each attack, how many at once, and what becomes of replies.

Inputs are made by their size, against the limits of ``diptych.serving.edge_limits``. Where the weak part would be other
software (a regular-expression engine, a parser of JSON, TLS), a harmless input of the same size is sent.
"""

import errno
import itertools
import json
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from loopback import Reply, http_request, name_of, read_rest

from diptych.serving import edge_limits

Manner = Literal["read", "drop", "vanish", "deaf", "drip", "mute", "blink"]
MIB = 2**20
DRIPPED_BYTES = 64  # of a request whose last bytes come one by one
OPEN_LIMIT_S = 60.0  # a call that is longer without its reply ends
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)  # the beginning of a client's first record


def limit(name: str) -> int:
    """A limit of the edge by its name."""
    return int(edge_limits.LIMITS[name].value)


@dataclass(frozen=True)
class Target:
    """Whom to attack. key: of a tenant of its own. workers: the port that workers join at, if there is one. page: a
    path that is answered to everybody."""

    address: tuple[str, int]
    key: str
    model: str
    workers: tuple[str, int] | None = None
    page: str = "/health"

    def post(self, path: str, body: Any, *headers: str, **more: Any) -> bytes:
        """A request with the key."""
        return http_request("POST", path, body, f"Authorization: Bearer {self.key}", *headers, **more)

    def get(self, path: str, *headers: str, **more: Any) -> bytes:
        """A request with the key."""
        return http_request("GET", path, None, f"Authorization: Bearer {self.key}", *headers, **more)

    def complete(self, **fields: Any) -> bytes:
        """A completion of one token."""
        return self.post(COMPLETIONS, {"model": self.model, "prompt": "x", "max_tokens": 1, **fields})

    def chat(self, **fields: Any) -> bytes:
        """An answer of one token."""
        said = {"messages": [{"role": "user", "content": "x"}]}
        return self.post(CHAT, {"model": self.model, "max_tokens": 1, **said, **fields})


Server = Literal["serve", "front", "guide"]
MODELS: tuple[Server, ...] = ("serve", "front")  # those that answer requests for a model
ALL: tuple[Server, ...] = (*MODELS, "guide")
OWN_END = "open at the end"  # the attacker left first
ENDS_OF: dict[Manner, tuple[str, ...]] = {"drop": ("dropped",), "vanish": ("vanished", "200"), "blink": ("dropped",)}


@dataclass(frozen=True)
class Attack:
    """One kind. requests: what is sent, over and over. manner: what becomes of a connection: read: replies are read;
    drop: closed once it is sent; vanish: reset at the first byte of the reply; deaf: never read; drip: the last bytes
    are sent one by one; mute: nothing is sent; blink: closed at once. expect: how a call ends that the attacker does
    not end: "200", or a status and its code, as the documents have them ("429 queue_full": with Retry-After); any
    other end is wrong. most: calls. of: the servers that are open to it. has_workers: they listen for workers, and
    that port is attacked. passed_on: a front leaves it to its engine, and the make-believe one answers."""

    name: str
    requests: Callable[[Target], list[bytes]]
    manner: Manner = "read"
    at_once: int = 4
    expect: tuple[str, ...] = ("200",)
    most: int = 100_000
    of: tuple[Server, ...] = MODELS
    has_workers: bool = False
    passed_on: bool = False

    def wrong_ends(self, fates: Iterable[tuple[str, int]], server: Server) -> Counter[str]:
        """Those of these ends that are not right for it at such a server."""
        right = {*self.expect, *ENDS_OF.get(self.manner, ()), OWN_END}
        if self.passed_on and server == "front":
            right.add("200")
        found: Counter[str] = Counter()
        for fate, number in fates:
            if fate not in right:
                found[fate] += number
        return found


def _fields(count: int) -> dict[str, int]:
    return {f"unknown_{number}": number for number in range(count)}


def _deep(depth: int) -> bytes:
    return b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"


def _padded(size: int) -> bytes:
    """JSON of ``size`` bytes: one long text of words."""
    return json.dumps({"prompt": "word " * (size // 5 - 20), "max_tokens": 1}).encode()


def _schema(parts: int) -> dict[str, Any]:
    properties = {f"name_{number}": {"type": "integer"} for number in range(parts)}
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


def _nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth // 2):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tools(count: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"tool_{n}", "parameters": parameters}} for n in range(count)]


def _half(request: bytes, missing: int) -> bytes:
    return request[:-missing]


def _form(size: int) -> bytes:
    body = {"prompt": "x", "max_tokens": 1}
    lines = json.dumps({"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": body}).encode() + b"\n"
    head = '--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge\r\nContent-Disposition: '
    head += 'form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    return head.encode() + lines * max(1, size // len(lines)) + b"\r\n--edge--\r\n"


def _upload(target: Target, size: int) -> bytes:
    body = _form(size)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}\r\n"
    head += f"Content-Type: multipart/form-data; boundary=edge\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunked(target: Target, size: int) -> bytes:
    body = json.dumps({"prompt": "x" * size, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    return target.post(COMPLETIONS, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + chunks


def _endless_chunks(target: Target) -> bytes:
    """A body in chunks that does not end."""
    return target.post(COMPLETIONS, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + (
        b"400\r\n" + b" " * 1024 + b"\r\n"
    ) * (4 * MIB // 1024)


def _panel(target: Target, name: str, query: str) -> bytes:
    return target.get(f"/guide/api/{name}?{query}")


def _blocks(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x"}] * count


LONG_STREAM = {"max_tokens": 400, "stream": True, "ignore_eos": True}
BODY, IDS, ITEMS = limit("BODY_BYTES"), limit("TOKEN_IDS"), limit("LIST_ITEMS")
HEAD, TOOLS, MESSAGES = limit("HEAD_BYTES"), limit("TOOLS"), limit("MESSAGES")
WRONG_KEY = "Authorization: Bearer wrong"
QUEUE, READ, BODIES = "429 queue_full", "429 too_much_to_read", "503 too_many_bodies"
LATE = "408 timeout"
TOO_LONG = "400 context_length_exceeded"
NO_HTTP = "400 invalid_http"
EMBED, IMAGE = "/v1/embeddings", "data:image/png;base64,"

ATTACKS = (
    Attack("nothing", lambda t: [b""], "mute", 0, of=ALL),  # what the others feel then is the noise of the measurement
    # Work before a limit is asked, and cost that grows with the square.
    Attack("foreign host at /admin", lambda t: [t.get("/admin/workers", host="evil.example")],
           expect=("403 unknown_host",)),
    Attack("pipelined requests", lambda t: [t.get(t.page) * 20_000], "drip", 1, of=ALL),
    Attack("unknown fields", lambda t: [t.complete(**_fields(500_000))], at_once=2, expect=("400 too_many_fields",)),
    Attack("many token ids", lambda t: [t.complete(prompt=[5] * IDS)], at_once=2,
           expect=(TOO_LONG, READ), passed_on=True),
    Attack("more token ids", lambda t: [t.complete(prompt=[5] * (IDS + 1))], at_once=2,
           expect=("400", READ), passed_on=True),
    Attack("detokenize", lambda t: [t.post("/detokenize", {"tokens": [5] * IDS})], at_once=2, expect=("200", READ),
           of=("serve",)),
    Attack("prompt_logprobs", lambda t: [t.complete(prompt=[5] * 500, prompt_logprobs=20)], expect=("200", QUEUE)),
    Attack("long texts", lambda t: [t.post(COMPLETIONS, _padded(BODY - 100))], at_once=8,
           expect=(TOO_LONG, READ, BODIES), passed_on=True),
    Attack("long texts, client gone", lambda t: [t.post(COMPLETIONS, _padded(BODY - 100))], "drop", 8, most=64),
    Attack("half bodies, client gone", lambda t: [_half(t.post(COMPLETIONS, _padded(BODY - 100)), MIB)], "drop", 8),
    Attack("long texts to tokenize", lambda t: [t.post("/tokenize", _padded(BODY - 100))],
           expect=("200", "400", READ, BODIES), of=("serve",)),
    Attack("long texts to count", lambda t: [t.post("/v1/messages/count_tokens", {"model": t.model, "messages": [
        {"role": "user", "content": "word " * (BODY // 5 - 40)}]})], expect=("200", READ, BODIES), of=("serve",)),
    Attack("long instructions", lambda t: [t.post("/v1/responses", {"input": "x", "max_output_tokens": 1,
        "instructions": "word " * (BODY // 5 - 40)})], expect=(TOO_LONG, READ, BODIES), of=("serve",)),
    Attack("long names of models", lambda t: [t.complete(model="m" * MIB)], expect=("404 model_not_found",)),
    Attack("escapes", lambda t: [t.complete(prompt="\x01\ud7ff" * (MIB // 2))],
           expect=(TOO_LONG, READ), passed_on=True),
    # Memory.
    Attack("stored responses", lambda t: [t.post("/v1/responses", {"input": "w " * 200, "max_output_tokens": 1})],
           expect=("200", QUEUE), of=("serve",)),
    Attack("half bodies", lambda t: [_half(t.post(COMPLETIONS, _padded(BODY - MIB)), 1000)], "drip", 40,
           (BODIES, LATE)),
    Attack("slow bodies", lambda t: [t.post(COMPLETIONS, _padded(2000))], "drip", 200, ("200", LATE)),
    Attack("bodies without an end", lambda t: [_endless_chunks(t)], "read", 40, (BODIES, LATE)),
    Attack("slow heads", lambda t: [t.get(t.page, "X-Pad: " + "x" * 4000)], "drip", 400, ("200", LATE), of=ALL),
    Attack("heads that wait for 100", lambda t: [_half(t.post(COMPLETIONS, b"x" * 1000, "Expect: 100-continue"), 1000)],
           "drip", 200, (LATE,)),
    Attack("slow readers", lambda t: [t.complete(**LONG_STREAM)], "deaf", 32),
    Attack("slow readers of large replies", lambda t: [t.post("/tokenize", {"prompt": "w " * 500_000})], "deaf", 8,
           of=("serve",)),
    Attack("timeline never read", lambda t: [t.get("/timeline?since=0")], "deaf", 40),
    Attack("timeline pages", lambda t: [t.get("/timeline/records?limit=2000")]),
    Attack("traces", lambda t: [t.get("/timeline/perfetto")], at_once=2),
    # Odd requests.
    Attack("HTTP/1.0", lambda t: [t.get(t.page).replace(b"HTTP/1.1", b"HTTP/1.0", 1)], expect=("200",), of=ALL),
    Attack("two Hosts", lambda t: [t.get(t.page, "Host: other")], expect=(NO_HTTP,), of=ALL),
    Attack("long heads", lambda t: [t.get(t.page, "X-Pad: " + "x" * HEAD)], expect=("431 head_too_long",), of=ALL),
    Attack("long addresses", lambda t: [t.get(t.page + "?" + "x" * (HEAD - 1000))], of=ALL),
    Attack("many headers", lambda t: [t.get(t.page, *(f"X-{n}: 1" for n in range(HEAD // 16)))], of=ALL),
    Attack("garbage", lambda t: [b"\x00\xff" * 500 + b"\r\n\r\n"], expect=(NO_HTTP,), of=ALL),
    Attack("TLS to the plain port", lambda t: [TLS_HELLO], "drip", 64, (NO_HTTP,), of=ALL),
    Attack("unknown routes", lambda t: [t.get("/v2/nothing")], at_once=32, expect=("404 unknown_path", "404"),
           of=ALL),
    Attack("unknown methods", lambda t: [t.get(t.page).replace(b"GET", b"BREW", 1)], at_once=32, expect=(NO_HTTP,),
           of=ALL),
    Attack("chunks of one byte", lambda t: [_chunked(t, 100_000)], expect=(TOO_LONG,), passed_on=True),
    Attack("deep JSON", lambda t: [t.post(COMPLETIONS, _deep(limit("BODY_DEPTH") - 1))],
           expect=("400",), passed_on=True),
    Attack("deep JSON of full size", lambda t: [t.post(COMPLETIONS, _deep(BODY // 2 - 100))], at_once=1,
           expect=("400 body_too_deep",)),
    Attack("long numbers", lambda t: [t.post(COMPLETIONS, b'{"prompt": "x", "max_tokens": %b}' % (b"1" * 4000))],
           expect=("400",), passed_on=True),
    Attack("duplicated keys", lambda t: [t.post(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1%b}' % (
        b', "max_tokens": 1' * 200_000))], at_once=2, expect=("200", "400 too_many_fields", READ)),
    Attack("many prompts", lambda t: [t.complete(prompt=["x"] * 4000)], at_once=1, expect=("200", QUEUE)),
    Attack("more prompts", lambda t: [t.complete(prompt=["x"] * ITEMS)], at_once=1, expect=("400",), of=("serve",)),
    Attack("many messages", lambda t: [t.chat(messages=[{"role": "user", "content": "x"}] * MESSAGES)], at_once=1,
           expect=("200", TOO_LONG, READ)),
    Attack("many parts", lambda t: [t.chat(messages=[{"role": "user", "content": _blocks(ITEMS)}])], at_once=1,
           expect=("200", TOO_LONG, READ)),
    Attack("many tools", lambda t: [t.chat(tools=_tools(TOOLS))], at_once=2, expect=("200", TOO_LONG, READ)),
    Attack("large images", lambda t: [t.chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": IMAGE + "A" * (8 * MIB)}}]}])], at_once=2, expect=("400", READ),
        passed_on=True),
    Attack("stop strings", lambda t: [t.complete(stop=["z" * 4000 + str(n) for n in range(16)], max_tokens=16)],
           expect=("200", QUEUE)),
    Attack("stop tokens", lambda t: [t.complete(stop_token_ids=list(range(limit("STOP_TOKENS"))), max_tokens=16)],
           expect=("200", QUEUE)),
    Attack("logit_bias", lambda t: [t.complete(logit_bias={str(n): 1.0 for n in range(ITEMS)})], at_once=2,
           expect=("400", READ), passed_on=True),
    Attack("metadata", lambda t: [t.complete(metadata={f"name{n}": "v" * 512 for n in range(16)})],
           expect=("200", QUEUE)),
    Attack("metadata beyond", lambda t: [t.complete(metadata={f"n{n}": "v" for n in range(50_000)})], expect=("400",),
           of=("serve",)),
    Attack("many answers", lambda t: [t.complete(n=128, max_tokens=4)], expect=("200", QUEUE)),
    Attack("embeddings", lambda t: [t.post(EMBED, {"model": t.model, "input": ["x"] * 2000})], at_once=2,
           expect=("200", "400", QUEUE, READ)),
    # Grammars and schemas at the limits.
    Attack("choices", lambda t: [t.complete(guided_choice=[f"c{n}" for n in range(limit("CHOICES"))])],
           expect=("200", QUEUE)),
    Attack("schemas", lambda t: [t.complete(guided_json=_schema(limit("SCHEMA_PARTS") // 8))], at_once=8,
           expect=("200", "400 invalid_grammar", QUEUE)),
    Attack("nested schemas", lambda t: [t.complete(guided_json=_nested_schema(limit("SCHEMA_DEPTH") - 2))],
           expect=("200", QUEUE)),
    Attack("many grammars", lambda t: [t.complete(guided_regex=f"[a-z]{{1,{n}}}") for n in range(2, 400)], at_once=64,
           expect=("200", QUEUE, "503 grammar_queue_full")),
    # Floods.
    Attack("small requests", lambda t: [t.complete()], at_once=32, expect=("200", QUEUE)),
    Attack("page", lambda t: [t.get(t.page)], at_once=32, of=ALL),
    Attack("lists of models", lambda t: [t.get("/v1/models")], at_once=32),
    Attack("metrics", lambda t: [t.get("/metrics")], at_once=8),
    Attack("without a key", lambda t: [http_request("POST", COMPLETIONS, b"x" * 1000, WRONG_KEY)], at_once=32,
           expect=("401 invalid_api_key",)),
    Attack("large bodies without a key", lambda t: [http_request("POST", COMPLETIONS, b"x" * (BODY - 10), WRONG_KEY)],
           at_once=4, expect=("401 invalid_api_key",)),
    Attack("lists of workers", lambda t: [t.get("/admin/workers")], at_once=32),
    Attack("responses that are not there", lambda t: [t.get("/v1/responses/resp_0")], at_once=32,
           expect=("404 response_not_found",), of=("serve",)),
    Attack("cancels", lambda t: [t.complete(**LONG_STREAM)], "drop", 32),
    Attack("streams that vanish", lambda t: [t.complete(**LONG_STREAM)], "vanish", 32, (QUEUE,)),
    Attack("opened and dropped", lambda t: [b""], "blink", 32, of=ALL),
    Attack("opened and held", lambda t: [b""], "mute", 2000, ("503 too_many_connections",), of=ALL),
    Attack("a full queue", lambda t: [t.complete(max_tokens=64)], at_once=3000, expect=("200", QUEUE)),
    # Files and batches.
    Attack("uploads", lambda t: [_upload(t, 8 * MIB)], at_once=4, most=40, of=("serve",)),
    Attack("half uploads", lambda t: [_half(_upload(t, 32 * MIB), 100)], "drip", 8, (LATE,), 40, of=("serve",)),
    Attack("lists of files", lambda t: [t.get("/v1/files")], at_once=32, of=("serve",)),
    Attack("batches of nothing", lambda t: [t.post("/v1/batches", {"input_file_id": "file-0", "endpoint": COMPLETIONS,
           "completion_window": "24h"})], expect=("404",), of=("serve",)),
    # The port of the workers, and engines behind the front.
    Attack("workers' port, silent", lambda t: [b""], "mute", 2000, of=("serve",), has_workers=True),
    Attack("workers' port, half-open TLS", lambda t: [TLS_HELLO], "deaf", 500, of=("serve",), has_workers=True),
    Attack("workers' port, opened and dropped", lambda t: [b""], "blink", 32, of=("serve",), has_workers=True),
    Attack("long events of an engine", lambda t: [t.complete(max_tokens=10**6, stream=True, fake={
        "batch": 200_000, "ids": True})], at_once=2, of=("front",)),
    # The guide.
    Attack("panels", lambda t: [_panel(t, name, "") for name in ("phases", "interference", "chunked")], at_once=8,
           of=("guide",)),
    Attack("panels with odd values", lambda t: [_panel(t, "phases", f"{name}=1e308") for name in ("prompt", "rate")],
           at_once=8, expect=("400",), of=("guide",)),
    Attack("searches", lambda t: [_panel(t, "choose", "")], at_once=16, expect=("200", "503"), of=("guide",)),
    Attack("searches that are left", lambda t: [_panel(t, "choose", "")], "vanish", 16, ("503",), of=("guide",)),
    Attack("queries beyond", lambda t: [_panel(t, "phases", "a" * (limit("GUIDE_QUERY_BYTES") + 1))], at_once=32,
           expect=("400",), of=("guide",)),
)  # fmt: skip


@dataclass
class Pace:
    """Keeps this process to a share of a core, by its own processor time."""

    share: float
    started_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.process_time)

    def pause_s(self, now_s: float, used_s: float) -> float:
        """How long to sleep before the share is kept again."""
        elapsed, used = now_s - self.started_s, used_s - self.used_s
        return max(0.0, used / self.share - elapsed)

    def keep(self, until_s: float) -> None:
        """Sleep as long as that takes, but not beyond a time."""
        now_s = time.monotonic()
        time.sleep(max(0.0, min(self.pause_s(now_s, time.process_time()), until_s - now_s)))


@dataclass
class Call:
    """One connection of the attack."""

    connection: socket.socket
    request: bytes
    started_s: float
    sent: int = 0
    reply: Reply = field(default_factory=Reply)
    dripped_s: float = 0.0


class Attacker:
    """Carries one attack out from one process. fates: how its calls ended, in words."""

    def __init__(self, attack: Attack, target: Target, share: float) -> None:
        self.attack = attack
        self.fates: Counter[str] = Counter()
        address = target.workers if attack.has_workers else target.address
        assert address is not None
        self._address = address
        self._share = share
        self._requests: Iterator[bytes] = itertools.cycle(attack.requests(target))  # made here, before the clock runs
        self._calls: dict[int, Call] = {}
        self._poll = select.epoll()
        self._num_begun = 0

    def run(self, seconds: float) -> None:
        """Attack for so long, and leave."""
        self._pace = Pace(self._share)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self._calls) < self.attack.at_once and self._num_begun < self.attack.most:
                self._begin()
                self._pace.keep(end)
                if time.monotonic() > end:
                    break
            for descriptor, events in self._poll.poll(0.02, 64):
                if (call := self._calls.get(descriptor)) is not None:
                    self._serve(call, events)
                    self._pace.keep(end)
            self._look_after(time.monotonic())
            self._pace.keep(end)
        for call in list(self._calls.values()):
            self._end(call, OWN_END)

    def _begin(self) -> None:
        connection = socket.socket()
        self._num_begun += 1
        if self.attack.manner == "deaf":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        code = connection.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self.fates[f"connect: {errno.errorcode[code]}"] += 1
            connection.close()
            return
        self._calls[connection.fileno()] = Call(connection, next(self._requests), time.monotonic())
        self._poll.register(connection, select.EPOLLOUT | select.EPOLLIN)

    def _serve(self, call: Call, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._send(call)
            if events & ~select.EPOLLOUT and call.connection.fileno() >= 0:
                self._read(call)
        except BlockingIOError:
            return
        except OSError as error:
            read_rest(call.connection, call.reply)
            self._end(call, call.reply.fate(name_of(error)))

    def _send(self, call: Call) -> None:
        manner = self.attack.manner
        if manner == "blink":
            self._end(call, "dropped")
            return
        whole = len(call.request) - (DRIPPED_BYTES if manner == "drip" else 0)
        if call.sent < whole:
            call.sent += call.connection.send(memoryview(call.request)[call.sent : min(whole, call.sent + 262_144)])
        if call.sent >= whole or manner == "mute":
            if manner == "drop":
                self._end(call, "dropped")
                return
            self._poll.modify(call.connection, 0 if manner == "deaf" else select.EPOLLIN)

    def _read(self, call: Call) -> None:
        data = call.connection.recv(65536)
        call.reply.feed(data)
        if self.attack.manner == "vanish" and call.reply.beginning.startswith(b"HTTP/1.1 200"):
            call.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._end(call, "vanished")
        elif not data or (call.reply.is_whole and (call.sent >= len(call.request) or call.reply.status != "200")):
            self._end(call, call.reply.fate("closed by the server", is_closed=True))

    def _look_after(self, now_s: float) -> None:
        """Send the next bytes of those that drip, one a second each; end what is too old."""
        for call in list(self._calls.values()):
            if self.attack.manner == "read" and now_s - call.started_s > OPEN_LIMIT_S:
                self._end(call, call.reply.fate("unanswered"))
            elif self.attack.manner == "drip" and call.sent < len(call.request) and now_s - call.dripped_s > 1.0:
                call.dripped_s = now_s
                if call.sent >= len(call.request) - DRIPPED_BYTES:
                    with suppress(OSError):  # its reply, or its end, is read next
                        call.sent += call.connection.send(call.request[call.sent : call.sent + 1])

    def _end(self, call: Call, fate: str) -> None:
        self.fates[fate] += 1
        del self._calls[call.connection.fileno()]
        self._poll.unregister(call.connection)
        call.connection.close()
