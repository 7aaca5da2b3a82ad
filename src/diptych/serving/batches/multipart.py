"""The parts of a multipart/form-data body (RFC 7578), as they come: no part is ever whole in memory.

Sans-I/O: bytes in, events out. Owns the grammar of the body; what to do with a part is the caller's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message as MailHead

from diptych.control.errors import InvalidRequestError

MAX_HEAD_BYTES = 16_384  # of one part
MAX_PARTS = 32
_PARAMETER = re.compile(r';\s*(name|filename)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins. filename: None for a plain field."""

    name: str
    filename: str | None


class MultipartParser:
    """Of one body. Raises InvalidRequestError for a content type or a body that is none."""

    def __init__(self, content_type: str) -> None:
        head = MailHead()
        head["content-type"] = content_type
        boundary = head.get_boundary()
        if head.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > 200:
            raise InvalidRequestError(
                f"content-type is {content_type[:80]!r}; a file is uploaded as multipart/form-data with a boundary",
                code="invalid_multipart",
            )
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = b"\r\n"  # so that the first boundary looks like all others
        self._state = "before"  # before, boundary, head, data, end
        self._num_parts = 0

    def feed(self, data: bytes) -> Iterator[PartBegin | bytes]:
        """What these bytes bring: beginnings of parts, and pieces of the part that began last."""
        self._buffer += data
        while True:
            if self._state in ("before", "data"):
                piece, is_found = self._take_data()
                if piece and self._state == "data":
                    yield piece
                if not is_found:
                    return
                self._state = "boundary"
            elif self._state == "boundary":
                if len(self._buffer) < 2:
                    return
                mark, self._buffer = self._buffer[:2], self._buffer[2:]
                if mark not in (b"\r\n", b"--"):
                    raise _invalid("a boundary is followed by other text")
                self._state = "end" if mark == b"--" else "head"
            elif self._state == "head":
                found = self._take_head()
                if found is None:
                    return
                yield found
                self._state = "data"
            else:
                self._buffer = b""
                return

    def close(self) -> None:
        """The body is over. Raises InvalidRequestError when its last boundary is missing."""
        if self._state != "end":
            raise _invalid("it ends before its last boundary")

    def _take_data(self) -> tuple[bytes, bool]:
        """(bytes before the next boundary, whether it is there)."""
        end = self._buffer.find(self._delimiter)
        if end >= 0:
            piece, self._buffer = self._buffer[:end], self._buffer[end + len(self._delimiter) :]
            return piece, True
        end = max(0, len(self._buffer) - len(self._delimiter) + 1)
        piece, self._buffer = self._buffer[:end], self._buffer[end:]
        return piece, False

    def _take_head(self) -> PartBegin | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _invalid(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        lines = self._buffer[:end].decode("utf-8", "replace").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                return _begin(value)
        raise _invalid("a part has no content-disposition")


def _begin(disposition: str) -> PartBegin:
    found = {
        match[1].lower(): re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
        for match in _PARAMETER.finditer(disposition)
    }
    if "name" not in found:
        raise _invalid("a part has no name")
    return PartBegin(found["name"], found.get("filename"))


def _invalid(words: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no multipart/form-data: {words}", code="invalid_multipart")
