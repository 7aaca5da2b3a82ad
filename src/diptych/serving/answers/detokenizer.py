"""From token ids to text, one token at a time: characters that span tokens, and stop strings that span tokens.

Owns the text of one growing sequence. Must never know requests, sockets or HTTP.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from diptych.serving.answers.native_panic import is_failure

_CONTEXT_TOKENS = 6  # prompt tokens that a decoder needs to see to know about a leading space
_MAX_PENDING = 8  # a character has at most 4 bytes; more tokens without one are bytes that never become text
_KEEP_PENDING = 3
_REPLACEMENT = "\ufffd"


class WholeTexts(dict[int, str | None]):
    """The texts of single tokens that are whole characters (None: of others), looked up once each. Only where a token's
    text does not depend on its neighbours: see ``whole_texts``."""

    def __init__(self, fast: FastTokenizer) -> None:
        super().__init__()
        self._fast = fast

    def __missing__(self, token_id: int) -> str | None:
        text = _decode(self._fast, [token_id])
        self[token_id] = known = None if _REPLACEMENT in text else text
        return known


def whole_texts(fast: FastTokenizer) -> WholeTexts | None:
    """The WholeTexts of a byte-level tokenizer, whose tokens are bytes and nothing else; None for other kinds."""
    return WholeTexts(fast) if isinstance(fast.decoder, ByteLevel) else None


class Detokenizer:
    """Text of one sequence. Text comes out only as whole characters; ``flush`` gives what can never be completed.
    Tokens that the tokenizer's decoder fails on become U+FFFD: they cost the answer nothing else. Special tokens have
    no text, but those in ``shown``."""

    __slots__ = ("_fast", "_pending", "_shown", "_stream", "_texts")

    def __init__(
        self,
        fast: FastTokenizer,
        prompt_token_ids: Sequence[int],
        texts: WholeTexts | None = None,
        shown: Mapping[int, str] = {},
    ) -> None:
        self._fast = fast
        self._shown = shown
        self._pending: list[int] = []
        self._texts = texts
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:]) if texts is None else []
        if context and _decode(fast, context).endswith(_REPLACEMENT):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)  # with ``texts``: of what is pending

    def push(self, token_id: int) -> str:
        """The text that is complete with this token (often empty while a character is incomplete)."""
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        pending = self._pending
        if self._texts is not None and not pending:
            if (whole := self._texts[token_id]) is not None:
                return whole
            self._stream = DecodeStream(ids=[], skip_special_tokens=True)
        pending.append(token_id)
        try:
            text = self._stream.step(self._fast, token_id)
        except BaseException as error:  # the stream refuses some sequences that decode() accepts
            if not is_failure(error):
                raise
            return self._restart(0)
        if text is not None:
            pending.clear()
            return text
        if len(pending) > _MAX_PENDING:
            return self._restart(_KEEP_PENDING)
        return ""

    def flush(self) -> str:
        """The rest at the end of the sequence, bytes that are no character as U+FFFD."""
        rest = _decode(self._fast, self._pending) if self._pending else ""
        self._pending.clear()
        return rest

    def _restart(self, keep: int) -> str:
        done, kept = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        self._pending = []
        self._stream = DecodeStream(ids=[], skip_special_tokens=True)
        text = _decode(self._fast, done)
        return text + "".join(self.push(token_id) for token_id in kept)


def _decode(fast: FastTokenizer, token_ids: list[int]) -> str:
    """Text without special tokens; U+FFFD for tokens that the decoder fails on."""
    try:
        return fast.decode(token_ids)
    except BaseException as error:
        if not is_failure(error):
            raise
        return _REPLACEMENT


class StopStrings:
    """Holds text back while it may be the beginning of a stop string; nothing after a match ever comes out. The work
    for an answer grows with its length, not with what is held back."""

    __slots__ = ("_held", "_num_held", "_searches", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held: deque[str] = deque()
        self._num_held = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be sent now. After a match ``matched`` names the stop string."""
        if self.matched is not None:
            return ""
        before = self._num_held  # characters in front of the text
        found = []
        for search in self._searches:
            end = search.push(text)
            if end is not None:
                found.append((before + end - len(search.stop), -len(search.stop), search.stop))
        if text:
            self._held.append(text)
            self._num_held += len(text)
        if found:
            at, _, self.matched = min(found)
            sent = self._release(at)
            self._held.clear()
            self._num_held = 0
            return sent
        return self._release(self._num_held - max((search.num_matched for search in self._searches), default=0))

    def flush(self) -> str:
        """What was held back, at an end that is no stop string."""
        for search in self._searches:
            search.num_matched = 0
        return self._release(self._num_held)

    def _release(self, size: int) -> str:
        """The first characters of what is held back."""
        self._num_held -= size
        pieces = []
        while size:
            piece = self._held.popleft()
            if len(piece) > size:
                self._held.appendleft(piece[size:])
                piece = piece[:size]
            pieces.append(piece)
            size -= len(piece)
        return "".join(pieces)


class _Search:
    """One stop string in a text that comes in pieces, as Knuth, Morris and Pratt search: no character is looked at
    again. num_matched: characters of the stop string that the text so far ends with."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0]  # by characters matched less one: how many of them are a beginning and an end of these
        size = 0
        for character in stop[1:]:
            while size and character != stop[size]:
                size = self._borders[size - 1]
            size += character == stop[size]
            self._borders.append(size)

    def push(self, text: str) -> int | None:
        """Where in the text the stop string first ends; None: not in it."""
        stop, borders, matched = self.stop, self._borders, self.num_matched
        at = 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            character = text[at]
            while matched and character != stop[matched]:
                matched = borders[matched - 1]
            matched += character == stop[matched]
            at += 1
            if matched == len(stop):
                return at
        self.num_matched = matched
        return None
