"""Objectives: what is a good answer, and which objective was missed."""

import asyncio
from collections.abc import Sequence

import pytest

from diptych.bench.bench_charts import latency_charts
from diptych.bench.objectives import NO_ANSWER, LatencyObjectives
from diptych.bench.request_records import ClientRecord, client_record, lines, verdicts
from diptych.bench.summary import missed
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, Slo
from diptych.report.plots import Chart, LineChart
from diptych.workload.spec import RequestSpec

MS = NS_PER_MS


async def _stream(stamps_ms: list[int]) -> TokenStream:
    stream = TokenStream(0)
    stream.stamps.extend(stamp * MS for stamp in stamps_ms)
    stream.status = 200
    stream.finish(stamps_ms[-1] * MS if stamps_ms else MS)
    return stream


def judged(stamps_ms: list[int], objectives: LatencyObjectives, outcome: str = "completed") -> ClientRecord:
    """The record of a request that was due at 0 and had its tokens then."""
    spec = RequestSpec(arrival_ns=0, prompt_tokens=8, output_tokens=len(stamps_ms))
    return client_record(0, spec, asyncio.run(_stream(stamps_ms)), objectives, 0, outcome)


def test_one_long_gap_misses_the_itl_objective_and_not_the_mean() -> None:
    steady = list(range(100, 100 + 20 * 10, 10))
    stalled = [*steady[:10], *(stamp + 90 for stamp in steady[10:])]
    objectives = LatencyObjectives(ttft_ns=200 * MS, tpot_ns=20 * MS, itl_ns=50 * MS)
    assert judged(steady, objectives).missed == ()
    assert judged(stalled, objectives).missed == ("itl",)
    assert judged(stalled, LatencyObjectives(tpot_ns=20 * MS)).slo_met


def test_one_gap_in_a_thousand_is_below_the_ninety_ninth_percentile() -> None:
    stamps = [*range(1, 1000), 1500]
    assert judged(stamps, LatencyObjectives(itl_ns=2 * MS)).slo_met


def test_a_request_may_miss_several_and_an_answer_of_one_token_has_no_pace() -> None:
    objectives = LatencyObjectives(ttft_ns=10 * MS, tpot_ns=1, itl_ns=1, e2e_ns=100 * MS)
    assert judged([50, 200], objectives).missed == ("ttft", "tpot", "itl", "e2e")
    assert judged([5], objectives).missed == ()


def test_an_answer_that_did_not_come_whole_met_nothing() -> None:
    objectives = LatencyObjectives(ttft_ns=10 * MS)
    failed, aborted = (judged([5, 6], objectives, outcome) for outcome in ("failed", "aborted"))
    assert failed.missed == aborted.missed == (NO_ANSWER,)
    assert verdicts([failed, aborted, judged([5], objectives), judged([5], LatencyObjectives())]) == (1, 3)
    assert missed([failed, aborted, judged([50], objectives)]) == {NO_ANSWER: 2, "ttft": 1}


def test_what_the_end_of_the_run_cut_off_is_judged_only_when_it_was_late_already() -> None:
    objectives = LatencyObjectives(ttft_ns=10 * MS, e2e_ns=100 * MS)
    assert judged([5, 50], objectives, "unfinished").missed is None
    assert judged([5, 150], objectives, "unfinished").missed == ("e2e",)
    assert judged([5, 50], LatencyObjectives()).missed is None


def test_a_requests_own_objectives_come_first() -> None:
    given = LatencyObjectives(ttft_ns=10, itl_ns=30).for_request(Slo(ttft_ns=5, tpot_ns=7))
    assert given == LatencyObjectives(5, 7, 30, None)
    assert LatencyObjectives(itl_ns=1).for_request(None) == LatencyObjectives(itl_ns=1)


def test_records_name_what_was_missed() -> None:
    (line,) = lines([judged([50, 90], LatencyObjectives(ttft_ns=10 * MS, itl_ns=20 * MS))])
    assert b'"slo_met":false,"missed":["ttft","itl"]' in line


def test_an_objective_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="itl"):
        LatencyObjectives(itl_ns=0)


def test_objectives_at_the_same_place_share_a_mark() -> None:
    done = [judged([50, 90, 130], LatencyObjectives())]
    marks = marks_of(latency_charts(done, {"tpot": 20.0, "itl": 20.0}))
    assert marks == ["TPOT <= 20ms, ITL <= 20ms"]
    apart = marks_of(latency_charts(done, {"tpot": 20.0, "itl": 60.0, "e2e": 3000.0}))
    assert apart == ["E2E <= 3s", "TPOT <= 20ms", "ITL <= 60ms"]


def marks_of(charts: Sequence[Chart]) -> list[str]:
    return [rule.label for chart in charts if isinstance(chart, LineChart) for rule in chart.rules]
