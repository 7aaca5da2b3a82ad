"""A running Diptych server: its settings, its timeline and its metrics over HTTP.

The timeline holds the last minute or more, so that nothing needs to be waited for.
"""

import json
from collections import Counter
from typing import TypeVar

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.fleet_settings import FleetSettings
from diptych.diagnosis.adapters.exposition import MetricsPage
from diptych.diagnosis.adapters.http_get import Site
from diptych.diagnosis.adapters.timeline_records import TimelineSource, newest, observe, reread_signals
from diptych.diagnosis.observation import Missing, Observation
from diptych.timeline.records import (
    AnswerRecord,
    GapRecord,
    Record,
    RequestRecord,
    StepBegunRecord,
    StepRecord,
    TransferRecord,
    WorkerRecord,
)

PAGE = 2000  # records a request
MOST_WORDS, MOST_MISSES = 3, 256  # sentences and newest misses of /cache/misses
KINDS = StepRecord | StepBegunRecord | RequestRecord | TransferRecord | WorkerRecord | AnswerRecord


class RecordsPage(msgspec.Struct):
    """A page of /timeline/records."""

    records: list[KINDS | GapRecord]
    next: str


_page = msgspec.json.Decoder(RecordsPage)
_settings = msgspec.json.Decoder(FleetSettings)
Read = TypeVar("Read")
NO_MISSES = Missing(
    ("prefix_misses", "prefill_queueing"), "which prompt tokens were computed before (--explain-misses)"
)


class DiptychReader:
    """Reads one server, again and again: each time only the records that are new. window_s: how much of the timeline
    counts."""

    def __init__(self, site: Site, window_s: float = 60.0) -> None:
        self._site = site
        self._window_s = window_s
        self._records: list[Record] = []
        self._since = "0"
        self._has_misses = False
        self._refused: float | None = None  # requests, at the reading before

    def observe(self) -> Observation:
        """What was seen until now. Raises ConfigError when the server cannot be read."""
        settings = self._decoded("/settings", self._site.get("/settings"), _settings)
        metrics = MetricsPage.of_text(self._site.text("/metrics"), self._site.url)
        self._read_records()
        self._records, since_ns = newest(self._records, self._window_s)
        misses, words = self._misses()
        about = TimelineSource(
            source=self._site.url,
            version=settings.version,
            settings=settings,
            slo=settings.cluster.slo,
            signals={**self._gauges(metrics), **misses},
            notes=words,
            missing=() if self._has_misses else (NO_MISSES,),
        )
        return observe(self._records, about, since_ns)

    def _decoded(self, path: str, body: bytes, decoder: "msgspec.json.Decoder[Read]") -> Read:
        """Raises ConfigError for what another version says in another form."""
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            message = f"{self._site.url}{path} cannot be read by this version of diptych: {error}"
            raise ConfigError(message, param="url") from None

    def _read_records(self) -> None:
        """Takes in the records that are new."""
        while True:
            body = self._site.get("/timeline/records", {"since": self._since, "limit": str(PAGE)})
            page = self._decoded("/timeline/records", body, _page)
            self._records += [record for record in page.records if not isinstance(record, GapRecord)]
            self._since = page.next
            if len(page.records) < PAGE:
                return

    def _gauges(self, metrics: MetricsPage) -> dict[str, float]:
        """What the timeline does not hold."""
        usage = metrics.largest("diptych:worker_kv_usage_ratio") or 0.0
        refused = metrics.total("diptych:requests_refused_total") or 0.0
        before, self._refused = self._refused, refused
        gauges = {"kv_usage": usage, "kv_usage_max": usage}
        return gauges if before is None else {**gauges, "rejected": max(0.0, refused - before)}

    def _misses(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """What /cache/misses says, where the server explains them: what the prompt tokens of the window were computed
        for, and its own sentences."""
        found = self._site.find_json("/cache/misses", {"limit": str(MOST_MISSES)})
        recent = found.get("recent") if isinstance(found, dict) else None
        self._has_misses = isinstance(recent, list)
        if not isinstance(recent, list) or not isinstance(found, dict):
            return {}, ()
        spent: Counter[str] = Counter()
        for miss in recent:
            if miss["age_s"] <= self._window_s:
                spent.update(miss["computed"])
        return reread_signals(spent), tuple(map(str, found.get("words", ())))[:MOST_WORDS]


def records_of_file(text: bytes) -> list[Record]:
    """The records of a saved page of /timeline/records, of a list of records, or of one record a line."""
    try:
        found = json.loads(text)
    except ValueError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict) and "traceEvents" in found:
        raise ValueError("it is a trace for Perfetto; save /timeline/records instead")
    rows = found.get("records", []) if isinstance(found, dict) else found
    known = [row for row in rows if row.get("kind") not in ("gap", "header")]
    return [msgspec.convert(row, KINDS) for row in known]
