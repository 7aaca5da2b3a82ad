"""What every benchmark shares: parts of a command, the machine's description, tables, JSON records."""

import argparse
import ast
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from diptych.base import compiled_modules
from diptych.base.processor import read_processor

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def run_part(command: str, description: str) -> None:
    """Run the part of a command that its first argument names: a module of the folder ``COMMAND_parts`` with
    ``add_options(parser)`` and ``main(options)``. Every part has ``--json``. Only the module that is named is imported,
    since each needs other packages."""
    sources = {path.stem: path.read_text() for path in sorted((HERE / f"{command}_parts").glob("*.py"))}
    titles = {
        name: (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
        for name, source in sources.items()
        if "\ndef main(" in source
    }
    name, *arguments = sys.argv[1:] or [""]
    if name not in titles:
        print(f"usage: {command}.py PART [-h] [options]\n\n{description}\nparts:")
        print("\n".join(f"  {name:<14} {title}" for name, title in titles.items()))
        sys.exit(0 if name in ("-h", "--help") else f"\n{command} has no part {name!r}" if name else 2)
    part: Any = importlib.import_module(f"{command}_parts.{name}")
    parser = argparse.ArgumentParser(
        f"{command}.py {name}", description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    part.add_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write a record; a bare name goes to benchmarks/results")
    part.main(parser.parse_args(arguments))


def names_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """For options: names with commas between them, each one of these. Raises ArgumentTypeError."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(allowed)):
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(allowed)}")
        return names

    return read


AS_PYTHON = """
import runpy, sys
from diptych.base import compiled_modules
compiled_modules.use_sources()
sys.argv.pop(0)
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ways_to_run() -> list[str]:
    """How control code and simulator can run here."""
    return ["compiled", "Python"] if compiled_modules.is_built() else ["Python"]


def run_as(way: str, command: str, *arguments: str) -> Any:
    """What a command prints as JSON, in a process of its own with control code and simulator "compiled" or "Python"."""
    script = str(HERE / f"{command}.py")
    start = [script] if way == "compiled" else ["-c", AS_PYTHON, script]
    done = subprocess.run([sys.executable, *start, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def machine() -> dict[str, Any]:
    """CPU, memory, kernel, Python and library versions, and the commit that was measured."""
    info: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            info[key.strip()] = value.strip()
    flags, processor = set(info.get("flags", "").split()), read_processor()
    versions = {}
    for name in ("torch", "numpy", "fastapi", "uvicorn", "msgspec", "tokenizers", "vllm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": processor.name,
        "cores": len(processor.cores),
        "processor": processor.describe(),
        "isa": [flag for flag in FLAGS if flag in flags],
        "kernels": kernels(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit(),
        "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def kernels() -> list[str]:
    """The instruction sets of the bf16 kernels here; a server takes the first unless it is started with --isa."""
    try:
        import torch

        from diptych.runtime.kernels.instruction_set import available
    except ImportError:  # a benchmark without an engine
        return []
    return list(available(torch.bfloat16))


def commit() -> str:
    """The commit of the working tree, with a mark when it was changed."""
    try:
        here = Path(__file__).parent.parent
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "src"], cwd=here, capture_output=True, text=True)
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except OSError:
        return "unknown"


def command() -> str:
    """How this benchmark was called; of absolute paths their last names."""
    return " ".join([Path(word).name if word.startswith("/") else word for word in sys.argv])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned text; a row with other columns than the one before it begins a table of its own."""
    if not rows:
        return "(no rows)"
    return "\n\n".join(_table(list(group), list(columns)) for columns, group in groupby(rows, key=tuple))


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    lines = ["  ".join(column.rjust(width) for column, width in zip(columns, widths, strict=True))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def report(name: str, rows: Sequence[dict[str, Any]], path: str | None = None, **extra: Any) -> None:
    """Print the table, and write it with the machine's description when a path is given."""
    print(f"# {name}")
    print(table(rows))
    if path:
        target = Path(path) if os.sep in path else RESULTS / path
        write_record(name, rows, target, **extra)
        print(f"written to {target}", file=sys.stderr)


def write_record(name: str, rows: Sequence[dict[str, Any]], target: Path, **extra: Any) -> None:
    """Rows as JSON with the machine's description; what was there before is there until all is written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "command": command(), "machine": machine(), **extra, "rows": list(rows)}
    unfinished = target.with_name(target.name + ".part")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(target)


class OtherLoad:
    """From its making on: cores used by processes that this one did not start (Linux; elsewhere it says 0).

    Processes that ended in between count for whoever waited for them.
    """

    def __init__(self) -> None:
        self._start = _busy()

    def cores(self) -> float:
        """Mean number of cores that others kept busy."""
        total, idle, own = (now - then for now, then in zip(_busy(), self._start, strict=True))
        return max(0.0, (total - idle - own) / max(total, 1e-9)) * (os.cpu_count() or 1)


def _busy() -> tuple[float, float, float]:
    """Seconds of all cores, seconds idle, and seconds of this process and its descendants."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0, 0.0
    fields = [int(value) for value in stat.read_text().splitlines()[0].split()[1:9]]
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            values = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(values[1])
        seconds[int(entry.name)] = sum(map(int, values[11:15])) / TICKS
    own = sum(time for process, time in seconds.items() if _is_ours(process, parents))
    return sum(fields) / TICKS, (fields[3] + fields[4]) / TICKS, own


def _is_ours(process: int, parents: dict[int, int]) -> bool:
    while process in parents:
        if process == os.getpid():
            return True
        process = parents[process]
    return False
