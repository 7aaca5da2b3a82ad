"""Mutants that no test can notice, since the program does the same with them: the list that scripts/mutants reads.

The list is equivalent_mutants.toml, an entry each, with the reason. A mutant is identified by its file, the function
around it, and the line before and after, without comments: lines above it may come and go.
"""

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults import Fault, Places
from reaching_tests import SOURCE, function_at

LIST = Path(__file__).with_name("equivalent_mutants.toml")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed line. file: from src/diptych. function: its qualified name; empty for a line of the module itself."""

    file: str
    function: str
    before: str
    after: str

    @staticmethod
    def of(fault: Fault, source: str) -> "Mutant":
        """The mutant that a fault makes of this source of its file."""
        function = function_at(source, fault.line).rstrip(".")
        file = fault.path.relative_to(SOURCE) if fault.path.is_relative_to(SOURCE) else fault.path
        return Mutant(str(file), function, _code(fault.before), _code(fault.text))


def read_list(path: Path = LIST) -> dict[Mutant, str]:
    """The reasons, by mutant. Raises ValueError for an entry that is there twice or gives no reason."""
    found: dict[Mutant, str] = {}
    for entry in tomllib.loads(path.read_text()).get("mutant", []):
        reason = entry.pop("reason", "")
        mutant = Mutant(**entry)
        if mutant in found or not reason:
            raise ValueError(f"{mutant} is in the list {'twice' if mutant in found else 'without a reason'}")
        found[mutant] = reason
    return found


def faults_of(mutants: Iterable[Mutant]) -> Iterator[tuple[Mutant, Fault | None]]:
    """Each with the fault that makes it; None: its file, function or line has changed, and it cannot be made."""
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for file, wanted in by_file.items():
        found = _faults_in(SOURCE / file, wanted)
        yield from ((mutant, found.get(mutant)) for mutant in wanted)


def _faults_in(path: Path, wanted: Collection[Mutant]) -> dict[Mutant, Fault]:
    """Those of a file. What function a line is in is asked of few: it takes as long as to parse the file."""
    if not path.exists():
        return {}
    source, lines = path.read_text(), {(mutant.before, mutant.after) for mutant in wanted}
    faults = (fault for place in Places(path).find() for fault in place)
    return {Mutant.of(fault, source): fault for fault in faults if (_code(fault.before), _code(fault.text)) in lines}


def _code(line: str) -> str:
    return line.partition("  # ")[0].strip()
