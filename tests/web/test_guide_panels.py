"""The numbers behind the guide's pages: the panels agree with the code, with published figures, and with themselves."""

import json
import shlex
from typing import Any

import pytest
import typer.main

from diptych.cli.main import app
from diptych.control.errors import ConfigError
from diptych.runtime.transfer.codec.wire_format import wire_share
from diptych.simulation.hardware import hardware_names
from diptych.simulation.model_catalogue import load_model
from diptych.web import compare_example
from diptych.web.assets import STATIC
from diptych.web.chapters import CHAPTERS
from diptych.web.panels import choose, chunked, disaggregated, transfer
from diptych.web.panels import interference_panel as interference
from diptych.web.panels import roofline_panel as roofline
from diptych.web.panels.advice import AdvisedShape, recommend, serve_command, simulate_command
from diptych.web.panels.cast import read_prompts
from diptych.web.panels.machine import machine
from diptych.web.panels.query import controls, read

ANSWERS: dict[Any, str] = {}


def asked(module: Any, kind: Any, **query: Any) -> dict[str, Any]:
    """What a panel answers; equal questions are computed once (test_equal_questions_get_equal_answers)."""
    key = (module, *sorted((name, str(value)) for name, value in query.items()))
    if key not in ANSWERS:
        ANSWERS[key] = json.dumps(module.panel(read(kind, {name: str(value) for name, value in query.items()})))
    return json.loads(ANSWERS[key])


def sent(**query: Any) -> dict[str, Any]:
    return asked(transfer, transfer.TransferQuery, **{"tokens": 2048, **query})


def crossed(link: str, **query: Any) -> float:
    """Milliseconds on paper."""
    return sent(rate="paper", link=link, **query)["times"]["transfer_ms"]


def test_the_kv_cache_of_llama_70b_has_671_megabytes_at_2048_tokens_and_2_68_gigabytes_at_8192() -> None:
    assert sent(tokens=2048)["size"]["cache_bytes"] == 2 * 80 * 8 * 128 * 2048 * 2 == 671_088_640
    assert sent(tokens=8192)["size"]["cache_bytes"] == pytest.approx(2.68e9, rel=0.002)


def test_it_travels_21_ms_over_pcie_4_and_13_ms_over_400_gigabit_and_nvlink_900_counts_both_directions() -> None:
    assert crossed("pcie4") == pytest.approx(21, abs=0.1)
    assert crossed("ib400") == pytest.approx(13.4, abs=0.1)
    assert crossed("nvlink4", gbytes=900) == pytest.approx(0.75, abs=0.01)
    assert crossed("nvlink4") == pytest.approx(1.49, abs=0.01)


def test_int8_halves_and_int4_quarters_what_travels_plus_scales() -> None:
    whole = sent()["size"]["wire_bytes"]
    assert 0.5 < sent(codec="int8")["size"]["wire_bytes"] / whole < 0.56
    assert 0.25 < sent(codec="int4")["size"]["wire_bytes"] / whole < 0.31


def test_a_codec_that_is_no_smaller_than_the_cache_changes_nothing() -> None:
    assert sent(dtype="fp8", codec="int8")["size"]["wire_bytes"] == sent(dtype="fp8")["size"]["wire_bytes"]


def test_heads_change_the_size_as_they_should() -> None:
    own = sent()["size"]["cache_bytes"]
    assert sent(attention="mha")["size"]["cache_bytes"] == 8 * own
    assert sent(attention="mqa")["size"]["cache_bytes"] * 8 == own
    assert sent(attention="gqa", kv_heads=4)["size"]["cache_bytes"] * 2 == own
    assert sent(attention="mla")["size"]["cache_bytes"] == 80 * (512 + 64) * 2048 * 2


def test_the_latent_of_deepseek_is_small() -> None:
    size = sent(model="deepseek-v3", hardware="h200")["size"]["cache_bytes"]
    assert size == load_model("deepseek-v3").kv_bytes_per_token() * 2048 == 61 * 576 * 2 * 2048


def test_streaming_hides_all_but_the_last_chunk_and_sending_at_the_end_hides_nothing() -> None:
    streamed, late = sent(streamed="on", chunk=256), sent(streamed="off")
    assert late["times"]["exposed_ms"] == pytest.approx(late["times"]["transfer_ms"], rel=1e-6)
    assert streamed["times"]["exposed_ms"] == pytest.approx(late["times"]["exposed_ms"] / 8, rel=0.01)


def test_a_link_that_is_slower_than_the_prefill_is_called_the_bottleneck() -> None:
    assert sent()["verdict"]["level"] == "good"
    assert sent(streamed="off", tokens=16_384)["verdict"]["level"] == "warn"
    verdict = sent(gbytes=1)["verdict"]
    assert verdict["level"] == "bad"
    assert "bottleneck" in verdict["text"]


def test_the_ridge_of_an_h100_is_at_295_flop_per_byte() -> None:
    assert asked(roofline, roofline.RooflineQuery)["roof"]["ridge"] == pytest.approx(295, abs=0.5)


def test_the_intensity_of_a_prefill_is_about_its_tokens() -> None:
    for prompt in (64, 512, 4096):
        phase = asked(roofline, roofline.RooflineQuery, prompt=prompt)["phases"]["prefill"]
        assert phase["intensity"] == pytest.approx(prompt, rel=0.12)
        assert phase["bound"] == ("memory" if prompt < 295 else "compute")


def test_a_longer_context_makes_decoding_hungrier_for_memory_and_a_larger_batch_less() -> None:
    def intensity(**query: int) -> float:
        return asked(roofline, roofline.RooflineQuery, **query)["phases"]["decode"]["intensity"]

    assert intensity(context=32768) < intensity(context=2048) < intensity(context=16)
    assert intensity(batch=1) < intensity(batch=16) < intensity(batch=256)


def test_no_step_is_faster_than_the_roof_allows() -> None:
    for hardware in ("h100-sxm", "a100-80gb", "l40s"):
        for phase in asked(roofline, roofline.RooflineQuery, hardware=hardware, prompt=4096)["phases"].values():
            assert phase["step_ms"] >= max(phase["compute_ms"], phase["memory_ms"])


def test_a_long_prompt_that_runs_whole_stops_the_streams_for_its_whole_prefill() -> None:
    found = asked(interference, interference.InterferenceQuery)
    measures = found["measures"]
    assert measures["stalled_ms"] >= measures["slowest"]["prefill_ms"] > 100
    assert measures["factor"] > 10
    stalled = [one for one in found["play"]["requests"] if one["stalled_ms"] > 100]
    assert len(stalled) == 4


def test_without_prompts_nobody_stands_still() -> None:
    measures = asked(interference, interference.InterferenceQuery, prompts="")["measures"]
    assert measures["factor"] == 1
    assert not measures["stalled_ms"]


def test_chunks_shorten_the_longest_gap_and_lengthen_the_long_prompt() -> None:
    measures = asked(chunked, chunked.ChunkedQuery)["measures"]
    assert measures["chosen"]["gap_ms"] < measures["whole"]["gap_ms"] / 10
    assert measures["chosen"]["ttft_long_ms"] > measures["whole"]["ttft_long_ms"]
    assert measures["chosen"]["ttft_short_ms"] < measures["whole"]["ttft_short_ms"] / 10


def test_larger_chunks_mean_longer_gaps() -> None:
    gaps = [point["gap_ms"] for point in asked(chunked, chunked.ChunkedQuery)["curve"]]
    assert gaps == sorted(gaps)


def test_chunks_sized_by_time_keep_the_objective() -> None:
    for tpot_ms in (12, 25, 60):
        chosen = asked(chunked, chunked.ChunkedQuery, mode="slo", tpot_ms=tpot_ms)["measures"]["chosen"]
        assert chosen["tpot_ms"] <= tpot_ms
        assert chosen["gap_ms"] <= 1.1 * tpot_ms  # the model learns while it predicts


def test_a_cap_of_one_lets_long_prompts_go_one_after_the_other() -> None:
    def overlap(**caps: int) -> bool:
        play = asked(chunked, chunked.ChunkedQuery, prompts="200:8192:16,201:8192:16", **caps)["play"]
        steps = [step for step in play["records"] if step["kind"] == "step"]
        chunks = [{name for name, _, _ in step.get("prefills", ())} for step in steps]
        first = [index for index, names in enumerate(chunks) if "long 1" in names]
        second = [index for index, names in enumerate(chunks) if "long 2" in names]
        return first[-1] > second[0] if first[0] < second[0] else second[-1] > first[0]

    assert not overlap(partial=2, long_partial=1)


def test_two_pools_move_every_prompt_once_and_their_transfers_weigh_what_the_model_says() -> None:
    play = asked(disaggregated, disaggregated.DisaggregatedQuery)["play"]
    transfers = [record for record in play["records"] if record["kind"] == "transfer"]
    per_token = load_model("llama-3.1-8b").kv_bytes_per_token()
    lengths = {one["name"]: one["prompt_tokens"] for one in play["requests"]}
    assert len(transfers) == len(play["requests"]) == disaggregated.NUM_REQUESTS
    for record in transfers:
        assert record["num_bytes"] == lengths[record["request_id"]] * per_token
        assert 0 <= record["exposed_ns"] <= record["end_ns"] - record["start_ns"]
    workers = {(record["worker"], record["phase"]) for record in play["records"] if record["kind"] == "step"}
    assert workers == {(0, "prefill"), (1, "decode")}


@pytest.mark.parametrize("kill", ["prefill-1", "decode-1"])
def test_a_killed_worker_breaks_no_answer(kill: str) -> None:
    found = asked(disaggregated, disaggregated.DisaggregatedQuery, kill=kill)
    states = [record["state"] for record in found["play"]["records"] if record["kind"] == "worker"]
    assert states == ["ready", "ready", "lost", "ready"]
    assert found["measures"]["apart"]["completed"] == disaggregated.NUM_REQUESTS
    assert all(one["output_tokens"] in (30, 60) for one in found["play"]["requests"])


def test_the_worker_that_is_killed_is_the_one_that_was_named_however_many_there_are() -> None:
    for prefill in (1, 2, 3):
        found = asked(disaggregated, disaggregated.DisaggregatedQuery, prefill=prefill, decode=2, kill="decode-2")
        lost = [record["worker"] for record in found["play"]["records"] if record.get("state") == "lost"]
        labels = {lane["id"]: lane["label"] for lane in found["play"]["lanes"]}
        assert [labels[worker] for worker in lost] == ["decode 2"]
        assert any(note.startswith("Decode 2 was killed") for note in found["notes"])


def test_what_a_worker_does_after_its_restart_is_said() -> None:
    late = asked(disaggregated, disaggregated.DisaggregatedQuery, kill="decode-1")["notes"]
    assert any("but had its first step at" in note for note in late)
    early = asked(disaggregated, disaggregated.DisaggregatedQuery, kill="prefill-1")["notes"]
    assert any("had work at once" in note for note in early)


def test_the_pause_of_a_handoff_is_no_gap_of_a_stream() -> None:
    measures = asked(disaggregated, disaggregated.DisaggregatedQuery)["measures"]
    assert measures["together"]["handoff_ms"] is None
    assert measures["apart"]["handoff_ms"] > measures["apart"]["gap_ms"]
    assert measures["apart"]["gap_ms"] < measures["together"]["gap_ms"]  # decode workers compute no prompts


def test_streams_that_keep_their_objective_do_not_stand_still() -> None:
    found = asked(chunked, chunked.ChunkedQuery, mode="slo")
    assert found["objective_ns"] == 25_000_000
    assert found["measures"]["chosen"]["gap_ms"] * 1e6 <= found["objective_ns"]
    assert asked(chunked, chunked.ChunkedQuery)["objective_ns"] == 0


def test_caps_and_order_decide_who_waits_behind_whom_as_the_page_says() -> None:
    def waits(**settings: Any) -> dict[str, float]:
        found = asked(chunked, chunked.ChunkedQuery, **settings)["play"]["requests"]
        return {one["name"]: one["ttft_ms"] for one in found if one["kind"] != "stream"}

    free = waits(order="fcfs", partial=0, long_partial=0)
    assert free["long 1"] < free["short 1"] < free["long 2"]  # behind both: it begins when the second leaves room
    assert free["long 2"] > 1.8 * free["long 1"]  # one after the other, not half of each step
    capped = waits(order="fcfs")
    assert capped["short 1"] < free["short 1"] / 2 and capped["short 1"] < capped["long 1"]
    assert waits()["short 1"] < capped["short 1"] / 10  # shortest first


MODULES: dict[str, Any] = {"interference": interference, "chunked": chunked, "disaggregated": disaggregated}


@pytest.mark.parametrize("shape", MODULES)
def test_records_tell_one_story(shape: str) -> None:
    """Numbered without holes; steps of a worker do not overlap; every token belongs to somebody in the batch."""
    chapter = next(one for one in CHAPTERS if one.name == shape)
    assert chapter.panel is not None
    play = asked(MODULES[shape], chapter.query)["play"]
    records = play["records"]
    assert [record["sequence"] for record in records] == list(range(1, len(records) + 1))
    batches: dict[int, set[str]] = {}
    ends: dict[int, int] = {}
    tokens: dict[str, int] = {}
    for record in records:
        if record["kind"] == "request" and record["what"] == "first_token":
            tokens[record["request_id"]] = tokens.get(record["request_id"], 0) + 1
        if record["kind"] != "step":
            continue
        worker = record["worker"]
        assert record["start_ns"] >= ends.get(worker, 0)
        ends[worker] = record["end_ns"]
        batch = batches.setdefault(worker, set())
        batch -= set(record.get("left", ()))
        batch |= set(record.get("joined", ()))
        if record["num_decodes"]:
            assert len(batch) == record["num_decodes"]
            for name in batch:
                tokens[name] = tokens.get(name, 0) + 1
    assert tokens == {one["name"]: one["output_tokens"] for one in play["requests"]}


def test_spans_of_a_request_follow_each_other_from_its_arrival_to_its_end() -> None:
    for one in asked(disaggregated, disaggregated.DisaggregatedQuery, kill="decode-1")["play"]["requests"]:
        last_ns = one["arrival_ns"]
        for _, start_ns, end_ns, _, _ in one["spans"]:
            assert start_ns == last_ns < end_ns
            last_ns = end_ns


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter loads than those of the page, which takes seconds for each answer."""
    monkeypatch.setattr(choose, "SECONDS", 5.0)
    monkeypatch.setattr(choose, "LEAST_REQUESTS", 50)


@pytest.mark.usefixtures("few_requests")
def test_choosing_says_how_far_it_is_and_ends_with_all_shapes_and_a_command() -> None:
    query = read(choose.ChooseQuery, {"gpus": "2", "rate": "6", "prompt": "800", "output": "60"})
    *progress, result = choose.steps(query)
    assert [event["kind"] for event in progress] == ["progress"] * len(progress)
    assert progress[-1]["done"] == progress[-1]["total"] == len(progress) - 1
    assert [one["shape"] for one in result["shapes"]] == ["unified", "chunked", "split"]
    advice = result["recommendation"]
    assert advice["holds"]
    assert advice["serve"].startswith("diptych serve --model ./llama-3.1-8b")
    for one in result["shapes"]:
        assert one["attainment"] <= 1
        assert one["capacity_rps"] <= choose.MOST_FACTOR * 6 * 2


@pytest.mark.usefixtures("few_requests")
def test_short_prompts_and_loose_objectives_need_no_pools() -> None:
    advice = asked(choose, choose.ChooseQuery, gpus=2, rate=4, prompt=300, output=60, ttft_ms=2000, tpot_ms=100)[
        "recommendation"
    ]
    assert advice["shape"] == "chunked"
    assert advice["serve"].endswith("--shape chunked --both 2 --ttft-slo-ms 2000 --tpot-slo-ms 100")


def offer(shape: str, attainment: float, capacity: float) -> AdvisedShape:
    some = {"p50": 1.0, "p90": 2.0}
    return AdvisedShape(
        shape=shape, words=f"{shape} workers", workers=2, prefill=0, decode=0, attainment=attainment, goodput_rps=9.0,
        late_share=0.0, slow_share=0.0, ttft_ms=some, tpot_ms=some, itl_p99_ms=None, usd_per_hour=1.0,
        usd_per_thousand_good=None, busy={}, capacity_rps=capacity,
    )  # fmt: skip


TIED = "A tie with split workers at this rate. Take the simpler: chunked workers."


@pytest.mark.parametrize(
    ("chunked_rps", "pools_rps", "title"),
    [
        (20.0, 20.3, TIED),
        (
            30.0,
            60.0,
            TIED,
        ),  # both at ease
        (20.0, 24.0, "Take split workers."),
        (24.0, 20.0, "Take chunked workers."),
    ],
)
def test_a_tie_is_called_a_tie(chunked_rps: float, pools_rps: float, title: str) -> None:
    chosen = machine("llama-3.1-8b", "h100-sxm")
    asked_for = {name: getattr(choose.ChooseQuery(), name) for name in choose.ChooseQuery.__struct_fields__}
    found = [offer("chunked", 0.93, chunked_rps), offer("split", 0.927, pools_rps)]
    assert recommend(found, 20.0, 4, chosen, asked_for)["title"] == title


@pytest.mark.slow
def test_the_answer_with_which_chapter_six_opens_is_what_is_computed_and_pools_win_in_it() -> None:
    stored = json.loads((STATIC / "guide" / "choose-example.json").read_text())
    assert stored == json.loads(json.dumps(choose.panel(choose.ChooseQuery()))), "run scripts/guide_example"
    assert stored["recommendation"]["shape"] == "split"


@pytest.mark.parametrize(("shape", "prefill"), [("unified", 0), ("chunked", 0), ("split", 1)])
def test_the_commands_of_the_advice_are_commands_of_this_version(shape: str, prefill: int) -> None:
    query = choose.ChooseQuery(gpus=2)
    chosen = machine(query.model, query.hardware)
    plan = choose.Plan(shape, 2, prefill, prefill)
    one = choose.candidate(chosen, query, plan, rate=2.0)
    asked_for = {name: getattr(query, name) for name in query.__struct_fields__}
    for command in (serve_command(one, chosen, asked_for), simulate_command(one, chosen, asked_for)):
        _, name, *arguments = shlex.split(command)
        found = typer.main.get_command(app).commands[name].make_context(name, arguments)  # raises UsageError
        assert found.params["model"] is not None


@pytest.mark.parametrize(("codec", "head_dim"), [("int8", 64), ("int8", 128), ("int4", 64), ("int4", 128)])
def test_the_wire_format_is_as_small_as_the_page_says(codec: str, head_dim: int) -> None:
    assert wire_share(codec, head_dim=head_dim) * 16 == transfer.CODEC_BITS[codec]


def test_streaming_and_codecs_shorten_the_pause_and_the_chosen_way_is_among_them() -> None:
    found = sent(tokens=8192, codec="int8")
    ways = {one["codec"]: one for one in found["ways"]}
    assert [one["streamed_ms"] < one["at_end_ms"] for one in ways.values()] == [True] * 3
    assert ways["none"]["at_end_ms"] > ways["int8"]["at_end_ms"] > ways["int4"]["at_end_ms"]
    assert ways["int8"]["streamed_ms"] == found["times"]["exposed_ms"]
    assert ways["int8"]["wire_bytes"] == found["size"]["wire_bytes"]
    kept = {one["codec"]: one["wire_bytes"] for one in sent(dtype="fp8")["ways"]}
    assert kept["int8"] == kept["none"] > kept["int4"]  # with its scales INT8 would be larger than FP8


def test_chunks_are_sent_one_after_the_other_and_none_before_it_is_computed() -> None:
    chunks = sent(gbytes=1.0, chunk=256)["chunks"]
    assert len(chunks) == 8
    free_ms = 0.0
    for one in chunks:
        assert one["sending_ms"] == pytest.approx(max(one["computed_ms"], free_ms), abs=0.02)  # but for the latency
        free_ms = one["arrived_ms"]


@pytest.mark.usefixtures("few_requests")
def test_one_gpu_cannot_be_two_pools_and_the_page_says_so() -> None:
    result = asked(choose, choose.ChooseQuery, gpus=1, rate=2, prompt=500, output=40)
    assert [one["shape"] for one in result["shapes"]] == ["unified", "chunked"]
    assert any("Two pools need two workers" in reason for reason in result["recommendation"]["reasons"])


@pytest.mark.parametrize(
    ("name", "query", "words"),
    [
        ("phases", {"batch": "x"}, "batch is 'x'; it must be a number from 1 to 512"),
        ("phases", {"batch": "0"}, "from 1 to 512"),
        ("phases", {"gpus": "3"}, "one of 0, 1, 2, 4, 8"),
        ("phases", {"nonsense": "1"}, "nonsense is no parameter"),
        ("phases", {"model": "gpt-9"}, "not in the catalogue"),
        ("phases", {"model": "llama-3.1-405b", "hardware": "rtx-4090"}, "does not fit"),
        ("interference", {"prompts": "1:2"}, "ARRIVAL_MS:PROMPT_TOKENS:OUTPUT_TOKENS"),
        ("interference", {"prompts": "0:99999:1"}, "it must be from 1 to 32768"),
        ("chunked", {"partial": "1", "long_partial": "2"}, "long_partial is 2; it must be at most partial (1)"),
        ("disaggregated", {"kill": "decode-2"}, "kill is 'decode-2'; there is 1 decode worker"),
        ("disaggregated", {"kill": "1"}, "one of decode-1, decode-2"),
        ("transfer", {"link": "pigeon"}, "link is 'pigeon'"),
        ("transfer", {"model": "yi-34b", "tokens": "100000"}, "reads at most"),
        ("transfer", {"model": "opt-13b", "attention": "gqa", "kv_heads": "16", "tokens": "100"}, "must divide"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(name: str, query: dict[str, str], words: str) -> None:
    chapter = next(one for one in CHAPTERS if one.name == name)
    assert chapter.panel is not None
    with pytest.raises(ConfigError) as raised:
        chapter.panel(read(chapter.query, query))
    message = raised.value.message
    assert words in message or "neither in the catalogue" in message


def test_an_address_holds_at_most_24_prompts() -> None:
    with pytest.raises(ConfigError, match="at most 24"):
        read_prompts(",".join(["0:10:2"] * 25))


@pytest.mark.parametrize("chapter", [one for one in CHAPTERS if one.panel], ids=lambda one: one.name)
def test_equal_questions_get_equal_answers(chapter: Any) -> None:
    module = MODULES.get(chapter.name)
    first = chapter.panel(chapter.query()) if module is None else asked(module, chapter.query)
    assert json.dumps(first) == json.dumps(chapter.panel(chapter.query()))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda one: one.name)
def test_every_control_has_a_default_within_its_limits(chapter: Any) -> None:
    for name, one in controls(chapter.query).items():
        if "choices" in one:
            assert one["default"] in one["choices"], name
        elif "min" in one:
            assert one["min"] <= one["default"] <= one["max"], name


@pytest.mark.parametrize("model", ["smollm2-135m", "mixtral-8x7b", "opt-175b", "deepseek-v3", "llama-3.1-405b"])
def test_models_of_every_kind_find_enough_gpus(model: str) -> None:
    found = sent(model=model, hardware="h200", tokens=256)
    assert found["size"]["cache_bytes"] > 0
    assert found["machine"]["gpus"] in (1, 2, 4, 8)


@pytest.mark.parametrize("hardware", hardware_names())
def test_every_gpu_of_the_catalogue_has_a_roof(hardware: str) -> None:
    phases = asked(roofline, roofline.RooflineQuery, model="qwen2.5-0.5b", hardware=hardware)["phases"]
    assert all(phase["step_ms"] > 0 for phase in phases.values())


def test_the_runs_with_which_the_comparison_opens_are_what_is_simulated_and_they_differ() -> None:
    stored = json.loads((STATIC / "compare" / "example.json").read_text())
    assert stored == json.loads(json.dumps(compare_example.example())), "run scripts/guide_example"
    met = [sum(record["slo_met"] for record in stored["runs"][side]["records"]) for side in "ab"]
    assert met[1] > met[0] + 60
