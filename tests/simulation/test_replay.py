"""A recording, replayed, gives the same decisions; a recording that was changed does not."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.control.config import EngineConfig
from diptych.control.engine.recording import RecordingEngineCore, Row, canonical_plan
from diptych.control.errors import ConfigError
from diptych.control.events import Event, FirstToken, RequestFinished
from diptych.control.request import BlockTables, Request
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepResult
from diptych.serving.link.recorder import record_engine
from diptych.simulation.replay import replay
from tests.control.driver import Driver
from tests.control.test_conservation import random_config
from tests.laws import law

RECORDINGS = Path(__file__).parent / "recordings"


def record_scenario(
    seed: int, path: Path, config_of: Callable[[random.Random], EngineConfig] = random_config
) -> Driver:
    """Random arrivals with shared prefixes, aborts and preemptions under virtual time, recorded to a file."""
    rng = random.Random(seed)
    driver = Driver(config_of(rng), seed=seed)
    recorder = record_engine(path, driver.config)
    core = RecordingEngineCore(driver.config, recorder.write)
    driver.core = core
    if seed % 2:
        driver.executor.guesses = random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(60)] for _ in range(2)]
    for number in range(30):
        for _ in range(rng.choice([0, 0, 1, 5])):
            driver.step()
        stem = rng.choice(stems)[: rng.randrange(60)] if rng.random() < 0.5 else []
        prompt = stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        slo = rng.choice([None, Slo(tpot_ns=rng.choice([1, 7, 20]) * NS_PER_MS)])
        stop = rng.choice([None, 1, 5])
        driver.add(f"r{number}", prompt, rng.choice([1, 7, 30]), stop_after=stop, priority=rng.randrange(3), slo=slo)
        if rng.random() < 0.15:
            driver.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.05:
            most = min(driver.config.scheduler.max_num_seqs, (other := random_config(rng).scheduler).max_num_seqs)
            driver.configure(replace(other, max_num_seqs=most))
    driver.run()
    recorder.close()
    return driver


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@law(weight=0.6)
def test_any_scenario_replays_to_the_same_decisions(seed: int, tmp_path: Path) -> None:
    path = tmp_path / f"{seed}.jsonl"
    driver = record_scenario(seed, path)
    report = replay(path)
    assert report.is_identical, report.difference
    assert report.is_complete
    assert report.config == driver.config
    assert report.num_steps == len(driver.outputs)
    table = report.result.requests
    ended = driver.finished()
    assert len(table) == len(ended)
    assert sorted(table.e2e_ns(row) for row in range(len(table))) == sorted(e.latency.total_ns for e in ended.values())


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("worker-*.jsonl")), ids=lambda path: path.stem)
def test_recordings_of_older_versions_replay_to_the_same_decisions(path: Path) -> None:
    """The files were written by the versions that their names say."""
    assert rows_of(path)[0]["version"] == int(path.stem.split("-")[1])
    report = replay(path)
    assert report.is_identical, report.difference
    assert report.is_complete and report.num_steps


def test_both_ends_of_a_handoff_replay_to_the_same_decisions(tmp_path: Path) -> None:
    config = random_config(random.Random(3))
    recorders = [record_engine(tmp_path / f"{side}.jsonl", config) for side in ("prefill", "decode")]
    prefill, decode = (RecordingEngineCore(config, recorder.write) for recorder in recorders)
    now = 0
    first_tokens: dict[str, int] = {}

    def step(core: RecordingEngineCore) -> None:
        nonlocal now
        output = core.begin_step(now)
        if output is not None:
            now += NS_PER_MS
            for event in core.end_step(StepResult(output.step_id), now):
                if isinstance(event, FirstToken):
                    first_tokens[event.request_id] = event.time_ns

    for number in range(4):
        request = Request(f"r{number}", 10 + number, 6)
        assert decode.reserve(request, now) == []
        step(decode)
        twin = Request(f"r{number}", 10 + number, 6)
        twin.hands_off = True
        prefill.add_request(twin, now)
        while f"r{number}" not in first_tokens:
            step(prefill)
        step(prefill)
        decode.deliver(f"r{number}", now, first_step_ns=now, first_token_ns=first_tokens[f"r{number}"])
        assert prefill.release(f"r{number}", now)
    while decode.requests:
        step(decode)
    step(prefill)
    for recorder, side, ended in zip(recorders, ("prefill", "decode"), (0, 4), strict=True):
        recorder.close()
        report = replay(tmp_path / f"{side}.jsonl")
        assert report.is_identical, report.difference
        assert report.is_complete
        assert len(report.result.requests) == ended


def first(rows: list[Any], kind: str, wanted: Callable[[Any], bool] = lambda row: True) -> int:
    return next(i for i, row in enumerate(rows) if i and row[0] == kind and wanted(row))


def forget_a_request(rows: list[Any]) -> None:
    del rows[first(rows, "add")]


def lengthen_a_prompt(rows: list[Any]) -> None:
    rows[first(rows, "add")][2][1] += 1


def delay_the_end_of_a_step(rows: list[Any]) -> None:
    rows[first(rows, "end")][1] += NS_PER_MS


def stop_a_request_early(rows: list[Any]) -> None:
    where = first(rows, "end", lambda row: not row[3])
    running = {row[2][0] for row in rows[1:where] if row[0] == "add"}
    rows[where][3] = [[name, "stop"] for name in sorted(running)]


def change_the_order(rows: list[Any]) -> None:
    scheduler = rows[0]["config"]["scheduler"]
    scheduler["max_num_seqs"] = 1 if scheduler["max_num_seqs"] > 1 else 2


@pytest.mark.parametrize(
    "change",
    [forget_a_request, lengthen_a_prompt, delay_the_end_of_a_step, stop_a_request_early, change_the_order],
)
def test_a_changed_recording_is_noticed_and_explained(change: Callable[[list[Any]], None], tmp_path: Path) -> None:
    record_scenario(3, tmp_path / "run.jsonl")
    rows = rows_of(tmp_path / "run.jsonl")
    change(rows)
    difference = replay(write_rows(tmp_path / "changed.jsonl", rows)).difference
    assert difference is not None
    assert difference.explanation
    assert rows[difference.line - 1][0] in ("begin", "end")


def test_the_first_difference_names_what_was_planned_and_what_is(tmp_path: Path) -> None:
    record_scenario(3, tmp_path / "run.jsonl")
    rows = rows_of(tmp_path / "run.jsonl")
    where = first(rows, "begin", lambda row: len(row) > 2 and row[3][1])
    rows[where][2] = "x" * 16
    rows[where][3][1][0][2] += 1  # one token more in the first chunk
    difference = replay(write_rows(tmp_path / "changed.jsonl", rows)).difference
    assert difference is not None
    assert difference.line == where + 1
    assert "prompt chunks" in difference.explanation
    assert difference.expected != difference.actual


def test_the_command_says_what_it_found_and_ends_accordingly(tmp_path: Path) -> None:
    record_scenario(3, tmp_path / "run.jsonl")
    same = CliRunner().invoke(cli.app, ["replay", str(tmp_path / "run.jsonl")])
    assert same.exit_code == 0
    assert "identical" in same.output
    assert "TTFT" in same.output
    rows = rows_of(tmp_path / "run.jsonl")
    lengthen_a_prompt(rows)
    other = CliRunner().invoke(cli.app, ["replay", str(write_rows(tmp_path / "changed.jsonl", rows))])
    assert other.exit_code == 1
    assert "recorded:" in other.output
    assert CliRunner().invoke(cli.app, ["replay", str(tmp_path / "nowhere")]).exit_code == 1


def test_a_failure_by_the_own_grammar_is_replayed_as_one(tmp_path: Path) -> None:
    config = random_config(random.Random(1))
    recorder = record_engine(tmp_path / "a.jsonl", config)
    core = RecordingEngineCore(config, recorder.write)
    for name in "ab":
        core.add_request(Request(name, 4, 5), 0)
    output = core.begin_step(0)
    assert output is not None
    core.end_step(StepResult(output.step_id, failed=(("a", "no"), ("b", "no")), beyond_grammar=frozenset("a")), 10)
    recorder.close()
    events: list[Event] = []
    assert replay(tmp_path / "a.jsonl", on_events=events.extend).is_identical
    kinds = {
        event.request_id: event.error.kind for event in events if isinstance(event, RequestFinished) and event.error
    }
    assert kinds == {"a": "GrammarLimitError", "b": "WorkerError"}


def test_a_recording_that_was_cut_off_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    record_scenario(5, tmp_path / "run.jsonl")
    data = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(data[: len(data) // 2])
    report = replay(tmp_path / "cut.jsonl")
    assert report.is_identical
    assert not report.is_complete
    assert 0 < report.num_steps < replay(tmp_path / "run.jsonl").num_steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no recording"),
        ("[1]\n", "no recording"),
        ('{"format": "diptych recording", "version": 99}\n', "version 99"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=message):
        replay(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot read"):
        replay(tmp_path / "nowhere")


def test_equal_plans_have_equal_bytes_and_others_do_not() -> None:
    def plan(*new_blocks: tuple[str, int, int], tables: BlockTables = ()) -> SchedulerOutput:
        chunk = ScheduledPrefill("b", 0, 5, tables, is_last=True)
        return SchedulerOutput(3, (chunk,), resumed=(ResumedDecode("c", 5, tables),), new_blocks=new_blocks)

    assert canonical_plan(plan(("a", 0, 7))) == canonical_plan(plan(("a", 0, 7)))
    others = [
        plan(),
        plan(("a", 0, 7)),
        plan(("a", 0, 8)),
        plan(("a", 1, 7)),
        plan(("a", 0, 7), ("a", 1, 8)),
        plan(("a", 0, 7), ("a", 0, 8)),
        *(plan(tables=tables) for tables in (((1, 2),), ((1,), (2,)), ((2,), (1,)), ((1, 2), ()), ((1,), (2,), ()))),
    ]
    assert len({canonical_plan(other) for other in others}) == len(others)


def test_a_recorded_core_decides_as_a_plain_one() -> None:
    plain, recorded = Driver(random_config(random.Random(1))), Driver(random_config(random.Random(1)))
    rows: list[Row] = []
    recorded.core = RecordingEngineCore(recorded.config, rows.append)
    for driver in (plain, recorded):
        driver.add("a", 20, 5)
        driver.run()
    assert plain.outputs == recorded.outputs
    assert plain.log == recorded.log
    assert {row[0] for row in rows} == {"add", "begin", "end"}
