"""A calibration that misses its own held-out steps is refused unless forced, and every result says its error."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.control.config import CacheConfig
from diptych.control.errors import ConfigError
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.fitted import MOST_ERROR, Calibration, FittedCost, write_calibration

COST = FittedCost((1, 32), (1e6, 2e6), (10.0, 10.0), (1, 512), (1e5, 1e8), 1.0, "live table")


def calibration(path: Path, errors: dict[str, dict[str, float]]) -> str:
    """The path of a calibration with these held-out errors."""
    cache = CacheConfig(num_blocks=100, block_size=32)
    write_calibration(path, Calibration(model="small", cost=COST, cache=cache, max_model_len=1024, errors=errors))
    return str(path)


def simulated(cost: str, *words: str) -> str:
    """The output of a short simulation; errors included."""
    load = ("--rate", "1", "--num-requests", "5", "--prompt-tokens", "100", "--output-tokens", "8")
    result = CliRunner().invoke(app, ["simulate", "--cost", cost, *load, *words])
    assert result.exit_code == int("error" in result.stderr), result.output
    return result.stdout + result.stderr


@pytest.mark.parametrize("median", [MOST_ERROR, 0.0, 0.07])
def test_an_accurate_calibration_is_used_and_its_error_is_said(tmp_path: Path, median: float) -> None:
    path = calibration(
        tmp_path / "here.json", {"live table": {"median": median, "p95": 0.5}, "scaled": {"median": 9.0}}
    )
    choice = choose_cost(path, model=None, hardware=None)
    assert f"held-out error: median {median:.1%}, p95 50.0%" in choice.words and not choice.assumptions


@pytest.mark.parametrize("law", ["live table", "single steps, live table"])
def test_an_inaccurate_calibration_is_refused_with_its_error_and_the_limit(tmp_path: Path, law: str) -> None:
    path = calibration(tmp_path / "here.json", {law: {"median": 0.31, "p95": 0.8}, "scaled": {"median": 0.01}})
    with pytest.raises(ConfigError, match=r"here\.json .* median 31\.0%, p95 80\.0%.*20%") as error:
        choose_cost(path, model=None, hardware=None)
    assert error.value.param == "cost"
    assert "--force-calibration" in simulated(path)


def test_a_forced_calibration_is_said_in_every_result(tmp_path: Path) -> None:
    path = calibration(tmp_path / "here.json", {"live table": {"median": 0.31, "p95": 0.8}})
    said = simulated(path, "--force-calibration")
    assert "held-out error: median 31.0%" in said and "Assumed: step durations are right, although here.json" in said
    point = json.loads(simulated(path, "--force-calibration", "--json"))
    assert "median 31.0%" in point["cost_model"] and "forced" in point["assumptions"][0]
    page = tmp_path / "page.html"
    simulated(path, "--set", "force_calibration=true", "--report", str(page))
    assert "misses held-out steps" in page.read_text()


def test_a_calibration_without_errors_is_taken_at_its_word(tmp_path: Path) -> None:
    choice = choose_cost(calibration(tmp_path / "old.json", {}), model=None, hardware=None)
    assert "held-out" not in choice.words and not choice.assumptions
