"""What a server hands to the process that diagnoses it: its newest records, its settings, and what it was asked."""

import msgspec

from diptych.control.fleet_settings import FleetSettings
from diptych.control.slo import Slo
from diptych.timeline.records import (
    AnswerRecord,
    RequestRecord,
    StepBegunRecord,
    StepRecord,
    TransferRecord,
    WorkerRecord,
)

AnyRecord = StepRecord | StepBegunRecord | RequestRecord | TransferRecord | WorkerRecord | AnswerRecord


class WatchedServer(msgspec.Struct, frozen=True, kw_only=True):
    """records: pages of records as MessagePack, oldest first (so that encoding them takes no long time at once).
    now_ns: on the clock of the records. kv_usage: of the fullest worker, 0 to 1. slo: as for ``diptych diagnose --slo``
    ("": the server's own). with_advice: simulate what settings would gain. computed: prompt tokens by what they were
    computed for (empty: not known)."""

    records: list[msgspec.Raw]
    settings: FleetSettings
    now_ns: int
    kv_usage: float = 0.0
    slo: str = ""
    with_advice: bool = False
    computed: dict[str, int] = {}


class WatchedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of others. pages: of its metrics, the oldest first, with seconds."""

    name: str
    version: str
    pages: list[tuple[float, bytes]]


class WatchedEngines(msgspec.Struct, frozen=True, kw_only=True):
    """The engines behind a server, where they export metrics. own_slo: the server's. Others as in WatchedServer."""

    engines: list[WatchedEngine]
    own_slo: Slo
    slo: str = ""
    with_advice: bool = False
