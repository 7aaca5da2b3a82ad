"""What the tool loops of this folder share: the task, and the tools that read the files of the folder they run in. They
run with the Python of their client's environment, without any of Diptych's code."""

import os
from pathlib import Path

ROOT, MODEL, KEY, PROMPT = (os.environ[f"AGENT_{name}"] for name in ("URL", "MODEL", "KEY", "PROMPT"))
URL = f"{ROOT}/v1"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "Of a text file."}}}
SCHEMA = {**PARAMETERS, "required": ["path"], "additionalProperties": False}
DESCRIPTIONS = {"read_file": "Read a text file.", "count_lines": "Read a text file, with numbers of lines."}


def read_file(path: str) -> str:
    """Read a text file.

    Args:
        path: Of the file.
    """
    return Path(path).read_text()


def count_lines(path: str) -> str:
    """Read a text file, with numbers of lines.

    Args:
        path: Of the file.
    """
    return "\n".join(f"{number}: {line}" for number, line in enumerate(Path(path).read_text().splitlines(), 1))


TOOLS = {"read_file": read_file, "count_lines": count_lines}
MOST_STEPS = 6
