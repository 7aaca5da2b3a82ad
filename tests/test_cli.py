"""The command line: its options are frozen here, so that none comes, goes or changes its default by accident."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych import __version__
from diptych.cli import main as cli
from diptych.cli.simulate import simulate
from diptych.control.config import CapsConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.serving.link.engine_options import parse_bytes, parse_cores

SERVE_OPTIONS = {
    "model": None,
    "served_model_name": None,
    "max_model_len": None,
    "dtype": "auto",
    "host": "127.0.0.1",
    "port": 8000,
    "api_key": None,
    "max_waiting": None,
    "max_body": "16MiB",
    "drain_timeout": 30.0,
    "log_level": "warning",
    "record": None,
    "prefill": 0,
    "decode": 0,
    "both": None,
    "disaggregate": "auto",
    "transfer": "auto",
    "kv_codec": "none",
    "on_failure": "retry",
    "heartbeat_timeout": 10.0,
    "cores_per_worker": None,
    "max_untouched_per_worker": 64,
    "ttft_slo_ms": None,
    "tpot_slo_ms": None,
    "shape": "chunked",
    "order": None,
    "budget": None,
    "max_batched_tokens": None,
    "step_target_ms": None,
    "max_num_seqs": None,
    "max_partial_prefills": None,
    "max_long_partial_prefills": None,
    "long_prefill_threshold": None,
    "preemption": None,
    "preempt_for_priority": False,
    "block_size": 32,
    "kv_cache_memory": None,
    "swap_memory": "0",
    "prefix_cache": True,
    "device": "auto",
    "threads": None,
    "cores": None,
}


# All of them default to None (what the file or the settings say), but for --json.
SIMULATE_OPTIONS = (
    "config model hardware tensor_parallel weight_bits kv_bits cost replicas prefill decode both link hosts "
    "routing disaggregate on_failure max_model_len rate num_requests arrivals prompt_tokens output_tokens trace seed "
    "ttft_slo_ms tpot_slo_ms shape order budget max_batched_tokens step_target_ms max_num_seqs max_waiting "
    "max_partial_prefills max_long_partial_prefills long_prefill_threshold preemption preempt_for_priority block_size "
    "kv_cache_tokens kv_cache_memory swap_memory prefix_cache assign sweep workers as_json records report "
    "timeline timeline_window"
)


def given(**changes: Any) -> dict[str, Any]:
    """The values of the options of ``serve`` with some changed."""
    defaults = {name: one.default for name, one in inspect.signature(cli.serve).parameters.items()}
    return {**defaults, **changes}


def test_the_options_of_serve_and_their_defaults() -> None:
    assert given() == SERVE_OPTIONS


def test_the_options_of_simulate_and_their_defaults() -> None:
    defaults = {name: one.default for name, one in inspect.signature(simulate).parameters.items()}
    assert defaults == {name: False if name == "as_json" else None for name in SIMULATE_OPTIONS.split()}


CALIBRATE_OPTIONS = {
    "model": None,
    "out": Path("calibration.json"),
    "seconds": 90.0,
    "max_model_len": None,
    "kv_cache_memory": None,
    "block_size": 32,
    "threads": None,
    "cores": None,
}


def test_the_options_of_calibrate_and_their_defaults() -> None:
    defaults = {name: one.default for name, one in inspect.signature(cli.cli_calibrate.calibrate).parameters.items()}
    assert defaults == CALIBRATE_OPTIONS


def test_the_commands() -> None:
    assert [command.callback.__name__ for command in cli.app.registered_commands if command.callback] == [
        "serve",
        "generate",
        "version",
        "bench",
        "calibrate",
        "replay",
        "simulate",
        "guide",
    ]


@pytest.mark.parametrize(
    "command", ["serve", "generate", "version", "bench", "calibrate", "replay", "simulate", "guide"]
)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    assert result.output == f"diptych {__version__}\n"


@pytest.mark.parametrize("shape", [cli.Shape.unified, cli.Shape.chunked])
def test_a_shape_is_its_preset(shape: cli.Shape) -> None:
    assert cli.scheduler_config(given(shape=shape)) == shape_preset(shape.value)


def test_details_change_the_preset() -> None:
    config = cli.scheduler_config(
        given(order=cli.Order.deadline, max_batched_tokens=512, max_num_seqs=8, max_waiting=3, step_target_ms=50)
    )
    assert (config.order, config.max_num_seqs, config.max_waiting) == ("deadline", 8, 3)
    assert (config.budget.max_batched_tokens, config.budget.target_ns) == (512, 50_000_000)
    assert config.caps == CapsConfig(8, 1, 256)  # a threshold above the budget would have no effect
    assert cli.scheduler_config(given(budget=cli.Budget.whole)).caps == CapsConfig()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"shape": cli.Shape.unified, "max_partial_prefills": 2}, "max_partial_prefills"),
        ({"long_prefill_threshold": 4096}, "long_prefill_threshold"),
        ({"preempt_for_priority": True}, "preemption"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"cores": "a-b"}, "cores"),
        ({"model": "/nowhere"}, "model"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.engine_options(given(**changes))
    assert caught.value.param == param


def test_the_options_reach_the_engine() -> None:
    options = cli.engine_options(given(kv_cache_memory="1.5GiB", swap_memory="64MiB", threads=1, ttft_slo_ms=200))
    assert options.memory.kv_cache_bytes == 3 * 2**29
    assert options.memory.swap_bytes == 2**26
    assert options.device.threads == 1
    assert options.slo.ttft_ns == 200_000_000


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("1KiB", 1024), ("2GiB", 2**31), ("5 MB", 5_000_000), ("1g", 2**30)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text, "x") == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1e400"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="x is"):
        parse_bytes(text, "x")


def test_core_lists() -> None:
    assert parse_cores("0-2,5,1") == (0, 1, 2, 5)


@pytest.mark.system
def test_generate_streams_to_the_terminal() -> None:
    command = (
        sys.executable,
        "-c",
        "from diptych.cli.main import main; main()",
        "generate",
        "import os",
        "--seed",
        "1",
    )
    result = subprocess.run((*command, "--max-tokens", "5"), capture_output=True, text=True, check=True)
    assert result.stdout.startswith("import os")
    assert len(result.stdout) > len("import os\n")
