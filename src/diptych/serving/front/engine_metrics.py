"""Prometheus metrics of each engine behind a front, besides those of any worker."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.serving.front.external_worker import ExternalWorker

_GAUGES = (
    ("diptych:engine_requests_open", "Requests of this front at the engine"),
    ("diptych:engine_saturated", "1 while the engine refuses, or does not say how busy it is"),
    ("diptych:engine_index_exact", "1 while all that its prefix cache holds is known from its events"),
    ("diptych:engine_index_blocks", "Blocks that its prefix cache is known, or assumed, to hold"),
)
_COUNTERS = (
    ("diptych:engine_index_gaps", "Events that were lost and not repeated"),
    ("diptych:engine_steps", "Steps that it reported"),
    ("diptych:engine_steps_missed", "Reports of its steps that did not come"),
)


def engine_families(engines: Sequence[ExternalWorker], model: str) -> Iterator[Metric]:
    """Every family with its present value."""
    for name, text in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
        for engine in engines:
            family.add_metric([model, engine.name], _values(engine)[name])
        yield family
    for name, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["model_name", "engine"])
        for engine in engines:
            counter.add_metric([model, engine.name], _values(engine)[name])
        yield counter


def _values(engine: ExternalWorker) -> dict[str, float]:
    return {
        "diptych:engine_requests_open": engine.load.num_held,
        "diptych:engine_saturated": engine.load.is_saturated(engine.clock()),
        "diptych:engine_index_exact": engine.cache.kind == "exact",
        "diptych:engine_index_blocks": engine.cache.num_blocks,
        "diptych:engine_index_gaps": engine.cache.num_gaps,
        "diptych:engine_steps": engine.steps.num_seen,
        "diptych:engine_steps_missed": engine.steps.num_missed,
    }
