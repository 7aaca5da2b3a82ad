"""The control code and the simulator decide the same, compiled and as Python; old machine code is never used."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.base import compiled_modules
from diptych.base.compiled_modules import MODULES, PACKAGE, RECORD, is_built, record, source
from tests.simulation.test_replay import record_scenario

ROOT = Path(__file__).parents[1]
NUM_SEEDS = 40


def copy_sources(target: Path) -> Path:
    """A package that holds nothing but the sources of MODULES."""
    package = target / "diptych"
    for module in MODULES:
        path = source(package, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source(PACKAGE, module), path)
    return package


def in_python(*code: str) -> str:
    """What a fresh interpreter prints."""
    lines = "\n".join(code)
    return subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_every_module_that_is_compiled_exists() -> None:
    assert len(set(MODULES)) == len(MODULES)
    for module in MODULES:
        assert source(PACKAGE, module).is_file(), module


def test_machine_code_is_used_with_a_record_of_these_sources_alone(tmp_path: Path) -> None:
    package = copy_sources(tmp_path)
    assert not is_built(package), "there is no record"
    (package / RECORD).write_text(record(package))
    assert is_built(package)
    changed = source(package, MODULES[-1])
    changed.write_text(changed.read_text() + "\n# a comment\n")
    assert not is_built(package), "a source has changed"
    (package / RECORD).write_text(record(package).replace(str(sys.implementation.cache_tag), "cpython-399"))
    assert not is_built(package), "it is of another Python"


def test_sources_run_where_they_are_asked_for_whatever_was_compiled() -> None:
    lines = in_python(
        "import sys",
        "from diptych.base import compiled_modules as modules",
        "assert not any(name in sys.modules for name in modules.MODULES), 'imported too early'",
        "modules.use_sources(); modules.use_sources()",
        "import importlib",
        "print(modules.what_runs(), *(importlib.import_module(name).__file__ for name in modules.MODULES))",
    ).split()
    assert lines == ["Python", *(str(source(PACKAGE, module)) for module in MODULES)]


@pytest.mark.skipif(compiled_modules.runs_sources(), reason="nothing is compiled (scripts/compile)")
def test_compiled_and_python_decide_the_same(tmp_path: Path) -> None:
    """Simulated fleets with all policies and faults: every plan and every event. Recordings that compiled code wrote:
    every plan."""
    recordings = [str(tmp_path / f"{seed}.jsonl") for seed in range(20)]
    for seed, path in enumerate(recordings):
        record_scenario(seed, Path(path))
    lines = [
        subprocess.run(
            [sys.executable, "-m", "tests.decision_digests", how, str(NUM_SEEDS), *recordings],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for how in ("compiled", "python")
    ]
    assert len(lines[0].splitlines()) == 2 * NUM_SEEDS + len(recordings)
    assert lines[0] == lines[1]


def said_of_planted_states(how: str) -> list[str]:
    """The lines of tests.planted_states."""
    command = [sys.executable, "-m", "tests.planted_states", how]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def test_every_planted_state_is_noticed() -> None:
    lines = said_of_planted_states("python")
    assert len(lines) == 8 and not [line for line in lines if "nothing was noticed" in line]


@pytest.mark.skipif(compiled_modules.runs_sources(), reason="nothing is compiled (scripts/compile)")
def test_compiled_and_python_notice_the_same_planted_states() -> None:
    assert said_of_planted_states("compiled") == said_of_planted_states("python")


@pytest.mark.skipif(compiled_modules.runs_sources(), reason="nothing is compiled (scripts/compile)")
def test_what_is_imported_is_machine_code() -> None:
    lines = in_python(
        "import importlib",
        "from diptych.base.compiled_modules import MODULES, what_runs",
        "print(what_runs(), *(importlib.import_module(name).__file__ for name in MODULES))",
    ).split()
    assert lines[0] == "compiled"
    assert not any(path.endswith(".py") for path in lines[1:])
