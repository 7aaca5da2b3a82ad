"""``diptych plan``: which fleet to run for a load, by simulating the candidates.

What the options ask for, and the output in the terminal; the search is in advisor/.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.launch_commands import launch_command
from diptych.cli.options import Number, Switch, Text, Whole, option, takes, with_objectives
from diptych.cli.output import check_folders, print_tables, progress_bar, write_file
from diptych.cli.simulate import INTERRUPTED, command_line
from diptych.cli.simulate_options import PATHS
from diptych.control.errors import ConfigError

if TYPE_CHECKING:
    from diptych.advisor.device_layout import LayoutName, PlannedDevice, WorkerKind
    from diptych.advisor.layout_space import LayoutSpace
    from diptych.advisor.plan_search import CapacityPlan, MeasuredLayout, PlanQuestion, PlanSearch
    from diptych.simulation.settings import Settings

FLEET, BUDGET, SEARCH, WORKLOAD = "Model and devices", "Budget (without: the smallest fleet)", "Search", "Workload"
OBJECTIVES, OUTPUT = "Objectives", "Output"


class PlanOptions:
    """One attribute each; options.py makes a command of them."""

    config: Annotated[Path | None, typer.Argument(help="TOML file of settings, as for simulate. Default: none.")] = None
    model: Annotated[Text, option("Model of the catalogue, or a config.json. Default: that of CONFIG.", FLEET)] = None
    hardware: Annotated[
        list[str] | None,
        option("Device that may be used; several may be mixed. Repeatable. Default: that of CONFIG.", FLEET),
    ] = None
    prefill_hardware: Annotated[
        list[str] | None, option("Device that may be used for prefill alone. Repeatable. Default: --hardware.", FLEET)
    ] = None
    decode_hardware: Annotated[
        list[str] | None, option("Device that may be used for decode alone. Repeatable. Default: --hardware.", FLEET)
    ] = None
    parallel: Annotated[
        Text, option("Parallelism of a worker to try: tp1,tp2,tp4-pp2. Default: tp1 to tp8.", FLEET)
    ] = None
    weight_bits: Annotated[Whole, option(shared_help.WEIGHT_BITS, FLEET)] = None
    quantize: Annotated[Text, option("Weights on a CPU: none, int8 or int4. Default: none.", FLEET)] = None
    kv_bits: Annotated[Whole, option(shared_help.KV_BITS, FLEET)] = None
    cost: Annotated[Text, option(shared_help.COST, FLEET)] = None
    force_calibration: Annotated[Switch, option(shared_help.FORCE_CALIBRATION, FLEET)] = None
    engine: Annotated[Text, option(shared_help.SIMULATED_ENGINE, FLEET)] = None
    link: Annotated[Text, option("Link between workers: ib400, eth100, nvlink4, ... Default: ib400.", FLEET)] = None
    nics: Annotated[Whole, option("Network cards of a worker, each with a link of its own. Default: 1.", FLEET)] = None
    devices: Annotated[Whole, option("Most devices of the fleet. Default: no budget.", BUDGET)] = None
    usd_per_hour: Annotated[
        Number, option("Highest price of the fleet in US dollars per hour. Default: no budget.", BUDGET)
    ] = None
    kilowatts: Annotated[
        Number, option("Most rated power of the fleet's devices in kilowatts. Default: no budget.", BUDGET)
    ] = None
    shapes: Annotated[Text, option("Shapes of a fleet to try: unified,chunked,split,mixed. Default: all.", SEARCH)] = (
        None
    )
    placement: Annotated[
        Text, option("Search of whole fleets (joint), or DistServe's (per-phase). Default: joint.", SEARCH)
    ] = None
    kv_host_gb: Annotated[Text, option("Host memory sizes to value, in GB: 16,64. Default: none.", SEARCH)] = None
    kv_disk_gb: Annotated[Text, option("Disk sizes to value, in GB: 100,1000. Default: none.", SEARCH)] = None
    processes: Annotated[Whole, option("Processes that simulate. Default: one per core.", SEARCH)] = None
    rate: Annotated[Number, option(shared_help.RATE, WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option(shared_help.PROMPT_TOKENS, WORKLOAD)] = None
    output_tokens: Annotated[Number, option(shared_help.OUTPUT_TOKENS, WORKLOAD)] = None
    arrivals: Annotated[
        Text, option("Arrival process: poisson, gamma, constant or on_off. Default: poisson.", WORKLOAD)
    ] = None
    trace: Annotated[Text, option(shared_help.TRACE, WORKLOAD)] = None
    num_requests: Annotated[Whole, option("Fewest requests of a run. Default: 1000, or the trace.", WORKLOAD)] = None
    seed: Annotated[Whole, option("Seed of everything random. Default: 0.", WORKLOAD)] = None
    slo: Annotated[Text, option(shared_help.SLO, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option("TTFT objective in milliseconds. Default: none.", OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option("TPOT objective in milliseconds. Default: none.", OBJECTIVES)] = None
    attainment: Annotated[Number, option(shared_help.ATTAINMENT, OBJECTIVES)] = None
    tolerance: Annotated[Number, option("Relative precision of the highest rates. Default: 0.05.", OBJECTIVES)] = None
    probe: Annotated[Text, option("Shortest run of a simulation. Default: 60s.", OBJECTIVES)] = None
    assign: Annotated[list[str] | None, option(shared_help.SETTING, OUTPUT, "--set")] = None
    as_json: Annotated[bool, option(shared_help.JSON_OBJECT, OUTPUT, "--json")] = False
    report: Annotated[Path | None, option(shared_help.REPORT, OUTPUT)] = None


DEFAULT_PARALLEL = "tp1,tp2,tp4,tp8"
PLACEMENTS = ("joint", "per-phase")
PASSED_ON = (  # settings of the load and the devices that the command of a layout repeats as they were given
    "config", "model", "weight_bits", "quantize", "kv_bits", "cost", "force_calibration", "engine", "link", "nics",
    "rate", "prompt_tokens", "output_tokens", "arrivals", "trace", "num_requests", "seed", "ttft_slo_ms", "tpot_slo_ms",
    "assign",
)  # fmt: skip


@takes(PlanOptions)
def plan(options: dict[str, Any]) -> None:
    """Find the best fleet for a load: shape, ratio, parallelism and devices, by simulation."""
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != []}
    with errors_in_words():
        given = with_objectives(given)
        from diptych.advisor.plan_report import (
            plain_plan,
            plan_lead,
            plan_notes,
            plan_tables,
            render,
            start_words,
        )
        from diptych.advisor.tier_worth import tier_sizes, tier_worth, worth_table
        from diptych.simulation.report.simulation_report import cost_notes

        asked = plan_question(given)
        sizes = tier_sizes(given.get("kv_host_gb"), given.get("kv_disk_gb"))
        check_folders({"report": given.get("report")})
        found = _found(asked, given)
        data = plain_plan(found, lambda fleet: commands(fleet, given, asked.base))
        if sizes:
            best = found.fleets[0].point["settings"]
            data["tiers"] = tier_worth(best, sizes, asked.options.num_processes)
        notes = [*plan_notes(data, asked.options.search.attainment), *cost_notes([found.fleets[0].point])]
        if "report" in given:
            page = render(found, data, asked, command_line(given, "plan"))
            notes.append(write_file(given["report"], [page.encode()]))
        if "as_json" in given:
            import msgspec

            print(msgspec.json.encode(data).decode())
        else:
            tables = plan_tables(data, asked.options.search.attainment)
            lead = [plan_lead(data, asked), *([start_words(data)] if found.keeps else [])]
            print_tables([*tables, *([worth_table(data["tiers"])] if sizes else [])], notes, lead=lead)
        if not found.keeps:
            print(f"error: {plan_lead(data, asked)}", file=sys.stderr)
            raise typer.Exit(1)


def _found(asked: "PlanQuestion", given: Mapping[str, Any]) -> "CapacityPlan":
    """The plan. After an interrupt what was simulated is printed; raises typer.Exit then."""
    from diptych.advisor.plan_search import PlanSearch

    with progress_bar(quiet="as_json" in given) as show:
        search = PlanSearch(asked, show, show.say)
        try:
            return _search(search, asked, given.get("placement", "joint"), show)
        except KeyboardInterrupt:
            if not search.num_runs:
                raise
        finally:
            search.close()
    _print_unfinished(search, as_json="as_json" in given)
    raise typer.Exit(INTERRUPTED)


def _print_unfinished(search: "PlanSearch", *, as_json: bool) -> None:
    """What an interrupted search has simulated."""
    from diptych.advisor.plan_report import plain_tried, tried_table

    layouts = plain_tried(search.tried())
    cut_off = f"interrupted: {search.num_runs} simulations are done, layouts: {len(layouts)}; there is no plan yet"
    if as_json:
        import msgspec

        print(msgspec.json.encode({"is_complete": False, "layouts": layouts}).decode())
    else:
        print_tables([tried_table(layouts)], [], failures=[cut_off])
    print(f"error: {cut_off}", file=sys.stderr)


def _search(search: "PlanSearch", asked: "PlanQuestion", placement: str, show: Any) -> "CapacityPlan":
    from diptych.advisor.phase_search import phase_rates

    if placement not in PLACEMENTS:
        raise ConfigError(f"placement is {placement!r}; one of {', '.join(PLACEMENTS)}", param="placement")
    if placement == "per-phase":
        if "split" not in asked.space.shapes:
            raise ConfigError("placement per-phase is of split fleets; shapes do not have split", param="placement")
        rates = phase_rates(asked, show)
        return search.exactly(rates.layout(asked.space.budget, asked.asked_rate()))
    if not asked.space.budget.is_limited:
        return search.smallest()
    return search.within_budget(asked.space.layouts())


def plan_question(given: Mapping[str, Any]) -> "PlanQuestion":
    """What the options ask. Raises ConfigError."""
    from diptych.advisor.layout_runs import RunOptions
    from diptych.advisor.plan_search import PlanQuestion
    from diptych.bench.option_grammar import duration_s
    from diptych.search.goodput_search import SearchConfig
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import assigned

    values = {PATHS[name]: given[name] for name in PASSED_ON if name in PATHS and name in given}
    base = read_settings(given.get("config"), values | assigned(given.get("assign", ())))
    if base.model is None:
        raise ConfigError("model is not given; a plan needs one of the catalogue, or a config.json", param="model")
    num_processes = given.get("processes", os.cpu_count() or 1)
    if num_processes < 1:
        raise ConfigError(f"processes is {num_processes}; it must be at least 1", param="processes")
    return PlanQuestion(
        base=base,
        space=layout_space(given, base),
        options=RunOptions(
            search=SearchConfig(**{name: given[name] for name in ("attainment", "tolerance") if name in given}),
            probe_s=duration_s(given["probe"], "probe") if "probe" in given else None,
            num_processes=num_processes,
        ),
    )


def layout_space(given: Mapping[str, Any], base: "Settings") -> "LayoutSpace":
    """The layouts that the options allow. Raises ConfigError."""
    from diptych.advisor.layout_space import FleetBudget, LayoutSpace

    own = [base.hardware] if isinstance(base.hardware, str) else []
    common = _devices(given.get("hardware", own))
    prefill = _devices(given["prefill_hardware"]) if "prefill_hardware" in given else common
    decode = _devices(given["decode_hardware"]) if "decode_hardware" in given else common
    shapes = _shapes(given.get("shapes"))
    if not (prefill and decode):
        raise ConfigError("hardware is not given; name a device of the catalogue, such as h100", param="hardware")
    if not common:  # other devices for each phase: no worker does both
        shapes = tuple(shape for shape in shapes if shape in ("split", "mixed"))
        if not shapes:
            raise ConfigError("shapes need workers that do both; give --hardware, too", param="shapes")
    return LayoutSpace(
        shapes=shapes,
        kinds=_kinds(common, given),
        prefill_kinds=_kinds(prefill, given),
        decode_kinds=_kinds(decode, given),
        budget=FleetBudget(given.get("devices"), given.get("usd_per_hour"), given.get("kilowatts")),
    )


def _shapes(text: str | None) -> "tuple[LayoutName, ...]":
    from diptych.advisor.device_layout import LayoutName

    known: tuple[LayoutName, ...] = get_args(LayoutName)
    wanted = known if text is None else text.split(",")
    for shape in wanted:
        if shape not in known:
            raise ConfigError(f"shapes has {shape!r}; known are {', '.join(known)}", param="shapes")
    return tuple(shape for shape in known if shape in wanted)


def _devices(names: Sequence[str]) -> "tuple[PlannedDevice, ...]":
    from diptych.advisor.device_layout import PlannedDevice
    from diptych.simulation.hardware import load_hardware

    entries = [(name, load_hardware(name)) for name in dict.fromkeys(names)]
    return tuple(PlannedDevice(name, entry.price_per_hour or None, entry.power_w) for name, entry in entries)


def _kinds(devices: "Sequence[PlannedDevice]", given: Mapping[str, Any]) -> "tuple[WorkerKind, ...]":
    from diptych.advisor.device_layout import WorkerKind
    from diptych.simulation.parallelism import Parallelism

    ways = []
    for text in given.get("parallel", DEFAULT_PARALLEL).split(","):
        match = re.fullmatch(r"tp(\d+)(?:-pp(\d+))?", text)
        if not match:
            raise ConfigError(f"parallel has {text!r}; expected such as tp1,tp2,tp4-pp2", param="parallel")
        ways.append(Parallelism(int(match[1]), int(match[2] or 1)))
    return tuple(WorkerKind(device, way) for device in devices for way in ways)


def commands(fleet: "MeasuredLayout", given: Mapping[str, Any], base: "Settings") -> dict[str, str]:
    """command: starts the fleet, a shell script (see launch_commands.py). simulate_command: gives its figures again."""
    layout, workload = fleet.layout, fleet.point["settings"]["workload"]
    simulated = {name: given[name] for name in PASSED_ON if name in given}
    simulated |= {name: workload[name] for name in ("rate", "num_requests") if workload.get(name) is not None}
    if layout.shape in ("unified", "chunked"):
        (group,) = layout.groups
        simulated |= {"hardware": group.kind.device.name, "shape": layout.shape, "replicas": group.count}
        simulated |= {"tensor_parallel": group.kind.parallelism.tensor}
        simulated |= {"pipeline_parallel": group.kind.parallelism.pipeline}
    else:
        pools = [
            f"{group.role}={group.count}x{group.kind.device.name}:tp{group.kind.parallelism.tensor}"
            f",pp{group.kind.parallelism.pipeline}"
            for group in layout.groups
        ]
        simulated |= {"hardware": layout.groups[-1].kind.device.name, "pool": pools}
    simulate = command_line(simulated)
    return {"command": launch_command(layout, base), "simulate_command": simulate}
