"""``diptych calibrate --engine``: from what an engine's plugin reports of its steps to a calibration."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych import __version__
from diptych.base.terminal_text import console
from diptych.cli.output import check_folders, progress_bar
from diptych.control.errors import ConfigError
from diptych.serving.front.engine_spec import parse_engine
from diptych.serving.front.kv_events import require_zmq

if TYPE_CHECKING:
    from diptych.calibration.engine_calibration import ReportedSteps
    from diptych.simulation.costs.fitted import Calibration

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
