"""Which settings of a worker are for a CPU alone. Imports no torch, so that they are refused before it is loaded."""

from collections.abc import Mapping
from typing import Any

from diptych.control.errors import ConfigError

CPU_ONLY: Mapping[str, Any] = {  # by setting: the value that every device takes
    "quantize": "none",
    "kv_dtype": "auto",
    "shared_pool": None,
    "shared_weights": None,
    "shared_host": None,
}


def check_cpu_only(given: Mapping[str, Any], device: str) -> None:
    """Raises ConfigError for a value of ``given`` that only a CPU takes, when ``device`` is another."""
    for name, value in given.items():
        if value != CPU_ONLY[name] and device != "cpu":
            raise ConfigError(f"{name} is {value!r} and device is {device}; supported: cpu", param=name)
