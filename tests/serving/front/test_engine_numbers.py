"""What the front computes of an engine's figures and reads of its replies, at the numbers where it changes its mind.

Everything here is a function of its arguments: no engine, no client, no clock.
"""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.laws import law

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import ConfigError
from diptych.control.router.kv_bridge import BlocksRemoved, CacheCleared, EngineBlocksStored
from diptych.control.slo import NS_PER_S
from diptych.control.step import StepFeatures
from diptych.serving import edge_limits
from diptych.serving.front import engine_load
from diptych.serving.front.adapters import vllm_adapter
from diptych.serving.front.engine_exchange import ELSEWHERE, EngineExchange
from diptych.serving.front.engine_handoff import PrefillLeg
from diptych.serving.front.engine_load import EngineGauges, EngineLoad, LearnedPrices, ReplySums, ReplyTimes, gauges_of
from diptych.serving.front.engine_pages import EnginePages, page_of_rank
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions, engines_of, in_order
from diptych.serving.front.external_worker import ExternalWorker
from diptych.serving.front.kv_events import KVEventReader, UnreadableBatchError, read_batch, read_event
from diptych.serving.front.relay_request import read_request
from diptych.serving.front.reply_chunks import (
    ChunkChoice,
    ChunkDelta,
    EngineUsage,
    EventSplitter,
    UnreadableReplyError,
    error_message,
    read_chunk,
)
from diptych.serving.front.sglang_step_metrics import UnreadablePassError, decode_pass
from diptych.serving.front.step_feed import ClockOffset, StepFeed
from diptych.serving.front.tokenized_prompt import TokenizedPrompt

S = NS_PER_S
URL = "http://127.0.0.1:8000"


# -- load -------------------------------------------------------------------------------------------------------------


def test_what_was_refused_counts_for_a_second_and_gauges_until_they_are_due() -> None:
    load = EngineLoad(100, 16, 2 * S, 5 * S)
    assert [load.is_saturated(5 * S + at) for at in (0, 2 * S, 2 * S + 1)] == [False, False, True]
    load.on_gauges(EngineGauges(), 7 * S)
    assert not load.is_saturated(9 * S)
    load.on_refused(8 * S)
    assert [load.is_saturated(8 * S + at) for at in (0, S - 1, S)] == [True, True, False]


def test_an_engine_that_has_learned_nothing_costs_what_the_others_have() -> None:
    shared = LearnedPrices()
    assert (shared.token_ns, shared.pair_ns, shared.context_ns) == (100_000.0, 0.0, 0.0)
    assert (shared.fixed_ns, shared.sequence_ns) == pytest.approx((16e6, 4e6))
    first, second = (EngineLoad(100, 16, 0, 0, shared) for _ in range(2))
    first.on_sent("a", 1000, 0)
    first.on_first_token("a", 51_200_000)
    first.on_prompt(1000, 0)
    assert second.token_ns == 100_000.0  # until the first one reports
    learned = (0.98 * (2048 * 100_000 + 51_200_000)) / (0.98 * 2048 + 1000)
    assert first.token_ns == pytest.approx(learned)
    report = first.report(1)
    assert report.token_ns == pytest.approx(learned) == second.token_ns == second.report(1).token_ns
    assert (report.fixed_ns, report.sequence_ns) == pytest.approx((16e6, 4e6))


def test_blocks_and_tokens_of_ours_are_counted_as_long_as_the_engine_has_them() -> None:
    load = EngineLoad(100, 16, 0, 0)
    load.on_gauges(EngineGauges(kv_usage=0.5, num_running=1), 0)
    load.on_sent("a", 17, 0)  # two blocks
    load.on_sent("b", 16, 0)
    assert (load.report(0).used_blocks, load.report(0).output_tokens, load.num_held) == (47, 0, 2)
    load.on_first_token("a", 1)
    load.on_gaps("a", {0.01: 16}, 16)
    assert (load.report(0).used_blocks, load.report(0).output_tokens) == (46, 16)
    load.on_gaps("unknown", {0.01: 16}, 16)
    stats = load.stats()
    assert (stats.num_waiting, stats.num_prefilling) == (0, 1)
    load.on_over("a", 2)
    load.on_over("a", 2)
    load.on_over("b", 2)
    assert load.report(0).used_blocks == 50 and load.num_held == 0 and load._num_pending == 0
    load.on_gauges(EngineGauges(kv_usage=0.0), 0)
    load.on_sent("c", 1600, 0)
    assert load.report(0).used_blocks == 0  # never fewer than none


def test_the_gap_between_tokens_is_learned_by_how_many_came() -> None:
    load = EngineLoad(100, 16, 0, 0)
    load.on_sent("a", 10, 0)
    load.on_gaps("a", {0.010: 16}, 16)
    assert load._gap_ns == pytest.approx(20e6 + (10e6 - 20e6) * 16 / 64)
    load.on_gaps("a", {0.010: 100, 0.030: 100}, 200)
    assert load._gap_ns == pytest.approx(20e6)
    load.on_gaps("a", {0.040: 32}, 64)  # two tokens a chunk
    assert load._gap_ns == pytest.approx(20e6)
    load.on_whole("a", 100, 16, 1000)
    assert load._gap_ns != pytest.approx(20e6)


def test_the_share_of_prompts_that_was_found_is_what_they_cost_less() -> None:
    load = EngineLoad(100, 16, 0, 0)
    load.on_prompt(1000, 750)
    load.on_prompt(1000, None)  # the engine does not say
    assert (load._queried, load._hit) == (1000, 750) and load.stats().prefix_hit_tokens == 750
    load.on_sent("a", 100, 0, is_whole=True)
    assert load._held["a"].least_ns == int(100 * 0.25 * load.token_ns)
    before = load._computed
    load.on_prompt(10, 10)
    assert load._computed == before * 0.98 + 1  # at least one


def test_tokens_that_the_engine_counts_move_the_price_by_a_32nd() -> None:
    load = EngineLoad(100, 16, 0, 0)
    load.on_prompt(100, 0, 164)
    assert load._said_share == pytest.approx(1.02)
    load.on_prompt(100, 0)
    assert load._said_share == pytest.approx(1.02)


def test_steps_without_prompts_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    load, asked = EngineLoad(100, 16, 0, 0), []
    monkeypatch.setattr(load._steps, "wants", lambda features, count: asked.append(count))
    for tokens in (0, 5, 0, 1, 0):
        load.on_step(StepFeatures(tokens, 0, 1, 1), 1000)
    assert asked == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("values", "expected"), [
    ({}, EngineGauges()), ({"kv_usage": -0.5}, EngineGauges(kv_usage=0.0)),
    ({"kv_usage": 1.5}, EngineGauges(kv_usage=1.0)),
    ({"kv_usage": 0.25, "num_running": 2.0, "num_waiting": 3.0}, EngineGauges(2, 3, 0.25)),
    ({"num_preemptions": 4.0, "num_first_tokens": 0.0}, EngineGauges(0, 0, None, 4, 0)),
])  # fmt: skip
def test_gauges_are_what_a_page_says(values: dict[str, float], expected: EngineGauges) -> None:
    assert gauges_of(values) == expected


def test_first_tokens_that_were_seen_here_before_the_count_had_them_are_no_other_prompts() -> None:
    load = EngineLoad(100, 16, 0, 0)
    load.on_gauges(EngineGauges(num_first_tokens=10), 0)
    for at in range(engine_load.MOST_EARLY + 5):
        load.on_sent(f"s{at}", 1, 0)
        load.on_first_token(f"s{at}", 1)
    load.on_gauges(EngineGauges(num_first_tokens=10), 0)
    assert load._num_seen == 64  # no more than so many are remembered
    load.on_sent("w", 0, 0, is_whole=True)
    load.on_gauges(EngineGauges(num_first_tokens=74), 1)
    assert load.report(1).computed == ()
    load.on_gauges(EngineGauges(num_first_tokens=75), 1)
    assert load.report(1).computed == ("w",)


@law(weight=0.1)
def test_prices_of_whole_replies_are_the_least_squares_of_what_was_seen(seed: int) -> None:
    rng = random.Random(seed)
    every = ReplySums()
    times, seen = ReplyTimes(100_000.0, 20e6, every), []
    for _ in range(rng.randint(1, 8)):
        seen.append((rng.randint(1, 4000), rng.randint(1, 60), rng.randint(1, 10**9)))
        times.observe(*seen[-1])
    rows = [(prompt, answer, time, 0.98**age) for age, (prompt, answer, time) in enumerate(reversed(seen))]
    count = sum(weight for *_, weight in rows)
    assert every.count == pytest.approx(count)
    weights = [weight * (1 + 20 / max(20, count)) for *_, weight in rows]  # its own, and the same ones as all engines'
    p2 = sum(w * p * p for (p, _, _, _), w in zip(rows, weights, strict=True)) + 256.0**2
    a2 = sum(w * a * a for (_, a, _, _), w in zip(rows, weights, strict=True)) + 4.0**2
    pa = sum(w * p * a for (p, a, _, _), w in zip(rows, weights, strict=True))
    pt = sum(w * p * t for (p, _, t, _), w in zip(rows, weights, strict=True)) + 100_000.0 * 256**2
    at = sum(w * a * t for (_, a, t, _), w in zip(rows, weights, strict=True)) + 20e6 * 4**2
    token, gap = (pt * a2 - at * pa) / (p2 * a2 - pa * pa), (at * p2 - pt * pa) / (p2 * a2 - pa * pa)
    if gap < 200_000.0:
        gap = 200_000.0
        token = (pt - gap * pa) / p2
    elif token < 1000.0:
        gap = (at - 1000.0 * pa) / a2
    assert (times.token_ns, times.gap_ns) == pytest.approx((max(1000.0, token), max(200_000.0, gap)))


# -- pages ------------------------------------------------------------------------------------------------------------


def test_eight_pages_of_a_minute_are_kept_eight_seconds_apart_and_the_newest() -> None:
    pages, spec = EnginePages(), EngineSpec("vllm", URL)
    assert pages.watched(spec, "1") is None
    for at in range(0, 121):
        pages.add(b"%d" % at, at * S)
        found = pages.watched(spec, "1")
        assert (found is None) == (at < 2)
    assert found is not None
    kept = [int(page) for _, page in found.pages]
    assert kept == [72, 80, 88, 96, 104, 112, 120]
    pages.add(b"121", 121 * S)
    found = pages.watched(spec, "1")
    assert found is not None and [int(page) for _, page in found.pages] == [*kept, 121]
    assert [time_s for time_s, _ in found.pages] == [float(int(page)) for _, page in found.pages]
    assert (found.name, found.version) == (URL, "1")
    pages.clear()
    assert pages.watched(spec, "1") is None
    pages.add(b"1", 300 * S)
    pages.add(b"2", 302 * S)
    ranked = pages.watched(EngineSpec("vllm", URL, rank=3), "1")
    assert ranked is not None and ranked.name == "vllm 127.0.0.1:8000 rank 3"


def test_a_rank_says_its_own_lines_and_those_of_none() -> None:
    page = b'a{engine="1"} 1\na{engine="11"} 2\nb 3\na{engine="0",x="engine"} 4'
    assert page_of_rank(page, None) == page
    assert page_of_rank(page, 1) == b'a{engine="1"} 1\nb 3'
    assert page_of_rank(page, 0) == b'b 3\na{engine="0",x="engine"} 4'
    assert page_of_rank(page, 7) == b"b 3"


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("block_size", 1, 4096), ("probe_s", 0.05, 60.0), ("silence_s", 0.1, 600.0), ("first_byte_s", 0.1, 86_400.0),
     ("idle_s", 0.1, 86_400.0), ("bytes_per_token", 0.5, 32.0), ("assumed_s", 1.0, 86_400.0)],
)  # fmt: skip
def test_options_of_a_front_are_taken_up_to_their_limits_and_refused_beyond(name: str, least: Any, most: Any) -> None:
    engines = (EngineSpec("vllm", URL),)
    for value in (least, most):
        assert getattr(FrontOptions(engines, **{name: value}), name) == value
    for value in (least - (1 if name == "block_size" else 0.01), most + 1):
        with pytest.raises(ConfigError) as refused:
            FrontOptions(engines, **{name: value})
        assert refused.value.param == name and str(value) in refused.value.message


def test_a_front_has_1_to_1024_engines_and_a_vllm_as_many_ranks() -> None:
    many = tuple(EngineSpec("vllm", f"http://127.0.0.1:{port}") for port in range(1, 1026))
    assert len(FrontOptions(many[:1024]).engines) == 1024
    for wrong in ((), many):
        with pytest.raises(ConfigError, match=f"{len(wrong)} engines; between 1 and 1024"):
            FrontOptions(wrong)
    assert EngineSpec("vllm", URL, rank=1023).rank == 1023
    for rank in (-1, 1024):
        with pytest.raises(ConfigError, match=r"must be in \[0, 1023\]"):
            EngineSpec("vllm", URL, rank=rank)
    with pytest.raises(ConfigError, match="of a vllm"):
        EngineSpec("sglang", URL, rank=0)


@pytest.mark.parametrize(("url", "is_one"), [
    ("http://h:1", True), ("https://h", True), ("http://h/", True), ("http://h:0", False), ("http://h:65536", False),
    ("http://h/v1", False), ("http://h?x", False), ("http://h#x", False), ("http://u@h", False), ("ftp://h", False),
    ("http://", False), ("h:1", False),
])  # fmt: skip
def test_an_engine_has_an_address_without_anything_behind_it(url: str, is_one: bool) -> None:
    if is_one:
        spec = EngineSpec("vllm", url)
        assert spec.address == ("h", {"http://h:1": 1, "https://h": 443, "http://h/": 80}[url])
        assert spec.is_tls is url.startswith("https")
        return
    with pytest.raises(ConfigError, match="without a path") as refused:
        EngineSpec("vllm", url)
    assert refused.value.param == "engine"


@pytest.mark.parametrize(("fields", "param"), [
    ({"kind": "tgi"}, "engine"), ({"role": "both "}, "role"), ({"kv_events": "tcp://h"}, "kv_events"),
    ({"kind": "openai", "kv_events": "tcp://h:1"}, "kv_events"), ({"kind": "sglang", "kv_events": "auto"}, "kv_events"),
    ({"kind": "llamacpp", "step_events": "tcp://h:1"}, "step_events"), ({"kv_replay": "tcp://h:1"}, "kv_replay"),
    ({"kv_events": "auto", "kv_replay": "tcp://h:1"}, "kv_replay"), ({"kind": "openai", "role": "prefill"}, "role"),
    ({"bootstrap": "h:1"}, "bootstrap"), ({"kind": "sglang", "bootstrap": "h:1"}, "bootstrap"),
    ({"kind": "vllm", "role": "prefill", "bootstrap": "h:1"}, "bootstrap"),
    ({"api_key_env": "DIPTYCH_NO_SUCH_VARIABLE"}, "api_key_env"),
    ({"api_key_env": "PATH", "api_key_file": "/x"}, "api_key_env"),
])  # fmt: skip
def test_settings_of_an_engine_that_contradict_each_other_are_refused_by_name(
    fields: dict[str, str], param: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineSpec(**{"kind": "vllm", "url": URL, **fields})  # type: ignore[arg-type]
    assert refused.value.param == param


def test_what_does_not_contradict_is_taken() -> None:
    EngineSpec("vllm", URL, kv_events="auto")
    EngineSpec("sglang", URL, role="prefill", bootstrap="h:1", kv_events="tcp://h:1", kv_replay="tcp://h:2")
    EngineSpec("vllm", URL, kv_events="ipc:///run/x", step_events="tcp://h:5")
    front = FrontOptions((EngineSpec("vllm", URL), EngineSpec("vllm", "http://127.0.0.1:8001", kv_events="auto")))
    assert front.reads_events and not front.hands_off
    assert not FrontOptions((EngineSpec("vllm", URL),)).reads_events
    pair = (EngineSpec("vllm", URL, role="decode"), EngineSpec("vllm", "http://127.0.0.1:8001", role="prefill"))
    assert FrontOptions(pair).hands_off and [engine.role for engine in in_order(pair)] == ["prefill", "decode"]
    with pytest.raises(ConfigError, match="one kind only"):
        FrontOptions((pair[0], EngineSpec("sglang", "http://127.0.0.1:8002", role="prefill")))


def test_a_key_is_sent_as_it_is_now_and_the_last_one_where_it_cannot_be_read(tmp_path: Path) -> None:
    assert EngineSpec("vllm", URL).headers == {"User-Agent": "diptych"}
    path = tmp_path / "key"
    path.write_text("first-key-of-this-engine")
    path.chmod(0o600)
    spec = EngineSpec("vllm", URL, api_key_file=str(path), rank=2)
    first = spec.headers
    assert first["Authorization"] == "Bearer first-key-of-this-engine" and first["X-data-parallel-rank"] == "2"
    path.write_text("second-key-of-this-engine")
    assert spec.headers_again(first)["Authorization"] == "Bearer second-key-of-this-engine"
    path.unlink()
    assert spec.headers_again(first) is first


def test_ranks_count_up_with_the_ports_and_names_of_their_addresses() -> None:
    given = {"kind": "vllm", "url": URL, "rank": "2-4", "kv_events": "tcp://h:10", "step_events": "ipc:///run/x.2"}
    found = engines_of(dict(given))
    assert [(engine.rank, engine.kv_events, engine.step_events) for engine in found] == [
        (2, "tcp://h:10", "ipc:///run/x.2"), (3, "tcp://h:11", "ipc:///run/x.3"), (4, "tcp://h:12", "ipc:///run/x.4"),
    ]  # fmt: skip
    assert [engine.rank for engine in engines_of({"kind": "vllm", "url": URL, "rank": 5})] == [5]
    first, second = engines_of({"kind": "vllm", "url": URL, "rank": "0-1", "step_events": "ipc:///run/x"})
    assert (first.step_events, second.step_events) == ("ipc:///run/x", "ipc:///run/x.1")
    for rank in ("4-2", "x", "-1", True, 1.5, "1-", "12345"):
        with pytest.raises(ConfigError, match="a number, or several as 0-7"):
            engines_of({"kind": "vllm", "url": URL, "rank": rank})


# -- replies ----------------------------------------------------------------------------------------------------------


def test_what_another_engine_may_take_is_what_is_about_this_one_and_this_moment() -> None:
    assert {status for status in range(400, 500) if status in ELSEWHERE} == {408, 409, 425, 429}


@pytest.mark.parametrize(("usage", "prompt", "answer"), [
    (EngineUsage(), 0, None), (EngineUsage(7, 3), 7, 3), (EngineUsage(0, 3, 10), 7, 3),
    (EngineUsage(0, None, 10), 10, None),
    (EngineUsage(0, 30, 10), 0, 30), (EngineUsage(7, -1), 7, None), (EngineUsage(7, 0), 7, 0),
    (EngineUsage(7, 3, 99), 7, 3),
])  # fmt: skip
def test_usage_is_read_however_it_is_said(usage: EngineUsage, prompt: int, answer: int | None) -> None:
    assert (usage.all_prompt_tokens, usage.answer_tokens, usage.cached_tokens) == (prompt, answer, None)


@law(weight=0.1)
def test_events_are_the_same_however_their_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    expected, data = [], b""
    for _ in range(rng.randint(1, 6)):
        end = rng.choice([b"\n", b"\r\n", b"\r"])
        lines = [rng.choice([b"", b"x", b"a: b", b'{"a":1}', "é".encode()]) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.2:
            data += b": comment" + end * 2 + b"event: x" + end + b"id: 1" + end * 2
        data += b"".join(rng.choice([b"data: ", b"data:"]) + line + end for line in lines) + end
        expected.append(b"\n".join(lines))
    splitter, found = EventSplitter(), []
    while data:
        count = rng.choice([1, 2, 7, len(data)])
        piece, data = data[:count], data[count:]
        found += splitter.feed(piece)
    assert found == expected and not splitter.rest


def test_an_event_may_be_as_long_as_the_limit() -> None:
    most = edge_limits.ENGINE_EVENT_BYTES
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"x" * (most - 6)) == []
    with pytest.raises(UnreadableReplyError, match=f"longer than {most} bytes"):
        splitter.feed(b"x")


@pytest.mark.parametrize(("choice", "num_tokens"), [
    ({"text": "a"}, 1), ({"text": ""}, 1), ({}, 0), ({"token_ids": [1, 2]}, 2), ({"token_ids": [], "text": "a"}, 0),
    ({"text": "", "finish_reason": "stop"}, 0), ({"text": "a", "finish_reason": "stop"}, 1),
    ({"delta": ChunkDelta(content="a")}, 1), ({"delta": ChunkDelta(content="")}, 1), ({"delta": ChunkDelta()}, 0),
    ({"delta": ChunkDelta(role="assistant", content="")}, 0), ({"delta": ChunkDelta(role="assistant", content="a")}, 1),
    ({"delta": ChunkDelta(reasoning="a")}, 1), ({"delta": ChunkDelta(reasoning_content="a")}, 1),
    ({"delta": ChunkDelta(tool_calls=msgspec.Raw(b"[1]"))}, 1),
    ({"delta": ChunkDelta(tool_calls=msgspec.Raw(b"[]"))}, 0),
    ({"delta": ChunkDelta(tool_calls=msgspec.Raw(b"null"))}, 0),
])  # fmt: skip
def test_a_chunk_brings_the_tokens_that_it_names_or_one(choice: dict[str, Any], num_tokens: int) -> None:
    assert ChunkChoice(**choice).num_tokens == num_tokens


@pytest.mark.parametrize(("message", "num_bytes"), [
    (None, 0), (b'{"content":"ab"}', 2), ("{\"content\":\"é\",\"reasoning\":\"xyz\"}".encode(), 5),
    (b'{"content":null,"reasoning_content":"ab","reasoning":"ab"}', 2), (b'{"content":[1],"tool_calls":[12]}', 4),
    (b'{"content":7', 12),
])  # fmt: skip
def test_a_whole_reply_says_its_text_its_reasoning_and_its_calls(message: bytes | None, num_bytes: int) -> None:
    choice = ChunkChoice() if message is None else ChunkChoice(message=msgspec.Raw(message))
    assert choice.num_text_bytes == num_bytes
    assert ChunkChoice(text="né").num_text_bytes == 3


@pytest.mark.parametrize(("payload", "words"), [
    (b'{"error":{"message":"m"}}', "m"), (b'{"message":"m"}', "m"), (b'{"detail":"m"}', "m"), (b'{"error":"m"}', "m"),
    (b'{"error":{"detail":"m"}}', "m"), (b"[]", "f"), (b"{}", "f"), (b"no", "f"), (b'{"error":""}', "f"),
    (b'{"error":"%s"}' % (b"x" * 2001), "x" * 2000),
])  # fmt: skip
def test_the_words_of_an_engine_are_found_in_each_usual_form(payload: bytes, words: str) -> None:
    assert error_message(payload, "f") == words
    if payload in (b"no", b"[]"):
        with pytest.raises(UnreadableReplyError):
            read_chunk(payload)


# -- what engines publish ---------------------------------------------------------------------------------------------


def a_pass(**fields: Any) -> bytes:
    sums = {name: fields.pop(name) for name in list(fields) if name.startswith(("num_", "sum_"))}
    return msgspec.msgpack.encode({"wall_time": 0.5, "dp_rank": 0, "scheduled_requests": sums, **fields})


@pytest.mark.parametrize(
    ("name", "most"),
    [("num_prefill_requests", 4096), ("sum_prefill_tokens", 1 << 40), ("sum_prefill_kv_tokens", 1 << 40),
     ("num_decode_requests", 65_536), ("sum_decode_kv_tokens", 1 << 40), ("dp_rank", 65_536), ("wall_time", 3600)],
)  # fmt: skip
def test_the_numbers_of_a_pass_are_bounded(name: str, most: int) -> None:
    for value in (0, 1, most):
        decode_pass(a_pass(**{name: value}))
    for value in (-1, most + 1, True, "1", None):
        with pytest.raises(UnreadablePassError, match=name):
            decode_pass(a_pass(**{name: value}))


def test_a_pass_with_tokens_has_a_prompt_and_without_them_none() -> None:
    def prefills(requests: int, tokens: int) -> int:
        return decode_pass(a_pass(num_prefill_requests=requests, sum_prefill_tokens=tokens)).num_prefills

    assert [prefills(0, 5), prefills(3, 5), prefills(3, 0)] == [1, 3, 0]
    assert decode_pass(a_pass(wall_time=1e-10, num_decode_requests=1)).duration_ns == 1
    assert [decode_pass(a_pass(wall_time=wall, **more)).is_step for wall, more in (
        (0.5, {}), (0, {"num_decode_requests": 1}), (0.5, {"num_decode_requests": 1}), (0.5, {"sum_prefill_tokens": 1}),
    )] == [False, False, True, True]  # fmt: skip


def test_an_offset_is_the_least_of_this_window_and_the_one_before() -> None:
    offset = ClockOffset()
    assert [offset.seen(0, 5), offset.seen(10, 13), offset.seen(20, 29)] == [5, 3, 3]
    window = 60 * S
    assert offset.seen(100, 100 + window) == 3  # of the window before
    assert offset.seen(window, window + 6) == 3
    assert offset.seen(2 * window, 2 * window + 107) == 6  # 3 is two windows old
    assert offset.seen(3 * window, 3 * window + 200) == 107


def test_what_cannot_be_read_is_warned_of_once_and_takes_no_number(caplog: pytest.LogCaptureFixture) -> None:
    feed = StepFeed(lambda *_: None, lambda: 0)
    for _ in range(3):
        feed.take_frames([b"steps", b"no line"])
    assert len(caplog.records) == 1 and (feed.num_seen, feed.num_missed) == (0, 0) and feed.described() == {}


STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5], "block_size": 1}


@pytest.mark.parametrize("change", [
    {"token_ids": [-1]}, {"token_ids": [1 << 32]}, {"token_ids": ["5"]}, {"token_ids": None}, {"block_size": None},
    {"block_size": 1.0}, {"parent_block_hash": 1.0}, {"block_hashes": None}, {"block_hashes": ["a"]},
])  # fmt: skip
def test_a_stored_block_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnreadableBatchError):
        read_event({**STORED, **change}, set())


@pytest.mark.parametrize(("change", "counts"), [
    ({}, True), ({"token_ids": [0, (1 << 32) - 1]}, True), ({"parent_block_hash": b"x"}, True),
    ({"medium": "GPU"}, True),
    ({"medium": "gpu"}, True), ({"medium": ""}, True), ({"medium": "device"}, True), ({"medium": "CPU"}, False),
    ({"medium": 1}, False), ({"lora_id": 0}, False), ({"lora_name": "x"}, False), ({"extra_keys": []}, True),
    ({"extra_keys": [None, []]}, True), ({"extra_keys": [None, ["x"]]}, False), ({"extra_keys": "x"}, False),
    ({"kv_cache_spec_kind": "full_attention"}, True), ({"kv_cache_spec_kind": "mamba"}, False),
])  # fmt: skip
def test_only_plain_prompt_blocks_of_the_first_tier_count(change: dict[str, Any], counts: bool) -> None:
    event = {**STORED, **change}
    found = read_event(event, set())
    assert (found is not None) is counts
    if counts:
        assert found == EngineBlocksStored(
            event["block_hashes"], event["parent_block_hash"], event["token_ids"], event["block_size"]
        )


def test_what_a_group_of_other_layers_removes_is_not_removed() -> None:
    groups: set[int] = set()
    assert read_event({**STORED, "group_idx": 0}, groups) is not None and groups == set()
    assert read_event({**STORED, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}, groups) is None
    assert groups == {1}
    removed = {"type": "BlockRemoved", "block_hashes": [1, b"2"]}
    assert read_event(removed, groups) == BlocksRemoved([1, b"2"])
    assert read_event({**removed, "group_idx": 0}, groups) == BlocksRemoved([1, b"2"])
    assert read_event({**removed, "group_idx": 1}, groups) is None
    assert read_event({**removed, "medium": "CPU"}, groups) is None
    assert read_event({"type": "AllBlocksCleared"}, groups) == CacheCleared()
    assert read_event({"type": "BlockMoved"}, groups) is None


def test_events_are_maps_or_arrays_and_batches_have_a_list_of_them() -> None:
    array = ["BlockStored", [1], None, [5], 1]
    for batch in ([0.5, [array]], {"ts": 0.5, "events": [STORED]}, [0.5, [array, ["BlockMoved"]], 3]):
        assert read_batch(msgspec.msgpack.encode(batch)) == [EngineBlocksStored([1], None, [5], 1)]
    assert read_batch(msgspec.msgpack.encode([0.5, [["AllBlocksCleared"], ["BlockRemoved", [1], "GPU"]]])) == [
        CacheCleared(), BlocksRemoved([1]),
    ]  # fmt: skip
    for wrong in (b"\xc1", *map(msgspec.msgpack.encode, ([0.5], {"ts": 1}, 5, [0.5, 5], [0.5, [5]], [0.5, [[]]]))):
        with pytest.raises(UnreadableBatchError):
            read_batch(wrong)


# -- who is told ------------------------------------------------------------------------------------------------------


def leg(kind: str = "nixl") -> tuple[Any, list[Any]]:
    """A leg whose request is under way, and what its owner and its call are told."""
    told: list[Any] = []
    owner = SimpleNamespace(
        name="engine", clock=lambda: 5,
        **{name: lambda *arguments, name=name: told.append((name, *arguments[1:]))
           for name in ("on_leg_lost", "on_leg_computed", "on_leg_refused", "report")},
    )  # fmt: skip
    slot = SimpleNamespace(give=lambda fields: told.append(("give", fields)))
    made = PrefillLeg(owner, SimpleNamespace(attempt_id="a"), None, slot, kind)  # type: ignore[arg-type]
    call: Any = SimpleNamespace(release=lambda: told.append("release"), abort=lambda: told.append("abort"))
    made._call = call
    return made, told


@pytest.mark.parametrize(("end", "expected"), [
    ("cancel", ["abort"]), ("release", ["release"]), ("on_end", ["release", ("on_leg_computed",), ("give", {})]),
])  # fmt: skip
def test_a_leg_lets_its_request_go_or_ends_it_once(end: str, expected: list[Any]) -> None:
    made, told = leg()
    made.on_head(200, {})
    made.on_data(b'{"kv_transfer_params":{"x":1}}')
    for _ in range(2):
        getattr(made, end)()
        assert made.is_over
    assert [entry if entry[0] != "give" else ("give", {}) for entry in told] == expected
    made.break_off("late")
    assert len(told) == len(expected)


@pytest.mark.parametrize(("status", "expected"), [
    (400, ["release", ("on_leg_refused", 400, b"no")]), (401, ["abort", ("on_leg_lost", "status 401")]),
    (403, ["abort", ("on_leg_lost", "status 403")]), (429, ["abort", ("on_leg_lost", "status 429")]),
    (500, ["abort", ("on_leg_lost", "status 500")]), (404, ["release", ("on_leg_refused", 404, b"no")]),
])  # fmt: skip
def test_a_leg_that_is_refused_is_tried_elsewhere_where_another_may_take_it(status: int, expected: list[Any]) -> None:
    made, told = leg()
    made.on_head(status, {})
    made.on_data(b"no")
    made.on_end()
    assert told == expected


@pytest.mark.parametrize(("kind", "status", "limit"), [
    ("nixl", 200, edge_limits.ENGINE_REPLY_BYTES), ("bootstrap", 400, edge_limits.ENGINE_REFUSAL_BYTES),
    ("bootstrap", 200, None),
])  # fmt: skip
def test_the_reply_to_a_leg_is_bounded_where_it_is_kept(kind: str, status: int, limit: int | None) -> None:
    made, told = leg(kind)
    made.on_head(status, {})
    made.on_data(bytes(limit or 10**6))
    assert not made.is_over and len(made._body) == (limit or 0)
    made.on_data(b"x")
    assert made.is_over is (limit is not None) and ("abort" in told) is made.is_over


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_the_first_tokens_of_an_answer_are_told_once_each(num_tokens: int, is_taken_over: bool) -> None:
    exchange: Any = object.__new__(EngineExchange)
    told: list[Any] = []
    exchange._owner = SimpleNamespace(
        number=1,
        report=lambda events, tokens: told.append((len(events), tokens.token_ids)),
        report_completed_handoff=lambda events, attempt_id, token_id: told.append((len(events), [token_id])),
    )
    exchange.attempt_id, exchange.is_handoff, exchange.begun_ns = "a", is_taken_over, 0
    exchange._feeder = 0
    ids = [7, 8, 9][:num_tokens]
    exchange._begin_answer(list(ids), 5)
    if is_taken_over:
        assert told == [(2, [7]), *([(0, ids[1:])] if num_tokens > 1 else [])]
        assert exchange._feeder == 1
    else:
        assert told == [(1, ids)]


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_is_looked_at_when_all_of_its_streams_are_silent_and_left_when_none_gets_a_token(seed: int) -> None:
    rng, now = random.Random(seed), 1000 * S
    told: list[str] = []
    exchanges = {}
    for number in range(rng.randint(1, 4)):
        made = SimpleNamespace(
            stream=SimpleNamespace(is_full=rng.random() < 0.2),
            last_ns=now - rng.choice([0, 4, 5, 6, 59, 60, 61, 700]) * S,
            first_ns=rng.choice([0, 1]), broken=[],
        )  # fmt: skip
        made.break_off = made.broken.append
        exchanges[f"{number}"] = made
    ages = [0 if made.stream.is_full else (now - made.last_ns) // S for made in exchanges.values()]
    worker: Any = SimpleNamespace(
        clock=lambda: now, _scraping=SimpleNamespace(done=lambda: False), exchanges=exchanges,
        _options=FrontOptions((EngineSpec("vllm", URL),), silence_s=5.0, idle_s=60.0, first_byte_s=600.0),
        _lose=lambda words: told.append("lost"), _check_soon=lambda: told.append("looked at"),
        _report_load=lambda: told.append("reported"), cache=SimpleNamespace(tick=lambda now: None),
        handoffs=SimpleNamespace(break_off_overdue=lambda now, limit_s: told.append(f"overdue {limit_s:g}")),
    )  # fmt: skip
    ExternalWorker._look_after(worker)
    limits = [60 if made.first_ns else 600 for made in exchanges.values()]
    broken = [age > limit for age, limit in zip(ages, limits, strict=True)]
    assert [bool(made.broken) for made in exchanges.values()] == broken
    is_mute = any(is_broken and made.first_ns for is_broken, made in zip(broken, exchanges.values(), strict=True))
    assert told == [
        *["lost"] * bool(is_mute and min(ages) > 60), "overdue 600", *["looked at"] * (min(ages) > 5), "reported",
    ]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize(("render", "generate", "takes"), [
    (400, (200, b'{"choices":[{"text":"x"}]}'), True), (422, (200, b'{"choices":[{"text":""}]}'), True),
    (404, (200, b'{"choices":[{"text":"x"}]}'), False), (405, (200, b'{"choices":[{"text":"x"}]}'), False),
    (501, (200, b'{"choices":[{"text":"x"}]}'), False), (400, (404, b"{}"), False), (400, (200, b"{}"), False),
    (400, (200, b'{"choices":[{}]}'), False), (400, (200, b"no"), False), (None, (200, b""), False),
])  # fmt: skip
async def test_tokens_are_sent_where_chats_can_be_rendered_and_answers_have_text(
    render: int | None, generate: tuple[int, bytes], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(pool: Any, method: str, path: str, body: bytes, **_: Any) -> tuple[int, bytes]:
        if path == vllm_adapter.RENDER_PATH:
            if render is None:
                raise TimeoutError
            return render, b""
        return generate

    monkeypatch.setattr(vllm_adapter, "ask", ask)
    tokens: Any = SimpleNamespace(token_ids=[1])
    assert await vllm_adapter.VLLMAdapter._takes_tokens(None, "m", tokens) is takes  # type: ignore[arg-type]
    assert await vllm_adapter.VLLMAdapter._takes_tokens(None, "m", None) is False  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_an_engine_is_asked_again_where_batches_are_missing_and_answers_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[Any] = []
    source: Any = SimpleNamespace(on_replay_end=lambda: "the end")
    reader, asked = KVEventReader(source, "tcp://h:1", "tcp://h:2", changes.append), list[int]()

    async def ask_again(number: int, context: Any) -> bool:
        asked.append(number)
        return number == 7

    monkeypatch.setattr(reader, "_ask_again", ask_again)
    for replay_from, is_answered in ((None, False), (7, True), (8, False), (0, False)):
        change: Any = SimpleNamespace(replay_from=replay_from)
        changes.clear()
        assert await reader._take(change, None) is is_answered
        assert changes == ([change] if replay_from is None else [change, "the end"])
    assert asked == [7, 8, 0]


def test_a_number_of_another_length_is_no_batch_and_one_that_cannot_be_read_is_lost_for_good() -> None:
    source: Any = SimpleNamespace(on_lost=lambda: "lost")
    reader, taken = KVEventReader(source, "", "", lambda change: None), list[Any]()
    take: Any = lambda number, events: taken.append((number, events))  # noqa: E731
    assert reader._on_frames([b"", b"1234567", b"x"], take) == "lost" and taken == []
    reader._on_frames([b"", (5).to_bytes(8, "big"), b"\xc1"], take)
    reader._on_frames([b"", (-1).to_bytes(8, "big", signed=True), msgspec.msgpack.encode([0.5, []])], take)
    assert taken == [(5, None), (-1, [])]


def test_blocks_of_a_prompt_that_is_known_as_tokens_are_those_of_its_plain_tokens() -> None:
    tokens = TokenizedPrompt((1, 2, 3, 4, 5, 6, 7), 5)
    request = read_request("/v1/completions", b'{"model":"m","prompt":"some text"}')
    known = replace(request, tokenized=tokens)
    assert known.hashes(2, 4.0) == hash_blocks((1, 2, 3, 4, 5), 2) != request.hashes(2, 4.0)
    assert known.estimated_tokens(4.0) == 7
    salted = read_request("/v1/completions", b'{"model":"m","prompt":"some text","cache_salt":"x"}')
    assert replace(salted, tokenized=tokens).hashes(2, 4.0) == ()
