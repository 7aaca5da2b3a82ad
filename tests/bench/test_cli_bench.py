"""``diptych bench``: options, what is printed, what is written, and errors in one line."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.bench import option_grammar as words
from diptych.bench.objectives import LatencyObjectives
from diptych.cli import main as cli
from diptych.cli.bench import workload_settings
from diptych.control.errors import ConfigError

FAKE = ("--extra", '{"fake": {"ttft_ms": 2, "itl_ms": 1}}', "--warmup", "1")
SMALL = ("--rate", "200", "--num-requests", "20", "--prompt-tokens", "16", "--output-tokens", "4")


def invoke(url: str, *arguments: str) -> Any:
    """Run ``diptych bench`` here."""
    return CliRunner().invoke(cli.app, ["bench", "--url", url, *FAKE, *arguments])


def answers(url: str) -> int:
    """How many the server has given so far."""
    with urllib.request.urlopen(f"{url}/answers") as reply:
        return int(json.load(reply)["answers"])


@pytest.mark.system
def test_a_run_prints_its_tables_and_writes_its_files(url: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("output", "records", "report")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = invoke(url, *SMALL, "--slo", "ttft=2s,tpot=50ms", *options)
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "TPOT", "ITL", "E2E per token", "attainment", "goodput"):
        assert word in result.output
    assert "CPU per received token" not in result.output and "Longest gaps" not in result.output
    data = json.loads(files["output"].read_text())
    assert data["kind"] == "bench" and data["mode"] == "run" and data["server"]["model"] == "fake"
    assert data["machine"]["cores"] and data["settings"]["slo"] == "ttft=2s,tpot=50ms"
    assert len(files["records"].read_text().splitlines()) == 20
    page = files["report"].read_text()
    assert page.count("<svg") > 5 and "<script" not in page and "Gaps between tokens" in page


@pytest.mark.system
def test_the_client_and_the_longest_gaps_are_shown_on_demand(url: str) -> None:
    result = invoke(url, *SMALL, "--verbose")
    assert result.exit_code == 0, result.output
    assert "CPU per received token" in result.output and "Longest gaps" in result.output


@pytest.mark.system
def test_json_is_one_object_and_holds_no_key(url: str) -> None:
    result = invoke(url, *SMALL, "--json", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "secret" not in result.stdout
    assert json.loads(result.stdout)["summary"]["num_completed"] == 20


@pytest.mark.system
def test_rates_give_a_row_and_a_page_each(url: str, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    options = ("--rates", "100,200", "--num-requests", "20", "--output-tokens", "2", "--slo", "ttft=1s")
    result = invoke(url, *options, "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "100.00" in result.output and "200.00" in result.output
    assert "Attainment, by requests per second" in report.read_text()


@pytest.mark.system
def test_what_was_missed_is_said_and_shown(url: str, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    pace = ("--extra", '{"fake": {"ttft_ms": 2, "itl_ms": 5}}')
    result = invoke(url, *SMALL, *pace, "--slo", "ttft=5s,itl=1ms,e2e=1h", "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "missed ITL" in result.output and "20 requests" in result.output and "missed TTFT" not in result.output
    assert "ITL &lt;= 1ms" in report.read_text() and "missed ITL" in report.read_text()


@pytest.mark.system
def test_a_run_in_which_every_request_failed_is_shown_and_is_an_error(url: str) -> None:
    fail = ("--extra", '{"fake": {"fail": "status"}}', "--warmup", "0")
    result = invoke(url, *SMALL, *fail)
    assert result.exit_code == 1
    assert "every request failed: HTTP 500" in result.stderr and "20 failed" in result.stdout


@pytest.mark.system
def test_interference_prints_its_tables_and_shows_every_gap(url: str, tmp_path: Path) -> None:
    report, output = tmp_path / "page.html", tmp_path / "run.json"
    streams = ("--streams", "2", "--stream-tokens", "8", "--stream-limit", "9000", "--quiet", "100ms")
    prompts = ("--long-tokens", "64", "--behind", "2ms", "--extra", '{"fake": {"itl_ms": 5}}')
    options = ("--interference", *streams, *prompts, "--repetitions", "1")
    result = invoke(url, *options, "--report", str(report), "--output", str(output))
    assert result.exit_code == 0, result.output
    assert re.search(r"The p99 gap of 2 streams is [\d.]+ ms before and [\d.]+ ms during a prompt of 64", result.stdout)
    assert "during a prompt of 64 tokens: " in report.read_text()
    assert "Gaps of 2 streams" in result.output and "tokens/s of the streams: during" in result.output
    found = json.loads(output.read_text())
    assert found["interference"]["config"]["behind_s"] == 0.002 and "excesses" in found["interference"]["client"]
    assert report.read_text().count("<svg") > 2 and "Gaps around the long prompt" in report.read_text()


@pytest.mark.system
def test_goodput_is_searched_and_each_run_is_said(narrow_url: str, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    options = ("--find-goodput", "--slo", "ttft=200ms", "--rate", "200", "--probe", "300ms", "--tolerance", "1")
    result = invoke(narrow_url, *options, "--output-tokens", "8", "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "goodput, 90.0 % in time" in result.output and "surely above" in result.output
    assert "asked for: 90.0 %" in report.read_text()


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_a_run_and_reports_what_was_measured(url: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from diptych.cli.main import main; main()", "bench", "--url", url, *FAKE]
    process = subprocess.Popen(
        [*command, "--rate", "50", "--num-requests", "100000", "--output-tokens", "4", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    before = answers(url)
    while answers(url) < before + 20:
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    summary = json.loads(printed)["summary"]
    assert summary["ended"] == "stopped" and summary["num_completed"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slo", "ttft"), "expected ttft=2s"),
        (("--slo", "ttft=-2s"), "expected a time"),
        (("--slo", "tbt=50ms"), "none of ttft, tpot, itl, e2e"),
        (("--slo", "itl=50"), "itl needs a unit"),
        (("--find-goodput", "--attainment", "2"), "attainment is 2"),
        (("--streams", "4"), "streams has no effect without --interference"),
        (("--probe", "4s"), "probe has no effect without --find-goodput or --rates"),
        (("--interference", "--repetitions", "0"), "repetitions is 0"),
        (("--api", "chat", "--prompts", "ids"), "chat completions take text"),
        (("--api", "gopher"), "one of completions, chat"),
        (("--token-ids", "5"), "LOW:HIGH"),
        (("--ramp", "1:2"), "FROM:TO:TIME"),
        (("--ramp", "1:2:3s", "--rate", "2"), "takes the place of rate"),
        (("--rates", "1,x"), "expected requests per second"),
        (("--find-goodput", "--interference"), "two measurements"),
        (("--records", "/nowhere/x"), "there is no folder"),
        (("--gaps",), "no effect without --records"),
        (("--extra", "[]"), "expected a JSON object"),
        (("--rate", "-1"), "rate is -1"),
    ],
    ids=str,
)
def test_what_is_wrong_with_options_is_said_in_one_line_before_the_server_is_asked(
    options: tuple[str, ...], message: str
) -> None:
    result = invoke("http://127.0.0.1:9", *options)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("error: ")


def test_a_server_that_is_not_there_is_said_in_one_line() -> None:
    result = invoke("http://127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["error: cannot connect to 127.0.0.1:9: Connection refused"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "other"), "the server has fake"),
        (("--find-goodput",), "objectives"),
        (("--workload", "no-such-trace"), "cannot read no-such-trace"),
    ],
    ids=str,
)
def test_what_is_wrong_for_this_server_is_said_in_one_line(url: str, options: tuple[str, ...], message: str) -> None:
    result = invoke(url, *options)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("error: ")


def test_a_workload_is_described_as_for_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    given: dict[str, Any] = dict.fromkeys(
        ("rate", "num_requests", "arrivals", "concurrency", "prompt_tokens", "output_tokens", "time_scale", "seed")
    )
    given |= {"workload": str(file), "rate": 3.0, "assign": ["workload.arrivals.cv=2"], "concurrency": None}
    assert workload_settings(given) == (file, {"workload.rate": 3.0, "workload.arrivals.cv": 2})
    given |= {"workload": "azure-conv", "rate": None, "time_scale": 2.0, "assign": None}
    assert workload_settings(given) == (None, {"workload.trace.path": "azure-conv", "workload.trace.scale": 2.0})


def test_words_of_options() -> None:
    assert words.slo("ttft=2s,tpot=50ms") == LatencyObjectives(2_000_000_000, 50_000_000)
    assert words.slo("itl=60ms,e2e=20s") == LatencyObjectives(None, None, 60_000_000, 20_000_000_000)
    assert words.slo(None) == LatencyObjectives() and words.in_words(words.slo("tpot=1.5s")) == "tpot=1.5s"
    assert words.duration_s("5m", "x") == 300 and words.duration_s(".5", "x") == 0.5
    with pytest.raises(ConfigError):
        words.duration_s("0s", "x")
