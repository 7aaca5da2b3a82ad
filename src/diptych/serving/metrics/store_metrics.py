"""Prometheus metrics of stored responses."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class CountedStore(Protocol):
    """What a store counts. num_forgotten: for want of room."""

    num_responses: int
    num_bytes: int
    max_bytes: int
    num_forgotten: int
    num_not_stored: int


def store_families(store: CountedStore, model: str) -> Iterator[Metric]:
    """Gauges and counters."""
    gauges = (
        ("diptych:stored_responses", "Responses that can be continued by their ids", store.num_responses),
        ("diptych:stored_response_bytes", "That they take, in memory or in their file", store.num_bytes),
        ("diptych:stored_response_limit_bytes", "That they may take", store.max_bytes),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    counters = (
        ("diptych:responses_forgotten", "Stored responses that had to go before they expired", store.num_forgotten),
        ("diptych:responses_not_stored", "Responses that were to be stored and could not be", store.num_not_stored),
    )
    for name, text, value in counters:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter


def journal_families(num_not_recorded: int, model: str) -> Iterator[Metric]:
    """Prometheus metrics of recorded streams, which survive a restart."""
    text = "Streams that cannot be resumed, since their record could not be written"
    counter = CounterMetricFamily("diptych:streams_not_recorded", text, labels=["model_name"])
    counter.add_metric([model], num_not_recorded)
    yield counter
