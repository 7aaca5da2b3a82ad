"""Responses that can be continued by their ids: the items of each conversation, in SQLite, until they expire.

A response knows the one before it and its own new items, so a conversation of many turns is stored once. Items are
found by their ids, too. Each tenant sees its own responses only.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diptych.control.errors import ConfigError, NotFoundError
from diptych.serving import edge_limits

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, "
    "items BLOB NOT NULL, reply BLOB NOT NULL, expires_s REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS expiry ON responses (expires_s)",
)
_ITEMS_SCHEMA = (  # which responses have an item
    "CREATE TABLE items (id TEXT, response TEXT, PRIMARY KEY (id, response)) WITHOUT ROWID",
    "CREATE INDEX items_of_response ON items (response)",
    "CREATE TRIGGER forget_items AFTER DELETE ON responses BEGIN DELETE FROM items WHERE response = OLD.id; END",
    # files of older versions have responses without this table
    "INSERT OR IGNORE INTO items SELECT json_extract(value, '$.id'), responses.id "
    "FROM responses, json_each(CAST(items AS TEXT)) WHERE json_type(value, '$.id') = 'text'",
)


class ResponseStore:
    """The responses of one server. path: None for memory. clock: Unix time in seconds. One thread does all the work, in
    the order of the calls: what was put is there for the next reader."""

    def __init__(
        self, path: Path | None = None, expiry_s: float = edge_limits.RESPONSE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._expiry_s = expiry_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, "responses")
        self._opened: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._pool.submit(lambda: self._database).result()
            except sqlite3.Error as error:
                raise ConfigError(f"responses is {path}, which cannot be opened: {error}", param="responses") from None

    def put(self, reply: dict[str, Any], tenant: str, previous: str | None, items: list[dict[str, Any]]) -> None:
        """A response: the items that it has added to its conversation (those of its request first), and its reply.
        Returns before it is stored."""
        now = self._clock()
        row = (
            reply["id"],
            tenant,
            previous,
            msgspec.json.encode(items),
            msgspec.json.encode(reply),
            now + self._expiry_s,
        )
        self._pool.submit(self._put, row, now, [(item["id"], reply["id"]) for item in items if has_id(item)])

    async def reply(self, response_id: str, tenant: str) -> bytes:
        """The JSON of a response. Raises NotFoundError."""
        return (await self._run(lambda: self._row(response_id, tenant, "response_id")))[2]

    async def conversation(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        """All items up to the end of a response, oldest first. Raises NotFoundError when some are not there."""
        return await self._run(lambda: self._conversation(response_id, tenant))

    async def items(self, item_ids: Collection[str], tenant: str) -> dict[str, dict[str, Any]]:
        """The items of these ids that are in responses of the tenant, by their ids."""
        return await self._run(lambda: self._items(item_ids, tenant)) if item_ids else {}

    async def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response. Raises NotFoundError."""
        await self._run(lambda: self._delete(response_id, tenant))

    def close(self) -> None:
        """Finish what was put, and close the file."""
        if self._opened is not None:
            self._pool.submit(self._opened.close)
        self._pool.shutdown()

    # -- in the thread ------------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = sqlite3.connect(self._path or ":memory:", check_same_thread=False, isolation_level=None)
            for statement in _SCHEMA:
                self._opened.execute(statement)
            if not self._opened.execute("SELECT 1 FROM sqlite_master WHERE name = 'items'").fetchone():
                self._opened.execute("BEGIN")
                for statement in _ITEMS_SCHEMA:
                    self._opened.execute(statement)
                self._opened.execute("COMMIT")
        return self._opened

    def _put(
        self, row: tuple[str, str, str | None, bytes, bytes, float], now: float, items: list[tuple[str, str]]
    ) -> None:
        try:
            self._database.execute("DELETE FROM responses WHERE expires_s < ?", (now,))
            self._database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            self._database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", items)
            self._database.execute(
                "DELETE FROM responses WHERE rowid <= (SELECT max(rowid) FROM responses) - ?", (edge_limits.RESPONSES,)
            )
        except sqlite3.Error as error:  # the answer is not lost with it
            logger.error("response %s is not stored: %s", row[0], error)

    def _conversation(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        turns: list[list[dict[str, Any]]] = []
        wanted: str | None = response_id
        while wanted is not None:
            wanted, items, _ = self._row(wanted, tenant, _PREVIOUS)
            turns.append(msgspec.json.decode(items))
        return [item for turn in reversed(turns) for item in turn]

    def _items(self, item_ids: Collection[str], tenant: str) -> dict[str, dict[str, Any]]:
        query = (
            "SELECT responses.items FROM items JOIN responses ON responses.id = items.response "
            "WHERE items.id = ? AND tenant = ? AND expires_s >= ? ORDER BY responses.rowid DESC LIMIT 1"
        )
        found: dict[str, dict[str, Any]] = {}
        for item_id in item_ids:
            row = (
                None if item_id in found else self._database.execute(query, (item_id, tenant, self._clock())).fetchone()
            )
            if row is not None:
                items = msgspec.json.decode(row[0])
                found |= {item["id"]: item for item in items if has_id(item) and item["id"] in item_ids}
        return found

    def _delete(self, response_id: str, tenant: str) -> None:
        self._row(response_id, tenant, "response_id")
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def _row(self, response_id: str, tenant: str, param: str) -> tuple[str | None, bytes, bytes]:
        query = "SELECT previous, items, reply FROM responses WHERE id = ? AND tenant = ? AND expires_s >= ?"
        row = self._database.execute(query, (response_id, tenant, self._clock())).fetchone()
        if row is None:
            raise NotFoundError(
                f"{param}: there is no response {response_id[:80]!r}, or it has expired",
                param=param,
                code="previous_response_not_found" if param == _PREVIOUS else "response_not_found",
            )
        return row[0], bytes(row[1]), bytes(row[2])


def has_id(item: dict[str, Any]) -> bool:
    """Whether an item can be found by its id."""
    return isinstance(item.get("id"), str)


_PREVIOUS = "previous_response_id"
