"""Recordings on disk: one JSON line per input of a live worker, written by a thread of its own.

Owns the file. The worker's loop only appends rows to a queue; encoding, hashing and writing happen here. Recording
must never stop or slow serving: when the file cannot be written any more (a full disk, the size limit), it ends with
one line in the log. Read by diptych.simulation.replay.

    {"format": "diptych recording", "version": 2, "diptych": ..., "config": {EngineConfig}}
    ["add", now, ...]                     rows as in diptych.control.engine.recording, where a plan is written as
    ["begin", now, digest, [summary]]     (base64 digest of all plans so far) or ["begin", now] for none
    ["closed", number of rows]            missing when the worker was killed or recording had to stop
"""

import io
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diptych import __version__
from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import (
    FORMAT,
    VERSION,
    DecisionChain,
    RecordingEngineCore,
    Row,
    measured_steps,
    plan_summary,
)
from diptych.control.errors import ConfigError
from diptych.control.step import StepFeatures

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.05
MAX_BYTES = 4 * 2**30


class Recorder:
    """The writer of one recording. ``path`` is taken as it is when free, else with a number behind it: a worker that
    was restarted does not overwrite what the one before it did. Raises ConfigError when nothing can be created."""

    def __init__(self, path: Path, config: EngineConfig, *, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._file = _create(path)
        self.num_rows = 0
        self.stopped_because = ""  # why nothing is written any more
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: deque[Row] = deque()
        self._encoder = msgspec.json.Encoder()
        self._chain = DecisionChain()
        self._closing = threading.Event()
        header = {"format": FORMAT, "version": VERSION, "diptych": __version__, "config": config}
        self._put([self._encoder.encode(header)])
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Take a row; returns at once."""
        if not self.stopped_because:
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
        is_last = False
        while not is_last:
            is_last = self._closing.wait(WRITE_INTERVAL_S)
            lines = []
            while self._rows:
                lines.append(self._encode(self._rows.popleft()))
            if lines:
                self.num_rows += len(lines)
                self._put(lines)

    def _encode(self, row: Row) -> bytes:
        if row[0] == "begin":
            kind, now, output = row
            row = (kind, now) if output is None else (kind, now, self._chain.add(output), plan_summary(output))
        return self._encoder.encode(row)

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
        self.stopped_because = reason
        self._rows.clear()
        logger.error("recording to %s has stopped: %s; serving goes on", self.path, reason)


def make_core(config: EngineConfig, record: str | None) -> EngineCore:
    """A EngineCore, or one that is recorded to the file ``record``. Raises ConfigError when it cannot be created."""
    if record is None:
        return EngineCore(config)
    recorder = Recorder(Path(record), config)
    logger.warning("recording to %s", recorder.path)
    return FileRecordedCore(config, recorder)


class FileRecordedCore(RecordingEngineCore):
    """A recorded core and the file that it is recorded to."""

    def __init__(self, config: EngineConfig, recorder: Recorder) -> None:
        super().__init__(config, recorder.write)
        self.recorder = recorder


def close_recording(core: EngineCore) -> None:
    """End the recording of this core, if it has one."""
    if isinstance(core, FileRecordedCore):
        core.recorder.close()


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """What ran in a recording: the worker's settings, its warm-up and its steps, each with its nanoseconds."""

    config: EngineConfig
    warm_up: list[tuple[StepFeatures, int]]
    steps: list[tuple[StepFeatures, int]]


def read_steps(path: Path) -> RecordedSteps:
    """The steps of a complete recording (see measured_steps)."""
    header, *lines = path.read_bytes().splitlines()
    decoder = msgspec.json.Decoder(list[Any])
    rows = [decoder.decode(line) for line in lines]
    warm_up = [(StepFeatures(*row[1]), row[2]) for row in rows if row[0] == "observe"]
    config = msgspec.convert(msgspec.json.decode(header)["config"], EngineConfig)
    return RecordedSteps(config, warm_up, list(measured_steps(rows)))


def _create(path: Path) -> tuple[Path, io.FileIO]:
    for number in range(1000):
        target = path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot record to {target}: {error.strerror}", param="record") from None
        return target, io.FileIO(descriptor, "w")
    raise ConfigError(f"cannot record to {path}: it exists, and so do 999 numbered ones", param="record")
