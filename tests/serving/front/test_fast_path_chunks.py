"""Chunks that are passed on without being decoded: client and front know what they would know of decoded ones."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from tests.laws import law

from diptych.control.request import RequestOptions
from diptych.serving.front.engine_connection import ConnectionPool, EngineCall, _Connection
from diptych.serving.front.engine_exchange import EngineExchange
from diptych.serving.front.engine_request import EngineRequest
from diptych.serving.front.fast_path_chunks import MIN_TRIES, ChunkForm, ChunkForms
from diptych.serving.front.relay_request import RelayPath, read_request
from diptych.serving.front.relay_stream import RelayGeneration, RelayStream
from diptych.serving.front.reply_chunks import EventSplitter, read_chunk, without_token_ids

TEXTS = (
    " the",
    "x",
    "é",
    "日本",
    "😀",
    "\u200d",
    'a"b',
    "back\\slash",
    "\n",
    "\t",
    "\x01",
    "\u2028",
    "a" * 300,
    "/",
    " ",
)


def http(payload: bytes) -> bytes:
    """An event as a chunk of HTTP."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(payload) + 8, payload)


def dumped(content: Any, *, is_ascii: bool = False) -> bytes:
    """As engines write it: compact and in UTF-8, or as Python's json does by default."""
    separators = None if is_ascii else (",", ":")
    return json.dumps(content, ensure_ascii=is_ascii, separators=separators).encode()


def completion(text: str, token_id: int) -> dict[str, Any]:
    """A chunk of a completion, as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": None}


def with_ids(text: str, token_id: int) -> dict[str, Any]:
    """A chunk of vLLM, when it was asked for token ids."""
    content = completion(text, token_id)
    content["choices"][0] |= {"prompt_token_ids": None, "token_ids": [token_id]}
    return content


def chat(text: str, token_id: int) -> dict[str, Any]:
    """A chunk of a chat, as SGLang writes it."""
    delta = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
    return {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": None,
    }


def llama(text: str, token_id: int) -> dict[str, Any]:
    """A chunk of llama.cpp."""
    choice = {"finish_reason": None, "index": 0, "delta": {"content": text}}
    head = {"created": 1, "id": "chatcmpl-1", "model": "m", "system_fingerprint": "b1"}
    return {"choices": [choice], **head, "object": "chat.completion.chunk"}


Style = Callable[[str, int], dict[str, Any]]
STYLES: tuple[Style, ...] = (completion, with_ids, chat, llama)


def as_it_is(payload: bytes, text: str) -> bytes:
    """The event of a payload, as the client gets it."""
    return b"data: " + without_token_ids(payload) + b"\n\n"


def learned(payload: bytes) -> ChunkForm | None:
    """The form of a chunk."""
    return ChunkForms().learn(payload, read_chunk(payload), as_it_is)


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_chunk_that_is_not_decoded_is_what_a_decoded_one_is(style: Style, is_ascii: bool) -> None:
    form = learned(dumped(style(" plain", 7), is_ascii=is_ascii))
    assert form is not None
    num_read = 0
    for number, text in enumerate(TEXTS):
        payload = dumped(style(text, number), is_ascii=is_ascii)
        found = form.read(http(payload))
        if found is not None:
            num_read += 1
            named = read_chunk(payload).choices[0].token_ids
            assert found == (named[0] if named else 0, http(without_token_ids(payload)))
    assert num_read >= (8 if is_ascii else len(TEXTS) - 2)  # all but a control character, an end of a line, and \u


@pytest.mark.parametrize("text", ["\x85", "\u2028", "a\u2029b"])
def test_a_character_that_some_take_for_the_end_of_a_line_is_left_to_the_decoder(text: str) -> None:
    form = learned(dumped(chat(" plain", 7)))
    assert form is not None and form.read(http(dumped(chat(text, 7)))) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload.replace(b"null", b'"stop"', 2),
        lambda payload: payload.replace(b'"index":0', b'"index":1'),
        lambda payload: payload.replace(b" plain", b""),
        lambda payload: payload.replace(b" plain", b"\\"),
        lambda payload: payload.replace(b" plain", b"\xff\xfe"),
        lambda payload: payload.replace(b" plain", b"\xe0\x80\x80"),
        lambda payload: payload.replace(b" plain", b'x","text":"y'),
        lambda payload: payload.replace(b" plain", b"x\n\ndata: y"),
        lambda payload: payload.replace(b"[7]", b"[7,8]"),
        lambda payload: payload.replace(b"[7]", b"[]"),
        lambda payload: payload.replace(b"[7]", b"[-7]"),
        lambda payload: payload.replace(b"[7]", b"[null]"),
        lambda payload: payload[:-1] + b',"error":{}}',
        lambda payload: b"[DONE]",
    ],
)
def test_a_chunk_of_another_form_is_left_to_the_decoder(change: Callable[[bytes], bytes]) -> None:
    payload = dumped(with_ids(" plain", 7))
    form = learned(payload)
    assert form is not None and form.read(http(payload)) is not None
    assert change(payload) != payload and form.read(http(change(payload))) is None


def test_only_whole_chunks_of_http_are_read() -> None:
    payload = dumped(completion(" plain", 7))
    form, whole = learned(payload), http(payload)
    assert form is not None and form.read(whole) is not None
    size, _, rest = whole.partition(b"\r\n")
    other = learned(payload)  # an engine writes sizes in one way
    assert other is not None and other.read(size.upper() + b"\r\n" + rest) is not None
    wrong = [
        b"%x" % (int(size, 16) + 1),
        b"0x" + size,
        b"+" + size,
        b" " + size,
        size + b";a=b",
        b"0000000" + size,
        b"",
    ]
    assert all(form.read(line + b"\r\n" + rest) is None for line in wrong)
    assert all(form.read(whole[:end]) is None for end in range(len(whole)))
    assert form.read(whole + whole) is None and form.read(whole + b"0\r\n\r\n") is None


@pytest.mark.parametrize(
    "content",
    [
        {"choices": [{"index": 0, "text": "a", "token_ids": [1, 2]}]},
        {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]},
        {"choices": [{"index": 0, "text": "a"}], "usage": {"completion_tokens": 3}},
        {"choices": [{"index": 0, "text": "a"}], "prompt_token_ids": [1]},
        {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "delta": {"content": [{"text": "a"}]}}]},
        {"choices": [{"index": 0, "delta": {"content": "a", "reasoning": "b"}}]},
        {"choices": [{"index": 0, "delta": {"content": "a", "tool_calls": [{"index": 0}]}}]},
        {"choices": [{"index": 0, "text": ""}]},
        {"choices": [{"index": 0, "text": 'a"'}]},
        {"choices": []},
        {"error": {"message": "a"}},
    ],
)
def test_a_chunk_that_says_more_than_its_text_has_no_form(content: dict[str, Any]) -> None:
    assert learned(dumped(content)) is None


def test_the_text_is_found_where_it_is_read() -> None:
    """Fields of the same name and value before and after it; the last of two counts, as it does to a decoder."""
    before = {"text": "a", "id": "a", "x": {"text": "a", "content": "a"}}
    payload = dumped({**before, "choices": [{"token_ids": [1], "index": 0, "text": "a", "content": "a"}]})
    assert learned(payload) is None  # the ids stand before the text: decoded each time
    payload = dumped({"choices": [{"index": 0, "text": "a", "y": {"token_ids": [1]}, "token_ids": [1]}], **before})
    assert learned(payload) is None
    twice = b'{"choices":[{"index":0,"text":"a","text":"a"}]}'
    assert learned(twice) is None
    payload = dumped({"choices": [{"index": 0, "text": "a"}], **before})
    form = learned(payload)
    assert form is not None
    assert form.read(http(payload.replace(b'"a"', b'"b"', 1))) is not None
    assert form.read(http(payload.replace(b'"a"', b'"b"'))) is None


def test_a_stream_whose_chunks_are_never_alike_is_not_tried_for_long() -> None:
    forms, num_found = ChunkForms(), 0
    for number in range(100):
        payload = dumped(completion("a", 1) | {"created": number})
        form = forms.learn(payload, read_chunk(payload), as_it_is)
        num_found += form is not None
    assert num_found == MIN_TRIES
    for number in range(100):  # and one whose form changes now and then is tried on
        payload = dumped(completion("a", 1) | {"created": number // 20})
        forms = forms if number else ChunkForms()
        form = forms.learn(payload, read_chunk(payload), as_it_is)
        assert form is not None and form.read(http(payload)) is not None


class Owner:
    """An ExchangeOwner that keeps what it is told."""

    number, name = 0, "engine"

    def __init__(self, stream: RelayStream) -> None:
        self.stream = stream
        self.num_told = 0
        self.ends: list[Any] = []

    def clock(self) -> int:
        """Nanoseconds."""
        return time.monotonic_ns()

    def report(self, events: Any, tokens: Any = None) -> None:
        """First tokens, and the end."""
        self.ends += events
        for token_id in tokens.token_ids if tokens else ():
            self.num_told += 1
            self.stream.push(token_id)
            self.stream.mark().deliver()

    def on_gaps(self, attempt_id: str, gaps: Mapping[float, int], num_tokens: int) -> None:
        """Later tokens."""
        assert sum(gaps.values()) <= num_tokens
        self.num_told += num_tokens

    def on_defect(self, attempt_id: str, error: BaseException) -> None:
        """Nothing fails here."""
        raise error

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


class Transport(asyncio.Transport):
    """The transport of a connection that nobody reads from."""

    def write(self, data: Any) -> None:
        """The request."""

    def is_closing(self) -> bool:
        """Never."""
        return False

    def abort(self) -> None:
        """It is closed."""


Seen = tuple[bytes, list[int], int, bool, int, int]


def seen(pieces: list[bytes], question: EngineRequest, path: RelayPath, *, decodes: bool) -> tuple[Seen, int]:
    """What client and front have of a reply that comes in these pieces, and how many chunks were passed on as they are.
    decodes: each is decoded."""
    body = b'{"model":"m","prompt":"x","messages":[],"max_tokens":500,"stream":true}'
    stream = RelayStream("r", read_request(path, body), RequestOptions(), 1)
    stream.worker = 0
    generation, got = RelayGeneration(stream), []
    num_passed, rng = 0, random.Random(len(pieces))

    def on_new() -> bool:
        got.append(generation.take_data())
        return True

    def write_chunk(chunk: bytes) -> bool:
        nonlocal num_passed
        if decodes or rng.random() < 0.1:  # the client does not read at times
            return False
        num_passed += 1
        got.append(chunk[chunk.index(b"\r\n") + 2 : -2])
        return True

    generation.on_new, stream.write_chunk = on_new, write_chunk
    owner, call = Owner(stream), EngineCall()
    exchange = EngineExchange(owner, "r", stream, question)
    connection = _Connection(ConnectionPool("127.0.0.1", 1, {}))
    connection.connection_made(Transport())
    connection.begin(call, exchange, b"", is_fresh=True)
    exchange._call = call
    for piece in pieces:
        if decodes:
            connection.on_chunk = None
        connection.data_received(piece)
    got.append(stream.take_data())
    assert exchange.is_over and len(owner.ends) == 2, owner.ends
    ends = len(stream.token_ids), owner.num_told
    return (b"".join(got), stream.token_ids, stream.num_textless, stream.is_exact, *ends), num_passed


def replies(style: Style, rng: random.Random) -> tuple[bytes, list[bytes]]:
    """The head of a reply, and its chunks."""
    chunks, is_ascii = [], rng.random() < 0.2
    for number in range(rng.randrange(5, 60)):
        kind = rng.random()
        content = style(rng.choice(TEXTS), number + 1)
        if kind < 0.02:
            content["created"] = number
        elif kind < 0.06:
            content["choices"][0]["text" if "text" in content["choices"][0] else "index"] = (
                "" if style in STYLES[:2] else 0
            )
        payload = dumped(content, is_ascii=is_ascii)
        chunk = http(payload)
        if kind > 0.95:  # an event in two chunks, or with a comment before it
            event, cut = b"data: %b\n\n" % payload, rng.randrange(1, len(payload))
            parts = (event[:cut], event[cut:]) if kind > 0.97 else (b": ping\n", event)
            chunks += [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        else:
            chunks.append(chunk)
    last = style("", 0)
    last["choices"][0]["finish_reason"] = "length"
    if "token_ids" in last["choices"][0]:
        last["choices"][0]["token_ids"] = []
    chunks += [http(dumped(last)), b"e\r\ndata: [DONE]\n\n\r\n", b"0\r\n\r\n"]
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n", chunks


def cut(chunks: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Pieces: most are whole chunks, some are several, or a part."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        kind = rng.random()
        if kind < 0.8:
            yield rest
            rest = b""
        elif kind < 0.9 and len(rest) > 1:
            at = rng.choice((rng.randrange(1, len(rest)), 1, 2, len(rest) - 1, len(rest) - 2))
            yield rest[:at]
            rest = rest[at:]
    if rest:
        yield rest


@pytest.mark.asyncio
@law(weight=0.4)
async def test_however_a_reply_is_cut_client_and_front_get_the_same(seed: int) -> None:
    rng = random.Random(seed)
    num_passed = 0
    for style in STYLES:
        is_chat = style in STYLES[2:]
        path: RelayPath = "/v1/chat/completions" if is_chat else "/v1/completions"
        questions = [EngineRequest(path, b"", adds_ids=style is with_ids)]
        if style is with_ids:  # which its client asked for itself
            questions.append(EngineRequest(path, b""))
        if not is_chat:
            questions += [EngineRequest(path, b"", resumes=True), EngineRequest(path, b"", writes_as="m")]
        head, chunks = replies(style, rng)
        for question in questions:
            whole, none = seen([head, *chunks], question, path, decodes=True)
            found, passed = seen([head, *cut(chunks, rng)], question, path, decodes=False)
            events = [[json.loads(data) for data in EventSplitter().feed(each[0])] for each in (whole, found)]
            for event in (*events[0], *events[1]) if question.writes_as else ():
                del event["created"]  # its own time
            assert events[0] == events[1] and found[1:] == whole[1:] and none == 0
            num_passed += passed
    assert num_passed > 8
