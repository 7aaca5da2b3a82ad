"""The messages between a front end and its worker, as msgspec structs in msgpack (never pickle).

The control code's own commands, events and load reports are sent as they are, as [class name, fields]: a new command or
event of control needs no line here. Token ids are sent beside them, packed.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from diptych.control.commands import WorkerCommand
from diptych.control.compute_share import ComputeShare
from diptych.control.engine.reports import EngineStats, LoadReport
from diptych.control.errors import ErrorRecord
from diptych.control.events import EVENT_CLASSES, Event
from diptych.control.kv_layout import KVGroup
from diptych.control.request import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from diptych.control.step import StepTokens, TokenLogprobs

_COMMAND_CLASSES: dict[str, type[WorkerCommand]] = {cls.__name__: cls for cls in get_args(WorkerCommand)}


class AttemptTokens(msgspec.Struct, frozen=True, array_like=True):
    """What a worker must know of an attempt besides the command. prompt, output: token ids as packed little-endian
    uint32; the output is what earlier attempts have sampled (sampling.max_tokens counts it)."""

    prompt: bytes
    sampling: SamplingParams
    output: bytes = b""
    options: RequestOptions = DEFAULT_OPTIONS


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One command, as [class name, fields]. tokens: of Serve, Reserve and Prefill. address: of the target's KV
    connector, for Prefill."""

    command: tuple[str, Any]
    tokens: AttemptTokens | None = None
    address: str = ""


class Orders(msgspec.Struct, frozen=True, array_like=True, tag="orders"):
    """Carry these out, in order, between two steps."""

    orders: list[Order]


class StartOver(msgspec.Struct, frozen=True, array_like=True, tag="start_over"):
    """Another front end, or the same after it lost this worker, begins with it: drop all attempts, and say Ready again,
    with ``life``. Weights and prefix cache stay."""

    life: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop and exit."""


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """How far the start-up is; fraction in [0, 1] of this stage, or None when it cannot be known."""

    stage: str
    fraction: float | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker serves; what it holds."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    max_waiting: int
    max_num_seqs: int
    eos_token_ids: list[int]
    description: str  # one line for people: dtype, device, threads, cache
    address: str = ""  # of its KV connector
    num_blocks: int = 0
    block_size: int = 0
    instruction_set: str = ""  # the kernels that compute
    weights: str = ""  # their formats
    processor: str = ""  # on a cpu: its name, the cores that are used, its caches
    share: ComputeShare = ComputeShare()
    sequence_limits: list[int] = []  # of a fleet: the longest sequences that its kinds of workers take, ascending
    life: int = 0  # of the StartOver that this answers
    embedding_size: int = 0  # numbers of an embedding
    summary: str = ""  # of a fleet, for people: how many workers of which kind, and what each computes on
    measured: list[tuple[int, int, int, int, int]] = []  # by the warm-up, see WorkerSettings
    groups: list[KVGroup] = []  # of layers, each with blocks of its own (empty: all keep all tokens)


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start, or what decides or computes there has failed by a defect; it exits after this.
    recording: what that has left on the worker's host (empty: nothing)."""

    error: ErrorRecord
    recording: str = ""


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """What happened on the worker, in order: control's events as [class name, fields], each once. tokens: what a step
    gave. first_tokens: of handoffs that this worker has taken over, the tokens that came with the commits (the prefill
    worker has reported them, unless it died). load, stats: as of these events, when they are due."""

    events: list[tuple[str, Any]]
    tokens: StepTokens | None = None
    first_tokens: dict[str, tuple[int, TokenLogprobs | None]] = {}
    load: LoadReport | None = None
    stats: EngineStats | None = None


FrontendMessage = Orders | StartOver | Shutdown
WorkerMessage = Loading | Ready | Failed | StepReport

_encoder = msgspec.msgpack.Encoder()
_from_frontend: msgspec.msgpack.Decoder[FrontendMessage] = msgspec.msgpack.Decoder(FrontendMessage)
_from_worker: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def encode(message: FrontendMessage | WorkerMessage) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_from_frontend(data: bytes) -> FrontendMessage:
    """What a worker received. Raises msgspec.DecodeError."""
    return _from_frontend.decode(data)


def decode_from_worker(data: bytes) -> WorkerMessage:
    """What a front end received. Raises msgspec.DecodeError."""
    return _from_worker.decode(data)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as packed uint32. The caller has checked that each fits."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """The token ids of ``pack_token_ids``."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def pack_command(command: WorkerCommand) -> tuple[str, Any]:
    """A command for an Order."""
    return type(command).__name__, command


def unpack_command(packed: tuple[str, Any]) -> WorkerCommand:
    """The command of ``pack_command``. Raises msgspec.ValidationError, or KeyError for an unknown class."""
    return msgspec.convert(packed[1], _COMMAND_CLASSES[packed[0]])


def pack_events(events: Iterable[Event]) -> list[tuple[str, Any]]:
    """Events for a report."""
    return [(type(event).__name__, event) for event in events]


def unpack_events(packed: Iterable[tuple[str, Any]]) -> list[Event]:
    """The events of ``pack_events``, as the control code's own classes."""
    return [msgspec.convert(fields, EVENT_CLASSES[name]) for name, fields in packed]
