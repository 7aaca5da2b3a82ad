"""What Prometheus reads of the engines behind a front, one by one, besides what it reads of any worker."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.serving.front.external_worker import ExternalWorker

_GAUGES = (
    ("diptych:engine_requests_open", "Requests of this front at the engine"),
    ("diptych:engine_saturated", "1 while the engine refuses, or does not say how busy it is"),
    ("diptych:engine_index_exact", "1 while all that its prefix cache holds is known from its events"),
    ("diptych:engine_index_blocks", "Blocks that its prefix cache is known, or assumed, to hold"),
)


def engine_families(engines: Sequence[ExternalWorker], model: str) -> Iterator[Metric]:
    """Every family with its present value."""
    for name, text in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
        for engine in engines:
            family.add_metric([model, engine.name], _values(engine)[name])
        yield family
    gaps = CounterMetricFamily(
        "diptych:engine_index_gaps", "Events that were lost and not repeated", labels=["model_name", "engine"]
    )
    for engine in engines:
        gaps.add_metric([model, engine.name], engine.cache.num_gaps)
    yield gaps


def _values(engine: ExternalWorker) -> dict[str, float]:
    return {
        "diptych:engine_requests_open": engine.load.num_held,
        "diptych:engine_saturated": engine.load.is_saturated(engine.clock()),
        "diptych:engine_index_exact": engine.cache.kind == "exact",
        "diptych:engine_index_blocks": engine.cache.num_blocks,
    }
