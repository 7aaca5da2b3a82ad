"""The answers of one request as parts (content, reasoning, tool calls), for the writers of every dialect."""

from collections.abc import Sequence

from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.call_readers import AnswerPart, PartKind, joined_parts
from diptych.serving.answers.response.response_parser import ReadAnswer, ResponseParser


class AnswerReader:
    """Reads the deltas of each answer. parsers: one per answer; none at all where all text is content."""

    def __init__(self, parsers: Sequence[ResponseParser] = ()) -> None:
        self._parsers = parsers
        self.num_reasoning_tokens = 0  # of all answers; as exact as their deltas are short

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self._parsers

    def parts(self, delta: Delta) -> list[AnswerPart]:
        """What a delta adds to its answer; neighbours of a kind are joined."""
        if not self._parsers:
            return [AnswerPart(PartKind.CONTENT, delta.text)] if delta.text else []
        parser = self._parsers[delta.index]
        if parser.is_reasoning:
            self.num_reasoning_tokens += len(delta.token_ids)
        parts = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts = parts + parser.finish(is_cut=delta.finish_reason == "length")
        return joined_parts(parts)

    def whole(self, delta: Delta) -> ReadAnswer:
        """A whole answer, given as a single delta."""
        answer = ReadAnswer()
        answer.add(self.parts(delta))
        return answer

    def has_calls(self, index: int) -> bool:
        """Whether an answer has called a tool so far."""
        return bool(self._parsers) and self._parsers[index].num_calls > 0
