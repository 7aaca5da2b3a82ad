"""One growing answer: its text does not depend on how its tokens came, and nothing passes a stop string."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diptych.control.errors import WorkerError
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

TOKENIZER = Tokenizer(BUNDLED_MODEL)
TEXTS = st.text(alphabet="abc =\n(){}ü🙂", min_size=1, max_size=40)


def answer(prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> AnswerStream:
    """A stream, gathered by a generation of its own."""
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    stream = AnswerStream("a", 0, list(prompt), params, TOKENIZER)
    Generation("a", [stream])
    return stream


def end(stream: AnswerStream, reason: FinishReason = FinishReason.LENGTH, **changes: Any) -> None:
    latency = LatencyBreakdown(1, 1, 1, stream.num_tokens)
    fields = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_preemptions": 0, "slo_met": None, **changes}
    stream.end(RequestFinished(5, "a", reason, latency=latency, **fields))


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def push_all(stream: AnswerStream, token_ids: Sequence[int], looks: Sequence[bool] = ()) -> str:
    """Push until a stop string is complete, as the worker would; look in between where ``looks`` says so."""
    text = ""
    for at, token_id in enumerate(token_ids):
        is_stopped = stream.push(token_id)
        if at < len(looks) and looks[at]:
            text += stream.take().text
        if is_stopped:
            break
    end(stream, FinishReason.STOP if stream.stop_reason is not None else FinishReason.LENGTH)
    return text + stream.take().text


# -- laws -------------------------------------------------------------------------------------------------------------


@given(TEXTS, st.lists(st.booleans(), max_size=40))
def test_however_tokens_are_cut_into_reports_the_text_is_the_same(text: str, looks: Sequence[bool]) -> None:
    assert push_all(answer(), tokens_of(text), looks) == text


@given(TEXTS, st.lists(st.text(alphabet="abc =\n🙂", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_text_is_what_comes_before_the_first_stop_string(
    text: str, stops: Sequence[str], data: st.DataObject
) -> None:
    looks = data.draw(st.lists(st.booleans(), max_size=40))
    stream = answer(stop=tuple(stops))
    said = push_all(stream, tokens_of(text), looks)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (said, stream.stop_reason, stream.finish_reason) == (text, None, "length")
        return
    assert stream.finish_reason == "stop"
    assert not any(stop in said for stop in stops)
    assert text.startswith(said)
    # It stops with the token that completes the first to be complete, and then takes the one that begins first.
    assert isinstance(stream.stop_reason, str) and text[len(said) :].startswith(stream.stop_reason)
    assert len(said) < min(ends)


@given(TEXTS, st.text(alphabet="abc", min_size=1, max_size=5))
def test_nothing_is_held_back_for_longer_than_a_stop_string_may_be(text: str, stop: str) -> None:
    assume(stop not in text)
    stream, said, pushed = answer(stop=(stop,)), "", answer()
    for token_id in tokens_of(text):
        stream.push(token_id)
        pushed.push(token_id)
        said += stream.take().text
    shown = pushed.take().text
    assert shown.startswith(said)
    assert len(shown) - len(said) < len(stop)


@given(TEXTS, st.lists(st.booleans(), max_size=40))
def test_tokens_and_logprobs_come_once_each_and_in_order(text: str, looks: Sequence[bool]) -> None:
    stream, token_ids, rows = answer(logprobs=1), [], []
    pushed = tokens_of(text)
    for at, token_id in enumerate(pushed):
        stream.push(token_id, logprobs=TokenLogprobs(token_id, -float(at)))
        if at < len(looks) and looks[at]:
            delta = stream.take()
            assert len(delta.token_ids) == len(delta.logprobs)
            token_ids, rows = token_ids + delta.token_ids, rows + delta.logprobs
    delta = stream.take()
    assert token_ids + delta.token_ids == pushed
    assert rows + delta.logprobs == [TokenLogprobs(token_id, -float(at)) for at, token_id in enumerate(pushed)]


# -- stops ------------------------------------------------------------------------------------------------------------


def test_a_stop_string_over_token_borders_ends_the_answer_and_later_tokens_are_ignored() -> None:
    stream = answer(stop=("b c",))
    token_ids = [token_id for part in ("a", "b", " ", "c") for token_id in tokens_of(part)]
    assert [stream.push(token_id) for token_id in token_ids] == [*[False] * (len(token_ids) - 1), True]
    assert not stream.push(tokens_of("x")[0])
    assert stream.num_tokens == len(token_ids)
    end(stream, FinishReason.STOP)
    delta = stream.take()
    assert (delta.text, delta.finish_reason, stream.stop_reason) == ("a", "stop", "b c")


def test_an_answer_that_ends_inside_a_stop_string_gives_back_what_was_held() -> None:
    stream = answer(stop=("abcdef",))
    assert push_all(stream, tokens_of("xabc")) == "xabc"
    assert (stream.finish_reason, stream.stop_reason) == ("length", None)


def test_a_stop_string_that_the_last_bytes_complete_counts_although_the_worker_reached_its_limit() -> None:
    stream = answer(stop=("\ufffd",))
    for token_id in tokens_of("🙂")[:-1]:
        stream.push(token_id)  # bytes that are no character until the end says so
    end(stream, FinishReason.LENGTH)
    assert (stream.take().text, stream.finish_reason) == ("", "stop")


def test_before_min_tokens_a_stop_string_is_text_like_any_other() -> None:
    token_ids = tokens_of("a") * 6
    stream = answer(stop=("a",), min_tokens=4)
    stopped = [stream.push(token_id) for token_id in token_ids]
    assert stopped.index(True) == 3
    assert stream.take().text == "aaa"


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    stream = answer()
    [a], [b] = tokens_of("a"), tokens_of("b")
    stream.push(a)
    assert not stream.push(b, is_stop_token=True)  # the worker has stopped by itself
    end(stream, FinishReason.STOP)
    delta = stream.take()
    assert (delta.text, delta.token_ids, delta.finish_reason, stream.stop_reason) == ("a", [a, b], "stop", b)


# -- the account ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])
def test_the_reason_is_the_workers_where_no_stop_string_was_found(reason: FinishReason) -> None:
    stream = answer(stop=("zzz",))
    stream.push(tokens_of("a")[0])
    end(stream, reason, num_cached_tokens=2)
    assert (stream.finish_reason, stream.cached_tokens) == (str(reason), 2)
    assert stream.finished is not None and stream.finished.latency.num_output_tokens == 1


def test_prompt_logprobs_come_in_chunks_a_second_time_after_a_retry_and_never_beyond_the_prompt() -> None:
    stream = answer(prompt=[1, 2, 3, 4, 5], prompt_logprobs=0)
    rows = [TokenLogprobs(token_id, -1.0) for token_id in (2, 3, 4, 5, 6, 7)]
    stream.add_prompt_logprobs(1, rows[:2])
    assert stream.prompt_logprobs == [None, rows[0], rows[1], None, None]
    stream.add_prompt_logprobs(1, rows)  # of a later attempt, whose prompt goes on with the answer
    assert stream.prompt_logprobs == [None, *rows[:4]]
    stream.add_prompt_logprobs(5, rows[4:])
    assert stream.prompt_logprobs == [None, *rows[:4]]


# -- several answers behind one queue ---------------------------------------------------------------------------------


def several(count: int) -> Generation:
    streams = [AnswerStream(f"a-{at}", at, [1], SamplingParams(max_tokens=9), TOKENIZER) for at in range(count)]
    return Generation("a", streams)


@pytest.mark.asyncio
async def test_one_read_gives_what_is_new_of_all_answers_and_each_only_once() -> None:
    generation = several(3)
    first, _, third = generation.streams
    for stream, token_id in ((third, 5), (first, 6), (third, 7)):
        stream.push(token_id)
        stream.mark()
    assert [(delta.index, delta.token_ids) for delta in await generation.read()] == [(2, [5, 7]), (0, [6])]
    assert generation.take() == []
    for stream in generation.streams:
        end(stream)
        stream.mark()
    assert not generation.is_exhausted
    assert [delta.finish_reason for delta in await generation.read()] == ["length"] * 3
    assert generation.is_exhausted


@pytest.mark.asyncio
async def test_an_error_reaches_the_reader_before_the_rest_and_the_first_one_counts() -> None:
    generation = several(1)
    reader = asyncio.create_task(generation.read())
    await asyncio.sleep(0)
    generation.streams[0].push(5)
    generation.streams[0].mark()
    generation.fail(WorkerError("the first"))
    generation.fail(WorkerError("the second"))
    with pytest.raises(WorkerError, match="the first"):
        await reader
    assert not generation.is_exhausted


@pytest.mark.asyncio
async def test_what_the_readers_own_callback_raises_is_the_readers_error() -> None:
    generation = several(1)

    def on_new() -> bool:
        raise ValueError("the socket is gone")

    reader = asyncio.create_task(generation.read(on_new))
    await asyncio.sleep(0)
    generation.streams[0].push(5)
    generation.streams[0].mark()
    generation.deliver()
    with pytest.raises(ValueError, match="socket"):
        await reader


@pytest.mark.asyncio
async def test_a_callback_that_declines_leaves_the_news_to_read() -> None:
    generation = several(1)
    reader = asyncio.create_task(generation.read(lambda: False))
    await asyncio.sleep(0)
    generation.streams[0].push(5)
    generation.streams[0].mark().deliver()
    assert [delta.token_ids for delta in await reader] == [[5]]


def test_what_stops_an_answer_is_part_of_its_text_where_that_is_asked_for() -> None:
    said = push_all(answer(stop=("= 2", "zz"), include_stop_str_in_output=True), tokens_of("x = 22 + 3"))
    assert said == "x = 2"
    for stops, wanted in (((), True), (("; b",), True), ((), False)):
        stream = answer(stop=stops, include_stop_str_in_output=wanted)
        *before, last = tokens_of("a;")
        for token_id in before:
            assert not stream.push(token_id)
        assert not stream.push(last, is_stop_token=True)
        end(stream, FinishReason.STOP)
        assert stream.take().text == ("a;" if wanted else TOKENIZER.decode(before))
        assert stream.stop_reason == last
