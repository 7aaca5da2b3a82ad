"""The parts of a multipart/form-data body (RFC 7578), as they come: no part is ever whole in memory.

Sans-I/O: bytes in, events out. The grammar is python-multipart's; here its callbacks become events and its errors those
of the API. What to do with a part is the caller's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import python_multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins. filename: None for a plain field."""

    name: str
    filename: str | None


class MultipartParser:
    """A parser of one body. Raises InvalidRequestError for a content type or a body that is not multipart."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= edge_limits.BOUNDARY_BYTES:
            raise InvalidRequestError(
                f"content-type is {content_type[:80]!r}; a file is uploaded as multipart/form-data with a boundary",
                code="invalid_multipart",
            )
        self._events: list[PartBegin | bytes] = []
        self._headers: dict[str, str] = {}
        self._field, self._value = bytearray(), bytearray()
        self._head_bytes = self._num_parts = 0
        self._has_ended = False
        self._parser = python_multipart.MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> Iterator[PartBegin | bytes]:
        """What these bytes bring: beginnings of parts, and pieces of the part that began last."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)[:200]) from None
        events, self._events = self._events, []
        yield from events

    def close(self) -> None:
        """The body is over. Raises InvalidRequestError when its last boundary is missing."""
        if not self._has_ended:
            raise _invalid("it ends before its last boundary")

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > edge_limits.FORM_PARTS:
            raise _invalid(f"it has more than {edge_limits.FORM_PARTS} parts")
        self._headers.clear()
        self._head_bytes = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._take(self._field, data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._take(self._value, data[start:end])

    def _take(self, target: bytearray, piece: bytes) -> None:
        self._head_bytes += len(piece)
        if self._head_bytes > edge_limits.PART_HEAD_BYTES:
            raise _invalid(f"the head of a part has more than {edge_limits.PART_HEAD_BYTES} bytes")
        target += piece

    def _on_header_end(self) -> None:
        self._headers[self._field.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._field.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        disposition = self._headers.get("content-disposition")
        if disposition is None:
            raise _invalid("a part has no content-disposition")
        _, options = parse_options_header(disposition)
        if b"name" not in options:
            raise _invalid("a part has no name")
        filename = options.get(b"filename")
        name = options[b"name"].decode("utf-8", "replace")
        self._events.append(PartBegin(name, None if filename is None else filename.decode("utf-8", "replace")))

    def _on_end(self) -> None:
        self._has_ended = True


def _invalid(words: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no multipart/form-data: {words}", code="invalid_multipart")
