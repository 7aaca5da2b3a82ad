"""One line of an input file: whether it can be run, and the rows that it may end as. Pure: no I/O, no clock.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

from collections.abc import Collection
from typing import Any

import msgspec

from diptych.base.whole_lines import with_whole_lines
from diptych.serving import edge_limits
from diptych.serving.batches.batch_records import LineFault

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode
REQUIRED = ("custom_id", "method", "url", "body")
EXPIRED = ("batch_expired", "the completion window of the batch was over before this line was run")
CANCELLED = ("batch_cancelled", "the batch was cancelled before this line was run")


def check_line(text: bytes, number: int, endpoint: str, models: Collection[str]) -> str | LineFault:
    """The custom_id of a line, or why the line cannot be run. models: names that may be asked for. Fields inside of the
    body are checked when the line runs."""

    def fault(code: str, message: str, param: str | None = None) -> LineFault:
        return LineFault(code, message, number, param)

    try:
        fields = _fields.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return fault("invalid_json_line", f"the line is not a JSON object: {error}")
    for name in REQUIRED:
        if name not in fields:
            return fault("missing_required_parameter", f"{name} is required", name)
    custom_id, method, url = (_value(fields[name]) for name in REQUIRED[:3])
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= edge_limits.CUSTOM_ID:
        return fault(
            "invalid_custom_id", f"custom_id must be a text of 1 to {edge_limits.CUSTOM_ID} characters", "custom_id"
        )
    if method != "POST":
        return fault("invalid_method", f"method is {_shown(method)}; it must be POST", "method")
    if url != endpoint:
        return fault("mismatched_endpoint", f"url is {_shown(url)}; the batch is for {endpoint}", "url")
    try:
        body = _fields.decode(fields["body"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return fault("invalid_body", "body must be an object", "body")
    model = _value(body["model"]) if "model" in body else None
    if model is not None and model not in models:
        return fault("model_not_found", f"model {_shown(model)} is not served here", "body.model")
    if "stream" in body and _value(body["stream"]) not in (None, False):
        return fault("invalid_body", "stream must be false or left out: nobody reads a stream", "body.stream")
    return custom_id


def request_body(text: bytes, endpoint: str, best_effort_s: float) -> bytes:
    """The body of a line that was checked, as a request that gives way to all others for so long, and waits without a
    deadline of its own: the batch has one. Answers of /v1/responses are stored only where the line says so: a file of
    them would push out those of conversations."""
    body = _fields.decode(_fields.decode(text)["body"])
    body.pop("deadline_ms", None)
    body["service_class"] = msgspec.Raw(b'"batch"')
    body["gives_way_ms"] = msgspec.Raw(b"%d" % int(1000 * best_effort_s))
    if endpoint == "/v1/responses":
        body.setdefault("store", msgspec.Raw(b"false"))
    return _encode(body)


def reply_row(row_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The row of a line that was answered. body: JSON."""
    if b"\n" in body or not body:
        body = _single_line(body)
    head = _encode({"id": row_id, "custom_id": custom_id})[:-1]
    response = _encode({"status_code": status, "request_id": request_id})[:-1]
    return with_whole_lines(b'%b,"response":%b,"body":%b},"error":null}\n' % (head, response, body))


def unanswered_row(row_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The row of a line that was not run."""
    error = {"code": code, "message": message}
    return with_whole_lines(_encode({"id": row_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n")


def _single_line(body: bytes) -> bytes:
    try:
        return msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        return _encode(body.decode("utf-8", "replace"))


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _shown(value: Any) -> str:
    return repr(value)[:80]
