"""What a front does with requests besides passing them on: queue, classes, deadlines, load, recording, bounds."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Fault, answer_to
from front_harness import fronted

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.router.costs import UNBOUNDED, WorkerView
from diptych.serving.api.http_policy import HttpPolicy
from diptych.serving.front.engine_load import SATURATED_NS, EngineGauges, EngineLoad, ReplySums, ReplyTimes
from diptych.serving.front.relay_request import read_request
from diptych.serving.front.reply_chunks import EventSplitter, UnreadableReplyError, without_token_ids
from diptych.simulation.cluster_replay import replay_cluster
from diptych.workload.traces import load_trace

S = 1_000_000_000


@pytest.mark.asyncio
async def test_the_queue_is_bounded_and_classes_and_deadlines_count_in_it() -> None:
    engine = FakeEngine(prefill_s=0.3)
    cluster = cluster_config(max_prefills_in_flight_per_worker=1, max_queued=4)
    async with fronted(engine, cluster=cluster) as client:
        ask = client.complete
        first = asyncio.create_task(ask("first", 2))
        while not engine.requests:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(ask(name, 2, service_class=name)) for name in ("standard", "interactive")]
        extra = asyncio.create_task(ask("extra", 2))
        late = asyncio.create_task(ask("late", 2, deadline_ms=50))
        await asyncio.sleep(0.02)
        refused = await ask("past the limit", 2)
        assert refused.status == 429 and refused.error is not None and refused.error["code"] == "queue_full"
        answers = await asyncio.gather(first, *waiting, late, extra)
        assert [answer.status for answer in answers[:3]] == [200, 200, 200]
        assert answers[3].status in (429, 503) and answers[3].error is not None  # its deadline passed in the queue
        prompts = ["".join(map(chr, sent["prompt"])) if isinstance(sent["prompt"], list) else sent["prompt"]
                   for sent in engine.requests]  # fmt: skip
        assert prompts == ["first", "interactive", "standard", "extra"]
        await client.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_key_that_floods_the_front_does_not_keep_another_waiting(has_keys: bool) -> None:
    """And without keys, whose requests cannot be told apart, the same flood does."""
    engine = FakeEngine(prefill_s=0.02)
    cluster = cluster_config(max_prefills_in_flight_per_worker=1)
    app = {"api_keys": ["flood", "single"]} if has_keys else {}

    async def ask(key: str, number: int) -> None:
        body = {"prompt": f"{key} {number}", "max_tokens": 2, "temperature": 0}
        answer = await client.post("/v1/completions", body, Authorization=f"Bearer {key}")
        assert (answer.status, answer.text) == (200, answer_to(f"{key} {number}", 2))

    async with fronted(engine, cluster=cluster, app=app) as client:
        flood = [asyncio.create_task(ask("flood", number)) for number in range(40)]
        while len(engine.requests) < 4:
            await asyncio.sleep(0.005)
        passed = []  # by requests of the flood, while one of the other key waited
        for number in range(5):
            before = len(engine.requests)
            await ask("single", number)
            passed.append([sent["prompt"] for sent in engine.requests].index(f"single {number}") - before)
        await asyncio.gather(*flood)
        assert max(passed) <= 2 if has_keys else passed[0] > 30
        await client.idle()


@pytest.mark.asyncio
async def test_what_a_front_decided_is_recorded_and_replays_to_the_same(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines, record=tmp_path / "front.jsonl") as client:
        engines[0].faults.append(Fault("reset", at=2))
        engines[1].faults.append(Fault("status", status=503))
        await asyncio.gather(*(client.complete(f"prompt {number} " * 9, 5) for number in range(8)))
        await client.idle()
    report = replay_cluster(tmp_path / "front.jsonl")
    assert report.is_identical and report.is_complete and report.num_decisions > 8


@pytest.mark.asyncio
async def test_the_access_log_of_a_front_is_a_trace_of_the_traffic_of_its_engines(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with fronted(FakeEngine(), app={"http_policy": HttpPolicy(access_log=str(path))}) as client:
        await client.complete("abc", 3)
        await client.complete("abcdef", 5, stream=False)
        await client.http.get("/health")
        await client.idle()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line.get("prompt_tokens"), line.get("output_tokens")) for line in lines] == [(3, 3), (6, 5), (None, None)]
    assert lines[0]["ttft_s"] is not None and lines[0]["finish_reasons"] == ["length"]
    trace = load_trace(str(path))
    assert (list(trace.prompt_tokens), list(trace.output_tokens)) == ([3, 6], [3, 5])


@pytest.mark.asyncio
async def test_latency_is_divided_between_the_front_and_the_engine() -> None:
    async with fronted(FakeEngine(prefill_s=0.2)) as client:
        await client.complete("abc", 3, ttft_slo_ms=10_000)
        metrics = client.front.metrics
        assert 0.15 < metrics.latencies["request_prefill_time"]._sum < 2 and metrics.num_meeting_slo == 1
        assert metrics.latencies["request_queue_time"]._sum < 0.15
        assert metrics.num_generated_tokens == 3


def test_load_is_our_own_and_what_the_gauges_have_besides() -> None:
    load = EngineLoad(1000, 16, 2 * S, 0)
    load.on_gauges(EngineGauges(num_running=1, num_waiting=3, kv_usage=0.5), 0)
    load.on_sent("a", 160, 0)
    report = load.report(1)
    assert report.used_blocks == 490 and report.num_blocks == 1000  # 10 of the 500 are ours
    assert report.backlog_ns == int(2 * load._mean_prompt * load.token_ns)  # two of three that wait are not ours
    load.on_first_token("a", S)
    load.on_over("a", S)
    assert load.num_held == 0


def test_gauges_that_do_not_come_mean_saturated_until_they_do() -> None:
    load = EngineLoad(1000, 16, 2 * S, 0)
    assert not load.is_saturated(S)
    stale = load.report(3 * S)
    assert load.is_saturated(3 * S) and stale.backlog_ns >= SATURATED_NS and stale.used_blocks == 1000
    load.on_gauges(EngineGauges(), 3 * S)
    assert load.report(3 * S).backlog_ns == 0
    load.on_refused(3 * S)
    assert load.is_saturated(3 * S + 1) and not load.is_saturated(4 * S + 1)
    assert not EngineLoad(1000, 16, 0, 0).is_saturated(100 * S)  # it has no gauges


def test_the_price_of_a_prompt_token_is_learned_from_the_time_that_prompts_are_waited_for() -> None:
    load = EngineLoad(1000, 16, 0, 0)
    now = 0
    for number in range(200):  # 1000 tokens in 50 ms, two at a time: 25 us a token
        load.on_sent(f"a{number}", 1000, now)
        load.on_sent(f"b{number}", 1000, now)
        for name in "ab":
            now += 25_000_000
            load.on_first_token(f"{name}{number}", now)
            load.on_prompt(1000, 0)
            load.on_over(f"{name}{number}", now + 10_000_000)
        now += 50_000_000
    assert 20_000 < load.token_ns < 30_000


def test_prompts_of_whole_replies_are_computed_when_the_engine_has_counted_their_first_tokens() -> None:
    load = EngineLoad(1000, 16, 0, 0)

    def counts(num_first_tokens: int | None, now: int) -> tuple[str, ...]:
        load.on_gauges(EngineGauges(num_waiting=4, num_first_tokens=num_first_tokens), now)
        return load.report(now).computed

    for name in ("a~1", "b", "c"):
        load.on_sent(name, 100, 0, is_whole=True)
    load.on_sent("stream", 100, 0)
    assert counts(70, S) == ()  # of requests long ago
    assert load.report(S).backlog_ns == 0  # those that wait are ours
    assert counts(71, S) == ("a",)
    assert load.report(S).backlog_ns == int(load._mean_prompt * load.token_ns)
    load.on_first_token("stream", S)
    assert counts(72, S) == ("a",)  # that was the stream's
    load.on_first_token("stream", S)
    load.on_over("b", S)  # between two looks
    assert counts(73, S) == ("a",)
    load.on_sent("d", 10_000_000, S, is_whole=True)
    assert counts(76, S) == ("a", "c")  # others' requests do not make a long prompt short
    assert counts(2, S) == ("a", "c")  # the count began again
    assert counts(None, S) == ("a", "c")
    assert counts(90, 3 * S) == ("a", "c")


@pytest.mark.parametrize("gap_ms", [1, 5, 50])
@pytest.mark.parametrize("is_varied", [True, False])
def test_what_whole_replies_take_is_divided_between_prompt_and_answer(gap_ms: int, is_varied: bool) -> None:
    load, rng = EngineLoad(1000, 16, 0, 0), random.Random(3)
    now = 0
    for number in range(200):  # 25 us a prompt token; two at a time, each of which waits for both prompts
        sizes = [rng.randint(100, 3000) if is_varied else 1000 for _ in range(2)]
        names = [f"{number} {place}" for place in range(2)]
        for name, size in zip(names, sizes, strict=True):
            load.on_sent(name, size, now, is_whole=True)
        now += sum(sizes) * 25_000 + 40 * gap_ms * 1_000_000
        for name, size in zip(names, sizes, strict=True):
            load.on_whole(name, size, 40, now)
            load.on_prompt(size, 0)
            load.on_over(name, now)
    if is_varied:  # both prices show
        assert 15_000 < load.token_ns < 35_000 and 0.5 < load._gap_ns / (gap_ms * 1_000_000) < 2
    spent_ns = 1500 * load.token_ns + 40 * load._gap_ns
    assert 0.6 < spent_ns / (1500 * 25_000 + 40 * gap_ms * 1_000_000) < 1.4


def test_equal_engines_do_not_differ_by_chance() -> None:
    every, rng = ReplySums(), random.Random(7)
    fits = [ReplyTimes(100_000.0, 20e6, every) for _ in range(2)]
    apart = [ReplyTimes(100_000.0, 20e6, ReplySums()) for _ in range(2)]
    for _ in range(20):
        for at in range(2):
            num_prompt = rng.randint(200, 2000)
            time_ns = int((num_prompt * 1_000_000 + 16 * 20_000_000) * rng.uniform(0.5, 2))
            fits[at].observe(num_prompt, 16, time_ns)
            apart[at].observe(num_prompt, 16, time_ns)

    def difference(found: list[ReplyTimes]) -> float:
        return abs(found[0].token_ns / found[1].token_ns - 1)

    assert difference(fits) < 0.6 * difference(apart)


def test_reports_name_prompts_that_are_no_work_any_more() -> None:
    view = WorkerView()
    view.send("a", UNBOUNDED, 500, 4)
    view.send("b", UNBOUNDED, 300, 4)
    view.on_report(replace(EngineLoad(1000, 16, 0, 0).report(1), computed=("a", "unknown")))
    assert view.work_sum_ns == 300 and view.memory_sum == 8  # its blocks are there until it ends


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_come_whole_however_they_are_cut(size: int) -> None:
    data = b'data: {"a":1}\n\n: comment\n\ndata: {"b":\r\ndata: 2}\r\n\r\nevent: x\nid: 1\n\ndata: [DONE]\n\n'
    splitter, found = EventSplitter(), []
    for begin in range(0, len(data), size):
        found += list(splitter.feed(data[begin : begin + size]))
    assert found == [b'{"a":1}', b'{"b":\n2}', b"[DONE]"]


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    splitter = EventSplitter()
    with pytest.raises(UnreadableReplyError, match="longer than"):
        for _ in range(20):
            list(splitter.feed(b"x" * (1 << 20)))


def test_token_ids_are_taken_out_of_a_chunk_and_text_that_looks_like_them_is_not() -> None:
    text = r'{"text":",\"token_ids\":[1]","token_ids":[7, 8],"prompt_token_ids":null,"x":","}'
    assert without_token_ids(text.encode()) == rb'{"text":",\"token_ids\":[1]","x":","}'


def test_prompts_with_a_common_beginning_have_common_hashes_and_other_tools_have_none() -> None:
    def hashes(messages: str, more: str = "") -> tuple[bytes, ...]:
        body = f'{{"messages":[{messages}]{more}}}'.encode()
        return read_request("/v1/chat/completions", body).hashes(16, 1.0)

    turn = '{"role":"user","content":"' + "x" * 200 + '"}'
    short, long = hashes(turn), hashes(f'{turn},{{"role":"assistant","content":"y"}}')
    assert len(short) > 10 and long[: len(short) - 1] == short[: len(short) - 1]
    assert not set(short) & set(hashes(turn, ',"tools":[{"a":1}]'))
    assert not set(short) & set(hashes(turn, ',"cache_salt":"me"'))
    more = [f',"{name}":[{{"a":1}}]' for name in ("tools", "documents", "chat_template_kwargs", "chat_template")]
    found = [block for each in ["", *more, ',"chat_template":"x"', "".join(more)] for block in hashes(turn, each)]
    assert len(set(found)) == len(found)


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_stops_its_engine_from_filling_the_memory() -> None:
    engine = FakeEngine()
    async with fronted(engine) as client:
        request = read_request("/v1/completions", b'{"prompt":"abc","max_tokens":200000,"stream":true,"temperature":0}')
        generation = await client.front.submit(request, "")
        stream = generation.relay
        async with asyncio.timeout(20):
            while not stream.is_full:
                await asyncio.sleep(0.02)
        before = -1
        async with asyncio.timeout(20):
            while stream._num_unread != before:  # what was under way, and nothing more ...
                before = stream._num_unread
                await asyncio.sleep(0.3)
        assert before < 2 << 20
        text = b"".join([stream.take().data])
        assert text.count(b'"text"') == stream.num_tokens
        async with asyncio.timeout(20):
            while not stream._num_unread:  # ... until it is taken
                await asyncio.sleep(0.02)
        client.front.abort(generation)
        await client.idle()
    assert answer_to("abc", 1)
