"""``diptych simulate``: the command line of the simulator.

What the options ask for, and the output in the terminal; the options themselves are in simulate_options.py. Holds no
logic that a library user would miss: settings come from simulation/settings.py, figures from simulation/report/.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import GB, takes, with_objectives
from diptych.cli.output import check_folders, print_tables, progress_bar, write_file
from diptych.cli.simulate_options import PATHS, SimulateOptions
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

if TYPE_CHECKING:
    from diptych.simulation.search_runs import Asked, Question
    from diptych.simulation.settings import Settings
    from diptych.simulation.sweep import Run
    from diptych.timeline.lanes import Window

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
OUTPUTS = ("records", "timeline", "report")  # options that name a file to be written
SEARCHES: "Mapping[str, Asked]" = {"find_goodput": "goodput", "fewest_devices": "devices"}
ONLY_WITH = {  # options that mean something only with others
    "attainment": ("find_goodput", "fewest_devices"),
    "probe": ("find_goodput", "fewest_devices"),
    "tolerance": ("find_goodput",),
}
MAX_REQUESTS_WITH_EVENTS = 200_000  # of a report: above, its charts that need the event log are left out


@takes(SimulateOptions)
def simulate(options: dict[str, Any]) -> None:
    """Simulate serving: the real scheduler under a virtual clock, on modelled hardware."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    given = {name: value for name, value in given.items() if name in PATHS or value is not False}
    with errors_in_words():
        if "list_" in given:
            from diptych.cli.catalogue_list import listed

            print_tables([listed(given["list_"])], [])
            return
        given = with_objectives(given)
        asked = question(given)
        if "sweep" in given:
            _simulate_sweep(given, asked)
        elif asked:
            _answer(given, asked)
        else:
            _simulate_one(given)


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options set, by dotted path. Raises ConfigError."""
    from diptych.serving.link.engine_options import parse_bytes
    from diptych.simulation.pool_settings import parse_pool
    from diptych.simulation.sweep import assigned

    values = {path: given[name] for name, path in PATHS.items() if name in given}
    if "kv_cache_memory" in given:
        values[PATHS["kv_cache_memory"]] = parse_bytes(given["kv_cache_memory"], "kv_cache_memory")
    for name in ("kv_host_gb", "kv_disk_gb"):
        if name in given:
            values[PATHS[name]] = int(given[name] * GB)
    pools = [parse_pool(text) for text in given.get("pool", ())]
    return values | {f"pools.{name}": pool for name, pool in pools} | assigned(given.get("assign", ()))


def command_line(given: Mapping[str, Any], command: str = "simulate") -> str:
    """The command that gives the same again."""
    names = {"as_json": "json", "assign": "set"}
    words = ["diptych", command]
    if "config" in given:
        words.append(str(given["config"]))
    for name, value in given.items():
        if name == "config":
            continue
        option = "--" + names.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [
                word
                for item in (value if isinstance(value, list) else [value])
                for word in (option, str(item).removesuffix(".0"))
            ]
    return shlex.join(words)


def question(given: Mapping[str, Any]) -> "Question | None":
    """What the options ask to be searched; None: nothing. Raises ConfigError."""
    from diptych.bench.option_grammar import duration_s
    from diptych.search.goodput_search import SearchConfig
    from diptych.simulation.search_runs import Question

    modes = [name for name in SEARCHES if name in given]
    if len(modes) > 1:
        raise ConfigError(f"{modes[0]} and {modes[1]} are two searches; give only one of them", param=modes[1])
    for name, wanted in ONLY_WITH.items():
        if name in given and not set(wanted) & set(modes):
            options = " or ".join(f"--{mode.replace('_', '-')}" for mode in wanted)
            raise ConfigError(f"{name} has no effect without {options}", param=name)
    if not modes:
        return None
    return Question(
        asked=SEARCHES[modes[0]],
        search=SearchConfig(**{name: given[name] for name in ("attainment", "tolerance") if name in given}),
        probe_s=duration_s(given["probe"], "probe") if "probe" in given else None,
    )


def _answer(given: Mapping[str, Any], asked: "Question") -> None:
    """One search."""
    from diptych.report.text import goodput_table, latency_table, runs_table, service_table
    from diptych.simulation.report.simulation_report import (
        Page,
        cost_notes,
        fleet_search_tables,
        render,
        search_lead,
        simulated_table,
        title,
    )
    from diptych.simulation.search_runs import answer
    from diptych.simulation.settings import read_settings

    _only_single(given, "a search")
    settings = read_settings(given.get("config"), overrides(given))
    check_folders({name: given.get(name) for name in OUTPUTS})
    with progress_bar(quiet="as_json" in given, announcement=_announcement(settings, asked)) as show:
        found = answer(settings, asked, on_probe=show, keeps_done=True)
    cut_off = [] if found.is_complete else [f"interrupted after {_runs(found.probes)}; the search is not over"]
    lead = search_lead(settings, asked.asked, found.result, is_complete=found.is_complete)
    point = found.best.point
    data = {
        "mode": next(name for name, kind in SEARCHES.items() if kind == asked.asked),
        "is_complete": found.is_complete,
        asked.asked: found.result,
        "points": found.probes,
        "best": point,
    }
    notes = cost_notes([point])
    if "report" in given:
        page = Page(
            title=title(settings),
            lead=lead,
            command=command_line(given),
            point=point,
            result=found.best.result,
            search=data,
        )
        notes.append(write_file(given["report"], [render(page).encode()]))
    if "as_json" in given:
        _print_json(data)
    else:
        if asked.asked == "goodput":
            tables = [runs_table(found.probes), goodput_table(found.result)]
        else:
            tables = fleet_search_tables(found.result, found.probes)
        tables.append(latency_table(point["summary"]))
        tables += [simulated_table(point), service_table(point["summary"], point["economy"])]
        print_tables(tables, notes, lead=[f"{title(settings)}. {lead}"], failures=cut_off, num_narrow=2)
    _end_if_cut(cut_off)
    _fail_if_all_failed([point])


def _only_single(given: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError for options that mean something for a single run alone."""
    for name in ("timeline", "timeline_window", "records"):
        if name in given:
            raise ConfigError(f"{name} is for a single run and has no effect with {what}", param=name)


def _simulate_one(given: Mapping[str, Any]) -> None:
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import run_here

    if "processes" in given:
        raise ConfigError("processes has no effect without --sweep", param="processes")
    if "timeline_window" in given and "timeline" not in given:
        raise ConfigError("timeline_window has no effect without --timeline", param="timeline_window")
    window = parse_window(given.get("timeline_window"))
    settings = read_settings(given.get("config"), overrides(given))
    check_folders({name: given.get(name) for name in OUTPUTS})
    with progress_bar(quiet="as_json" in given, announcement=_announcement(settings)) as show:
        run = run_here(
            settings,
            record_events="timeline" in given or "report" in given,
            most_recorded=None if "timeline" in given else MAX_REQUESTS_WITH_EVENTS,
            progress=partial(show, "simulating"),
        )
    notes = _write_files(run, settings, window, given)
    if "as_json" in given:
        _print_json(run.point)
        _fail_if_all_failed([run.point])
        return
    from diptych.report.text import class_table, latency_table, pool_table, resource_table, service_table
    from diptych.simulation.report.simulation_report import cost_notes, lead, misses_table, simulated_table, title

    point = run.point
    tables = [latency_table(point["summary"])]
    if point["classes"]:
        tables.append(class_table(point["classes"]))
    if len(point["pools"]) > 1:
        tables.append(pool_table(point["pools"]))
    tables += [simulated_table(point), service_table(point["summary"], point["economy"])]
    tables.append(resource_table(point["summary"]))
    if "misses" in point:
        tables.append(misses_table(point["misses"]))
    took = f"{len(run.result.requests):,} requests simulated in {run.result.wall_s:.2f} s"
    what = [f"{title(settings)}. {lead(run, settings)}"]
    print_tables(tables, [*cost_notes([point]), took, *notes], lead=what, failures=_failure_notes(point), num_narrow=3)
    _fail_if_all_failed([point])


def _simulate_sweep(given: Mapping[str, Any], asked: "Question | None") -> None:
    from diptych.simulation.report.simulation_report import Page, cost_notes, render, sweep_lead, sweep_tables, title
    from diptych.simulation.search_runs import answer_points
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import grid, parse_sweep, run_points

    _only_single(given, "--sweep")
    num_processes = given.get("processes", os.cpu_count() or 1)
    if num_processes < 1:
        raise ConfigError(f"processes is {num_processes}; it must be at least 1", param="processes")
    settings = read_settings(given.get("config"), overrides(given))
    sweeps = [parse_sweep(text) for text in given["sweep"]]
    points = grid(settings, sweeps)
    check_folders({name: given.get(name) for name in OUTPUTS})
    with progress_bar(quiet="as_json" in given) as show:
        stage = f"{len(points)} points"
        run = run_points if asked is None else partial(answer_points, question=asked)
        outcomes = run(
            points, num_workers=num_processes, on_done=lambda done: show(stage, done / len(points)), keeps_done=True
        )
    cut_off = _cut_off(len(outcomes), len(points))
    names = [sweep.name for sweep in sweeps]
    notes = cost_notes(outcomes)
    if "report" in given:
        page = Page(
            title=title(settings, sweeps),
            lead=sweep_lead(settings, sweeps),
            command=command_line(given),
            point=outcomes[0],
            sweep_names=names,
            sweep=outcomes,
            asked=None if asked is None else asked.asked,
        )
        notes.append(write_file(given["report"], [render(page).encode()]))
    if "as_json" in given:
        _print_json({"sweep": names, "points": outcomes})
    else:
        tables = sweep_tables(names, outcomes, None if asked is None else asked.asked)
        lead = [f"{title(settings, sweeps)}. {sweep_lead(settings, sweeps)}"]
        print_tables(tables, notes, lead=lead, failures=[*cut_off, *_failed_in_sweep(names, outcomes)])
    _end_if_cut(cut_off)
    _fail_if_all_failed(outcomes)


def _write_files(run: "Run", settings: "Settings", window: "Window", given: Mapping[str, Any]) -> list[str]:
    """Write what was asked for; sentences about it."""
    notes: list[str] = []
    if "records" in given:
        from diptych.simulation.report.outcome import records

        notes.append(write_file(given["records"], records(run.result.requests)))
    if "timeline" in given:
        import msgspec

        from diptych.simulation.event_log import trace

        events = run.log or ()
        data, note = trace(events, run.result.duration_ns, faults=run.prepared.scenario.faults, window=window)
        notes.append(write_file(given["timeline"], [msgspec.json.encode(data)]))
        notes += [note] if note else []
    if "report" in given:
        from diptych.simulation.report.simulation_report import page, render

        notes.append(write_file(given["report"], [render(page(run, settings, command_line(given))).encode()]))
        if run.log is None:
            notes.append(
                f"more than {MAX_REQUESTS_WITH_EVENTS:,} requests: the page has no phases and no KV use over time"
            )
    return notes


def _failure_notes(point: Mapping[str, Any]) -> list[str]:
    """How many requests failed, for each reason with an example."""
    from diptych.report.text import failure

    summary, messages = point["summary"], point["failure_messages"]
    whole = f"of {summary['num_requests']:,} requests failed"
    return [
        f"{count:,} {whole}: {failure(reason)}" + (f" (such as: {messages[reason]})" if reason in messages else "")
        for reason, count in summary["failures"].items()
    ]


def _failed_in_sweep(names: Sequence[str], outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The most frequent reason of the point at which most requests failed."""
    worst = max(outcomes, key=lambda point: point["summary"]["num_failed"])
    if not worst["summary"]["num_failed"]:
        return []
    where = ", ".join(f"{name}={worst['values'][name]}" for name in names)
    return [f"at {where}: {line}" for line in _failure_notes(worst)[:1]]


def _cut_off(num_done: int, num_points: int) -> list[str]:
    """What to say when a sweep was interrupted."""
    return [f"interrupted: {num_done} of {num_points} points are done"] if num_done < num_points else []


def _runs(probes: Sequence[Any]) -> str:
    return f"{len(probes)} run{'s' if len(probes) != 1 else ''}"


def _end_if_cut(cut_off: Sequence[str]) -> None:
    """End as an interrupt does, with what was said of it."""
    if cut_off:
        print(f"error: {cut_off[0]}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _announcement(settings: "Settings", asked: "Question | None" = None) -> str:
    """What is about to be simulated."""
    from diptych.simulation.report.simulation_report import title
    from diptych.workload.workload_words import workload_words

    varied = {"goodput": ", at several rates", "devices": ", on several fleets"}
    words = workload_words(settings.workload, has_count=asked is None) + (varied[asked.asked] if asked else "")
    return f"simulating {words}: {title(settings)}"


def _fail_if_all_failed(points: Sequence[Mapping[str, Any]]) -> None:
    """What was simulated is shown all the same. Raises ConfigError when no request of any point was answered."""
    if any(point["summary"]["num_completed"] for point in points):
        return
    reasons = dict.fromkeys(reason for point in points for reason in point["summary"]["failures"])
    messages = [message for point in points for message in point["failure_messages"].values()]
    raise ConfigError(": ".join([f"every request failed ({', '.join(reasons)})", *messages[:1]]), param="workload")


def parse_window(text: str | None) -> "Window":
    """``from:to`` in seconds. Raises ConfigError."""
    from diptych.timeline.lanes import Window

    if text is None:
        return Window()
    first, colon, last = text.partition(":")
    try:
        start, end = float(first or 0), float(last) if last else 2.0**33
    except ValueError:
        start, end = 0.0, -1.0
    if not colon or not 0 <= start < end <= 2.0**33:
        raise ConfigError(
            f"timeline_window is {text!r}; expected from:to in seconds, such as 10:20", param="timeline_window"
        )
    return Window(round(start * NS_PER_S), round(end * NS_PER_S))


def _print_json(data: Any) -> None:
    import msgspec

    print(msgspec.json.encode(data).decode())
