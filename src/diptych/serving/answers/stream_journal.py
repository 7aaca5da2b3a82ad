"""Streams on disk, so that a client can go on with one after the server, or its connection, was gone.

Owns one file per stream, in a directory that is this user's alone: what was asked, and each token before it is sent.
Files are appended to without a sync: they outlive the process, not the machine. A torn last record is left out.
Must never know HTTP.
"""

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from diptych.base.length_prefix import Unpacker, pack
from diptych.base.limited_log import LimitedLog
from diptych.base.private_files import lock_of, make_private_folder, open_private
from diptych.control.errors import ConfigError
from diptych.control.events import RequestFinished
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream, Delta, Generation

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
LOCK_NAME = "lock"  # of the file that is locked by the server that uses the directory
_NAME = re.compile(r"[a-z]{1,16}-[0-9a-f]{32}")


class StreamHead(msgspec.Struct, frozen=True, array_like=True):
    """What was asked. kind: of the reply. body: the request as JSON, with its seed. created: seconds since the epoch,
    as the client was told. prompt: token ids, which a chat template need not give again (it may tell the date)."""

    kind: str
    tenant: str
    body: bytes
    created: int
    prompt: list[int]


class StreamNews(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave: its tokens, and the end. is_stop: the last of them is a stop token."""

    token_ids: list[int]
    is_stop: bool = False
    finished: RequestFinished | None = None


class StreamRecord(msgspec.Struct):
    """All that is known of a stream. num_seen: tokens whose text the client has; seen: these, when they were given to
    the stream that goes on."""

    stream_id: str
    head: StreamHead
    token_ids: list[int]
    is_stop: bool = False
    finished: RequestFinished | None = None
    num_seen: int = 0
    seen: Delta | None = None


class StreamJournal:
    """The streams of one directory. Raises ConfigError for one that others can enter, or that cannot be made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, int] = {}  # tokens of the streams that are recorded now
        self._live: dict[str, Generation] = {}
        self._num_kept = 0
        self.num_not_recorded = 0  # whose record could not be written, or written to its end
        self._log = LimitedLog(logger)
        self._swept_s = 0.0
        try:
            make_private_folder(directory)
            status = directory.stat()
        except OSError as error:
            raise ConfigError(f"survive_restart is {directory}: {error.strerror}", param="survive_restart") from error
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            message = f"survive_restart is {directory}, which others can enter: it holds prompts (chmod 700)"
            raise ConfigError(message, param="survive_restart")
        try:
            self._lock: int | None = lock_of(directory / LOCK_NAME, "survive_restart")
        except OSError as error:
            raise ConfigError(f"survive_restart is {directory}: {error.strerror}", param="survive_restart") from error

    def end(self) -> None:
        """Let another server have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, generation: Generation, head: StreamHead) -> bool:
        """Record this stream from now on; of one that goes on, the file is made anew, since its end may be torn. False
        when there are too many."""
        self._sweep()
        stream_id, stream = generation.request_id, generation.streams[0]
        path = self._directory / stream_id
        if not path.exists():
            if self._num_kept >= edge_limits.RECORDED_STREAMS:
                return False
            self._num_kept += 1
        self._written[stream_id], self._live[stream_id] = stream.num_tokens, generation
        encode = msgspec.msgpack.encode
        begun = path.with_suffix(".begun")
        self._append(begun, pack(encode(head)) + pack(encode(StreamNews(stream.token_ids))))
        try:
            if stream_id in self._live:
                begun.replace(path)
        except OSError as error:
            self._give_up(begun, error)
        return stream_id in self._live

    def write(self, generations: Iterable[Generation]) -> None:
        """These have something new: it is written before any of it is sent."""
        for generation in generations:
            written = self._written.get(generation.request_id)
            if written is None or self._live.get(generation.request_id) is not generation:
                continue
            stream = generation.streams[0]
            if stream.num_tokens > written or stream.finished is not None:
                is_stop = isinstance(stream.stop_reason, int)
                news = StreamNews(stream.token_ids[written:], is_stop, stream.finished)
                self._append(self._directory / generation.request_id, pack(msgspec.msgpack.encode(news)))
                if generation.request_id in self._written:  # the disk has taken it
                    self._written[generation.request_id] = stream.num_tokens

    def close(self, generation: Generation) -> None:
        """Nothing more comes of this stream; its record is kept for a while."""
        if self._live.get(generation.request_id) is generation:
            del self._live[generation.request_id]
            self._written.pop(generation.request_id, None)

    def live(self, stream_id: str) -> Generation | None:
        """The stream, when it is under way in this process."""
        return self._live.get(stream_id)

    def load(self, stream_id: str, num_seen: int) -> StreamRecord | None:
        """Read a stream's record as ``read_record`` does."""
        return read_record(self._directory, stream_id, num_seen)

    def _append(self, path: Path, data: bytes) -> None:
        try:
            descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                rest = memoryview(data)
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[os.write(descriptor, rest) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            self._give_up(path, error)

    def _give_up(self, path: Path, error: OSError) -> None:
        """Serving goes on; the stream of this file cannot be resumed from here."""
        self.num_not_recorded += 1
        self._log.error("write", "a stream cannot be recorded: %s", error)
        self._written.pop(path.stem, None)
        self._live.pop(path.stem, None)
        with contextlib.suppress(OSError):  # counted above; the sweep comes by again
            path.unlink()

    def _sweep(self) -> None:
        """Remove what is too old, now and then."""
        now = time.monotonic()
        if self._swept_s and now - self._swept_s < SWEEP_S:
            return
        self._swept_s, oldest, kept = now, time.time() - edge_limits.RECORDED_STREAM_S, 0
        try:
            entries = list(os.scandir(self._directory))
        except OSError as error:  # whether a stream can be recorded, its own file will tell
            self._log.error("read", "recorded streams cannot be listed: %s", error)
            return
        for entry in entries:
            if not _NAME.fullmatch(entry.name.removesuffix(".begun")):
                continue
            with contextlib.suppress(OSError):  # it is gone, or the next sweep meets it again
                if entry.name not in self._live and entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
                else:
                    kept += 1
        self._num_kept = kept


def read_record(directory: Path, stream_id: str, num_seen: int) -> StreamRecord | None:
    """The record of a stream; None when there is none (any more), or the client cannot have seen so much."""
    if not _NAME.fullmatch(stream_id):
        return None
    try:
        data = (directory / stream_id).read_bytes()
        first, *others = Unpacker().feed(data)
        record = StreamRecord(stream_id, msgspec.msgpack.decode(first, type=StreamHead), [], num_seen=num_seen)
        for data in others:
            news = msgspec.msgpack.decode(data, type=StreamNews)
            record.token_ids += news.token_ids
            record.is_stop, record.finished = news.is_stop, news.finished
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return record if 0 < num_seen <= len(record.token_ids) else None


def replay(stream: AnswerStream, record: StreamRecord) -> None:
    """Give a new stream the tokens of its record: those that the client has seen are taken away, the others are new. It
    ends where the record does, if that has an end."""
    last = len(record.token_ids) - 1
    for number, token_id in enumerate(record.token_ids):
        if number == record.num_seen:
            record.seen = stream.take()
        stream.push(token_id, is_stop_token=record.is_stop and number == last)
    stream.num_resumed = stream.num_tokens
    if record.num_seen > last:
        record.seen = stream.take()
    if record.finished is not None:
        stream.end(record.finished)
    if stream.finished is not None or record.num_seen <= last:
        stream.mark()
