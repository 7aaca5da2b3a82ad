"""Two pages of an engine's metrics as an Observation: which names hold what is a table, the arithmetic is here.

Means come from sums and counts, shares from buckets. What the buckets cannot tell apart is named in ``missing``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

from diptych.diagnosis.adapters.exposition import Growth, MetricsPage
from diptych.diagnosis.adapters.step_counts import GapModel, StepMeans, StepNames, fit_gaps
from diptych.diagnosis.observation import Distribution, Estimate, Missing, Observation

FLOOR, USUAL = 0.05, 0.5  # quantiles of the gaps between tokens: a fast step, a usual one
STALL_FACTOR = 2.5  # a gap from this factor times the usual one on is a stall
FEWEST_SEEN = 8  # first tokens in the window; with fewer, the whole life of the engine counts
ENOUGH = 0.5  # ends that there must be per first token for the times that are counted at the end
PLATEAU, FEWEST_ON_IT = 0.6, 3  # share and number of samples with waiting requests that show the same highest batch
WORTH_PLACES = 1.3  # times the requests a second with twice the places: below, it is not they that limit
STEP_WAITS = 2.0  # a request waits for the step that runs when it comes, and for one more where its prompt is split
PREFILL_NOTE = "the time of prefills is not exported: estimated as what is left of the time to the first token"
NO_TPOT = Missing(
    ("few slow requests", "slow gaps of many"),
    "a histogram of the time per output token of each request (judged by the mean)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Where an engine says what. Histograms by their base name, counters without ``_total``, "" for what it does not
    export. known: other names that are understood, and not needed."""

    engine: str
    prefix: str
    ttft: str = ""
    itl: str = ""
    tpot: str = ""
    queue: str = ""
    prefill: str = ""
    transfer: str = ""
    running: str = ""
    waiting: str = ""
    kv_usage: str = ""
    preemptions: str = ""
    prefix_queries: str = ""
    prefix_hits: str = ""
    hit_rate: str = ""
    prompt_tokens: str = ""
    output_tokens: str = ""
    step_tokens: str = ""
    generated: str = ""
    computed: str = ""
    refused: str = ""
    places: str = ""
    missing: tuple[Missing, ...] = ()
    known: frozenset[str] = field(default_factory=frozenset)

    @property
    def steps(self) -> StepNames | None:
        """The names that say what a gap is made of; None: not exported."""
        if not (self.itl and self.step_tokens and self.generated):
            return None
        return StepNames(self.itl, self.step_tokens, self.prefill, self.computed, self.generated)

    @property
    def used(self) -> set[str]:
        """All names above that are exported."""
        names = [getattr(self, name) for name in self.__slots__ if name not in ("engine", "prefix", "missing", "known")]
        return {name for name in names if name} | self.known


@dataclass(frozen=True, slots=True)
class Scrapes:
    """Pages of one server in order of time, with seconds. life_s: how long it has run (0: not known)."""

    pages: Sequence[tuple[float, MetricsPage]]
    source: str
    signals: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
    life_s: float = 0.0

    @property
    def window_s(self) -> float:
        """Seconds from the first page to the last."""
        return self.pages[-1][0] - self.pages[0][0]


def num_first_tokens(names: MetricNames, pages: Sequence[tuple[float, MetricsPage]]) -> float:
    """First tokens between the first of these pages and the last."""
    found = Growth(pages[0][1], pages[-1][1]).mean(names.ttft or names.itl)
    return 0.0 if found is None else found[1]


def observe_metrics(names: MetricNames, scrapes: Scrapes) -> Observation:
    """The observation of an engine in the window of its pages; of its whole life when nothing ended in the window."""
    first, last = scrapes.pages[0][1], scrapes.pages[-1][1]
    growth = Growth(first, last)
    notes: tuple[str, ...] = ()
    seen = growth.mean(names.ttft or names.itl)
    if len(scrapes.pages) == 1 or seen is None or seen[1] < FEWEST_SEEN:
        growth = Growth(MetricsPage(), last)
        notes = ("too little happened in the window: these are the figures since the start of the engine",)
    distributions = {"ttft": growth.distribution(names.ttft), "tpot": growth.distribution(names.tpot)}
    gaps = growth.distribution(names.itl)
    steps = _Steps.of(names, scrapes, growth)
    seconds = scrapes.life_s if notes else scrapes.window_s
    step_wait_s = steps.wait_s(seconds) if steps is not None and seconds else 0.0
    ttft = _ttft(names, growth, distributions["ttft"], _waited_s(names, scrapes), step_wait_s)
    if ttft is not None and not names.prefill:
        notes = (*notes, PREFILL_NOTE)
    return Observation(
        engine=names.engine,
        source=scrapes.source,
        version=scrapes.version,
        window_s=scrapes.window_s,
        ttft=ttft,
        itl=_itl(names, growth, gaps, steps),
        distributions={name: found for name, found in distributions.items() if found.count},
        signals={**_signals(names, scrapes, growth, gaps, steps), **scrapes.signals},
        missing=names.missing if names.tpot else (*names.missing, NO_TPOT),
        unknown=_unknown(names, last),
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """A GapModel of the steps of the window, of an engine that counts them."""

    names: StepNames
    growth: Growth
    model: GapModel
    means: StepMeans

    @classmethod
    def of(cls, names: MetricNames, scrapes: Scrapes, growth: Growth) -> "_Steps | None":
        step_names = names.steps
        if step_names is None:
            return None
        means = StepMeans.of(step_names, growth)
        model = fit_gaps(step_names, scrapes.pages)
        return cls(step_names, growth, model, means) if model is not None and means is not None else None

    def parts(self) -> dict[str, float]:
        return self.model.parts(self.means)

    @property
    def gain_of_places(self) -> float:
        return self.model.gain_of_places(self.means)

    def wait_s(self, window_s: float) -> float:
        return self.model.wait_for_step_s(self.names, self.growth, self.means.batch, window_s)


def _ttft(
    names: MetricNames, growth: Growth, spread: Distribution, waited_s: float, step_wait_s: float
) -> Estimate | None:
    """waited_s: seconds that requests waited in the window, all together. step_wait_s: see STEP_WAITS.

    An engine core takes in what has come between two steps, and only then counts it as waiting; and what is counted at
    a request's end lacks those that still wait. So time that no histogram holds is waiting, as far as that goes; beyond
    that it is the prefill of an engine that does not export it."""
    measured = growth.mean(names.ttft) if names.ttft else None
    if measured is None:
        return None
    mean, count = measured
    parts: dict[str, float] = {}
    for account, name in (("queue", names.queue), ("prefill", names.prefill), ("transfer", names.transfer)):
        if name and (found := growth.mean(name)):
            parts[account] = found[0]
    counted = growth.mean(names.queue) if names.queue else None
    if counted is None or counted[1] < ENOUGH * count:  # engines count these when a request ends: too few have ended
        queue = min(mean, waited_s / count)
        parts = {"queue": queue, "prefill": mean - queue}
    rest = mean - sum(parts.values())
    if rest > 0:
        unseen = max(0.0, waited_s / count - parts.get("queue", 0.0)) + STEP_WAITS * step_wait_s
        parts["queue"] = parts.get("queue", 0.0) + min(rest, unseen)
        parts["rest" if names.prefill else "prefill"] = max(0.0, rest - unseen)
    elif rest < 0:
        parts = {account: value * mean / (mean - rest) for account, value in parts.items()}
    return Estimate(mean, parts, _half(spread, mean, count), int(count))


def _waited_s(names: MetricNames, scrapes: Scrapes) -> float:
    """Waiting requests, integrated over the window."""
    values = [page.total(names.waiting) or 0.0 for _, page in scrapes.pages] if names.waiting else []
    return fmean(values) * scrapes.window_s if values else 0.0


def _itl(names: MetricNames, growth: Growth, gaps: Distribution, steps: _Steps | None) -> Estimate | None:
    """What the engine's counts of steps say; without them a usual gap, what stalls add to it, and the rest, with the
    fastest gaps as the floor."""
    measured = growth.mean(names.itl) if names.itl else None
    if measured is None:
        return None
    mean, count = measured
    half_s = _half(gaps, mean, count)
    if steps is not None:
        return Estimate(mean, steps.parts(), half_s, int(count))
    usual, floor = gaps.quantile(USUAL), gaps.quantile(FLOOR)
    stalls = max(0.0, min(mean, _stalls(gaps, usual)))
    floor = min(floor, mean - stalls)
    parts = {"decode_floor": floor, "stalls": stalls, "rest": mean - stalls - floor}
    return Estimate(mean, parts, half_s, int(count))


def _stalls(gaps: Distribution, usual: float) -> float:
    """Seconds per token beyond a usual gap, of gaps that are much longer (at the mean of their buckets)."""
    total = sum(count * (mean - usual) for mean, count in gaps.means() if mean > STALL_FACTOR * usual)
    return total / gaps.count if gaps.count else 0.0


def _half(spread: Distribution, mean: float, count: float) -> float:
    """Half of the 95 % interval of a mean, with the variance that the buckets show."""
    if not spread.count or count < 2:
        return mean
    variance = sum(count * (middle - mean) ** 2 for middle, count in spread.means())
    return 1.96 * sqrt(variance / spread.count / count)


def _signals(
    names: MetricNames, scrapes: Scrapes, growth: Growth, gaps: Distribution, steps: _Steps | None
) -> dict[str, float]:
    """The named evidence, as far as it is exported."""
    pages = [page for _, page in scrapes.pages]
    signals: dict[str, float] = {}
    ended = growth.mean(names.ttft) if names.ttft else None
    requests = ended[1] if ended else 0.0
    signals["requests"] = requests
    inside = Growth(pages[0], pages[-1]).mean(names.ttft) if names.ttft else None
    if scrapes.window_s > 0 and inside is not None:
        signals["rate"] = inside[1] / scrapes.window_s
    if inside is not None and names.waiting:
        backlog = [page.total(names.waiting) or 0.0 for page in (pages[0], pages[-1])]
        signals["arrived_share"] = max(0.0, inside[1] + backlog[1] - backlog[0]) / inside[1]
    for signal, name in (("running", names.running), ("waiting", names.waiting)):
        values = [value for page in pages if name and (value := page.total(name)) is not None]
        if values:
            signals[signal], signals[f"{signal}_max"] = fmean(values), max(values)
    signals.pop("waiting_max", None)
    usage = [value for page in pages if names.kv_usage and (value := page.largest(names.kv_usage)) is not None]
    if usage:
        signals["kv_usage"], signals["kv_usage_max"] = fmean(usage), max(usage)
    if names.preemptions and (preempted := growth.count(names.preemptions)) is not None:
        signals["preemptions"] = preempted / max(1.0, requests)
    if names.refused and (refused := Growth(pages[0], pages[-1]).count(names.refused)) is not None:
        signals["rejected"] = refused
    if names.places and (places := pages[-1].total(names.places)):
        signals["max_num_seqs"] = places
    elif (steps is None or steps.gain_of_places >= WORTH_PLACES) and (plateau := _plateau(names, pages)):
        signals["max_num_seqs"] = plateau
    queries = growth.count(names.prefix_queries) if names.prefix_queries else None
    hits = growth.count(names.prefix_hits) if names.prefix_hits else None
    if queries:
        signals["hit_share"] = (hits or 0.0) / queries
    elif names.hit_rate and (rate := pages[-1].largest(names.hit_rate)) is not None:
        signals["hit_share"] = rate
    if names.prompt_tokens and (prompts := growth.distribution(names.prompt_tokens)).count:
        signals["prompt_p50"], signals["prompt_p95"] = prompts.quantile(0.5), prompts.quantile(0.95)
    for signal, name in (("prompt_mean", names.prompt_tokens), ("output_mean", names.output_tokens)):
        whole = Growth(MetricsPage(), pages[-1])
        if name and (found := growth.mean(name) or whole.mean(name)):
            signals[signal] = found[0]
    if names.step_tokens and (tokens := growth.distribution(names.step_tokens)).count:
        signals["step_tokens_p95"] = tokens.quantile(0.95)
    if gaps.count:
        stalls = _stalls(gaps, gaps.quantile(USUAL)) if steps is None else steps.parts()["stalls"]
        signals["stall_s"] = stalls * max(0.0, signals.get("output_mean", 1.0) - 1)
    return signals


def _plateau(names: MetricNames, pages: Sequence[MetricsPage]) -> float | None:
    """The number of places, where it can be seen: requests wait, memory is free, and the batch is often as large as it
    ever is."""
    if not (names.running and names.waiting):
        return None
    batches = [(page.total(names.running) or 0.0, page.total(names.waiting) or 0.0) for page in pages]
    most = max(running for running, _ in batches)
    seen = [running for running, waiting in batches if waiting > 0]
    on_it = seen.count(most)
    return most if most > 0 and on_it >= FEWEST_ON_IT and on_it >= PLATEAU * len(seen) else None


def _unknown(names: MetricNames, page: MetricsPage) -> tuple[str, ...]:
    endings = ("_bucket", "_sum", "_count", "_total", "_created", "_info")
    found = set()
    for name in page.samples:
        if name.startswith(names.prefix):
            base = name
            for ending in endings:
                base = base.removesuffix(ending)
            found.add(base)
    return tuple(sorted(found - {name.removesuffix("_info") for name in names.used}))
