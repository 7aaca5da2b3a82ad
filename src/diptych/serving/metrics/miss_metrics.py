"""Prometheus metrics of prefix-cache misses: prompts by the reason why they were computed, tokens by what for."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.control.misses.miss_explainer import MissExplainer
from diptych.control.misses.prefix_miss import NEW, REPEATED, ROUNDING, MissReason

_NO_CAUSES = (MissReason.NONE, MissReason.NEVER_SEEN)  # nothing was computed for it; its tokens are new
CAUSES = (*(str(reason) for reason in MissReason if reason not in _NO_CAUSES), REPEATED, ROUNDING, NEW)


def miss_families(explainer: MissExplainer, model: str) -> Iterator[Metric]:
    """Every family with its present value; all labels from the start."""
    summary = explainer.summary
    requests = CounterMetricFamily(
        "diptych:prefix_miss_requests", "Prompts by why they left what was cached", labels=["model_name", "reason"]
    )
    for reason in MissReason:
        requests.add_metric([model, str(reason)], summary.requests[reason])
    yield requests
    tokens = CounterMetricFamily(
        "diptych:prefill_tokens_by_cause", "Prompt tokens that were computed", labels=["model_name", "cause"]
    )
    for cause in CAUSES:
        tokens.add_metric([model, cause], summary.tokens[cause])
    yield tokens
    blocks = GaugeMetricFamily("diptych:prefix_history_blocks", "Blocks that are remembered", labels=["model_name"])
    blocks.add_metric([model], len(explainer.history))
    yield blocks
