"""What each name used since the start of the server, as metrics and operators see it.

Owns the counts, and how many names they are kept apart for: a name has its own counts from its first request on, up to
KEY_NAMES names in the life of a server; those that come later are counted together, as ``other``. Counts never fall.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from diptych.serving import edge_limits
from diptych.serving.keys.key_record import OTHER

_COUNTS = (
    ("diptych:key_requests", "requests", "Requests that were taken"),
    ("diptych:key_prompt_tokens", "prompt", "Prompt tokens of requests that ended"),
    ("diptych:key_cached_tokens", "cached", "Of these, found in the prefix cache"),
    ("diptych:key_completion_tokens", "completion", "Tokens of answers of requests that ended"),
)


class KeyUsage:
    """The use of one name. refused: requests by reason. used_s: Unix seconds of the last request (0: none)."""

    __slots__ = ("cached", "completion", "prompt", "refused", "requests", "used_s")

    def __init__(self) -> None:
        self.requests = self.prompt = self.cached = self.completion = 0
        self.refused: Counter[str] = Counter()
        self.used_s = 0.0


class UsageBook:
    """The use of all names, and requests without a key that is known."""

    def __init__(self) -> None:
        self._by_name: dict[str, KeyUsage] = {}
        self._other: KeyUsage | None = None
        self.num_unknown = 0

    def of(self, name: str) -> KeyUsage:
        """Where the requests of a name are counted."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        if len(self._by_name) < edge_limits.KEY_NAMES:
            self._by_name[name] = found = KeyUsage()
            return found
        if self._other is None:
            self._other = KeyUsage()
        return self._other

    def known(self, name: str) -> KeyUsage | None:
        """The counts of a name that has some of its own."""
        return self._by_name.get(name)

    def families(self, model: str, only: str | None = None) -> Iterator[Metric]:
        """What Prometheus reads. only: the name whose counts are shown (None: all)."""
        shown = [
            (name, usage)
            for name, usage in (*self._by_name.items(), *(((OTHER, self._other),) if self._other else ()))
            if only is None or name == only
        ]
        for metric, field, text in _COUNTS:
            family = CounterMetricFamily(metric, text, labels=["model_name", "key"])
            for name, usage in shown:
                family.add_metric([model, name], getattr(usage, field))
            yield family
        labels = ["model_name", "key", "reason"]
        refused = CounterMetricFamily("diptych:key_refused_requests", "Requests that a limit refused", labels=labels)
        for name, usage in shown:
            for reason, count in sorted(usage.refused.items()):
                refused.add_metric([model, name, reason], count)
        yield refused
        text = "Requests with a key that is not known, or without one"
        unknown = CounterMetricFamily("diptych:unknown_key_requests", text, labels=["model_name"])
        unknown.add_metric([model], self.num_unknown)
        yield unknown
