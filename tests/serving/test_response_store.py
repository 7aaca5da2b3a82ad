"""The store of responses: bounded in bytes, fair between tenants, honest about what is not in it."""

import asyncio
import logging
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_llm import FakeLLM

from diptych.control.errors import ConfigError, DrainingError, InvalidRequestError, NotFoundError, UnavailableError
from diptych.serving import edge_limits
from diptych.serving.api import response_store
from diptych.serving.api.app import build_app
from diptych.serving.api.response_store import ResponseStore

pytestmark = pytest.mark.asyncio
KIB = 1024


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "responses.db" if request.param == "file" else None


class Stores:
    """Makes stores, and closes them after the test."""

    def __init__(self) -> None:
        self.made: list[ResponseStore] = []

    def __call__(self, *arguments: Any, **settings: Any) -> ResponseStore:
        self.made.append(ResponseStore(*arguments, **settings))
        return self.made[-1]


@pytest.fixture
def new_store() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    for store in stores.made:
        store.close()


def kept(store: ResponseStore, name: str, tenant: str, num_bytes: int, previous: str | None = None) -> str:
    """Why the response was not stored."""
    return store.put({"id": name}, tenant, previous, [{"id": f"item-{name}", "text": "x" * num_bytes}]).result()


async def is_there(store: ResponseStore, name: str, tenant: str) -> bool:
    try:
        await store.reply(name, tenant)
    except NotFoundError:
        return False
    return True


def work_in(store: ResponseStore, work: Any) -> Any:
    """Done in the store's thread."""
    return store._pool.submit(work).result()


async def test_all_responses_together_stay_below_the_bound(new_store: Stores, place: Path | None) -> None:
    most = 2000 * KIB
    store = new_store(place, max_bytes=most)
    sizes = [(37 * number) % 200 * KIB for number in range(60)]
    for number, size in enumerate(sizes):
        assert kept(store, f"r{number}", "", size) == ""
        assert store.num_bytes <= most
    assert store.num_forgotten and store.num_responses == 60 - store.num_forgotten
    there = [await is_there(store, f"r{number}", "") for number in range(60)]
    assert there == sorted(there) and there.count(True) == store.num_responses  # the oldest went
    assert sum(size for size, known in zip(sizes, there, strict=True) if known) > most / 2  # and no more than had to
    assert not await store.items(["item-r0"], "")


async def test_without_an_option_memory_and_file_have_the_bounds_of_the_edge(
    new_store: Stores, place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_store(place).max_bytes == (
        edge_limits.RESPONSES_MEMORY_BYTES if place is None else edge_limits.RESPONSES_FILE_BYTES
    )
    new_store.made[0].close()
    name = "RESPONSES_MEMORY_BYTES" if place is None else "RESPONSES_FILE_BYTES"
    other = None if place is None else place.with_name("other.db")
    measured = new_store(other)
    used = [(kept(measured, f"r{number}", "", 50 * KIB), measured.num_bytes)[1] for number in range(4)]
    texts = [msgspec.json.encode(part) for part in ({"id": "r3"}, [{"id": "item-r3", "text": "x" * 50 * KIB}])]
    expected = sum(map(len, texts)) + response_store.ROW_BYTES + response_store.ITEM_BYTES  # of the last one
    most = max(used[2] + expected, used[3])
    for less, there in ((0, [True] * 4), (1, [False, True, True, True])):
        monkeypatch.setattr(edge_limits, name, most - less)
        store = new_store(None if place is None else place.with_name(f"{less}.db"))
        for number in range(4):
            assert kept(store, f"r{number}", "", 50 * KIB) == ""
            assert store.num_bytes <= most - less
        assert [await is_there(store, f"r{number}", "") for number in range(4)] == there


async def test_one_that_is_larger_than_all_that_is_kept_is_not_stored_and_drives_none_out(new_store: Stores) -> None:
    store = new_store(max_bytes=1000 * KIB)
    assert kept(store, "small", "", KIB) == ""
    assert "larger than all that is kept, 1024000 bytes" in kept(store, "large", "", 1000 * KIB)
    assert await is_there(store, "small", "") and not await is_there(store, "large", "")
    assert (store.num_not_stored, store.num_forgotten) == (1, 0)


async def test_no_size_of_a_response_takes_more_than_the_bound(new_store: Stores) -> None:
    for most in range(60 * KIB, 72 * KIB, 1531):
        store, sizes = new_store(max_bytes=most), random.Random(most)
        for number in range(30):
            kept(store, f"r{number}", str(number % 2), sizes.randrange(most))
            assert store.num_bytes <= most
        assert store.num_not_stored and store.num_forgotten and store.num_responses


async def test_many_small_items_are_counted_with_what_they_take(new_store: Stores) -> None:
    store = new_store(max_bytes=400 * KIB)
    items = [{"id": f"{number:06}"} for number in range(10_000)]  # 160 KB of JSON
    assert store.put({"id": "many"}, "", None, items).result() != ""
    for number in range(20):
        assert store.put({"id": f"r{number}"}, "", None, items[number * 500 : number * 500 + 500]).result() == ""
        assert store.num_bytes <= 400 * KIB
    assert store.num_forgotten


async def test_a_tenant_with_much_drives_out_its_own(new_store: Stores, place: Path | None) -> None:
    store = new_store(place, max_bytes=2000 * KIB)
    assert kept(store, "quiet", "b", 100 * KIB) == ""
    for number in range(100):
        assert kept(store, f"r{number}", "a", 100 * KIB) == ""
    assert await is_there(store, "quiet", "b") and not await is_there(store, "r0", "a")
    assert kept(store, "another", "b", 100 * KIB) == ""  # the other's go, although hers is older
    assert await is_there(store, "quiet", "b")


async def test_their_number_is_bounded_too(new_store: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "RESPONSES", 5)
    store = new_store()
    for number in range(9):
        assert kept(store, f"r{number}", "", 10) == ""
    assert [await is_there(store, f"r{number}", "") for number in range(9)] == [False] * 4 + [True] * 5
    assert store.num_responses == 5


async def test_a_file_that_is_larger_than_the_bound_is_cut_at_the_start(tmp_path: Path, new_store: Stores) -> None:
    store = new_store(tmp_path / "r.db", max_bytes=4000 * KIB)
    for number in range(20):
        kept(store, f"r{number}", "", 100 * KIB)
    store.close()
    store = new_store(tmp_path / "r.db", max_bytes=1000 * KIB)
    assert store.num_bytes <= 1000 * KIB and 0 < store.num_responses < 10
    assert await is_there(store, "r19", "") and not await is_there(store, "r0", "")


async def test_what_has_expired_goes_with_its_texts_and_not_only_when_others_come(
    tmp_path: Path, new_store: Stores
) -> None:
    now = [1000.0]
    path = tmp_path / "r.db"
    store = new_store(path, expiry_s=100, clock=lambda: now[0])
    store.put({"id": "old", "text": "a secret of long ago"}, "", None, [{"id": "i", "text": "asked long ago"}]).result()
    now[0] = 1100.0
    assert await is_there(store, "old", "")  # up to its last second
    now[0] = 1101.0
    assert not await is_there(store, "old", "") and not await store.items(["i"], "")
    now[0] += 60.0
    assert not await is_there(store, "old", "")
    assert (store.num_responses, work_in(store, lambda: store._database.execute("SELECT * FROM items").fetchall())) == (
        0,
        [],
    )
    kept(store, "later", "", 10)
    now[0] = 5000.0
    store.close()
    assert b"long ago" not in path.read_bytes()
    store = new_store(path, clock=lambda: now[0])
    assert store.num_responses == 0  # at the start, too


async def test_a_response_is_kept_for_its_life_and_no_second_longer(new_store: Stores, place: Path | None) -> None:
    now = [1000.0]
    store = new_store(place, clock=lambda: now[0])
    kept(store, "a", "", 10)
    now[0] += edge_limits.RESPONSE_LIFE_S
    assert await is_there(store, "a", "")
    now[0] += 1
    assert not await is_there(store, "a", "")


async def test_a_tenant_reads_continues_and_deletes_its_own_responses_alone(
    new_store: Stores, place: Path | None
) -> None:
    store = new_store(place)
    kept(store, "a", "me", 10)
    for tenant in ("other", ""):
        for question in (store.reply("a", tenant), store.conversation("a", tenant), store.delete("a", tenant)):
            with pytest.raises(NotFoundError):
                await question
        assert await store.items(["item-a"], tenant) == {}
    assert await is_there(store, "a", "me")
    await store.delete("a", "me")
    assert not await is_there(store, "a", "me") and await store.items(["item-a"], "me") == {}
    assert store.num_responses == 0


async def test_what_is_deleted_is_not_in_the_file_any_more(tmp_path: Path, new_store: Stores) -> None:
    store = new_store(tmp_path / "r.db")
    store.put({"id": "a"}, "me", None, [{"id": "i", "text": "a secret" * 2000}]).result()
    await store.delete("a", "me")
    store.close()
    assert b"a secret" not in (tmp_path / "r.db").read_bytes()


async def test_a_conversation_is_read_up_to_the_limit_and_refused_beyond(
    new_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    for number in range(4):
        kept(store, f"r{number}", "", 10_000, f"r{number - 1}" if number else None)
    whole = sum(len(f'[{{"id":"item-r{number}","text":"{"x" * 10_000}"}}]') for number in range(4))
    monkeypatch.setattr(edge_limits, "CONVERSATION_BYTES", whole)
    assert len(await store.conversation("r3", "")) == 4
    assert len(await store.items([f"item-r{number}" for number in range(4)], "")) == 4
    monkeypatch.setattr(edge_limits, "CONVERSATION_BYTES", whole - 1)
    for question, param in (
        (store.conversation("r3", ""), "previous_response_id"),
        (store.items([f"item-r{number}" for number in range(4)], ""), "input"),
    ):
        with pytest.raises(InvalidRequestError, match=f"more than {whole - 1} bytes, the limit") as caught:
            await question
        assert (caught.value.param, caught.value.code) == (param, "conversation_too_long")
    assert len(await store.conversation("r2", "")) == 3


def fill_disk(store: ResponseStore, is_full: bool) -> None:
    """SQLite takes no more pages: what a full disk looks like."""

    def work() -> None:
        [[count]] = store._database.execute("PRAGMA page_count")
        store._database.execute(f"PRAGMA max_page_count = {count if is_full else 2**30}")

    work_in(store, work)


async def test_on_a_full_disk_nothing_half_is_stored_and_it_is_said_once_a_minute(
    new_store: Stores, place: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(place)
    kept(store, "before", "", 10)
    fill_disk(store, True)
    for number in range(50):
        assert "full" in kept(store, f"r{number}", "", 100 * KIB)
    assert len(caplog.records) == 1 and "a response is not stored" in caplog.text
    assert (store.num_not_stored, store.num_responses) == (50, 1)
    assert not await is_there(store, "r0", "") and await store.items(["item-r0"], "") == {}
    assert await is_there(store, "before", "")
    fill_disk(store, False)
    assert kept(store, "after", "", 100 * KIB) == "" and await is_there(store, "after", "")


async def test_what_waits_to_be_written_is_bounded(new_store: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "RESPONSES_UNWRITTEN_BYTES", 1000 * KIB)
    store, gate = new_store(), threading.Event()
    store._pool.submit(gate.wait)  # a disk that does not answer
    puts = [store.put({"id": f"r{number}"}, "", None, [{"text": "x" * 300 * KIB}]) for number in range(5)]
    refused = [put.result() for put in puts if put.done()]
    assert len(refused) == 2 and all("too many others" in why for why in refused)
    gate.set()
    assert [put.result() for put in puts[:3]] == [""] * 3
    assert kept(store, "later", "", 900 * KIB) == ""


async def test_a_response_that_takes_too_long_is_said_not_to_be_stored_and_is_not(
    new_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_limits, "RESPONSE_WRITE_S", 0.0)
    store, gate = new_store(), threading.Event()
    store._pool.submit(gate.wait)
    waiting = await store.put_in_time({"id": "waiting"}, "", None, [])
    gate.set()
    assert "does not answer" in waiting and not await is_there(store, "waiting", "")
    # one that is being written when the time is over
    entered, gate = threading.Event(), threading.Event()
    make_room = store._make_room

    def slow(*arguments: Any, **settings: Any) -> None:
        entered.set()
        gate.wait()
        make_room(*arguments, **settings)

    monkeypatch.setattr(store, "_make_room", slow)
    future = store.put({"id": "first"}, "", None, [])
    entered.wait()
    monkeypatch.setattr(store, "_put_row", lambda *_: future)
    assert "does not answer" in await store.put_in_time({"id": "first"}, "", None, [])
    gate.set()
    assert not await is_there(store, "first", "")


async def test_a_store_that_cannot_be_read_is_a_503(new_store: Stores, tmp_path: Path) -> None:
    store = new_store(tmp_path / "r.db")
    kept(store, "a", "", 10)
    work_in(store, lambda: store._database.execute("DROP TABLE responses"))
    with pytest.raises(UnavailableError, match="cannot be used: no such table") as caught:
        await store.reply("a", "")
    assert caught.value.retry_after_s


async def test_a_file_of_another_server_is_refused_also_under_another_name(tmp_path: Path, new_store: Stores) -> None:
    new_store(tmp_path / "r.db")
    (tmp_path / "link.db").symlink_to("r.db")
    for path in (tmp_path / "r.db", tmp_path / "link.db"):
        with pytest.raises(ConfigError, match=f"responses is {path}, which another server uses"):
            ResponseStore(path)
    new_store.made[0].close()
    new_store(tmp_path / "link.db")
    (tmp_path / "text").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="cannot be opened: file is not a database"):
        ResponseStore(tmp_path / "text")
    beside = sqlite3.connect(tmp_path / "other.db")
    beside.execute("CREATE TABLE responses (x)")
    beside.close()
    with pytest.raises(ConfigError, match="cannot be opened"):
        ResponseStore(tmp_path / "other.db")


# -- what clients see -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def clients(store: ResponseStore) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    app = build_app(FakeLLM(answer="Yes."), "fake", store=store, api_keys=["a", "b"])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="a", max_retries=0, http_client=http), http


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_says_when_it_could_not_be_stored(
    streams: bool, new_store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store()

    async def asked(client: openai.AsyncOpenAI, **fields: Any) -> Any:
        if not streams:
            return await client.responses.create(model="fake", input="Well?", **fields)
        async with client.responses.stream(model="fake", input="Well?", **fields) as stream:
            return await stream.get_final_response()

    async with clients(store) as (client, http):
        good = await asked(client)
        fill_disk(store, True)
        with caplog.at_level(logging.ERROR):
            bad = [await asked(client, instructions="x" * 4000) for _ in range(3)]
        assert len(caplog.records) == 1
        for reply in bad:
            assert (reply.status, reply.output_text) == ("completed", "Yes.")
            assert reply.model_extra["store"] is False
            [warning] = reply.model_extra["warnings"]
            assert warning["code"] == "response_not_stored" and "full" in warning["message"]
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(reply.id)
        not_wanted = await asked(client, store=False)
        for reply, is_stored in ((good, True), (not_wanted, False)):
            assert reply.model_extra["store"] is is_stored and "warnings" not in reply.model_extra
        assert (await client.responses.retrieve(good.id)).output_text == "Yes."
        text = (await http.get("/metrics", headers={"x-api-key": "a"})).text
    assert 'diptych:responses_not_stored_total{model_name="fake"} 3.0' in text
    assert 'diptych:stored_responses{model_name="fake"} 1.0' in text
    assert f'diptych:stored_response_bytes{{model_name="fake"}} {float(store.num_bytes)}' in text


async def test_no_other_key_and_no_foreign_page_deletes_a_response(new_store: Stores) -> None:
    async with clients(new_store()) as (client, http):
        reply = await client.responses.create(model="fake", input="Well?")
        path = f"/v1/responses/{reply.id}"
        other = await http.delete(path, headers={"x-api-key": "b"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "response_not_found")
        page = await http.delete(path, headers={"x-api-key": "a", "origin": "https://elsewhere.example"})
        assert page.status_code == 403
        assert (await http.delete(path)).status_code == 401
        assert (await client.responses.retrieve(reply.id)).id == reply.id
        await client.responses.delete(reply.id)
        assert (await http.delete(path, headers={"x-api-key": "a"})).status_code == 404


async def test_two_at_once_continue_the_same_conversation(new_store: Stores) -> None:
    async with clients(new_store()) as (client, _):
        first = await client.responses.create(model="fake", input="Well?")
        asked = [client.responses.create(model="fake", input="And?", previous_response_id=first.id) for _ in range(8)]
        assert len({reply.id for reply in await asyncio.gather(*asked)}) == 8


async def test_a_store_that_is_closed_says_that_the_server_ends(new_store: Stores, place: Path | None) -> None:
    store = new_store(place)
    store.close()
    for asked in (store.reply("resp_a", "me"), store.conversation("resp_a", "me"), store.delete("resp_a", "me")):
        with pytest.raises(DrainingError):
            await asked
    reply = {"id": "resp_a"}
    assert await store.put_in_time(reply, "me", None, []) == "the server is shutting down"
    assert store.put(reply, "me", None, []).result() == "the server is shutting down"
