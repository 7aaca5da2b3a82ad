"""Validation of a batch: every line of its file is checked before any runs. Reads and writes by way of the store, a
part of the file at a time, so that others get their turns.
"""

from collections.abc import Collection

from diptych.serving import edge_limits
from diptych.serving.batches.batch_records import Batch, LineFault, LinePlace
from diptych.serving.batches.batch_store import BatchStore
from diptych.serving.batches.line_check import check_line

PART_LINES = 500
PART_BYTES = 4 * 2**20


class LineIntake:
    """The lines of one batch, from the beginning: what an earlier attempt has noted is forgotten."""

    def __init__(self, store: BatchStore, batch: Batch, models: Collection[str]) -> None:
        self._store = store
        self._batch = batch
        self._models = models
        self._texts = store.texts(batch.terms.input_file)
        self._num_lines = 0
        self._faults: list[LineFault] = []
        store.tables.forget_lines(batch.number)

    def read_part(self, now: int) -> bool:
        """Check some more lines; False when the batch is in progress, has failed or was cancelled. now: Unix
        seconds."""
        if self._store.batch(self._batch.id, self._batch.tenant).status != "validating":
            return False
        is_over = self._read_part()
        limit = self._store.limits.max_lines
        if self._num_lines > limit:
            self._faults.append(LineFault("too_many_lines", f"the file has more than {limit} lines, the limit"))
            is_over = True
        if not is_over and len(self._faults) < edge_limits.BATCH_FAULTS:
            return True
        if not self._num_lines:
            self._faults.append(LineFault("empty_file", "the file has no lines"))
        tables, number = self._store.tables, self._batch.number
        if self._faults:
            tables.forget_lines(number)
            tables.set_status(self._batch, "failed", now, faults=self._faults[: edge_limits.BATCH_FAULTS])
        else:
            with tables.begin():
                tables.set_total(number, self._num_lines)
                tables.set_status(self._batch, "in_progress", now)
        return False

    def _read_part(self) -> bool:
        """Whether the file is at its end."""
        places: list[LinePlace] = []
        num_bytes, most = 0, self._store.limits.max_line_bytes
        is_over = True
        for offset, text in self._texts:
            self._num_lines += 1
            number = self._num_lines
            if len(text) > most:
                self._faults.append(LineFault("line_too_long", f"the line has more than {most} bytes", number))
            else:
                found = check_line(text, number, self._batch.terms.endpoint, self._models)
                if isinstance(found, LineFault):
                    self._faults.append(found)
                else:
                    places.append(LinePlace(number, offset, len(text), found))
            num_bytes += len(text)
            if number % PART_LINES == 0 or num_bytes >= PART_BYTES or len(self._faults) >= edge_limits.BATCH_FAULTS:
                is_over = False
                break
        with self._store.tables.begin():
            repeated = self._store.tables.add_lines(self._batch.number, places)
        for place in repeated:
            words = f"custom_id {place.custom_id[:80]!r} was given to an earlier line"
            self._faults.append(LineFault("duplicate_custom_id", words, place.number, "custom_id"))
        self._faults.sort(key=lambda fault: fault.line or 0)
        return is_over
