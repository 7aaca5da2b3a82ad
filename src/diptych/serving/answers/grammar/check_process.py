"""``python -m diptych.serving.answers.grammar.check_process``: tries grammars, each in a fork of this process.

A fork that takes longer than the limit is ended by its own alarm; one that takes too much memory fails. So no grammar
holds up this process for longer than the limit, and none can harm another. Reads and writes lines of JSON:
the first one is a CheckSettings, then a CheckRequest in and a CheckReply out (check_messages.py).
"""

import gc
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import llguidance
import msgspec

from diptych.serving.answers.grammar.check_messages import CheckReply, CheckRequest, CheckSettings

MEMORY_BYTES = 2 << 30  # a fork may take so much more
NICENESS = 10


def main() -> None:
    """Serve until the end of the input."""
    os.nice(NICENESS)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=CheckSettings)
    tokenizer = llguidance.LLTokenizer(
        settings.tokenizer, n_vocab=settings.vocab_size, eos_token=settings.eos_token_ids or None
    )
    settings.tokenizer = ""
    gc.freeze()
    _write(CheckReply(""))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=CheckRequest)
        _write(_check_in_fork(tokenizer, request, settings.limit_s))


def _write(reply: CheckReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def _check_in_fork(tokenizer: llguidance.LLTokenizer, request: CheckRequest, limit_s: float) -> CheckReply:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _run_fork(tokenizer, request, limit_s, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if data and not status:
        return msgspec.json.decode(data, type=CheckReply)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return CheckReply(f"it takes longer than {limit_s * 1000:.0f} ms to compile")
    return CheckReply("it takes too much memory to compile")


def _run_fork(tokenizer: llguidance.LLTokenizer, request: CheckRequest, limit_s: float, writing: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        if sys.platform == "linux":
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        os.write(writing, msgspec.json.encode(check(tokenizer, request)))
        status = 0
    finally:
        os._exit(status)


def check(tokenizer: llguidance.LLTokenizer, request: CheckRequest) -> CheckReply:
    """Compile a grammar and compute its first mask, as a worker will."""
    start = time.perf_counter()
    text = request.text
    if request.is_foreign:
        try:
            text = llguidance.grammar_from("grammar", text)
        except (ValueError, RecursionError) as refusal:
            return CheckReply(str(refusal)[:1000])
    error = _error_of(tokenizer, text)
    if error:
        for param, schema in request.schemas:
            if path := _wrong_part(tokenizer, schema):
                return CheckReply(_first_line(path[1]), ".".join((param, *path[0])))
        return CheckReply(_first_line(error))
    return CheckReply("", text=text, compile_s=time.perf_counter() - start)


def _error_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _first_line(error: str) -> str:
    """What the compiler says, without the place in the text that we wrote."""
    said = " ".join(error.split("<state>")[0].split(" 1 | ")[0].split())
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)[:500]


def _wrong_part(tokenizer: llguidance.LLTokenizer, schema: Any) -> tuple[list[str], str] | None:
    """The path of the innermost part of a schema that does not compile by itself, and why."""
    root = schema if isinstance(schema, dict) else {}
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    error = _schema_error(tokenizer, schema, {})
    if not error:
        return None
    path: list[str] = []
    while True:
        for inner_path, part in _parts(schema):
            if inner := _schema_error(tokenizer, part, shared):
                path, schema, error = [*path, *inner_path], part, inner
                break
        else:
            return path, error


def _schema_error(tokenizer: llguidance.LLTokenizer, schema: Any, shared: dict[str, Any]) -> str:
    if not isinstance(schema, dict | bool):
        return "it is no schema"
    whole = {**shared, **schema} if isinstance(schema, dict) else schema
    return _error_of(tokenizer, "start: %json " + json.dumps(whole) + "\n") if whole is not True else ""


def _parts(schema: Any) -> Iterator[tuple[list[str], Any]]:
    """The schemas directly within a schema."""
    if not isinstance(schema, dict):
        return
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(schema.get(key), dict):
            yield from (([key, name], part) for name, part in schema[key].items())
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            yield from (([key, str(number)], part) for number, part in enumerate(schema[key]))
    for key in ("items", "additionalProperties", "contains", "if", "then", "else"):
        if isinstance(schema.get(key), dict):
            yield [key], schema[key]


if __name__ == "__main__":
    main()
