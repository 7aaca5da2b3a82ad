"""The folder of a batch service: uploaded files, growing outputs, and the tables that say what is true of them.

    DIR/lock            held by the server that uses the folder
    DIR/batches.sqlite  tables (see batch_tables.py)
    DIR/files/ID        files; an output is true up to the end that the tables say, what is behind it is cut off
    DIR/incoming/       uploads that are under way

Rows of done lines are appended and synced to disk before the lines are marked as done; a crash in between leaves rows
behind the marked end, which the next writer overwrites. Not for several threads at a time: BatchService has one for it.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO

from diptych.base.byte_size import size_words
from diptych.base.private_files import lock_of, make_private_folder, open_private, warn_of_visitors
from diptych.control.errors import BodyTooLargeError, ConfigError, ConflictError, InvalidRequestError, NotFoundError
from diptych.serving.batches.batch_records import NO_USAGE, Batch, BatchLimits, End, LinePlace, LineResult, StoredFile
from diptych.serving.batches.batch_tables import BatchTables
from diptych.serving.batches.line_check import CANCELLED, EXPIRED, unanswered_row

_FILE_NAME = re.compile(r"file-[0-9a-f]{32}(out|err)?")
END_ROWS = 500  # lines that get their rows at once when a batch expires or is cancelled


class BatchStore:
    """Raises ConfigError for a folder that cannot be used, or that another server uses."""

    def __init__(self, folder: Path, limits: BatchLimits | None = None) -> None:
        self.limits = limits or BatchLimits()
        self.folder = folder
        self._files, self._incoming = folder / "files", folder / "incoming"
        try:
            for path in (folder, self._files, self._incoming):
                make_private_folder(path)
            warn_of_visitors(folder, "batch_dir")
            self._lock = lock_of(folder / "lock", "batch_dir")
            self.tables = BatchTables(folder / "batches.sqlite")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"batch_dir is {folder}, which cannot be used: {error}", param="batch_dir") from None
        self._recover()

    def close(self) -> None:
        """Let another server have the folder."""
        self.tables.close()
        os.close(self._lock)

    def _recover(self) -> None:
        """Recover after a start: no half uploads, no files without an owner, no rows behind the marked ends."""
        open_batches = self.tables.open_batches()
        known = self.tables.all_file_ids()
        known |= {name for batch in open_batches for name in (batch.output_file, batch.error_file)}
        for path in (*self._incoming.iterdir(), *(path for path in self._files.iterdir() if path.name not in known)):
            if _FILE_NAME.fullmatch(path.name):
                path.unlink()
        for path in self._files.iterdir():  # of older versions: as private as new ones
            os.close(open_private(path, os.O_RDONLY))
        for batch in open_batches:
            for name, num_bytes in _ends(batch):
                if self.path(name).exists():
                    os.truncate(self.path(name), num_bytes)

    # -- files --------------------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Where a file is."""
        return self._files / file_id

    def incoming_path(self, file_id: str) -> Path:
        """Where an upload is written."""
        return self._incoming / file_id

    def check_room(self, num_incoming: int) -> None:
        """Raise BodyTooLargeError when no more files, or no more bytes, are taken."""
        limits = self.limits
        num_files, num_bytes = self.tables.count_files()
        if num_files >= limits.max_files:
            raise BodyTooLargeError(f"there are {num_files} files, the limit; delete some", code="files_full")
        if num_bytes + num_incoming > limits.max_total_bytes:
            taken, most = size_words(num_bytes + num_incoming), size_words(limits.max_total_bytes)
            text = f"all files take {taken} with this one; the limit is {most}"
            raise BodyTooLargeError(text, code="files_full")

    def keep(self, file: StoredFile) -> StoredFile:
        """An upload is whole and synced: it is a file from now on."""
        self.check_room(file.num_bytes)
        self.incoming_path(file.id).rename(self.path(file.id))
        try:
            _sync_folder(self._files)
            self.tables.add_file(file)
        except (OSError, sqlite3.Error):  # no row names it: it would take room of a full disk
            self.path(file.id).unlink(missing_ok=True)
            raise
        return self.file(file.id, file.tenant)

    def file(self, file_id: str, tenant: str, param: str = "file_id") -> StoredFile:
        """A file of this tenant. Raises NotFoundError."""
        found = self.tables.file(file_id)
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"{param}: there is no file {file_id[:80]!r}", param=param, code="file_not_found")
        return found

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Raises NotFoundError, or ConflictError while a batch reads it."""
        self.file(file_id, tenant)
        if self.tables.is_read(file_id):
            raise ConflictError(f"file {file_id} is read by a batch that has not ended; cancel it first")
        self._remove(file_id)

    def drop_expired(self, now: int) -> None:
        """Delete the files whose time is over."""
        for file_id in self.tables.expired_files(now):
            self._remove(file_id)

    def _remove(self, file_id: str) -> None:
        self.tables.remove_file(file_id)
        self.path(file_id).unlink(missing_ok=True)

    # -- batches ------------------------------------------------------------------------------------------------------

    def batch(self, batch_id: str, tenant: str, param: str = "batch_id") -> Batch:
        """A batch of this tenant. Raises NotFoundError."""
        found = self.tables.batch(batch_id)
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"{param}: there is no batch {batch_id[:80]!r}", param=param, code="batch_not_found")
        return found

    def add_batch(self, batch: Batch) -> Batch:
        """A batch begins. Raises NotFoundError for its file, InvalidRequestError for what is no input, ConflictError
        where too many are open."""
        file = self.file(batch.terms.input_file, batch.tenant, "input_file_id")
        if file.purpose != "batch":
            text = f"input_file_id is a file of purpose {file.purpose}; it must be batch"
            raise InvalidRequestError(text, param="input_file_id")
        if self.tables.count_open() >= self.limits.max_open:
            raise ConflictError(f"{self.limits.max_open} batches are open, the limit; wait or cancel some")
        added = self.tables.add_batch(batch)
        self.tables.forget_batches(self.limits.max_batches)
        return added

    def cancel(self, batch_id: str, tenant: str, now: int) -> Batch:
        """Give up what is not done of a batch. Raises NotFoundError, or ConflictError when it has ended."""
        batch = self.batch(batch_id, tenant)
        if batch.status in ("validating", "in_progress"):
            self.tables.set_status(batch, "cancelling", now, end="cancelled")
        elif batch.status != "cancelling":
            raise ConflictError(f"batch {batch.id} is {batch.status}; only one that runs can be cancelled")
        return self.batch(batch_id, tenant)

    # -- lines --------------------------------------------------------------------------------------------------------

    def read_lines(self, batch: Batch, after: int, limit: int, max_bytes: int) -> list[tuple[LinePlace, bytes]]:
        """Lines to be done from behind line ``after``, with their texts: as many as ``max_bytes`` hold, one at
        least."""
        found: list[tuple[LinePlace, bytes]] = []
        places = self.tables.lines(batch.number, after, limit)
        if not places:
            return found
        with self.path(batch.terms.input_file).open("rb") as file:
            for place in places:
                max_bytes -= place.num_bytes
                if found and max_bytes < 0:
                    break
                file.seek(place.offset)
                found.append((place, file.read(place.num_bytes)))
        return found

    def commit(self, results: Sequence[LineResult]) -> None:
        """Lines are done: their rows are on disk before that is marked. Those that are done already are left out, so
        the same results may come again. Raises OSError or sqlite3.Error, and then nothing of it has happened."""
        new = [result for result in results if self.tables.is_to_do(result.batch, result.line)]
        ordered = sorted(new, key=lambda result: result.batch)
        groups = [(number, list(group)) for number, group in groupby(ordered, key=lambda result: result.batch)]
        for number, group in groups:
            for (name, end), is_success in zip(_ends(self.tables.numbered(number)), (True, False), strict=True):
                self._append(name, end, [result.row for result in group if result.is_success is is_success])
        with self.tables.begin():
            for number, group in groups:
                good = [len(result.row) for result in group if result.is_success]
                bad = [len(result.row) for result in group if not result.is_success]
                lines = [result.line for result in group]
                self.tables.mark(number, lines, (len(good), len(bad)), (sum(good), sum(bad)))
                self.tables.add_usage(number, sum((result.usage for result in group), NO_USAGE))

    def _append(self, name: str, end: int, rows: Sequence[bytes]) -> None:
        """Rows behind byte ``end`` of a file, on disk when this returns; what was there is overwritten."""
        if not rows:
            return
        path = self.path(name)
        is_new = not path.exists()
        with os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.seek(end)
            file.truncate()
            file.writelines(rows)
            _sync(file)
        if is_new:
            _sync_folder(self._files)

    def conclude(self, batch: Batch, end: End, now: int) -> Batch:
        """None of its lines runs any more. Returns the batch with its end, which is that of the client who cancelled
        it meanwhile, or of an earlier process."""
        found = self.batch(batch.id, batch.tenant)
        if found.status == "in_progress":
            self.tables.set_status(found, "finalizing", now, end=end)
        return self.batch(batch.id, batch.tenant)

    def end_lines(self, batch: Batch, end: End) -> bool:
        """Rows for some of the lines that are not done when a batch expires or is cancelled; False when all have
        one."""
        places = self.tables.lines(batch.number, 0, END_ROWS)
        if places:
            words = EXPIRED if end == "expired" else CANCELLED
            rows = (unanswered_row(row_id(batch, place.number), place.custom_id, *words) for place in places)
            pairs = zip(places, rows, strict=True)
            self.commit([LineResult(batch.number, place.number, row, False) for place, row in pairs])
        return bool(places)

    def finish(self, batch: Batch, end: End, now: int) -> None:
        """Every line has its row: the output and the error file are files from now on."""
        found = self.batch(batch.id, batch.tenant)
        expiry_s = found.terms.output_expiry_s
        expires_s = None if expiry_s is None else found.created_s + expiry_s
        for name, num_bytes in _ends(found):
            if self.path(name).exists():
                os.truncate(self.path(name), num_bytes)
        with self.tables.begin():
            for (name, num_bytes), word in zip(_ends(found), ("output", "error"), strict=True):
                if num_bytes:
                    filename = f"{found.id}_{word}.jsonl"
                    file = StoredFile(0, name, found.tenant, "batch_output", filename, num_bytes, now, expires_s)
                    self.tables.add_file(file)
            self.tables.set_status(found, end, now)

    def texts(self, file_id: str) -> Iterator[tuple[int, bytes]]:
        """The lines of a file as (first byte, text without its end), empty ones left out. Never more than one in
        memory; of one that is longer than max_line_bytes only so much as shows it."""
        most = self.limits.max_line_bytes + 2
        offset = 0
        with self.path(file_id).open("rb") as file:
            while text := file.readline(most):
                begin, offset = offset, offset + len(text)
                while len(text) == most and not text.endswith(b"\n"):  # the rest of a line that is too long
                    rest = file.readline(2**20)
                    offset += len(rest)
                    if not rest or rest.endswith(b"\n"):
                        break
                if text.strip():
                    yield begin, text.rstrip(b"\r\n")


def row_id(batch: Batch, line: int) -> str:
    """The id of a line's row: the same in every attempt."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line}"


def _ends(batch: Batch) -> tuple[tuple[str, int], tuple[str, int]]:
    """(id, bytes that are true) of the output file and of the error file."""
    return (batch.output_file, batch.output_bytes), (batch.error_file, batch.error_bytes)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fdatasync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
