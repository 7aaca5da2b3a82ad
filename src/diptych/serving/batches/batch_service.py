"""Files and batches for the routes: one folder, one thread for its disk, one runner.

Owns the order of start and stop. ``connect`` it to what runs lines, ``start`` it inside the server's event loop.
"""

import asyncio
import io
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diptych.base.byte_size import size_words
from diptych.base.limited_log import LimitedLog
from diptych.base.private_files import open_private
from diptych.control.errors import BodyTooLargeError, DrainingError, InvalidRequestError, UnavailableError
from diptych.serving.batches.batch_records import Batch, BatchLimits, BatchTerms, StoredFile
from diptych.serving.batches.batch_runner import BatchCounts, BatchRunner, LineExecutor
from diptych.serving.batches.batch_store import BatchStore
from diptych.serving.batches.line_schedule import LineLimits
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import places
from diptych.serving.failures.restart_pause import RestartPause

logger = logging.getLogger(__name__)

RUNNER = "the batch runner"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """folder: of files and batches. lines: how many run at once."""

    folder: Path
    limits: BatchLimits = field(default_factory=BatchLimits)
    lines: LineLimits = field(default_factory=LineLimits)


@dataclass(frozen=True, slots=True)
class LineHost:
    """What runs the lines. others: how many requests are open that lines are to wait for; None: none is taken now.
    models: names that lines may ask for. endpoints: that are served."""

    execute: LineExecutor
    others: Callable[[], int | None]
    models: Callable[[], Collection[str]]
    endpoints: tuple[str, ...]


class BatchService:
    """Raises ConfigError for a folder that cannot be used. clock: Unix seconds."""

    def __init__(self, options: BatchOptions, clock: Callable[[], float] = time.time) -> None:
        self.options = options
        self.store = BatchStore(options.folder.expanduser(), options.limits)
        self.runner: BatchRunner | None = None
        self.endpoints: tuple[str, ...] = ()
        self._host: LineHost | None = None
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, "batches")
        self._running: asyncio.Task[None] | None = None
        self._log = LimitedLog(logger)
        self._incoming_bytes = 0  # of uploads that are under way
        self._is_closed = False

    def connect(self, host: LineHost) -> None:
        """Run lines here."""
        self.endpoints, self._host = host.endpoints, host
        self.runner = self._make_runner()

    def _make_runner(self) -> BatchRunner:
        host, counts = self._host, self.runner.counts if self.runner is not None else BatchCounts()
        assert host is not None, "connect it first"
        lines, clock = self.options.lines, self._clock
        return BatchRunner(self.store, self.in_thread, host.execute, host.others, host.models, lines, clock, counts)

    def start(self, failures: FailureBoard | None = None) -> None:
        """Go on with the batches that are open. failures: where defects of the runner are reported."""
        assert self.runner is not None
        self._running = asyncio.create_task(self._keep_running(failures or FailureBoard()))

    async def _keep_running(self, failures: FailureBoard) -> None:
        """One runner after the other, should they fail: what counts of a batch is on disk."""
        pause = RestartPause()
        while True:
            assert self.runner is not None
            try:
                await self.runner.run()
            except Exception as error:
                logger.error("%s has failed", RUNNER, exc_info=error)
                failures.report(RUNNER, f"{type(error).__name__} at {(places(error) or ['?'])[-1]}")
            await asyncio.sleep(pause.next_s())
            self.runner = self._make_runner()
            failures.replaced(RUNNER)
            pause.begun()

    async def stop(self) -> None:
        """Start no more lines, and end those that run: they begin again after the next start."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def close(self) -> None:
        """Let another server have the folder, after ``stop``."""
        self._is_closed = True
        self._pool.shutdown()
        self.store.close()

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run a blocking function in the service's pool of threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    # -- files --------------------------------------------------------------------------------------------------------

    async def begin_upload(self) -> "Upload":
        """A place for a new file. Raises BodyTooLargeError when there is no room for any, UnavailableError when the
        disk fails."""
        try:
            await self.for_client(self.store.check_room, self._incoming_bytes)
            return Upload(self, f"file-{uuid.uuid4().hex}")
        except OSError as error:
            raise self.disk_failed(error) from None

    async def for_client(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run ``in_thread`` for a request that waits for it. Raises UnavailableError when the disk fails, DrainingError
        after ``close``."""
        if self._is_closed:
            raise DrainingError
        try:
            return await self.in_thread(work, *arguments)
        except (OSError, sqlite3.Error) as error:
            raise self.disk_failed(error) from None

    def disk_failed(self, error: OSError | sqlite3.Error) -> UnavailableError:
        """What a client is told when files and batches cannot be read or kept; a line in the log once a minute."""
        words = (isinstance(error, OSError) and error.strerror) or str(error)
        self._log.error("disk", "files and batches in %s cannot be used: %s", self.store.folder, words)
        return UnavailableError(f"files and batches cannot be used: {words}", retry_after_s=60.0, code="disk_failed")

    def count_incoming(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more bytes that are being uploaded (negative when an upload is over)."""
        self._incoming_bytes += num_bytes

    def new_file(self, file_id: str, tenant: str, filename: str, num_bytes: int, expiry_s: int | None) -> StoredFile:
        """The record of an uploaded file."""
        now = int(self._clock())
        expires_s = None if expiry_s is None else now + expiry_s
        return StoredFile(0, file_id, tenant, "batch", filename, num_bytes, now, expires_s)

    async def file(self, file_id: str, tenant: str) -> StoredFile:
        """Raises NotFoundError, or UnavailableError when the disk fails, as all of these do."""
        return await self.for_client(self.store.file, file_id, tenant)

    async def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, *, newest: bool
    ) -> list[StoredFile]:
        """Files of a tenant from behind the file ``after``. Raises NotFoundError for that."""

        def work() -> list[StoredFile]:
            number = None if after is None else self.store.file(after, tenant, "after").number
            return self.store.tables.files(tenant, purpose, number, limit, newest=newest)

        return await self.for_client(work)

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Raises NotFoundError, or ConflictError while a batch reads it."""
        await self.for_client(self.store.delete_file, file_id, tenant)

    # -- batches ------------------------------------------------------------------------------------------------------

    async def create(self, terms: BatchTerms, tenant: str) -> Batch:
        """A new batch. Raises InvalidRequestError, NotFoundError or ConflictError."""
        if terms.endpoint not in self.endpoints:
            known = ", ".join(self.endpoints)
            raise InvalidRequestError(f"endpoint is {terms.endpoint[:80]!r}; one of {known}", param="endpoint")
        now = int(self._clock())
        batch_id = f"batch_{uuid.uuid4().hex}"
        batch = Batch(0, batch_id, tenant, terms, "validating", now, now + terms.window_s)
        added = await self.for_client(self.store.add_batch, batch)
        assert self.runner is not None
        self.runner.add(added)
        return added

    async def batch(self, batch_id: str, tenant: str) -> Batch:
        """Raises NotFoundError."""
        return await self.for_client(self.store.batch, batch_id, tenant)

    async def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """Batches of a tenant, the newest first, from behind the batch ``after``. Raises NotFoundError for that."""

        def work() -> list[Batch]:
            number = None if after is None else self.store.batch(after, tenant, "after").number
            return self.store.tables.batches(tenant, number, limit)

        return await self.for_client(work)

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Raises NotFoundError, or ConflictError when it has ended."""
        now = int(self._clock())
        batch = await self.for_client(self.store.cancel, batch_id, tenant, now)
        assert self.runner is not None
        self.runner.cancel(batch)
        return batch


class Upload:
    """A file on its way to the disk. Leave it by ``keep`` or by ``drop``."""

    def __init__(self, service: BatchService, file_id: str) -> None:
        self._service = service
        self._file_id = file_id
        self._path = service.store.incoming_path(file_id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = io.FileIO(open_private(self._path, flags), "w")
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """More of the file. Raises BodyTooLargeError from BatchService's limits, UnavailableError when the disk
        fails."""
        limits = self._service.options.limits
        self.num_bytes += len(data)
        self._service.count_incoming(len(data))
        if self.num_bytes > limits.max_file_bytes:
            text = f"the file is larger than {size_words(limits.max_file_bytes)}, the limit"
            raise BodyTooLargeError(text, code="file_too_large")
        await self._on_disk(lambda: _write_all(self._file.fileno(), data))

    async def keep(self, tenant: str, filename: str, expiry_s: int | None) -> StoredFile:
        """The file is whole. Raises as ``write`` does."""
        await self._on_disk(lambda: os.fsync(self._file.fileno()))
        self._file.close()
        file = self._service.new_file(self._file_id, tenant, filename, self.num_bytes, expiry_s)
        return await self._service.for_client(self._service.store.keep, file)

    def drop(self) -> None:
        """The upload is over; what was not kept goes."""
        self._service.count_incoming(-self.num_bytes)
        self.num_bytes = 0
        try:
            self._file.close()
            self._path.unlink(missing_ok=True)
        except OSError as error:  # the reply says what came before
            self._service.disk_failed(error)

    async def _on_disk(self, work: Callable[[], Any]) -> None:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            raise self._service.disk_failed(error) from None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
