"""Pages of other engines become observations: their means, misses, causes, and what they leave undecided."""

from collections.abc import Mapping

import msgspec
import pytest

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, Slo
from diptych.diagnosis.adapters.dynamo_metrics import DYNAMO
from diptych.diagnosis.adapters.exposition import Growth, MetricsPage
from diptych.diagnosis.adapters.http_get import Site
from diptych.diagnosis.adapters.llamacpp_metrics import Slots, observe_llamacpp
from diptych.diagnosis.adapters.metric_names import MetricNames, Scrapes, observe_metrics
from diptych.diagnosis.adapters.sglang_metrics import SGLANG
from diptych.diagnosis.adapters.vllm_metrics import VLLM
from diptych.diagnosis.diagnosis import diagnose
from diptych.diagnosis.engine_advice import advise
from diptych.diagnosis.live_diagnosis import engines_diagnosis
from diptych.diagnosis.objectives_presets import PRESETS, objectives_in_words, parse_objectives
from diptych.diagnosis.observation import Distribution, Observation
from diptych.timeline.watched_server import WatchedEngine, WatchedEngines

SLO = Slo(500 * NS_PER_MS, 50 * NS_PER_MS)
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def histogram(name: str, values: Mapping[float, int]) -> str:
    """The lines of a histogram with these values (value -> how often)."""
    lines = [f"# TYPE {name} histogram"]
    for bound in BOUNDS:
        below = sum(count for value, count in values.items() if value <= bound)
        lines.append(f'{name}_bucket{{model_name="m",le="{bound}"}} {below}')
    total = sum(values.values())
    lines.append(f'{name}_bucket{{model_name="m",le="+Inf"}} {total}')
    lines.append(f'{name}_sum{{model_name="m"}} {sum(value * count for value, count in values.items())}')
    lines.append(f'{name}_count{{model_name="m"}} {total}')
    return "\n".join(lines) + "\n"


def page(
    names: MetricNames, histograms: Mapping[str, Mapping[float, int]], gauges: Mapping[str, float],
    counters: Mapping[str, float] | None = None,
) -> MetricsPage:  # fmt: skip
    """A page of an engine; names by the fields of MetricNames."""
    exported = ((getattr(names, field), values) for field, values in histograms.items())
    text = "".join(histogram(name, values) for name, values in exported if name)
    for field, value in gauges.items():
        text += f"# TYPE {getattr(names, field)} gauge\n{getattr(names, field)}{{}} {value}\n"
    for field, value in (counters or {}).items():
        text += f"# TYPE {getattr(names, field)} counter\n{getattr(names, field)}_total{{}} {value}\n"
    return MetricsPage.of_text(text, "test")


def vllm(ttft: float, queue: float, gaps: Mapping[float, int], *, running: float, waiting: float,
         kv: float = 0.2, preemptions: float = 0.0, names: MetricNames = VLLM) -> Observation:  # fmt: skip
    """Forty requests with this mean TTFT."""
    histograms = {"ttft": {ttft: 40}, "queue": {queue: 40}, "itl": gaps, "tpot": {_mean(gaps): 40},
                  "prompt_tokens": {10.0: 40}, "output_tokens": {10.0: 40}}  # fmt: skip
    if names.prefill:
        histograms["prefill"] = {ttft - queue: 40}
    gauges = {"running": running, "waiting": waiting, "kv_usage": kv}
    empty = MetricsPage()
    full = page(names, histograms, gauges, {"preemptions": preemptions})
    pages = [(0.0, empty)] + [(float(second), full) for second in range(1, 8)]
    return observe_metrics(names, Scrapes(pages, "test"))


def _mean(values: Mapping[float, int]) -> float:
    return sum(value * count for value, count in values.items()) / sum(values.values())


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (vllm(3.0, 2.9, {0.02: 400}, running=16, waiting=12), "sequence_limit"),
        (vllm(3.0, 2.9, {0.02: 400}, running=16, waiting=12, kv=0.98), "kv_cache_full"),
        (vllm(0.1, 0.0, {0.02: 380, 2.0: 20}, running=6, waiting=0), "prefill_interference"),
        (vllm(0.1, 0.0, {0.02: 380, 2.0: 20}, running=6, waiting=0, kv=0.99, preemptions=30), "kv_cache_full"),
        (vllm(3.0, 2.9, {0.02: 400}, running=16, waiting=12, names=SGLANG), "sequence_limit"),
    ],
)
def test_pages_of_other_engines_name_a_cause(seen: Observation, cause: str) -> None:
    found = diagnose(seen, SLO)
    assert found.verdict == "limited"
    assert found.causes[0].name == cause, [(other.name, other.share_of_misses) for other in found.causes]
    assert not found.waterfalls[0].is_exact
    assert abs(found.waterfalls[0].residual_s) <= 0.02 * found.waterfalls[0].measured_s


def test_prefill_time_that_is_not_exported_is_no_front_end() -> None:
    seen = vllm(3.0, 0.1, {0.02: 400}, running=4, waiting=0, names=SGLANG)
    found = diagnose(seen, SLO)
    assert seen.ttft is not None and seen.ttft.parts_s["prefill"] == pytest.approx(2.9)
    assert "front_end" not in [cause.name for cause in found.causes]
    assert found.causes[0].name == "slow_model"
    assert any("estimated" in note for note in seen.notes)


@pytest.mark.parametrize("names", [SGLANG, DYNAMO], ids=lambda names: names.engine)
def test_slow_gaps_are_no_slow_requests(names: MetricNames) -> None:
    gaps = {"ttft": {0.1: 40}, "itl": {0.02: 940, 0.06: 60}, "output_tokens": {10.0: 40}}
    pages = [(0.0, MetricsPage()), (3.0, page(names, gaps, {"running": 4, "waiting": 0}))]
    seen = observe_metrics(names, Scrapes(pages, "test"))
    found = diagnose(seen, SLO)
    assert (found.verdict, found.miss_share) == ("healthy", 0.0)
    assert any("time per output token of each request" in gap.sentence() for gap in found.missing)
    assert diagnose(seen, Slo(None, 20 * NS_PER_MS)).miss_share == 1.0  # the mean is above that


@pytest.mark.parametrize("names", [VLLM, SGLANG, DYNAMO], ids=lambda names: names.engine)
def test_what_an_engine_can_never_show_is_named(names: MetricNames) -> None:
    choices = {choice for gap in names.missing for choice in gap.choices}
    assert {"prefix_misses", "slow_client", "prefill_interference", "too_few_prefill_workers"} <= choices
    assert not any("--enable-forward-pass-metrics" in gap.needed for gap in names.missing)


def test_dynamo_waits_are_counted_by_its_gauge() -> None:
    lines = histogram("dynamo_frontend_time_to_first_token_seconds", {2.0: 40})
    lines += histogram("dynamo_frontend_inter_token_latency_seconds", {0.02: 400})
    lines += histogram("dynamo_frontend_output_sequence_tokens", {10.0: 40})
    lines += '# TYPE dynamo_frontend_inflight_requests gauge\ndynamo_frontend_inflight_requests{model="m"} 16\n'
    lines += '# TYPE dynamo_frontend_queued_requests gauge\ndynamo_frontend_queued_requests{model="m"} 8\n'
    full = MetricsPage.of_text(lines, "test")
    before = MetricsPage.of_text('dynamo_frontend_queued_requests{model="m"} 8\n', "test")
    seen = observe_metrics(DYNAMO, Scrapes([(0.0, before), (4.0, full), (8.0, full)], "test"))
    assert seen.ttft is not None and seen.itl is not None
    assert seen.ttft.measured_s == pytest.approx(2.0) and seen.itl.measured_s == pytest.approx(0.02)
    assert seen.ttft.parts_s == pytest.approx({"queue": 8 * 8 / 40, "prefill": 0.4})
    assert (seen.signals["waiting"], seen.signals["requests"], seen.unknown) == (8, 40, ())
    found = diagnose(seen, SLO)
    assert found.verdict == "limited" and found.causes[0].name == "prefill_queueing"


def test_a_healthy_page_raises_no_alarm() -> None:
    found = diagnose(vllm(0.1, 0.01, {0.02: 400}, running=3, waiting=0), SLO)
    assert (found.verdict, found.causes) == ("healthy", ())
    assert found.missing  # what vLLM does not say is named all the same
    assert "is needed" in found.missing[0].sentence()


def test_advice_for_vllm_is_a_flag_of_vllm() -> None:
    found = diagnose(vllm(3.0, 2.9, {0.02: 400}, running=16, waiting=12), SLO)
    given = advise(found)
    assert given[0].option.startswith("--max-num-seqs ")
    assert given[0].gain is None  # such a load would not wait in the simulation: it predicts nothing


def test_a_counter_that_was_started_again_counts_from_zero() -> None:
    before = MetricsPage.of_text("# TYPE c counter\nc_total 900\n", "")
    after = MetricsPage.of_text("# TYPE c counter\nc_total 7\n", "")
    assert Growth(before, after).count("c") == 7


def test_shares_and_quantiles_come_from_buckets() -> None:
    spread = Distribution(((0.1, 50.0), (0.2, 100.0), (float("inf"), 100.0)))
    assert spread.share_above(0.1) == pytest.approx(0.5)
    assert spread.share_above(0.15) == pytest.approx(0.25)
    assert spread.quantile(0.75) == pytest.approx(0.15)
    assert Distribution().share_above(1.0) == 0.0


def test_an_engine_that_just_began_is_judged_by_its_whole_life() -> None:
    full = page(VLLM, {"ttft": {3.0: 40}, "queue": {2.0: 40}, "itl": {0.02: 400}}, {"running": 1, "waiting": 0})
    seen = observe_metrics(VLLM, Scrapes([(0.0, full), (3.0, full)], "test"))
    assert seen.ttft is not None and seen.ttft.measured_s == pytest.approx(3.0)
    assert "since the start" in seen.notes[0]


def test_llama_cpp_is_counted_by_its_slots() -> None:
    lines = "llamacpp:{0}_total {1}\n"

    def read(prompt_s: float, tokens: int) -> MetricsPage:
        text = lines.format("prompt_seconds", prompt_s) + lines.format("tokens_predicted_seconds", tokens * 0.05)
        text += lines.format("tokens_predicted", tokens) + lines.format("prompt_tokens", tokens)
        text += "llamacpp:requests_processing 2\nllamacpp:requests_deferred 6\n"
        return MetricsPage.of_text(text, "test")

    pages = [(float(second), read(second * 0.1, 20 * second)) for second in range(11)]
    slots = Slots(
        [[{"id_task": second // 2 * 2 + slot, "is_processing": True} for slot in (0, 1)] for second in range(11)]
    )
    seen = observe_llamacpp(Scrapes(pages, "test"), slots)
    assert seen.signals["requests"] == 12
    found = diagnose(seen, SLO)
    assert (found.verdict, found.causes[0].name) == ("limited", "sequence_limit")


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "ttft=0ms", "x=1", "ttft=-3ms"])
def test_wrong_objectives_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="slo is"):
        parse_objectives(text)


def test_objectives_and_presets_are_read() -> None:
    assert parse_objectives("ttft=0.3s,tpot=50ms") == Slo(300 * NS_PER_MS, 50 * NS_PER_MS)
    assert parse_objectives("tpot=50") == Slo(None, 50 * NS_PER_MS)
    assert parse_objectives("mlperf-llama3.1-8b") == PRESETS["mlperf-llama3.1-8b"]
    assert objectives_in_words(SLO) == "TTFT 500 ms, TPOT 50 ms"


def test_urls_are_read_as_people_write_them() -> None:
    assert Site.of("localhost:8000/metrics").url == "http://localhost:8000"
    assert Site.of("http://127.0.0.1:8000/v1").local_port == 8000
    assert Site.of("http://example.org").local_port is None
    with pytest.raises(ConfigError, match="url is"):
        Site.of("ftp://example.org")
    with pytest.raises(ConfigError, match="cannot reach"):
        Site.of("http://127.0.0.1:9").get("/metrics")


def test_of_several_engines_the_one_that_loses_most_is_shown() -> None:
    def engine(name: str, ttft_s: float) -> WatchedEngine:
        text = histogram("vllm:time_to_first_token_seconds", {ttft_s: 40})
        text += histogram("vllm:request_queue_time_seconds", {0.9 * ttft_s: 40})
        text += "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{} 4\n"
        text += "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{} 9\n"
        pages = [(0.0, b""), *((float(second), text.encode()) for second in range(1, 8))]
        return WatchedEngine(name=name, version="0.32", pages=pages)

    engines = [engine("a", 0.01), engine("b", 5.0), engine("c", 1.0)]
    found = msgspec.json.decode(engines_diagnosis(msgspec.msgpack.encode(WatchedEngines(engines=engines, own_slo=SLO))))
    assert found["sentence"].startswith("b: ") and found["verdict"] == "limited" and found["causes"]
    assert [server["verdict"] for server in found["servers"]] == ["healthy", "limited", "limited"]
    asked = WatchedEngines(engines=engines[:1], own_slo=SLO, slo="ttft=1ms", with_advice=True)
    alone = msgspec.json.decode(engines_diagnosis(msgspec.msgpack.encode(asked)))
    assert alone["verdict"] == "limited" and "servers" not in alone and alone["objectives"]["ttft_ms"] == 1.0
