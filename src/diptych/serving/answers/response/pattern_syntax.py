"""The syntax of the patterns in response templates: from text to a program for pattern.py.

The subset of Python's regular expressions that describes markers: characters, classes, ``.`` (newlines too), groups
with and without names, ``|``, greedy and lazy repeats, ``\\A`` or ``^`` (the beginning of the answer), and a lookahead
``(?=...)`` at the very end. Everything else is refused by name. A program is for Thompson's simulation with captures
(Cox, "Regular Expression Matching: the Virtual Machine Approach"), so no text makes a pattern slow.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from diptych.control.errors import ConfigError

MAX_REPEATS = 256
MAX_PROGRAM = 10_000
_CLASS_LETTERS = "sSdDwW"
_LITERAL_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class Op(IntEnum):
    """Instructions of a program."""

    CHAR = 0  # consume one character that the test accepts
    SPLIT = 1  # continue at x, and with lower priority at y
    JUMP = 2
    SAVE = 3  # write the position into slot x
    START = 4  # go on only at the beginning of the text
    MATCH = 5


Test = Callable[[str], Any]


@dataclass(slots=True)
class Program:
    """ops[i], x[i], y[i]: an instruction and its operands. tests[i]: of CHAR. names: of groups, with their first slot
    (slots 0 and 1: the whole match)."""

    ops: list[Op] = field(default_factory=list)
    x: list[int] = field(default_factory=list)
    y: list[int] = field(default_factory=list)
    tests: list[Test | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of the tests, as a regular expression of one character
    names: dict[str, int] = field(default_factory=dict)
    num_slots: int = 2

    def emit(self, op: Op, x: int = 0, y: int = 0, test: Test | None = None, source: str = "") -> int:
        """Append an instruction; returns its number."""
        if len(self.ops) >= MAX_PROGRAM:
            raise ConfigError(f"a pattern has more than {MAX_PROGRAM} instructions")
        self.ops.append(op)
        self.x.append(x)
        self.y.append(y)
        self.tests.append(test)
        self.sources.append(source)
        return len(self.ops) - 1

    def cut(self, size: int) -> None:
        """Keep the first ``size`` instructions."""
        del self.ops[size:], self.x[size:], self.y[size:], self.tests[size:], self.sources[size:]


def compile_literals(literals: Sequence[str]) -> Program:
    """A program for any of these texts; of two that match at the same place, the longer wins."""
    ordered = sorted(dict.fromkeys(literals), key=len, reverse=True)
    return compile_pattern("|".join(re.escape(text) for text in ordered))


def compile_pattern(source: str) -> Program:
    """The program of a pattern. Raises ConfigError that names what is not supported."""
    program = Program()
    program.emit(Op.SAVE, 0)
    compiler = _Compiler(source, program)
    compiler.alternatives()
    if compiler.at < len(source):
        raise compiler.refuse("an unbalanced )")
    if not compiler.has_end:
        program.emit(Op.SAVE, 1)
    program.emit(Op.MATCH)
    return program


class _Compiler:
    """Recursive descent over one pattern; each method emits the instructions of what it reads."""

    def __init__(self, source: str, program: Program) -> None:
        self.source = source
        self.program = program
        self.at = 0
        self.depth = 0
        self.has_end = False  # a lookahead has fixed the end of the match

    def refuse(self, what: str) -> ConfigError:
        """The error for a construct at the present place."""
        return ConfigError(f"the pattern {self.source!r} has {what} at {self.at}, which is not supported")

    def alternatives(self) -> None:
        """a|b|c"""
        program, ends = self.program, []
        while True:
            split = program.emit(Op.SPLIT, len(program.ops) + 1)
            self.sequence()
            if self.peek() != "|":
                program.ops[split], program.x[split] = Op.JUMP, split + 1
                break
            if self.has_end:
                raise self.refuse("a lookahead that is not at the end")
            self.at += 1
            ends.append(program.emit(Op.JUMP))
            program.y[split] = len(program.ops)
        for end in ends:
            program.x[end] = len(program.ops)

    def sequence(self) -> None:
        """abc"""
        while (character := self.peek()) not in ("", "|", ")"):
            if self.has_end:
                raise self.refuse("a lookahead that is not at the end")
            first = self.at
            start = len(self.program.ops)
            num_slots = self.program.num_slots
            self.item(character)
            self.repeats(first, start, num_slots)

    def peek(self) -> str:
        """The next character, "" at the end."""
        return self.source[self.at : self.at + 1]

    def item(self, character: str) -> None:
        """A character, a class or a group."""
        if character == "(":
            self.group()
        elif character == "[":
            self.test(self.class_source())
        elif character == ".":
            self.at += 1
            self.test(r"[\s\S]")
        elif character == "\\":
            self.escape()
        elif character == "^":
            self.at += 1
            self.program.emit(Op.START)
        elif character in "*+?{$" and not (character == "{" and not re.match(r"\{\d*,?\d*\}", self.source[self.at :])):
            raise self.refuse(f"a {character}")
        else:
            self.at += 1
            self.test(re.escape(character), character)

    def test(self, source: str, literal: str | None = None) -> None:
        """One character."""
        test: Test = literal.__eq__ if literal is not None else re.compile(source).match
        self.program.emit(Op.CHAR, test=test, source=source)

    def class_source(self) -> str:
        """[...] up to its bracket."""
        found = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(self.source, self.at)
        if found is None:
            raise self.refuse("an open [")
        self.at = found.end()
        try:
            re.compile(found.group())
        except re.error as error:
            raise self.refuse(f"a class ({error})") from None
        return found.group()

    def escape(self) -> None:
        """\\s, \\n, \\A, \\x41, or an escaped character."""
        letter = self.source[self.at + 1 : self.at + 2]
        if letter == "A":
            self.at += 2
            self.program.emit(Op.START)
            return
        if letter in ("x", "u"):
            length = 4 if letter == "x" else 6
            text = self.source[self.at : self.at + length]
            try:
                literal = chr(int(text[2:], 16))
            except ValueError:
                raise self.refuse(f"a {text}") from None
            self.at += length
            self.test(re.escape(literal), literal)
            return
        if letter in _CLASS_LETTERS and letter:
            self.test(f"\\{letter}")
        elif letter in _LITERAL_LETTERS:
            self.test(re.escape(_LITERAL_LETTERS[letter]), _LITERAL_LETTERS[letter])
        elif letter.isalnum() or not letter:
            raise self.refuse(f"a \\{letter}")
        else:
            self.test(re.escape(letter), letter)
        self.at += 2

    def group(self) -> None:
        """( ... ), (?: ... ), (?P<name> ... ), (?= ... )"""
        if self.depth > 50:
            raise self.refuse("a group within 50 groups")
        opening = re.compile(r"\((?:\?(?::|=|P<(\w+)>))?(?!\?)").match(self.source, self.at)
        if opening is None:
            raise self.refuse(f"a group {self.source[self.at : self.at + 4]}")
        self.at = opening.end()
        is_ahead, program = opening.group().endswith("="), self.program
        slot = -1
        if not opening.group().endswith((":", "=")):
            slot, program.num_slots = program.num_slots, program.num_slots + 2
            program.emit(Op.SAVE, slot)
            if name := opening.group(1):
                program.names[name] = slot
        if is_ahead:
            if self.depth:
                raise self.refuse("a lookahead within a group")
            program.emit(Op.SAVE, 1)
        self.depth += 1
        self.alternatives()
        self.depth -= 1
        if self.peek() != ")":
            raise self.refuse("an open (")
        self.at += 1
        self.has_end = self.has_end or is_ahead
        if slot >= 0:
            program.emit(Op.SAVE, slot + 1)

    def repeats(self, first: int, start: int, num_slots: int) -> None:
        """*, +, ?, {m,n} and their lazy forms behind the item that was read from ``first`` on."""
        found = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})(\??)").match(self.source, self.at)
        if found is None or found.group(1) == "{}":
            return
        if self.has_end:
            raise self.refuse("a repeated lookahead")
        sign, end = found.group(1), found.end()
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (0, None))
        if sign[0] == "{":
            low = int(found.group(2) or 0)
            high = low if not found.group(3) else int(found.group(4)) if found.group(4) else None
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self.refuse(f"the repeat {sign}")
        program = self.program
        program.cut(start)
        is_lazy = bool(found.group(5))

        def copy() -> None:
            self.at, program.num_slots = first, num_slots
            self.item(self.peek())

        for _ in range(low):
            copy()
        splits = []
        if high is None:
            splits.append(program.emit(Op.SPLIT))
            copy()
            program.emit(Op.JUMP, splits[0])
        else:
            for _ in range(high - low):
                splits.append(program.emit(Op.SPLIT))
                copy()
        for split in splits:
            into, past = split + 1, len(program.ops)
            program.x[split], program.y[split] = (past, into) if is_lazy else (into, past)
        self.at = end
        if self.source[end : end + 1] in ("*", "+", "?"):
            raise self.refuse("two repeats in a row")
