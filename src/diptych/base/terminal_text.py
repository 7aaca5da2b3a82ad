"""Text of others on a terminal: shown, not obeyed.

What a command prints may come from a server, a model, or a file of others. While a command runs, its standard streams
escape control characters (``guarded``); what has to control the terminal, a bar or a colour, is written by ``console``,
or to the stream beneath (``own``).
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_ENDS_AND_TABS = (0x09, 0x0A)
_CONTROLS = [code for code in range(0x20) if code not in _ENDS_AND_TABS]
# Within JSON, where those above are escaped already, these forms are JSON's own.
_MORE_CONTROLS = [*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F)]
_MORE_CONTROLS += range(0x2066, 0x206A)
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _MORE_CONTROLS}


def shown(text: str) -> str:
    """The text with control characters, and those that turn the direction of writing, as escapes. Line ends and tabs
    stay; what is shown of two texts together is what is shown of each."""
    return text.translate(_SHOWN)


class ShownStream:
    """A text stream that writes what is shown of each text. beneath: the stream that gets it."""

    def __init__(self, beneath: TextIO) -> None:
        self.beneath = beneath

    def write(self, text: str) -> int:
        """Write what is shown of a text."""
        self.beneath.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write what is shown of each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Standard output and standard error escape what would control the terminal."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    streams: tuple[Any, Any] = ShownStream(own(sys.stdout)), ShownStream(own(sys.stderr))
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == streams:
            sys.stdout, sys.stderr = before


def own(stream: TextIO) -> TextIO:
    """The stream beneath a ShownStream, for what this program itself says to the terminal."""
    return stream.beneath if isinstance(stream, ShownStream) else stream


def console(*, is_error: bool = False, width: int | None = None) -> "ShownConsole":
    """A console on standard output, or on standard error."""
    file = own(sys.stderr if is_error else sys.stdout)
    return ShownConsole(file=file, highlight=False, markup=False, width=width)


class ShownConsole(Console):
    """A console that styles and arranges texts, and shows what is in them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as it is shown, so that tables are as wide as that."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed comes by here, whatever it was made of."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
