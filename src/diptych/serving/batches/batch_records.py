"""Files, batches and lines as data, with their limits and the JSON that clients see of them. Pure: no I/O, no clock.

    validating -> failed                                        a line is wrong: nothing of it runs
             `--> in_progress -> finalizing -> completed        every line has its row
                            |`---------------> expired          the window is over: lines not done get rows that say so
                             `-> cancelling -> cancelled        the same for lines that a client gave up

Law: when a batch has ended other than by ``failed``, each line has exactly one row, in the output or in the error file.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from diptych.control.errors import ConfigError, InvalidRequestError
from diptych.serving import edge_limits


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """Token usage by the names of completions and embeddings, or by those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None
    input_tokens_details: _TokenDetails | None = None
    output_tokens_details: _TokenDetails | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Reply)


class LineUsage(msgspec.Struct, frozen=True):
    """Tokens. cached: of the input. reasoning: of the output."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "LineUsage") -> "LineUsage":
        return LineUsage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )

    def json(self) -> dict[str, Any]:
        """The usage as clients see it."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


NO_USAGE = LineUsage()


def usage_of(body: bytes) -> LineUsage:
    """What a reply says; zeros where it says nothing."""
    try:
        usage = _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_USAGE
    if usage is None:
        return NO_USAGE
    before = usage.prompt_tokens_details or usage.input_tokens_details or _TokenDetails()
    after = usage.completion_tokens_details or usage.output_tokens_details or _TokenDetails()
    return LineUsage(
        usage.prompt_tokens or usage.input_tokens,
        before.cached_tokens or 0,
        usage.completion_tokens or usage.output_tokens,
        after.reasoning_tokens or 0,
    )


Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
End = Literal["completed", "expired", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_WINDOW = re.compile(r"([1-9][0-9]{0,8})(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """max_file_bytes: of an uploaded file. max_lines: of a batch. max_line_bytes: of one line. max_total_bytes: of all
    files together; no more are taken then. max_files, max_batches: kept; max_open: batches that have not ended."""

    max_file_bytes: int = edge_limits.FILE_BYTES
    max_lines: int = edge_limits.BATCH_LINES
    max_line_bytes: int = edge_limits.BATCH_LINE_BYTES
    max_total_bytes: int = edge_limits.ALL_FILES_BYTES
    max_files: int = edge_limits.FILES
    max_batches: int = edge_limits.BATCHES
    max_open: int = edge_limits.OPEN_BATCHES

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. number: in the order of creation. Times are Unix seconds; expires_s None: it is kept until deleted."""

    number: int
    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int | None = None

    def json(self) -> dict[str, Any]:
        """The file as clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a file cannot be run. line: from 1 (None: of the whole file)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def json(self) -> dict[str, Any]:
        """The fault as clients see it."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """What a client asks for. window_s: after its creation a batch expires. output_expiry_s: for how long its files are
    kept (None: until deleted). key: the name whose key created the batch ("": none that has a name)."""

    input_file: str
    endpoint: str
    window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expiry_s: int | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. number: in the order of creation. times: when it reached a status, such as {"failed_at": 12}. end: what
    ``finalizing`` or ``cancelling`` leads to. output_bytes, error_bytes: of the rows whose lines are marked as done;
    usage: of these lines."""

    number: int
    id: str
    tenant: str
    terms: BatchTerms
    status: Status
    created_s: int
    expires_s: int
    end: End | None = None
    times: dict[str, int] = field(default_factory=dict)
    faults: tuple[LineFault, ...] = ()
    output_bytes: int = 0
    error_bytes: int = 0
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: LineUsage = NO_USAGE

    @property
    def output_file(self) -> str:
        """The id of its output file, which exists when it has ended and some line succeeded."""
        return f"file-{self.id.removeprefix('batch_')}out"

    @property
    def error_file(self) -> str:
        """The id of its error file, which exists when it has ended and some line failed."""
        return f"file-{self.id.removeprefix('batch_')}err"

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.status in OPEN

    def json(self) -> dict[str, Any]:
        """The batch as clients see it."""
        has_files = not self.is_open
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.terms.endpoint,
            "errors": {"object": "list", "data": [fault.json() for fault in self.faults]} if self.faults else None,
            "input_file_id": self.terms.input_file,
            "completion_window": self.terms.window,
            "status": self.status,
            "output_file_id": self.output_file if has_files and self.output_bytes else None,
            "error_file_id": self.error_file if has_files and self.error_bytes else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.json(),
            "metadata": self.terms.metadata,
        }


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line is: its number from 1, the first byte of it in its file, and how many it has."""

    number: int
    offset: int
    num_bytes: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line is done. row: for its file, with the newline. is_success: it goes to the output file."""

    batch: int
    line: int
    row: bytes
    is_success: bool
    usage: LineUsage = NO_USAGE


def window_seconds(window: str) -> int:
    """The length of a completion window such as 24h. Raises InvalidRequestError."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= edge_limits.BATCH_WINDOW_S:
        message = f"completion_window is {window[:40]!r}; expected a time such as 24h, 90m or 7d, at most 30d"
        raise InvalidRequestError(message, param="completion_window")
    return seconds
