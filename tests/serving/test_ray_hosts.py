"""Ray on two hosts, which are network namespaces: one of them loses its power under load."""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from two_hosts import UNSHARE, why_not

SCRIPT = Path(__file__).parent / "two_ray_hosts.py"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_streams_go_on_when_a_host_of_the_ray_cluster_loses_its_power() -> None:
    """Long before Ray finds out; how long it takes is printed by the script."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed (pip install '.[ray]')")
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:  # short: Ray makes sockets there
        ran = subprocess.run([*UNSHARE, sys.executable, SCRIPT, directory], capture_output=True, text=True)
        logs = "\n".join(path.read_text() for path in sorted(Path(directory).glob("*.log")))
    assert ran.returncode == 0, f"{ran.stderr}\n{logs}"
    seen = json.loads(ran.stdout)
    assert not seen["errors"] and all(seen["same"]), seen
    assert seen["retries"], "some were on the host that was lost"
    assert seen["killed"] and seen["unfinished"] == len(seen["same"]), "all were under way"
