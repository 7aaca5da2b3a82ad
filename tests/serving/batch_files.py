"""Input files and stores of batches, for tests."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.serving.batches.batch_records import Batch, BatchLimits, BatchTerms, StoredFile
from diptych.serving.batches.batch_runner import LineIntake
from diptych.serving.batches.batch_store import BatchStore

ENDPOINT = "/v1/completions"


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": [5, 6], "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **changes}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n" for entry in lines)


def numbered(count: int) -> bytes:
    return jsonl([line(f"id-{number}") for number in range(count)])


def add_file(store: BatchStore, content: bytes, file_id: str = "file-in", tenant: str = "") -> StoredFile:
    store.incoming_path(file_id).write_bytes(content)
    return store.keep(StoredFile(0, file_id, tenant, "batch", "in.jsonl", len(content), 100))


def add_batch(store: BatchStore, name: str = "batch_a", *, window_s: int = 1000, file_id: str = "file-in") -> Batch:
    terms = BatchTerms(file_id, ENDPOINT, f"{window_s}s", window_s)
    return store.add_batch(Batch(0, name, "", terms, "validating", 100, 100 + window_s))


def started(folder: Path, content: bytes, limits: BatchLimits | None = None) -> tuple[BatchStore, Batch]:
    """A store with one batch whose file has been validated."""
    store = BatchStore(folder, limits)
    add_file(store, content)
    batch = add_batch(store)
    intake = LineIntake(store, batch, ("fake",))
    while intake.read_part(101):
        pass
    return store, store.batch(batch.id, "")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()] if path.exists() else []


def check_each_once(store: BatchStore, batch: Batch, expected: Sequence[str]) -> tuple[set[str], set[str]]:
    """The custom_ids in the output and in the error file: each line in one of them, once."""
    good, bad = ([row["custom_id"] for row in rows(store.path(name))] for name in (batch.output_file, batch.error_file))
    assert Counter(good + bad) == Counter(expected)
    assert (len(good), len(bad), len(expected)) == (batch.completed, batch.failed, batch.total)
    return set(good), set(bad)
