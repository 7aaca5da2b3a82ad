"""The command line: what its options mean, and what it refuses."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from diptych import __version__
from diptych.base import compiled_modules
from diptych.base.processor import Processor
from diptych.cli import main as cli
from diptych.cli.batch_options import batch_options
from diptych.cli.error_messages import in_options
from diptych.cli.other_names import INSTEAD, SAME, translate
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CapsConfig, PresetName, SchedulerConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.http_get import Site
from diptych.serving.link.engine_options import BUNDLED_MODEL, parse_bytes, parse_cores


def given(**changes: Any) -> dict[str, Any]:
    """The values of the options of ``serve`` with some changed."""
    defaults = {name: option.default for name, option in inspect.signature(cli.serve).parameters.items()}
    return {**defaults, **changes}


COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_each_of_its_options_says_what_it_does(name: str) -> None:
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output
    assert COMMANDS[name].help
    assert [option.name for option in COMMANDS[name].params if not getattr(option, "help", None)] == []


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    how = compiled_modules.what_runs()
    assert result.output == f"diptych {__version__} (control code and simulator: {how})\n"


@pytest.mark.parametrize("words", [["--version"], ["-h"], ["serve", "-h"], []])
def test_short_questions_are_answered(words: list[str]) -> None:
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0 and result.stderr == ""
    assert ("Usage: diptych" if "--version" not in words else __version__) in result.stdout


@pytest.mark.parametrize(
    ("words", "known", "translated"),
    [
        (["--max-num-batched-tokens", "8"], {"--max-batched-tokens"}, ["--max-batched-tokens", "8"]),
        (["--replicas=2"], {"--both"}, ["--both=2"]),
        (["--replicas=2"], {"--replicas", "--both"}, ["--replicas=2"]),
        (["-tp", "4"], {"--tensor-parallel"}, ["--tensor-parallel", "4"]),
        (["--no-enable-prefix-caching"], {"--no-prefix-cache"}, ["--no-prefix-cache"]),
        (["--", "--replicas"], {"--both"}, ["--", "--replicas"]),
        (["--trace", "x"], {"--workload"}, ["--workload", "x"]),
        (["--unheard-of"], {"--both"}, ["--unheard-of"]),
    ],
)
def test_other_names_of_an_option_are_taken(words: list[str], known: set[str], translated: list[str]) -> None:
    assert translate(words, known) == translated


def test_every_other_name_leads_to_an_option_that_some_command_has() -> None:
    names = {name for command in COMMANDS.values() for param in command.params for name in param.opts}
    names |= {name for command in COMMANDS.values() for param in command.params for name in param.secondary_opts}
    assert set(SAME.values()) <= names
    serve = {name for param in COMMANDS["serve"].params for name in (*param.opts, *param.secondary_opts)}
    of_others = {"--workers", "--api-keys", "--api-key", "--admin-key", "--admin-key-file"}  # where they do not exist
    assert of_others <= serve and not serve & (set(INSTEAD) - of_others), "an option that exists needs no other"


def test_a_message_names_the_option_that_was_typed() -> None:
    names = {"kv_cache_memory": "--kv-cache-memory", "rate": "--rate"}
    assert in_options("kv_cache_bytes is 5", names) == "--kv-cache-memory is 5"
    assert in_options("workload: rate is 0", names) == "--rate is 0"
    assert in_options("rates of 1 are fine", names) == "rates of 1 are fine"
    assert in_options("order is 'x'", names) == "order is 'x'"
    names |= {name: f"--{name.replace('_', '-')}" for name in ("ttft_slo_ms", "find_goodput", "records", "key_file")}
    for message, expected in {
        "slo is 'ttft_slo_ms'; ttft_slo_ms is given, too": "slo is 'ttft_slo_ms'; --ttft-slo-ms is given, too",
        "find_goodput and rate are two searches": "--find-goodput and --rate are two searches",
        "gaps has no effect without records": "gaps has no effect without --records",
        "it needs a key_file": "it needs a --key-file",
        "the rate of the records": "the rate of the records",
        "there is no column find_goodput": "there is no column find_goodput",
        "set workload.find_goodput or /tmp/key_file": "set workload.find_goodput or /tmp/key_file",
    }.items():
        assert in_options(message, names) == expected


@pytest.mark.parametrize("command", ["chat", "diagnose", "advise", "batch ls"])
def test_a_command_about_a_server_is_about_the_local_one_by_default(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(text: str, *_: Any) -> None:
        raise ConfigError(f"asked {text}")

    monkeypatch.setattr(Site, "of", of)
    assert CliRunner().invoke(cli.app, command.split()).stderr == "error: asked http://127.0.0.1:8000\n"


def test_the_hint_of_a_busy_machine_is_for_one_worker_on_all_cores() -> None:
    two = Processor("p", ((0,), (1,)), (0, 1))
    one = Processor("p", ((0,),), (0,))
    options = cli.engine_options(given())
    if not cli.GPU.exists():
        assert "--threads N" in cli.busy_machine_hint(options, 1, two)
    assert cli.busy_machine_hint(options, 2, two) == ""
    assert cli.busy_machine_hint(options, 1, one) == ""
    assert cli.busy_machine_hint(cli.engine_options(given(threads=1)), 1, two) == ""


def scheduler(**changes: Any) -> SchedulerConfig:
    return cli.engine_options(given(**changes)).scheduler


@pytest.mark.parametrize("shape", ["unified", "chunked"])
def test_a_shape_is_its_preset(shape: PresetName) -> None:
    assert scheduler(shape=shape) == shape_preset(shape)


def test_details_change_the_preset() -> None:
    config = scheduler(order="deadline", max_batched_tokens=512, max_num_seqs=8, max_waiting=3, step_target_ms=50)
    assert (config.order, config.max_num_seqs, config.max_waiting) == ("deadline", 8, 3)
    assert (config.budget.max_batched_tokens, config.budget.target_ns) == (512, 50_000_000)
    assert config.caps == CapsConfig(8, 1, 256)  # a threshold above the budget would have no effect
    assert scheduler(budget="whole").caps == CapsConfig()


def test_without_options_a_fleet_decides_as_control_does_by_default() -> None:
    assert cli.fleet_options(given()).cluster == ClusterConfig()


def test_how_a_fleet_decides_can_be_chosen() -> None:
    options = {"routing": "round_robin", "disaggregate": "never", "on_failure": "fail"}
    limits = {"max_prefills_in_flight_per_worker": 3, "max_queued": 10, "max_queued_per_key": 2}
    cluster = cli.fleet_options(given(both=2, **options, **limits)).cluster
    assert (cluster.routing.routing, cluster.routing.disaggregate, cluster.on_failure) == tuple(options.values())
    assert cluster.max_prefills_in_flight_per_worker == 3
    assert (cluster.admission.max_queued, cluster.admission.max_queued_per_tenant) == (10, 2)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"shape": "unified", "max_partial_prefills": 2}, "max_partial_prefills"),
        ({"long_prefill_threshold": 4096}, "long_prefill_threshold"),
        ({"preempt_for_priority": True}, "preemption"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"kv_host_gb": -1.0}, "kv_host_gb"),
        ({"kv_disk_gb": 1.0}, "kv_disk_gb"),
        ({"kv_disk": Path("kv"), "kv_disk_gb": 0.0}, "kv_disk_gb"),
        ({"kv_disk": Path("kv"), "prefix_cache": False}, "kv_disk"),
        ({"kv_disk_codec": "int8"}, "kv_disk_codec"),
        ({"cores": "a-b"}, "cores"),
        ({"model": "/nowhere"}, "model"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.engine_options(given(**changes))
    assert caught.value.param == param


@pytest.mark.parametrize(("words", "names"), [([], None), (["a"], ["a"]), (["a", "org/b", "c"], ["a", "org/b", "c"])])
def test_a_model_is_served_by_every_name_that_is_given(
    words: list[str], names: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(cli, "check_start", lambda options: None)
    monkeypatch.setattr(cli, "_serve", lambda options, workers, need, names, given: served.append(names))
    result = CliRunner().invoke(cli.app, ["serve", *(word for name in words for word in ("--served-model-name", name))])
    assert result.exit_code == 0, result.output
    assert served == [names or [BUNDLED_MODEL.name]]


def test_the_options_reach_the_engine() -> None:
    settings = {"threads": 1, "instruction_set": "avx2", "ttft_slo_ms": 200}
    options = cli.engine_options(
        given(kv_cache_memory="1.5GiB", kv_host_gb=0.5, kv_disk=Path("kv"), kv_disk_codec="int8", **settings)
    )
    assert options.memory.kv_cache_bytes == 3 * 2**29
    assert options.memory.host_bytes == 500_000_000
    assert options.memory.disk == str(Path.cwd() / "kv")
    assert (options.memory.disk_bytes, options.memory.disk_codec) == (10_000_000_000, "int8")
    assert (options.device.threads, options.device.instruction_set) == (1, "avx2")
    assert options.slo.ttft_ns == 200_000_000


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"batch_lines": 4}, "batch_lines"),
        ({"batch_dir": Path("b"), "batch_lines": 0}, "batch_lines"),
        ({"batch_dir": Path("b"), "batch_lines": 4, "batch_lines_beside": 5}, "batch_lines_beside"),
        ({"batch_dir": Path("b"), "batch_max_lines": 0}, "batch_max_lines"),
        ({"batch_dir": Path("b"), "batch_max_file": "much"}, "batch_max_file"),
        ({"batch_dir": Path("b"), "batch_gb": 0.0}, "batch_gb"),
    ],
)
def test_impossible_settings_of_batches_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch_options(given(**changes))
    assert caught.value.param == param


def test_the_options_of_batches_reach_the_service() -> None:
    assert batch_options(given()) is None
    options = batch_options(given(batch_dir=Path("b"), batch_max_file="1KiB", batch_gb=2.0, batch_lines=7))
    assert options is not None
    assert (options.folder, options.lines.at_once, options.lines.beside) == (Path.cwd() / "b", 7, 0)
    limits = options.limits
    assert (limits.max_file_bytes, limits.max_total_bytes, limits.max_lines) == (1024, 2_000_000_000, 100_000)


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
