"""Formulas with the numbers filled in, and numbers as people read them."""

from typing import TypedDict


class Formula(TypedDict):
    """name: what it gives. expression: in words. filled: the same with numbers. result: with its unit."""

    name: str
    expression: str
    filled: str
    result: str


def formula(name: str, expression: str, filled: str, result: str) -> Formula:
    """One line of a page."""
    return {"name": name, "expression": expression, "filled": filled, "result": result}


def significant(value: float, digits: int = 3) -> str:
    """Three digits without exponents: 0.123, 1.23, 12.3, 123, 1,235."""
    if value == 0:
        return "0"
    size, places = abs(value), digits - 1
    while size >= 10:
        size, places = size / 10, places - 1
    while size < 1:
        size, places = size * 10, places + 1
    text = f"{value:,.{max(0, min(places, 12))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def scaled(value: float, unit: str) -> str:
    """A value with a decimal prefix: scaled(671e6, "B") is "671 MB"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{significant(value / size)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def large(value: float) -> str:
    """A count in words: "8.03 billion"."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{significant(value / size)} {word}"
    return significant(value)


def duration(ns: float) -> str:
    """Nanoseconds with the unit that suits: "850 ns", "1.5 ms", "12.3 s"."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            return f"{significant(ns / size)} {unit}"
    return f"{significant(ns)} ns" if ns else "0 ms"


def milliseconds(ms: float | None) -> str:
    """The same of milliseconds; a dash where nothing was measured."""
    return "-" if ms is None else duration(ms * 1e6)


def percent(share: float) -> str:
    """0.123 is "12 %"."""
    return f"{share * 100:.0f} %"
