"""What an engine that others run says of its steps: JSON lines, published by a plugin inside that engine.

Owns the format, which is the same on a socket and in a file. ``diptych.vllm_plugin`` writes it inside vLLM's process,
so nothing else of this package is imported here; the front and ``diptych calibrate`` read it.

    {"kind": "about", "engine": "vllm", "version": "0.32.0", "max_batched_tokens": 2048, ...}
    {"kind": "step", "number": 7, "start_ns": ..., "end_ns": ..., "prefills": [["cmpl-1", 0, 512]], "num_left": 3, ...}

Times are CLOCK_MONOTONIC of the engine's host, in nanoseconds. Unknown fields are ignored by readers.
"""

import msgspec

DEFAULT_ADDRESS = "tcp://127.0.0.1:5559"
MAX_LINE_BYTES = 1 << 20


class UnreadableStepError(Exception):
    """A line is not what the format says."""


class EngineAbout(msgspec.Struct, frozen=True, tag_field="kind", tag="about"):
    """The engine, and the rules of its scheduler. run_id: another one means that the engine was started again, and
    counts its steps from 1. A number is 0, and a text "", where this version of the engine does not say. lacks: what
    could not be read of this version, in words."""

    engine: str
    run_id: str
    version: str = ""
    model: str = ""
    policy: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    long_prefill_threshold: int = 0
    chunked_prefill: bool = True
    prefix_cache: bool = True
    async_scheduling: bool = False
    lacks: tuple[str, ...] = ()


class EngineStep(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="step", omit_defaults=True):
    """One step, numbered from 1. start_ns: when it was planned, but not before the end of the step before it. end_ns:
    its tokens are known to the engine. prefills: (request, first token, tokens). decode_rows: tokens that decoding
    requests computed, drafts included. decode_context: the sum of the tokens that each of these attends to. num_left:
    requests that run or wait after it."""

    number: int
    start_ns: int
    end_ns: int
    prefills: tuple[tuple[str, int, int], ...] = ()
    num_decodes: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    num_left: int = 0


EngineLine = EngineAbout | EngineStep
encode_line = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(EngineLine)


def decode_line(data: bytes) -> EngineLine:
    """The record of a line. Raises UnreadableStepError."""
    if len(data) > MAX_LINE_BYTES:
        raise UnreadableStepError(f"a line of {len(data)} bytes; at most {MAX_LINE_BYTES}")
    try:
        line: EngineLine = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableStepError(str(error)) from None
    if isinstance(line, EngineStep) and not (line.number > 0 and 0 <= line.start_ns <= line.end_ns):
        raise UnreadableStepError(f"step {line.number} from {line.start_ns} to {line.end_ns}")
    return line
