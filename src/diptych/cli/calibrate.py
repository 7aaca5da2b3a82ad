"""``diptych calibrate | replay``: measure this machine for the simulator; check a recording of a live run.

Owns the options and the output. Measuring is diptych.calibration.calibration, fitting is
diptych.simulation.costs.fitted, comparing is diptych.simulation.replay.
"""

import asyncio
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych import __version__
from diptych.base.terminal_text import ShownConsole, console
from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import KERNEL_NAMES, Text, model_name, model_path
from diptych.cli.output import check_folders, drawn, progress_bar
from diptych.control.config import KVDTypeName, ModelImplName, QuantizeName
from diptych.control.errors import ConfigError
from diptych.serving.front.engine_spec import parse_engine
from diptych.serving.front.kv_events import require_zmq
from diptych.serving.link.engine_options import (
    DeviceOptions,
    EngineOptions,
    InstructionSetName,
    MemoryOptions,
    parse_bytes,
)
from diptych.serving.start_checks import check_start

if TYPE_CHECKING:
    from diptych.calibration.engine_calibration import ReportedSteps
    from diptych.simulation.cluster_replay import ClusterReplayReport
    from diptych.simulation.costs.fitted import Calibration
    from diptych.simulation.planner_replay import PlannerReplayReport
    from diptych.simulation.replay import Difference, ReplayReport

Samples = list[tuple[int, int]]


def calibrate_engine(where: str, output: Path, seconds: float, steps_output: Path | None) -> "Calibration":
    """Measure, fit and write. where: a file of reported steps; the address where they are published; or an engine as
    ``diptych front`` names it, which is given a load. Raises ConfigError, WorkerError."""
    from diptych.calibration.engine_calibration import engine_calibration, not_modelled
    from diptych.simulation.costs.fitted import write_calibration

    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"seconds is {seconds:g}; it must be in [1, 86400]", param="seconds")
    check_folders({"output": output, **({"steps_output": steps_output} if steps_output else {})})
    found, front_end = _reported(where, seconds)
    if steps_output is not None:
        found.write(steps_output)
    calibration = engine_calibration(found, front_end, {"diptych": __version__})
    write_calibration(output, calibration)
    if found.about is not None:
        for rule in not_modelled(found.about):
            console(is_error=True).print(f"note: the simulator does not have this: {rule}")
    return calibration


def refuse_others(given: Mapping[str, Any]) -> None:
    """Options of a calibration of our own engine have no effect on that of another. Raises ConfigError."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} has no effect with engine: what runs there says it itself", param=name)


def _reported(where: str, seconds: float) -> "tuple[ReportedSteps, Samples]":
    from diptych.calibration.engine_calibration import listen, read_steps_file
    from diptych.calibration.engine_streams import measure_engine

    if not where.startswith(("tcp://", "ipc://")) and "=" not in where:
        return read_steps_file(Path(where)), []
    require_zmq("engine")
    with progress_bar() as show:
        if "=" not in where:
            return asyncio.run(listen(where, seconds, show)), []
        return asyncio.run(measure_engine(parse_engine(where), seconds, show))


MODEL_HELP = "Model, as for serve. Default: the bundled model."
ENGINE_HELP = (
    "Calibrate a vLLM with Diptych's plugin instead: vllm=URL,step_events=ADDRESS puts a load on it; ADDRESS only "
    "listens; FILE reads what --steps-output wrote. Default: this machine."
)
STEPS_HELP = "Write the steps that the engine reported to this file, one JSON line each. Default: not written."
BUSY = 0.5  # load average from which a measurement is doubtful


def calibrate(
    place: Annotated[Text, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)] = None,
    model: Annotated[Text, typer.Option(help=shared_help.SAME_MODEL)] = None,
    model_impl: Annotated[ModelImplName, typer.Option(help=shared_help.MODEL_IMPL)] = "auto",
    output: Annotated[Path, typer.Option(help="File for the calibration.")] = Path("calibration.json"),
    seconds: Annotated[
        float, typer.Option(help="Seconds to measure: half for single steps, half for a live server.")
    ] = 90.0,
    max_model_len: Annotated[int | None, typer.Option(help=shared_help.MAX_MODEL_LEN)] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="KV cache, such as 2GiB. Default: as for serve.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 32,
    kv_dtype: Annotated[KVDTypeName, typer.Option(help=shared_help.KV_DTYPE)] = "auto",
    threads: Annotated[int | None, typer.Option(help=shared_help.THREADS)] = None,
    cores: Annotated[
        str | None, typer.Option(help="CPUs to compute on, such as 0-3. Default: all that are allowed.")
    ] = None,
    instruction_set: Annotated[InstructionSetName, typer.Option(*KERNEL_NAMES, help=shared_help.KERNELS)] = "auto",
    quantize: Annotated[QuantizeName, typer.Option(help=shared_help.QUANTIZE_AS_SERVE)] = "none",
    engine: Annotated[Text, typer.Option(help=ENGINE_HELP)] = None,
    steps_output: Annotated[Path | None, typer.Option(help=STEPS_HELP)] = None,
) -> None:
    """Measure this machine and model, and write what the simulator needs to predict a server on it.

    The machine should do nothing else meanwhile.
    """
    with errors_in_words():
        if place is not None and model is not None:
            raise ConfigError(f"the model is given twice: {place} and --model {model}", param="model")
        model = place or model
        if engine is not None:
            refuse_others(
                {"model": model, "max_model_len": max_model_len, "kv_cache_memory": kv_cache_memory}
                | {"threads": threads, "cores": cores, "quantize": quantize != "none", "isa": instruction_set != "auto"}
                | {"kv_dtype": kv_dtype != "auto", "model_impl": model_impl != "auto"}
            )
            _show_calibration(calibrate_engine(engine, output, seconds, steps_output), output)
            return
        if steps_output is not None:
            raise ConfigError("steps_output has no effect without engine", param="steps_output")
        path = model_path(model)
        check_folders({"output": output})
        memory = None if kv_cache_memory is None else parse_bytes(kv_cache_memory, "kv_cache_memory")
        options = EngineOptions(
            model=str(path),
            model_impl=model_impl,
            device=DeviceOptions(threads=threads, cores=cores, instruction_set=instruction_set, quantize=quantize),
            memory=MemoryOptions(block_size=block_size, kv_dtype=kv_dtype, kv_cache_bytes=memory),
            max_model_len=max_model_len,
        )
        check_start(options)
        if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > BUSY:
            print(f"warning: the machine is busy (load {load:.1f}), so the figures will be too high", file=sys.stderr)
        from diptych.simulation.costs.fitted import write_calibration

        calibration = _measure_and_fit(options, seconds, model_name(path))
        write_calibration(output, calibration)
        _show_calibration(calibration, output)


def _measure_and_fit(options: EngineOptions, seconds: float, name: str) -> "Calibration":
    from diptych.bench.measurement import machine
    from diptych.calibration.calibration import measure
    from diptych.simulation.costs.fitted import Calibration, MeasuredPoint, fit, fit_front_end, fit_live

    with progress_bar() as show:
        measured = measure(options, show, steps_s=seconds / 2, live_s=seconds / 2)
    steps = [MeasuredPoint(features, duration_ns) for features, duration_ns in measured.steps]
    forward, step_errors = fit(steps)
    cost, points, live_errors = fit_live(forward, measured.live_steps, steps)
    return Calibration(
        model=name,
        cost=cost,
        cache=measured.engine.cache,
        max_model_len=measured.engine.max_model_len,
        front_end=fit_front_end(measured.front_end),
        warm_up=measured.warm_up,
        points=points,
        steps=tuple(steps),
        errors={f"single steps, {law}": error for law, error in step_errors.items()} | live_errors,
        machine={**machine(), "system": platform.system(), "diptych": __version__},
        settings={
            "engine": measured.description,
            "threads": options.device.threads,
            "cores": options.device.cores,
            "quantize": options.device.quantize,
            "kv_dtype": options.memory.kv_dtype,
            "model_impl": options.model_impl,
        },
    )


def _show_calibration(calibration: "Calibration", out: Path) -> None:
    from diptych.report.text import Table
    from diptych.simulation.costs.fitted import MOST_ERROR, MeasuredPoint

    screen = console()
    kinds = [("1 decode", 1, 0), ("8 decodes", 8, 0), ("32 decodes", 32, 0), ("prompt of 256", 0, 256)]
    rows = []
    most = calibration.scheduler.max_num_seqs if calibration.scheduler else 32
    kinds = [kind for kind in kinds if kind[1] <= most]
    for text, num_seqs, prompt in [*kinds, ("prompt of 1024", 0, 1024)]:
        features = MeasuredPoint.of(num_seqs, 256, prompt)
        rows.append((text, f"{calibration.cost.features_ns(features) / 1e6:.2f}"))
    title = f"{calibration.model}: {calibration.settings['engine']}"
    screen.print(drawn(Table(title, ("step", "ms"), tuple(rows))))
    for law, error in calibration.errors.items():
        mark = " (chosen)" if law == calibration.cost.name else ""
        screen.print(f"held-out error, {law}{mark}: median {error['median']:.1%}, p95 {error['p95']:.1%}")
    if not calibration.is_accurate:
        screen.print(
            f"NOT RELIABLE: the median held-out error is above {MOST_ERROR:.0%}; the simulator refuses this file "
            "without --force-calibration. Calibrate again while nothing else runs.",
            style="bold red",
            soft_wrap=True,
        )
    screen.print(f"front end: {calibration.front_end.request_ns / 1e6:.2f} ms a request")
    screen.print(f"written to {out}")


def replay(
    file: Annotated[Path, typer.Argument(help="A file that diptych serve --record wrote.")],
) -> None:
    """Check that the decisions of a recorded run are made again, and show its latencies.

    Ends with status 1 at the first decision that differs.
    """
    from diptych.control.cluster.cluster_recording import CLUSTER_FORMAT
    from diptych.control.planner.planner_recording import PLANNER_FORMAT
    from diptych.simulation.cluster_replay import replay_cluster
    from diptych.simulation.planner_replay import replay_planner
    from diptych.simulation.recordings import recording_format
    from diptych.simulation.replay import replay as replay_recording

    with errors_in_words():
        kind = recording_format(file)
        if kind == CLUSTER_FORMAT:
            is_identical = _show_front_end(replay_cluster(file), "a front end")
        elif kind == PLANNER_FORMAT:
            is_identical = _show_front_end(replay_planner(file), "a planner")
        else:
            is_identical = _show_worker(replay_recording(file))
    if not is_identical:
        raise typer.Exit(1)


def _show_front_end(report: "ClusterReplayReport | PlannerReplayReport", whose: str) -> bool:
    screen = console()
    ending = "" if report.is_complete else " (it was cut off: the end is missing)"
    screen.print(f"{report.path}, of {whose}, written by diptych {report.diptych}{ending}")
    screen.print(f"{report.num_events} events")
    return _show_verdict(screen, report.num_decisions, report.difference)


def _show_verdict(screen: ShownConsole, num_decisions: int, difference: "Difference | None") -> bool:
    if difference is None:
        screen.print("identical", style="bold", end="")
        screen.print(f": all {num_decisions} decisions are the same")
        return True
    screen.print("different", style="bold red", end="")
    screen.print(f" at line {difference.line}: {difference.explanation}")
    screen.print(f"  recorded: {difference.expected}", soft_wrap=True)
    screen.print(f"  replayed: {difference.actual}", soft_wrap=True)
    return False


def _show_worker(report: "ReplayReport") -> bool:
    from diptych.report.text import latency_table
    from diptych.simulation.results import summarize

    screen = console()
    summary = summarize(report.result)
    ending = "" if report.is_complete else " (it was cut off: the end is missing)"
    screen.print(f"{report.path}, written by diptych {report.diptych}{ending}")
    screen.print(
        f"{summary['num_requests']} requests ended ({report.num_aborted} aborted, {report.num_refused} refused), "
        f"{report.num_steps} steps in {summary['duration_s']:.1f} s, {summary['preemptions']} preemptions"
    )
    screen.print(drawn(latency_table(summary)))
    return _show_verdict(screen, report.num_steps, report.difference)
