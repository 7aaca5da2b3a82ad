"""Each limit of the edge is sent, and one more: by a probe here, or by a test elsewhere that is named here."""

import ast
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_files import ENDPOINT, add_batch, add_file, jsonl, line, numbered, started
from fake_llm import FakeLLM
from pydantic import ValidationError

from diptych.control.admission.admission_config import AdmissionConfig
from diptych.control.admission.admission_queue import AdmissionQueue, QueuedRequest
from diptych.control.admission.quota import Quota, QuotaLimits
from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import BodyTooLargeError, ConfigError, ConflictError, InvalidRequestError, OverloadedError
from diptych.control.events import RequestFinished
from diptych.control.request import Request, RequestOptions, SamplingParams, Submission
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.api import miss_routes, timeline_routes
from diptych.serving.api.app import build_app
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.listener import num_refusals
from diptych.serving.api.multipart import MultipartParser
from diptych.serving.api.protocol import ChatBody, CompletionBody
from diptych.serving.batches.batch_records import BatchLimits
from diptych.serving.batches.batch_service import BatchOptions, BatchService
from diptych.serving.batches.batch_store import BatchStore
from diptych.serving.batches.line_check import LineFault, check_line
from diptych.serving.keys.key_meter import KeyMeter
from diptych.serving.keys.key_usage import KeyUsage
from diptych.timeline.ring import Timeline

TESTS = Path(__file__).parent
Send = Callable[[int], None]


def _boundary(length: int) -> None:
    MultipartParser(f'multipart/form-data; boundary="{"b" * length}"')


def _parts(number: int) -> None:
    list(_form().feed(b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n\r\n' * number))


def _form() -> MultipartParser:
    return MultipartParser('multipart/form-data; boundary="b"')


def _chat(**fields: Any) -> None:
    try:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    except ValidationError as error:
        raise invalid_body(error) from None


def _prompts(prompt: list[Any]) -> None:
    try:
        CompletionBody.model_validate({"prompt": prompt})
    except ValidationError as error:
        raise invalid_body(error) from None


# Sends so many; raises what is answered beyond. One entry a line, by name.
PROBES: dict[str, Send] = {
    "BOUNDARY_BYTES": _boundary,
    "FORM_PARTS": _parts,
    "LIST_ITEMS": lambda number: _prompts(["x"] * number),
    "SHOWN_MISSES": lambda number: miss_routes._number(str(number)) and None,
    "TOKEN_IDS": lambda number: _prompts([1] * number),
    "LABELS": lambda number: _chat(metadata={str(label): "x" for label in range(number)}),
    "LABEL_NAME": lambda length: _chat(metadata={"x" * length: "x"}),
    "LABEL_VALUE": lambda length: _chat(metadata={"x": "x" * length}),
    "STOP_TEXTS": lambda number: _chat(stop=[str(text) for text in range(number)]),
    "STOP_TOKENS": lambda number: _chat(stop_token_ids=list(range(number))),
    "TOOLS": lambda number: _chat(tools=[{"type": "function", "function": {"name": "f"}}] * number),
}

COMPLETION = b'{"model": "fake", "prompt": [5, 6], "max_tokens": 1, "unknown": "%b"}'


def _completion(size: int) -> dict[str, Any]:
    return {"content": COMPLETION % (b"x" * (size - len(COMPLETION % b"")))}


def _fields(number: int) -> dict[str, Any]:
    named = {"model": "fake", "prompt": [5, 6], "max_tokens": 1}
    return {"json": named | {f"x{field}": 1 for field in range(number - len(named))}}


def _upload(**fields: str) -> dict[str, Any]:
    return {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch", **fields}}


def _expiring(seconds: int) -> dict[str, Any]:
    return _upload(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)})


# What is sent to a route of a server, by name: the method, the path, and what httpx sends.
ROUTES: dict[str, tuple[str, Callable[[int], str], Callable[[int], dict[str, Any]]]] = {
    "BATCH_WINDOW_S": ("POST", lambda _: "/v1/files", _expiring),
    "BODY_BYTES": ("POST", lambda _: "/v1/completions", _completion),
    "BODY_FIELDS": ("POST", lambda _: "/v1/completions", _fields),
    "FILE_LEAST_S": ("POST", lambda _: "/v1/files", _expiring),
    "FORM_FIELD_BYTES": ("POST", lambda _: "/v1/files", lambda size: _upload(purpose="x" * size)),
    "LISTED_BATCHES": ("GET", lambda number: f"/v1/batches?limit={number}", lambda _: {}),
    "LISTED_FILES": ("GET", lambda number: f"/v1/files?limit={number}", lambda _: {}),
    "TIMELINE_PAGE_RECORDS": ("GET", lambda number: f"/timeline/records?limit={number}", lambda _: {}),
    "TRACE_S": ("GET", lambda seconds: f"/timeline/perfetto?last_s={seconds}", lambda _: {}),
}
LEAST = frozenset({"FILE_LEAST_S"})  # of which one less is too little

# The test that sends the limit and one more. One entry a line, by name.
ELSEWHERE: dict[str, str] = {
    "BATCH_FAULTS": "test_edge_limits.py::test_as_many_faults_of_a_batch_are_reported_as_the_limit",
    "ENGINE_HEAD_BYTES": (
        "front/test_front_limits.py::test_the_head_of_an_engine_s_reply_has_its_limit_and_no_byte_more"
    ),
    "ENGINE_PAGE_BYTES": "front/test_front_limits.py::test_a_page_and_a_prompt_of_an_engine_have_their_limits",
    "ENGINE_TOKENS_BYTES": "front/test_front_limits.py::test_a_page_and_a_prompt_of_an_engine_have_their_limits",
    "ENGINE_REFUSAL_BYTES": (
        "front/test_front_limits.py::test_a_whole_reply_and_a_refusal_have_their_limits_and_no_byte_more"
    ),
    "ENGINE_REPLY_BYTES": (
        "front/test_front_limits.py::test_a_whole_reply_and_a_refusal_have_their_limits_and_no_byte_more"
    ),
    "FILE_BYTES": "test_edge_limits.py::test_a_file_and_the_rest_of_its_form_have_their_limits_and_no_byte_more",
    "FORM_BYTES": "test_edge_limits.py::test_a_file_and_the_rest_of_its_form_have_their_limits_and_no_byte_more",
    "GRAMMAR_CLOCK_S": "test_grammars.py::test_a_machine_without_time_is_said_and_nothing_is_kept_against_the_grammar",
    "GRAMMAR_MEMORY_BYTES": (
        "test_grammars.py::test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_is_not"
    ),
    "GRAMMAR_PROCESSOR_S": "test_grammars.py::test_grammars_are_tried_and_errors_have_their_path",
    "HELD_TOKENS": "test_edge_limits.py::test_so_many_tokens_of_an_answer_are_held_and_no_more",
    "JOINED_WORKERS": "test_join.py::test_there_are_no_more_workers_than_may_be",
    "LISTEN_BACKLOG": "test_listener.py::test_as_many_connections_wait_as_the_backlog_and_those_beyond_come_later",
    "OPEN_AT_FRONT": "front/test_front_limits.py::test_as_many_requests_are_open_at_a_front_as_the_limit",
    "QUEUED_REQUESTS": "test_edge_limits.py::test_as_many_requests_are_queued_as_the_limit",
    "RECORDED_STREAMS": (
        "test_resumable.py::test_as_many_streams_are_recorded_as_the_limit_and_others_are_served_without"
    ),
    "RECORDED_STREAM_S": "test_resumable.py::test_a_record_is_kept_for_its_time_and_no_longer",
    "RESPONSES_FILE_BYTES": (
        "test_response_store.py::test_without_an_option_memory_and_file_have_the_bounds_of_the_edge"
    ),
    "RESPONSES_MEMORY_BYTES": (
        "test_response_store.py::test_without_an_option_memory_and_file_have_the_bounds_of_the_edge"
    ),
    "RESPONSE_WRITE_S": (
        "test_response_store.py::test_a_response_that_takes_too_long_is_said_not_to_be_stored_and_is_not"
    ),
    "TIMELINE_EVENT_RECORDS": (
        "test_edge_limits.py::test_an_event_of_the_timeline_has_so_many_records_and_the_next_has_the_rest"
    ),
    "UNREAD_BYTES_AT_FRONT": (
        "front/test_front_limits.py::test_an_engine_is_read_until_its_client_has_left_so_many_bytes_unread"
    ),
    "UNREGISTERED_WORKERS": "test_join.py::test_connections_that_never_register_are_bounded_and_keep_no_worker_out",
    "WAITING_GRAMMARS": "test_grammars.py::test_as_many_grammars_wait_as_the_limit_and_one_more_is_refused",
    "WAITING_ON_WORKER": "test_edge_limits.py::test_as_many_requests_wait_on_a_worker_as_the_limit",
    "WORKER_BACKLOG": (
        "test_handshake_port.py::test_as_many_connections_wait_as_the_backlog_and_those_beyond_come_later"
    ),
    "WORKER_HANDSHAKE_S": "test_join.py::test_a_registration_has_its_time",
    "BIASES": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "BODY_BYTES_PER_S": "test_connection.py::test_a_body_has_a_least_pace",
    "BODY_DEPTH": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "BODY_ELEMENTS": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "BODY_GAP_BYTES": "test_sliced_json.py::test_a_gap_in_a_body_has_its_longest_length_and_what_is_longer_is_refused",
    "BODY_NAME_BYTES": (
        "test_sliced_json.py::test_a_name_has_its_longest_length_and_one_byte_more_is_refused_by_that_name"
    ),
    "BATCHES": "test_edge_limits.py::test_what_a_store_of_batches_keeps",
    "BATCH_LINES": "test_edge_limits.py::test_lines_of_a_batch_at_their_limits",
    "BATCH_LINE_BYTES": "test_edge_limits.py::test_lines_of_a_batch_at_their_limits",
    "CUSTOM_ID": "test_edge_limits.py::test_the_id_of_a_line",
    "EMBEDDING_NUMBERS": "test_embeddings_api.py::test_another_model_a_full_queue_and_a_reply_that_would_be_too_large",
    "ENGINE_EVENT_BYTES": "test_linear_work.py::test_an_event_is_taken_up_to_its_limit",
    "FILENAME": "test_edge_limits.py::test_the_end_of_a_long_filename_is_kept",
    "FILES": "test_edge_limits.py::test_what_a_store_of_batches_keeps",
    "ALL_FILES_BYTES": "test_edge_limits.py::test_what_a_store_of_batches_keeps",
    "OPEN_BATCHES": "test_edge_limits.py::test_what_a_store_of_batches_keeps",
    "KEY_CHARACTERS": "test_edge_limits.py::test_a_key_has_its_longest_length",
    "REFUSED_CONNECTIONS": "test_edge_limits.py::test_as_many_refusals_as_the_limit_whatever_descriptors_there_are",
    "TIMELINE_READERS": "test_edge_limits.py::test_as_many_readers_as_the_limit",
    "BODY_VALUES": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "CHAT_PROCESSOR_S": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "CHOICES": "test_structured_limits.py::test_as_many_choices_as_the_limit_are_followed_and_one_more_is_refused",
    "CONTEXT_EDITS": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "CONVERSATION_BYTES": "test_response_store.py::test_a_conversation_is_read_up_to_the_limit_and_refused_beyond",
    "ERROR_CHARACTERS": "test_error_format.py::test_the_message_of_an_error_is_bounded",
    "GRAMMAR_BYTES": (
        "test_structured_limits.py::test_a_grammar_of_as_many_bytes_as_the_limit_is_followed_and_one_more_is_refused"
    ),
    "GUIDE_ANSWER_S": "../web/test_guide_limits.py::test_a_panel_has_its_time_and_the_next_one_is_computed",
    "GUIDE_CALLS": "../web/test_served_guide.py::test_whoever_asks_behind_too_many_is_told_so",
    "GUIDE_STREAMS": (
        "../web/test_guide_limits.py::test_as_many_streams_are_read_as_the_limit_and_one_more_ends_the_oldest"
    ),
    "GUIDE_QUERY_BYTES": (
        "../web/test_guide_limits.py::test_a_query_that_is_too_long_is_refused_before_it_is_taken_apart"
    ),
    "HEAD_BYTES": "test_connection.py::test_a_head_has_its_limit_and_no_byte_more",
    "REFUSAL_LINGER_S": "test_connection.py::test_a_client_that_was_refused_may_linger_until_its_time_is_over",
    "REQUEST_SILENCE_S": "test_connection.py::test_a_client_that_says_nothing_is_cut_off",
    "HEAD_S": "test_connection.py::test_a_head_has_its_time_however_often_a_byte_of_it_comes",
    "KEYS_OF_NAME": "test_key_file.py::test_each_limit_of_the_file_and_one_more",
    "KEY_ENTRIES": "test_key_file.py::test_each_limit_of_the_file_and_one_more",
    "KEY_FILE_BYTES": "test_key_file.py::test_what_is_no_file_or_too_large_is_refused",
    "KEY_LEAST": "test_key_file.py::test_each_limit_of_the_file_and_one_more",
    "KEY_NAMES": "test_keys_api.py::test_names_beyond_the_limit_are_counted_together",
    "LONG_WORK_BYTES": "test_long_work.py::test_more_than_may_wait_is_refused",
    "LONG_WORK_WAITING": "test_long_work.py::test_more_than_may_wait_is_refused",
    "MESSAGES": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "MODELS_OF_NAME": "test_key_file.py::test_each_limit_of_the_file_and_one_more",
    "OBSERVER_SILENCE_S": "test_timeline.py::test_a_reader_that_takes_nothing_loses_its_place",
    "PART_HEAD_BYTES": (
        "test_multipart_limits.py::test_the_head_of_a_part_may_have_its_whole_limit_in_one_line_and_no_byte_more"
    ),
    "RESPONSES": "test_response_store.py::test_their_number_is_bounded_too",
    "RECORDER_ROWS": "test_recording.py::test_a_recording_ends_when_too_many_rows_wait_for_the_disk",
    "RESPONSES_UNWRITTEN_BYTES": "test_response_store.py::test_what_waits_to_be_written_is_bounded",
    "SCHEMA_DEPTH": "test_structured_limits.py::test_a_schema_as_deep_as_the_limit_is_followed_and_one_deeper_refused",
    "SCHEMA_PARTS": (
        "test_structured_limits.py::test_a_schema_of_as_many_parts_as_the_limit_is_followed_and_one_more_is_refused"
    ),
    "SECRET_BYTES": "test_key_file.py::test_each_limit_of_the_file_and_one_more",
    "TIMELINE_READERS_OF_TENANT": "test_timeline.py::test_a_key_has_a_part_of_the_places",
    "UNANSWERED_REQUESTS": "test_connection.py::test_a_client_is_not_read_while_so_many_of_its_requests_wait",
    "UNREAD_BODIES_BYTES": "test_body_budget.py::test_a_budget_of_half_read_bodies_and_one_byte_more",
    "RESPONSE_LIFE_S": "test_response_store.py::test_a_response_is_kept_for_its_life_and_no_second_longer",
    "WORKER_FIRST_BYTES": "test_framed_link.py::test_a_frame_has_its_limit_and_no_byte_more",
    "WORKER_FRAME_BYTES": "test_framed_link.py::test_a_frame_has_its_limit_and_no_byte_more",
    "WORKER_UNSENT_BYTES": "test_framed_link.py::test_as_many_bytes_wait_as_the_limit_and_no_more",
    "WORKER_LABEL": "test_framed_link.py::test_a_worker_s_label_has_its_limit_and_no_character_more",
    "UNSHAKEN_WORKERS": (
        "test_handshake_port.py::test_connections_that_never_shake_hands_are_bounded_and_keep_no_worker_out"
    ),
}


def test_each_limit_has_a_probe() -> None:
    known = [*PROBES, *ROUTES, *ELSEWHERE]
    assert len(known) == len(set(known)), "a limit stands in two places: keep its probe"
    missing = sorted(set(edge_limits.LIMITS) - set(known))
    assert not missing, f"add to PROBES a call that sends so many of {missing}, or name in ELSEWHERE the test that does"
    assert set(known) <= set(edge_limits.LIMITS), "a probe is of no limit"


def test_the_tests_that_are_named_exist() -> None:
    named: dict[str, set[str]] = {}
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        named.setdefault(file, set()).add(test)
    for file, tests in named.items():
        there = {
            node.name
            for node in ast.parse((TESTS / file).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert tests <= there, (file, tests - there)


@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_limit_is_taken_and_one_more_is_answered_as_declared(name: str) -> None:
    limit = edge_limits.LIMITS[name]
    PROBES[name](int(limit.value))
    with pytest.raises(InvalidRequestError) as caught:
        PROBES[name](int(limit.value) + 1)
    assert limit.beyond in ("400", f"400 `{caught.value.code}`")


async def _replies(
    *calls: tuple[str, str, dict[str, Any]], folder: Path, limits: BatchLimits | None = None, **options: Any
) -> list[httpx.Response]:
    """The replies of a server in this process, with batches."""
    service = BatchService(BatchOptions(folder / "batches", limits or BatchLimits()))
    app = build_app(FakeLLM(), "fake", batches=service, **options)  # type: ignore[arg-type]
    service.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return [await client.request(method, path, **sent) for method, path, sent in calls]
    finally:
        await service.stop()
        service.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(ROUTES))
async def test_a_route_takes_the_limit_and_answers_one_more_as_declared(name: str, tmp_path: Path) -> None:
    limit, (method, path, sent) = edge_limits.LIMITS[name], ROUTES[name]
    value = int(limit.value)
    counts = (value, value - 1 if name in LEAST else value + 1)
    at, beyond = await _replies(*((method, path(count), sent(count)) for count in counts), folder=tmp_path)
    error = beyond.json()["error"]
    status, _, code = limit.beyond.partition(" ")
    assert str(beyond.status_code) == status and (not code or f"`{error['code']}`" == code)
    assert at.status_code < 400 or at.json()["error"]["message"] != error["message"]
    assert name == "FORM_FIELD_BYTES" or at.status_code == 200, at.text[:300]  # no field of a form is so long


def test_the_id_of_a_line() -> None:
    for length, is_taken in ((edge_limits.CUSTOM_ID, True), (edge_limits.CUSTOM_ID + 1, False)):
        found = check_line(jsonl([line("x" * length)]), 1, ENDPOINT, ["fake"])
        assert isinstance(found, LineFault) != is_taken


def test_lines_of_a_batch_at_their_limits(tmp_path: Path) -> None:
    size = len(jsonl([line("id-0")])) - 1
    for number, (limits, faults) in enumerate((
        (BatchLimits(max_lines=4), []),
        (BatchLimits(max_lines=3), [("too_many_lines", None)]),
        (BatchLimits(max_line_bytes=size), []),
        (BatchLimits(max_line_bytes=size - 1), [("line_too_long", place) for place in range(1, 5)]),
    )):  # fmt: skip
        store, batch = started(tmp_path / str(number), numbered(4), limits)
        found = (batch.json()["errors"] or {"data": []})["data"]
        assert [(fault["code"], fault["line"]) for fault in found] == faults
        store.close()


def test_what_a_store_of_batches_keeps(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, BatchLimits(max_files=2, max_total_bytes=1000, max_open=2, max_batches=3))
    add_file(store, b"x" * 999)
    with pytest.raises(BodyTooLargeError, match="limit is 1000"):
        add_file(store, b"x" * 2, "file-b")
    add_file(store, b"x", "file-c")
    with pytest.raises(BodyTooLargeError, match="2 files") as caught:
        add_file(store, b"", "file-d")
    for name in ("FILES", "ALL_FILES_BYTES"):
        assert edge_limits.LIMITS[name].beyond == f"{caught.value.status} `{caught.value.code}`"
    for name in ("batch_a", "batch_b"):
        add_batch(store, name)
    with pytest.raises(ConflictError, match="2 batches"):
        add_batch(store, "batch_c")
    for batch in store.tables.batches("", None, 10):
        store.tables.set_status(batch, "failed", 101)
    for name in ("batch_c", "batch_d"):
        store.tables.set_status(add_batch(store, name), "failed", 101)
    assert [batch.id for batch in store.tables.batches("", None, 10)] == ["batch_d", "batch_c", "batch_b"]


@pytest.mark.asyncio
async def test_the_end_of_a_long_filename_is_kept(tmp_path: Path) -> None:
    names = ["a" * edge_limits.FILENAME, "b" + "a" * edge_limits.FILENAME]
    calls = [("POST", "/v1/files", {"files": {"file": (name, b"{}")}, "data": {"purpose": "batch"}}) for name in names]
    assert [reply.json()["filename"] for reply in await _replies(*calls, folder=tmp_path)] == [names[0]] * 2


@pytest.mark.asyncio
async def test_a_key_has_its_longest_length(tmp_path: Path) -> None:
    key = "k" * edge_limits.KEY_CHARACTERS
    calls = [("GET", "/v1/models", {"headers": {"authorization": f"Bearer {given}"}}) for given in (key, key + "k")]
    at, beyond = await _replies(*calls, folder=tmp_path, api_keys=[key])
    assert (at.status_code, beyond.status_code, beyond.json()["error"]["code"]) == (200, 401, "invalid_api_key")
    with pytest.raises(ConfigError, match="4097"):
        build_app(FakeLLM(), "fake", api_keys=[key + "k"])  # type: ignore[arg-type]


def test_as_many_refusals_as_the_limit_whatever_descriptors_there_are() -> None:
    assert {num_refusals(1 << 20), num_refusals(1 << 24)} == {edge_limits.REFUSED_CONNECTIONS}


@pytest.mark.asyncio
async def test_as_many_readers_as_the_limit() -> None:
    timeline = Timeline(max_subscribers=edge_limits.TIMELINE_READERS)
    readers = [timeline.subscribe(None) for _ in range(edge_limits.TIMELINE_READERS)]
    with pytest.raises(OverloadedError) as caught:
        timeline.subscribe(None)
    assert f"{caught.value.status} `{caught.value.code}`" == edge_limits.LIMITS["TIMELINE_READERS"].beyond
    readers.pop().close()
    timeline.subscribe(None)


def test_as_many_faults_of_a_batch_are_reported_as_the_limit(tmp_path: Path) -> None:
    for number in (edge_limits.BATCH_FAULTS, edge_limits.BATCH_FAULTS + 1):
        store, batch = started(tmp_path / str(number), b"{\n" * number)
        faults = batch.json()["errors"]["data"]
        assert [fault["line"] for fault in faults] == list(range(1, edge_limits.BATCH_FAULTS + 1))
        assert batch.status == "failed"
        store.close()


@pytest.mark.asyncio
async def test_a_file_and_the_rest_of_its_form_have_their_limits_and_no_byte_more(tmp_path: Path) -> None:
    most = 50_000  # less than the usual, so that the test is quick

    def form(size: int, whole: int) -> tuple[str, str, dict[str, Any]]:
        """A file of ``size`` bytes, in a body of ``whole``: spaces behind the form fill it."""
        purpose = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size + b"\r\n"
        content = (purpose + file + b"--b--\r\n").ljust(whole)
        return "POST", "/v1/files", {"content": content, "headers": {"content-type": "multipart/form-data; boundary=b"}}

    body = most + edge_limits.FORM_BYTES
    calls = (form(most, 0), form(most + 1, 0), form(most, body), form(most, body + 1), form(1, 0))
    replies = await _replies(*calls, folder=tmp_path, limits=BatchLimits(max_file_bytes=most))
    found = [(reply.status_code, (reply.json().get("error") or {}).get("code")) for reply in replies]
    assert found == [(200, None), (413, "file_too_large"), (200, None), (413, "body_too_large"), (200, None)]
    assert BatchLimits().max_file_bytes == edge_limits.FILE_BYTES


def test_so_many_tokens_of_an_answer_are_held_and_no_more() -> None:
    most, held = edge_limits.HELD_TOKENS, []
    for max_tokens in (most - 1, most, most + 1, 100 * most):
        quota = Quota(QuotaLimits(tokens_per_minute=10**6))
        assert quota.admit(0, 1) is None
        meter = KeyMeter(quota, KeyUsage(), 1, lambda: 0, lambda meter: None, counts_open=True)
        stream = AnswerStream("a", 0, [5, 6], SamplingParams(max_tokens=max_tokens), FakeLLM().tokenizer)
        meter.begin(Generation("a", [stream]))
        held.append(quota.held_tokens - len(stream.prompt_token_ids))
    assert held == [most - 1, most, most, most]


def test_as_many_requests_are_queued_as_the_limit() -> None:
    def request(name: str) -> QueuedRequest:
        return QueuedRequest(Submission(name, 1, 1, options=RequestOptions(service_class="interactive")), 0, 0)

    queue = AdmissionQueue(AdmissionConfig())
    for number in range(edge_limits.QUEUED_REQUESTS):
        assert queue.offer(request(f"r{number}"), 0) is None
    refusal = queue.offer(request("one more"), 0)
    assert refusal is not None and len(queue) == edge_limits.QUEUED_REQUESTS and refusal.error.retry_after_s
    assert f"{refusal.error.status} `{refusal.error.code}`" == edge_limits.LIMITS["QUEUED_REQUESTS"].beyond
    assert queue.next(0, 1) == "r0" and queue.offer(request("there is room"), 0) is None


def test_as_many_requests_wait_on_a_worker_as_the_limit() -> None:
    core = EngineCore(EngineConfig(CacheConfig(64, 16), SchedulerConfig(), max_model_len=1000))
    for number in range(edge_limits.WAITING_ON_WORKER):
        assert not [event for event in core.add_request(Request(f"r{number}", 8, 1), 0) if is_refusal(event)]
    [event] = [event for event in core.add_request(Request("one more", 8, 1), 0) if is_refusal(event)]
    error = event.error.exception()
    assert f"{error.status} `{error.code}`" == edge_limits.LIMITS["WAITING_ON_WORKER"].beyond
    assert str(edge_limits.WAITING_ON_WORKER) in error.message


def is_refusal(event: Any) -> bool:
    return isinstance(event, RequestFinished) and event.error is not None


@pytest.mark.asyncio
async def test_an_event_of_the_timeline_has_so_many_records_and_the_next_has_the_rest() -> None:
    most = edge_limits.TIMELINE_EVENT_RECORDS
    for number, parts in ((most, [most]), (most + 1, [most, 1])):
        timeline = Timeline()
        reader = timeline.subscribe(0)
        for record in range(number):
            timeline.on_worker(0, "ready", record)
        timeline.close()
        texts = [text async for text in timeline_routes.events(timeline, reader, asyncio.Lock())]
        sizes = [len(json.loads(text.split(b"data: ")[1])) for text in texts if b"data: " in text]
        assert sizes[1:] == parts  # behind the header
