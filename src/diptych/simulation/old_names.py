"""Names that recordings and settings had before, so that both are still read.

Owns no behaviour: rows and tables come in with old names and go on with those of today. Digests of a front end's
decisions were made of the words of commands, so these words stay (see ``recorded_command``).
"""

import re
from collections.abc import Mapping
from typing import Any

# Fields and classes of rows, as they were: as they are.
ROW_NAMES = {
    "WayGiven": "EvacuationReady",
    "HandoffRecalled": "HandoffRevoked",
    "gives_way_ns": "best_effort_ns",
    "max_untouched_per_worker": "max_prefills_in_flight_per_worker",
    "deflection": "local_prefill",
}
# Settings of a simulation, as they were: as they are.
SETTING_NAMES = {
    "max_untouched_per_worker": "max_prefills_in_flight_per_worker",
    "deflection": "local_prefill",
}
_ROW_NAME = re.compile(b'(?<!:)"(' + "|".join(ROW_NAMES).encode() + b')"(?=[:,])')  # behind a colon stands a value


def with_row_names(line: bytes) -> bytes:
    """A line of a recording with the names of today. Keys and classes count; ids and texts of
    clients are values behind a key."""
    return _ROW_NAME.sub(lambda found: b'"' + ROW_NAMES[found[1].decode()].encode() + b'"', line)


def with_setting_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The top table of settings with the names of today."""
    return {SETTING_NAMES.get(name, name) if SETTING_NAMES.get(name) not in raw else name: raw[name] for name in raw}
