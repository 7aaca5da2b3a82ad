"""A ClusterCore that records its inputs and its decisions, so that a later run can be compared with it.

    row = (now, event class, fields)                     an event that brought no commands
    row = (now, event class, fields, digest, summary)    digest: of all commands so far; summary: of these, for people

Rows hold counts, ids, times and block hashes, never tokens. Tenants are renamed and cache salts left out: their names
decide nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Arrived, ClusterEvent, Reported
from diptych.control.commands import Command, End, Prefill
from diptych.control.errors import ErrorRecord
from diptych.control.request import Submission

Row = tuple[Any, ...]

CLUSTER_FORMAT, CLUSTER_VERSION = "diptych cluster recording", 2  # before, a reservation had one block table
DIGEST_BYTES = 12
_OLD_WORDS = {"Evacuate": "GiveWay"}  # of commands that were renamed: digests were made of them
_NO_PEER = ", peer_run=None)"  # the end of a command for which nothing is read from another worker


class RecordingClusterCore(ClusterCore):
    """A ClusterCore that hands (now, event, its commands) to ``write``, which must return at once and must not raise.
    The objects are immutable and may be read later, on another thread. write_light: for rows that refer to nothing
    (None: the same)."""

    def __init__(
        self,
        config: ClusterConfig,
        write: Callable[[Row], None],
        write_light: Callable[[Row], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._write = write
        self._write_light = write_light or write

    def on_event(self, event: ClusterEvent, now: int) -> list[Command]:
        commands = super().on_event(event, now)
        if commands or type(event) is not Reported or event.events:
            self._write((now, event, tuple(commands)))
        else:
            self._write_light((now, event, ()))
        return commands


class CommandChain:
    """The digest of all commands so far: the last one stands for the whole run."""

    def __init__(self) -> None:
        self._digest = b""

    def add(self, commands: Sequence[Command]) -> bytes:
        """The digest after these."""
        text = self._digest + repr([canonical_command(command) for command in commands]).encode()
        self._digest = blake2b(text, digest_size=DIGEST_BYTES).digest()
        return self._digest


def canonical_command(command: Command) -> str:
    """Every field of a command as text; equal if and only if the commands are. One that names no peer reads as it did
    before there were peers, and one with a single block table as it did before there were groups."""
    if isinstance(command, End) and command.error is not None:
        return f"{replace(command, error=None)!r} {ErrorRecord.of(command.error)!r}"
    name = type(command).__name__
    text = _OLD_WORDS.get(name, name) + repr(command)[len(name) :]
    if isinstance(command, Prefill) and len(command.block_tables) <= 1:
        block_ids = command.block_tables[0] if command.block_tables else ()
        before, _, behind = text.rpartition("block_tables=")
        text = f"{before}block_ids={block_ids!r}{behind.removeprefix(repr(command.block_tables))}"
    return text.removesuffix(_NO_PEER) + ")" if text.endswith(_NO_PEER) else text


def commands_summary(commands: Sequence[Command]) -> tuple[tuple[str, int, str], ...]:
    """(class, worker or -1, attempt or request or "") of each."""
    return tuple(
        (
            type(command).__name__,
            getattr(command, "worker", -1),
            getattr(command, "attempt_id", "") or getattr(command, "request_id", ""),
        )
        for command in commands
    )


class RowEncoder:
    """Rows as they are written, in the order of their events."""

    def __init__(self) -> None:
        self._chain = CommandChain()
        self._tenants: dict[str, str] = {"": ""}

    def encode(self, row: Row) -> Row:
        """What RecordingClusterCore wrote, as data."""
        now, event, commands = row
        fields: Any = event
        if isinstance(event, Arrived):
            fields = replace(event, submission=self._anonymous(event.submission))
        elif isinstance(event, Reported):
            fields = (event.worker, [(type(happened).__name__, happened) for happened in event.events], event.load)
        row = (now, type(event).__name__, fields)
        return (*row, self._chain.add(commands), commands_summary(commands)) if commands else row

    def _anonymous(self, submission: Submission) -> Submission:
        options = submission.options
        tenant = self._tenants.setdefault(options.tenant, f"tenant-{len(self._tenants)}")
        return replace(submission, options=replace(options, tenant=tenant, cache_salt=None))


def header(config: ClusterConfig) -> dict[str, Any]:
    """The first line of a recording."""
    return {"format": CLUSTER_FORMAT, "version": CLUSTER_VERSION, "config": config}
