"""Each limit of the edge is sent, and one more: by a probe here, or by a test elsewhere that is named here."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.protocol import ChatBody
from diptych.serving.batches.multipart import MultipartParser

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


# Sends so many; raises what is answered beyond. One entry a line, by name.
PROBES: dict[str, Send] = {
    "BOUNDARY_BYTES": _boundary,
    "FORM_PARTS": _parts,
    "LABELS": lambda number: _chat(metadata={str(label): "x" for label in range(number)}),
    "LABEL_NAME": lambda length: _chat(metadata={"x" * length: "x"}),
    "LABEL_VALUE": lambda length: _chat(metadata={"x": "x" * length}),
    "STOP_TEXTS": lambda number: _chat(stop=[str(text) for text in range(number)]),
    "STOP_TOKENS": lambda number: _chat(stop_token_ids=list(range(number))),
    "TOOLS": lambda number: _chat(tools=[{"type": "function", "function": {"name": "f"}}] * number),
}

# The test that sends the limit and one more. One entry a line, by name.
ELSEWHERE: dict[str, str] = {
    "BIASES": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "BODY_BYTES_PER_S": "test_connection.py::test_a_body_has_a_least_pace",
    "BODY_DEPTH": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "BODY_ELEMENTS": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "BODY_VALUES": "test_sliced_json.py::test_a_body_is_refused_beyond_its_limits_and_taken_at_them",
    "CHAT_PROCESSOR_S": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "CHOICES": "test_structured_limits.py::test_as_many_choices_as_the_limit_are_followed_and_one_more_is_refused",
    "CONTEXT_EDITS": "test_loop_turns.py::test_the_limits_of_what_takes_long",
    "CONVERSATION_BYTES": "test_response_store.py::test_a_conversation_is_read_up_to_the_limit_and_refused_beyond",
    "ERROR_CHARACTERS": "test_error_format.py::test_the_message_of_an_error_is_bounded",
    "GRAMMAR_BYTES": (
        "test_structured_limits.py::test_a_grammar_of_as_many_bytes_as_the_limit_is_followed_and_one_more_is_refused"
    ),
    "GUIDE_QUERY_BYTES": (
        "../web/test_guide_limits.py::test_a_query_that_is_too_long_is_refused_before_it_is_taken_apart"
    ),
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
    "UNANSWERED_REQUESTS": "test_connection.py::test_a_client_is_not_read_while_so_many_of_its_requests_wait",
    "UNREAD_BODIES_BYTES": "test_body_budget.py::test_a_budget_of_half_read_bodies_and_one_byte_more",
}

# Limits that no test sends exactly yet. Only ever taken from.
UNSENT = frozenset(
    {
        "ALL_FILES_BYTES",
        "BATCHES",
        "BATCH_FAULTS",
        "BATCH_LINES",
        "BATCH_LINE_BYTES",
        "BATCH_WINDOW_S",
        "BODY_BYTES",
        "BODY_FIELDS",
        "CUSTOM_ID",
        "EMBEDDING_NUMBERS",
        "ENGINE_EVENT_BYTES",
        "ENGINE_HEAD_BYTES",
        "ENGINE_REFUSAL_BYTES",
        "ENGINE_REPLY_BYTES",
        "FILENAME",
        "FILES",
        "FILE_BYTES",
        "FILE_LEAST_S",
        "FORM_BYTES",
        "FORM_FIELD_BYTES",
        "GRAMMAR_CLOCK_S",
        "GRAMMAR_MEMORY_BYTES",
        "GRAMMAR_PROCESSOR_S",
        "HEAD_BYTES",
        "HELD_TOKENS",
        "JOINED_WORKERS",
        "KEY_CHARACTERS",
        "LISTED_BATCHES",
        "LISTED_FILES",
        "LISTEN_BACKLOG",
        "LIST_ITEMS",
        "OPEN_AT_FRONT",
        "OPEN_BATCHES",
        "QUEUED_REQUESTS",
        "RECORDED_STREAMS",
        "RECORDED_STREAM_S",
        "REFUSAL_LINGER_S",
        "REFUSED_CONNECTIONS",
        "REQUEST_SILENCE_S",
        "RESPONSES_FILE_BYTES",
        "RESPONSES_MEMORY_BYTES",
        "RESPONSE_LIFE_S",
        "RESPONSE_WRITE_S",
        "SHOWN_MISSES",
        "TIMELINE_EVENT_RECORDS",
        "TIMELINE_PAGE_RECORDS",
        "TIMELINE_READERS",
        "TOKEN_IDS",
        "TRACE_S",
        "UNREAD_BYTES_AT_FRONT",
        "UNREGISTERED_WORKERS",
        "WAITING_GRAMMARS",
        "WAITING_ON_WORKER",
        "WORKER_BACKLOG",
        "WORKER_FIRST_BYTES",
        "WORKER_FRAME_BYTES",
        "WORKER_HANDSHAKE_S",
        "WORKER_LABEL",
        "WORKER_UNSENT_BYTES",
    }
)


def test_each_limit_has_a_probe() -> None:
    known = [*PROBES, *ELSEWHERE, *UNSENT]
    assert len(known) == len(set(known)), "a limit stands in two places: keep its probe"
    missing = sorted(set(edge_limits.LIMITS) - set(known))
    assert not missing, f"add to PROBES a call that sends so many of {missing}, or name in ELSEWHERE the test that does"
    assert set(known) <= set(edge_limits.LIMITS), "a probe is of no limit"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_the_test_that_is_named_exists(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    found = ast.walk(ast.parse((TESTS / file).read_text()))
    assert test in {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_limit_is_taken_and_one_more_is_answered_as_declared(name: str) -> None:
    limit = edge_limits.LIMITS[name]
    PROBES[name](int(limit.value))
    with pytest.raises(InvalidRequestError) as caught:
        PROBES[name](int(limit.value) + 1)
    assert limit.beyond in ("400", f"400 `{caught.value.code}`")
