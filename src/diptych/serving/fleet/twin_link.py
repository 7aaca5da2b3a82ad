"""The twin as the front end sees it: a process that is started with the first question and answers one at a time.

A twin that dies, hangs or says something unreadable is ended; its question has failed, and the next one starts another.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from diptych.control.errors import CoreFailedError
from diptych.control.planner.planner_events import TwinAnswered, TwinFailed, TwinQuestion, TwinSettings

logger = logging.getLogger(__name__)

ANSWER_LIMIT_S = 120.0
LINE_LIMIT = 1 << 24


class _TwinLine(msgspec.Struct, frozen=True):
    """What a line may say: a TwinAnswered or a TwinFailed."""

    number: int
    message: str | None = None


class TwinLink:
    """One twin of one fleet. command: starts its process."""

    def __init__(self, command: Sequence[str], settings: TwinSettings) -> None:
        self._command = command
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # a planner that has failed may have left a question

    async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
        """The answer, or why there is none. Raises CoreFailedError when the simulation has failed by a defect (its
        cores are those that serve). However it ends, no later question gets what this one was to get."""
        async with self._turn:
            try:
                answer = await self._ask(question)
            except BaseException:
                await self.close()
                raise
        if isinstance(answer, TwinFailed) and answer.is_defect:
            await self.close()
            raise CoreFailedError(f"the planner's simulation has failed: {answer.message}")
        return answer

    async def _ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
        try:
            return await asyncio.wait_for(self._exchange(question), ANSWER_LIMIT_S)
        except (OSError, ValueError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            message = f"no answer within {ANSWER_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)
            logger.warning("the planner's simulation failed: %s", message)
            await self.close()
            return TwinFailed(question.number, message)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _exchange(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(question) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise EOFError("its process has ended")
        said = msgspec.json.decode(line, type=_TwinLine)
        if said.number != question.number:
            raise ValueError(f"it answers question {said.number}, and was asked {question.number}")
        failed = said.message is not None
        return msgspec.json.decode(line, type=TwinFailed) if failed else msgspec.json.decode(line, type=TwinAnswered)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, limit=LINE_LIMIT
            )
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        return self._process
