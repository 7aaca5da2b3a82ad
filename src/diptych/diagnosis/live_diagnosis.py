"""The diagnosis of a running server for its own page: from the server's records, or its engines' metrics, to JSON."""

from dataclasses import replace
from typing import Any

import msgspec

from diptych.control.slo import NS_PER_S
from diptych.diagnosis.adapters.engine_server import ENGINES
from diptych.diagnosis.adapters.exposition import MetricsPage
from diptych.diagnosis.adapters.metric_names import Scrapes, observe_metrics
from diptych.diagnosis.adapters.timeline_records import TimelineSource, end_of, newest, observe, reread_signals
from diptych.diagnosis.diagnosis import diagnose
from diptych.diagnosis.diagnosis_words import as_json
from diptych.diagnosis.engine_advice import advise
from diptych.diagnosis.objectives_presets import parse_objectives
from diptych.timeline.records import Record
from diptych.timeline.watched_server import AnyRecord, WatchedEngine, WatchedEngines, WatchedServer

WINDOW_S = 60.0
STALE_NS = 120 * NS_PER_S  # a server without a record for so long is idle
_pages = msgspec.msgpack.Decoder(list[AnyRecord])
_input = msgspec.msgpack.Decoder(WatchedServer)
_engines = msgspec.msgpack.Decoder(WatchedEngines)


def _latest(records: list[Record]) -> int:
    return max(map(end_of, records))


def live_diagnosis(packed: bytes) -> bytes:
    """JSON as of ``diptych diagnose --json``. packed: a WatchedServer as MessagePack. Raises ConfigError for wrong
    objectives."""
    watched = _input.decode(packed)
    slo = parse_objectives(watched.slo) if watched.slo else None
    records: list[Record] = [record for page in watched.records for record in _pages.decode(page)]
    is_idle = not records or watched.now_ns - _latest(records) >= STALE_NS
    records, since_ns = newest([] if is_idle else records, WINDOW_S)
    signals = {"kv_usage": watched.kv_usage, "kv_usage_max": watched.kv_usage}
    signals |= reread_signals(watched.computed)
    settings = watched.settings
    about = TimelineSource(
        source="this server", version=settings.version, settings=settings, slo=settings.cluster.slo, signals=signals
    )
    found = diagnose(observe(records, about, since_ns), slo)
    return msgspec.json.encode(as_json(found, advise(found) if watched.with_advice else ()))


def engines_diagnosis(packed: bytes) -> bytes:
    """JSON as of ``diptych diagnose --json`` for the engine whose causes take most, with all engines as ``servers``.
    packed: WatchedEngines as MessagePack. Raises ConfigError for wrong objectives, and pages that are none."""
    watched = _engines.decode(packed)
    slo = parse_objectives(watched.slo) if watched.slo else None
    found: list[dict[str, Any]] = []
    for engine in watched.engines:
        diagnosis = diagnose(replace(_observed(engine), slo=watched.own_slo), slo)
        found.append(as_json(diagnosis, advise(diagnosis) if watched.with_advice else ()))
    worst = max(found, key=_weight)
    if len(found) > 1:
        worst = {**worst, "sentence": f"{worst['source']}: {worst['sentence']}", "servers": found}
    return msgspec.json.encode(worst)


def _observed(engine: WatchedEngine) -> Any:
    pages = MetricsPage.of_window(engine.pages, engine.name)
    names = next(names for names in ENGINES if pages[-1][1].has_prefix(names.prefix))
    return observe_metrics(names, Scrapes(pages, engine.name, {}, engine.version))


def _weight(found: dict[str, Any]) -> float:
    """Seconds of all requests that its causes took; without causes, fewer than nothing, and least without requests."""
    lost: float = sum(cause["seconds_per_request"] for cause in found["causes"]) * found["num_requests"]
    return lost if found["causes"] else -1.0 / (1 + found["num_requests"])
