"""Text that waits until it is known what it is."""

from collections import deque

PIECE = 4096  # characters: the longest piece


class HeldText:
    """Grows at its end, and is taken from its start. No character of it is copied while it waits: a text to which each
    token is added costs the square of its length."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, text: str) -> None:
        """More text behind it."""
        self._size += len(text)
        self._pieces.extend(_pieces_of(text))

    def prepend(self, text: str) -> None:
        """Text before it."""
        self._size += len(text)
        self._pieces.extendleft(reversed(_pieces_of(text)))

    def pop(self) -> str:
        """Take the first piece, which has at most PIECE characters; empty where there is none."""
        if not self._pieces:
            return ""
        piece = self._pieces.popleft()
        self._size -= len(piece)
        return piece

    def take(self, size: int | None = None) -> str:
        """Take the first ``size`` characters, or all of them."""
        left = self._size if size is None else min(size, self._size)
        taken: list[str] = []
        while left > 0:
            piece = self.pop()
            if len(piece) > left:
                self.prepend(piece[left:])
                piece = piece[:left]
            taken.append(piece)
            left -= len(piece)
        return "".join(taken)

    def take_back(self, before: "HeldText") -> None:
        """Take all of the text ``before`` this one, which is empty afterwards."""
        while before._pieces:
            self._pieces.appendleft(before._pieces.pop())
        self._size, before._size = self._size + before._size, 0


def _pieces_of(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
