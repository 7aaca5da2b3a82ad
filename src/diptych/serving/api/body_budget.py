"""The memory of bodies that are being read: one budget in bytes for all connections of an app together."""

from collections.abc import Callable

from diptych.base.byte_size import size_words
from diptych.control.errors import UnavailableError


class BodyBudget:
    """Bounds the bytes of half-read bodies. Beyond ``max_bytes`` the body that has been read longest is refused: who
    never ends a body makes room for those who do."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # never more than max_bytes
        self._readings: dict[HalfReadBody, None] = {}  # those that hold bytes, the oldest first

    def add(self, body: "HalfReadBody", num_bytes: int) -> None:
        """Count bytes that came for ``body``. Raises UnavailableError where it is the one to be refused: when it is the
        oldest, or when the oldest cannot be woken."""
        self._readings.setdefault(body)
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._readings))
            if oldest is body or oldest.wake is None:
                self._refuse(body)
                raise self.refusal()
            self._refuse(oldest)
            oldest.wake()
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self, body: "HalfReadBody") -> None:
        """Give back what ``body`` holds; nothing the second time."""
        self._readings.pop(body, None)
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0

    def _refuse(self, body: "HalfReadBody") -> None:
        self.release(body)
        body.is_refused = True

    def refusal(self) -> UnavailableError:
        """What a refused request is answered."""
        message = f"bodies that are being read hold {size_words(self.max_bytes)}, the limit; send it again"
        return UnavailableError(message, retry_after_s=1.0, code="too_many_bodies")


class HalfReadBody:
    """The body of one request while it is read. wake: ends the wait for its next bytes, so that its task sees
    ``is_refused``; None where that cannot be done."""

    __slots__ = ("is_refused", "num_bytes", "wake")

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self.wake = wake
        self.num_bytes = 0
        self.is_refused = False
