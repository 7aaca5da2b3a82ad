"""Where the text of an answer ends among its tokens, when another engine is to go on with it.

A token may be a part of a character, whose text comes with the last part. An engine that begins after such a token has
no text before it: vLLM's repeats its whole prompt with the character. So an answer goes on before these tokens, which
then come again. How many there are the stream knows, unless its last chunk with text had several tokens: then the
engine that goes on is asked for the text of the last tokens, which ends with U+FFFD while a character is not whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from diptych.control.commands import Prefill, Reserve, Serve, WorkerCommand
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.front.relay_stream import RelayStream

CONTEXT_TOKENS = 32  # whose text is asked for: a character has at most 4 bytes, each in a token
PART = "\ufffd"  # what a tokenizer gives for a part of a character

TextOf = Callable[[Sequence[int]], Awaitable[str | None]]
Command = Serve | Reserve | Prefill


async def find_textless(stream: RelayStream, text_of: TextOf) -> int | None:
    """How many of the last tokens have given the client no text; None: the engine cannot say. Raises ConnectionError or
    TimeoutError."""
    num_textless = stream.num_textless
    while num_textless < stream.most_textless:
        known = stream.token_ids[: len(stream.token_ids) - num_textless]
        text = await text_of(known[-CONTEXT_TOKENS:])
        if text is None:
            return None
        if not text.endswith(PART):
            break
        num_textless += 1
    return num_textless


class ResumePointOwner(Protocol):
    """The worker whose commands wait."""

    async def text_of(self, token_ids: Sequence[int]) -> str | None:
        """What its engine says. Raises ConnectionError or TimeoutError."""
        ...

    def obey(self, command: Command) -> None:
        """Carry out a command that has waited."""
        ...

    def on_silent(self, attempt_id: str, words: str) -> None:
        """The engine did not answer: it may be gone."""
        ...

    def on_defect(self, attempt_id: str, error: BaseException) -> None:
        """Code of this process has failed over this attempt."""
        ...


class TextBoundaries:
    """The commands of one engine that wait until it is known where the text of an answer ends."""

    def __init__(self, owner: ResumePointOwner) -> None:
        self._owner = owner
        self._waiting: dict[str, asyncio.Task[None]] = {}

    def awaits(self, command: WorkerCommand, relay_of: Callable[[str], RelayStream | None]) -> bool:
        """Whether a command has to wait; the owner gets it again then."""
        if not isinstance(command, Serve | Reserve | Prefill):
            return False
        stream = relay_of(command.request_id)
        if stream is None or stream.num_textless == stream.most_textless or not stream.can_resume:
            return False
        attempt_id = command.attempt_id

        def on_failure(error: BaseException) -> None:
            self._waiting.pop(attempt_id, None)
            self._owner.on_defect(attempt_id, error)

        self._waiting[attempt_id] = start_watched(self._find(command, stream), f"the text of {attempt_id}", on_failure)
        return True

    async def _find(self, command: Command, stream: RelayStream) -> None:
        try:
            found = await find_textless(stream, self._owner.text_of)
        except (ConnectionError, TimeoutError) as error:
            self._waiting.pop(command.attempt_id, None)
            self._owner.on_silent(command.attempt_id, str(error) or "no reply")
            return
        self._waiting.pop(command.attempt_id, None)
        if found is None:
            stream.is_exact = False
        else:
            stream.has_text_up_to(found)
        self._owner.obey(command)

    def drop(self, attempt_id: str) -> None:
        """The attempt is over."""
        if (task := self._waiting.pop(attempt_id, None)) is not None:
            task.cancel()

    def drop_all(self) -> None:
        """The engine is gone."""
        for attempt_id in list(self._waiting):
            self.drop(attempt_id)
