"""Prometheus metrics of the tiers below the KV cache, worker by worker."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.control.engine.reports import EngineStats
from diptych.control.slo import NS_PER_S

_GAUGES = (
    ("diptych:kv_host_blocks", "Blocks of the host tier", "num_host_blocks"),
    ("diptych:kv_host_blocks_used", "Of these, those that hold something", "host_blocks_used"),
    ("diptych:kv_peers_on", "Whether host memories of other workers of the machine are read", "reads_peers"),
    ("diptych:kv_disk_on", "Whether the disk tier is used (0: there is none, or it has failed)", "has_disk"),
    ("diptych:kv_disk_blocks", "Blocks that can be found on disk", "disk_blocks"),
    ("diptych:kv_disk_bytes", "What the folder of the disk tier takes", "disk_bytes"),
    ("diptych:kv_disk_loads_waiting", "Requests that wait for a load from disk or from another worker", "num_loading"),
)
_COUNTERS = (
    ("diptych:kv_host_hit_tokens", "Tokens copied up from the host instead of computed", "host_hit_tokens"),
    ("diptych:kv_peer_hit_tokens", "Tokens read from the host memory of another worker instead of computed",
     "peer_hit_tokens"),
    ("diptych:kv_peer_missed_blocks", "Blocks that another worker was to have in its host memory and had not",
     "peer_missed_blocks"),
    ("diptych:kv_disk_hit_tokens", "Tokens read from disk instead of computed", "disk_hit_tokens"),
    ("diptych:kv_disk_stored_blocks", "Blocks written to disk", "stored_blocks"),
    ("diptych:kv_disk_unstored_blocks", "Blocks wanted on disk and not written", "unstored_blocks"),
    ("diptych:kv_disk_missed_blocks", "Blocks that were to be on disk and could not be read", "missed_blocks"),
    ("diptych:kv_disk_damaged_blocks", "Blocks whose checksum did not match, or that shared an extent with one",
     "damaged_blocks"),
    ("diptych:kv_disk_cancelled_loads", "Loads that nobody waited for any more", "cancelled_loads"),
)  # fmt: skip

_TIMES = (
    ("diptych:kv_disk_block_seconds", "Reading one block from disk, as measured", "load_block_ns"),
    ("diptych:kv_peer_block_seconds", "Reading one block from the host memory of another worker, as measured",
     "peer_block_ns"),
)  # fmt: skip


def tier_families(workers: Mapping[int, EngineStats], roles: Sequence[str], model: str) -> Iterator[Metric]:
    """Every family; nothing where no worker has a tier."""
    known = [(str(number), roles[number], workers[number].tiers) for number in sorted(workers) if number < len(roles)]
    known = [entry for entry in known if entry[2].num_host_blocks]
    if not known:
        return
    labels = ["model_name", "worker", "role"]
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            gauge.add_metric([model, worker, role], float(getattr(tiers, field)))
        yield gauge
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            counter.add_metric([model, worker, role], float(getattr(tiers, field)))
        yield counter
    for name, text, field in _TIMES:
        times = GaugeMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            times.add_metric([model, worker, role], getattr(tiers, field) / NS_PER_S)
        yield times
