"""Docstrings and the help of options, each of which is read alone."""

import ast
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from diptych.cli import main as cli
from diptych.cli.front import FRONT_IN_FLIGHT
from diptych.cli.simulate_options import PATHS
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import shape_preset
from diptych.search.goodput_search import SearchConfig
from diptych.simulation.settings import Settings

ROOT = Path(__file__).parent.parent
PLACES = ("src", "benchmarks", "scripts", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# What makes a docstring a fragment: a genitive whose noun is the function's name, a number that only an argument says,
# and a reference where the class names its protocol.
FRAGMENTS = (re.compile(r"of\b", re.I), re.compile(r".*\bso many\b", re.I), re.compile(r"See\b"))
MAY_HOLD_FRAGMENTS = re.compile(r'"""\s*(of|see)\b|\bso\s+many\b', re.I)  # the text of a file: few need to be parsed


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file, white space as single spaces."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(text.split())


def test_a_docstring_is_a_sentence_that_stands_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if "node_modules" not in path.parts and MAY_HOLD_FRAGMENTS.search(path.read_text())
        for line, text in docstrings(path)
        if any(fragment.match(text) for fragment in FRAGMENTS)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "Of one worker.",
        "Of these, the first.",
        "A prompt of so many tokens.",
        "See Router.",
        "See the module. Raises ConfigError.",
    ],
)
def test_a_fragment_is_found(text: str) -> None:
    assert any(fragment.match(text) for fragment in FRAGMENTS)
    assert MAY_HOLD_FRAGMENTS.search(f'    """{text}"""')


@pytest.mark.parametrize("text", ["Offers of a worker.", "So much more.", "Seen by no client."])
def test_a_sentence_is_no_fragment(text: str) -> None:
    assert not any(fragment.match(text) for fragment in FRAGMENTS)


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each command that can be run, with the words that run it."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}".strip())
    if not hasattr(command, "commands"):
        yield name, command


COMMANDS = dict(commands(get_command(cli.app)))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_an_option_is_a_sentence_that_names_its_default(name: str) -> None:
    """What is shown as ``[default: ...]`` need not be said, and not twice; None is never shown."""
    for param in COMMANDS[name].params:
        text, is_shown = param.help, param.default not in (None, "")
        assert text[0].isupper() and text.endswith("."), f"{param.name}: {text}"
        assert not re.match(r"Of\b|It\b|Its\b|The same as (?!MODEL|URL|--)", text), f"{param.name}: {text}"
        assert not re.search(r"\bso many\b", text), f"{param.name}: {text}"
        if not param.required:
            assert is_shown != ("Default: " in text), f"{param.name}: {text}"


def in_words(value: Any) -> str:
    """A default as a help has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_defaults_in_the_help_are_those_of_the_settings(name: str) -> None:
    num_compared = 0
    for param in COMMANDS[name].params:
        path = PATHS.get(param.name, "workload.trace.path")
        if path.startswith(("workload.trace", "pools.prefill", "pools.decode", "pools.both")):
            continue
        value = reduce(getattr, path.split("."), Settings())
        said = re.search(r"Default: ([^.,]+(?:\.\d+)?)", param.help)
        if value is not None and not (name == "plan" and param.name in ("kv_host_gb", "kv_disk_gb")):
            assert said and said[1] == in_words(value), f"{param.name}: {param.help}"
            num_compared += 1
    assert num_compared >= 8


def test_defaults_in_the_help_are_those_of_the_code() -> None:
    cluster, chunked, unified = ClusterConfig(), shape_preset("chunked"), shape_preset("unified")
    for name, value in (
        ("max_queued", cluster.admission.max_queued),
        ("max_queued_per_key", cluster.admission.max_queued_per_tenant),
        ("routing", cluster.routing.routing),
        ("disaggregate", cluster.routing.disaggregate),
        ("local_prefill", cluster.routing.local_prefill),
        ("on_failure", cluster.on_failure),
        ("max_prefills_in_flight_per_worker", cluster.max_prefills_in_flight_per_worker),
        ("max_num_seqs", chunked.max_num_seqs),
        ("max_waiting", chunked.max_waiting),
        ("preemption", chunked.preemption.kind),
        ("attainment", SearchConfig().attainment),
        ("tolerance", SearchConfig().tolerance),
    ):
        params = [param for command in COMMANDS.values() for param in command.params if param.name == name]
        assert params
        for param in params:
            shown = {value, FRONT_IN_FLIGHT if name == "max_prefills_in_flight_per_worker" else value}
            assert param.default in shown or f"Default: {value}." in param.help, f"{name}: {param.help}"
    assert (unified.max_num_seqs, unified.max_waiting) == (chunked.max_num_seqs, chunked.max_waiting)
