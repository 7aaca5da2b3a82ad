"""Prometheus metrics of each worker, and of what passes between workers.

Owns the latest statistics of each worker and the counts of transfers. Costs a few additions per handoff: families are
made when Prometheus asks for them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diptych.control.engine.reports import EngineStats
from diptych.control.slo import NS_PER_S
from diptych.serving.link.messages import Ready
from diptych.serving.metrics.histogram import Histogram

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
    for name, text, attribute in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            gauge.add_metric([model, worker, role], float(getattr(tiers, attribute)))
        yield gauge
    for name, text, attribute in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            counter.add_metric([model, worker, role], float(getattr(tiers, attribute)))
        yield counter
    for name, text, attribute in _TIMES:
        times = GaugeMetricFamily(name, text, labels=labels)
        for worker, role, tiers in known:
            times.add_metric([model, worker, role], getattr(tiers, attribute) / NS_PER_S)
        yield times


_TRANSFER = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SUMMED = ("num_waiting", "num_prefilling", "num_decoding", "num_swapped", "num_resting")
_SPECULATION = ("num_drafts", "num_draft_tokens", "num_forced_tokens")
_GROWING = ("prefix_queried_tokens", "prefix_hit_tokens", "num_preemptions", *_SPECULATION)
# of the step-time model; the last one of mixtures alone
_TERMS = ("step", "prompt_token", "attention_pair", "sequence", "context_token", "expert")
_NOTHING = EngineStats()


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment. counts: ClusterCore's. num_queued: requests in the admission queue. alarm: what is wrong
    with the router's index of the caches. length_errors: of the answers' expected lengths, by expectation, see
    LengthErrorStats. decisions: the planner's, by verdict. broken_paths: prefill and decode worker of each path that is
    left alone. refused_joins: workers of other hosts that were refused, by reason. ready: what all hold together, once
    they were ready. failures: of cores and their drivers by a defect, by core. draining: workers that get nothing
    new."""

    roles: Sequence[str] = ()
    is_up: Sequence[bool] = ()
    num_restarts: Sequence[int] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    num_queued: int = 0
    alarm: str = ""
    length_errors: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, int] = field(default_factory=dict)
    broken_paths: Collection[tuple[int, int]] = ()
    refused_joins: Mapping[str, int] = field(default_factory=dict)
    ready: Ready | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    draining: Collection[int] = ()


class FleetMetrics:
    """Per worker, and per transfer. ``view`` is set by the fleet."""

    def __init__(self) -> None:
        self.view: Callable[[], FleetView] = FleetView
        self.workers: dict[int, EngineStats] = {}  # what each worker reported last
        self.losses: Counter[int] = Counter()
        self.num_transfers = 0
        self.transferred_bytes = 0
        self.transfer_seconds = Histogram(_TRANSFER)
        self.handoff_seconds = Histogram(_TRANSFER)
        self._lost_counts: Counter[str] = Counter()  # what lost workers had counted
        self._lost_accepted: Counter[int] = Counter()

    @property
    def joint(self) -> EngineStats:
        """All workers as one: sums, the mean use of the KV cache, the largest model error."""
        known = list(self.workers.values())
        if not known:
            return _NOTHING
        return EngineStats(
            **{name: sum(getattr(stats, name) for stats in known) for name in (*_SUMMED, *_GROWING)},
            kv_usage=sum(stats.kv_usage for stats in known) / len(known),
            step_time_error=max(stats.step_time_error for stats in known),
        )

    def stats_of(self, worker: int) -> EngineStats:
        """What this worker reported last (zeros before it has)."""
        return self.workers.get(worker, _NOTHING)

    def count(self, name: str) -> int:
        """A count of all workers, those that are gone included: it never falls."""
        return self._lost_counts[name] + sum(int(getattr(stats, name)) for stats in self.workers.values())

    def accepted_at(self) -> dict[int, int]:
        """Drafted tokens that were right, by place in their draft; of all workers, those that are gone included."""
        total = Counter(self._lost_accepted)
        for stats in self.workers.values():
            total.update(dict(enumerate(stats.accepted_draft_tokens)))
        return dict(sorted(total.items()))

    def on_transfer(self, num_bytes: int, transfer_ns: int) -> None:
        """Count a request that a decode worker took over, with ``num_bytes`` that had to travel."""
        self.num_transfers += 1
        self.transferred_bytes += num_bytes
        self.transfer_seconds.observe(transfer_ns / NS_PER_S)

    def on_worker_lost(self, worker: int) -> None:
        """The counts of a new process start from zero; the sums here must never fall."""
        self.losses[worker] += 1
        self.on_worker_removed(worker)

    def on_worker_removed(self, worker: int) -> None:
        """There is no process of this worker any more, on purpose."""
        gone = self.workers.pop(worker, _NOTHING)
        for name in _GROWING:
            self._lost_counts[name] += getattr(gone, name)
        self._lost_accepted.update(dict(enumerate(gone.accepted_draft_tokens)))

    def families(self, model: str) -> Iterator[Metric]:
        """Every family with its present value."""
        view = self.view()
        yield from self._per_worker(model, view)
        yield from tier_families(self.workers, view.roles, model)
        yield from _by_label(model, view.counts)
        values = (
            ("diptych:handoffs", "Requests that a decode worker took over", self.num_transfers),
            ("diptych:kv_transfer_bytes", "KV bytes that travelled between workers", self.transferred_bytes),
            (
                "diptych:kv_leases_expired",
                "Sides of handoffs whose lease was not renewed in time",
                view.counts.get("leases_expired", 0),
            ),
            (
                "diptych:handoffs_revoked",
                "Prompts that gave up reserved blocks to a stream",
                view.counts.get("revoked", 0),
            ),
            (
                "diptych:kv_paths_broken",
                "Times that KV did not get from a worker to another, and handoffs between the two paused",
                view.counts.get("paths_broken", 0),
            ),
            ("diptych:request_retries", "Attempts after a lost one", view.counts.get("retried", 0)),
            ("diptych:streams_moved", "Requests that left a worker where they ran", view.counts.get("moved", 0)),
            (
                "diptych:poison_requests",
                "Requests refused because workers crashed with them",
                view.counts.get("poison", 0),
            ),
        )
        for name, text, value in values:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([model], value)
            yield family
        text = "First byte to commit of the KV of a handoff"
        yield self.transfer_seconds.family("diptych:kv_transfer_seconds", text, model)
        text = "First token at the front end to the decode worker taking over"
        yield self.handoff_seconds.family("diptych:handoff_seconds", text, model)
        queued = GaugeMetricFamily("diptych:num_requests_queued", "In the admission queue", labels=["model_name"])
        queued.add_metric([model], view.num_queued)
        yield queued
        text = "1 while predicted and actual prefix cache hits differ by over 20 % of the prompt tokens"
        alarm = GaugeMetricFamily("diptych:router_cache_alarm", text, labels=["model_name"])
        alarm.add_metric([model], int(bool(view.alarm)))
        yield alarm
        text = "Mean absolute error of expected output lengths, as a share of the mean length of the last answers"
        errors = GaugeMetricFamily("diptych:output_length_error", text, labels=["model_name", "expectation"])
        for expectation, error in view.length_errors.items():
            errors.add_metric([model, expectation], error)
        yield errors
        yield from _decided(model, view)
        yield from _across_hosts(model, view)
        yield _failed(model, view)

    def _per_worker(self, model: str, view: FleetView) -> Iterator[Metric]:
        labels = ["model_name", "worker", "role"]
        rows = (
            ("diptych:worker_up", "Whether the worker serves", lambda n: int(view.is_up[n])),
            ("diptych:worker_draining", "Whether the worker gets nothing new", lambda n: int(n in view.draining)),
            ("diptych:worker_requests_waiting", "Requests without blocks", lambda n: self.stats_of(n).num_waiting),
            ("diptych:worker_requests_prefilling", "Requests in prefill", lambda n: self.stats_of(n).num_prefilling),
            ("diptych:worker_requests_decoding", "Requests in decode", lambda n: self.stats_of(n).num_decoding),
            ("diptych:worker_kv_usage_ratio", "KV cache in use, 0 to 1", lambda n: self.stats_of(n).kv_usage),
        )
        for name, text, value in rows:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for number, role in enumerate(view.roles):
                gauge.add_metric([model, str(number), role], value(number))
            yield gauge
        restarts = CounterMetricFamily(
            "diptych:worker_restarts", "Times that a worker was started again", labels=labels
        )
        for number, role in enumerate(view.roles):
            restarts.add_metric([model, str(number), role], view.num_restarts[number])
        yield restarts
        waits = CounterMetricFamily(
            "diptych:worker_cpu_wait_seconds", "A thread of the worker was ready and had no core", labels=labels
        )
        text = "What the step-time model says that a step, a prompt token and so on add to a step"
        terms = GaugeMetricFamily("diptych:worker_step_time_seconds", text, labels=[*labels, "term"])
        for number, role in enumerate(view.roles):
            stats = self.stats_of(number)
            waits.add_metric([model, str(number), role], stats.cpu_wait_ns / NS_PER_S)
            for term, term_ns in zip(_TERMS, stats.step_time_coefficients, strict=False):
                terms.add_metric([model, str(number), role, term], term_ns / NS_PER_S)
        yield waits
        yield terms


def _by_label(model: str, counts: Mapping[str, int]) -> Iterator[Metric]:
    """ClusterCore's counts that carry their reason in their names."""
    for name, label, text, prefixes in (
        ("diptych:placements", "reason", "Attempts by how they were placed", ("placed_",)),
        ("diptych:attempts_lost", "reason", "Attempts that were lost, by why", ("lost_",)),
        ("diptych:requests_refused", "reason", "Requests refused on arrival or while they waited",
         ("refused_", "expired_")),
    ):  # fmt: skip
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for prefix in prefixes:
            for key, count in sorted(counts.items()):
                if key.startswith(prefix):
                    family.add_metric([model, key.removeprefix(prefix)], count)
        yield family


def _decided(model: str, view: FleetView) -> Iterator[Metric]:
    """What the planner decided."""
    decisions = CounterMetricFamily(
        "diptych:plan_decisions", "Decisions of the planner", labels=["model_name", "verdict"]
    )
    for verdict, count in sorted(view.decisions.items()):
        decisions.add_metric([model, verdict], count)
    yield decisions


def _failed(model: str, view: FleetView) -> Metric:
    """Defects of this server."""
    text = "Failures of a core or its driver by a defect of the server"
    failures = CounterMetricFamily("diptych:core_failures", text, labels=["model_name", "core"])
    for core, count in sorted(view.failures.items()):
        failures.add_metric([model, core], count)
    return failures


def _across_hosts(model: str, view: FleetView) -> Iterator[Metric]:
    """What goes wrong between hosts."""
    text = "1 for each path between two workers that KV does not pass, while handoffs there pause"
    paths = GaugeMetricFamily("diptych:kv_path_broken", text, labels=["model_name", "prefill", "decode"])
    for prefill, decode in sorted(view.broken_paths):
        paths.add_metric([model, str(prefill), str(decode)], 1)
    yield paths
    text = "Workers of other hosts that were refused"
    refused = CounterMetricFamily("diptych:workers_refused", text, labels=["model_name", "reason"])
    for reason, count in sorted(view.refused_joins.items()):
        refused.add_metric([model, reason], count)
    yield refused
