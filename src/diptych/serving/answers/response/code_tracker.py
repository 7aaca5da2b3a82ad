"""Where a growing text is in code: within a fenced block, or within backticks on a line (CommonMark, in the main)."""

import re
from copy import copy

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
