"""Does Diptych read what is published as its makers do? Chat templates, configs, tokenizers, tool schemas.

    python benchmarks/compatibility.py templates [--folder FOLDER] [--json compatibility-templates.json]
    python benchmarks/compatibility.py configs | schemas | tokenizers [...]

Each part prints a table and what differs. FOLDER keeps the packages that a part downloads, so that a second run needs
no network; without it they are fetched into a temporary folder. The parts are the modules compatibility_NAME.py, each
with a docstring that says what it compares and what counts as right.
"""

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any

from common import report

PARTS = tuple(
    sorted(path.stem.removeprefix("compatibility_") for path in Path(__file__).parent.glob("compatibility_*.py"))
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, help="where downloaded packages are kept")
    parser.add_argument("--limit", type=int, help="of cases of each source, for a quick look")
    parser.add_argument("--show", type=int, default=20, help="how many differences are printed")
    parser.add_argument("--json", help="name of a file in benchmarks/results")
    arguments = parser.parse_args()
    module: Any = importlib.import_module(f"compatibility_{arguments.part}")
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or Path(temporary)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = module.run(arguments)  # rows: of the table; the rest goes into the file, too
    report(f"Compatibility: {arguments.part}", found.pop("rows"), arguments.json, **found)


if __name__ == "__main__":
    main()
