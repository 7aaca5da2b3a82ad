"""What has expired is gone from the disk, not only from replies: it is somebody's conversation."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from diptych.control.errors import NotFoundError
from diptych.serving.api.response_store import ResponseStore

SECRET = "a conversation that is over"


def put(store: ResponseStore, name: str, text: str = SECRET) -> None:
    item = {"id": f"msg_{name}", "type": "message", "content": text}
    store.put({"id": name, "output": [item]}, "me", None, [item])


@pytest.mark.parametrize("expiry_s", [1.0, 10.0, 3600.0])
def test_what_has_expired_is_neither_found_nor_kept(expiry_s: float, tmp_path: Path) -> None:
    now = [1000.0]
    store = ResponseStore(tmp_path / "responses.db", expiry_s=expiry_s, clock=lambda: now[0])
    for number in range(20):
        put(store, f"resp_{number}")
        now[0] += expiry_s / 4
    found = [name for number in range(20) if asyncio.run(is_there(store, name := f"resp_{number}"))]
    assert found == ["resp_16", "resp_17", "resp_18", "resp_19"]  # the age of the last one counts as well
    now[0] += 2 * expiry_s
    put(store, "resp_new", "another one")
    assert asyncio.run(store.reply("resp_new", "me"))
    store.close()
    with sqlite3.connect(tmp_path / "responses.db") as database:
        assert database.execute("SELECT id FROM responses").fetchall() == [("resp_new",)]
        assert database.execute("SELECT id FROM items").fetchall() == [("msg_resp_new",)]
    database.close()


async def is_there(store: ResponseStore, name: str) -> bool:
    item = f"msg_{name}"
    has_item = item in await store.items([item], "me")
    try:
        await store.reply(name, "me")
    except NotFoundError:
        assert not has_item
        return False
    assert has_item
    return True
