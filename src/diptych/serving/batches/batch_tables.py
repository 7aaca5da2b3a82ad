"""The tables of files, batches and lines that are to be done, in SQLite. One thread uses them at a time.

A line that is done is deleted in the transaction that counts it and moves the end of its file (output_bytes,
error_bytes). So what a table says and what a file holds up to that end agree at every moment, whatever is killed when.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from diptych.base.private_files import private_database
from diptych.serving.batches.batch_records import (
    OPEN,
    Batch,
    BatchTerms,
    End,
    LineFault,
    LinePlace,
    LineUsage,
    Status,
    StoredFile,
)

_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",  # a loss of power may undo the last transactions, never parts of them
    "CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, "
    "tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, num_bytes INTEGER NOT NULL, "
    "created_s INTEGER NOT NULL, expires_s INTEGER)",
    "CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, "
    "tenant TEXT NOT NULL, terms BLOB NOT NULL, status TEXT NOT NULL, created_s INTEGER NOT NULL, "
    'expires_s INTEGER NOT NULL, "end" TEXT, times BLOB NOT NULL, faults BLOB NOT NULL, '
    "output_bytes INTEGER NOT NULL, error_bytes INTEGER NOT NULL, total INTEGER NOT NULL, "
    "completed INTEGER NOT NULL, failed INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS usage (batch INTEGER PRIMARY KEY, input INTEGER NOT NULL, cached INTEGER NOT NULL, "
    "output INTEGER NOT NULL, reasoning INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS batch_status ON batches (status)",
    "CREATE TABLE IF NOT EXISTS lines (batch INTEGER NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, "
    "num_bytes INTEGER NOT NULL, custom_id TEXT NOT NULL, PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)) "
    "WITHOUT ROWID",
)
_FILE = "SELECT number, id, tenant, purpose, filename, num_bytes, created_s, expires_s FROM files"
_BATCH = (
    'SELECT number, id, tenant, terms, status, created_s, expires_s, "end", times, faults, output_bytes, error_bytes, '
    "total, completed, failed, input, cached, output, reasoning FROM batches LEFT JOIN usage ON batch = number"
)
_encode = msgspec.json.Encoder().encode


class BatchTables:
    """The database. Raises sqlite3.Error where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._database = private_database(path, _SCHEMA)

    def close(self) -> None:
        """Use it no more."""
        self._database.close()

    def begin(self) -> sqlite3.Connection:
        """A transaction as a context: all of it happens, or nothing."""
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    # -- files --------------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile) -> None:
        """A file is there. Its number is given to it here."""
        row = (file.id, file.tenant, file.purpose, file.filename, file.num_bytes, file.created_s, file.expires_s)
        self._database.execute(
            "INSERT INTO files (id, tenant, purpose, filename, num_bytes, created_s, expires_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )

    def file(self, file_id: str) -> StoredFile | None:
        """A file by its id."""
        row = self._database.execute(f"{_FILE} WHERE id = ?", (file_id,)).fetchone()
        return None if row is None else StoredFile(*row)

    def files(
        self, tenant: str, purpose: str | None, after: int | None, limit: int, *, newest: bool
    ) -> list[StoredFile]:
        """Files of a tenant from behind number ``after``."""
        where, order = _page(after, newest=newest)
        wanted = "" if purpose is None else " AND purpose = ?"
        values = (tenant, *where[1], *(() if purpose is None else (purpose,)), limit)
        rows = self._database.execute(
            f"{_FILE} WHERE tenant = ?{where[0]}{wanted} ORDER BY number {order} LIMIT ?", values
        )
        return [StoredFile(*row) for row in rows]

    def all_file_ids(self) -> set[str]:
        """File ids of every tenant."""
        return {row[0] for row in self._database.execute("SELECT id FROM files")}

    def count_files(self) -> tuple[int, int]:
        """How many there are, and their bytes with those of outputs that grow."""
        number, num_bytes = self._database.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM files").fetchone()
        (growing,) = self._database.execute(
            f"SELECT coalesce(sum(output_bytes + error_bytes), 0) FROM batches WHERE {_IS_OPEN}", OPEN
        ).fetchone()
        return number, num_bytes + growing

    def remove_file(self, file_id: str) -> None:
        """A file is gone."""
        self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired_files(self, now: int) -> list[str]:
        """Ids of files whose time is over and that no open batch reads."""
        rows = self._database.execute("SELECT id FROM files WHERE expires_s <= ?", (now,)).fetchall()
        read = self._read_files() if rows else frozenset()
        return [row[0] for row in rows if row[0] not in read]

    def is_read(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        return file_id in self._read_files()

    def _read_files(self) -> frozenset[str]:
        """Ids of the files that batches read that have not ended."""
        rows = self._database.execute(f"SELECT terms FROM batches WHERE {_IS_OPEN}", OPEN)
        return frozenset(msgspec.json.decode(row[0], type=BatchTerms).input_file for row in rows)

    # -- batches ------------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> Batch:
        """A batch begins. Returns it with its number."""
        values = (
            batch.id, batch.tenant, _encode(batch.terms), batch.status, batch.created_s, batch.expires_s,
            _encode(batch.times), _encode(batch.faults),
        )  # fmt: skip
        cursor = self._database.execute(
            "INSERT INTO batches (id, tenant, terms, status, created_s, expires_s, times, faults, output_bytes, "
            "error_bytes, total, completed, failed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)",
            values,
        )
        assert cursor.lastrowid is not None
        return replace(batch, number=cursor.lastrowid)

    def batch(self, batch_id: str) -> Batch | None:
        """A batch by its id."""
        row = self._database.execute(f"{_BATCH} WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else _batch_of(row)

    def batches(self, tenant: str, after: int | None, limit: int) -> list[Batch]:
        """Batches of a tenant, the newest first, from behind number ``after``."""
        where, order = _page(after, newest=True)
        rows = self._database.execute(
            f"{_BATCH} WHERE tenant = ?{where[0]} ORDER BY number {order} LIMIT ?", (tenant, *where[1], limit)
        )
        return [_batch_of(row) for row in rows]

    def open_batches(self) -> list[Batch]:
        """Batches that have not ended, the oldest first."""
        return [_batch_of(row) for row in self._database.execute(f"{_BATCH} WHERE {_IS_OPEN} ORDER BY number", OPEN)]

    def count_open(self) -> int:
        """How many batches have not ended."""
        (count,) = self._database.execute(f"SELECT count(*) FROM batches WHERE {_IS_OPEN}", OPEN).fetchone()
        return int(count)

    def numbered(self, number: int) -> Batch:
        """A batch by its number. Raises KeyError."""
        row = self._database.execute(f"{_BATCH} WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise KeyError(number)
        return _batch_of(row)

    def set_status(
        self, batch: Batch, status: Status, now: int, *, end: End | None = None, faults: Sequence[LineFault] = ()
    ) -> None:
        """A batch reaches a status. end: see Batch."""
        times = {**batch.times, f"{status}_at": now}
        self._database.execute(
            'UPDATE batches SET status = ?, times = ?, "end" = coalesce(?, "end"), faults = ? WHERE number = ?',
            (status, _encode(times), end, _encode(tuple(faults) or batch.faults), batch.number),
        )

    def forget_batches(self, most: int) -> None:
        """Forget the oldest batches that have ended where more than ``most`` are kept."""
        self._database.execute(
            f"DELETE FROM batches WHERE NOT {_IS_OPEN} AND number <= "
            "(SELECT number FROM batches ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (*OPEN, most),
        )
        self._database.execute("DELETE FROM usage WHERE batch NOT IN (SELECT number FROM batches)")

    # -- lines --------------------------------------------------------------------------------------------------------

    def add_lines(self, batch: int, places: Iterable[LinePlace]) -> list[LinePlace]:
        """Lines are to be done. Returns those whose custom_id was there before; they are not added."""
        statement = "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?)"
        return [
            place
            for place in places
            if not self._database.execute(
                statement, (batch, place.number, place.offset, place.num_bytes, place.custom_id)
            ).rowcount
        ]

    def set_total(self, batch: int, total: int) -> None:
        """How many lines a batch has."""
        self._database.execute("UPDATE batches SET total = ? WHERE number = ?", (total, batch))

    def forget_lines(self, batch: int) -> None:
        """None of its lines is to be done."""
        self._database.execute("DELETE FROM lines WHERE batch = ?", (batch,))

    def lines(self, batch: int, after: int, limit: int) -> list[LinePlace]:
        """Lines to be done from behind line ``after``, in the order of the file."""
        rows = self._database.execute(
            "SELECT number, offset, num_bytes, custom_id FROM lines WHERE batch = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (batch, after, limit),
        )
        return [LinePlace(*row) for row in rows]

    def is_to_do(self, batch: int, line: int) -> bool:
        """Whether this line has no row yet."""
        return bool(
            self._database.execute("SELECT 1 FROM lines WHERE batch = ? AND number = ?", (batch, line)).fetchone()
        )

    def mark(self, batch: int, lines: Sequence[int], counts: tuple[int, int], num_bytes: tuple[int, int]) -> None:
        """Lines are done. counts: of those, completed and failed. num_bytes: of their rows in output and error file."""
        self._database.executemany("DELETE FROM lines WHERE batch = ? AND number = ?", [(batch, n) for n in lines])
        self._database.execute(
            "UPDATE batches SET completed = completed + ?, failed = failed + ?, output_bytes = output_bytes + ?, "
            "error_bytes = error_bytes + ? WHERE number = ?",
            (*counts, *num_bytes, batch),
        )

    def add_usage(self, batch: int, usage: LineUsage) -> None:
        """Add the tokens of lines that are done."""
        self._database.execute(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (batch) DO UPDATE SET "
            "input = input + excluded.input, cached = cached + excluded.cached, output = output + excluded.output, "
            "reasoning = reasoning + excluded.reasoning",
            (batch, usage.input, usage.cached, usage.output, usage.reasoning),
        )


_IS_OPEN = f"status IN ({', '.join('?' * len(OPEN))})"


def _page(after: int | None, *, newest: bool) -> tuple[tuple[str, tuple[int, ...]], str]:
    """((condition, its values), order) of one page of a list."""
    order = "DESC" if newest else "ASC"
    if after is None:
        return ("", ()), order
    return (f" AND number {'<' if newest else '>'} ?", (after,)), order


def _batch_of(row: tuple[Any, ...]) -> Batch:
    values = list(row)
    for place, kind in ((3, BatchTerms), (8, dict[str, int]), (9, tuple[LineFault, ...])):
        values[place] = msgspec.json.decode(values[place], type=kind)
    usage = LineUsage(*(count or 0 for count in values[-4:]))
    return replace(Batch(*values[:-4]), usage=usage)
