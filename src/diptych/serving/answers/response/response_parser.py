"""From the text of an answer to its parts: content, reasoning and tool calls.

Text arrives in pieces of any size. Where they are cut does not change what the parts say; a whole answer is one piece.
All text is in some part, but for the marks of the format and white space around what stands between parts:

- A mark that does not begin a call of a tool of the request is text, and so is what follows it.
- A call within a block of code or between backticks is text, unless its mark is a special token of the model.
- Reasoning begins an answer; behind content or a call, its mark is text (but for formats with channels).
- A call within reasoning counts where its mark is a special token or begins a line, it is complete, and no call follows
  the reasoning. Where more text follows it, its own text stays in the reasoning, too.

Whether calls are calls or text may be known later, from what follows them: until then they wait (HeldCalls). What is
code follows CommonMark, in the main.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from enum import StrEnum
from typing import Any

from diptych.serving.answers.response.call_readers import (
    AnswerPart,
    CallReader,
    JsonCalls,
    NamedCall,
    PartKind,
    Reading,
    Tools,
    joined_parts,
)
from diptych.serving.answers.response.held_text import HeldText
from diptych.serving.answers.response.pattern import Pattern, PatternMatch, Prefix, Search
from diptych.serving.answers.response.response_template import FieldKind, ResponseField, ResponseTemplate, Source
from diptych.serving.answers.response.tagged_calls import TaggedCall
from diptych.serving.answers.response.text_region import TextRegion
from diptych.serving.answers.response.whole_calls import PythonCalls, WholeCalls

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MAX_HEAD = 64  # characters of a line that are looked at for a fence


class CodeTracker:
    """Knows the present line and the open fence."""

    def __init__(self) -> None:
        self._head = ""  # of the present line
        self._num_ticks = 0  # in it
        self._is_blank = True  # the line so far
        self.fence = ""  # the mark that has opened the present block

    @property
    def is_line_start(self) -> bool:
        """Whether nothing but space stands before this place in its line."""
        return self._is_blank

    @property
    def is_inline(self) -> bool:
        """Whether a backtick is open in this line."""
        return bool(self._num_ticks % 2) and not self.fence

    def push(self, text: str) -> None:
        """More text."""
        first, *lines = text.split("\n")
        self._extend(first)
        for line in lines:
            self._end_line()
            self._extend(line)

    def after(self, text: str) -> "CodeTracker":
        """A tracker that is behind this text, too."""
        other = copy(self)
        other.push(text)
        return other

    def _extend(self, piece: str) -> None:
        self._head = (self._head + piece[:_MAX_HEAD])[:_MAX_HEAD]
        self._num_ticks += piece.count("`")
        self._is_blank = self._is_blank and not piece.strip()

    def _end_line(self) -> None:
        found = _FENCE.match(self._head)
        if found is not None:
            mark = found.group(1)
            if not self.fence:
                info = self._head[found.end() :]
                self.fence = mark if mark[0] == "~" or "`" not in info else ""
            elif mark[0] == self.fence[0] and len(mark) >= len(self.fence) and not self._head[found.end() :].strip():
                self.fence = ""
        self._head, self._num_ticks, self._is_blank = "", 0, True


_JSON_ARGUMENTS = {"allow_non_json", "unquoted_keys", "string_delims"}


def reader_of(field: ResponseField, mark: str, captures: Mapping[str, str], tools: Tools) -> CallReader | None:
    """The reader of a field that was opened by this mark, with these captures. None where the mark names a tool that
    the request does not have."""
    is_named = len(field.name_source) == 1 and field.name_source[0] in captures
    is_named = is_named and field.arguments_source == ("content",)
    name = captures[field.name_source[0]].strip() if is_named else ""
    if is_named and name not in tools:
        return None
    if field.tags is not None:
        wrapper = field.tags.form.wrapper
        return TaggedCall(name, field.tags, tools[name], is_wrapped=bool(wrapper) and wrapper in mark)
    if field.content == "python-calls":
        return PythonCalls(tools)
    if field.content == "json" and set(field.content_args) <= _JSON_ARGUMENTS:
        marks = [(str(pair[0]), str(pair[1])) for pair in field.content_args.get("string_delims", ())]
        if is_named:
            return NamedCall(name, field.close, marks)
        depth = 1 if field.each else 2
        if len(field.name_source) == len(field.arguments_source) == depth:
            keys = (field.name_source[-1], field.arguments_source[-1])
            needs = field.needs_arguments
            return JsonCalls(keys, tools, field.close, marks, needs_arguments=needs)

    def read(element: Any) -> tuple[str, Any]:
        scope = {**captures, **(element if field.each else {"content": element})}
        return str(_follow(scope, field.name_source)).strip(), _follow(scope, field.arguments_source)

    return WholeCalls(field.content, field.content_args, read, tools, field.close, is_list=field.each)


def _follow(scope: Mapping[str, Any], source: Source) -> Any:
    value: Any = scope
    for key in source:
        value = value[key]
    return value


class Enclosure(StrEnum):
    """What a call stands in."""

    NONE = "none"
    REASONING = "reasoning"  # waits for the end of the answer
    FENCE = "fence"  # a block of code: waits for its end
    INLINE = "inline"  # a backtick is open: waits for another one, or the end of the line


class HeldCalls:
    """What waits, in the order of the text: the calls in one enclosure, and the text between them. late: calls in
    reasoning that went on; they count if no others follow. end: the position behind the last call."""

    def __init__(self) -> None:
        self.enclosure = Enclosure.NONE
        self.late: list[AnswerPart] = []
        self.end = -1
        self._items: list[tuple[str, list[AnswerPart]]] = []
        self._region: TextRegion | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._items)

    @property
    def region(self) -> TextRegion:
        """The region that they stand in."""
        assert self._region is not None
        return self._region

    def add_calls(self, enclosure: Enclosure, text: str, parts: list[AnswerPart], region: TextRegion, end: int) -> None:
        """Some calls, and the text that they are."""
        self.enclosure, self._region, self.end = enclosure, region, end
        self._items.append((text, parts))

    def add_text(self, text: str) -> None:
        """Text that follows them."""
        self._items.append((text, []))

    def take(self, *, keeps_calls: bool) -> Iterator[tuple[str, list[AnswerPart]]]:
        """All of it, which waits no longer. keeps_calls: they become late ones."""
        items, self._items = self._items, []
        self.enclosure = Enclosure.NONE
        if keeps_calls:
            self.late += [part for _, parts in items for part in parts]
        return iter(items)


@dataclasses.dataclass(slots=True)
class ReadCall:
    """A tool call of a whole answer. arguments: JSON, as far as the model wrote it."""

    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class ReadAnswer:
    """A whole answer. Texts are None where the answer has no such part."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ReadCall] = dataclasses.field(default_factory=list)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """More of it."""
        content: list[str] = []
        reasoning: list[str] = []
        for part in joined_parts(parts):
            if part.kind is PartKind.CONTENT:
                content.append(part.text)
            elif part.kind is PartKind.REASONING:
                reasoning.append(part.text)
            elif part.kind is PartKind.CALL:
                self.calls.append(ReadCall(part.text))
            else:
                self.calls[-1].arguments += part.text
        if content:
            self.content = "".join([self.content or "", *content])
        if reasoning:
            self.reasoning = "".join([self.reasoning or "", *reasoning])


@dataclasses.dataclass(slots=True)
class _OpenCall:
    """Text that may be a call. start: of its mark. raw: the text behind the mark, where it may become text again.
    enclosure: what it stands in. closing: looks for the closing mark, once the reader is over."""

    field: ResponseField
    mark: str
    start: int
    reader: CallReader
    enclosure: Enclosure
    raw: list[str] = dataclasses.field(default_factory=list)
    parts: list[AnswerPart] = dataclasses.field(default_factory=list)  # while they wait
    closing: Prefix | None = None
    has_begun: bool = False  # parts went out

    @property
    def waits(self) -> bool:
        """Whether it counts only when it is whole."""
        return self.field.exact or self.enclosure is not Enclosure.NONE


MAX_MISREAD = 8  # texts that were read to their end before they turned out to be no calls; later marks are text


class ResponseParser:
    """Reads one answer. tools: None when the request has none; fields of calls are then text. prompt_end: the end of
    the prompt, in which the template may have opened a field. max_calls: later calls are left out. special_tokens: of
    the model, as texts: where they are the marks of calls, those are no text."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt_end: str = "",
        tools: Tools | None = None,
        max_calls: int | None = None,
        special_tokens: Collection[str] = (),
    ) -> None:
        self._tools: Tools = tools or {}
        self._fields = [
            known
            for known in template.fields
            if known.open is not None and (tools is not None or known.kind is not FieldKind.CALLS)
        ]
        self._special = [token for token in special_tokens if any(token in text for text in template.texts)]
        self._implicit = template.implicit
        self._room = max_calls
        self._num_calls = 0  # that went out
        self._region = TextRegion(self._implicit, is_first=True)
        self._tracker = CodeTracker()
        self._call: _OpenCall | None = None
        self._held = HeldCalls()
        self._has_answered = False  # content or a call has begun
        self._num_misread = 0
        self._may_wait = True  # no call that waited was still open at the end of the answer
        self._undecided = HeldText()  # from ``_base`` on: what the search or the end of a call has looked at
        self._base = 0
        self._unread = HeldText()  # behind that
        self._targets: list[ResponseField | None] = []  # what the patterns of the search open; None: closes
        self._look(0)
        self.is_prefilled = False  # the prompt has begun the answer
        if begun := _begun_in_prompt(template, prompt_end):
            self.is_prefilled = True
            self.push(begun)
            self._num_calls = 0
            self._region.was_prefilled()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._region.is_reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def push(self, text: str) -> list[AnswerPart]:
        """What is certain now that the answer has this text, too."""
        parts: list[AnswerPart] = []
        self._unread.append(text)
        while self._step(parts):
            pass
        return self._limited(parts)

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """The answer is over: the rest. is_cut: a limit of tokens has ended it; a call that is open stays open then."""
        parts: list[AnswerPart] = []
        while self._end_call(is_cut, parts) or self._end_search(parts):
            while self._step(parts):
                pass
        self._advance(self._base + len(self._undecided), parts)
        if self._held.is_waiting:
            self._tracker.push("\n")
            is_text = self._held.enclosure is Enclosure.FENCE and not self._tracker.fence
            self._settle(parts, as_text=is_text)
        parts += self._region.end()
        if not self._num_calls and not any(part.kind is PartKind.CALL for part in parts):
            parts += self._held.late
        return self._limited(parts)

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Read on, as far as something is certain; whether there may be more."""
        if self._call is not None:
            return self._read_call(self._call, parts)
        piece = self._unread.pop()
        match = self._search.push(piece)
        self._undecided.append(piece)
        if match is None:
            self._advance(self._search.hold, parts)
            return len(self._unread) > 0
        self._cross(match, parts)
        return True

    def _look(self, position: int) -> None:
        """Look for what may come in the present region from ``position`` on, behind what is decided."""
        self._unread.take_back(self._undecided)
        opened = self._region.field
        is_outside = opened is self._implicit
        self._targets = [
            known
            for known in self._fields
            if (known.kind is FieldKind.CALLS and (is_outside or self._region.is_content or self._region.is_reasoning))
            or (is_outside and known.kind is not FieldKind.CALLS and self._may_open(known))
        ]
        patterns: list[Pattern] = [known.open for known in self._targets if known is not None and known.open]
        if opened is not None and opened.close is not None:
            patterns.append(opened.close)
            self._targets.append(None)
        self._search = Search(patterns, position)

    def _may_open(self, known: ResponseField) -> bool:
        return known.kind is not FieldKind.REASONING or known.anywhere or not self._has_answered

    def _advance(self, position: int, parts: list[AnswerPart]) -> None:
        """Text before ``position`` belongs to the present region."""
        size = position - self._base
        if size > 0:
            self._base = position
            self._take(self._undecided.take(size), parts)

    def _take(self, text: str, parts: list[AnswerPart]) -> None:
        """This text belongs to the present region."""
        if self._held.is_waiting:
            text = self._hold(text, parts)
        self._tracker.push(text)
        if not self._region.is_reasoning and text.strip():
            self._has_answered = True
        parts += self._region.push(text)

    def _hold(self, text: str, parts: list[AnswerPart]) -> str:
        """Text behind calls that wait. What is left of it once they are settled."""
        held = self._held
        if held.enclosure is Enclosure.REASONING:
            if not text.strip():
                held.add_text(text)
                return ""
            self._settle(parts, as_text=True, is_late=True)
            return text
        at = 0
        for line in text.splitlines(keepends=True):
            if held.enclosure is Enclosure.INLINE:
                ticks, breaks = line.find("`"), line.find("\n")
                if ticks >= 0 or breaks >= 0:
                    self._settle(parts, as_text=ticks >= 0)
                    break
            self._tracker.push(line)
            held.add_text(line)
            at += len(line)
            if held.enclosure is Enclosure.FENCE and not self._tracker.fence:
                self._settle(parts, as_text=True)
                break
        return text[at:]

    def _settle(self, parts: list[AnswerPart], *, as_text: bool, is_late: bool = False) -> None:
        """What waits is text, or it is calls. is_late: it is text, and calls too if no others follow."""
        region = self._held.region
        for text, calls in self._held.take(keeps_calls=is_late):
            if as_text or not calls:
                parts += region.push(text)
            else:
                self._region = self._region if region.is_reasoning else TextRegion(self._implicit)
                region = self._region
                self._begin_calls()
                parts += calls
        if as_text and not region.is_reasoning:
            self._has_answered = True

    def _begin_calls(self) -> None:
        self._has_answered = True
        self._tracker = CodeTracker()

    def _cross(self, match: PatternMatch, parts: list[AnswerPart]) -> None:
        """A marker was found: a region ends or begins, or a call may begin."""
        target = self._targets[match.number]
        self._advance(match.start, parts)
        mark = self._undecided.take(match.end - match.start)
        self._base = match.end
        groups = {name: mark[a - match.start : b - match.start] for name, (a, b) in match.groups.items()}
        if target is not None and target.kind is FieldKind.CALLS:
            self._open_call(target, mark, match.start, groups, parts)
            return
        if target is not None and not self._may_open(target):
            self._as_text(mark, parts)
            return
        self._region = TextRegion(target if target is not None else self._implicit)
        self._tracker = CodeTracker()
        self._look(match.end)

    def _as_text(self, mark: str, parts: list[AnswerPart]) -> None:
        """A mark is text; what follows is looked at again, but for one character where the mark is empty."""
        if not mark:
            self._unread.take_back(self._undecided)
            mark = self._unread.take(1)
            self._base += len(mark)
        self._take(mark, parts)
        self._look(self._base)

    def _open_call(
        self, opened: ResponseField, mark: str, start: int, groups: dict[str, str], parts: list[AnswerPart]
    ) -> None:
        space = mark[: len(mark) - len(mark.lstrip())]
        tracker = self._tracker.after(space)
        is_special = any(token in mark for token in self._special)
        held = self._held.enclosure if self._held.is_waiting else Enclosure.NONE
        if (held is Enclosure.FENCE and not tracker.fence) or (held is Enclosure.INLINE and "\n" in space):
            self._settle(parts, as_text=held is Enclosure.FENCE)
        enclosure = self._enclosure(tracker, is_special=is_special)
        begins_line = tracker.is_line_start or self._is_behind_call(start)
        is_possible = begins_line or (not opened.exact and (is_special or enclosure is not Enclosure.REASONING))
        reader = reader_of(opened, mark, groups, self._tools) if is_possible else None
        if reader is None:
            self._as_text(mark, parts)
            return
        call = _OpenCall(opened, mark, start, reader, enclosure)
        if (call.waits and not self._may_wait) or self._num_misread >= MAX_MISREAD:
            self._as_text(mark, parts)
            return
        self._unread.take_back(self._undecided)
        self._call = call

    def _is_behind_call(self, start: int) -> bool:
        return self._held.is_waiting and self._held.end == start

    def _enclosure(self, tracker: CodeTracker, *, is_special: bool) -> Enclosure:
        """What a call at this place stands in."""
        if self._region.is_reasoning:
            return Enclosure.REASONING
        if self._held.is_waiting and self._held.enclosure is not Enclosure.REASONING:
            return self._held.enclosure
        if is_special or not self._region.is_content:
            return Enclosure.NONE
        return Enclosure.FENCE if tracker.fence else Enclosure.INLINE if tracker.is_inline else Enclosure.NONE

    def _read_call(self, call: _OpenCall, parts: list[AnswerPart]) -> bool:
        reader = call.reader
        if call.closing is None:
            text = self._unread.pop()
            self._base += len(text)
            if not call.has_begun:
                call.raw.append(text)
            self._pass(call, reader.push(text), parts)
            if reader.reading is Reading.REFUSED or (call.waits and reader.is_broken):
                self._refuse(call, parts)
                return True
            if reader.reading not in (Reading.OVER, Reading.EMPTY):
                return len(self._unread) > 0
            self._end_reading(call)
        if not self._looks_for_end(call):
            return False
        self._close_call(call, parts)
        return True

    def _end_reading(self, call: _OpenCall) -> None:
        """End reading calls: what their reader has left over is looked at again, for the closing mark first."""
        self._unread.prepend(call.reader.rest)
        self._base -= len(call.reader.rest)
        call.closing = Prefix(call.field.close)

    def _looks_for_end(self, call: _OpenCall) -> bool:
        """Look for the closing mark in what is not read yet. Whether it is certain that it is there or not."""
        assert call.closing is not None
        while not call.closing.is_over and (piece := self._unread.pop()):
            call.closing.push(piece)
            self._undecided.append(piece)
        return call.closing.is_over

    def _pass(self, call: _OpenCall, new: list[AnswerPart], parts: list[AnswerPart]) -> None:
        """Parts of a call go out, or wait."""
        if call.waits:
            call.parts += new
        elif new:
            if not call.has_begun:
                call.has_begun = True
                self._settle_before_call(parts)
                self._begin_calls()
            parts += new

    def _settle_before_call(self, parts: list[AnswerPart]) -> None:
        """A call follows: calls that wait in reasoning are none."""
        if self._held.is_waiting:
            self._settle(parts, as_text=self._held.enclosure is Enclosure.REASONING)
        self._held.late = []

    def _close_call(self, call: _OpenCall, parts: list[AnswerPart]) -> None:
        """Go on behind a call, where its closing mark is or is not."""
        assert call.closing is not None
        size, reader = call.closing.size, call.reader
        is_empty = reader.reading is Reading.EMPTY
        if isinstance(reader, NamedCall) and is_empty and size:
            self._pass(call, reader.without_arguments(), parts)
        is_whole = is_empty or reader.is_complete
        is_closed = bool(size) or call.field.close is None or not call.field.exact
        if (is_empty and not size) or (call.waits and not (is_whole and is_closed)):
            self._refuse(call, parts)
            return
        closing, self._base = self._undecided.take(size), self._base + size
        self._call = None
        if call.enclosure is not Enclosure.NONE:
            raw = self._raw(call) + closing
            self._held.add_calls(call.enclosure, raw, call.parts, self._region, self._base)
            self._tracker.push(raw)
        else:
            if call.parts:
                self._settle_before_call(parts)
                self._begin_calls()
                parts += call.parts
            self._region = TextRegion(self._implicit)
        self._look(self._base)

    def _raw(self, call: _OpenCall) -> str:
        """The text of a call from its mark on, as far as its reader went."""
        raw = "".join([call.mark, *call.raw])
        return raw[: len(raw) - len(call.reader.rest)]

    def _refuse(self, call: _OpenCall, parts: list[AnswerPart], *, is_end: bool = False) -> None:
        """Take the text for no call: its mark is text, and what follows is looked at again. is_end: of the answer."""
        self._num_misread += is_end or isinstance(call.reader, WholeCalls | PythonCalls)
        self._unread.take_back(self._undecided)
        if call.closing is None:
            self._unread.prepend(call.reader.rest)
        self._unread.prepend(self._raw(call)[len(call.mark) :])
        self._call = None
        self._base = call.start + len(call.mark)
        self._as_text(call.mark, parts)

    def _end_call(self, is_cut: bool, parts: list[AnswerPart]) -> bool:
        """The answer ends in a call; whether there was one."""
        call = self._call
        if call is None:
            return False
        if call.closing is None:
            self._may_wait = self._may_wait and not call.waits
            self._pass(call, call.reader.end(is_cut=is_cut), parts)
            if call.reader.reading is Reading.REFUSED:
                self._refuse(call, parts, is_end=True)
                return True
            self._end_reading(call)
        self._looks_for_end(call)
        self._close_call(call, parts)
        return True

    def _end_search(self, parts: list[AnswerPart]) -> bool:
        match = self._search.finish()
        if match is not None:
            self._cross(match, parts)
        return match is not None

    def _limited(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """The parts without calls beyond ``max_calls``."""
        kept = []
        for part in parts:
            self._num_calls += part.kind is PartKind.CALL
            is_call = part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
            if not is_call or self._room is None or self._num_calls <= self._room:
                kept.append(part)
        return kept


def _begun_in_prompt(template: ResponseTemplate, prompt_end: str) -> str:
    """What the prompt says already of the answer."""
    end = -1
    for match in _matches(template.anchor, prompt_end):
        end = match.end
    if end >= 0:
        return prompt_end[end:]
    bare = prompt_end.rstrip()
    is_open = template.thinks is not None and bare.endswith(template.thinks[0])
    return prompt_end[len(bare) - len(template.thinks[0]) :] if is_open and template.thinks is not None else ""


def _matches(pattern: Pattern, text: str) -> Iterator[PatternMatch]:
    at = 0
    while at < len(text):
        search = Search([pattern], at)
        match = search.push(text, at) or search.finish()
        if match is None:
            return
        yield match
        at = match.end
