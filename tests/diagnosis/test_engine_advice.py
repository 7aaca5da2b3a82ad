"""Advice: settings that the twin finds to help are first, with an interval; what it cannot know has no gain."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.control.fleet_settings import FleetSettings
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import SchedulerOutput, StepFeatures
from diptych.diagnosis.diagnosis import Diagnosis, diagnose
from diptych.diagnosis.diagnosis_page import render
from diptych.diagnosis.diagnosis_words import as_json
from diptych.diagnosis.engine_advice import Advice, advise
from diptych.diagnosis.live_diagnosis import live_diagnosis
from diptych.diagnosis.predicted_gain import Present
from diptych.diagnosis.shape_choice import choose_shape
from diptych.diagnosis.traffic import traffic_of
from diptych.diagnosis.twin_model import twin_of
from diptych.timeline.watched_server import WatchedServer
from diptych.workload.spec import RequestSpec
from tests.diagnosis.simulated_servers import SLO, server_with


@cache
def advised(cause: str) -> tuple[Diagnosis, tuple[Advice, ...]]:
    """The diagnosis of a server that is hurt by one cause, and the advice: seconds of simulations."""
    found = diagnose(server_with(cause).observe())
    return found, advise(found)


def test_the_twin_is_the_server_and_the_gain_is_that_of_the_change() -> None:
    found, (first, *_) = advised("sequence_limit")
    assert (first.cause, first.option) == ("sequence_limit", "--max-num-seqs 16")
    assert first.gain is not None and first.gain.twin_error < 0.02
    low, high = first.gain.ttft_interval
    assert 0 < low < first.gain.ttft_s < high
    assert (first.gain.attainment_after or 0) > (first.gain.attainment_before or 0)
    changed = twin_of(found.observation)
    assert changed is not None
    table = changed.with_scheduler(max_num_seqs=16).run()
    rows = [row for row in table.completed_rows() if table.number[row] in changed.counted]
    assert len(rows) == len(found.observation.requests) < len(table)  # the traffic goes on, and is not counted
    waited = sum(table.ttft_ns(row) for row in rows) / len(rows) / 1e9
    measured = sum(parts.ttft_ns for parts in found.observation.requests) / len(found.observation.requests) / 1e9
    assert abs(measured - waited - first.gain.ttft_s) < 0.05 * first.gain.ttft_s


def test_a_server_that_does_not_know_the_objectives_is_told_them_by_the_option() -> None:
    given = advise(diagnose(server_with("prefill_queueing").observe(Slo()), Slo(400 * NS_PER_MS, 30 * NS_PER_MS)))
    [shape] = [advice for advice in given if advice.setting.name == "shape" and advice.cause == "prefill_queueing"]
    assert shape.option == "--shape chunked --slo ttft=400ms,tpot=30ms"
    _, known = advised("prefill_queueing")
    assert "--shape chunked" in [advice.option for advice in known]


def test_a_change_is_simulated_by_both_laws_of_the_steps_where_the_warm_up_was_told() -> None:
    server = server_with("sequence_limit")
    seen = server.observe()
    assert seen.fleet is not None
    cost = server.cost
    shapes = [StepFeatures(0, 0, count, count * 100) for count in (1, 2, 4, 8, 16, 32)]
    shapes += [StepFeatures(count, count * count // 2, 0, 0) for count in (16, 64, 256, 512)]
    rows = []
    for shape in shapes:
        output = SchedulerOutput(0, num_decodes=shape.decode_seqs, features=shape)
        duration_ns = cost.step_ns(output)
        rows.append(
            (shape.prefill_tokens, shape.prefill_attention, shape.decode_seqs, shape.decode_context, duration_ns)
        )
    workers = tuple(replace(worker, measured=tuple(rows)) for worker in seen.fleet.workers)
    model = twin_of(replace(seen, fleet=replace(seen.fleet, workers=workers)))
    assert model is not None and model.cost is not None and len(model.laws()) == 2
    present = Present.of(model, seen)
    assert present is not None
    gain = present.gain(lambda twin: twin.with_scheduler(max_num_seqs=16))
    assert gain is not None and gain.ttft_s > 1
    means = [twin.gain(model.with_scheduler(max_num_seqs=16)) for twin in present.twins]
    assert all(mean is not None and gain.ttft_interval[0] <= mean.ttft_s <= gain.ttft_interval[1] for mean in means)


def test_a_server_with_a_disk_below_its_cache_has_a_twin_with_one() -> None:
    seen = server_with("sequence_limit").observe()
    model = twin_of(seen)
    assert model is not None
    cache = model.engines[0].cache
    tiers = replace(cache.tiers, has_disk=True, load_block_ns=3_000_000)
    engines = tuple(
        replace(engine, cache=replace(engine.cache, num_host_blocks=64, tiers=tiers)) for engine in model.engines
    )
    twin = replace(model, engines=engines)
    disk = twin.scenario().disk
    assert disk is not None and disk.read_block_ns == pytest.approx(3_000_000, rel=0.01)
    assert len(twin.run()) == len(model.run())


def test_what_costs_hardware_comes_after_what_does_not_and_losses_come_last() -> None:
    for cause in ("prefill_queueing", "kv_cache_full"):
        given = [advice for advice in advised(cause)[1] if advice.cause == cause]
        losses = [advice.gain is not None and advice.gain.total_s < 0 for advice in given]
        helping = [advice.setting.takes_hardware for advice, loses in zip(given, losses, strict=True) if not loses]
        assert len(given) > 1
        assert losses == sorted(losses)
        assert helping == sorted(helping)


def test_a_client_s_own_change_has_no_predicted_gain() -> None:
    _, given = advised("prefix_misses")
    own = [advice for advice in given if advice.cause == "prefix_misses"]
    assert own and all(advice.gain is None for advice in own)


def test_the_report_and_the_json_hold_the_causes() -> None:
    found, given = advised("sequence_limit")
    data = as_json(found, given)
    assert data["causes"][0]["cause"] == "sequence_limit"
    assert data["causes"][0]["advice"][0]["gain"]["ttft_seconds"] > 0
    ttft = data["attribution"]["ttft"]
    assert abs(sum(part["seconds"] for part in ttft["parts"]) - ttft["mean_s"]) < 1e-9
    page = render(found, given, "diptych diagnose x")
    assert "sequence_limit" in page and "--max-num-seqs 16" in page


def test_a_saved_timeline_is_diagnosed_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    file.write_bytes(msgspec.json.encode({"records": server_with("sequence_limit").records()}))
    runner = CliRunner()
    found = runner.invoke(app, ["diagnose", str(file), "--slo", "ttft=400ms,tpot=30ms", "--json", "--no-advice"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["causes"][0]["cause"] in ("sequence_limit", "kv_cache_full")  # without settings the two look alike
    assert runner.invoke(app, ["diagnose", str(tmp_path / "none.json")]).exit_code == 1
    assert "slo is" in runner.invoke(app, ["diagnose", str(file), "--slo", "x"]).stderr
    (tmp_path / "wrong.json").write_text("[1, 2]")
    assert "neither" in runner.invoke(app, ["diagnose", str(tmp_path / "wrong.json")]).stderr


def test_the_live_page_gets_the_same_diagnosis() -> None:
    server = server_with("sequence_limit")
    records, seen = server.records(), server.observe()
    assert isinstance(seen.fleet, FleetSettings)
    now_ns = max(record.end_ns for record in records if hasattr(record, "end_ns"))
    pages = [msgspec.Raw(msgspec.msgpack.encode(records[at : at + 500])) for at in range(0, len(records), 500)]
    slo = "ttft=400ms,tpot=30ms"
    watched = WatchedServer(records=pages, settings=seen.fleet, now_ns=now_ns, slo=slo)
    data = json.loads(live_diagnosis(msgspec.msgpack.encode(watched)))
    assert data["causes"][0]["cause"] == "sequence_limit"
    stale = msgspec.structs.replace(watched, now_ns=now_ns + 10**12)
    assert json.loads(live_diagnosis(msgspec.msgpack.encode(stale)))["num_requests"] == 0


def test_the_shape_that_meets_the_objectives_is_recommended() -> None:
    model = twin_of(server_with("prefill_queueing").observe())
    assert model is not None
    choice = choose_shape(model)
    scores = {shape.shape: shape.score for shape in choice.shapes}
    assert scores[choice.best.shape] >= max(scores.values()) - 0.02
    assert len(choice.reasons()) == len(choice.shapes)


def test_traffic_is_described_by_what_it_repeats_and_how_it_comes() -> None:
    specs = [
        RequestSpec(arrival_ns=at * 10**9, prompt_tokens=1000 if at else 2000, output_tokens=100, hash_ids=(1, 2 + at),
                    hash_block_tokens=500, session=at // 2)
        for at in range(10)
    ]  # fmt: skip
    seen = traffic_of(specs)
    assert (seen.rate, seen.variation) == (1.0, 0.0)
    assert seen.reusable == 9 * 500 / 11_000
    assert seen.turns == 0.5
    assert any("long prompts with short answers" in said for said in seen.sentences())
    assert SLO.ttft_ns
