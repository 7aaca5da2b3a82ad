"""What ``diptych simulate --list`` prints: the names that its options take."""

from collections.abc import Callable, Mapping

from diptych.control.errors import ConfigError
from diptych.report.text import Table, number
from diptych.simulation.fleet.links import GB, LINKS
from diptych.simulation.hardware import catalogue_hardware, hardware_names
from diptych.simulation.model_catalogue import load_model, model_names
from diptych.simulation.serving_engine import engine_names
from diptych.simulation.sweep import setting_defaults
from diptych.workload.packed import BUNDLED


def listed(what: str) -> Table:
    """The table of a word such as "models". Raises ConfigError for another word."""
    if what not in LISTS:
        raise ConfigError(f"list is {what!r}; one of {', '.join(LISTS)}", param="list_")
    return LISTS[what]()


def _models() -> Table:
    rows = []
    for name in model_names():
        model = load_model(name)
        active = f"{model.active_parameters / 1e9:,.1f}" if model.active_parameters != model.num_parameters else ""
        rows.append((name, f"{model.num_parameters / 1e9:,.1f}", active, f"{model.max_context:,}"))
    return Table("--model", ("", "billion parameters", "active", "context"), tuple(rows))


def _hardware() -> Table:
    rows = []
    for name in hardware_names():
        device = catalogue_hardware(name)
        price = number(device.price_per_hour, 2)
        rows.append((name, f"{device.memory_bytes / 2**30:,.0f} GiB", f"{device.memory_bandwidth / 1e12:,.2f}", price))
    return Table("--hardware", ("", "memory", "TB/s", "USD an hour"), tuple(rows))


def _links() -> Table:
    rows = [(name, f"{rate / GB:,.1f}", f"{latency_ns / 1000:,.1f}") for name, (rate, latency_ns) in LINKS.items()]
    return Table("--link", ("", "GB/s", "latency, us"), tuple(rows))


def _engines() -> Table:
    return Table("--engine", ("",), tuple((name,) for name in engine_names()))


def _traces() -> Table:
    return Table("--trace (or a file: docs/simulation.md)", ("",), tuple((name,) for name in BUNDLED))


def _settings() -> Table:
    rows = [(path, "" if value is None else str(value)) for path, value in setting_defaults().items()]
    return Table("--set PATH=VALUE, --sweep PATH=VALUES", ("", "default"), tuple(rows))


LISTS: Mapping[str, Callable[[], Table]] = {
    "models": _models,
    "hardware": _hardware,
    "links": _links,
    "engines": _engines,
    "traces": _traces,
    "settings": _settings,
}
