"""Titles and lead sentences of a page, from the settings and the figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.report.text import number, percent, rate
from diptych.simulation.hardware import device_words
from diptych.simulation.prepare import shape_words
from diptych.simulation.report.simulation_page import Page
from diptych.simulation.report.simulation_tables import workers_in_words
from diptych.simulation.settings import Settings
from diptych.simulation.sweep import Run, Sweep

VARIED_FLEET = {"replicas", "tensor_parallel", "pipeline_parallel", "data_parallel"}


def page(run: Run, settings: Settings, command: str) -> Page:
    """The page of one run."""
    given = {"ttft": settings.slo.ttft_ms, "tpot": settings.slo.tpot_ms}
    return Page(
        title=title(settings),
        lead=lead(run, settings),
        command=command,
        point=run.point,
        result=run.result,
        events=list(run.log or ()),
        kv_capacity_tokens=sum(pool["kv_tokens"] for pool in run.point["pools"]),
        slo_ms={name: value for name, value in given.items() if value is not None},
    )


def title(settings: Settings, sweeps: Sequence[Sweep] = ()) -> str:
    """What is served on what; what is swept goes unnamed."""
    swept = {sweep.path.partition(".")[0] for sweep in sweeps}
    if swept & {"model", "hardware"}:
        names = {"model": settings.model, "hardware": settings.hardware and device_words(settings.hardware)}
        return " on ".join(name for key, name in names.items() if name and key not in swept) or "A sweep"
    devices = [_devices(settings.of_pool(pool)) for pool in settings.pools.in_use.values()] or [_devices(settings)]
    if settings.model is None or None in devices:
        return "This machine"
    return f"{settings.model} on {' and '.join(dict.fromkeys(filter(None, devices)))}"


def _devices(settings: Settings) -> str | None:
    """Of one replica; None: they are those of a calibration."""
    devices = settings.parallelism.devices
    if settings.hardware is None:
        return None
    return f"{f'{devices} x ' if devices > 1 else ''}{device_words(settings.hardware)}"


def lead(run: Run, settings: Settings) -> str:
    """The run in two sentences."""
    summary = run.point["summary"]
    first = (
        f"{summary['num_requests']:,} requests in {number(summary['duration_s'])} s, {fleet(settings)}, "
        f"{shape_words(settings)}."
    )
    if summary["attainment"] is None:
        return f"{first} No objectives were set."
    asked = objectives(settings)
    wanted = f": {', '.join(asked)}" if asked else ""
    return f"{first} {percent(summary['attainment'])} met their objectives{wanted}."


def sweep_lead(settings: Settings, sweeps: Sequence[Sweep]) -> str:
    """What was varied, and what was not."""
    varied = " and ".join(f"{sweep.name} over {len(sweep.values)} values" for sweep in sweeps)
    paths = {sweep.path for sweep in sweeps}
    varies_fleet = paths & VARIED_FLEET or any(path.startswith("pools.") for path in paths)
    fixed = [] if varies_fleet else [fleet(settings)]
    fixed += [] if "shape" in paths else [shape_words(settings)]
    asked = [] if paths & {"slo.ttft_ms", "slo.tpot_ms"} else objectives(settings)
    sentence = f"{varied}, every point with the same seed".capitalize()
    return f"{'; '.join([sentence, *fixed])}." + (f" Objectives: {', '.join(asked)}." if asked else "")


def search_lead(settings: Settings, asked: str, found: Mapping[str, Any], *, is_complete: bool = True) -> str:
    """What was searched, and what was found. is_complete: see Found."""
    share = percent(found["config"]["attainment"])
    keep = f"{share} of the requests keep their objectives ({', '.join(objectives(settings))})"
    if asked == "goodput":
        answer = f"{rate(found['estimate'] or found['rate'])} requests/s" if found["rate"] else "no rate was found"
        if found["rate"] and not is_complete:
            answer = f"at least {rate(found['rate'])} requests/s"
        return f"The highest rate of {fleet(settings)}, {shape_words(settings)}, at which {keep}: {answer}."
    answer = "no fleet was found"
    if found["devices"]:
        devices, workers = found["devices"], workers_in_words(found["workers"])
        most = "" if is_complete else "at most "
        answer = f"{most}{devices:,} device{'s' if devices != 1 else ''}, workers: {workers}"
    return f"The smallest fleet, {shape_words(settings)}, on which {keep}: {answer}."


def objectives(settings: Settings) -> list[str]:
    """Those that requests have unless they name their own, in words."""
    pairs = (("first token", settings.slo.ttft_ms), ("each later one on average", settings.slo.tpot_ms))
    return [f"{words} within {value:g} ms" for words, value in pairs if value is not None]


def fleet(settings: Settings) -> str:
    """How many workers of what size."""
    pools = settings.pools
    if pools.in_use:
        *others, last = [f"{pool.replicas} {name}" for name, pool in pools.in_use.items()]
        workers = f"{' and '.join([*filter(None, [', '.join(others)]), last])} workers ({pools.link})"
    else:
        workers = f"{settings.replicas} worker{'s' if settings.replicas > 1 else ''}"
    sizes = {settings.of_pool(pool).parallelism.devices for pool in pools.in_use.values()} or {
        settings.parallelism.devices
    }
    if sizes == {1}:
        return workers
    return f"{workers} of {' or '.join(map(str, sorted(sizes)))} devices each"
