"""A page of Prometheus' text format, and what grew between two of them.

Counters start again at 0 when a process does: a value that fell counts from 0. Label sets of one name are added up
(several engines, several models behind one page); adapters that need a label ask for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from prometheus_client.parser import text_string_to_metric_families

from diptych.control.errors import ConfigError
from diptych.diagnosis.observation import Distribution

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples by name and labels. Counters as on the page: with ``_total``."""

    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    @classmethod
    def of_text(cls, text: str, source: str, *, has_buckets: bool = True) -> "MetricsPage":
        """has_buckets: also those of histograms, which are most of a page and of the time that it takes to read it.
        Raises ConfigError for a page that is not in the format."""
        if not has_buckets:
            text = "\n".join(line for line in text.splitlines() if "_bucket{" not in line) + "\n"
        samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name][tuple(sorted(sample.labels.items()))] = float(sample.value)
        except ValueError as error:
            raise ConfigError(f"{source} is no page of Prometheus metrics: {error}", param="url") from None
        return cls(samples)

    @classmethod
    def of_window(cls, texts: Sequence[tuple[float, bytes]], source: str) -> "list[tuple[float, MetricsPage]]":
        """Pages with their seconds, in order. Shares are of the whole window: only its ends have buckets. Raises
        ConfigError."""
        ends = (0, len(texts) - 1)
        return [
            (seconds, cls.of_text(text.decode(errors="replace"), source, has_buckets=number in ends))
            for number, (seconds, text) in enumerate(texts)
        ]

    @classmethod
    def of_samples(cls, found: Iterable[tuple[Mapping[str, str], float]]) -> "MetricsPage":
        """The page of (labels with ``__name__``, value), as a Prometheus server answers. Its own labels are kept."""
        samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for labels, value in found:
            rest = {name: text for name, text in labels.items() if name != "__name__"}
            samples[labels.get("__name__", "")][tuple(sorted(rest.items()))] = value
        return cls(samples)

    def has(self, name: str) -> bool:
        """Whether there is any sample of it."""
        return bool(self.samples.get(name))

    def has_prefix(self, prefix: str) -> bool:
        """Whether some name begins so."""
        return any(name.startswith(prefix) for name in self.samples)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets with these labels; None: there is none."""
        values = [
            value
            for having, value in self.samples.get(name, {}).items()
            if isfinite(value) and labels.items() <= dict(having).items()
        ]
        return sum(values) if values else None

    def largest(self, name: str) -> float | None:
        """The largest of all label sets; None: there is none."""
        return max((value for value in self.samples.get(name, {}).values() if isfinite(value)), default=None)

    def label(self, name: str, label: str) -> str | None:
        """A label of the first sample of a name; None: there is none."""
        return next((dict(labels).get(label) for labels in self.samples.get(name, {})), None)


EMPTY = MetricsPage()


@dataclass(frozen=True, slots=True)
class Growth:
    """What counters and histograms grew by from ``before`` to ``after``."""

    before: MetricsPage
    after: MetricsPage

    def count(self, name: str, **labels: str) -> float | None:
        """Growth of a counter (its name without ``_total``, or a part of a histogram with its ending)."""
        for full in (f"{name}_total", name):
            if self.after.has(full):
                return self._grown(full, **labels)
        return None

    def mean(self, histogram: str) -> tuple[float, float] | None:
        """(mean, how many) of the values that a histogram or summary got; None: none."""
        total, count = self.count(f"{histogram}_sum"), self.count(f"{histogram}_count")
        return (total / count, count) if total is not None and count else None

    def distribution(self, histogram: str) -> Distribution:
        """The values that a histogram got; empty: none."""
        totals: defaultdict[float, float] = defaultdict(float)
        name = f"{histogram}_bucket"
        for labels, value in self.after.samples.get(name, {}).items():
            bound = dict(labels).get("le", "+Inf")
            totals[inf if bound == "+Inf" else float(bound)] += value - self._value_before(name, labels, value)
        buckets = tuple(sorted(totals.items()))
        if not buckets or buckets[-1][1] <= 0:
            return Distribution()
        total = self.count(f"{histogram}_sum")
        return Distribution(buckets) if total is None else Distribution.with_sum(buckets, total)

    def _grown(self, name: str, **labels: str) -> float:
        total = 0.0
        for having, value in self.after.samples[name].items():
            if labels.items() <= dict(having).items():
                total += value - self._value_before(name, having, value)
        return total

    def _value_before(self, name: str, labels: Labels, value: float) -> float:
        """What is not counted of a value: 0 where its process was started again meanwhile. Of a histogram the number of
        its values tells, for all its samples alike."""
        base = next((name.removesuffix(end) for end in ("_sum", "_bucket", "_count") if name.endswith(end)), "")
        counts = f"{base}_count" if base else ""
        own = tuple(pair for pair in labels if pair[0] != "le")
        now = self.after.samples.get(counts, {}).get(own) if counts else None
        if now is not None and now < self.before.samples.get(counts, {}).get(own, 0.0):
            return 0.0
        before = self.before.samples.get(name, {}).get(labels, 0.0)
        return before if value >= before else 0.0
