"""What the scripts of this folder share. ``clients.py`` runs them with the Python of the client's environment, and they
print a JSON line for each call. Knows nothing of Diptych's code, which is not there."""

import json
import os
import time
import urllib.request
from collections.abc import Callable
from typing import Any

ROOT, MODEL, KEY = (os.environ[f"CLIENTS_{name}"] for name in ("URL", "MODEL", "KEY"))
URL = f"{ROOT}/v1"
QUESTION = "Return the sum of two numbers"
TOO_LONG = "word " * 20_000  # more than the context of the model
ENDLESS = 7_000  # tokens of an answer that is to be ended by the client
COLOURS = ("red", "green", "blue")
ABORT_S = 1.0  # until the server must have noticed

_calls: list[tuple[str, Callable[[], object]]] = []


def call(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """The function makes this call, and raises what is wrong with it."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        _calls.append((name, function))
        return function

    return register


def expect(condition: object, what: object) -> None:
    """Raises AssertionError, which says what was there instead."""
    if not condition:
        raise AssertionError(str(what))


def run() -> None:
    """All calls of the script, in its order."""
    for name, function in _calls:
        begin = time.monotonic()
        try:
            function()
            outcome = "ok"
        except Exception as error:  # whatever the client makes of it is the result
            outcome = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps({"call": name, "outcome": outcome, "s": round(time.monotonic() - begin, 3)}), flush=True)


def expect_choice(choice: Any) -> None:
    """The fields that every schema here asks for, as a dictionary or an object."""
    fields = choice if isinstance(choice, dict) else choice.model_dump()
    expect(fields.get("colour") in COLOURS and fields.get("count") in range(10), fields)


def num_running() -> float:
    """Requests that the server computes now."""
    asked = urllib.request.Request(f"{ROOT}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))


def expect_abort(leave: Callable[[], object]) -> None:
    """A request runs; the client leaves it, and the server notices."""
    until = time.monotonic() + ABORT_S
    while not num_running():  # a metric is as new as the worker's last report
        expect(time.monotonic() < until, "the request does not run")
        time.sleep(0.02)
    leave()
    until = time.monotonic() + ABORT_S
    while num_running():
        expect(time.monotonic() < until, f"the request still runs {ABORT_S:g} s after the client left")
        time.sleep(0.02)
