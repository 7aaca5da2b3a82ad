"""Any server by its URL: finds out which engine answers, and reads it for a while.

Pages are read SCRAPES times in the window, so that gauges are more than two points. A Prometheus server is asked for
RANGE_STEPS pages of a range instead.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, Protocol

from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.diptych_server import DiptychReader
from diptych.diagnosis.adapters.dynamo_metrics import DYNAMO
from diptych.diagnosis.adapters.exposition import MetricsPage
from diptych.diagnosis.adapters.http_get import Site
from diptych.diagnosis.adapters.llamacpp_metrics import PREFIX, Slots, observe_llamacpp
from diptych.diagnosis.adapters.local_process import cpu_waits_ns, longest_wait_ns, processes_behind
from diptych.diagnosis.adapters.metric_names import (
    FEWEST_SEEN,
    MetricNames,
    Scrapes,
    num_first_tokens,
    observe_metrics,
)
from diptych.diagnosis.adapters.sglang_metrics import SGLANG
from diptych.diagnosis.adapters.vllm_metrics import VLLM
from diptych.diagnosis.observation import Missing, Observation

SCRAPES = 15
KEPT_ROUNDS = 12
SETTLE_S = 0.5  # from the last work of ours to the first page
ENGINES: tuple[MetricNames, ...] = (VLLM, SGLANG, DYNAMO)
RANGE_STEPS = 30
STARTED = "process_start_time_seconds"  # what Prometheus clients export beside the engine's own names
NO_CPU_WAIT = Missing(("oversubscribed_cores", "capacity"), "how long threads waited for a core (run it on the host)")


class Reader(Protocol):
    """Reads one source."""

    def observe(self) -> Observation:
        """What was seen. Raises ConfigError when it cannot be read."""
        ...


def reader_of(site: Site, window_s: float, range_s: float | None = None, *, is_whole: bool = False) -> Reader:
    """The reader of whatever answers there. window_s: how long pages are read (Diptych: how far back its timeline
    counts, if ``is_whole``). Raises ConfigError when nothing answers, or nothing that is known."""
    version = site.find_json("/version")
    if isinstance(version, dict) and isinstance(version.get("engines"), dict):
        raise ConfigError(
            f"{site.url} is a front; give the URLs of its engines: {' '.join(version['engines'])}", param="url"
        )
    if isinstance(version, dict) and "control" in version:
        return DiptychReader(site, window_s if is_whole else max(window_s, 60.0))
    if range_s is not None or _is_prometheus(site):
        return PrometheusReader(site, range_s or 1800.0)
    page = MetricsPage.of_text(site.text("/metrics"), site.url)
    names = next((names for names in ENGINES if page.has_prefix(names.prefix)), None)
    if names is not None:
        text = str(version.get("version", "")) if isinstance(version, dict) else ""
        return MetricsReader(site, names, window_s, text)
    if page.has_prefix(PREFIX):
        return LlamaCppReader(site, window_s)
    known = ", ".join(names.prefix for names in ENGINES)
    message = (
        f"{site.url}/metrics has no names of a known engine (diptych:, {known}, {PREFIX}); vLLM needs its statistics"
    )
    raise ConfigError(f"{message} (no --disable-log-stats), SGLang --enable-metrics, llama.cpp --metrics", param="url")


def _is_prometheus(site: Site) -> bool:
    found = site.find_json("/api/v1/status/buildinfo")
    return isinstance(found, dict) and found.get("status") == "success"


def read_pages(site: Site, window_s: float, also: Callable[[], None] = lambda: None) -> Scrapes:
    """Pages over the window, with how long the server's threads waited for cores where that can be seen. also: called
    at each page. On the server's machine its requests would be slower for our own work: it is over for a while when the
    window begins, and the pages are parsed after it. A busy server takes long for a page: those that are due meanwhile
    are left out, so that the window does not grow."""
    time.sleep(SETTLE_S)
    pids = processes_behind(site.local_port) if site.local_port else ()
    waits = cpu_waits_ns(pids)
    begun = time.monotonic()
    texts: list[tuple[float, bytes]] = []
    number, passed_s, step_s = 0, 0.0, max(window_s, 1e-3) / (SCRAPES - 1)
    while len(texts) < 2 or (number < SCRAPES and passed_s < window_s):
        time.sleep(max(0.0, begun + number * step_s - time.monotonic()))
        text = site.get("/metrics")
        texts.append((time.monotonic() - begun, text))
        also()
        passed_s = time.monotonic() - begun
        number = max(number + 1, min(SCRAPES - 1, ceil(passed_s / step_s)))
    elapsed_ns = max(1.0, (time.monotonic() - begun) * 1e9)
    waited_ns = longest_wait_ns(waits, cpu_waits_ns(pids))
    signals = {}
    if waits:
        signals["cpu_wait"] = min(1.0, waited_ns / elapsed_ns)
    pages = MetricsPage.of_window(texts, site.url)
    started_s = pages[-1][1].largest(STARTED)
    life_s = 0.0 if started_s is None else max(0.0, time.time() - started_s)
    return Scrapes(pages, site.url, signals, life_s=life_s)


class MetricsReader:
    """An engine with histograms."""

    def __init__(self, site: Site, names: MetricNames, window_s: float, version: str = "") -> None:
        self._site, self._names, self._window_s, self._version = site, names, window_s, version
        self._before: deque[tuple[float, MetricsPage]] = deque(maxlen=KEPT_ROUNDS)  # when, of earlier rounds

    def observe(self) -> Observation:
        """Read the page again and compare. Where too little happens in the window, it begins with an earlier round."""
        begun_s = time.monotonic()
        read = read_pages(self._site, self._window_s)
        first_s, first = read.pages[0]
        pages = list(read.pages)
        for kept_s, page in reversed(self._before):
            if num_first_tokens(self._names, pages) >= FEWEST_SEEN:
                break
            pages = [(first_s - (begun_s - kept_s), page), *read.pages]
        self._before.append((begun_s, first))
        return observe_metrics(self._names, replace(read, pages=pages, version=self._version))


class LlamaCppReader:
    """A Reader of llama.cpp's server."""

    def __init__(self, site: Site, window_s: float) -> None:
        self._site, self._window_s = site, window_s

    def observe(self) -> Observation:
        slots: list[list[dict[str, Any]]] = []

        def look() -> None:
            if isinstance(found := self._site.find_json("/slots"), list):
                slots.append(found)

        return observe_llamacpp(read_pages(self._site, self._window_s, look), Slots(slots))


class PrometheusReader:
    """A Reader of the last ``range_s`` seconds of a Prometheus server that has scraped an engine."""

    def __init__(self, site: Site, range_s: float) -> None:
        self._site, self._range_s = site, range_s

    def observe(self) -> Observation:
        end = time.time()
        own = _instances(self._page("diptych:", end))
        if own is not None:
            where = f" ({', '.join(own)})" if own else ""
            message = f"{self._site.url} has scraped Diptych{where}, which exports names of vLLM, too"
            raise ConfigError(f"{message}; give the URL of Diptych itself", param="url")
        for names in ENGINES:
            newest = self._page(names.prefix, end)
            if newest.samples:
                return self._observed(names, end, newest)
        known = ", ".join(names.prefix for names in ENGINES)
        raise ConfigError(f"{self._site.url} holds no series that begin with {known}", param="url")

    def _observed(self, names: MetricNames, end: float, newest: MetricsPage) -> Observation:
        """newest: the page at the end of the range."""
        pages = []
        for number in range(RANGE_STEPS - 1):
            at = end - self._range_s * (1 - number / (RANGE_STEPS - 1))
            page = self._page(names.prefix, at)
            if page.samples:
                pages.append((at, page))
        found = observe_metrics(names, Scrapes([*pages, (end, newest)], self._site.url))
        instances = _instances(newest) or ()
        if len(instances) < 2:
            return found
        note = f"these are the figures of {len(instances)} servers together: {', '.join(instances)}"
        return replace(found, notes=(*found.notes, note))

    def _page(self, prefix: str, at: float) -> MetricsPage:
        """Raises ConfigError where Prometheus gives no answer. Native histograms, which have no value, are left out."""
        query = {"query": f'{{__name__=~"{prefix}.*"}}', "time": f"{at:.3f}"}
        try:
            found = json.loads(self._site.get("/api/v1/query", query))
            rows = found["data"]["result"]
            return MetricsPage.of_samples((row["metric"], float(row["value"][1])) for row in rows if "value" in row)
        except (ValueError, KeyError, TypeError) as error:
            message = f"{self._site.url}/api/v1/query gave no answer of Prometheus: {error!r}"
            raise ConfigError(message, param="url") from None


def _instances(page: MetricsPage) -> tuple[str, ...] | None:
    """The servers whose samples are on a page of Prometheus; None: it has no samples."""
    labels = [dict(labels) for samples in page.samples.values() for labels in samples]
    return tuple(sorted({having["instance"] for having in labels if "instance" in having})) if labels else None
