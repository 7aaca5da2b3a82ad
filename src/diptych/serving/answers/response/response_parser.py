"""From the text of an answer to its parts: content, reasoning and tool calls.

Text arrives in pieces of any size. Where they are cut does not change what the parts say; a whole answer is one piece.
White space at the edges of reasoning, and around what stands between other parts, belongs to no part.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.serving.answers.response.call_readers import AnswerPart, CallReader, PartKind, Tools, reader_of
from diptych.serving.answers.response.pattern import Pattern, PatternMatch, Search
from diptych.serving.answers.response.response_template import FieldKind, ResponseField, ResponseTemplate

_TEXT_KINDS = {FieldKind.CONTENT: PartKind.CONTENT, FieldKind.REASONING: PartKind.REASONING}


@dataclass(slots=True)
class ReadCall:
    """A tool call of a whole answer. arguments: JSON, as far as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    """A whole answer. Texts are None where the answer has no such part."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ReadCall] = field(default_factory=list)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """More of it."""
        for part in parts:
            if part.kind is PartKind.CONTENT:
                self.content = (self.content or "") + part.text
            elif part.kind is PartKind.REASONING:
                self.reasoning = (self.reasoning or "") + part.text
            elif part.kind is PartKind.CALL:
                self.calls.append(ReadCall(part.text))
            else:
                self.calls[-1].arguments += part.text


class ResponseParser:
    """Reads one answer. tools: None when the request has none; fields of calls are then text. prompt_end: the end of
    the prompt, in which the template may have opened a field. max_calls: later calls are left out."""

    def __init__(
        self, template: ResponseTemplate, prompt_end: str = "", tools: Tools | None = None, max_calls: int | None = None
    ) -> None:
        self._tools: Tools = tools or {}
        self._fields = [
            known
            for known in template.fields
            if known.open is not None and (tools is not None or known.kind is not FieldKind.CALLS)
        ]
        self._implicit = template.implicit
        self._room = max_calls
        self._num_calls = 0
        self._region = _OpenField(self._implicit, is_first=True)
        self._text = ""  # from ``_base`` on: what is not decided yet
        self._base = 0
        self._search = self._new_search(0)
        self.is_prefilled = False  # the prompt has begun the answer
        if begun := _behind_anchor(template, prompt_end):
            self.is_prefilled = True
            self.push(begun)
            self._num_calls = 0
            self._region.was_prefilled()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        opened = self._region.field
        return opened is not None and opened.kind is FieldKind.REASONING

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def push(self, text: str) -> list[AnswerPart]:
        """What is certain now that the answer has this text, too."""
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            start = self._search.position - self._base
            match = self._search.push(self._text, start)
            if match is None:
                self._advance(self._search.hold, parts)
                return self._limited(parts)
            self._cross(match, parts)

    def finish(self) -> list[AnswerPart]:
        """The answer is over: the rest."""
        parts: list[AnswerPart] = []
        while match := self._search.finish():
            self._cross(match, parts)
            again = self._search.push(self._text, self._search.position - self._base)
            while again is not None:
                self._cross(again, parts)
                again = self._search.push(self._text, self._search.position - self._base)
        self._advance(self._base + len(self._text), parts)
        parts += self._region.end(is_last=True)
        return self._limited(parts)

    def _advance(self, position: int, parts: list[AnswerPart]) -> None:
        """Text before ``position`` belongs to the present region."""
        size = position - self._base
        if size:
            parts += self._region.push(self._text[:size], self._tools)
            self._text, self._base = self._text[size:], position

    def _cross(self, match: PatternMatch, parts: list[AnswerPart]) -> None:
        """A marker was found: one region ends, another begins."""
        self._advance(match.start, parts)
        marker = self._text[: match.end - match.start]
        groups = {name: self._text[a - self._base : b - self._base] for name, (a, b) in match.groups.items()}
        is_closing = self._closes(match.number)
        parts += self._region.end(marker if is_closing else "")
        if is_closing:
            self._region = _OpenField(self._implicit)
        else:
            self._region = _OpenField(self._fields[match.number], marker, groups)
        self._text, self._base = self._text[len(marker) :], match.end
        self._search = self._new_search(match.end)

    def _closes(self, number: int) -> bool:
        return not self._is_outside or number == len(self._fields)

    @property
    def _is_outside(self) -> bool:
        """Whether no field with a marker is open."""
        return self._region.field is self._implicit

    def _new_search(self, position: int) -> Search:
        patterns: list[Pattern] = []
        if self._is_outside:
            patterns = [known.open for known in self._fields if known.open is not None]
        opened = self._region.field
        if opened is not None and opened.close is not None:
            patterns.append(opened.close)
        return Search(patterns, position)

    def _limited(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """The parts without calls beyond ``max_calls``."""
        kept = []
        for part in parts:
            self._num_calls += part.kind is PartKind.CALL
            is_call = part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
            if not is_call or self._room is None or self._num_calls <= self._room:
                kept.append(part)
        return kept


class _OpenField:
    """The field that the text belongs to now. field None: text that no field takes."""

    __slots__ = ("_begun", "_captures", "_marker", "_raw", "_reader", "_space", "field", "keeps_start", "strips")

    def __init__(
        self,
        opened: ResponseField | None,
        marker: str = "",
        captures: dict[str, str] | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        self.field = opened
        self.strips = opened is None or bool(opened.content_args.get("strip", True))
        self.keeps_start = is_first
        self._marker, self._captures = marker, captures or {}
        self._reader: CallReader | None = None
        self._raw = marker  # of a field of calls in which none was found yet
        self._space = ""
        self._begun = False

    def was_prefilled(self) -> None:
        """The text so far is the prompt's."""
        self._space = ""
        self.keeps_start = False

    def push(self, text: str, tools: Tools) -> list[AnswerPart]:
        """More text."""
        if self.field is None or self.field.kind is FieldKind.DROPPED:
            return []
        if self.field.kind is FieldKind.CALLS:
            if self._reader is None:
                self._reader = reader_of(self.field, self._captures, tools)
            if not self._reader.num_calls:
                self._raw += text
            return self._reader.push(text)
        return self._push_text(text)

    def _push_text(self, text: str) -> list[AnswerPart]:
        if not self.strips:
            return self._part(text)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        if not self._begun and not self.keeps_start:
            kept = kept.lstrip()
        return self._part(kept)

    def _part(self, text: str) -> list[AnswerPart]:
        assert self.field is not None
        join = "" if self._begun else self.field.join
        self._begun = True
        return [AnswerPart(_TEXT_KINDS[self.field.kind], join + text)] if join + text else []

    def end(self, marker: str = "", *, is_last: bool = False) -> list[AnswerPart]:
        """The region ends, with this closing marker. is_last: because the answer ends."""
        if self.field is None:
            return []
        if self.field.kind is FieldKind.CALLS:
            parts = self.push("", {}) + (self._reader.end() if self._reader is not None else [])
            if self._reader is not None and not self._reader.num_calls and (self._raw + marker).strip():
                return [*parts, AnswerPart(PartKind.CONTENT, self._raw + marker)]
            return parts
        if is_last and self.field.open is None and self._space and (self._begun or self.keeps_start):
            return self._part(self._space)
        return []


def _behind_anchor(template: ResponseTemplate, prompt_end: str) -> str:
    """What the prompt says already of the answer."""
    end, at = -1, 0
    while at < len(prompt_end):
        search = Search([template.anchor], at)
        match = search.push(prompt_end, at) or search.finish()
        if match is None:
            break
        end = at = match.end
    return prompt_end[end:] if end >= 0 else ""
