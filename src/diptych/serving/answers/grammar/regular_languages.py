"""Regular expressions of ECMA 262 as automata, by derivatives: what they match with lookahead, and what they do not.

Brzozowski, "Derivatives of Regular Expressions" (1964); Owens, Reppy and Turon, "Regular-expression derivatives
re-examined" (2009) for classes of characters. Lookbehind, back references and word boundaries are refused.
"""

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

MAX_STATES = 160
MAX_REPEATS = 260
MAX_WRITTEN = 16_384  # characters of an expression
_SAMPLES = "aAzZ09_-. \t\n\r\x00\x7f\x85\xa0éß\u0130\u2028\u3000\ufeff中\U0001f600"

Node = tuple[Any, ...]  # of an expression: its kind, and what it consists of
NONE: Node = ("none",)
EMPTY: Node = ("empty",)


class Alphabet:
    """Characters, told apart by the classes of one expression only. A letter is the number of such a kind."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = list(dict.fromkeys(classes))
        tests: list[Callable[[str], Any] | None] = []
        samples = dict.fromkeys(_SAMPLES)
        for source in self._classes:
            try:
                tests.append(re.compile(source).match)
            except re.error:  # a property of Unicode: of which nothing is known here
                tests.append(None)
            for character in re.findall(r"\\u\{([0-9a-f]+)\}", _unescaped(source)):
                samples.update(
                    (chr(code), None)
                    for code in range(max(0, int(character, 16) - 1), min(0x10FFFF, int(character, 16) + 1) + 1)
                )
        unknown = [number for number, test in enumerate(tests) if test is None]
        if len(unknown) > 3:
            raise ValueError("the regular expression has too many properties of Unicode")
        kinds: dict[tuple[bool, ...], None] = {}
        for sample in samples:
            known = [bool(test(sample)) if test is not None else False for test in tests]
            for mask in range(1 << len(unknown)):
                for place, number in enumerate(unknown):
                    known[number] = bool(mask >> place & 1)
                kinds[tuple(known)] = None
        self._kinds = list(kinds)
        self.letters = range(len(self._kinds))

    def members(self, source: str) -> frozenset[int]:
        """The letters of a class."""
        number = self._classes.index(source)
        return frozenset(letter for letter in self.letters if self._kinds[letter][number])

    def written(self, letters: frozenset[int]) -> str:
        """A class of characters for some letters."""
        if len(letters) == len(self._kinds):
            return r"[\s\S]"
        for number, source in enumerate(self._classes):
            inside = {letter for letter in self.letters if self._kinds[letter][number]}
            if inside == letters:
                return _for_compiler(source)
            if inside == set(self.letters) - letters:
                return f"[^{_for_compiler(source)}]"
        return f"[{''.join(self._written_kind(self._kinds[letter]) for letter in sorted(letters))}]"

    def _written_kind(self, kind: tuple[bool, ...]) -> str:
        parts = [
            _for_compiler(source) if is_in else f"[^{_for_compiler(source)}]"
            for source, is_in in zip(self._classes, kind, strict=True)
        ]
        return f"[{'&&'.join(parts)}]" if parts else r"[\s\S]"


def _for_compiler(source: str) -> str:
    return source if source.startswith("[") else f"[{source}]"


def _unescaped(source: str) -> str:
    """A class with each of its characters by number."""
    plain = re.sub(r"\\[pP]\{[^}]*\}|\\[sSdDwW]", "", source)
    return "".join(rf"\u{{{ord(character):x}}}" for character in plain.replace("\\", ""))


class ExpressionReader:
    """Reads an expression; ``tree`` is what it says, with assertions in it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.classes: list[str] = []
        self.tree = self._alternatives()
        if self._at < len(source):
            raise ValueError("the regular expression has an unbalanced )")

    def _peek(self, length: int = 1) -> str:
        return self._source[self._at : self._at + length]

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else ("any", *found)

    def _sequence(self) -> Node:
        found: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            found.append(self._repeated(self._item()))
        return ("all", *found)

    def _item(self) -> Node:
        character = self._peek()
        if character == "(":
            return self._group()
        if character in "^$":
            self._at += 1
            return ("begin",) if character == "^" else ("end",)
        if character == "[":
            found = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL).match(self._source, self._at)
            if found is None:
                raise ValueError("the regular expression has an open [")
            self._at = found.end()
            return self._class(_in_ascii(found.group()))
        if character == ".":
            self._at += 1
            return self._class(r"[^\n]")
        if character == "\\":
            return self._escape()
        self._at += 1
        return self._class(f"[{_literal(character)}]")

    def _class(self, source: str) -> Node:
        self.classes.append(source)
        return ("class", source)

    def _escape(self) -> Node:
        found = re.compile(
            r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|[sSdDwWnrtfv0]|[^\w])"
        ).match(self._source, self._at)
        if found is None:
            raise ValueError(f"the regular expression has {self._peek(2)}, which cannot be enforced")
        self._at = found.end()
        text = found.group()
        if text[1] in "sSdDwWpPnrtfvux":
            return self._class(f"[{_in_ascii(text)}]")
        return self._class(f"[{_literal(chr(0) if text[1] == '0' else text[1])}]")

    def _group(self) -> Node:
        opening = re.compile(r"\((?:\?(?::|=|!|<\w+>|P<\w+>))?(?!\?)").match(self._source, self._at)
        if opening is None:
            raise ValueError(f"the regular expression has {self._peek(4)}, which cannot be enforced")
        self._at = opening.end()
        inner = self._alternatives()
        if self._peek() != ")":
            raise ValueError("the regular expression has an open (")
        self._at += 1
        if opening.group().endswith(("?=", "?!")):
            return ("ahead", inner, opening.group().endswith("="))
        return inner

    def _repeated(self, item: Node) -> Node:
        found = re.compile(r"([*+?]|\{(\d+)(,?)(\d*)\})\??").match(self._source, self._at)
        if found is None:
            return item
        self._at = found.end()
        sign = found.group(1)
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (0, None))
        if sign[0] == "{":
            low = int(found.group(2))
            high = low if not found.group(3) else int(found.group(4)) if found.group(4) else None
        if max(low, high or 0) > MAX_REPEATS:
            raise ValueError(f"the regular expression has {sign}, which is too much beside lookahead")
        return ("repeat", item, low, high)


def _in_ascii(source: str) -> str:
    for short, full in ((r"\d", "0-9"), (r"\w", "0-9A-Za-z_")):
        source = source.replace(short, full)
    for short, full in ((r"\D", "[^0-9]"), (r"\W", "[^0-9A-Za-z_]")):
        if short in source:
            if source not in (short, f"[{short}]"):
                raise ValueError(f"the regular expression has {short} in a class, which cannot be enforced here")
            return full[1:-1] if source == short else full
    return source


def _literal(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[&~" else character


class Language:
    """The texts in which an expression matches somewhere, or with ``holds`` false all others."""

    def __init__(self, source: str, *, holds: bool = True) -> None:
        parser = ExpressionReader(source)
        self.alphabet = Alphabet(parser.classes)
        self._any = _letters(frozenset(self.alphabet.letters))
        self._all = _star(self._any)
        begun = self._language(parser.tree, self._all, True)
        later = _then(_then(self._any, self._all), self._language(parser.tree, self._all, False))
        whole = _either((begun, later))
        self.expression = whole if holds else _but(whole)

    def _language(self, node: Node, rest: Node, is_first: bool) -> Node:
        """What matches a part and then the rest."""
        match node:
            case ("class", source):
                return _then(_letters(self.alphabet.members(source)), rest)
            case ("begin",):
                return rest if is_first else NONE
            case ("end",):
                return _both((rest, EMPTY))
            case ("ahead", inner, is_wanted):
                ahead = self._language(inner, self._all, is_first)
                return _both((rest, ahead if is_wanted else _but(ahead)))
            case ("any", *choices):
                return _either(self._language(choice, rest, is_first) for choice in choices)
            case ("all", *items):
                firsts = [is_first]
                for item in items:
                    firsts.append(firsts[-1] and item[0] in ("begin", "ahead"))
                pairs = reversed(list(zip(items, firsts, strict=False)))
                return reduce(lambda after, pair: self._language(pair[0], after, pair[1]), pairs, rest)
            case ("repeat", item, low, high):
                return self._repeat(item, low, high, rest)
        raise AssertionError(node)

    def _repeat(self, item: Node, low: int, high: int | None, rest: Node) -> Node:
        if _asserts(item) and high is None:
            raise ValueError("the regular expression repeats a lookahead, which cannot be enforced")
        if high is None:
            rest = _then(_star(self._language(item, EMPTY, False)), rest)
        for _ in range(0 if high is None else high - low):
            rest = _either((rest, self._language(item, rest, False))) if _asserts(item) else rest
        if high is not None and not _asserts(item):
            single = self._language(item, EMPTY, False)
            optional = EMPTY
            for _ in range(high - low):
                optional = _either((EMPTY, _then(single, optional)))
            rest = _then(optional, rest)
        for _ in range(low):
            rest = self._language(item, rest, False)
        return rest

    def written(self) -> str:
        """An expression without lookahead for the whole text. Raises ValueError where it would be too long."""
        states: dict[Node, int] = {self.expression: 0}
        edges: list[dict[int, set[int]]] = []
        pending = [self.expression]
        for state in pending:
            out: dict[int, set[int]] = {}
            for letter in self.alphabet.letters:
                after = _derivative(state, letter)
                if after == NONE:
                    continue
                if after not in states:
                    states[after] = len(states)
                    pending.append(after)
                    if len(states) > MAX_STATES:
                        raise ValueError("the regular expression is too large to be enforced")
                out.setdefault(states[after], set()).add(letter)
            edges.append(out)
        ends = [_is_nullable(state) for state in pending]
        return f"^(?:{_expression_of(edges, ends, self.alphabet)})$"


def _expression_of(edges: list[dict[int, set[int]]], ends: list[bool], alphabet: Alphabet) -> str:
    """An automaton as an expression: its states are eliminated one by one."""
    last = len(edges)
    table: dict[tuple[int, int], str] = {}
    for source, out in enumerate(edges):
        for target, letters in out.items():
            table[source, target] = alphabet.written(frozenset(letters))
        if ends[source]:
            table[source, last] = ""
    for state in sorted(range(1, last), key=lambda left: sum(left in edge for edge in table)):
        _eliminate(table, state)
    loop = table.get((0, 0))
    rest = table.get((0, last))
    if rest is None:
        raise ValueError("the regular expression matches nothing")
    return f"(?:{loop})*{rest}" if loop is not None else rest


def _eliminate(table: dict[tuple[int, int], str], state: int) -> None:
    loop = table.pop((state, state), None)
    into = [(edge[0], table.pop(edge)) for edge in list(table) if edge[1] == state]
    out = [(edge[1], table.pop(edge)) for edge in list(table) if edge[0] == state]
    middle = f"(?:{loop})*" if loop is not None else ""
    for source, before in into:
        for target, after in out:
            path = f"{before}{middle}{after}"
            known = table.get((source, target))
            table[source, target] = path if known is None else f"(?:{known}|{path})"
            if len(table[source, target]) > MAX_WRITTEN:
                raise ValueError("the regular expression is too large to be enforced")


def _asserts(node: Node) -> bool:
    return node[0] in ("begin", "end", "ahead") or any(isinstance(part, tuple) and _asserts(part) for part in node)


def _letters(letters: frozenset[int]) -> Node:
    return ("letters", letters) if letters else NONE


def _star(node: Node) -> Node:
    return node if node[0] == "star" else EMPTY if node in (NONE, EMPTY) else ("star", node)


def _then(left: Node, other: Node) -> Node:
    if NONE in (left, other):
        return NONE
    if left == EMPTY or other == EMPTY:
        return other if left == EMPTY else left
    if left[0] == "then":
        return ("then", left[1], _then(left[2], other))
    return ("then", left, other)


def _either(nodes: Any) -> Node:
    found = frozenset(part for node in nodes for part in (node[1] if node[0] == "either" else (node,))) - {NONE}
    if ("not", NONE) in found:
        return ("not", NONE)
    return NONE if not found else next(iter(found)) if len(found) == 1 else ("either", found)


def _both(nodes: Any) -> Node:
    found = frozenset(part for node in nodes for part in (node[1] if node[0] == "both" else (node,))) - {("not", NONE)}
    if NONE in found:
        return NONE
    return ("not", NONE) if not found else next(iter(found)) if len(found) == 1 else ("both", found)


def _but(node: Node) -> Node:
    inner: Node = node[1] if node[0] == "not" else ("not", node)
    return inner


def _is_nullable(node: Node) -> bool:
    match node:
        case ("empty",) | ("star", _):
            return True
        case ("then", left, other):
            return _is_nullable(left) and _is_nullable(other)
        case ("either", parts):
            return any(map(_is_nullable, parts))
        case ("both", parts):
            return all(map(_is_nullable, parts))
        case ("not", inner):
            return not _is_nullable(inner)
    return False


def _derivative(node: Node, letter: int) -> Node:
    """What may follow a letter."""
    match node:
        case ("letters", letters):
            return EMPTY if letter in letters else NONE
        case ("star", inner):
            return _then(_derivative(inner, letter), node)
        case ("then", left, other):
            after = _then(_derivative(left, letter), other)
            return _either((after, _derivative(other, letter))) if _is_nullable(left) else after
        case ("either", parts):
            return _either(_derivative(part, letter) for part in parts)
        case ("both", parts):
            return _both(_derivative(part, letter) for part in parts)
        case ("not", inner):
            return _but(_derivative(inner, letter))
    return NONE
