"""Tables, pages and timelines: what they say is what happened, and nothing in them can do harm."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.events import StepFinished
from diptych.control.slo import NS_PER_S, Slo
from diptych.report.plots import linear_scale, linear_ticks, log_scale, log_ticks
from diptych.report.text import class_table, dollars, latency_table, resource_table, service_table
from diptych.simulation.costs.cost_choice import CostChoice
from diptych.simulation.event_log import EventLog, trace
from diptych.simulation.faults import Fault
from diptych.simulation.hardware import Hardware, load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.prepare import PreparedPool
from diptych.simulation.report.outcome import economy, outcome, pool_rows, records, workload_figures
from diptych.simulation.report.simulation_report import (
    Page,
    cost_notes,
    in_system,
    phase_series,
    render,
    simulated_table,
    sweep_table,
    sweep_tables,
)
from diptych.simulation.results import GapHistogram, RequestTable, SimulationResult, WorkerUsage
from diptych.simulation.run import simulate_with_log
from diptych.simulation.scenario import Scenario
from diptych.timeline.lanes import Window
from diptych.workload.spec import RequestSpec
from tests.laws import law
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import random_scenario

VOID = {"meta", "br"}


class Arrivals:
    """Two classes of requests at even distances."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[RequestSpec]:
        for index in range(self.count):
            is_long = index % 5 == 0
            yield RequestSpec(
                arrival_ns=index * 40_000_000,
                prompt_tokens=2500 if is_long else 100 + 7 * index,
                output_tokens=1 + index % 60,
                kind="long <i>" if is_long else "chat",
            )

    def __len__(self) -> int:
        return self.count


def pool(device: Hardware, replicas: int = 1, tensor_parallel: int = 1, **changes: Any) -> PreparedPool:
    """Some workers of this device."""
    choice = CostChoice(LinearCost(6e6, 40e3, 2, 50e3, 15), "a line", (load_model("llama-3-8b"), device), 8192)
    engine = EngineConfig(CacheConfig(num_blocks=600, block_size=16))
    return PreparedPool("all", "both", replicas, Parallelism(tensor_parallel), engine, choice, **changes)


def run(
    count: int = 60, *, num_blocks: int = 600, faults: tuple[Fault, ...] = (), workers: int = 1
) -> tuple[SimulationResult, EventLog]:
    """A small simulation with its log."""
    scenario = Scenario(
        engine=EngineConfig(
            CacheConfig(num_blocks=num_blocks, block_size=16),
            shape_preset("chunked"),
            Slo(300_000_000, 15_000_000),
        ),
        cost=LinearCost(6e6, 40e3, 2, 50e3, 15),
        workload=Arrivals(count),
        num_workers=workers,
        faults=faults,
        record_events=True,
    )
    result, log = simulate_with_log(scenario)
    assert log is not None
    return result, log


def hardware(price_per_hour: float, power_w: float) -> Hardware:
    """A device at this price that idles at 100 W."""
    h100 = load_hardware("h100-sxm")
    return replace(h100, price_per_hour=price_per_hour, power_w=power_w, idle_power_w=100.0)


def point(result: SimulationResult, **changes: Any) -> dict[str, Any]:
    """The record of a run."""
    given = {"settings": {"model": "<script>alert(1)</script>"}, "cost_model": "linear & plain", **changes}
    return outcome(result, pools=[pool(hardware(3.0, 700.0), tensor_parallel=2)], **given)


class Checker(HTMLParser):
    """Notes tags that do not close, and every tag and address."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> Checker:
    """The laws of every page."""
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.tags
    assert checker.addresses == []
    assert "://" not in text
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))
    assert not re.search(r"\bnan\b|\binf\b", text)
    return checker


def test_a_page_is_whole_self_contained_and_escapes_what_it_is_given() -> None:
    result, log = run()
    page = Page(
        title="a <model>",
        lead='"lead" & more',
        command="diptych simulate --model '<b>'",
        point=point(result),
        result=result,
        events=list(log),
        kv_capacity_tokens=9600,
        slo_ms={"ttft": 300.0, "tpot": 15.0},
    )
    text = render(page)
    checker = check_page(text)
    assert text.count('role="img"') == text.count("<desc>") == 6
    assert "a &lt;model&gt;" in text and "long &lt;i&gt;" in text and "alert(1)" in text
    assert "i" not in checker.tags and "b" not in checker.tags
    assert render(page) == text


def test_a_page_without_events_or_completed_requests_still_renders() -> None:
    result, _ = run(3, num_blocks=6)
    assert not result.requests.completed_rows()
    check_page(render(Page(title="t", lead="l", command="c", point=point(result), result=result)))


def numbers_in(data: Any) -> Iterator[Any]:
    """The leaves of plain data."""
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from numbers_in(value) if isinstance(value, dict | list) else (value,)


def test_what_was_not_measured_is_blank_and_never_zero() -> None:
    result, _ = run(3, num_blocks=6)
    data = point(result)
    summary = data["summary"]
    assert summary["num_completed"] == 0 and summary["failures"] == {"context_length_exceeded": 3}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms"):
        assert set(numbers_in(summary[name])) == {None}, name
    assert summary["cached_token_share"] is None
    assert {cell for row in latency_table(summary).rows for cell in row[1:]} == {"-"}
    answers, prices, _ = sweep_tables([], [data])
    assert answers.rows == (("0.0 %", "0.00", "0.00", "0", "-", "-", "3", "-"),)  # no request was in time: measured
    assert set(prices.rows[0][2:]) == {"-"}
    assert "TTFT" in [row[0] for row in latency_table(summary).rows]
    empty, _ = run(1, num_blocks=6)
    assert empty.duration_ns == 0
    assert set(point(empty)["summary"]["utilization"].values()) == {None}
    assert point(empty)["summary"]["throughput_rps"] is None


def test_every_failed_request_has_a_reason_and_the_table_counts_them() -> None:
    result, _ = run(3, num_blocks=6)
    data = point(result)
    assert ("failed: too long for the context or the KV cache", "3") in service_table(
        data["summary"], data["economy"]
    ).rows
    assert "the KV cache holds 32" in data["failure_messages"]["context_length_exceeded"]
    rows = [json.loads(line) for line in records(result.requests)]
    assert {row["failure"] for row in rows} == {"context_length_exceeded"}
    answered, _ = run(3)
    assert {json.loads(line)["failure"] for line in records(answered.requests)} == {None}


def test_a_run_says_what_it_simulated() -> None:
    result, _ = run()
    data = point(result, assumptions=["a device: nothing was measured"])
    workload = data["workload"]
    assert (workload["rate_rps"], workload["gap_cv"]) == (pytest.approx(25.0), 0.0)
    assert workload["prompt_tokens"]["max"] == 2500 and workload["output_tokens"]["p50"] == pytest.approx(30.5)
    assert workload["shared_token_share"] is None  # of requests that ran, it is not known
    shown = dict(simulated_table(data).rows)
    assert shown["KV cache"] == "9,600 tokens" and shown["devices"] == "2 x h100-sxm (1 replica)"
    assert cost_notes([data]) == ["Step durations: linear & plain", "Assumed: a device: nothing was measured"]


def test_points_of_different_cost_models_say_which_is_whose() -> None:
    result, _ = run(10)
    points = [point(result, cost_model=name) for name in ("tables", "roofline", "tables")]
    assert [row[-1] for row in sweep_tables([], points)[-1].rows] == ["[1]", "[2]", "[1]"]
    assert cost_notes(points) == ["Step durations [1]: tables", "Step durations [2]: roofline"]


def test_what_could_have_been_shared_is_counted_in_the_order_of_arrival() -> None:
    specs = [
        RequestSpec(
            arrival_ns=index * NS_PER_S, prompt_tokens=tokens, output_tokens=8, hash_ids=ids, hash_block_tokens=32
        )
        for index, (tokens, ids) in enumerate([(64, (1, 2)), (64, (1, 2)), (100, (1, 3, 4)), (64, (5, 2))])
    ]
    figures = workload_figures(specs)
    assert figures["shared_token_share"] == (0 + 63 + 32 + 0) / 292  # the last token of a prompt is always computed
    assert workload_figures([])["prompt_tokens"]["mean"] is None
    assert workload_figures(specs[:1])["gap_cv"] is None


def test_a_page_of_a_sweep_draws_numbers_and_words() -> None:
    result, _ = run(10)
    shapes = [point(result, values={"shape": name, "rate": rate}) for name in ("a", "b<") for rate in range(9)]
    for names in (["rate", "shape"], ["shape", "rate"], ["rate"]):
        text = render(Page(title="t", lead="l", command="c", point=shapes[0], sweep_names=names, sweep=shapes))
        check_page(text)
    assert "The first 6 of 9 curves" in render(
        Page(title="t", lead="l", command="c", point=shapes[0], sweep_names=["shape", "rate"], sweep=shapes)
    )
    assert len(sweep_table(["rate"], shapes).rows) == 18


def test_the_tables_have_a_cell_for_every_column() -> None:
    result, _ = run()
    one = point(result)
    summary = one["summary"]
    tables = [latency_table(summary), service_table(summary, one["economy"]), resource_table(summary)]
    tables += [simulated_table(one), *sweep_tables([], [one])]
    for table in [*tables, class_table(one["classes"])]:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert list(one["classes"]) == ["chat", "long <i>"]
    assert sum(each["num_requests"] for each in one["classes"].values()) == summary["num_requests"]


def test_money_and_energy_are_the_sums_over_pools() -> None:
    pools = [{"num_gpus": 4, "usd": 4.0, "kwh": 0.6}, {"num_gpus": 2, "usd": 1.0, "kwh": 0.1}]
    summary = {
        "duration_s": 1800.0, "num_completed": 5000, "prompt_tokens": 7_200_000, "output_tokens": 1_800_000
    }  # fmt: skip
    spent = economy(summary, pools)
    assert (spent["num_gpus"], spent["gpu_hours"], spent["usd"]) == (6, 3.0, 5.0)
    assert spent["usd_per_million_output_tokens"] == pytest.approx(5.0 / 1.8)
    assert spent["usd_per_million_prompt_tokens"] == pytest.approx(5.0 / 7.2)
    assert spent["usd_per_million_tokens"] == pytest.approx(5.0 / 9.0)
    assert spent["usd_per_request"] == pytest.approx(5.0 / 5000)
    assert spent["kwh"] == pytest.approx(0.7)
    unknown = economy(summary, [*pools, {"num_gpus": 1, "usd": None, "kwh": None}])
    assert unknown["usd"] is None and unknown["kwh_per_million_output_tokens"] is None
    assert [dollars(value) for value in (None, 0.0, 0.0000978, 0.153, 2.0, 1234.5)] == [
        "-", "$0.00", "$0.0000978", "$0.153", "$2.00", "$1,234.50"
    ]  # fmt: skip
    nothing = economy({**summary, "num_completed": 0, "prompt_tokens": 0, "output_tokens": 0}, pools)
    assert nothing["usd"] == 5.0 and nothing["usd_per_request"] is None and nothing["usd_per_million_tokens"] is None


def test_a_pool_pays_for_its_own_devices_by_its_own_workers() -> None:
    busy, idle = WorkerUsage(100, busy_decode_ns=900 * NS_PER_S), WorkerUsage(100)
    result = SimulationResult(RequestTable(), GapHistogram(), [busy, idle, idle], 1800 * NS_PER_S)
    device = hardware(2.0, 500.0)
    first, second = pool_rows(result, [pool(device, tensor_parallel=4), pool(device, 2, price_per_hour=5.0)])
    assert (first["busy"], second["busy"]) == (0.5, 0.0)
    assert (first["usd"], second["usd"]) == (4.0, 5.0)  # two GPU hours, and one of another price
    assert first["kwh"] == pytest.approx(2 * 0.3)
    assert second["kwh"] == pytest.approx(0.1)


def test_every_request_is_one_record() -> None:
    result, _ = run()
    rows = [json.loads(line) for line in records(result.requests)]
    assert sorted(row["number"] for row in rows) == list(range(60))
    assert all(row["e2e_s"] >= row["ttft_s"] >= row["queue_s"] for row in rows)
    assert {row["slo_met"] for row in rows} <= {True, False}


def test_phases_over_time_sum_to_the_usage_of_the_workers() -> None:
    result, log = run(workers=2)
    series = phase_series(log, result.duration_ns, 2)
    width = (series.edges_s[1] - series.edges_s[0]) * NS_PER_S
    for values, busy in (
        (series.decode, sum(one.busy_decode_ns for one in result.workers)),
        (series.mixed, sum(one.busy_mixed_ns for one in result.workers)),
        (series.prefill, sum(one.busy_prefill_ns for one in result.workers)),
    ):
        assert sum(values) * width * 2 == pytest.approx(busy, rel=1e-6)
    held = sum(series.context_tokens) * width
    used = 16 * sum(one.kv_block_ns for one in result.workers)
    assert 0.6 * used < held < used  # blocks are taken for whole prompts, and are not full


def test_the_count_in_the_system_begins_and_ends_with_nobody() -> None:
    result, _ = run()
    points = in_system(result.requests, result.duration_ns)
    assert points[0] == (0.0, 1)  # the first request arrives at 0
    assert points[-1][1] == 0
    assert max(count for _, count in points) <= 60


def check_trace(data: dict[str, Any]) -> None:
    """The trace-event format: known kinds, the fields each needs, slices that nest."""
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    open_slices: dict[tuple[int, str], list[str]] = {}
    last_ts = 0.0
    ends: dict[tuple[int, int], float] = {}
    for event in data["traceEvents"]:
        assert {"ph", "name", "pid", "ts"} <= set(event)
        assert event["ts"] >= last_ts or event["ph"] == "M"
        last_ts = max(last_ts, event["ts"])
        if event["ph"] == "X":
            assert event["dur"] > 0
            if event["tid"] == 1:
                key = (event["pid"], event["tid"])
                assert event["ts"] >= ends.get(key, 0.0) - 1e-3
                ends[key] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
        elif event["ph"] in "be":
            stack = open_slices.setdefault((event["pid"], event["id"]), [])
            if event["ph"] == "b":
                stack.append(event["name"])
            else:
                assert stack.pop() == event["name"]
        else:
            assert event["ph"] == "M"
    assert not any(open_slices.values())


@law(weight=0.8)
def test_a_timeline_holds_every_step_and_every_request_of_random_scenarios(seed: int) -> None:
    scenario = random_scenario(seed)
    result, log = simulate_with_log(scenario)
    assert log is not None
    data, note = trace(log, max(result.duration_ns, last_ns(log)), faults=scenario.faults)
    check_trace(json.loads(json.dumps(data)))
    assert note == ""
    slices = [event for event in data["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    steps = [event for _, event in log if isinstance(event, StepFinished) and event.end_ns > event.start_ns]
    assert sum(one["args"]["steps"] for one in slices) == sum(step.num_steps for step in steps)
    assert sum(one["dur"] for one in slices) * 1000 == pytest.approx(sum(s.end_ns - s.start_ns for s in steps))
    drawn = {
        event["id"].partition("~")[0]
        for event in data["traceEvents"]
        if event["ph"] == "e" and event["name"] == "prefill"
    }
    table = result.requests
    assert {str(table.number[row]) for row in table.completed_rows()} <= drawn
    waiting = {event["pid"]: event for event in data["traceEvents"] if event["name"] == "waiting"}
    assert all(event["args"]["requests"] == 0 for event in waiting.values())


def last_ns(log: EventLog) -> int:
    """When the last thing happened anywhere."""
    return max(event.end_ns if isinstance(event, StepFinished) else event.time_ns for _, event in log)


def test_a_timeline_shows_faults_on_their_worker() -> None:
    faults = (Fault("crash", 1, NS_PER_S, NS_PER_S), Fault("slow", 0, NS_PER_S // 2, NS_PER_S, 3.0))
    result, log = run(faults=faults, workers=2)
    data, _ = trace(log, result.duration_ns, faults=faults)
    check_trace(data)
    shown = {(event["name"], event["pid"]) for event in data["traceEvents"] if event.get("tid") == 2}
    assert shown == {("crash", 2), ("slow", 1), ("thread_name", 1), ("thread_name", 2)}


def test_a_timeline_keeps_to_its_window_and_its_cap_and_says_so() -> None:
    result, log = run()
    window = Window(NS_PER_S, 2 * NS_PER_S)
    data, note = trace(log, result.duration_ns, window=window)
    check_trace(data)
    drawn = [event for event in data["traceEvents"] if event["ph"] != "M"]
    assert note == "" and drawn
    assert all(1e6 <= event["ts"] <= 2e6 for event in drawn)
    assert all(event["ts"] + event.get("dur", 0) <= 2e6 + 1e-3 for event in drawn)
    capped, note = trace(log, result.duration_ns, max_trace_events=100)
    check_trace(capped)
    assert "at most 100 trace events" in note and capped["otherData"]["note"] == note
    assert len(capped["traceEvents"]) < 200


def test_scales_end_on_round_numbers() -> None:
    assert linear_ticks(0, 10) == (0, 2, 4, 6, 8, 10)
    assert log_ticks(1, 100) == (1, 2, 5, 10, 20, 50, 100)
    assert log_ticks(1, 1e6) == (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
    scale = log_scale([3.0, 700.0, 0.0], "ms")
    assert (scale.low, scale.high, scale.place(2.0), scale.place(1000.0)) == (2.0, 1000.0, 0.0, 1.0)
    assert linear_scale([], "").high == 1.0
    assert [scale.write(value) for value in (0.5, 20.0, 1500.0, 2e6)] == ["0.5", "20", "1.5k", "2M"]
