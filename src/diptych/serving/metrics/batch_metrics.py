"""Prometheus metrics of the Batch API."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.serving.batches.batch_runner import BatchRunner


def batch_families(runner: BatchRunner, model: str) -> Iterator[Metric]:
    """Every family."""
    counts, running = runner.counts, runner.schedule.batches.values()
    gauges = (
        ("diptych:batches_open", "Batches that have not ended", runner.num_open),
        ("diptych:batch_lines_running", "Lines that run or whose rows are being written", runner.schedule.num_held),
        ("diptych:batch_lines_left", "Lines of batches in progress without a row",
         sum(entry.batch.total - entry.num_done for entry in running)),
    )  # fmt: skip
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    lines = CounterMetricFamily("diptych:batch_lines", "Lines that were answered", labels=["model_name", "result"])
    lines.add_metric([model, "completed"], counts.completed)
    lines.add_metric([model, "failed"], counts.failed)
    yield lines
    counters = (
        ("diptych:batch_line_retries", "Lines put back because the server had no room, or failed", counts.retries),
        ("diptych:batch_disk_failures", "Times that the folder of batches could not be used", counts.disk_failures),
    )
    for name, text, value in counters:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
