"""``diptych advise`` of another engine says what that engine exports, and recommends its own options."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.diagnosis.observation import Estimate, Observation
from diptych.diagnosis.shape_choice import ShapeChoice, choose_shape
from diptych.diagnosis.traffic import ExportedTraffic, traffic_of
from diptych.diagnosis.twin_model import TwinModel
from diptych.workload.spec import RequestSpec
from tests.diagnosis.simulated_servers import server_with

SEEN = Observation(
    engine="vllm",
    source="test",
    window_s=3.0,
    ttft=Estimate(0.4, {"queue": 0.1, "prefill": 0.3}, 0.01, 40),
    itl=Estimate(0.02, {"decode_floor": 0.015, "stalls": 0.002, "rest": 0.003}, 0.001, 400),
    signals={
        "requests": 40.0, "rate": 2.0, "prompt_mean": 900.0, "prompt_p50": 612.0, "prompt_p95": 3100.0,
        "output_mean": 100.0, "hit_share": 0.25, "running": 4.0, "waiting": 0.0,
    },
)  # fmt: skip
Advised = Callable[..., str]
SIMULATED: list[tuple[TwinModel, ShapeChoice]] = []


def simulated_once(model: TwinModel) -> ShapeChoice:
    """The choice for this model, which takes seconds; equal models have equal ones."""
    for known, choice in SIMULATED:
        if known == model:
            return choice
    SIMULATED.append((model, choose_shape(model)))
    return SIMULATED[-1][1]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    """The output of the command for an observation."""

    class Seen:
        def __init__(self, observation: Observation) -> None:
            self._observation = observation

        def observe(self) -> Observation:
            return self._observation

    def run(observation: Observation, *options: str) -> str:
        monkeypatch.setattr("diptych.cli.advise.reader_for", lambda source, key: Seen(observation))
        monkeypatch.setattr("diptych.diagnosis.shape_choice.choose_shape", simulated_once)
        result = CliRunner().invoke(app, ["advise", "http://test:1", "--slo", "ttft=500ms,tpot=50ms", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_of_another_engine_only_what_it_exports_is_printed(advised: Advised) -> None:
    said = advised(SEEN)
    assert "40 requests, 2 a second; estimated from what the engine exports" in said
    assert "mean 900, p50 about 612, p95 about 3,100 tokens" in said
    assert "answers: mean 100 tokens" in said
    assert "25% of the prompt tokens were found in the prefix cache" in said
    for invented in ("150 requests", "times between arrivals", "p99", "longest tenth"):
        assert invented not in said


@pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "--max-num-batched-tokens N"), ("sglang", "--chunked-prefill-size N"), ("dynamo", "")],
)
def test_the_shape_is_recommended_in_the_options_of_that_engine(advised: Advised, engine: str, option: str) -> None:
    seen = replace(SEEN, engine=engine)
    said = advised(seen)
    assert "diptych serve" not in said and "--shape" not in said
    assert "by a simulation with drawn requests" in said
    document = json.loads(advised(seen, "--json"))
    assert document["traffic"]["is_estimated"] and document["traffic"]["prompt_mean"] == 900.0
    options = {shape["shape"]: shape["option"] for shape in document["shapes"]}
    assert options == {"chunked": option, "unified": ""}
    best = document["recommended"]["shape"]
    assert f"requests of these means: {best}" in said
    assert not options[best] or f"{engine}: {options[best]}" in said


def test_of_diptych_the_requests_themselves_are_described(advised: Advised) -> None:
    said = advised(server_with("prefill_queueing").observe())
    assert "times between arrivals vary" in said and "diptych serve" in said
    assert "estimated" not in said.split("What the traffic is like")[1].split("Recommended")[0]


def test_what_the_cache_held_is_not_what_prompts_repeat() -> None:
    specs = [RequestSpec(arrival_ns=at * 10**9, prompt_tokens=100, output_tokens=10) for at in range(3)]
    seen = traffic_of(specs, found_share=0.5)
    assert (seen.reusable, seen.found_share) == (None, 0.5)
    assert "50% of the prompt tokens were found in the prefix cache" in seen.sentences()
    assert not any("repeat the beginning" in said for said in seen.sentences())


def test_an_engine_that_exports_little_is_described_by_that() -> None:
    said = ExportedTraffic.of({"requests": 9.0}).sentences()
    assert len(said) == 1 and said[0].startswith("9 requests; estimated")


def test_of_a_trace_it_is_said_which_phase_hurts_before_what_the_traffic_is_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{number * 0.05},{6000 if number % 4 == 0 else 200},40" for number in range(60)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows, ""]))
    monkeypatch.setattr("diptych.cli.plan.plan", lambda **_: print('{"best": "x"}'))
    options = ["advise", "--trace", str(trace), "--slo", "ttft=100ms,tpot=20ms", "--model", "llama-3-8b"]
    options += ["--hardware", "a100-80gb", "--devices", "2"]
    said = CliRunner().invoke(app, options)
    assert said.exit_code == 0, said.output
    first, second = said.stdout.index("Which phase hurts?"), said.stdout.index("What the traffic is like")
    assert first < second < said.stdout.index('"best"')
    assert "the binding objective is TTFT (prefill)" in said.stdout
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert found["recommended"] == {"best": "x"} and found["traffic"]["num_requests"] == 60
    assert found["diagnosis"]["verdict"] == "limited" and found["diagnosis"]["causes"]
    bare = json.loads(CliRunner().invoke(app, ["advise", "--trace", str(trace), "--json"]).stdout)
    assert bare["diagnosis"] is None and bare["recommended"] is None
