"""The container image, without a container engine: its root file system is assembled as deploy/Containerfile says, and
a server runs there as an unprivileged user, on a read-only root, without a network."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.image_root import instructions, needed

ROOT = Path(__file__).parents[1]
UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")


def why_not() -> str:
    """Why it cannot be assembled here; "" when it can."""
    if os.geteuid():
        return "chroot needs root"
    if missing := [name for name in ("unshare", "ip", "chroot", "g++", "useradd") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    tried = subprocess.run([*UNSHARE, "mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def test_a_containerfile_is_read_as_it_is_written() -> None:
    text = "# a remark\nFROM a AS b\nRUN one && \\\n    two\n\nUSER 1000:1000\n"
    assert list(instructions(text)) == [("FROM", "a AS b"), ("RUN", "one &&      two"), ("USER", "1000:1000")]
    words = [word for word, _ in instructions((ROOT / "deploy/Containerfile").read_text())]
    assert words.count("FROM") == 2 and words[-1] == "CMD"


def test_the_image_needs_what_the_project_says() -> None:
    names = needed("engine")
    assert {"torch", "fastapi", "starlette", "tokenizers", "llguidance", "cryptography"} <= names
    assert not names & {"pytest", "mypy", "diptych", "ray"}


def test_the_context_of_the_image_leaves_out_what_git_ignores_or_is() -> None:
    left_out = (ROOT / ".containerignore").read_text().splitlines()
    assert {".git", ".venv", "node_modules", "**/*.so"} <= set(left_out)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(1800)
def test_a_server_runs_in_the_image_as_an_unprivileged_user_without_a_network() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as directory:
        command = [*UNSHARE, sys.executable, str(ROOT / "tests/image_root.py"), directory]
        ran = subprocess.run(command, capture_output=True, text=True)
        log = Path(directory, "server.log")
        assert ran.returncode == 0, f"{ran.stderr}\n{log.read_text() if log.exists() else ''}"
    seen = json.loads(ran.stdout)
    assert seen["answer"]["usage"]["completion_tokens"] == 12 and seen["answer"]["choices"][0]["text"].strip()
    assert seen["is_read_only"]
    assert seen["users"] == ["1000"] and seen["interfaces"] == ["lo"]
    assert seen["status"] == 0, "SIGTERM ends it in order"
    assert seen["kernels"], "the build stage has built the native kernels"
