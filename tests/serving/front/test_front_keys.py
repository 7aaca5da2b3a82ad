"""Keys with names in front of engines that others run: who is let in, what each reply counts, and what ends early."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Fault
from front_harness import Answer, FrontClient, fronted

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_keys_api import Client, Clock, key_of, table, until

from diptych.control.cluster.cluster_config import cluster_config
from diptych.serving.batches.batch_service import BatchOptions, BatchService
from diptych.serving.keys.keyring import Keyring

pytestmark = pytest.mark.asyncio
S = 10**9
KINDS = ("vllm", "sglang", "llamacpp", "openai")
PROMPT = "twelve bytes"
QUOTED = f'"{PROMPT}"'  # of this many tokens, until an engine says otherwise


class FrontKeys(Client):
    """A front with a file of keys, over engines."""

    def __init__(self, keys: Keyring, clock: Clock, client: FrontClient) -> None:
        self.keys, self.clock, self.http, self.front = keys, clock, client.http, client
        self.engine = client.engines[0]

    async def ask(self, name: str = "web", path: str = "/v1/completions", **more: Any) -> Answer:
        given = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
        body = {**given, "max_tokens": 5, "temperature": 0, **more}
        return await self.front.post(path, body, authorization=f"Bearer {key_of(name)}")

    async def used(self, name: str = "web") -> tuple[int, int, int]:
        """Tokens of prompts, of these cached, and of answers."""
        await self.front.idle()
        counts = await self.metrics()
        kinds = ("prompt", "cached", "completion")
        prompt, cached, completion = (int(counts.get((f"key_{kind}_tokens_total", name), 0)) for kind in kinds)
        return prompt, cached, completion

    def quota(self, name: str = "web") -> Any:
        record = self.keys.named(name)
        assert record is not None
        return self.keys.quota(record)


@asynccontextmanager
async def served(
    folder: Path, *tables: str, engine: FakeEngine | None = None, app: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[FrontKeys]:
    path, clock = folder / "keys.toml", Clock()
    path.write_text("".join((*tables, table("op", admin=True))))
    path.chmod(0o600)
    keys = Keyring((), path, clock.ns, clock.s)
    async with fronted(engine or FakeEngine(), app={**(app or {}), "keys": keys}, **options) as client:
        yield FrontKeys(keys, clock, client)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_counts_is_counted_for_the_name_and_the_tenant(
    tmp_path: Path, kind: str, path: str, stream: bool
) -> None:
    async with served(tmp_path, table("web", tenant="shop"), table("bob"), engine=FakeEngine(kind)) as client:
        answer = await client.ask(path=path, stream=stream)
        assert (answer.status, len(answer.text)) == (200, 5)
        num_prompt = len(f"<user>{PROMPT}<assistant>") if "chat" in path else len(PROMPT)
        assert await client.used() == (num_prompt, 0, 5)
        counts = await client.metrics()
        assert counts["key_requests_total", "web"] == 1 and ("key_requests_total", "bob") not in counts


@pytest.mark.parametrize("kind", ["sglang", "openai"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_come_several_in_a_chunk_count_as_the_engine_says(
    tmp_path: Path, kind: str, stream: bool
) -> None:
    engine = FakeEngine(kind, merges=4)
    async with served(tmp_path, table("web"), engine=engine) as client:
        assert (await client.ask(max_tokens=10, stream=stream)).status == 200
        assert await client.used() == (len(PROMPT), 0, 10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_engine_that_says_no_usage_is_counted_by_its_chunks_or_by_its_text(tmp_path: Path, path: str) -> None:
    engine = FakeEngine("openai", says_usage=False)
    async with served(tmp_path, table("web"), engine=engine, bytes_per_token=2.0) as client:
        assert (await client.ask(path=path, stream=True, max_tokens=9)).status == 200
        prompt, cached, completion = await client.used()
        assert prompt >= len(PROMPT) // 2 and (cached, completion) == (0, 9)
        assert (await client.ask(path=path, stream=False, max_tokens=9)).status == 200
        assert await client.used() == (2 * prompt, 0, 9 + 5), "nine bytes"


async def test_tokens_that_an_engine_names_are_counted_without_usage(tmp_path: Path) -> None:
    async with served(tmp_path, table("web"), engine=FakeEngine(merges=3, says_usage=False)) as client:
        assert (await client.ask(stream=True, max_tokens=8)).status == 200
        assert await client.used() == (len(PROMPT), 0, 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_found_in_its_cache_is_a_part_of_the_prompt(tmp_path: Path, stream: bool) -> None:
    async with served(tmp_path, table("web"), bytes_per_token=0.5) as client:
        prompt = "0123456789abcdef" * 2 + "z"  # two blocks of the engine, and a token
        for _ in range(2):
            await client.ask(prompt=prompt, stream=stream)
        assert await client.used() == (2 * 33, 32, 10)


@pytest.mark.parametrize("usage", [
    {"prompt_tokens": -7, "completion_tokens": -3},
    {"prompt_tokens": 5, "completion_tokens": 10**15},
    {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 10**9}},
    {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": -5}},
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_that_cannot_be_is_not_believed(
    tmp_path: Path, usage: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine._Reply.usage", lambda reply: usage)
    async with served(tmp_path, table("web", tokens_per_minute=10**6), engine=FakeEngine("openai")) as client:
        assert (await client.ask(stream=stream)).status == 200
        prompt, cached, completion = await client.used()
        assert 0 < prompt <= len(QUOTED) and 0 <= cached <= prompt and 0 < completion <= 5 + 8
        assert client.quota().held_tokens == 0


async def test_requests_without_answers_count_their_prompts(tmp_path: Path) -> None:
    async with served(tmp_path, table("web", tokens_per_minute=10)) as client:
        body = {"model": "fake-model", "input": "abcd"}
        for allowed in (True, True, True, False):
            reply = await client.post(body, path="/v1/embeddings")
            assert reply.status_code == (200 if allowed else 429)
        assert await client.used() == (12, 0, 0)


@pytest.mark.parametrize(("usage", "counted"), [({"total_tokens": 6}, 6), ({}, None), (None, None)])
async def test_a_ranking_counts_all_that_was_read_for_it(
    tmp_path: Path, usage: dict[str, int] | None, counted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ranks(engine: FakeEngine, method: str, path: str, body: Any, writer: Any) -> None:
        if path != "/v1/rerank":
            return await route(engine, method, path, body, writer)
        said = {} if usage is None else {"usage": usage}
        await engine._json(writer, {"results": [{"index": 0, "relevance_score": 0.5}], **said})

    route = FakeEngine._route
    monkeypatch.setattr(FakeEngine, "_route", ranks)
    async with served(tmp_path, table("web")) as client:
        body = {"query": "who?", "documents": ["x" * 400, "y" * 400]}
        assert (await client.post(body, path="/v1/rerank")).status_code == 200
        prompt, _, completion = await client.used()
        assert completion == 0 and (prompt == counted if counted else prompt >= 800), "one byte is one token here"


async def test_a_stream_that_its_client_leaves_counts_what_came(tmp_path: Path) -> None:
    engine = FakeEngine(delay_s=0.01, answer_tokens=0)
    async with served(tmp_path, table("web", max_requests=1, tokens_per_minute=10**6), engine=engine) as client:
        task = asyncio.ensure_future(client.ask(stream=True, max_tokens=2000))
        streams = client.front.front.fleet.streams._streams
        await until(lambda: any(stream.num_tokens >= 3 for stream in streams.values()))
        assert client.quota().held_tokens >= 1024
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        prompt, _, completion = await client.used()
        assert prompt == len(PROMPT) and 3 <= completion < 2000
        quota = client.quota()
        assert (quota.num_open, quota.held_tokens) == (0, 0)
        engine.delay_s = 0
        assert (await client.ask()).status == 200


async def test_a_reply_that_its_client_does_not_wait_for_counts_its_prompt(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(tmp_path, table("web"), engine=engine) as client:
        engine.prefill_s = 30.0
        task = asyncio.ensure_future(client.ask())
        await until(lambda: bool(engine.requests))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await client.used() == (len(QUOTED), 0, 0)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_refuses_is_not_counted(tmp_path: Path, status: int, stream: bool) -> None:
    engine = FakeEngine()
    async with served(tmp_path, table("web", max_requests=1, tokens_per_minute=10**6), engine=engine) as client:
        engine.faults.append(Fault("status", status=status))
        assert (await client.ask(stream=stream)).status >= 400
        assert await client.used() == (0, 0, 0)
        assert (client.quota().num_open, client.quota().held_tokens) == (0, 0)
        assert (await client.ask()).status == 200


@pytest.mark.parametrize("kind", ["reset", "error_event", "garbage", "no_finish"])
async def test_a_stream_that_goes_on_at_another_engine_counts_each_token_once(tmp_path: Path, kind: str) -> None:
    engines = [FakeEngine(), FakeEngine()]
    path = tmp_path / "keys.toml"
    path.write_text(table("web") + table("op", admin=True))
    path.chmod(0o600)
    clock = Clock()
    keys = Keyring((), path, clock.ns, clock.s)
    async with fronted(*engines, app={"keys": keys}) as front:
        client = FrontKeys(keys, clock, front)
        for engine in engines:
            engine.faults.append(Fault(kind, at=4))
        answer = await client.ask(stream=True, max_tokens=9)
        prompt, _, completion = await client.used()
        assert prompt == len(PROMPT) and completion == len(answer.text)


async def test_several_answers_are_held_and_counted_together(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(tmp_path, table("web", tokens_per_minute=10**6), engine=engine) as client:
        engine.prefill_s = 30.0
        asks = [
            asyncio.ensure_future(client.ask(max_tokens=100, n=3)),
            asyncio.ensure_future(client.ask(max_tokens=100, prompt=["a", "b"])),
        ]
        await until(lambda: len(engine.requests) == 2)
        assert client.quota().held_tokens >= 300 + 200
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await client.front.idle()
        assert client.quota().held_tokens == 0


async def test_each_limit_refuses_the_next_and_says_what_is_left(tmp_path: Path) -> None:
    tables = (
        table("web", requests_per_minute=1),
        table("bob", tokens_per_minute=len(PROMPT) + 5),
        table("eve", tokens_per_day=len(PROMPT) + 5),
    )
    async with served(tmp_path, *tables) as client:
        for name, code, header in (
            ("web", "rate_limit_exceeded", "x-ratelimit-remaining-requests"),
            ("bob", "rate_limit_exceeded", "x-ratelimit-remaining-tokens"),
            ("eve", "insufficient_quota", "x-ratelimit-remaining-tokens"),
        ):
            assert (await client.ask(name)).status == 200
            refused = await client.ask(name)
            assert refused.error is not None and refused.headers is not None
            assert (refused.status, refused.error["code"], refused.headers[header]) == (429, code, "0")
            assert int(refused.headers["retry-after"]) >= 1
            reply = await client.get("/v1/models", name)
            assert reply.status_code == 200, "what computes nothing is not counted"
        assert len(client.engine.requests) == 3, "an engine never sees what is refused"
        client.clock.now += 61 * S
        assert [(await client.ask(name)).status for name in ("web", "bob", "eve")] == [200, 200, 429]
        counts = await client.metrics()
        assert counts["key_refused_requests_total", "eve", "tokens_per_day"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_until_it_is_sent_to_an_engine(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine()
    cluster = cluster_config(max_prefills_in_flight_per_worker=1)
    async with served(tmp_path, table("web", max_queued=1), engine=engine, cluster=cluster) as client:
        engine.prefill_s = 30.0
        asks = [asyncio.ensure_future(client.ask(stream=stream))]
        await until(lambda: len(engine.requests) == 1)
        asks.append(asyncio.ensure_future(client.ask(stream=stream)))
        await until(lambda: client.quota().num_open == 2)
        refused = await client.ask(stream=stream)
        assert refused.status == 429 and refused.error is not None and "max_queued" in refused.error["message"]
        for task in asks:
            task.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_models_admins_and_a_changed_file(tmp_path: Path) -> None:
    tables = (table("web", models=["fake-model"]), table("bob", models=["elsewhere"]))
    async with served(tmp_path, *tables) as client:
        for body in ({}, {"model": "fake-model"}):
            refused = await client.ask("bob", **body)
            assert refused.error is not None and (refused.status, refused.error["code"]) == (403, "model_not_allowed")
        assert (await client.ask(model="fake-model")).status == 200
        assert (await client.get("/v1/models", "bob")).json()["data"] == []
        for name, status in (("web", 403), ("nobody", 401), ("op", 200)):
            for path in ("/admin/workers", "/admin/keys"):
                assert (await client.get(path, name)).status_code == status
        listed = (await client.get("/admin/keys", "op")).json()["keys"]
        assert [entry["name"] for entry in listed] == ["web", "bob", "op"] and listed[0]["usage"]["requests"] == 1
        await client.change(table("new") + table("op", admin=True))
        assert (await client.ask("web")).status == 401 and (await client.ask("new")).status == 200
        await client.change("nothing of use")
        assert (await client.ask("new")).status == 200, "the last one stays in force"
        assert "diptych:key_file_valid" in (await client.get("/metrics", "op")).text
        counts = await client.metrics()
        assert counts["key_requests_total", "web"] == 1 and counts["key_requests_total", "new"] == 2


async def test_metrics_show_a_name_its_own_use_unless_it_may_see_all(tmp_path: Path) -> None:
    async with served(tmp_path, table("web"), table("bob"), table("watch", metrics=True)) as client:
        for name in ("web", "bob"):
            await client.ask(name)
        for name, seen in (("web", {"web"}), ("watch", {"web", "bob"}), ("op", {"web", "bob"})):
            shown = {labels[1] for labels in await client.metrics(name) if labels[0] == "key_requests_total"}
            assert shown == seen


async def test_a_key_is_revoked_while_its_stream_runs(tmp_path: Path) -> None:
    engine = FakeEngine(delay_s=0.005)
    async with served(tmp_path, table("web", max_requests=1), engine=engine) as client:
        task = asyncio.ensure_future(client.ask(stream=True, max_tokens=40))
        await until(lambda: bool(engine.requests))
        await client.change(table("op", admin=True))
        assert (await client.ask()).status == 401
        answer = await task
        assert answer.is_done and len(answer.text) == 40
        assert (await client.used())[2] == 40


async def test_lines_of_a_batch_count_for_the_name_that_created_it(tmp_path: Path) -> None:
    service = BatchService(BatchOptions(tmp_path / "batches"))
    tables = (table("web", max_requests=1), table("bob"))
    async with served(tmp_path, *tables, app={"batches": service}) as client:
        service.start()
        headers = {"authorization": f"Bearer {key_of('web')}"}
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
             "body": {"model": "fake-model", "prompt": PROMPT, "max_tokens": 3}}
            for number in range(3)
        ]  # fmt: skip
        content = "\n".join(map(json.dumps, lines)).encode()
        sent: httpx.Response = await client.http.post(
            "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers
        )
        body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post(body, path="/v1/batches")).json()["id"]
        async with asyncio.timeout(30):
            while (found := (await client.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
                await asyncio.sleep(0.01)
        assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert await client.used() == (3 * len(PROMPT), 0, 9)
        await service.stop()
        service.close()
