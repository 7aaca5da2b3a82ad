"""A prefill worker and a decode worker on two hosts, which are network namespaces: the real model, KV over TLS."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import UNSHARE, why_not

SCRIPT = Path(__file__).parent / "two_hosts.py"


@pytest.mark.system
@pytest.mark.timeout(240)
def test_two_hosts_answer_as_one_does_also_while_the_link_between_them_is_down(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ran = subprocess.run([*UNSHARE, sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert ran.returncode == 0, f"{ran.stderr}\n{logs}"
    seen = json.loads(ran.stdout)
    assert seen["handoffs"] == 6 and seen["bytes"] > 6 * 50_000, "KV went from host to host"
    assert seen["alone"] == seen["answers"], "computed whole on the near host"
    assert seen["again"] == seen["answers"] and seen["more_handoffs"] > 0
    assert "with what it holds" in logs, "the process of the far worker was kept"
