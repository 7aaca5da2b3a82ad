"""Responses that can be continued by their ids: the items of each conversation, in SQLite, until they expire.

A response knows the one before it and its own new items, so a conversation of many turns is stored once. Items are
found by their ids, too. Each tenant sees its own responses only. All of them together take ``max_bytes`` at most: for a
new one, the oldest of the tenant that has the most are forgotten.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.base.private_files import lock_of, private_database
from diptych.control.errors import ConfigError, DrainingError, InvalidRequestError, NotFoundError, UnavailableError
from diptych.serving import edge_limits

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ROW_BYTES, ITEM_BYTES = 512, 256  # beside the texts: of a response, and of an item with an id
SWEEP_S = 60.0
_FILE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    f"PRAGMA journal_size_limit = {64 << 20}",
    "PRAGMA synchronous = NORMAL",
    "PRAGMA secure_delete = ON",  # what is deleted is not in the file any more
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, "
    "items BLOB NOT NULL, reply BLOB NOT NULL, expires_s REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS expiry ON responses (expires_s)",
    "CREATE INDEX IF NOT EXISTS of_tenant ON responses (tenant)",
)
_ITEMS_SCHEMA = (  # which responses have an item
    "CREATE TABLE items (id TEXT, response TEXT, PRIMARY KEY (id, response)) WITHOUT ROWID",
    "CREATE INDEX items_of_response ON items (response)",
    "CREATE TRIGGER forget_items AFTER DELETE ON responses BEGIN DELETE FROM items WHERE response = OLD.id; END",
    # files of older versions have responses without this table
    "INSERT OR IGNORE INTO items SELECT json_extract(value, '$.id'), responses.id "
    "FROM responses, json_each(CAST(items AS TEXT)) WHERE json_type(value, '$.id') = 'text'",
)
_TEXTS = "length(items) + length(reply)"
_PREVIOUS = "previous_response_id"


class _NoRoomError(Exception):
    """A response alone takes more than all of them may."""


class _Row(NamedTuple):
    """A response as it is stored."""

    id: str
    tenant: str
    previous: str | None
    items: bytes
    reply: bytes
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.reply)


class ResponseStore:
    """The responses of one server. path: None for memory. clock: Unix time in seconds. One thread does all the work, in
    the order of the calls: what was put is there for the next reader. num_responses, num_bytes, num_forgotten (for
    want of room), num_not_stored: for /metrics. Raises ConfigError for a file that cannot be used, or that another
    server uses."""

    def __init__(
        self,
        path: Path | None = None,
        expiry_s: float = edge_limits.RESPONSE_LIFE_S,
        clock: Callable[[], float] = time.time,
        max_bytes: int | None = None,
    ) -> None:
        usual = edge_limits.RESPONSES_MEMORY_BYTES if path is None else edge_limits.RESPONSES_FILE_BYTES
        self.max_bytes = usual if max_bytes is None else max_bytes
        self.num_responses = self.num_bytes = self.num_forgotten = self.num_not_stored = 0
        self._path = path
        self._expiry_s = expiry_s
        self._clock = clock
        self._log = LimitedLog(logger)
        self._pool = ThreadPoolExecutor(1, "responses")
        self._opened: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._is_closed = False
        self._texts: dict[str, int] = {}  # bytes of the texts of each tenant
        self._swept_s = 0.0
        self._counting = threading.Lock()
        self._unwritten_bytes = 0
        if path is not None:
            try:
                self._lock = lock_of(path, "responses", is_database=True)
                self._pool.submit(lambda: self._database).result()
            except (OSError, sqlite3.Error) as error:
                self.close()
                raise ConfigError(f"responses is {path}, which cannot be opened: {error}", param="responses") from None

    def put(
        self, reply: dict[str, Any], tenant: str, previous: str | None, items: list[dict[str, Any]]
    ) -> "Future[str]":
        """A response: the items that it has added to its conversation (those of its request first), and its reply.
        Returns before it is stored; the future says why it was not ("": it was)."""
        return self._put_row(*self._row(reply, tenant, previous, items))

    def _row(
        self, reply: dict[str, Any], tenant: str, previous: str | None, items: list[dict[str, Any]]
    ) -> tuple["_Row", list[str]]:
        """What is stored, and the ids of the items: takes long where these are many."""
        encoded = msgspec.json.encode(items), msgspec.json.encode(reply)
        ids = [item["id"] for item in items if has_id(item)]
        return _Row(reply["id"], tenant, previous, *encoded, self._clock() + self._expiry_s), ids

    def _put_row(self, row: "_Row", item_ids: list[str]) -> "Future[str]":
        if self._is_closed:
            closed: Future[str] = Future()
            closed.set_result(self._not_stored("the server is shutting down"))
            return closed
        with self._counting:
            has_room = self._unwritten_bytes + row.num_bytes <= edge_limits.RESPONSES_UNWRITTEN_BYTES
            self._unwritten_bytes += row.num_bytes if has_room else 0
        if not has_room:
            refused: Future[str] = Future()
            refused.set_result(self._not_stored("too many others are being written"))
            return refused
        found = self._pool.submit(self._put, row, self._clock(), item_ids)
        found.add_done_callback(lambda _: self._written(row.num_bytes))
        return found

    async def put_in_time(
        self, reply: dict[str, Any], tenant: str, previous: str | None, items: list[dict[str, Any]]
    ) -> str:
        """Store as ``put`` does, but wait for it. Returns why the response was not stored, or "". One that takes too
        long is not."""
        stored = self._put_row(*await asyncio.to_thread(self._row, reply, tenant, previous, items))
        done, _ = await asyncio.wait((asyncio.wrap_future(stored),), timeout=edge_limits.RESPONSE_WRITE_S)
        if done:
            return stored.result()
        if not stored.cancel():
            self._pool.submit(self._take_back, reply["id"])  # when it has been written
        return self._not_stored("the disk does not answer")

    async def reply(self, response_id: str, tenant: str) -> bytes:
        """The JSON of a response. Raises NotFoundError."""
        return bytes((await self._run(lambda: self._found("reply", response_id, tenant, "response_id")))[0])

    async def conversation(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        """All items up to the end of a response, oldest first. Raises NotFoundError when some are not there,
        InvalidRequestError when they are too many bytes."""
        return await self._run(lambda: self._conversation(response_id, tenant))

    async def items(self, item_ids: Collection[str], tenant: str) -> dict[str, dict[str, Any]]:
        """The items of these ids that are in responses of the tenant, by their ids. Raises InvalidRequestError when
        too many bytes would have to be read."""
        return await self._run(lambda: self._items(item_ids, tenant)) if item_ids else {}

    async def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response. Raises NotFoundError."""
        await self._run(lambda: self._delete(response_id, tenant))

    def close(self) -> None:
        """Finish what was put, and let another server have the file."""
        if self._opened is not None and not self._is_closed:
            self._pool.submit(self._opened.close)
        self._is_closed = True
        self._pool.shutdown()
        if self._lock is not None:  # after SQLite has closed the file
            os.close(self._lock)
            self._lock = None

    def _not_stored(self, why: str) -> str:
        self.num_not_stored += 1
        self._log.error(why, "a response is not stored: %s", why)
        return why

    def _written(self, num_bytes: int) -> None:
        with self._counting:
            self._unwritten_bytes -= num_bytes

    # -- in the thread ------------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._is_closed:
            raise DrainingError
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._swept, work)
        except sqlite3.Error as error:
            self._log.error("read", "stored responses cannot be used: %s", error)
            raise UnavailableError(
                f"stored responses cannot be used: {error}", retry_after_s=60.0, code="disk_failed"
            ) from None

    def _swept(self, work: Callable[[], Result]) -> Result:
        """Do this; now and then, what has expired is deleted before."""
        now = self._clock()
        if abs(now - self._swept_s) >= SWEEP_S:
            self._swept_s = now
            with suppress(sqlite3.Error), self._transaction():  # whether the disk is fine, ``work`` will tell
                self._delete_rows("expires_s < ?", now)
        return work()

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            if self._path is None:
                database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
                for statement in _SCHEMA:
                    database.execute(statement)
            else:
                database = private_database(self._path, (*_FILE_PRAGMAS, *_SCHEMA), self._lock)
            self._opened = database
            try:
                with self._transaction():
                    self._prepare(database)
            except BaseException:  # the next call opens it anew
                self._opened = None
                database.close()
                raise
        return self._opened

    def _prepare(self, database: sqlite3.Connection) -> None:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'items'").fetchone():
            for statement in _ITEMS_SCHEMA:
                database.execute(statement)
        self._tally()
        self._delete_rows("expires_s < ?", self._clock())
        self._make_room(0, 0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it happens, or nothing."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                with suppress(sqlite3.Error):  # the first error is the one that is raised
                    database.execute("ROLLBACK")
            with suppress(sqlite3.Error):  # the same
                self._tally()
            raise
        self.num_bytes = self._used_bytes()

    def _tally(self) -> None:
        """Count what is there."""
        self._texts = dict(self._database.execute(f"SELECT tenant, sum({_TEXTS}) FROM responses GROUP BY tenant"))
        [[self.num_responses]] = self._database.execute("SELECT count(*) FROM responses")

    def _used_bytes(self) -> int:
        """Bytes that the database takes, without pages that are free."""
        [[size]] = self._database.execute("PRAGMA page_size")
        [[count]] = self._database.execute("PRAGMA page_count")
        [[free]] = self._database.execute("PRAGMA freelist_count")
        return int(size * (count - free))

    def _put(self, row: _Row, now: float, item_ids: list[str]) -> str:
        num_bytes = row.num_bytes + ROW_BYTES + ITEM_BYTES * len(item_ids)
        try:
            if num_bytes > self.max_bytes:
                return self._not_stored(f"it is larger than all that is kept, {self.max_bytes} bytes")
            with self._transaction():
                self._delete_rows("expires_s < ?", now)
                self._delete_rows("id = ?", row.id)
                self._make_room(num_bytes, 1)
                self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
                self._database.executemany(
                    "INSERT OR IGNORE INTO items VALUES (?, ?)", ((item_id, row.id) for item_id in item_ids)
                )
                self._texts[row.tenant] = self._texts.get(row.tenant, 0) + row.num_bytes
                self.num_responses += 1
                self._make_room(0, 0, kept=row.id)  # it may have taken more pages than its bytes
                if self._used_bytes() > self.max_bytes:
                    raise _NoRoomError
        except _NoRoomError:
            return self._not_stored(f"it is larger than all that is kept, {self.max_bytes} bytes")
        except sqlite3.Error as error:  # the answer is not lost with it
            return self._not_stored(str(error))
        except Exception as error:  # nor with a defect
            self._log.error(kind_of(error), "a response is not stored", error=error)
            return self._not_stored("the store has failed; the log has the details")
        return ""

    def _take_back(self, response_id: str) -> None:
        """Forget one that was written too late. Nobody waits for this."""
        try:
            with self._transaction():
                self._delete_rows("id = ?", response_id)
        except Exception as error:  # nobody waits for this
            self._log.error("take back", "a response stays stored, of which its client was told otherwise", error=error)

    def _make_room(self, num_bytes: int, num_more: int, kept: str = "") -> None:
        """Make room for ``num_bytes`` and ``num_more`` responses: forget the oldest of the tenant that has the most,
        but not ``kept``."""
        oldest = "rowid = (SELECT rowid FROM responses WHERE tenant = ? AND id != ? ORDER BY rowid LIMIT 1)"
        passed: set[str] = set()  # tenants that have nothing more to forget
        while (
            self._used_bytes() + num_bytes > self.max_bytes or self.num_responses + num_more > edge_limits.RESPONSES
        ) and (tenants := self._texts.keys() - passed):
            largest = max(tenants, key=lambda tenant: (self._texts[tenant], tenant))
            count = self._delete_rows(oldest, largest, kept)
            self.num_forgotten += count
            if not count:
                passed.add(largest)

    def _delete_rows(self, which: str, *values: float | str) -> int:
        """Returns how many there were."""
        deleted = self._database.execute(f"DELETE FROM responses WHERE {which} RETURNING tenant, {_TEXTS}", values)
        found = deleted.fetchall()
        for tenant, num_bytes in found:
            self._texts[tenant] = self._texts.get(tenant, 0) - num_bytes
            if self._texts[tenant] <= 0:
                del self._texts[tenant]
        self.num_responses -= len(found)
        return len(found)

    def _conversation(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        turns: list[list[dict[str, Any]]] = []
        wanted: str | None = response_id
        left = edge_limits.CONVERSATION_BYTES
        while wanted is not None:
            number, num_bytes, wanted = self._found("rowid, length(items), previous", wanted, tenant, _PREVIOUS)
            left -= num_bytes
            if left < 0:
                raise _too_long(_PREVIOUS)
            [[items]] = self._database.execute("SELECT items FROM responses WHERE rowid = ?", (number,))
            turns.append(msgspec.json.decode(items))
        return [item for turn in reversed(turns) for item in turn]

    def _items(self, item_ids: Collection[str], tenant: str) -> dict[str, dict[str, Any]]:
        query = (
            "SELECT responses.rowid, length(responses.items) "
            "FROM items JOIN responses ON responses.id = items.response "
            "WHERE items.id = ? AND tenant = ? AND expires_s >= ? ORDER BY responses.rowid DESC LIMIT 1"
        )
        found: dict[str, dict[str, Any]] = {}
        left = edge_limits.CONVERSATION_BYTES
        for item_id in item_ids:
            place = (
                None if item_id in found else self._database.execute(query, (item_id, tenant, self._clock())).fetchone()
            )
            if place is None:
                continue
            left -= place[1]
            if left < 0:
                raise _too_long("input")
            [[text]] = self._database.execute("SELECT items FROM responses WHERE rowid = ?", place[:1])
            items = msgspec.json.decode(text)
            found |= {item["id"]: item for item in items if has_id(item) and item["id"] in item_ids}
        return found

    def _delete(self, response_id: str, tenant: str) -> None:
        [number] = self._found("rowid", response_id, tenant, "response_id")
        with self._transaction():
            self._delete_rows("rowid = ?", number)

    def _found(self, columns: str, response_id: str, tenant: str, param: str) -> tuple[Any, ...]:
        query = f"SELECT {columns} FROM responses WHERE id = ? AND tenant = ? AND expires_s >= ?"
        row: tuple[Any, ...] | None = self._database.execute(query, (response_id, tenant, self._clock())).fetchone()
        if row is None:
            raise NotFoundError(
                f"{param}: there is no response {response_id[:80]!r}, or it has expired",
                param=param,
                code="previous_response_not_found" if param == _PREVIOUS else "response_not_found",
            )
        return row


def has_id(item: dict[str, Any]) -> bool:
    """Whether an item can be found by its id."""
    return isinstance(item.get("id"), str)


def _too_long(param: str) -> InvalidRequestError:
    text = f"{param}: the stored items that it means are more than {edge_limits.CONVERSATION_BYTES} bytes, the limit"
    return InvalidRequestError(text, param=param, code="conversation_too_long")
