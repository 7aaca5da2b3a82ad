"""An engine that counts its steps: what its gaps are made of is found again from pages of a made-up one."""

from collections.abc import Sequence
from typing import cast

import pytest

from diptych.control.slo import NS_PER_MS, Slo
from diptych.diagnosis.adapters import engine_server
from diptych.diagnosis.adapters.exposition import Growth, MetricsPage
from diptych.diagnosis.adapters.http_get import Site
from diptych.diagnosis.adapters.metric_names import Scrapes, observe_metrics
from diptych.diagnosis.adapters.step_counts import GapModel, StepMeans, StepNames, fit_gaps
from diptych.diagnosis.adapters.vllm_metrics import VLLM
from diptych.diagnosis.causes import Evidence, lost_to_of_means
from diptych.diagnosis.diagnosis import diagnose
from diptych.diagnosis.observation import Distribution, Estimate, Observation

FLOOR, STREAM, PROMPT = 0.004, 0.0002, 0.00006
Step = tuple[int, int]  # streams, prompt tokens
TOKEN_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
SECOND_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def seconds_of(step: Step) -> float:
    return FLOOR + STREAM * (step[0] - 1) + PROMPT * step[1]


class MadeUpEngine:
    """Counts steps as vLLM does. Each prompt is computed in one step; its first token waited ``queue_s``."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self.now_s = 0.0

    def run(self, steps: Sequence[Step], queue_s: float = 0.0, *, idle_s: float = 0.0) -> None:
        """These steps, one after the other; idle_s: before each."""
        for streams, prompt in steps:
            took = seconds_of((streams, prompt))
            self.now_s += took + idle_s
            self._see(VLLM.step_tokens, streams + prompt, TOKEN_BOUNDS)
            self._add(f"{VLLM.generated}_total", streams)
            for _ in range(streams):
                self._see(VLLM.itl, took, SECOND_BOUNDS)
            if prompt:
                values = {VLLM.ttft: queue_s + took, VLLM.queue: queue_s, VLLM.prefill: took, VLLM.tpot: took}
                for name, value in values.items():
                    self._see(name, value, SECOND_BOUNDS)
                self._see(VLLM.computed, prompt, TOKEN_BOUNDS)
                self._see(VLLM.output_tokens, 20, TOKEN_BOUNDS)

    def page(self, running: float = 1.0, waiting: float = 0.0) -> tuple[float, MetricsPage]:
        """Now."""
        self.samples[VLLM.running], self.samples[VLLM.waiting] = {(): running}, {(): waiting}
        return self.now_s, MetricsPage({name: dict(values) for name, values in self.samples.items()})

    def _see(self, name: str, value: float, bounds: Sequence[float]) -> None:
        self._add(f"{name}_sum", value)
        self._add(f"{name}_count", 1)
        for bound in bounds:
            self._add(f"{name}_bucket", float(value <= bound), (("le", str(bound)),))
        self._add(f"{name}_bucket", 1, (("le", "+Inf"),))

    def _add(self, name: str, value: float, labels: tuple[tuple[str, str], ...] = ()) -> None:
        values = self.samples.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value


def step_names() -> StepNames:
    assert VLLM.steps is not None
    return VLLM.steps


def observed(*intervals: Sequence[Step], before: Sequence[Step] = (), queue_s: float = 0.0,
             gauges: Sequence[tuple[float, float]] = ()) -> Observation:  # fmt: skip
    """Pages between these steps; gauges: (running, waiting) of each page."""
    engine = MadeUpEngine()
    engine.run(before)
    given = list(gauges) or [(1.0, 0.0)] * (len(intervals) + 1)
    pages = [engine.page(*given[0])]
    for steps, gauge in zip(intervals, given[1:], strict=True):
        engine.run(steps, queue_s)
        pages.append(engine.page(*gauge))
    return observe_metrics(VLLM, Scrapes(pages, "test"))


def test_the_cost_of_a_step_is_found_from_means() -> None:
    engine = MadeUpEngine()
    engine.run([(1, 0)] * 40 + [(1, 120)] * 2)
    pages = [engine.page()]
    for streams, prompts in ((2, 1), (8, 4), (16, 2), (4, 6), (12, 1)):
        engine.run([(streams, 0)] * 40 + [(streams, 300)] * prompts)
        pages.append(engine.page())
    model = fit_gaps(step_names(), pages)
    assert model is not None
    assert model.floor_s == pytest.approx(FLOOR, rel=0.05)
    assert model.per_stream_s == pytest.approx(STREAM, rel=0.15)
    assert model.per_prompt_token_s == pytest.approx(PROMPT, rel=0.15)


def test_long_prompts_that_hardly_a_stream_feels_are_priced_by_their_own_prefill_times() -> None:
    """Their steps have no gaps; those of the same pages have many short ones."""
    engine = MadeUpEngine()
    engine.run([(1, 0)] * 40 + [(1, 120)] * 20)
    pages = [engine.page()]
    for _ in range(4):
        engine.run([(1, 0)] * 40 + [(1, 120)] * 5)
        engine.run([(0, 6000)], idle_s=1.0)
        pages.append(engine.page())
    model = fit_gaps(step_names(), pages)
    assert model is not None
    assert model.per_prompt_token_s == pytest.approx(PROMPT, rel=0.5)
    assert model.wait_for_step_s(step_names(), Growth(pages[0][1], pages[-1][1]), 1, 4.0) > 4 * 0.36**2 / 2 / 4 / 2


def test_where_nothing_ended_in_the_window_the_steps_of_the_whole_life_explain_the_wait() -> None:
    engine = MadeUpEngine()
    engine.run([(1, 0)] * 40 + [(1, 120)] * 20)
    engine.run([(0, 6000)] * 5, queue_s=0.0)
    late_s = 1.0
    engine.samples[f"{VLLM.ttft}_sum"][()] += 25 * late_s  # that no other histogram holds
    pages = [engine.page(), (engine.now_s + 6, engine.page()[1])]
    rests = {life_s: observe_metrics(VLLM, Scrapes(pages, "test", life_s=life_s)) for life_s in (0.0, 2.0)}
    parts = {life_s: found.ttft.parts_s for life_s, found in rests.items() if found.ttft}
    assert parts[0.0]["rest"] > 0.5 and not parts[0.0]["queue"]
    assert parts[2.0]["queue"] > 0.1 and sum(parts[2.0].values()) == pytest.approx(sum(parts[0.0].values()))


def test_where_the_batch_never_changes_most_of_a_step_is_its_floor() -> None:
    engine = MadeUpEngine()
    pages = [engine.page()]
    for _ in range(4):
        engine.run([(8, 0)] * 40)
        pages.append(engine.page())
    model = fit_gaps(step_names(), pages)
    assert model is not None and model.per_prompt_token_s == 0
    assert 0 < model.per_stream_s < 0.1 * model.floor_s
    assert model.floor_s + 7 * model.per_stream_s == pytest.approx(seconds_of((8, 0)), rel=0.02)


def test_the_parts_of_a_gap_sum_to_it() -> None:
    means = StepMeans(gap_s=0.02, num_gaps=100, batch=5, prompt=200)
    parts = GapModel(FLOOR, STREAM, PROMPT).parts(means)
    assert sum(parts.values()) == pytest.approx(0.02)
    assert parts["stalls"] > 10 * parts["rest"] > 0
    alone = GapModel(FLOOR, 0.0, 0.0).parts(means)
    assert alone == {"decode_floor": 0.02, "stalls": 0.0, "rest": 0.0}
    fast = GapModel(FLOOR, STREAM, PROMPT).parts(StepMeans(0.001, 100, 5, 200))
    assert sum(fast.values()) == pytest.approx(0.001)


def test_a_request_waits_for_half_of_a_long_step_while_such_steps_run() -> None:
    """Half the time of the window is in steps of 0.4 s: a request that comes then waits 0.2 s on average."""
    engine = MadeUpEngine()
    _, before = engine.page()
    engine.run([(0, 6600)] * 10)
    model = GapModel(0.0, 0.0, 0.4 / 6600)
    wait = model.wait_for_step_s(step_names(), Growth(before, engine.page()[1]), 0, 8.0)
    assert wait == pytest.approx(0.1, rel=0.01)
    assert model.wait_for_step_s(step_names(), Growth(before, before), 0, 8.0) == 0.0


def test_time_that_no_histogram_holds_is_waiting_as_far_as_steps_explain_it() -> None:
    engine = MadeUpEngine()
    engine.run([(2, 0)] * 100 + [(2, 120)] * 10)
    pages = [engine.page()]
    for _ in range(6):
        engine.run([(2, 0)] * 10 + [(2, 6000)] * 2 + [(2, 120)] * 2, 0.3)
        pages.append(engine.page())
    for _, page in pages:  # as if the engine core had taken requests in only after 0.3 s
        page.samples[f"{VLLM.queue}_sum"][()] = 0.0  # type: ignore[index]
    seen = observe_metrics(VLLM, Scrapes(pages, "test"))
    assert seen.ttft is not None
    assert seen.ttft.parts_s["queue"] > 0.25 > 2 * seen.ttft.parts_s.get("rest", 0.0)
    assert sum(seen.ttft.parts_s.values()) == pytest.approx(seen.ttft.measured_s)


def test_parts_that_ended_requests_had_more_of_are_scaled_to_the_mean() -> None:
    engine = MadeUpEngine()
    engine.run([(2, 120)] * 20, 0.3)
    pages = [engine.page()]
    engine.run([(2, 120)] * 20, 0.3)
    pages.append(engine.page())
    pages[1][1].samples[f"{VLLM.queue}_sum"][()] += 20.0  # type: ignore[index]
    seen = observe_metrics(VLLM, Scrapes(pages, "test"))
    assert seen.ttft is not None
    assert sum(seen.ttft.parts_s.values()) == pytest.approx(seen.ttft.measured_s)


MIXED = [(6, 0)] * 20 + [(6, 4000)]
CHATS = [(2, 0)] * 30 + [(2, 120)]


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (observed(*[MIXED] * 14, before=CHATS * 4), "prefill_interference"),
        (observed(*[[(48, 0)] * 20 + [(48, 60)] * 2] * 8, before=CHATS * 4), "decode_batch"),
        # two places: requests wait while steps are short
        (observed(*[CHATS] * 8, before=CHATS, queue_s=1.0, gauges=[(2.0, 1.0)] * 9), "sequence_limit"),
        # as many as ever, and twice the places would serve hardly more: the prompts are the work
        (observed(*[[(32, 600)] * 30] * 8, before=CHATS * 4, queue_s=5.0, gauges=[(32.0, 300.0)] * 9), "capacity"),
        # the same, while the backlog shrinks by more than comes
        (
            observed(*[[(32, 600)] * 30] * 8, before=CHATS * 4, queue_s=5.0,
                     gauges=[(32.0, 400.0 - 25 * at) for at in range(9)]),
            "batch_flood",
        ),
    ],
)  # fmt: skip
def test_counts_of_steps_tell_causes_apart(seen: Observation, cause: str) -> None:
    found = diagnose(seen, Slo(800 * NS_PER_MS, 8 * NS_PER_MS))
    assert found.verdict == "limited"
    assert found.causes[0].name == cause, [(other.name, other.share_of_misses) for other in found.causes]
    assert all(abs(waterfall.residual_s) <= 0.02 * waterfall.measured_s for waterfall in found.waterfalls)


def test_values_near_a_bound_are_told_by_their_sum() -> None:
    """All in the bucket from 10 to 25 ms, with a mean of 11: hardly any is above 15."""
    buckets = ((0.01, 0.0), (0.025, 100.0), (float("inf"), 100.0))
    even = Distribution(buckets)
    assert even.share_above(0.015) == pytest.approx(2 / 3)
    near = Distribution.with_sum(buckets, 1.1)
    assert near.share_above(0.015) < 0.1
    assert near.quantile(0.5) < 0.0105
    assert sum(mean * count for mean, count in near.means()) == pytest.approx(1.1)
    far = Distribution.with_sum(buckets, 2.4)
    assert far.share_above(0.015) > 0.95
    for share in (0.1, 0.5, 0.9):
        assert far.share_above(far.quantile(share)) == pytest.approx(1 - share)


def test_few_values_of_a_wide_first_bucket_are_several_times_their_mean() -> None:
    """Tokens of 2 ms, all in the bucket to 10 ms, of an engine that has no smaller one."""
    tokens = Distribution.with_sum(((0.01, 100.0), (float("inf"), 100.0)), 0.2)
    assert tokens.share_above(0.006) < 0.01
    assert 0.3 < tokens.share_above(0.002) < 0.5  # their mean
    assert tokens.share_above(0.001) > 0.8
    assert tokens.share_above(0.01) == 0
    for share in (0.05, 0.5, 0.95):
        assert tokens.share_above(tokens.quantile(share)) == pytest.approx(1 - share, abs=1e-6)
    slow = Distribution.with_sum(((0.01, 100.0), (float("inf"), 100.0)), 0.7)
    assert slow.share_above(0.006) > 0.5


def test_an_infinite_bucket_says_nothing_of_the_others() -> None:
    buckets = ((0.01, 50.0), (float("inf"), 100.0))
    assert Distribution.with_sum(buckets, 500.0).inside == 0.5
    assert Distribution.with_sum((), 0.0) == Distribution()


def test_pages_within_the_window_need_no_buckets() -> None:
    text = '# TYPE h histogram\nh_bucket{le="1"} 3\nh_bucket{le="+Inf"} 4\nh_sum 5\nh_count 4\n'
    page = MetricsPage.of_text(text, "test", has_buckets=False)
    growth = Growth(MetricsPage(), page)
    assert growth.mean("h") == (1.25, 4)
    assert growth.distribution("h") == Distribution()
    assert Growth(MetricsPage(), MetricsPage.of_text(text, "test")).distribution("h").count == 4


@pytest.mark.parametrize(("page_s", "num_pages", "end_s"), [(0, 15, 7.0), (0.6, 8, 7.6), (3, 3, 9.0), (9, 2, 18.0)])
def test_a_server_that_takes_long_for_a_page_is_asked_less_often(
    page_s: float, num_pages: int, end_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SlowSite(page_s)
    monkeypatch.setattr(engine_server, "time", clock)
    begun = clock.now + engine_server.SETTLE_S
    read = engine_server.read_pages(cast(Site, clock), 7.0)
    assert len(read.pages) == num_pages
    assert clock.now - begun == pytest.approx(end_s)


class SlowSite:
    """A server and the clock that its pages take time from."""

    url, local_port = "http://here", None

    def __init__(self, page_s: float) -> None:
        self.now = 100.0
        self.page_s = page_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, path: str) -> bytes:
        self.now += self.page_s
        return b"# TYPE a counter\na_total 1\n"


def test_lacking_cores_own_their_share_of_all_that_is_computed_and_its_square_of_what_waits_for_it() -> None:
    ttft = Estimate(1.0, {"queue": 0.6, "prefill": 0.4}, 0.1, 10)
    itl = Estimate(0.01, {"decode_floor": 0.01}, 0.001, 10)
    for core_wait in (0.0, 0.5):
        seen = Observation(
            engine="vllm", source="test", window_s=1.0, ttft=ttft, itl=itl, signals={"output_mean": 11.0}
        )
        before, after = lost_to_of_means(seen, Evidence(lacks_cores=core_wait > 0, core_wait=core_wait))
        assert sum(before.values()) == pytest.approx(1.0) and sum(after.values()) == pytest.approx(0.1)
        assert before["oversubscribed_cores"] == pytest.approx(0.6 * (1 - (1 - core_wait) ** 2) + 0.4 * core_wait)
        assert after["oversubscribed_cores"] == pytest.approx(0.1 * core_wait)
