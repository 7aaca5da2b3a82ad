"""Traces: recorded requests, as compact columns, and how their files are read.

Formats, each plain or gzipped:     azure     CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
mooncake  JSONL: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens of the prompt)     own
CSV or JSONL: arrival_s, prompt_tokens, output_tokens, and, if wanted, kind, priority, ttft_slo_ms,
tpot_slo_ms, session; the first three under any name in OWN, in any case, also a date and time as arrival Lines of an
access log that are of no answer (they have a status, and no tokens) are passed over. Lengths of 0 count as 1: an engine
computes at least one token and answers with at least one. Rows are put in order of arrival; rows of the same time keep
the file's order. Must never draw a random number.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.workload.columns import Row, read_rows
from diptych.workload.description import SloConfig, TraceConfig
from diptych.workload.packed import BUNDLED, read_bundled
from diptych.workload.spec import RequestSpec

MOONCAKE_BLOCK_TOKENS = 512
MARKS = {"azure": "ContextTokens", "mooncake": "input_length", "own": "prompt_tokens"}  # each format's sign
COLUMNS = ("arrival_ns", "prompt_tokens", "output_tokens", "hash_ids", "labels", "sessions")
LENGTHS = {"azure": "GeneratedTokens", "mooncake": "output_length", "own": "output_tokens"}
# Names that other programs have for the columns of a trace of our own; the first is ours.
OWN = {
    "arrival_s": (
        "arrival_s", "arrival", "arrived_at", "arrival_time", "arrival_time_s", "start_time", "timestamp", "time",
    ),
    "prompt_tokens": (
        "prompt_tokens", "num_prompt_tokens", "num_prefill_tokens", "input_tokens", "request_tokens", "prompt_len",
        "input_len", "prompt_length",
    ),
    "output_tokens": (
        "output_tokens", "num_output_tokens", "num_decode_tokens", "completion_tokens", "generated_tokens",
        "generation_tokens", "response_tokens", "output_len", "output_length",
    ),
}  # fmt: skip
LENGTHS_OF_OWN = {name: OWN[name] for name in ("prompt_tokens", "output_tokens")}
DATE = re.compile(r"\d{4}-\d\d-\d\d")
FIRST_DATE_NS = 10**9 * NS_PER_S  # an arrival from here on (2001) is a time since 1970


@dataclass(frozen=True, slots=True)
class Label:
    """What many rows have in common."""

    kind: str = ""
    priority: int = 0
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns; row i is the i-th arrival. Empty ``hash_ids``, ``labels`` or ``sessions``: no row has any.

    num_raised: rows whose prompt or answer had length 0.
    """

    name: str
    arrival_ns: "array[int]"
    prompt_tokens: "array[int]"
    output_tokens: "array[int]"
    hash_ids: Sequence[tuple[int, ...]] = ()
    hash_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    labels: Sequence[Label] = ()
    sessions: "array[int]" = field(default_factory=lambda: array("q"))
    num_raised: int = 0

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __iter__(self) -> Iterator[RequestSpec]:
        plain = Label()
        for row, arrival_ns in enumerate(self.arrival_ns):
            label = self.labels[row] if self.labels else plain
            yield RequestSpec(
                arrival_ns=arrival_ns,
                prompt_tokens=self.prompt_tokens[row],
                output_tokens=self.output_tokens[row],
                hash_ids=self.hash_ids[row] if self.hash_ids else (),
                hash_block_tokens=self.hash_block_tokens,
                priority=label.priority,
                slo=label.slo,
                kind=label.kind,
                session=self.sessions[row] if self.sessions else -1,
            )

    def rows(self, start: int, end: int) -> "Trace":
        """The trace with only these rows."""
        return replace(self, **{name: getattr(self, name)[start:end] for name in COLUMNS})

    def window(self, start_s: float, end_s: float | None) -> "Trace":
        """Rows that arrive in [start_s, end_s), with start_s as time 0. Raises ConfigError when there are none."""
        start_ns = round(start_s * NS_PER_S)
        end_ns = None if end_s is None else round(end_s * NS_PER_S)
        times = self.arrival_ns
        first = bisect_left(times, start_ns)
        last = len(times) if end_ns is None else bisect_left(times, end_ns)
        if first >= last:
            message = f"{self.name} has no requests in [{start_s}, {end_s}) s; it lasts {times[-1] / NS_PER_S:.1f} s"
            raise ConfigError(message, param="start_s")
        part = self.rows(first, last)
        return replace(part, arrival_ns=array("q", (time - start_ns for time in part.arrival_ns)))

    def scaled(self, factor: float) -> "Trace":
        """The same requests, arriving ``factor`` times as fast."""
        return replace(self, arrival_ns=array("q", (int(time / factor) for time in self.arrival_ns)))

    def rate(self) -> float:
        """Requests per second between the first and the last arrival; 0 when that is no time."""
        span = self.arrival_ns[-1] - self.arrival_ns[0]
        return (len(self) - 1) * NS_PER_S / span if span else 0.0

    def with_slo(self, slo: Slo | None) -> "Trace":
        """Rows that have no objectives of their own get these."""
        if slo is None:
            return self
        labels = self.labels or [Label()] * len(self)
        given: dict[Label, Label] = {label: replace(label, slo=label.slo or slo) for label in set(labels)}
        return replace(self, labels=[given[label] for label in labels])


def trace_workload(config: TraceConfig, num_requests: int | None, rate: float | None, slo: SloConfig) -> Trace:
    """A trace, cut to its window, then to ``num_requests``, then brought to the wanted rate. Raises ConfigError."""
    trace = load_trace(config.path, config.format)
    if config.start_s > 0 or config.end_s is not None:
        trace = trace.window(config.start_s, config.end_s)
    if num_requests is not None:
        trace = trace.rows(0, num_requests)
    if rate is not None:
        natural = trace.rate()
        if natural == 0.0:
            raise ConfigError(f"rate is {rate}; all requests of {config.path} arrive at once", param="rate")
        trace = trace.scaled(rate / natural)
    elif config.scale != 1.0:
        trace = trace.scaled(config.scale)
    return trace.with_slo(slo.to_slo())


def load_trace(name: str, form: str = "auto") -> Trace:
    """A trace inside the package by name, or any file. Raises ConfigError naming file, line, field and value."""
    if name in BUNDLED and form == "auto":
        packed = read_bundled(name)
        return Trace(
            name,
            array("q", packed.arrival_ns()),
            array("q", packed.prompt_tokens),
            array("q", packed.output_tokens),
            packed.hash_ids(),
            packed.hash_block_tokens,
        )
    columns = _Columns()
    for row in answered_rows(name):
        if form == "auto":
            form = _form_of(row)
        columns.add(_renamed(row, OWN) if form == "own" else row, form)
    if not columns.rows:
        raise ConfigError(f"{name} has no rows", param="path")
    return columns.to_trace(name, form)


def load_pairs(name: str) -> tuple[Sequence[int], Sequence[int]]:
    """(prompt lengths, output lengths) of a trace; arrival times are not needed. Raises ConfigError."""
    if name in BUNDLED:
        trace = load_trace(name)
        return trace.prompt_tokens, trace.output_tokens
    prompts, outputs, form = array("q"), array("q"), ""
    for row in answered_rows(name):
        form = form or _form_of(row)
        if form == "own":
            row = _renamed(row, LENGTHS_OF_OWN)
        prompts.append(max(1, row.length(MARKS[form])))
        outputs.append(max(1, row.length(LENGTHS[form])))
    if not prompts:
        raise ConfigError(f"{name} has no rows", param="pairs")
    return prompts, outputs


def answered_rows(name: str) -> Iterator[Row]:
    """The rows of a file but those of an access log that are of no answer."""
    for row in read_rows(name):
        if "status" not in row.fields or any(found in row.fields for found in OWN["prompt_tokens"]):
            yield row


def _form_of(row: Row) -> str:
    """azure and mooncake by the name of a column; every other file is one of our own."""
    return next((form for form, mark in MARKS.items() if form != "own" and mark in row.fields), "own")


def _renamed(row: Row, wanted: Mapping[str, Sequence[str]]) -> Row:
    """The row with the columns that are wanted under our names. Raises ConfigError naming those that are missing."""
    if all(column in row.fields for column in wanted):
        return row
    there = {str(name).strip().lower().replace(" ", "_"): name for name in row.fields}
    fields, missing = dict(row.fields), []
    for column, names in wanted.items():
        found = next((there[name] for name in names if name in there), None)
        if found is None:
            missing.append(column)
        elif found != column:
            fields[column] = row.fields[found]
    if missing:
        has = ", ".join(map(str, row.fields))
        raise ConfigError(
            f"{row.path}, line {row.line}: there is no column {' and no '.join(missing)}; it has {has}. A trace needs "
            f"{', '.join(wanted)} (docs/simulation.md has other names for them), or azure's {MARKS['azure']}, or "
            f"mooncake's {MARKS['mooncake']}",
            param="format",
        )
    return replace(row, fields=fields)


class _Columns:
    """A trace in the making."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []  # arrival, prompt, output
        self.hash_ids: list[tuple[int, ...]] = []
        self.labels: list[Label] = []
        self.sessions = array("q")
        self.num_raised = 0
        self._known: dict[tuple[str, int, float, float], Label] = {}

    def add(self, row: Row, form: str) -> None:
        """One more row. Raises ConfigError."""
        prompt, output = row.length(MARKS[form]), row.length(LENGTHS[form])
        self.num_raised += prompt == 0 or output == 0
        if form == "azure":
            arrival = _timestamp_ns(row, "TIMESTAMP")
        elif form == "mooncake":
            arrival = round(row.number("timestamp") * NS_PER_MS)
            self.hash_ids.append(_hash_ids(row))
        else:
            arrival = _arrival_ns(row)
            self._add_own(row)
        self.rows.append((arrival, max(1, prompt), max(1, output)))

    def _add_own(self, row: Row) -> None:
        key = (row.text("kind"), row.whole("priority", 0), row.number("ttft_slo_ms", 0), row.number("tpot_slo_ms", 0))
        label = self._known.get(key)
        if label is None:
            slo = SloConfig(ttft_ms=key[2] or None, tpot_ms=key[3] or None).to_slo()
            label = self._known[key] = Label(key[0], key[1], slo)
        self.labels.append(label)
        self.sessions.append(row.whole("session", -1))

    def to_trace(self, name: str, form: str) -> Trace:
        """The trace in order of arrival; recorded dates start at 0."""
        order = sorted(range(len(self.rows)), key=lambda index: self.rows[index][0])
        first_ns = self.rows[order[0]][0]
        origin = first_ns if form == "azure" or first_ns >= FIRST_DATE_NS else 0
        return Trace(
            name,
            array("q", (self.rows[index][0] - origin for index in order)),
            array("q", (self.rows[index][1] for index in order)),
            array("q", (self.rows[index][2] for index in order)),
            [self.hash_ids[index] for index in order] if self.hash_ids else (),
            labels=[self.labels[index] for index in order] if self.labels else (),
            sessions=array("q", (self.sessions[index] for index in order)) if self.sessions else array("q"),
            num_raised=self.num_raised,
        )


def _arrival_ns(row: Row) -> int:
    """Seconds, or a date and time."""
    value = row.fields["arrival_s"]
    if isinstance(value, str) and DATE.match(value.strip()):
        return _timestamp_ns(row, "arrival_s")
    return round(row.number("arrival_s") * NS_PER_S)


def _hash_ids(row: Row) -> tuple[int, ...]:
    value = row.fields.get("hash_ids", ())
    if not isinstance(value, list | tuple) or not all(type(item) is int and 0 <= item < 2**62 for item in value):
        raise row.error("hash_ids", str(value)[:60], "it must be a list of whole numbers")
    return tuple(value)


def _timestamp_ns(row: Row, name: str) -> int:
    """A date and time, with as many decimals of the second as there are, since 1970."""
    text = row.text(name)
    head, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(head + rest[len(digits) :])
    except ValueError:
        raise row.error(name, text, "it must be a date and time") from None
    since = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * NS_PER_S + int(f"{digits:0<9}"[:9])
