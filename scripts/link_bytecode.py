"""Fill a folder of byte code (PYTHONPYCACHEPREFIX) with links to what lies beside the sources of installed packages.

Python looks in that folder alone once it is named: without this, the first run of the tests compiles torch,
transformers and all others a second time, in several processes at once. Usage: scripts/link_bytecode.py FOLDER
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CACHE = "__pycache__"


def compiled(root: Path) -> Iterator[Path]:
    """The files of byte code below a folder."""
    for folder, folders, _ in os.walk(root):
        if CACHE in folders:
            folders.remove(CACHE)
            with os.scandir(Path(folder, CACHE)) as found:
                yield from (Path(entry.path) for entry in found if entry.name.endswith(".pyc"))


def place_of(file: Path, target: Path) -> Path:
    """Where Python looks for it when ``target`` is named."""
    return target.joinpath(*file.parent.parent.parts[1:], file.name)


def link(roots: list[Path], target: Path) -> int:
    """Link what is missing. Returns how many were."""
    count = 0
    for file in (file for root in roots for file in compiled(root)):
        place = place_of(file, target)
        try:
            os.symlink(file, place)
        except FileNotFoundError:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file, place)
        except FileExistsError:
            continue
        count += 1
    return count


def main() -> None:
    """Link the packages of this environment, and the standard library; nothing where that was done since both were
    installed."""
    target = Path(sys.argv[1]).absolute()
    roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    marker, newest = target / "linked", max(root.stat().st_mtime for root in roots)
    if marker.exists() and marker.stat().st_mtime > newest:
        return
    target.mkdir(parents=True, exist_ok=True)
    print(f"{link(roots, target)} files of byte code are taken from the environment")
    marker.touch()


if __name__ == "__main__":
    main()
