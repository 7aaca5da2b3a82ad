"""The table of limits in docs/security.md, from the module that declares them."""

import inspect
import re
from collections.abc import Iterator

from document_settings import table_row

from diptych.base.byte_size import size_words
from diptych.serving import edge_limits
from diptych.serving.edge_limits import LIMITS, EdgeLimit

HEADING = re.compile(r"^# (.+)\.$")
DECLARATION = re.compile(r"^([A-Z][A-Z0-9_]+) = _limit\(")
HOUR_S, DAY_S = 3600, 24 * 3600


def limits_table() -> str:
    """One row for each limit, in the order and under the headings of the module."""
    return "| limit | value | beyond it |\n|---|---|---|\n" + "".join(_rows())


def _rows() -> Iterator[str]:
    heading = ""
    for line in inspect.getsource(edge_limits).splitlines():
        if found := HEADING.match(line):
            heading = found[1]
        elif found := DECLARATION.match(line):
            if heading:
                yield table_row(f"**{heading}**", "", "")
                heading = ""
            limit = LIMITS[found[1]]
            option = f" (`{limit.option}`)" if limit.option else ""
            yield table_row(limit.subject + option, amount(limit), limit.beyond)


def amount(limit: EdgeLimit) -> str:
    """The value with its unit, as people read it."""
    value = limit.value
    if limit.unit == "bytes":
        return f"{value / 10**9:g} GB" if value % 10**9 == 0 else size_words(int(value))
    if limit.unit == "s":
        for unit_s, unit in ((DAY_S, "days"), (HOUR_S, "h")):
            if value >= 2 * unit_s and value % unit_s == 0:
                return f"{value / unit_s:g} {unit}"
    return f"{value:,g} {limit.unit}" if isinstance(value, float) else f"{value:,} {limit.unit}"
