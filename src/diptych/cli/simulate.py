"""``diptych simulate``: the command line of the simulator.

Owns option names, their help and the output in the terminal. Holds no logic that a library user would miss: settings
come from simulation/settings.py, figures from simulation/report/.
"""

import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import Number, Switch, Text, Whole, option
from diptych.cli.output import check_folders, print_tables, progress_bar, write_file
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

if TYPE_CHECKING:
    from diptych.simulation.settings import Settings
    from diptych.simulation.sweep import Run
    from diptych.timeline.lanes import Window

FLEET, WORKLOAD, OBJECTIVES = "Model and fleet", "Workload", "Objectives"
SCHEDULER, MEMORY, OUTPUT = "Scheduler (details; --shape presets them)", "Memory", "Output"
OUTPUTS = ("records", "timeline", "report")  # options that name a file to be written
MAX_REQUESTS_WITH_EVENTS = 200_000  # of a report: above, its charts that need the event log are left out

# Options that are settings, by their dotted path in the file.
PATHS = {
    **{name: name for name in ("model", "hardware", "tensor_parallel", "weight_bits", "quantize")},
    **{name: name for name in ("pipeline_parallel", "expert_parallel", "data_parallel")},
    **{name: name for name in ("kv_bits", "cost", "shape")},
    **{name: name for name in ("replicas", "routing", "disaggregate", "on_failure", "max_model_len", "seed")},
    **{name: f"workload.{name}" for name in ("rate", "num_requests")},
    **{name: f"pools.{name}" for name in ("prefill", "decode", "both", "link", "nics", "hosts")},
    "arrivals": "workload.arrivals.kind",
    "prompt_tokens": "workload.lengths.prompt.mean",
    "output_tokens": "workload.lengths.output.mean",
    "trace": "workload.trace.path",
    "ttft_slo_ms": "slo.ttft_ms",
    "tpot_slo_ms": "slo.tpot_ms",
    **{name: f"scheduler.{name}" for name in ("order", "budget", "max_batched_tokens", "step_target_ms")},
    **{name: f"scheduler.{name}" for name in ("max_num_seqs", "max_waiting", "max_partial_prefills")},
    **{name: f"scheduler.{name}" for name in ("max_long_partial_prefills", "long_prefill_threshold")},
    **{name: f"scheduler.{name}" for name in ("preemption", "preempt_for_priority")},
    **{name: f"memory.{name}" for name in ("block_size", "prefix_cache", "kv_cache_tokens")},
    "kv_cache_memory": "memory.kv_cache_bytes",
    "swap_memory": "memory.swap_bytes",
}


def simulate(
    config: Annotated[Path | None, typer.Argument(help="TOML file of settings; options override it.")] = None,
    model: Annotated[Text, option("Model of the catalogue, or a config.json.", FLEET)] = None,
    hardware: Annotated[Text, option("Device of the catalogue.", FLEET)] = None,
    tensor_parallel: Annotated[Whole, option("Devices that share every matrix.", FLEET)] = None,
    pipeline_parallel: Annotated[Whole, option("Stages that a worker's layers are dealt to.", FLEET)] = None,
    expert_parallel: Annotated[Whole, option("Groups of devices with experts of their own.", FLEET)] = None,
    data_parallel: Annotated[Whole, option("Groups of devices with sequences of their own.", FLEET)] = None,
    weight_bits: Annotated[Whole, option("Bits of a weight on a GPU: 16, 8 or 4.", FLEET)] = None,
    quantize: Annotated[Text, option("Weights on a CPU, as for serve: none, int8 or int4.", FLEET)] = None,
    kv_bits: Annotated[Whole, option("Bits of a cached number: 16 or 8.", FLEET)] = None,
    cost: Annotated[Text, option("Step durations: auto, tables, operators, roofline, or a file.", FLEET)] = None,
    replicas: Annotated[Whole, option("Workers that prefill and decode (without --prefill, --decode).", FLEET)] = None,
    prefill: Annotated[Whole, option("Workers that only prefill (with --decode).", FLEET)] = None,
    decode: Annotated[Whole, option("Workers that decode prompts of the prefill workers.", FLEET)] = None,
    both: Annotated[Whole, option("Workers that do both, beside those.", FLEET)] = None,
    pool: Annotated[list[str] | None, option("NAME=POOL, such as decode=4xa100-80gb:tp2. Repeatable.", FLEET)] = None,
    link: Annotated[Text, option("Link between workers: ib400, eth100, nvlink4, shared_memory, ...", FLEET)] = None,
    nics: Annotated[Whole, option("Network cards of a replica, each with such a link.", FLEET)] = None,
    hosts: Annotated[Whole, option("Hosts whose workers share memory (0: each worker has its own).", FLEET)] = None,
    routing: Annotated[Text, option("kv_aware, least_loaded, power_of_two or round_robin.", FLEET)] = None,
    disaggregate: Annotated[Text, option("Separate prefill from decode: auto, always or never.", FLEET)] = None,
    on_failure: Annotated[Text, option("Requests of a lost worker: retry, local or fail.", FLEET)] = None,
    max_model_len: Annotated[Whole, option("Context length. Default: the model's own.", FLEET)] = None,
    rate: Annotated[Number, option("Requests per second.", WORKLOAD)] = None,
    num_requests: Annotated[Whole, option("Requests in all.", WORKLOAD)] = None,
    arrivals: Annotated[Text, option("poisson, gamma, constant, on_off or closed.", WORKLOAD)] = None,
    prompt_tokens: Annotated[Number, option("Mean length of a prompt.", WORKLOAD)] = None,
    output_tokens: Annotated[Number, option("Mean length of an answer.", WORKLOAD)] = None,
    trace: Annotated[Text, option("azure-conv, mooncake-conversation, or a file.", WORKLOAD)] = None,
    seed: Annotated[Whole, option("Seed of everything random; equal seeds give equal runs.", WORKLOAD)] = None,
    ttft_slo_ms: Annotated[Number, option("Time to first token, for requests that name none.", OBJECTIVES)] = None,
    tpot_slo_ms: Annotated[Number, option("Time per later token, for requests that name none.", OBJECTIVES)] = None,
    shape: Annotated[Text, option("unified: prompts first. chunked: between decodes.", OBJECTIVES)] = None,
    order: Annotated[Text, option("fcfs, priority, shortest or deadline.", SCHEDULER)] = None,
    budget: Annotated[Text, option("What limits a step: whole, fixed or slo.", SCHEDULER)] = None,
    max_batched_tokens: Annotated[Whole, option("Tokens of one step at most.", SCHEDULER)] = None,
    step_target_ms: Annotated[Number, option("Time of one step with --budget slo.", SCHEDULER)] = None,
    max_num_seqs: Annotated[Whole, option("Requests running at once.", SCHEDULER)] = None,
    max_waiting: Annotated[Whole, option("Requests that may wait per worker.", SCHEDULER)] = None,
    max_partial_prefills: Annotated[Whole, option("Prompts partly computed at once (0: no limit).", SCHEDULER)] = None,
    max_long_partial_prefills: Annotated[Whole, option("Of these, long ones (0: no limit).", SCHEDULER)] = None,
    long_prefill_threshold: Annotated[Whole, option("A prompt with more uncached tokens is long.", SCHEDULER)] = None,
    preemption: Annotated[Text, option("When a decode loses its blocks: recompute or swap.", SCHEDULER)] = None,
    preempt_for_priority: Annotated[Switch, option("Displace running requests of lower priority.", SCHEDULER)] = None,
    block_size: Annotated[Whole, option("Tokens per KV block.", MEMORY)] = None,
    kv_cache_tokens: Annotated[Whole, option("KV cache in tokens. Default: what fits.", MEMORY)] = None,
    kv_cache_memory: Annotated[Text, option("KV cache of each GPU, such as 20GiB.", MEMORY)] = None,
    swap_memory: Annotated[Text, option("Host memory for swapped requests.", MEMORY)] = None,
    prefix_cache: Annotated[Switch, option("Reuse the KV of equal prompt beginnings.", MEMORY)] = None,
    assign: Annotated[list[str] | None, option("Any setting: PATH=VALUE. Repeatable.", OUTPUT, "--set")] = None,
    sweep: Annotated[list[str] | None, option("NAME=from:to:step or a,b,c. Twice: a grid.", OUTPUT)] = None,
    workers: Annotated[Whole, option("Processes of a sweep. Default: one per core.", OUTPUT)] = None,
    as_json: Annotated[bool, option("One JSON object on standard output.", OUTPUT, "--json")] = False,
    records: Annotated[Path | None, option("Write one JSON line per request.", OUTPUT)] = None,
    report: Annotated[Path | None, option("Write a page with charts (HTML).", OUTPUT)] = None,
    timeline: Annotated[Path | None, option("Write a trace for Perfetto (JSON).", OUTPUT)] = None,
    timeline_window: Annotated[Text, option("Part of it, in seconds: from:to.", OUTPUT)] = None,
) -> None:
    """Simulate serving: the real scheduler under a virtual clock, on modelled hardware."""
    given = {name: value for name, value in locals().items() if value is not None and value != []}
    given = {name: value for name, value in given.items() if name in PATHS or value is not False}
    with errors_in_words():
        (_simulate_sweep if sweep else _simulate_one)(given)


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the options set, by dotted path. Raises ConfigError."""
    from diptych.serving.link.engine_options import parse_bytes
    from diptych.simulation.pool_settings import parse_pool
    from diptych.simulation.sweep import assigned

    values = {path: given[name] for name, path in PATHS.items() if name in given}
    for name in ("kv_cache_memory", "swap_memory"):
        if name in given:
            values[PATHS[name]] = parse_bytes(given[name], name)
    pools = [parse_pool(text) for text in given.get("pool", ())]
    return values | {f"pools.{name}": pool for name, pool in pools} | assigned(given.get("assign", ()))


def command_line(given: Mapping[str, Any]) -> str:
    """The command that gives the same again."""
    names = {"as_json": "json", "assign": "set"}
    words = ["diptych", "simulate"]
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


def _simulate_one(given: Mapping[str, Any]) -> None:
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import run_here

    if "workers" in given:
        raise ConfigError("workers has no effect without --sweep", param="workers")
    if "timeline_window" in given and "timeline" not in given:
        raise ConfigError("timeline_window has no effect without --timeline", param="timeline_window")
    window = parse_window(given.get("timeline_window"))
    settings = read_settings(given.get("config"), overrides(given))
    check_folders({name: given.get(name) for name in OUTPUTS})
    with progress_bar(quiet="as_json" in given) as show:
        run = run_here(
            settings,
            record_events="timeline" in given or "report" in given,
            most_recorded=None if "timeline" in given else MAX_REQUESTS_WITH_EVENTS,
            progress=partial(show, "simulating"),
        )
    notes = _write_files(run, settings, window, given)
    if "as_json" in given:
        _print_json(run.point)
        return
    from diptych.report.text import class_table, latency_table, pool_table, resource_table, service_table

    point = run.point
    tables = [latency_table(point["summary"])]
    if point["classes"]:
        tables.append(class_table(point["classes"]))
    if len(point["pools"]) > 1:
        tables.append(pool_table(point["pools"]))
    tables += [service_table(point["summary"], point["economy"]), resource_table(point["summary"])]
    took = f"{len(run.result.requests):,} requests simulated in {run.result.wall_s:.2f} s"
    assumed = [f"Assumed: {sentence}" for sentence in run.prepared.assumptions]
    print_tables(tables, [f"Step durations: {point['cost_model']}", *assumed, took, *notes], num_narrow=2)


def _simulate_sweep(given: Mapping[str, Any]) -> None:
    from diptych.report.text import sweep_table
    from diptych.simulation.report.simulation_page import Page, render
    from diptych.simulation.report.titles import sweep_lead, title
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import grid, parse_sweep, run_points

    for name in ("timeline", "timeline_window", "records"):
        if name in given:
            raise ConfigError(f"{name} is for a single run and has no effect with --sweep", param=name)
    workers = given.get("workers", os.cpu_count() or 1)
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1", param="workers")
    settings = read_settings(given.get("config"), overrides(given))
    sweeps = [parse_sweep(text) for text in given["sweep"]]
    points = grid(settings, sweeps)
    check_folders({name: given.get(name) for name in OUTPUTS})
    with progress_bar(quiet="as_json" in given) as show:
        stage = f"{len(points)} points"
        outcomes = run_points(points, num_workers=workers, on_done=lambda done: show(stage, done / len(points)))
    names = [sweep.name for sweep in sweeps]
    notes = [f"Step durations: {outcomes[0]['cost_model']}"]
    if "report" in given:
        page = Page(
            title=title(settings),
            lead=sweep_lead(settings, sweeps),
            command=command_line(given),
            point=outcomes[0],
            sweep_names=names,
            sweep=outcomes,
        )
        notes.append(write_file(given["report"], [render(page).encode()]))
    if "as_json" in given:
        _print_json({"sweep": names, "points": outcomes})
    else:
        print_tables([sweep_table(names, outcomes)], notes)


def _write_files(run: "Run", settings: "Settings", window: "Window", given: Mapping[str, Any]) -> list[str]:
    """Write what was asked for; sentences about it."""
    notes: list[str] = []
    if "records" in given:
        from diptych.simulation.report.outcome import records

        notes.append(write_file(given["records"], records(run.result.requests)))
    if "timeline" in given:
        import msgspec

        from diptych.simulation.report.simulation_trace import trace

        events = run.log or ()
        data, note = trace(events, run.result.duration_ns, faults=run.prepared.scenario.faults, window=window)
        notes.append(write_file(given["timeline"], [msgspec.json.encode(data)]))
        notes += [note] if note else []
    if "report" in given:
        from diptych.simulation.report.simulation_page import render
        from diptych.simulation.report.titles import page

        notes.append(write_file(given["report"], [render(page(run, settings, command_line(given))).encode()]))
        if run.log is None:
            notes.append(
                f"more than {MAX_REQUESTS_WITH_EVENTS:,} requests: the page has no phases and no KV use over time"
            )
    return notes


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
