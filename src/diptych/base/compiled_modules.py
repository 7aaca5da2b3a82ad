"""Which modules run as machine code (mypyc's, where a build has made it), and which as Python.

Python imports the machine code that lies beside a source before the source, however old it is. So a build leaves a
record of the sources that it read, and ``import diptych`` compares it with what is there: if one of them has changed,
or there is no record, all run from their sources. All or none, because compiled modules rely on each other's layout.

Deciding and simulating spend their time in many short calls: nothing of it is worth compiling alone, and a call between
two compiled modules costs a tenth of one that crosses over. So what takes part in every step or every request is
compiled together. Records (events, commands, plans, settings) are not: others encode, copy and replace them.
"""

import sys
from collections.abc import Sequence
from hashlib import blake2b
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent.parent
RECORD = "compiled_modules.txt"
MODULES = tuple(
    f"diptych.{folder}.{name}"
    for folder, names in {
        "control": ("length_predictor", "recent_rows"),
        "control.admission": ("admission_queue", "fair_queue"),
        "control.cluster": (
            *("attempts", "block_reports", "cluster_audit", "cluster_core", "cluster_recording", "expected_blocks"),
            *("load_book", "membership", "open_request"),
        ),
        "control.engine": ("engine_audit", "engine_core", "leases", "recording", "worker_core"),
        "control.engine.kvcache": (
            *("block_pool", "boundaries", "demand", "disk_journal", "kv_cache_manager", "load_source"),
            *("prefix_cache", "tier_changes", "tier_loads", "tiers"),
        ),
        "control.engine.scheduler": (
            *("early_prefills", "budget", "caps", "decode_batch", "best_effort", "block_owners", "incoming"),
            *("preemption",),
            *("scheduler", "speculation", "step_plan", "step_time", "admission_backoff", "waiting_queue"),
        ),
        "control.router": (
            *("candidates", "cost_router", "costs", "hit_rate_monitor", "pairing"),
            *("event_order", "idle_trials", "prefix_index", "round_robin", "tier_index"),
        ),
        "simulation": ("collector", "environment", "results"),
        "simulation.costs": ("cost_model", "interpolation"),
        "simulation.fleet": (
            *("client_request", "control_channels", "simulated_cluster", "simulated_executor", "simulated_worker"),
            "step_run",
        ),
    }.items()
    for name in names
)  # fmt: skip


class SourceFinder:
    """An import finder that knows the sources of MODULES, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module in MODULES, for importlib; None for any other."""
        return spec_from_file_location(name, source(PACKAGE, name)) if name in MODULES else None


def source(package: Path, module: str) -> Path:
    """The file that a module is written in."""
    return package.parent.joinpath(*module.split(".")).with_suffix(".py")


def record(package: Path) -> str:
    """What a build that reads these sources now leaves behind: the kind of Python, and the digest of each source."""
    lines = [
        f"{blake2b(source(package, module).read_bytes(), digest_size=16).hexdigest()} {module}" for module in MODULES
    ]
    return "\n".join([str(sys.implementation.cache_tag), *lines, ""])


def is_built(package: Path = PACKAGE) -> bool:
    """Whether there is machine code of these very sources, for this Python."""
    try:
        return (package / RECORD).read_text() == record(package)
    except OSError:
        return False


def use_sources() -> None:
    """Import MODULES from their sources from now on. Call this before anything of them is imported."""
    if not runs_sources():
        sys.meta_path.insert(0, SourceFinder)


def runs_sources() -> bool:
    """Whether MODULES are Python in this process."""
    return SourceFinder in sys.meta_path


def what_runs() -> str:
    """How the control code and the simulator run in this process, for people."""
    return "Python" if runs_sources() else "compiled"
