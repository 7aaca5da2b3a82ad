"""Blows of every kind under load, by the benchmark that repeats them, and what that benchmark takes for a fault."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

JUDGED = """
import time
from blow_load import Allowed, Client, Refused
from blows import KINDS, Befallen, Run, summary
run = Run(None, [], list(KINDS), 1, lambda row: None)
now = time.monotonic()
assert run.allows(now) == Allowed()
run.befallen = [Befallen(Allowed(frozenset({"no_worker"})), now - 100.0), Befallen(Allowed(broken=True), now - 1.0)]
assert run.allows(now) == Allowed(broken=True)  # the first was over long before
assert run.allows(now - 110.0) == Allowed(frozenset({"no_worker"}), broken=True)
client = Client(1, run.allows)
client._refused("whole", now - 110.0, Refused(503, "no_worker"))
assert not client.outcome.faults
client._refused("whole", now, Refused(503, "no_worker"))
client._refused("whole", now - 110.0, Refused(503, "no_worker", is_stated=False))
client._refused("whole", now - 110.0, Refused(500, "None"))
client.outcome.compare("stream", [1, 2], [1, 3])
client.outcome.compare("stream", [1, 3], [1, 3])
assert len(client.outcome.faults) == 4 and client.outcome.counts["wrong"] == client.outcome.counts["right"] == 1
assert {fleet for kind in KINDS for fleet in kind.fleets} == {"local", "joined"}
rows = [
    {"blow": 0, "kind": "kill", "ends": {"right": 2, "refused no_worker": 1}, "faults": []},
    {"blow": 1, "kind": "stop", "ends": {"wrong": 1}, "faults": ["a"], "pause_s": 2.0},
    {"check": 2, "ends": {"right": 3}, "faults": ["left behind"]},
]
kill, stop, whole = summary(rows)
assert (kill["blows"], kill["right"], kill["refused"], kill["faults"]) == (1, 2, 1, 0)
assert (stop["wrong"], stop["faults"], stop["longest pause s"]) == (1, 1, 2.0)
assert (whole["blows"], whole["right"], whole["faults"]) == (2, 5, 2)
"""


def test_what_a_blow_does_not_allow_is_a_fault() -> None:
    done = subprocess.run([sys.executable, "-c", JUDGED], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def has_namespaces() -> bool:
    """Whether a file system of one's own can be mounted here."""
    words = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs tmpfs "$0"', "/mnt"]
    return bool(shutil.which("nsenter") and shutil.which("unshare")) and subprocess.run(words).returncode == 0


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fleet", ["local", "joined"])
def test_blows_of_every_kind_leave_no_wrong_answer_and_nothing_behind(fleet: str, tmp_path: Path) -> None:
    if not has_namespaces():
        pytest.skip("no namespaces for a small disk")
    rows, result = tmp_path / "rows.jsonl", tmp_path / "blows.json"
    words = ["--fleet", fleet, "--seed", "1", "--rows", str(rows), "--json", str(result), "--logs", str(tmp_path)]
    for blows, more in (("8", []), ("16", ["--resume"])):
        command = [sys.executable, "blows.py", *words, "--blows", blows, *more]
        done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    numbers = [row["blow"] for row in map(json.loads, rows.read_text().splitlines()) if "blow" in row]
    assert numbers == list(range(16))
    everything = json.loads(result.read_text())["rows"][-1]
    assert everything["right"] > 0 and everything["wrong"] == everything["stuck"] == everything["faults"] == 0
