"""A stretch of content or reasoning: what of its text goes out, and what is white space at its edges."""

from diptych.serving.answers.response.call_readers import AnswerPart, PartKind
from diptych.serving.answers.response.response_template import FieldKind, ResponseField

_TEXT_KINDS = {FieldKind.CONTENT: PartKind.CONTENT, FieldKind.REASONING: PartKind.REASONING}


class TextRegion:
    """The text of one field. field None: text that no field takes. is_first: it begins the answer."""

    __slots__ = ("_begun", "_spaces", "field", "keeps_start", "strips")

    def __init__(self, opened: ResponseField | None, *, is_first: bool = False) -> None:
        self.field = opened
        self.strips = opened is None or bool(opened.content_args.get("strip", True))
        self.keeps_start = is_first
        self._spaces: list[str] = []  # white space that belongs to the text where more of it follows
        self._begun = False

    @property
    def is_reasoning(self) -> bool:
        """Whether its text is reasoning."""
        return self.field is not None and self.field.kind is FieldKind.REASONING

    @property
    def is_content(self) -> bool:
        """Whether its text is content."""
        return self.field is not None and self.field.kind is FieldKind.CONTENT

    def was_prefilled(self) -> None:
        """The text so far is the prompt's."""
        self._spaces = []
        self.keeps_start = False

    def push(self, text: str) -> list[AnswerPart]:
        """More text."""
        if self.field is None or self.field.kind not in _TEXT_KINDS:
            return []
        if not self.strips:
            return self._part(text)
        kept = text.rstrip()
        spaces, self._spaces = self._spaces, [text[len(kept) :]]
        if not kept:
            spaces.append(text)
            self._spaces = spaces
            return []
        kept = "".join([*spaces, kept])
        if not self._begun and not self.keeps_start:
            kept = kept.lstrip()
        return self._part(kept)

    def _part(self, text: str) -> list[AnswerPart]:
        assert self.field is not None
        join = "" if self._begun else self.field.join
        self._begun = True
        return [AnswerPart(_TEXT_KINDS[self.field.kind], join + text)] if join + text else []

    def end(self) -> list[AnswerPart]:
        """The answer ends: white space at the end of its content belongs to it."""
        is_plain = self.field is not None and self.field.open is None
        if is_plain and (space := "".join(self._spaces)) and (self._begun or self.keeps_start):
            return self._part(space)
        return []
