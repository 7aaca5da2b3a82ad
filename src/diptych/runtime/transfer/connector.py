"""The contract of KV transfers: the calls of a worker to its connector, and the events that come back.

Knows no socket and no tensor. A *transfer* is one attempt to serve one request; its id is the same on both workers and
is never used twice.

The life of a transfer:
    receiver   expect -> (ChunkArrived)* -> Committed | TransferBroken; forget ends it in any state
    sender     open -> send* -> commit -> Sent | TransferBroken; cancel ends it in any state
Exactly one of the last events comes; after forget or cancel has returned, none comes.

What is known of a connector before it is made stands in the table of connectors, beside the name of its class: the
front end chooses by it and checks options, and never loads torch, which most connectors need.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from diptych.control.engine.worker_core import ChunkArrived, TransferBroken
from diptych.control.errors import ConfigError
from diptych.control.request import BlockTables

MAX_PAYLOAD_BYTES = 64 * 1024  # of a commit
MAX_ATTEMPT_ID_BYTES = 1024
MIN_SECRET_BYTES = 32
MAX_FRAME_BYTES = 1 << 24
RESUME_TIMEOUT_S = 10.0  # unless something else is said

CodecName = Literal["none", "int8", "int4", "auto"]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a connector is reached, and how it sends.

    secret: shared by all workers, at least MIN_SECRET_BYTES. listen: tcp://host:port (0: any free port) or unix:///path
    (in a directory of mode 0700). codec: auto takes int8 where the link is slow enough that it saves time, else none.
    resume_timeout_s: a transfer is broken when its connection stays broken for so long. frame_bytes: KV of one frame,
    after which another transfer has its turn; layers of a step under way leave when they fill it. encrypts: connections
    are TLS, with keys that are derived from the secret.
    """

    secret: bytes = field(repr=False)
    listen: str = "tcp://127.0.0.1:0"
    codec: CodecName = "none"
    resume_timeout_s: float = RESUME_TIMEOUT_S
    frame_bytes: int = 1 << 19
    encrypts: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"secret has {len(self.secret)} bytes; at least {MIN_SECRET_BYTES}", param="secret")
        if self.codec not in get_args(CodecName):
            raise ConfigError(f"codec is {self.codec!r}; one of {', '.join(get_args(CodecName))}", param="codec")
        if not self.resume_timeout_s > 0:
            raise ConfigError(f"resume_timeout_s is {self.resume_timeout_s}; must be > 0", param="resume_timeout_s")
        if not 1 <= self.frame_bytes <= MAX_FRAME_BYTES:
            raise ConfigError(f"frame_bytes is {self.frame_bytes}; it must be 1 to {MAX_FRAME_BYTES}",
                              param="frame_bytes")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver: all KV of the transfer and its commit are here; nothing more is written into its blocks.

    Times are time.monotonic_ns of this process; ``num_bytes`` counts KV bytes on the wire (0: borrowed blocks).
    wire_ns: between the two times, while bytes were coming in.
    """

    attempt_id: str
    payload: bytes
    num_bytes: int
    first_byte_ns: int
    last_byte_ns: int
    wire_ns: int = 0


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


ConnectorEvent = ChunkArrived | Committed | Sent | TransferBroken


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the KV of a transfer lies whose layers are of several groups, or attend to windows: by group, its blocks
    from the block ``first_blocks`` on. What lies before that does not travel, in the layers of that group."""

    block_tables: BlockTables
    first_blocks: tuple[int, ...]


BlockIds = Sequence[int] | GroupTables


class KVConnector(Protocol):
    """Moves KV between the caches of workers. One thread makes all calls; none of them waits for a peer.

    ``block_ids`` is always the transfer's whole block table: token t lies in block_ids[t // block_size] of that side;
    where layers are of several groups, GroupTables. Both sides leave out the same tokens of each layer. Sequences and
    payloads are copied during the call. Of the cache, a connector touches at any time only

        written   at the receiver, blocks of the expected tokens: from expect to Committed, TransferBroken, or the
                  return of forget. The last block may be written whole, behind the last token too.
        read      at the sender, tokens and layers that were queued: from send to Sent, TransferBroken, or the return
                  of cancel. They are read when they leave, not when they are queued, and again after a broken link.
                  (A remote reader may end its copy after cancel; no commit will follow that would make it count.)

    Inside these intervals, a receiver that reads the blocks sees KV that is half there, and one that gives them to
    another request gets that request's KV overwritten; a sender that changes the blocks sends some of the new bytes,
    and no checksum need notice. Outside of them no thread of the connector touches the blocks: forget and cancel return
    only after a copy that was under way has ended.

    Events are frozen and valid for ever. Those of one transfer come in the order of its life; between transfers there
    is no order. An id is in use until its last event was returned by poll, or until forget or cancel has returned.
    """

    address: str  # where senders reach this worker, for example "tcp://127.0.0.1:41234"; valid until close

    def expect(self, attempt_id: str, block_ids: BlockIds, start: int, num_tokens: int) -> None:
        """Receiver: KV of the tokens [start, start + num_tokens) will come and belongs into these blocks.

        ``start`` is a multiple of the block size; tokens before it are not touched. A borrowed transfer (the sender
        computes straight into the blocks) is expect(attempt_id, (), n, 0): only a commit will come. A sender that opens
        a transfer before it is expected is refused. Raises ValueError when the transfer is expected already or the
        block table does not cover the tokens.
        """
        ...

    def forget(self, attempt_id: str) -> None:
        """Receiver: nothing of this transfer is written after this returns, and no event of it comes. Its sender gets
        TransferBroken, unless it was committed before. Idempotent; unknown ids are ignored."""
        ...

    def open(self, attempt_id: str, address: str, start: int) -> None:
        """Sender: a handoff to the connector at ``address`` begins, whose first token to be sent is ``start``.

        Connects when needed; a receiver that cannot be reached is a TransferBroken later. Raises ValueError when the
        transfer is open, ConfigError when the address is not one.
        """
        ...

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: BlockIds, num_layers: int | None = None
    ) -> None:
        """Sender: queue the KV of these tokens: whole blocks, except at the very end of the prompt.

        ``num_layers``: only that number of layers, the first ones, are computed (None: all are). What fills a frame may
        leave at once; the same tokens are queued again when more of their layers are there, and no others before they
        have all. Tokens that were queued in all layers are skipped. Raises ValueError for a gap, and for other tokens
        while some lack layers (so does commit). Ignored when the transfer is not open (it is broken or was cancelled).
        """
        ...

    def commit(self, attempt_id: str, payload: bytes) -> None:
        """Sender: queue the commit, which arrives after all KV. Raises ValueError above MAX_PAYLOAD_BYTES or when
        repeated. Ignored when the transfer is not open."""
        ...

    def cancel(self, attempt_id: str) -> None:
        """Sender: nothing more is read from the transfer's blocks after this returns, and no event of it comes. A
        receiver that knows of the transfer gets TransferBroken, unless it was committed before. Idempotent; unknown ids
        are ignored."""
        ...

    def poll(self) -> list[ConnectorEvent]:
        """What has happened since the last call. Events wait here for as long as it is not called."""
        ...

    def fileno(self) -> int:
        """Readable when ``poll`` has something; the same descriptor until close."""
        ...

    def close(self) -> None:
        """Close all connections and stop; transfers end without events. After it returns no block is touched, and
        other calls have no effect. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """One entry of CONNECTORS.

    implementation: "module:class" of a KVConnector that is made with (layers, kv_format, options), and where layers
    have block tables of their own, with the number of each layer's.
    shares_pool: all workers map one pool of KV memory, and a prompt is computed straight into the blocks that its
    receiver reserved: no KV is copied, only the commit travels. False: each worker has its own cache; KV is copied.
    packs: options.codec may be other than "none".
    serves_cuda: the cache may be in the memory of a GPU.
    listen: options.listen of a worker; "{directory}" is its private directory.
    needs: module that has to be installed beside torch ("": none). extra: the extra of this package that brings all.
    """

    implementation: str
    shares_pool: bool = False
    packs: bool = False
    serves_cuda: bool = True
    listen: str = "tcp://127.0.0.1:0"
    needs: str = ""
    extra: str = "engine"

    @property
    def is_installed(self) -> bool:
        """Whether what it needs can be found; nothing is imported."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @property
    def cure(self) -> str:
        """What to do when it cannot be imported."""
        return f"pip install '.[{self.extra}]' in the checkout"

    def listen_in(self, directory: Path) -> str:
        """Where the connector of the worker with this private directory listens."""
        return self.listen.format(directory=directory)

    def load(self) -> Callable[..., KVConnector]:
        """Import the class. Raises ImportError."""
        module, _, name = self.implementation.partition(":")
        connector: Callable[..., KVConnector] = getattr(importlib.import_module(module), name)
        return connector
