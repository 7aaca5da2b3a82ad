"""A front by its URL: the front itself, by its own metrics, and each engine behind it.

An engine whose metrics the front keeps (vLLM, SGLang) is read through the front, which reaches it and has its key; any
other directly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.engine_server import ENGINES, MetricsReader, Reader, reader_of
from diptych.diagnosis.adapters.exposition import MetricsPage
from diptych.diagnosis.adapters.http_get import Site
from diptych.diagnosis.adapters.metric_names import MetricNames, Scrapes, observe_metrics
from diptych.diagnosis.adapters.vllm_metrics import VLLM
from diptych.diagnosis.observation import Missing, Observation

_OF_ENGINES = ("step_tokens", "computed", "kv_usage", "preemptions", "refused", "transfer")
FRONT: Final[MetricNames] = replace(
    VLLM,
    engine="front",
    **dict.fromkeys(_OF_ENGINES, ""),
    missing=(
        Missing(("prefill", "queue of the engine"), "how long requests waited at their engine before their prefill"),
        Missing(("decode", "slow steps"), "what the engines computed in each step (their own diagnosis has it)"),
    ),
    known=VLLM.known
    | {getattr(VLLM, name) for name in _OF_ENGINES}
    | {f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens",
                                                    "accepted_tokens_per_pos")},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedReader:
    """A Reader that is looked for when it is first needed. name: of its server, for people."""

    name: str
    find: Callable[[], Reader]


def readers_behind(site: Site, window_s: float) -> list[NamedReader] | None:
    """The readers of a front and of its engines; None where no front answers."""
    version = site.find_json("/version")
    if not isinstance(version, dict) or not isinstance(version.get("engines"), dict):
        return None
    found = [NamedReader(site.url, lambda: MetricsReader(site, FRONT, window_s, str(version.get("version", ""))))]
    shown = site.find_json("/engines")
    engines = shown.get("engines") if isinstance(shown, dict) else None
    for engine in engines if isinstance(engines, list) else []:
        name = engine["url"] if engine.get("rank") is None else f"{engine['url']} rank {engine['rank']}"
        found.append(NamedReader(name, partial(_reader_of_engine, site, engine, window_s)))
    return found


def _reader_of_engine(site: Site, engine: dict[str, Any], window_s: float) -> Reader:
    """The reader of one engine. Raises ConfigError where neither the front nor the engine shows metrics."""
    kept = EngineAtFront(site, int(engine["worker"]))
    if kept.pages() is not None:
        return kept
    state = str(engine.get("state", ""))
    if state in ("lost", "starting"):
        raise ConfigError(f"the front says that it is {state}", param="url")
    return reader_of(Site.of(engine["url"]), window_s)


class EngineAtFront:
    """A Reader of the pages of one engine's metrics that a front keeps of the last minute."""

    def __init__(self, site: Site, worker: int) -> None:
        self._site, self._worker = site, worker

    def pages(self) -> dict[str, Any] | None:
        """What the front has; None where it keeps none."""
        found = self._site.find_json(f"/engines/{self._worker}/pages")
        return found if isinstance(found, dict) and found.get("pages") else None

    def observe(self) -> Observation:
        found = self.pages()
        if found is None:
            raise ConfigError(f"{self._site.url} has no metrics of engine {self._worker} now", param="url")
        name = str(found["name"])
        pages = MetricsPage.of_window([(page["at_s"], page["text"].encode()) for page in found["pages"]], name)
        names = next((names for names in ENGINES if pages[-1][1].has_prefix(names.prefix)), None)
        if names is None:
            raise ConfigError(f"the metrics of {name} have no names of a known engine", param="url")
        return observe_metrics(names, Scrapes(pages, name, {}, str(found["version"])))
