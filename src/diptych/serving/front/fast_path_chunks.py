"""The usual chunk of a stream: it differs from one before it in nothing but its text, and the id of its one token.

Most chunks are so, and need not be decoded: what stands before and after the text is compared, and the text may hold
nothing that would end its JSON string. A form is learned from a chunk that was decoded, and tried on a changed one.
"""

import re
from collections.abc import Callable

from diptych.serving.front.relay_stream import NO_TOKEN, TEXT_HERE
from diptych.serving.front.reply_chunks import ChunkChoice, EngineChunk, UnreadableReplyError, read_chunk

MIN_TRIES, READ_A_TRY = 4, 8  # a stream whose chunks are seldom alike is not tried for long
MAX_LENGTHS = 128  # of chunks, kept of a form
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")
_TEXT = re.compile(
    rb'(?:[ !#-\[\]-~]+|\\["\\/bfnrt]|\xc2[\xa0-\xbf]|[\xc3-\xdf][\x80-\xbf]|\xe2\x80[\x80-\xa7\xaa-\xbf]'
    rb"|\xe2[\x81-\xbf][\x80-\xbf]|[\xe1\xe3-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3})+"
)  # within a JSON string, in UTF-8 (without all of it: what is left out is decoded, and with_whole_lines sees it)
_BEFORE_TEXT = re.compile(rb'"(?:text|content)"\s*:\s*"')
_BEFORE_ID = re.compile(rb'"token_ids"\s*:\s*\[\s*')
_TEXT_HERE, _ID_HERE = TEXT_HERE.encode(), 987_654_321


class ChunkForm:
    """head, tail: of the payload, around the text, where the engine does not name the token; where it does, ``middle``
    stands between the text and the id. before, after: what the client gets around the text. is_same: it gets the chunk
    as it is."""

    __slots__ = ("_after", "_before", "_head", "_heads", "_is_same", "_middle", "_tail", "num_read")

    def __init__(self, head: bytes, middle: bytes, tail: bytes, before: bytes, after: bytes, *, is_same: bool) -> None:
        self._head, self._middle, self._tail = b"data: " + head, middle, tail + b"\n\n\r\n"
        self._before, self._after = before, after + b"\r\n"
        self._is_same = is_same
        self._heads: dict[int, bytes] = {}  # length of a chunk -> its size, and the head
        self.num_read = 0

    def is_of(self, payload: bytes) -> bool:
        """Whether a payload has this form, as far as it does not depend on its text."""
        return payload.startswith(self._head[6:]) and payload.endswith(self._tail[:-4])

    def read(self, data: bytes) -> tuple[int, bytes] | None:
        """The token of a chunk of HTTP, and the chunk that the client gets; None: it is none of this form."""
        head = self._heads.get(len(data)) or self._head_of(data)
        if head is None or not (data.startswith(head) and data.endswith(self._tail)):
            return None
        begin, end, token_id = len(head), len(data) - len(self._tail), NO_TOKEN
        if self._middle:
            digits = data[data.find(self._middle, begin, end) + len(self._middle) : end]
            if not digits.isdigit():
                return None
            token_id, end = int(digits), end - len(digits) - len(self._middle)
        if _TEXT.fullmatch(data, begin, end) is None:
            return None
        self.num_read += 1
        if self._is_same:
            return token_id, data
        event = b"%b%b%b" % (self._before, data[begin:end], self._after)
        return token_id, b"%x\r\n%b" % (len(event) - 2, event)

    def _head_of(self, data: bytes) -> bytes | None:
        """What chunks of this length begin with, if this one does."""
        size = _SIZE.match(data)
        if (
            size is None
            or int(size[1], 16) != len(data) - size.end() - 2
            or not data.startswith(self._head, size.end())
        ):
            return None
        head = data[: size.end() + len(self._head)]
        if len(self._heads) < MAX_LENGTHS:
            self._heads[len(data)] = head
        return head


class ChunkForms:
    """Known forms of one stream's chunks. form: the one that its chunks have now (None: no known one)."""

    __slots__ = ("_num_read", "_num_tries", "form")

    def __init__(self) -> None:
        self.form: ChunkForm | None = None
        self._num_read = self._num_tries = 0

    def learn(self, payload: bytes, chunk: EngineChunk, written: Callable[[bytes, str], bytes]) -> ChunkForm | None:
        """The form of a chunk that brought one token; None: it is not usual, or chunks of this stream are seldom alike.
        written: what the client gets of such a payload with another text."""
        form = self.form
        if form is not None and form.is_of(payload):
            return form
        if form is not None:
            self._num_read += form.num_read
            self.form = None
        if self._num_tries >= MIN_TRIES + self._num_read // READ_A_TRY:
            return None
        self._num_tries += 1
        self.form = _form_of(payload, chunk, written)
        return self.form


def _text_of(chunk: EngineChunk) -> tuple[ChunkChoice, str] | None:
    """Choice and text of a chunk that brings one token and text, and nothing else that decides anything."""
    has_more = chunk.usage or chunk.error or chunk.prompt_token_ids or chunk.kv_transfer_params
    if has_more or len(chunk.choices) != 1:
        return None
    choice = chunk.choices[0]
    text = choice.text if choice.delta is None else choice.delta.content
    is_plain = choice.delta is None or (choice.delta.is_plain and choice.text is None)
    if not (is_plain and isinstance(text, str) and text) or choice.finish_reason is not None:
        return None
    return None if choice.prompt_token_ids or choice.num_tokens != 1 else (choice, text)


def _form_of(payload: bytes, chunk: EngineChunk, written: Callable[[bytes, str], bytes]) -> ChunkForm | None:
    found = _text_of(chunk)
    if found is None or b"\n" in payload or b"\r" in payload:
        return None
    choice, text = found
    quoted = text.encode() + b'"'
    begin = next((at.end() for at in _BEFORE_TEXT.finditer(payload) if payload.startswith(quoted, at.end())), None)
    if begin is None:  # it has escapes
        return None
    end = begin + len(quoted) - 1
    head, middle, tail = payload[:begin], b"", payload[end:]
    if choice.token_ids is not None:
        digits = b"%d" % choice.token_ids[0]
        name = _BEFORE_ID.search(payload, end)
        if name is None or not payload.startswith(digits, name.end()):
            return None
        middle, tail = payload[end : name.end()], payload[name.end() + len(digits) :]
    other = b"%b%b%b%b" % (head, _TEXT_HERE, middle and middle + b"%d" % _ID_HERE, tail)
    if not _differs_in_text_alone(other, chunk):
        return None
    event = written(other, TEXT_HERE)
    is_same = event == b"data: %b\n\n" % other
    parts = event.split(_TEXT_HERE)
    if len(parts) != 2 or (not is_same and b"%d" % _ID_HERE in event):
        return None
    return ChunkForm(head, middle, tail, parts[0], parts[1], is_same=is_same)


def _differs_in_text_alone(other: bytes, chunk: EngineChunk) -> bool:
    """Whether a payload is read as this chunk but for the text, which is TEXT_HERE, and the id."""
    try:
        found = read_chunk(other)
    except UnreadableReplyError:
        return False
    known, choice = chunk.choices[0], found.choices[0]
    if known.delta is None or choice.delta is None:
        text, choice.text = choice.text, known.text
    else:
        text, choice.delta.content = choice.delta.content, known.delta.content
    if known.token_ids is not None:
        if choice.token_ids != [_ID_HERE]:
            return False
        choice.token_ids = known.token_ids
    return text == TEXT_HERE and found == chunk
