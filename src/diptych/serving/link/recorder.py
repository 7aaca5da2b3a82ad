"""Recordings on disk: one JSON line per input of a core, written by a thread of its own.

The loop that serves only appends rows to a queue; encoding, hashing and writing happen here. Recording never stops or
slows serving: when the file cannot be written any more (a full disk, the size limit), or the disk does not keep up, it
ends with one line in the log.
Read by diptych.simulation.recordings.

    {"format": ..., "version": ..., "diptych": ..., "config": {...}}
    [...]                                 of a worker: rows of control.engine.recording, plans as ["begin", now, digest
                                          of all plans so far, [summary]] or ["begin", now] for none;
                                          of a front end: rows of control.cluster.cluster_recording
                                          of a planner: rows of control.planner.planner_recording
    ["closed", number of rows]            missing when the process was killed or recording had to stop
"""

import io
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diptych import __version__
from diptych.base.private_files import open_private
from diptych.control.cluster import cluster_recording
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import EngineConfig
from diptych.control.engine.recording import FORMAT, VERSION, DecisionChain, Row, plan_summary
from diptych.control.errors import ConfigError
from diptych.control.planner import planner_recording
from diptych.control.planner.planner_config import PlannerConfig
from diptych.serving import edge_limits

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.05
MAX_BYTES = 4 * 2**30


class Recorder:
    """The writer of one recording. Where ``path`` exists, a number is added to its name: a restarted worker does not
    overwrite the recording before it. encode: turns a row into what is written; called in the order of rows on the
    writer's thread. Raises ConfigError when no file can be created."""

    def __init__(
        self, path: Path, header: Mapping[str, Any], encode: Callable[[Row], Row], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self.path, self._file = _create(path)
        self.num_rows = 0
        self.stopped_because = ""  # why recording ended early
        self._encode = encode
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: deque[Row] = deque()
        self._encoder = msgspec.json.Encoder()
        self._closing = threading.Event()
        self._put([self._encoder.encode({"diptych": __version__, **header})])
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Take a row; returns at once. Recording ends when too many wait: rows after a gap could not be replayed."""
        if self.stopped_because:
            return
        if len(self._rows) >= edge_limits.RECORDER_ROWS:
            self._end(f"{edge_limits.RECORDER_ROWS} rows wait to be written, the limit")
        else:
            self._rows.append(row)

    def close(self) -> None:
        """Write what is left and the closing line."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if not self.stopped_because:
            self._put([self._encoder.encode(("closed", self.num_rows))])
        self._file.close()

    def _run(self) -> None:
        try:
            self._write_rows()
        except Exception as error:  # a row that cannot be encoded: rows must not gather in memory
            logger.exception("the thread that records has failed")
            self._stop(f"{type(error).__name__}: {error}")

    def _write_rows(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(WRITE_INTERVAL_S)
            lines = []
            while self._rows:
                lines.append(self._encoder.encode(self._encode(self._rows.popleft())))
            if lines:
                self.num_rows += len(lines)
                self._put(lines)

    def _put(self, lines: list[bytes]) -> None:
        data = b"\n".join(lines) + b"\n"
        if self.stopped_because:
            return
        if self._num_bytes + len(data) > self._max_bytes:
            self._stop(f"its limit of {self._max_bytes} bytes is reached")
            return
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._num_bytes += len(data)
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        """Called by the thread that takes rows away."""
        self._end(reason)
        self._rows.clear()

    def _end(self, reason: str) -> None:
        self.stopped_because = reason
        logger.error("recording to %s has stopped: %s; serving goes on", self.path, reason)


def engine_encoder() -> Callable[[Row], Row]:
    """What turns the rows of one RecordingEngineCore into those of a file."""
    chain = DecisionChain()

    def encode(row: Row) -> Row:
        if row[0] != "begin":
            return row
        kind, now, output = row
        return (kind, now) if output is None else (kind, now, chain.add(output), plan_summary(output))

    return encode


def engine_header(config: EngineConfig) -> dict[str, Any]:
    """The first line of a worker's recording."""
    return {"format": FORMAT, "version": VERSION, "config": config}


def record_engine(path: Path, config: EngineConfig, *, max_bytes: int = MAX_BYTES) -> Recorder:
    """A recorder for a RecordingEngineCore."""
    return Recorder(path, engine_header(config), engine_encoder(), max_bytes=max_bytes)


def record_cluster(path: Path, config: ClusterConfig) -> Recorder:
    """A recorder for a RecordingClusterCore."""
    return Recorder(path, cluster_recording.header(config), cluster_recording.RowEncoder().encode)


def record_planner(path: Path, config: PlannerConfig) -> Recorder:
    """A recorder for a RecordingPlannerCore."""
    return Recorder(path, planner_recording.planner_header(config), planner_recording.PlannerRowEncoder().encode)


def _create(path: Path) -> tuple[Path, io.FileIO]:
    for number in range(1000):
        target = path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            descriptor = open_private(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot record to {target}: {error.strerror}", param="record") from None
        return target, io.FileIO(descriptor, "w")
    raise ConfigError(f"cannot record to {path}: it exists, and so do 999 numbered ones", param="record")
