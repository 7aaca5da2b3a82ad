"""Many points of one scenario: what to vary, and running the points in parallel processes.

Owns the grammar of ``--sweep`` and the order of the points. Every point is simulated from its settings alone, with the
same seed, so that results do not depend on how many processes there are.
"""

import multiprocessing
import signal
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from itertools import product
from typing import Any

import msgspec

from diptych.control.errors import ConfigError, DiptychError
from diptych.simulation.event_log import EventLog
from diptych.simulation.hardware import hardware_fields
from diptych.simulation.pool_settings import NETWORK, pool_path
from diptych.simulation.prepare import Prepared, prepare, scheduler_of
from diptych.simulation.report.outcome import outcome, workload_figures
from diptych.simulation.results import SimulationResult
from diptych.simulation.run import MissLimit, Progress, simulate_with_log
from diptych.simulation.settings import Settings, plain, settings_from, with_value
from diptych.workload.spec import ClosedLoop

MAX_POINTS = 1000
ROUNDING = 1e-9
ALIASES = {"rate": "workload.rate", "chunk": "scheduler.max_batched_tokens"}

Value = int | float | str
Task = Callable[[bytes], bytes]  # one point, from JSON to JSON; a function of a module, so that processes find it


@dataclass(frozen=True, slots=True)
class Sweep:
    """One setting and the values it takes. ``name``: as it was given; ``path``: the dotted path in the settings."""

    name: str
    path: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation that was run here, in this process."""

    point: dict[str, Any]  # see outcome()
    result: SimulationResult
    log: EventLog | None
    prepared: Prepared


def parse_sweep(text: str) -> Sweep:
    """``rate=1:20``, ``rate=0.5:4:0.5`` (both ends belong to it) or ``chunk=256,512``; any path of the settings.

    Raises ConfigError.
    """
    name, equals, listed = text.partition("=")
    if not equals or not name or not listed:
        raise ConfigError(f"sweep is {text!r}; expected name=from:to, name=from:to:step or name=a,b,c", param="sweep")
    values = _range(text, listed) if ":" in listed else tuple(parse_value(item) for item in listed.split(","))
    if len(set(values)) != len(values):
        raise ConfigError(f"sweep is {text!r}; a value comes twice", param="sweep")
    return Sweep(name, setting_path(name), values)


def setting_path(name: str) -> str:
    """The dotted path of a setting that was named by its path, by a short name or, where there is only one setting of
    that name, by its last part. Raises ConfigError."""
    if name in ALIASES:
        return ALIASES[name]
    if path := pool_path(name):
        return path
    paths = tuple(_paths(Settings))
    matches = [path for path in paths if path == name] or [path for path in paths if path.split(".")[-1] == name]
    if len(matches) > 1:
        raise ConfigError(f"{name} is the name of several settings; one of {', '.join(matches)}", param=name)
    if not matches:
        last = {path.split(".")[-1]: path for path in paths}
        near = get_close_matches(name, paths) or [last[key] for key in get_close_matches(name.split(".")[-1], last)]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; diptych simulate --list settings lists them"
        raise ConfigError(f"{name} is not a setting{hint}", param=name)
    return matches[0]


def setting_defaults() -> dict[str, Any]:
    """Every setting by its dotted path, with its default: those that ``--set`` and ``--sweep`` take."""
    whole = plain(Settings())
    found: dict[str, Any] = {}
    for path in _paths(Settings):
        value: Any = whole
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        found[path] = value
    return found


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """What PATH=VALUE settings say, by dotted path; a value that is no TOML is a text. Raises ConfigError."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"set is {assignment!r}; expected PATH=VALUE", param="set")
        try:
            values[setting_path(name)] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[setting_path(name)] = value
    return values


def parse_value(text: str) -> Value:
    """A number where it is one, else the word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:  # the next kind, and at the end a word
            continue
    return text.strip()


def grid(settings: Settings, sweeps: Sequence[Sweep]) -> list[tuple[dict[str, Value], Settings]]:
    """Every combination, the last sweep varying fastest, as (values by name, settings). Raises ConfigError for the
    first that is impossible, and for more than MAX_POINTS."""
    count = 1
    for sweep in sweeps:
        count *= len(sweep.values)
    if count > MAX_POINTS:
        raise ConfigError(f"the sweep has {count:,} points; at most {MAX_POINTS:,}", param="sweep")
    if len({sweep.path for sweep in sweeps}) != len(sweeps):
        raise ConfigError(f"{sweeps[-1].name} is swept twice", param="sweep")
    points = []
    for combination in product(*(sweep.values for sweep in sweeps)):
        raw = plain(settings)
        for sweep, value in zip(sweeps, combination, strict=True):
            raw = with_value(raw, sweep.path, value)
        changed = settings_from(raw)
        scheduler_of(changed)
        points.append(({sweep.name: value for sweep, value in zip(sweeps, combination, strict=True)}, changed))
    return points


def run_here(
    settings: Settings,
    *,
    values: Mapping[str, Value] | None = None,
    record_events: bool = False,
    most_recorded: int | None = None,
    progress: Progress | None = None,
    attainment: float | None = None,
) -> Run:
    """Simulate one point in this process; the arguments are those of ``prepare``. attainment: end the run of an open
    loop once this share of requests in time cannot be reached. Raises ConfigError."""
    prepared = prepare(settings, record_events=record_events, most_recorded=most_recorded)
    workload = prepared.scenario.workload
    limit = None
    if attainment is not None and not isinstance(workload, ClosedLoop):
        limit = MissLimit(int((1 - attainment) * len(workload) + ROUNDING))
    result, log = simulate_with_log(prepared.scenario, progress, limit)
    point = outcome(
        result,
        settings=plain(settings),
        cost_model=prepared.cost_model,
        pools=prepared.pools,
        assumptions=prepared.assumptions,
        workload=None if isinstance(workload, ClosedLoop) else workload_figures(workload),
        values=values,
    )
    return Run(point, result, log, prepared)


def run_points(
    points: Sequence[tuple[Mapping[str, Value], Settings]],
    *,
    num_workers: int,
    on_done: Callable[[int], None] | None = None,
    keeps_done: bool = False,
) -> list[dict[str, Any]]:
    """The outcome of every point, in their order, from ``num_workers`` processes. Raises ConfigError.

    on_done: called with the number of points that are done. keeps_done: see run_tasks.
    """
    return run_tasks(_run_task, points, num_workers=num_workers, on_done=on_done, keeps_done=keeps_done)


def run_tasks(
    task: Task,
    points: Sequence[tuple[Mapping[str, Value], Settings]],
    *extras: Any,
    num_workers: int,
    on_done: Callable[[int], None] | None = None,
    keeps_done: bool = False,
) -> list[dict[str, Any]]:
    """What a task makes of every point, in their order, from ``num_workers`` processes. extras: plain data that each
    task gets after the values and the settings of its point. keeps_done: an interrupt (Ctrl-C) ends the work and gives
    the points that are done, if any. Raises ConfigError."""
    with TaskPool(min(num_workers, len(points))) as pool:
        return pool.run(task, points, *extras, on_done=on_done, keeps_done=keeps_done)


class TaskPool:
    """Processes that carry out tasks, started with the first that need them and kept until ``close``: to start one
    takes longer than many a simulation. One process: this one."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "TaskPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def run(
        self,
        task: Task,
        points: Sequence[tuple[Mapping[str, Value], Settings]],
        *extras: Any,
        on_done: Callable[[int], None] | None = None,
        keeps_done: bool = False,
    ) -> list[dict[str, Any]]:
        """As ``run_tasks``."""
        tasks = [msgspec.json.encode((values, plain(settings), *extras)) for values, settings in points]
        if self._num_workers <= 1 or len(tasks) <= 1:
            return _collect(map(task, tasks), on_done, keeps_done)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._num_workers, mp_context=context, initializer=_end_silently)
        futures = [self._pool.submit(task, encoded) for encoded in tasks]
        try:
            return _collect((future.result() for future in futures), on_done)
        except BrokenProcessPool:
            self._abandon()
            message = "a process of the sweep was killed, probably out of memory; try fewer --processes"
            raise DiptychError(message, param="processes") from None
        except BaseException as error:
            self._abandon()
            done = [future for future in futures if future.done() and not future.cancelled() and not future.exception()]
            if keeps_done and done and isinstance(error, KeyboardInterrupt):
                return [msgspec.json.decode(future.result()) for future in done]
            raise

    def _abandon(self) -> None:
        """Forget what is to be done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


@contextmanager
def errors_at(values: Mapping[str, Any]) -> Iterator[None]:
    """A DiptychError says at which values of the sweep it happened."""
    try:
        yield
    except DiptychError as error:
        where = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigError(f"at {where}: {error.message}") from None


def _end_silently() -> None:
    """Ctrl-C ends a worker without a traceback; the parent says what is to be said."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_task(task: bytes) -> bytes:
    """One point, from JSON to JSON. Raises ConfigError saying at which values."""
    values, raw = msgspec.json.decode(task)
    with errors_at(values):
        return msgspec.json.encode(run_here(settings_from(raw), values=values).point)


def _collect(
    answers: Iterable[bytes], on_done: Callable[[int], None] | None, keeps_done: bool = False
) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = []
    try:
        for answer in answers:
            outcomes.append(msgspec.json.decode(answer))
            if on_done is not None:
                on_done(len(outcomes))
    except KeyboardInterrupt:
        if not keeps_done or not outcomes:
            raise
    return outcomes


def _range(text: str, listed: str) -> tuple[Value, ...]:
    parts = listed.split(":")
    try:
        numbers = [Decimal(part) for part in parts]
    except InvalidOperation:
        numbers = []
    if len(numbers) not in (2, 3) or not all(number.is_finite() for number in numbers):
        raise ConfigError(f"sweep is {text!r}; a range is from:to or from:to:step, in numbers", param="sweep")
    first, last, step = (*numbers, Decimal(1))[:3]
    if step <= 0 or last < first:
        raise ConfigError(f"sweep is {text!r}; a range ascends by a step above 0", param="sweep")
    count = int((last - first) / step) + 1
    if count > MAX_POINTS:
        raise ConfigError(f"sweep is {text!r}: {count:,} points; at most {MAX_POINTS:,}", param="sweep")
    steps = (first + index * step for index in range(count))
    return tuple(int(number) if number == number.to_integral_value() else float(number) for number in steps)


def _paths(struct: type, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings but those inside lists and those of pools (see pool_path)."""
    for field in msgspec.inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        if prefix == "pools." and field.name not in NETWORK:
            continue
        if field.name == "hardware":
            yield from (f"{prefix}hardware.{name}" for name in hardware_fields())
        kinds = getattr(field.type, "types", (field.type,))
        inner = [kind.cls for kind in kinds if hasattr(kind, "cls") and hasattr(kind, "fields")]
        if inner:
            for inner_struct in inner:
                yield from _paths(inner_struct, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"
