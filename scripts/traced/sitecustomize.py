"""Notes which functions of diptych run, in every process that has this folder in PYTHONPATH (see scripts/walk).

Python imports this module by its name when a process starts. Between the files ``go`` and ``stop`` in the folder that
DIPTYCH_WALK names, each call of a function of diptych is kept: its time, its file, the file of the function of diptych
that it was called from, its name. Then they are written beside these files, for each process one file.
"""

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

LOOK_S = 0.02


def package() -> str:
    """The folder of the package, which is not imported here."""
    spec = importlib.util.find_spec("diptych")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent) + os.sep


class CallLog:
    """Calls of a process. It is what ``sys.setprofile`` asks for, in each of its threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package = package()
        self._is_on = False
        self._calls: list[tuple[int, str, str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._is_on or event != "call":
            return
        file = frame.f_code.co_filename
        if not file.startswith(self._package):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._package):
            caller = caller.f_back
        origin = caller.f_code.co_filename if caller is not None else ""
        self._calls.append((time.monotonic_ns(), file, origin, frame.f_code.co_qualname))

    def keep(self) -> None:
        """Look for ``go`` and ``stop`` until the calls are written."""
        while not (self._folder / "stop").exists():
            self._is_on = (self._folder / "go").exists()
            time.sleep(LOOK_S)
        self._is_on = False
        start = len(self._package)
        calls = [(when, file[start:], origin[start:], name) for when, file, origin, name in self._calls]
        part = self._folder / f"{os.getpid()}.part"
        part.write_text(json.dumps({"command": sys.orig_argv, "calls": calls}))
        part.rename(part.with_suffix(".json"))


if "DIPTYCH_WALK" in os.environ:
    log = CallLog(Path(os.environ["DIPTYCH_WALK"]))
    threading.Thread(target=log.keep, name="walk", daemon=True).start()
    threading.setprofile(log)
    sys.setprofile(log)
