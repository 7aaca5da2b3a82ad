"""Searching a growing text for the first of several patterns.

A match is reported as soon as no later character can change it: the earliest one, as each pattern prefers it, and of
several patterns that match at the same place the longest. Text arrives in pieces of any size; where they are cut
changes nothing. ``Search.hold`` says from where on text may still belong to a match.

The package ``regex`` (2026.11.19) has partial matches and a time limit, and was tried in place of this. It prefers a
whole match to an earlier one that may still become whole ("ab+c|b" in "xab" matches "b"), and does not say that a match
at the end of the text may grow ("<a+" in "<aa"). With each match that touches the end held back, four of the templates
broke the laws of tests/serving/test_response_parser.py. Each piece searches again from the place that is held: 2,000,
4,000 and 8,000 pieces of an open call took 0.03, 0.12 and 0.47 s of processor time. Here they take 0.08, 0.13 and
0.26 s: the time grows with the text alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.serving.answers.response.pattern_syntax import Op, Program, compile_literals, compile_pattern

Slots = tuple[int, ...]
Thread = tuple[int, Slots]


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """Text [start, end) matches pattern number ``number``. groups: the named groups that took part, as [start, end)."""

    number: int
    start: int
    end: int
    groups: dict[str, tuple[int, int]]


class Pattern:
    """A regular expression, or one of several literal texts. It never matches an empty text."""

    def __init__(self, source: str | None = None, *, literals: Sequence[str] = ()) -> None:
        self.source = source if source is not None else "|".join(map(re.escape, literals))
        self.program = compile_literals(literals) if source is None else compile_pattern(source)
        first = [pc for pc, _ in closure(self.program, 0, (0,) * self.program.num_slots, 0, set())]
        if any(self.program.ops[pc] is Op.MATCH for pc in first):
            raise ConfigError(f"the pattern {self.source!r} matches an empty text")
        self.first = "|".join(sorted({self.program.sources[pc] for pc in first}))  # characters that it begins with

    @property
    def group_names(self) -> frozenset[str]:
        """Names of its groups."""
        return frozenset(self.program.names)


def closure(program: Program, pc: int, slots: Slots, position: int, seen: set[int]) -> list[Thread]:
    """The threads at CHAR and MATCH that are reached from ``pc`` without a character, those preferred first. seen:
    instructions that threads of a higher priority have reached; grows."""
    found, stack = [], [(pc, slots)]
    while stack:
        pc, slots = stack.pop()
        while pc not in seen:
            seen.add(pc)
            op = program.ops[pc]
            if op is Op.CHAR or op is Op.MATCH:
                found.append((pc, slots))
                break
            if op is Op.SAVE:
                slot = program.x[pc]
                slots = (*slots[:slot], position, *slots[slot + 1 :])
                pc += 1
            elif op is Op.SPLIT:
                stack.append((program.y[pc], slots))
                pc = program.x[pc]
            elif op is Op.JUMP:
                pc = program.x[pc]
            elif position == 0:
                pc += 1
            else:
                break
    return found


class _Simulation:
    """One pattern over the text so far."""

    __slots__ = ("match", "program", "threads")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.threads: list[Thread] = []  # those preferred first, so in the order of their starts
        self.match: Slots | None = None  # the best so far; only threads before it are still alive

    def begin(self, position: int) -> None:
        """A match might begin here."""
        program = self.program
        seen = {pc for pc, _ in self.threads}
        self.threads += closure(program, 0, (position,) * program.num_slots, position, seen)

    def push(self, character: str, position: int) -> None:
        """The character before ``position``."""
        program, alive, seen = self.program, [], set[int]()
        tests = program.tests
        for pc, slots in self.threads:
            test = tests[pc]
            if test is None or not test(character):
                continue
            alive += closure(program, pc + 1, slots, position, seen)
        for number, (pc, slots) in enumerate(alive):
            if program.ops[pc] is Op.MATCH:
                self.match = slots
                del alive[number:]
                break
        self.threads = alive


class Search:
    """A search from ``position`` on (0: the beginning of the answer) until the first match."""

    def __init__(self, patterns: Sequence[Pattern], position: int = 0) -> None:
        self._simulations = [_Simulation(pattern.program) for pattern in patterns]
        sources = "|".join(sorted({pattern.first for pattern in patterns}))
        self._first = re.compile(sources) if patterns else None
        self._names = [pattern.program.names for pattern in patterns]
        self.position = position
        self.hold = position  # before it, no text belongs to a match that is still open

    def push(self, text: str, start: int = 0) -> PatternMatch | None:
        """Look at text[start:], which follows what was looked at before. Returns the match once it is certain; the
        search is over then, and ``position`` says how far it has looked."""
        at, size = start, len(text)
        if self._first is None:
            self.position += size - at
            self.hold = self.position
            return None
        is_idle = self.hold == self.position
        while at < size:
            if is_idle:
                found = self._first.search(text, at)
                skipped = (found.start() if found else size) - at
                self.position += skipped
                self.hold = self.position
                at += skipped
                if found is None:
                    break
            if match := self._step(text[at]):
                return match
            at += 1
            is_idle = self.hold == self.position
        return None

    def finish(self) -> PatternMatch | None:
        """The text is over: the best match that there is."""
        return self._best()

    def _step(self, character: str) -> PatternMatch | None:
        has_match = False
        hold = position = self.position + 1
        for simulation in self._simulations:
            if simulation.match is None:
                simulation.begin(self.position)
            simulation.push(character, position)
            if simulation.threads:
                hold = min(hold, simulation.threads[0][1][0])
            has_match = has_match or simulation.match is not None
        self.position = position
        if not has_match:
            self.hold = hold
            return None
        best = self._best()
        assert best is not None
        self.hold = min(hold, best.start)
        return None if hold <= best.start else best

    def _best(self) -> PatternMatch | None:
        found = [
            (slots[0], -slots[1], number)
            for number, simulation in enumerate(self._simulations)
            if (slots := simulation.match) is not None
        ]
        if not found:
            return None
        start, negative_end, number = min(found)
        slots = self._simulations[number].match
        assert slots is not None
        names = self._names[number].items()
        groups = {name: (slots[slot], slots[slot + 1]) for name, slot in names if slots[slot + 1] > start}
        return PatternMatch(number, start, -negative_end, groups)


class Prefix:
    """A pattern at the very beginning of a growing text, behind any white space. None: nothing is looked for."""

    def __init__(self, pattern: Pattern | None) -> None:
        self._simulation = None if pattern is None else _Simulation(pattern.program)
        self._names = {} if pattern is None else pattern.program.names
        self._num_spaces = 0
        self._position = 1  # never the beginning of an answer
        self.is_over = pattern is None  # no more text changes what was found
        if self._simulation is not None:
            self._simulation.begin(1)

    def push(self, text: str, at: int = 0) -> bool:
        """Look at text[at:], which follows what was looked at before. Whether the end is certain now."""
        simulation = self._simulation
        while not self.is_over and at < len(text):
            assert simulation is not None
            if self._position == 1 and text[at].isspace():
                before = simulation.threads
                simulation.push(text[at], 2)
                if not simulation.threads and simulation.match is None:  # the pattern has no such space itself
                    simulation.threads = before
                    self._num_spaces += 1
                    at += 1
                    continue
                self._position = 2
            else:
                self._position += 1
                simulation.push(text[at], self._position)
            at += 1
            self.is_over = not simulation.threads
        return self.is_over

    @property
    def size(self) -> int:
        """Characters of the space and the match; 0 where there is no match (so far)."""
        if self._simulation is None or self._simulation.match is None:
            return 0
        return self._num_spaces + self._simulation.match[1] - 1

    def groups(self, text: str) -> dict[str, str]:
        """The named groups of the match in this text."""
        assert self._simulation is not None and self._simulation.match is not None
        slots, shift = self._simulation.match, self._num_spaces - 1
        return {name: text[slots[at] + shift : slots[at + 1] + shift] for name, at in self._names.items()}


def find_all(pattern: Pattern, text: str) -> list[PatternMatch]:
    """The matches in a whole text, from left to right, without overlaps."""
    found, at = [], 0
    while at < len(text):
        search = Search([pattern], at)
        match = search.push(text, at) or search.finish()
        if match is None:
            break
        found.append(match)
        at = match.end
    return found
