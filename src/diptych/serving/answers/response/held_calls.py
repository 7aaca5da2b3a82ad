"""Calls that wait: whether they are calls or text is known later, from what follows them."""

from collections.abc import Iterator
from enum import StrEnum

from diptych.serving.answers.response.call_readers import AnswerPart
from diptych.serving.answers.response.text_region import TextRegion


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
