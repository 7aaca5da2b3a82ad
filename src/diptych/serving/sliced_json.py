"""JSON of clients, decoded and encoded in short steps, with limits that are asked before anything is built.

msgspec does the work, on one slice of about SLICE_BYTES at a time: a call that takes all of a long body would hold the
interpreter's lock, and with it every other request, until it is done. In a thread, these functions let others go on
between two slices, and end there when their client is gone. What is a slice is found by the brackets, commas and
quotes; whether it is JSON, by msgspec.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.long_work import check_wanted

SLICE_BYTES = edge_limits.BODY_NAME_BYTES  # a name is never cut
SMALL_BYTES = 2**13  # of a text that is decoded in one call
DIRECT_BYTES, DIRECT_VALUES = 2**21, 2**15  # and of one that is, once its depth is known: a millisecond or two
_SPACE = b" \t\n\r"
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PLAIN = rb'[^\[\]{}"]++|' + _TEXT
_FLAT = rb"[\[{](?:" + _PLAIN + rb")*+[\]}]"  # an array or object with none in it
_NESTED = rb"[\[{](?:" + _PLAIN + rb"|" + _FLAT + rb")*+[\]}]"
_LEVELS = 2  # of what is passed in one step
_PASSED = re.compile(rb"(?:" + _PLAIN + rb"|" + _NESTED + rb")*+", re.DOTALL)
_PASSED_FLAT = re.compile(rb"(?:" + _PLAIN + rb")*+", re.DOTALL)
_TO_COMMA = re.compile(rb'(?:(?:[^\[\]{}",]++|' + _TEXT + rb"|" + _NESTED + rb")*+,)*+", re.DOTALL)  # the last one
_WHOLE_TEXT = re.compile(_TEXT, re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {0x5B: 1, 0x7B: 1, 0x5D: -1, 0x7D: -1}
# The inside of a text as far as it can be decoded by itself: pairs of surrogates stay together.
_PIECE = re.compile(
    rb'(?:[^"\\]++|\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}))*+',
    re.DOTALL,
)
_LONGEST_ESCAPE = 12
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_NUMBERS_AT_ONCE, _MEMBERS_AT_ONCE, _TEXTS_AT_ONCE = 8192, 64, 256
_value_decoder = msgspec.json.Decoder()
_raw_decoders: dict[bool, "msgspec.json.Decoder[Any]"] = {
    True: msgspec.json.Decoder(list[msgspec.Raw]),
    False: msgspec.json.Decoder(dict[str, msgspec.Raw]),
}
_encode = msgspec.json.Encoder().encode


def decode(data: bytes, most_fields: int | None = None) -> Any:
    """The value of a JSON text. most_fields: of the outermost object (None: any number). Raises InvalidRequestError for
    what is no JSON (strict: no NaN, no lone surrogates), for what is beyond BODY_DEPTH, BODY_VALUES or BODY_ELEMENTS of
    edge_limits, and, as soon as they are read, for too many fields."""
    return _outermost(data, is_raw=False, most_fields=most_fields)


def decode_fields(data: bytes, most_fields: int | None = None) -> dict[str, msgspec.Raw]:
    """The members of a JSON object as JSON; each is well-formed. Raises as ``decode`` does."""
    found = _outermost(data, is_raw=True, most_fields=most_fields)
    if not isinstance(found, dict):
        raise InvalidRequestError("body: Expected `object`, got `array`")
    return found


def _outermost(data: bytes, *, is_raw: bool, most_fields: int | None) -> Any:
    if not _is_direct(data):
        return _Reader(data, is_raw=is_raw, most_fields=most_fields).read()
    found = _decoded(data, _raw_decoders[False] if is_raw else _value_decoder, 0)
    if most_fields is not None and isinstance(found, dict) and len(found) > most_fields:
        raise _too_many_fields(most_fields)
    return found


def encode(value: Any) -> list[bytes]:
    """The JSON of a value, in pieces."""
    return list(_pieces(value))


@dataclass(slots=True)
class _Container:
    """An array or object that is open. opening: where its bracket is. begin: of what is not taken yet. element: where
    the last element that was found begins. mark: up to where one was looked for. is_cut: something was taken.
    needs_comma: a comma has to come first."""

    is_array: bool
    opening: int
    begin: int
    element: int
    mark: int
    is_cut: bool = False
    needs_comma: bool = False
    items: list[Any] = field(default_factory=list)
    members: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> list[Any] | dict[str, Any]:
        """What was taken."""
        return self.items if self.is_array else self.members


class _Reader:
    """Reads one text. is_raw: the members of the outermost object stay JSON. most_fields: of that object."""

    def __init__(self, data: bytes, *, is_raw: bool, most_fields: int | None = None) -> None:
        self._data = data
        self._is_raw = is_raw
        self._most_fields = most_fields
        self._open: list[_Container] = []
        self._num_values = 0
        self._num_elements = 0

    def read(self) -> Any:
        """The value. Raises InvalidRequestError."""
        data, position, end = self._data, 0, len(self._data)
        while position < end:
            check_wanted()
            pattern = _PASSED if 0 < len(self._open) < edge_limits.BODY_DEPTH - _LEVELS else _PASSED_FLAT
            found = pattern.match(data, position, min(position + SLICE_BYTES, end))
            assert found is not None  # it may be empty
            stop = found.end()
            if self._open and stop > position:
                self._pass(self._open[-1], position, stop)
                self._check_fields(self._open[0])
            if stop == end:
                break
            byte = data[stop]
            if byte in b"[{":
                self._enter(stop)
                position = stop + 1
            elif byte in b"]}":
                position = stop + 1
                outermost = self._leave(is_array=byte == 0x5D, closing=stop)
                if outermost is not None:
                    self._check_fields(outermost)
                    self._end(position)
                    return outermost.value
            elif not self._open:
                self._outside(stop)
                position = stop
            elif stop > position:
                position = stop  # the window ends, or a text that does not end in it begins
            else:
                self._find_element(self._open[-1], stop)
                position = self._long_text(self._open[-1], stop)
        raise _malformed("it ends too early", end)

    def _pass(self, around: _Container, begin: int, end: int) -> None:
        """Go past whole elements, and parts of one; take what is long enough."""
        self._count(self._data[begin:end])
        if around.needs_comma and (rest := self._data[around.begin : end].lstrip(_SPACE)):
            if rest[:1] != b",":
                raise _malformed("a comma is missing", around.begin)
            around.begin = around.element = end - len(rest) + 1
            around.needs_comma = False
            around.mark = around.begin
        if end - around.begin >= SLICE_BYTES:
            self._find_element(around, end)
            if around.element - around.begin >= SLICE_BYTES:
                self._take(around, around.element - 1)
                around.begin = around.element
        if end - max(around.element, around.begin) > edge_limits.BODY_GAP_BYTES:
            raise _malformed(f"more than {edge_limits.BODY_GAP_BYTES} bytes without a comma", end)

    def _find_element(self, around: _Container, end: int) -> None:
        """Find the last element that begins before ``end``."""
        data, mark = self._data, around.mark
        if any(data.find(byte, mark, end) >= 0 for byte in (b'"', b"[", b"{")):
            found = _TO_COMMA.match(data, mark, end)
            behind = mark if found is None else found.end()
        else:
            behind = max(mark, data.rfind(b",", mark, end) + 1)
        if behind > mark:
            around.element = around.mark = behind

    def _count(self, passed: bytes) -> None:
        """Add what was passed to what the body has."""
        num_texts = 0
        if b'"' in passed:
            passed, num_texts = _WHOLE_TEXT.subn(b"", passed)
        self._num_elements += passed.count(b",")
        self._add_values(num_texts + passed.count(b"[") + passed.count(b"{"))
        if self._num_elements > edge_limits.BODY_ELEMENTS:
            raise _too_much("elements of lists and members of objects", edge_limits.BODY_ELEMENTS)

    def _add_values(self, count: int) -> None:
        self._num_values += count
        if self._num_values > edge_limits.BODY_VALUES:
            raise _too_much("texts, lists and objects", edge_limits.BODY_VALUES)

    def _check_fields(self, outermost: _Container) -> None:
        if self._most_fields is not None and len(outermost.members) > self._most_fields:
            raise _too_many_fields(self._most_fields)

    def _enter(self, opening: int) -> None:
        """A container begins that was not passed: it is long, or deep."""
        self._add_values(1)
        if self._open:
            self._find_element(self._open[-1], opening)
        if len(self._open) == edge_limits.BODY_DEPTH:
            raise _too_deep()
        if not self._open and self._data[:opening].strip(_SPACE):
            raise _malformed("a bracket was not expected", opening)
        self._open.append(_Container(self._data[opening] == 0x5B, opening, opening + 1, opening + 1, opening + 1))

    def _leave(self, *, is_array: bool, closing: int) -> _Container | None:
        """A container ends; returned when it is the outermost. A short one is left for what is around it."""
        if not self._open or self._open[-1].is_array != is_array:
            raise _malformed("a bracket was not expected", closing)
        container = self._open.pop()
        around = self._open[-1] if self._open else None
        if around is not None and not container.is_cut and closing - container.opening < SLICE_BYTES:
            around.mark = closing + 1
            return None
        rest = self._data[container.begin : closing]
        if rest.strip(_SPACE):
            if container.needs_comma:
                raise _malformed("a comma is missing", container.begin)
            self._take(container, closing, is_outermost=around is None)
        elif container.is_cut and not container.needs_comma:
            raise _malformed("a value is missing", closing)
        if around is None:
            return container
        self._add(around, container.value, container.opening, closing + 1)
        return None

    def _take(self, container: _Container, end: int, *, is_outermost: bool | None = None) -> None:
        """Decode the elements from ``begin`` to ``end``."""
        inside = self._data[container.begin : end]
        if not inside.strip(_SPACE):
            raise _malformed("a value is missing", end)
        container.is_cut = True
        decoder = _raw_decoders[container.is_array] if self._is_raw else _value_decoder
        found = _decoded((b"[%b]" if container.is_array else b"{%b}") % inside, decoder, container.begin - 1)
        if self._is_raw and not (len(self._open) == 1 if is_outermost is None else is_outermost):
            return
        if isinstance(found, list):
            container.items += found
        else:
            container.members.update(found)

    def _add(self, around: _Container, value: Any, begin: int, end: int) -> None:
        """Put a long value in, which stands between ``begin`` and ``end``."""
        if around.needs_comma:
            raise _malformed("a comma is missing", around.begin)
        if around.element > around.begin:
            self._take(around, around.element - 1)
        name = self._data[around.element : begin]
        if self._is_raw:
            value = msgspec.Raw(memoryview(self._data)[begin:end]) if len(self._open) == 1 else None
        if not around.is_array:
            found = _decoded(b"{%bnull}" % name, _value_decoder, around.element - 1)
            if len(found) != 1:
                raise _malformed("a comma is missing", around.element)
            around.members.update(dict.fromkeys(found, value))
        elif name.strip(_SPACE):
            raise _malformed("a comma is missing", around.element)
        else:
            around.items.append(value)
        around.begin = around.element = around.mark = end
        around.is_cut = around.needs_comma = True

    def _long_text(self, around: _Container, quote: int) -> int:
        """Put a text in that does not end in its window. Returns its end."""
        data, position, end = self._data, quote + 1, len(self._data)
        pieces = []
        while True:
            check_wanted()
            window = min(position + SLICE_BYTES, end)
            if data.find(b"\\", position, window) < 0:
                stop = data.find(b'"', position, window)
                stop = window if stop < 0 else stop
            else:
                found = _PIECE.match(data, position, window)
                assert found is not None  # it may be empty
                stop = found.end()
            is_last = stop < end and data[stop] == 0x22
            while not is_last and stop > position and stop < end and data[stop] & 0xC0 == 0x80:
                stop -= 1  # a character stays together
            if stop == end:
                raise _malformed("a text does not end", end)
            if not is_last and stop == position:  # no escape
                _decoded(b'"%b"' % data[stop : stop + _LONGEST_ESCAPE], _value_decoder, stop - 1)
                raise _malformed("a text has an invalid escape", stop)
            pieces.append(_decoded(b'"%b"' % data[position:stop], _value_decoder, position - 1))
            position = stop
            if is_last:
                break
        if not around.is_array and data[position + 1 : position + SLICE_BYTES].lstrip(_SPACE)[:1] == b":":
            text = f"a name in the body has more than {SLICE_BYTES} bytes with its quotes (byte {quote})"
            raise InvalidRequestError(text, code="name_too_long")
        self._add(around, "" if self._is_raw else "".join(pieces), quote, position + 1)
        return position + 1

    def _outside(self, stop: int) -> None:
        """Bytes before the first bracket."""
        if stop >= edge_limits.BODY_GAP_BYTES or self._data[: stop + 1].strip(_SPACE):
            raise _malformed("a list or an object was expected", stop)

    def _end(self, position: int) -> None:
        """Bytes behind the last bracket."""
        if len(self._data) - position > edge_limits.BODY_GAP_BYTES or self._data[position:].strip(_SPACE):
            raise _malformed("it goes on behind its end", position)


def _is_direct(data: bytes) -> bool:
    """Whether one call decodes it soon. Raises InvalidRequestError for one that is too deep."""
    num_brackets = data.count(b"[") + data.count(b"{")
    if len(data) > SMALL_BYTES and (len(data) > DIRECT_BYTES or num_brackets + data.count(b",") > DIRECT_VALUES):
        return False
    if num_brackets > edge_limits.BODY_DEPTH:
        brackets = _WHOLE_TEXT.sub(b"", data).translate(None, _NOT_BRACKETS)
        if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > edge_limits.BODY_DEPTH:
            raise _too_deep()
    return True


def _too_deep() -> InvalidRequestError:
    message = f"the body has lists or objects more than {edge_limits.BODY_DEPTH} deep in each other"
    return InvalidRequestError(message, code="body_too_deep")


def _too_many_fields(most: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body has more than {most} fields", code="too_many_fields")


def _decoded(data: bytes, decoder: "msgspec.json.Decoder[Any]", offset: int) -> Any:
    """offset: where these bytes begin, for the message of an error."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"body: {error}") from None
    except UnicodeDecodeError as error:
        raise _malformed(_not_utf8(data, error, offset)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        words = _AT_BYTE.sub(lambda found: f"(byte {int(found[1]) + offset})", str(error))
        raise _malformed(words) from None


def _not_utf8(data: bytes, error: UnicodeDecodeError, offset: int) -> str:
    """Where a body is no UTF-8. The decoder counts from the beginning of a text in it."""
    try:
        data.decode()
    except UnicodeDecodeError as found:
        return f"byte {found.start + offset} (0x{data[found.start]:02x}) is not UTF-8"
    return str(error)


def _malformed(why: str, position: int | None = None) -> InvalidRequestError:
    where = "" if position is None else f" (byte {position})"
    return InvalidRequestError(f"the body is not valid JSON: {why}{where}", code="invalid_json")


def _too_much(what: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body has more than {limit} {what}", code="too_many_values")


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > SLICE_BYTES:
        yield b'"'
        for begin in range(0, len(value), SLICE_BYTES):
            yield _encode(value[begin : begin + SLICE_BYTES])[1:-1]
        yield b'"'
    elif isinstance(value, dict) and not _is_light(value):
        mark = b"{"
        for name, member in value.items():
            yield mark + _encode(name) + b":"
            yield from _pieces(member)
            mark = b","
        yield b"}"
    elif isinstance(value, list | tuple) and value:
        yield from _list_pieces(value)
    else:
        yield _encode(value)


def _list_pieces(values: Sequence[Any]) -> Iterator[bytes]:
    mark = b"["
    count = _TEXTS_AT_ONCE if isinstance(values[0], str | msgspec.Raw) else _NUMBERS_AT_ONCE
    for begin in range(0, len(values), count):
        check_wanted()
        part = values[begin : begin + count]
        if all(isinstance(each, dict | list | tuple) or not _is_short(each) for each in part[:1]):
            for each in part:
                yield mark
                yield from _pieces(each)
                mark = b","
        else:
            yield mark + _encode(part)[1:-1]
            mark = b","
    yield b"]"


def _is_light(members: dict[str, Any]) -> bool:
    return len(members) <= _MEMBERS_AT_ONCE and all(map(_is_short, members.values()))


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= SLICE_BYTES)
