"""``diptych chat``: a conversation with a running server, in the terminal.

Options, input and output; what is said to the server is in chat_client.py. Where standard input is no terminal, each
line of it is a message.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from diptych.base.terminal_text import own
from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import LOCAL_URL, Number, Text, Whole
from diptych.control.errors import RequestError

if TYPE_CHECKING:
    from diptych.cli.chat_client import ChatClient, Piece

CONTINUES = "\\"  # at the end of a line: the message goes on in the next
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def chat(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="Address of a running server.")] = LOCAL_URL,
    model: Annotated[Text, typer.Option(help=shared_help.SERVED_MODEL)] = None,
    system: Annotated[Text, typer.Option(help="System message before the conversation. Default: none.")] = None,
    max_tokens: Annotated[Whole, typer.Option(help="Most tokens of an answer. Default: stop at about 1,024.")] = None,
    temperature: Annotated[Number, typer.Option(help=shared_help.TEMPERATURE)] = 0.2,
    complete: Annotated[bool, typer.Option("--complete", help="Continue each text, without a conversation.")] = False,
    api_key: Annotated[Text, typer.Option(help=shared_help.SERVER_KEY, envvar="DIPTYCH_API_KEY")] = None,
) -> None:
    """Talk to a served model. Ctrl-C stops an answer, and a second one ends.

    A model without a chat template continues texts instead.
    """
    with errors_in_words():
        from diptych.cli.chat_client import ChatClient

        client = ChatClient.connect(url, api_key, model, system=system, completes=complete)
        client.sampling = {
            name: value
            for name, value in (("temperature", temperature), ("max_tokens", max_tokens))
            if value is not None
        }
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  (input() edits lines with it)

            print(client.words)
            print(f"Ctrl-C stops an answer, a second one ends. A line that ends in {CONTINUES} goes on in the next.")
        else:
            print(client.words, file=sys.stderr)
        num_failed = sum(not _answer(client, text, is_terminal) for text in _messages(is_terminal))
        if num_failed and not is_terminal:
            raise typer.Exit(1)


class AnswerWriter:
    """Prints an answer as it comes. Reasoning is dim on a terminal; otherwise it goes to standard error, so that
    standard output has the answer alone."""

    def __init__(self) -> None:
        self.has_reasoned = self.has_answered = False
        self._is_terminal = sys.stdout.isatty()
        self._is_reasoning = False

    def write(self, piece: "Piece") -> None:
        """What has come."""
        if piece.reasoning:
            self._begin_reasoning()
            print(piece.reasoning, end="", file=self._reasoning_file, flush=True)
        if piece.content:
            self.close()
            self.has_answered = True
            print(piece.content, end="", flush=True)

    def close(self) -> None:
        """Reasoning has ended, if there was any."""
        if self._is_reasoning:
            print(PLAIN if self._is_terminal else "", file=own(self._reasoning_file), flush=True)
        self._is_reasoning = False

    @property
    def _reasoning_file(self) -> TextIO:
        return sys.stdout if self._is_terminal else sys.stderr

    def _begin_reasoning(self) -> None:
        if self._is_terminal and not self._is_reasoning:
            print(DIM, end="", file=own(sys.stdout))
        self._is_reasoning = self.has_reasoned = True


def _messages(is_terminal: bool) -> Iterator[str]:
    """What is typed, until the end of the input or Ctrl-C."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        lines.append(line.removesuffix(CONTINUES))
        if line.endswith(CONTINUES):
            continue
        text, lines = "\n".join(lines), []
        if text.strip():
            yield text


def _answer(client: "ChatClient", text: str, is_terminal: bool) -> bool:
    """Print the answer while it comes. False: there was an error, which is said."""
    from diptych.cli.chat_client import MOST_PIECES

    writer = AnswerWriter()
    try:
        with closing(writer):
            for piece in client.answer(text):
                writer.write(piece)
        if client.is_cut:
            print(f"\n(stopped after {MOST_PIECES:,} pieces; --max-tokens N allows more)", file=sys.stderr)
        elif writer.has_reasoned and not writer.has_answered:
            print("(it ended within its reasoning; --max-tokens N allows more)", file=sys.stderr)
    except KeyboardInterrupt:
        sys.stdout.write(" (stopped)")
        if not is_terminal:
            raise
    except RequestError as error:  # of this request; the conversation can go on
        print(f"error: {error.message}", file=sys.stderr)
        return False
    print("\n" if is_terminal else "")
    return True
