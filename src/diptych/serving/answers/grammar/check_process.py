"""``python -m diptych.serving.answers.grammar.check_process``: tries grammars, one at a time, in a fork of itself.

A fork that uses a processor for longer than the limit is ended by its own alarm, and one that takes too much memory
fails; the next grammar gets a new one. So no grammar holds up this process, and none can harm another. An end by the
clock says that the machine is busy, and nothing of the grammar. A fork that is fine is used again: to make one takes
several times as long as to compile a usual schema. Reads and writes lines of JSON: the first one is a CheckSettings,
then a CheckRequest in and a CheckReply out (check_messages.py).
"""

import contextlib
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
from functools import partial
from typing import Any, NoReturn

import llguidance
import msgspec

from diptych.base.stop_signals import leave_terminal_to_parent
from diptych.control.errors import InvalidRequestError
from diptych.runtime.sampling.grammar import MASK_LIMITS
from diptych.serving.answers.grammar.check_messages import CheckReply, CheckRequest, CheckSettings
from diptych.serving.answers.grammar.grammar_text import SCHEMA, with_schemas

KEPT_BYTES = 128 << 20  # a fork that holds so much more after a grammar is not used again
NICENESS = 5
LOOK_S = 0.02  # so often is looked how long a grammar takes
TRIED_TOKENS = 8  # of those that may come first where there is a choice
SLOW_S = 0.05  # of a processor: what takes longer goes on when nobody else wants the processor
TOO_LARGE = "it takes too much memory to compile"
TOO_BUSY = "the machine is too busy to compile it"
NO_MEMORY = "the machine has no memory left to compile it"


def main() -> None:
    """Serve until the end of the input."""
    leave_terminal_to_parent()
    os.nice(NICENESS)
    sys.setrecursionlimit(20_000)  # schemas are nested
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=CheckSettings)
    tokenizer = llguidance.LLTokenizer(
        settings.tokenizer, n_vocab=settings.vocab_size, eos_token=settings.eos_token_ids or None
    )
    settings.tokenizer = ""
    gc.freeze()
    fork = Fork(tokenizer, settings)
    _write(CheckReply(""))
    for line in sys.stdin.buffer:
        reply = fork.check(line)
        if reply is None:
            fork.end()
            fork = Fork(tokenizer, settings)
            reply = fork.check(line) or CheckReply(NO_MEMORY, is_busy=True)
        _write(reply)
        if not fork.is_usable:  # after the reply: the next grammar is not here yet
            fork.end()
            fork = Fork(tokenizer, settings)


def _write(reply: CheckReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


class Fork:
    """A copy of this process that compiles. ``end`` it when it is not usable any more."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, settings: CheckSettings) -> None:
        self._settings = settings
        self._bytes = _used_bytes("self")
        self.is_usable = True
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._requests)
            os.close(self._replies)
            os.close(0)
            os.close(1)  # who waits for the end of these waits for the parent alone
            _serve_fork(tokenizer, settings, self._bytes, requests, replies)
        os.close(requests)
        os.close(replies)

    def check(self, line: bytes) -> CheckReply | None:
        """The reply to a line with a CheckRequest; None where the fork was killed, perhaps long ago."""
        with contextlib.suppress(BrokenPipeError):  # how it has ended is found below
            _write_all(self._requests, line)
        begin_s, end_s = _processor_time_s(self._pid), time.monotonic() + self._settings.clock_limit_s
        while not select.select([self._replies], [], [], LOOK_S)[0]:
            if self.is_usable and _processor_time_s(self._pid) - begin_s > SLOW_S:
                self.is_usable = False  # the way back from a niceness is for privileged processes only
                with contextlib.suppress(OSError):  # not allowed here: it goes on as it is
                    _make_idle(self._pid)
            if time.monotonic() > end_s:
                self.is_usable = False
                return CheckReply(TOO_BUSY, is_busy=True)
        data = b""
        while not data.endswith(b"\n") and (part := os.read(self._replies, 1 << 16)):
            data += part
        if data.endswith(b"\n"):
            reply = msgspec.json.decode(data, type=CheckReply)
            holds_much = reply.error == TOO_LARGE or _used_bytes(str(self._pid)) >= self._bytes + KEPT_BYTES
            self.is_usable = self.is_usable and not holds_much
            return reply
        self.is_usable = False
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended_by == signal.SIGPROF:
            return CheckReply(f"it takes longer than {self._settings.limit_s * 1000:.0f} ms of a processor to compile")
        return None if ended_by == signal.SIGKILL else CheckReply(TOO_LARGE)

    def end(self) -> None:
        """Nothing of it is left."""
        os.close(self._requests)
        os.close(self._replies)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve_fork(
    tokenizer: llguidance.LLTokenizer, settings: CheckSettings, used_bytes: int, requests: int, replies: int
) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        if used_bytes:
            most = used_bytes + settings.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                signal.setitimer(signal.ITIMER_PROF, settings.limit_s)
                reply = check(tokenizer, msgspec.json.decode(line, type=CheckRequest))
                signal.setitimer(signal.ITIMER_PROF, 0)
                _write_all(replies, msgspec.json.encode(reply) + b"\n")
        status = 0
    finally:
        os._exit(status)


def _make_idle(process: int) -> None:
    """Let a process run only when no other wants the processor."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, process, 19)


def _processor_time_s(process: int) -> float:
    """Processor time that a process has used, in seconds; where that cannot be known, the clock."""
    try:
        with open(f"/proc/{process}/schedstat") as schedstat:
            return int(schedstat.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.monotonic()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _used_bytes(process: str) -> int:
    """Bytes of the process's address space; 0 where that cannot be known."""
    if sys.platform != "linux":
        return 0
    with open(f"/proc/{process}/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def check(tokenizer: llguidance.LLTokenizer, request: CheckRequest) -> CheckReply:
    """Compile a grammar, compute its first mask as a worker will, and see whether an answer can begin."""
    start = time.process_time()
    left_out: list[str] = []
    text = request.text
    if request.is_foreign:
        try:
            text = llguidance.grammar_from("grammar", text)
        except (ValueError, RecursionError) as refusal:
            return CheckReply(str(refusal)[:1000])
        error = _error_of(tokenizer, text)
    else:
        try:
            text, left_out = with_schemas(request.text)
            error = _error_of(tokenizer, text)
            if error and SCHEMA in request.text:  # perhaps a regular expression that it does not know
                text, left_out = with_schemas(request.text, partial(_schema_error, tokenizer))
                error = _error_of(tokenizer, text)
        except InvalidRequestError as refusal:
            return CheckReply(refusal.message.removeprefix(f"{refusal.param}: "), refusal.param or "")
        except MemoryError:
            return CheckReply(TOO_LARGE)
        except Exception as failure:  # of ours; without it, the end of the fork would be taken for a lack of memory
            return CheckReply(f"the schema cannot be read ({type(failure).__name__})")
    if error:
        return CheckReply(_first_line(error))
    return CheckReply("", text=text, left_out=left_out, compile_s=time.process_time() - start)


def _error_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=MASK_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else _error_of_every_answer(tokenizer, matcher)


def _error_of_every_answer(tokenizer: llguidance.LLTokenizer, matcher: llguidance.LLMatcher) -> str:
    """The error with which any answer ends at its first choice: some limits of the compiler are asked only when a
    token has come. "" where an answer can go on, or as far as was tried."""
    forced = matcher.compute_ff_tokens()
    if forced:
        matcher.consume_tokens(forced)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    may_come = [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
    chosen = [token for token in may_come if token not in tokenizer.eos_tokens]
    error = ""
    for token in chosen[:: max(1, -(-len(chosen) // TRIED_TOKENS))]:
        branch = matcher.deep_copy()
        branch.consume_token(token)
        if not branch.is_error():
            branch.compute_bitmask()
        if not branch.is_error():
            return ""
        error = branch.get_error()
    return error


def _schema_error(tokenizer: llguidance.LLTokenizer, schema: Any) -> str:
    return _error_of(tokenizer, "start: %json " + json.dumps(schema) + "\n")


def _first_line(error: str) -> str:
    """What the compiler says, without the place in the text that we wrote."""
    said = " ".join(error.split("<state>")[0].split(" 1 | ")[0].removesuffix("<non-verbose/>").split())
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)[:500]


if __name__ == "__main__":
    main()
