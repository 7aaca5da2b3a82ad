"""Counting tokens in server-sent events of several dialects."""

import asyncio
from typing import Any

import msgspec

from diptych.bench.token_stream import TokenStream, error_message

from .events import delta, event, text

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def read(*events: dict[str, Any]) -> TokenStream:
    """A stream that got these events, a nanosecond after another."""

    async def run() -> TokenStream:
        stream = TokenStream(0)
        stream.status = 200
        for now, data in enumerate(events, start=1):
            stream.feed(event(data), now)
        stream.feed(b"data: [DONE]\n\n", 99)
        stream.finish(100)
        return stream

    return asyncio.run(run())


def test_an_event_with_text_is_a_token_and_the_usage_is_none() -> None:
    stream = read(text("a"), text("b"), text("c", "length"), {"choices": [], "usage": USAGE})
    assert list(stream.stamps) == [1, 2, 3]
    assert stream.output_tokens == 3
    assert stream.is_complete and stream.finish_reason == "length"
    assert stream.usage is not None and stream.usage.prompt_tokens_details is not None
    assert stream.usage.prompt_tokens_details.cached_tokens == 2


def test_half_a_character_is_a_token_too() -> None:
    assert list(read(text("a"), text(""), text("b")).stamps) == [1, 2, 3]


def test_a_role_alone_is_no_token() -> None:
    assert list(read(delta("", role="assistant"), delta("a"), delta("b")).stamps) == [2, 3]


def test_a_silent_end_is_a_token_only_when_the_usage_counts_it() -> None:
    counted = read(text("a"), text("b"), text("", "length"), {"choices": [], "usage": USAGE})
    not_counted = read(text("a"), text("b"), text("c"), text("", "stop"), {"choices": [], "usage": USAGE})
    assert list(counted.stamps) == [1, 2, 3]
    assert list(not_counted.stamps) == [1, 2, 3]


def test_a_single_token_without_text_counts_once_the_answer_is_over() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    assert list(read(text("", "length"), {"choices": [], "usage": usage}).stamps) == [1]


def test_several_tokens_without_text_in_one_event_are_an_answer_too() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}
    stream = read(text("", "length"), {"choices": [], "usage": usage})
    assert (list(stream.stamps), stream.output_tokens) == ([1], 8)


def test_an_answer_without_tokens_has_none() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}
    assert not read(text("", "stop"), {"choices": [], "usage": usage}).stamps


def test_token_ids_say_how_many_tokens_an_event_has() -> None:
    stream = read(text("ab", token_ids=[1, 2]), text("", token_ids=[]), text("c", "length", token_ids=[3]))
    assert (list(stream.stamps), list(stream.sizes), stream.output_tokens) == ([1, 3], [2, 1], 3)


def test_a_running_usage_says_so_too() -> None:
    stream = read(
        {**delta("", role="assistant"), "usage": {"completion_tokens": 0}},
        {**delta("a b"), "usage": {"completion_tokens": 2}},
        {**delta("c", "length"), "usage": {"completion_tokens": 3}},
    )
    assert (list(stream.stamps), list(stream.sizes)) == ([2, 3], [2, 1])


def test_a_usage_in_the_last_event_alone_is_no_running_one() -> None:
    stream = read(text("a"), text("b"), {**text("c", "length"), "usage": USAGE})
    assert (list(stream.stamps), list(stream.sizes), stream.output_tokens) == ([1, 2, 3], [], 3)


def test_tokens_that_come_several_at_a_time_are_counted_by_the_usage() -> None:
    assert read(text("a b"), text("c", "length"), {"choices": [], "usage": USAGE}).output_tokens == 3


def test_an_error_in_a_stream_is_its_error() -> None:
    stream = read(text("a"), {"error": {"message": "the worker died"}})
    assert not stream.is_complete and stream.error == "the worker died"


def test_comments_and_event_names_are_not_data() -> None:
    async def run() -> TokenStream:
        stream = TokenStream(0)
        stream.feed(b": ping\r\n\r\nevent: message\r\ndata:" + msgspec.json.encode(text("a")) + b"\r\n\r\n", 1)
        return stream

    assert list(asyncio.run(run()).stamps) == [1]


def test_what_a_server_says_when_it_refuses() -> None:
    assert error_message(429, b'{"error": {"message": "queue full"}}') == "HTTP 429: queue full"
    assert error_message(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"
    assert error_message(500, b"") == "HTTP 500"


def test_a_server_may_send_an_error_as_an_event_of_its_own() -> None:
    stream = read(text("a"), {"object": "error", "message": "out of memory", "code": 500})
    assert not stream.is_complete and stream.error == "out of memory"
    assert read(text("a", "stop"), {"choices": [], "usage": {"completion_tokens": 1, "latency": 3.5}}).is_complete


def test_the_text_of_an_answer_is_kept_when_asked_for() -> None:
    async def run() -> TokenStream:
        stream = TokenStream(0, keep_text=True)
        for data in (delta("", role="assistant"), delta(None, reasoning_content="hm"), delta("a "), delta("b", "stop")):
            stream.feed(event(data), 1)
        return stream

    stream = asyncio.run(run())
    assert stream.text == "a b" and len(stream.stamps) == 3
    assert read(text("a")).text is None


def test_a_stream_that_is_given_up_has_what_came_before_and_closes_its_connection_once() -> None:
    closed = []

    async def run() -> TokenStream:
        stream = TokenStream(0)
        stream.hang_up = lambda: closed.append(True)
        stream.feed(event(text("a")), 5)
        stream.cancel(9, "enough")
        stream.cancel(11, "again")
        stream.finish(12)
        return stream

    stream = asyncio.run(run())
    assert (stream.error, list(stream.stamps), stream.end_ns, closed) == ("enough", [5], 9, [True])
