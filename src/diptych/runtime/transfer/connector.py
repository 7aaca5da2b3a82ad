"""The contract of KV transfers: what a worker says to its connector and what it hears back.

Owns the KVConnector protocol, the events, and the description of a KV cache that both sides compare. Knows no socket
and no tensor. A *transfer* is one attempt to serve one request; its id is the same on both workers and is never used
twice.

The life of a transfer:
    receiver   expect -> (ChunkArrived)* -> Committed | Failed; forget in any state ends it
    sender     open -> send* -> commit -> Sent | Failed; cancel in any state ends it
Exactly one of the last events comes, none after forget or cancel has returned.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Protocol

from diptych.control.errors import ConfigError

PROTOCOL_VERSION = 1  # of the frames and of the codec's bytes
MAX_PAYLOAD_BYTES = 64 * 1024  # of a commit
MAX_ATTEMPT_ID_BYTES = 1024
MIN_SECRET_BYTES = 32

CodecName = Literal["none", "int8", "int4", "auto"]

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_CONVERTIBLE = frozenset({"block_size", "dtype", "layout"})  # the codec translates these; all else must be equal


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What the bytes of a KV cache mean. Two workers compare theirs before anything moves."""

    model: str  # fingerprint of the weights' shapes and names: equal for workers that serve the same model
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the cache: "bfloat16", "float16" or "float32"
    block_size: int  # tokens per block
    layout: str  # of a block: "cpu" or "cuda" (see attention/interface.py)
    protocol_version: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ConfigError(f"{name} of the KV format is {value!r}; it must be 1 to {1 << 20}", param=name)
        if self.dtype not in _ITEM_SIZES:
            raise ConfigError(f"dtype of the KV cache is {self.dtype!r}, not one of {list(_ITEM_SIZES)}", param="dtype")

    @property
    def bytes_per_layer_block(self) -> int:
        """Bytes of one block of K (or of V) in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * _ITEM_SIZES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, K and V, all layers."""
        return 2 * self.num_layers * self.bytes_per_layer_block

    def has_same_bytes(self, other: "KVFormat") -> bool:
        """Whether blocks can be copied as they are."""
        return self == other

    def check_compatible(self, other: "KVFormat") -> None:
        """Raises ConfigError naming each field that no codec can translate, with the values of both sides."""
        wrong = [
            f"{each.name} is {getattr(self, each.name)!r} here and {getattr(other, each.name)!r} there"
            for each in fields(self)
            if each.name not in _CONVERTIBLE and getattr(self, each.name) != getattr(other, each.name)
        ]
        if wrong:
            raise ConfigError(f"the two workers' KV caches do not fit: {', '.join(wrong)}", param="kv_format")

    def to_bytes(self) -> bytes:
        """As JSON, for the handshake."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "KVFormat":
        """The format of ``to_bytes``. Raises ConfigError for anything else."""
        try:
            values = json.loads(data)
            texts = all(isinstance(values[name], str) for name in ("model", "dtype", "layout"))
            if not texts or not isinstance(values["protocol_version"], int):
                raise TypeError("a field has the wrong type")
            return KVFormat(**values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"not a description of a KV cache: {error}", param="kv_format") from error


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a connector reaches others and is reached."""

    secret: bytes = field(repr=False)  # shared by all workers; at least MIN_SECRET_BYTES
    listen: str = "tcp://127.0.0.1:0"  # tcp://host:port (0: any free port) or unix:///path (in a 0700 directory)
    advertise: str | None = None  # the host that others dial, when it is not the one of ``listen``
    codec: CodecName = "none"  # auto: int8 where the link is slow enough that it saves time, else none
    resume_timeout_s: float = 10.0  # a transfer fails when its connection stays broken for so long
    frame_bytes: int = (
        1 << 19
    )  # between two chances of another transfer; layers of a step under way leave when they fill it

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"secret has {len(self.secret)} bytes; at least {MIN_SECRET_BYTES}", param="secret")
        if not self.resume_timeout_s > 0:
            raise ConfigError(f"resume_timeout_s is {self.resume_timeout_s}; must be > 0", param="resume_timeout_s")
        if not 1 <= self.frame_bytes <= 1 << 24:
            raise ConfigError(f"frame_bytes is {self.frame_bytes}; it must be 1 to {1 << 24}", param="frame_bytes")
        if self.codec not in ("none", "int8", "int4", "auto"):
            raise ConfigError(f"codec is {self.codec!r}; it must be none, int8, int4 or auto", param="codec")


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """Receiver: this transfer makes progress. ``num_tokens``: how many of its tokens are here in all layers, so far."""

    attempt_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver: all KV of the transfer and its commit are here; nothing more is written into its blocks.

    Times are time.monotonic_ns of this process; ``num_bytes`` counts KV bytes on the wire (0: borrowed blocks).
    """

    attempt_id: str
    payload: bytes
    num_bytes: int
    first_byte_ns: int
    last_byte_ns: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Sender: the receiver has acknowledged everything, the commit included; the blocks may change.

    Times are time.monotonic_ns of this process: of the first KV byte given to the transport (of the commit when there
    was none), of commit(), and of the last acknowledgement. Exposed after prefill: acknowledged_ns - commit_ns.
    """

    attempt_id: str
    num_bytes: int
    first_byte_ns: int
    commit_ns: int
    acknowledged_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer is broken beyond resuming, on this side. Its blocks are not touched any more."""

    attempt_id: str
    is_sender: bool
    message: str


TransferEvent = ChunkArrived | Committed | Sent | Failed


class KVConnector(Protocol):
    """Moves KV between workers. All methods are called by one thread, and none blocks on a peer.

    ``block_ids`` are always the transfer's whole block table: token t lies in block_ids[t // block_size] of that side.
    """

    address: str  # where senders reach this worker, for example "tcp://127.0.0.1:41234"

    def expect(self, attempt_id: str, block_ids: Sequence[int], start: int, num_tokens: int) -> None:
        """Receiver: KV of the tokens [start, start + num_tokens) will come and belongs into these blocks.

        ``start`` is a multiple of the block size. A borrowed transfer (the sender computes straight into the blocks) is
        expect(attempt_id, (), n, 0): only a commit will come. Raises ValueError when the transfer is expected already
        or the block table does not cover the tokens.
        """
        ...

    def forget(self, attempt_id: str) -> None:
        """Receiver: nothing of this transfer is written after this returns, and no event of it comes. Idempotent."""
        ...

    def open(self, attempt_id: str, address: str, start: int) -> None:
        """Sender: a handoff begins whose first token to be sent is ``start``; connects when needed.

        Raises ValueError when the transfer is open, ConfigError when the address is not one.
        """
        ...

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: Sequence[int], num_layers: int | None = None
    ) -> None:
        """Sender: queue the KV of these tokens: whole blocks, except at the very end of the prompt.

        ``num_layers``: only the first so many layers are computed (None: all are). What fills a frame may leave at
        once; the same tokens are queued again when more of their layers are there, and no others before they have all.
        Queued layers of the blocks must stay untouched until Sent or Failed, or until cancel returns. Tokens that were
        queued in all layers are skipped; a gap is a ValueError, and so are other tokens (or the commit) while some lack
        layers. Ignored when the transfer is not open (it has failed or was cancelled).
        """
        ...

    def commit(self, attempt_id: str, payload: bytes) -> None:
        """Sender: queue the commit, after all KV. Raises ValueError above MAX_PAYLOAD_BYTES or when repeated."""
        ...

    def cancel(self, attempt_id: str) -> None:
        """Sender: nothing more is read from the transfer's blocks after this returns, and no event comes.
        Idempotent."""
        ...

    def poll(self) -> list[TransferEvent]:
        """What has happened since the last call, in order."""
        ...

    def fileno(self) -> int:
        """Readable when ``poll`` has something."""
        ...

    def close(self) -> None:
        """Close all connections and stop; transfers end without events. Idempotent."""
        ...
