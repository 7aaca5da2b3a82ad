"""The diagnosis of a running server for its own page: from the server's records to JSON."""

import msgspec

from diptych.control.slo import NS_PER_S
from diptych.diagnosis.adapters.timeline_records import TimelineSource, end_of, newest, observe, reread_signals
from diptych.diagnosis.diagnosis import diagnose
from diptych.diagnosis.diagnosis_words import as_json
from diptych.diagnosis.engine_advice import advise
from diptych.diagnosis.objectives_presets import parse_objectives
from diptych.timeline.records import Record
from diptych.timeline.watched_server import AnyRecord, WatchedServer

WINDOW_S = 60.0
STALE_NS = 120 * NS_PER_S  # a server without a record for so long is idle
_pages = msgspec.msgpack.Decoder(list[AnyRecord])
_input = msgspec.msgpack.Decoder(WatchedServer)


def _latest(records: list[Record]) -> int:
    return max(map(end_of, records))


def live_diagnosis(packed: bytes) -> bytes:
    """JSON as of ``diptych diagnose --json``. packed: a WatchedServer as MessagePack. Raises ConfigError for wrong
    objectives."""
    watched = _input.decode(packed)
    slo = parse_objectives(watched.slo) if watched.slo else None
    records: list[Record] = [record for page in watched.records for record in _pages.decode(page)]
    records = newest(records, WINDOW_S) if records and watched.now_ns - _latest(records) < STALE_NS else []
    signals = {"kv_usage": watched.kv_usage, "kv_usage_max": watched.kv_usage}
    signals |= reread_signals(watched.computed)
    settings = watched.settings
    about = TimelineSource(
        source="this server", version=settings.version, settings=settings, slo=settings.cluster.slo, signals=signals
    )
    found = diagnose(observe(records, about), slo)
    return msgspec.json.encode(as_json(found, advise(found) if watched.with_advice else ()))
