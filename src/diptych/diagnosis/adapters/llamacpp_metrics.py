"""llama.cpp's server: /metrics (started with --metrics) and /slots.

It exports sums, no histograms, and no time of a request: how many requests ended is counted from the slots, whose task
changes, and the wait is estimated as waiting requests over requests per second (Little's law).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diptych.base.engine_load_metrics import LLAMACPP_LOAD
from diptych.diagnosis.adapters.exposition import Growth, MetricsPage
from diptych.diagnosis.adapters.metric_names import Scrapes
from diptych.diagnosis.observation import Estimate, Missing, Observation

PREFIX = "llamacpp:"
MISSING = (
    Missing(("prefill_queueing", "prefill_interference"), "the time to first token of each request (a histogram)"),
    Missing(("prefix_misses", "prefill_queueing"), "which prompt tokens had been computed before"),
)


@dataclass(frozen=True, slots=True)
class Slots:
    """What /slots said, page by page (empty: it is switched off)."""

    pages: Sequence[Sequence[Mapping[str, Any]]] = ()

    @property
    def num_places(self) -> int:
        """Requests that may run at once; 0: not known."""
        return len(self.pages[-1]) if self.pages else 0

    @property
    def num_tasks(self) -> int:
        """Different requests that were seen running."""
        return len({slot.get("id_task") for page in self.pages for slot in page if slot.get("is_processing")})


def observe_llamacpp(scrapes: Scrapes, slots: Slots) -> Observation:
    """The observation of a llama.cpp server in the window of its pages."""
    pages = [page for _, page in scrapes.pages]
    growth = Growth(pages[0], pages[-1])
    notes: tuple[str, ...] = ()
    if not growth.count(f"{PREFIX}tokens_predicted"):
        growth = Growth(MetricsPage(), pages[-1])
        notes = ("nothing ended in the window: these are the figures since the start of the engine",)
    prompt_s, prompts = growth.count(f"{PREFIX}prompt_seconds") or 0.0, growth.count(f"{PREFIX}prompt_tokens") or 0.0
    decode_s = growth.count(f"{PREFIX}tokens_predicted_seconds") or 0.0
    tokens = growth.count(f"{PREFIX}tokens_predicted") or 0.0
    requests = float(slots.num_tasks)
    waiting = fmean(page.total(LLAMACPP_LOAD.waiting) or 0.0 for page in pages)
    running = [page.total(LLAMACPP_LOAD.running) or 0.0 for page in pages]
    queue_s = waiting * scrapes.window_s / requests if requests else 0.0
    prefill_s = prompt_s / requests if requests else 0.0
    count = int(requests)
    signals = {"requests": requests, "waiting": waiting, "running": fmean(running), "running_max": max(running)}
    if requests:
        signals |= {"output_mean": tokens / requests, "prompt_mean": prompts / requests}
        signals["rate"] = requests / scrapes.window_s if scrapes.window_s else 0.0
    cached = growth.count(f"{PREFIX}prompt_tokens_cached") or 0.0
    if prompts + cached:
        signals["hit_share"] = cached / (prompts + cached)
    if slots.num_places:
        signals["max_num_seqs"] = float(slots.num_places)
    if usage := [value for page in pages if (value := page.total(LLAMACPP_LOAD.kv_usage)) is not None]:
        signals |= {"kv_usage": fmean(usage), "kv_usage_max": max(usage)}
    return Observation(
        engine="llamacpp",
        source=scrapes.source,
        version=scrapes.version,
        window_s=scrapes.window_s,
        ttft=None if notes or not count else _estimate({"queue": queue_s, "prefill": prefill_s}, count),
        itl=_estimate({"decode_floor": decode_s / tokens}, int(tokens)) if tokens else None,
        signals={**signals, **scrapes.signals},
        missing=MISSING if slots.num_places else (*MISSING, Missing(("sequence_limit", "capacity"), "/slots")),
        notes=notes,
    )


def _estimate(parts_s: dict[str, float], count: int) -> Estimate:
    """A mean of which nothing is known but that: its interval reaches zero."""
    mean = sum(parts_s.values())
    return Estimate(mean, parts_s, mean, count)
