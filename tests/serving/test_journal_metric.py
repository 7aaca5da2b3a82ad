from prometheus_client import CollectorRegistry, generate_latest

from diptych.serving.metrics.store_metrics import journal_families


class _Collector:
    def collect(self):  # type: ignore[no-untyped-def]
        return journal_families(3, "tiny")


def test_streams_that_were_not_recorded_are_counted() -> None:
    registry = CollectorRegistry()
    registry.register(_Collector())
    assert b'diptych:streams_not_recorded_total{model_name="tiny"} 3.0' in generate_latest(registry)
