"""Tries grammars in a process of their own before a request is sent to a worker: see check_process.py.

The process begins with the first grammar and holds the tokenizer. Grammars that were tried are known by their text;
where the machine had no time for one, nothing is known of it.
"""

import asyncio
import importlib.util
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from diptych.base.limited_log import LimitedLog
from diptych.control.errors import InvalidRequestError, UnavailableError
from diptych.serving import edge_limits
from diptych.serving.answers.grammar.check_messages import CheckReply, CheckRequest, CheckSettings
from diptych.serving.answers.grammar.grammar_text import Grammar

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0  # where the machine has no time
MAX_KNOWN = 512
MAX_KNOWN_BYTES = 1 << 16  # longer grammars are tried each time
START_LIMIT_S = 30.0
REPLY_LIMIT_S = 20.0  # by the clock, which is more than the process takes for one grammar
LINE_BYTES = 1 << 28


class TriedGrammar(NamedTuple):
    """A grammar as a worker takes it, the paths of what it does not enforce, and the processor time that it took."""

    text: str
    left_out: Sequence[str] = ()
    compile_s: float = 0.0


NO_GRAMMAR = TriedGrammar("")


def is_installed() -> bool:
    """Whether the package is there that computes masks."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarChecker:
    """The grammars of one tokenizer. ``check`` returns what a worker is given; ``close`` ends the process."""

    def __init__(self, tokenizer_json: str, eos_token_ids: list[int], vocab_size: int) -> None:
        self._settings = CheckSettings(
            tokenizer_json,
            eos_token_ids,
            vocab_size,
            edge_limits.GRAMMAR_PROCESSOR_S,
            edge_limits.GRAMMAR_CLOCK_S,
            edge_limits.GRAMMAR_MEMORY_BYTES,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._log = LimitedLog(logger)
        self._num_waiting = 0
        self._known: OrderedDict[str, CheckReply] = OrderedDict()

    async def check(self, grammar: Grammar) -> TriedGrammar:
        """The grammar in Lark. Raises InvalidRequestError that names the field, with the path in a schema, and
        UnavailableError where the machine is too busy."""
        reply = self._known.get(grammar.text)
        if reply is None:
            if self._num_waiting >= edge_limits.WAITING_GRAMMARS:
                raise UnavailableError(f"{self._num_waiting} grammars wait to be compiled", code="grammar_queue_full")
            self._num_waiting += 1
            try:
                async with self._turn:
                    reply = self._known.get(grammar.text) or await self._ask(grammar)
            finally:
                self._num_waiting -= 1
            if reply.is_busy:
                error = UnavailableError(f"{grammar.param}: {reply.error}", code="grammar_timeout")
                error.retry_after_s = RETRY_AFTER_S
                raise error
            if len(grammar.text) + len(reply.text) <= MAX_KNOWN_BYTES:
                self._known[grammar.text] = reply
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(grammar.text)
        if reply.error:
            param = reply.param or grammar.param
            raise InvalidRequestError(f"{param}: {reply.error}", param=param, code="invalid_grammar")
        return TriedGrammar(reply.text, (*grammar.left_out, *reply.left_out), reply.compile_s)

    async def _ask(self, grammar: Grammar) -> CheckReply:
        """A process that was killed is started again, once."""
        try:
            return await self._ask_once(grammar)
        except (OSError, UnavailableError):
            return await self._ask_once(grammar)

    async def _ask_once(self, grammar: Grammar) -> CheckReply:
        request = CheckRequest(grammar.text, bool(grammar.foreign))
        try:
            process = self._process = self._process or await self._start()
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            return await self._reply(process, REPLY_LIMIT_S)
        except BaseException:
            self._kill()  # the reply to this grammar would be taken for that to the next
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "diptych.serving.answers.grammar.check_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        await self._reply(process, START_LIMIT_S)
        return process

    async def _reply(self, process: asyncio.subprocess.Process, limit_s: float) -> CheckReply:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), limit_s)
        except TimeoutError:
            line = b""
        if not line:
            text = "the process that compiles grammars has failed; it is started again with the next grammar"
            self._log.error("failed", text)
            raise UnavailableError("the process that compiles grammars has failed", code="grammar_process")
        return msgspec.json.decode(line, type=CheckReply)

    async def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:
            self._kill()
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None
