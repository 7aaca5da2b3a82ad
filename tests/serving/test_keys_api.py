"""Keys with names in front of an AsyncLLM without workers: who is let in, what is counted, what is refused and how."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_files import ENDPOINT, jsonl, line
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families

from diptych.serving import edge_limits
from diptych.serving.api.app import build_app
from diptych.serving.api.key_limits import go_duration
from diptych.serving.batches.batch_service import BatchOptions, BatchService
from diptych.serving.keys.keyring import Keyring

pytestmark = pytest.mark.asyncio
S = 10**9
PATHS = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/embeddings": {"input": [5, 6]},
}
COMPLETION = PATHS["/v1/completions"]  # 5 tokens in all


def key_of(name: str) -> str:
    return f"a-key-of-{name}-0123456789"


def table(name: str, **fields: Any) -> str:
    given = {"name": name, "key": key_of(name), **fields}
    return "[[key]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in given.items())


class Clock:
    """The time of quotas, and Unix time."""

    def __init__(self) -> None:
        self.now = 1000 * S

    def ns(self) -> int:
        return self.now

    def s(self) -> float:
        return self.now / S


class Client:
    """A server with a file of keys. peer: where its clients are."""

    def __init__(self, keys: Keyring, llm: FakeLLM, clock: Clock, app: Any, peer: str) -> None:
        self.keys, self.llm, self.clock = keys, llm, clock
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(peer, 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def get(self, path: str, name: str = "web") -> httpx.Response:
        return await self.http.get(path, headers={"authorization": f"Bearer {key_of(name)}"})

    async def post(self, body: Any = COMPLETION, name: str = "web", path: str = "/v1/completions") -> httpx.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key_of(name)}"})

    async def metrics(self, name: str = "op") -> dict[tuple[str, ...], float]:
        """(metric, labels without the model's) -> value, of the families about names."""
        families = text_string_to_metric_families((await self.get("/metrics", name)).text)
        return {
            (sample.name.removeprefix("diptych:"), *(v for k, v in sample.labels.items() if k != "model_name")): (
                sample.value
            )
            for family in families
            for sample in family.samples
            if "key" in sample.name and not sample.name.endswith("_created")
        }  # fmt: skip

    async def change(self, text: str) -> None:
        """The file says something else, and the server has seen it."""
        assert self.keys.path is not None
        new = self.keys.path.with_name("new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(self.keys.path)
        await self.keys.look()
        await self.keys.look()


@asynccontextmanager
async def served(
    folder: Path, *tables: str, llm: FakeLLM | None = None, peer: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Client]:
    path, clock, llm = folder / "keys.toml", Clock(), llm or FakeLLM()
    path.write_text("".join((*tables, table("op", admin=True))))
    path.chmod(0o600)
    keys = Keyring(options.pop("api_keys", ()), path, clock.ns, clock.s)
    client = Client(keys, llm, clock, build_app(llm, "fake", keys=keys, **options), peer)  # type: ignore[arg-type]
    async with client.http:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_path_counts_its_tokens_for_the_name_and_the_tenant(
    tmp_path: Path, path: str, stream: bool
) -> None:
    async with served(tmp_path, table("web", tenant="shop"), table("bob")) as client:
        body = PATHS[path] | ({"stream": True} if stream and path != "/v1/embeddings" else {})
        assert (await client.post(body, path=path)).status_code == 200
        [submitted] = client.llm.submitted
        assert submitted.options.tenant == "shop"
        prompt = len(submitted.prompts[0])
        counts = await client.metrics()
        assert counts["key_prompt_tokens_total", "web"] == prompt
        assert counts["key_completion_tokens_total", "web"] == (0 if path == "/v1/embeddings" else 3)
        assert counts["key_requests_total", "web"] == 1 and ("key_requests_total", "bob") not in counts


async def test_a_prompt_counts_once_for_several_answers_and_the_cached_part_is_said(tmp_path: Path) -> None:
    async with served(tmp_path, table("web")) as client:
        await client.post(COMPLETION | {"n": 3, "prompt": [[1, 2], [3, 4, 5]]})
        counts = await client.metrics()
        assert counts["key_prompt_tokens_total", "web"] == 5 and counts["key_completion_tokens_total", "web"] == 18
        assert counts["key_cached_tokens_total", "web"] == 2, "one of each prompt, says the make-believe worker"


@pytest.mark.parametrize("header", ["Bearer {}", "bearer  {}", "BEARER {}"])
async def test_a_key_opens_as_bearer_or_as_x_api_key(tmp_path: Path, header: str) -> None:
    async with served(tmp_path, table("web")) as client:
        given = {"authorization": header.format(key_of("web"))}
        assert (await client.http.get("/v1/models", headers=given)).status_code == 200
        assert (await client.http.get("/v1/models", headers={"x-api-key": key_of("web")})).status_code == 200
        for wrong in (
            {},
            {"x-api-key": ""},
            {"authorization": f"Basic {key_of('web')}"},
            {"authorization": "Bearer x"},
        ):
            reply = await client.http.get("/v1/models", headers=wrong)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.metrics())["unknown_key_requests_total",] == 4


async def test_an_expired_key_is_refused_from_its_second_on(tmp_path: Path) -> None:
    async with served(tmp_path, table("web") + "expires = 1970-01-01T00:20:00Z\n") as client:
        client.clock.now = 1200 * S - 1
        assert (await client.post()).status_code == 200
        client.clock.now = 1200 * S
        reply = await client.post()
        assert reply.status_code == 401 and "'web' has expired" in reply.text
        assert (await client.metrics())["key_refused_requests_total", "web", "expired"] == 1


async def test_requests_per_minute(tmp_path: Path) -> None:
    async with served(tmp_path, table("web", requests_per_minute=2), table("bob")) as client:
        first = await client.post()
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "1m1s"
        assert "x-ratelimit-limit-tokens" not in first.headers
        await client.post()
        refused = await client.post()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert "at most 2 requests per minute (requests_per_minute), 2 are used" in error["message"]
        assert refused.headers["retry-after"] == "61" and "try again in 61s" in error["message"]
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await client.post(name="bob")).status_code == 200, "a neighbour's limit is nobody else's"
        assert (await client.get("/v1/models")).status_code == 200, "what computes nothing is not counted"
        client.clock.now += 61 * S
        assert (await client.post()).status_code == 200
        assert (await client.metrics())["key_refused_requests_total", "web", "requests_per_minute"] == 1


async def test_tokens_are_counted_when_they_were_used(tmp_path: Path) -> None:
    llm = FakeLLM(pause_after=1, admits=True)
    async with served(tmp_path, table("web", tokens_per_minute=1001), llm=llm) as client:
        task = asyncio.ensure_future(client.post(COMPLETION | {"max_tokens": 998}))
        await until(lambda: bool(llm.submitted))
        reply = await client.post(path="/tokenize", body={"prompt": "a"})
        assert reply.status_code == 200 and reply.headers["x-ratelimit-remaining-tokens"] == "1"
        other = asyncio.ensure_future(client.post())
        await until(lambda: len(llm.submitted) == 2)
        refused = await client.post()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1", "when a request has ended"
        assert (await client.post(path="/tokenize", body={"prompt": "a"})).status_code == 200
        llm.go_on.set()
        assert (await task).status_code == (await other).status_code == 200, "what runs is never cut off"
        reply = await client.post()
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "rate_limit_exceeded"
        client.clock.now += 61 * S
        reply = await client.post()
        assert reply.status_code == 200


async def test_tokens_per_day_are_a_quota_that_clients_do_not_ask_for_again(tmp_path: Path) -> None:
    async with served(tmp_path, table("web", tokens_per_day=5)) as client:
        assert (await client.post()).status_code == 200
        refused = await client.post()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "insufficient_quota", "insufficient_quota")
        assert int(refused.headers["retry-after"]) > 86_000 and refused.headers["x-should-retry"] == "false"
        sdk = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=key_of("web"), max_retries=5, http_client=client.http
        )
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.completions.create(model="fake", prompt=[5, 6], max_tokens=3)
        assert caught.value.code == "insufficient_quota"
        counts = await client.metrics()
        assert counts["key_refused_requests_total", "web", "tokens_per_day"] == 2, "it was asked once"


async def test_anthropics_clients_read_their_own_headers_and_errors(tmp_path: Path) -> None:
    async with served(tmp_path, table("web", requests_per_minute=1, tokens_per_minute=10**6)) as client:
        body = PATHS["/v1/messages"]
        reply = await client.post(body, path="/v1/messages")
        headers = {name for name in reply.headers if "ratelimit" in name}
        kinds, parts = ("requests", "tokens"), ("limit", "remaining", "reset")
        assert headers == {f"anthropic-ratelimit-{kind}-{part}" for kind in kinds for part in parts}
        assert reply.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert reply.headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
        refused = await client.post(body, path="/v1/messages")
        assert (refused.status_code, refused.json()["type"]) == (429, "error")
        assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"] == "61"


async def test_requests_at_once_and_those_that_wait(tmp_path: Path) -> None:
    llm = FakeLLM(pause_after=0)
    tables = (table("web", max_requests=2), table("bob", max_queued=1))
    async with served(tmp_path, *tables, llm=llm) as client:
        tasks = [asyncio.ensure_future(client.post(name=name)) for name in ("web", "web", "bob")]
        await until(lambda: len(llm.submitted) == 3)
        for name, reason in (("web", "max_requests"), ("bob", "max_queued")):
            reply = await client.post(name=name)
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1") and reason in reply.text
        llm.submitted[2].generation.admit()
        tasks.append(asyncio.ensure_future(client.post(name="bob")))
        await until(lambda: len(llm.submitted) == 4)
        llm.go_on.set()
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
        assert (await client.post()).status_code == 200
        assert all(client.keys.quota(record).num_open == 0 for record in client.keys.records())


async def test_whatever_ends_a_request_its_place_is_free_again(tmp_path: Path) -> None:
    llm = FakeLLM(error=RuntimeError("a bug"), fail_after=1)
    async with served(tmp_path, table("web", max_requests=1, tokens_per_minute=5000), llm=llm) as client:
        for body in ({"prompt": 7}, {"prompt": "x", "model": "none"}, COMPLETION, COMPLETION | {"stream": True}):
            await client.post(body)
            assert client.keys.quota(client.keys.named("web")).held_tokens == 0  # type: ignore[arg-type]
        task = asyncio.ensure_future(client.post(COMPLETION))
        await until(lambda: len(llm.submitted) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        quota = client.keys.quota(client.keys.named("web"))  # type: ignore[arg-type]
        assert quota.num_open == quota.held_tokens == 0
        assert (await client.metrics())["key_requests_total", "web"] == 5


async def test_a_revoked_key_is_refused_and_what_runs_ends(tmp_path: Path) -> None:
    llm = FakeLLM(pause_after=1)
    async with served(tmp_path, table("web", max_requests=1), llm=llm) as client:
        task = asyncio.ensure_future(client.post())
        await until(lambda: bool(llm.submitted))
        await client.change(table("op", admin=True))
        assert (await client.post()).status_code == 401
        llm.go_on.set()
        reply = await task
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert (await client.metrics())["key_completion_tokens_total", "web"] == 3, "counts never fall"


async def test_models_of_a_key(tmp_path: Path) -> None:
    tables = (table("web", models=["alias"]), table("bob", models=["elsewhere"]))
    async with served(tmp_path, *tables, also_served_as=("alias",)) as client:
        assert (await client.post(COMPLETION | {"model": "alias"})).status_code == 200
        for path, body in PATHS.items():
            for model in ({"model": "fake"}, {} if path == "/v1/messages" else {"model": None}):
                reply = await client.post(body | model, path=path)
                error = reply.json()["error"]
                assert (reply.status_code, error["param"], error["code"]) == (403, "model", "model_not_allowed")
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["alias"]
        assert (await client.get("/v1/models/fake")).status_code == 403
        assert (await client.get("/v1/models", "bob")).json()["data"] == []
        headers = {"x-api-key": key_of("bob"), "anthropic-version": "2023-06-01"}
        assert (await client.http.get("/v1/models", headers=headers)).json()["first_id"] is None
        assert [model["id"] for model in (await client.get("/v1/models", "op")).json()["data"]] == ["fake", "alias"]


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7"])
@pytest.mark.parametrize("admin_key", [None, "the-admin-key"])
async def test_admin_keys_open_admin_and_no_others_do(tmp_path: Path, peer: str, admin_key: str | None) -> None:
    async with served(tmp_path, table("web"), peer=peer, admin_key=admin_key, api_keys=["mine"]) as client:
        for key, status in ((None, 401), ("x", 401), ("mine", 401), (key_of("web"), 403), (key_of("op"), 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await client.http.get("/admin/workers", headers=headers)).status_code == status
        headers = {"authorization": f"Bearer {admin_key}"}
        assert (await client.http.get("/admin/keys", headers=headers)).status_code == (200 if admin_key else 401)
        assert (await client.http.get("/v1/models", headers=headers)).status_code == 401, "it is no API key"
        assert (await client.post(name="op")).status_code == 200
        await client.change(table("web"))
        reply = await client.http.get("/admin/keys")
        assert reply.status_code == 401, "a file without admin keys does not open the door again"


async def test_operators_see_every_name_and_no_key(tmp_path: Path) -> None:
    tables = (table("web", tenant="shop", tokens_per_minute=100, models=["fake"]), table("bob"))
    async with served(tmp_path, *tables) as client:
        await client.post()
        found = (await client.get("/admin/keys", "op")).json()
        web, bob, op = found["keys"]
        assert (web["name"], web["tenant"], web["limits"], web["models"]) == (
            "web", "shop", {"tokens_per_minute": 100}, ["fake"],
        )  # fmt: skip
        assert web["tokens"]["remaining"] == 95 and web["requests"] is None and web["open_requests"] == 0
        assert web["usage"]["prompt_tokens"] == 2 and web["usage"]["completion_tokens"] == 3
        assert bob["usage"] is None and op["admin"] and found["complaint"] is None
        await client.change("nothing of use")
        assert "is no TOML" in (await client.get("/admin/keys", "op")).json()["complaint"]
        text = (await client.get("/admin/keys", "op")).text + (await client.get("/metrics", "op")).text
        digests = [digest.hex() for record in client.keys.records() for digest in record.digests]
        assert not any(secret in text for secret in (*map(key_of, ("web", "bob", "op")), *digests))


async def test_metrics_show_a_name_its_own_use_unless_it_may_see_all(tmp_path: Path) -> None:
    async with served(tmp_path, table("web"), table("bob"), table("watch", metrics=True)) as client:
        for name in ("web", "bob"):
            await client.post(name=name)
        for name, seen in (("web", {"web"}), ("watch", {"web", "bob"}), ("op", {"web", "bob"})):
            shown = {labels[1] for labels in await client.metrics(name) if labels[0] == "key_requests_total"}
            assert shown == seen


async def test_names_beyond_the_limit_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "KEY_NAMES", 2)
    async with served(tmp_path, *(table(name) for name in "abcd")) as client:
        for name in "abcda":
            await client.post(name=name)
        counts = await client.metrics()
        shown = {labels[1]: count for labels, count in counts.items() if labels[0] == "key_requests_total"}
        assert shown == {"a": 2, "b": 1, "other": 2}
        await client.change(table("e") + table("op", admin=True))
        await client.post(name="e")
        assert (await client.metrics())["key_requests_total", "other"] == 3


@asynccontextmanager
async def with_batches(folder: Path, *tables: str, **options: Any) -> AsyncIterator[Client]:
    service = BatchService(BatchOptions(folder / "batches"))
    async with served(folder, *tables, batches=service, **options) as client:
        service.start()
        yield client
        await service.stop()
        service.close()


async def created(client: Client, content: bytes) -> str:
    headers = {"authorization": f"Bearer {key_of('web')}"}
    files = {"file": ("in.jsonl", content)}
    file = (await client.http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)).json()
    body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await client.post(body, path="/v1/batches")).json()["id"])


async def status(client: Client, batch: str, name: str = "web") -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch}", name)).json()
    return found


async def done(client: Client, batch: str, name: str = "web") -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (found := await status(client, batch, name))["status"] != "completed":
            await asyncio.sleep(0.01)
    return found


async def test_lines_of_a_batch_count_for_the_name_that_created_it(tmp_path: Path) -> None:
    lines = [line("a"), line("b"), line("c", body={"model": "alias", "prompt": [1], "max_tokens": 1})]
    tables = (table("web", max_requests=1, models=["fake"]), table("bob"))
    async with with_batches(tmp_path, *tables, also_served_as=("alias",)) as client:
        found = await done(client, await created(client, jsonl(lines)))
        assert found["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        counts = await client.metrics()
        assert counts["key_prompt_tokens_total", "web"] == 4 and counts["key_completion_tokens_total", "web"] == 6
        assert ("key_requests_total", "bob") not in counts
        assert {submitted.options.tenant for submitted in client.llm.submitted} == {"web"}


async def test_lines_of_a_revoked_key_wait_until_it_is_back(tmp_path: Path) -> None:
    llm = FakeLLM(pause_after=0)
    tables = (table("web", tenant="shop"), table("bob", tenant="shop"))
    async with with_batches(tmp_path, *tables, llm=llm) as client:
        batch = await created(client, jsonl([line(str(number)) for number in range(40)]))
        await until(lambda: bool(llm.submitted))
        await client.change(tables[1] + table("op", admin=True))
        llm.go_on.set()
        refused = client.keys.usage.of("web").refused
        await until(lambda: refused["revoked"] > 0)
        found = await status(client, batch, "bob")
        assert found["status"] == "in_progress" and found["request_counts"]["failed"] == 0
        assert found["request_counts"]["completed"] < 40, "another key of the tenant sees it, and may cancel it"
        reply = await client.post({}, "bob", f"/v1/batches/{batch}/cancel")
        assert reply.status_code == 200


async def test_durations_are_written_as_openai_does() -> None:
    for duration, text in (
        (0, "0s"), (1, "1ms"), (12_000_000, "12ms"), (S, "1s"), (S + 1, "2s"), (360 * S, "6m0s"), (3661 * S, "1h1m1s"),
    ):  # fmt: skip
        assert go_duration(duration) == text
