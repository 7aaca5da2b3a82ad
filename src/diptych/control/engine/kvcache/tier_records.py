"""What passes between the decisions about tiers and the driver that moves bytes: actions out, events in.

Host blocks are named by number, content by its chain hash. A driver carries out actions in their order, and answers
each LoadBlocks with one RunLoaded and each StoreBlocks with one RunStored, whatever becomes of it: until then the
host blocks that it names belong to it.
"""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "host", "disk"]  # where KV lies, from the top
NO_PEER = -1  # of LoadBlocks.peer


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Read the blocks with these hashes: ``hashes[i]`` into ``host_blocks[i]``, in this order. peer: the worker from
    whose host memory (NO_PEER: from disk)."""

    load_id: int
    hashes: tuple[bytes, ...]
    host_blocks: tuple[int, ...]
    peer: int = NO_PEER


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """What is not read yet of this load need not be read; it is still answered."""

    load_id: int


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Write a run of one chain to disk: ``host_blocks[i]`` holds the content of ``hashes[i]``."""

    store_id: int
    hashes: tuple[bytes, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareBlocks:
    """``host_blocks[i]`` holds, from now on until something else is written there, the content of ``hashes[i]``: other
    workers of the host may read it. Not answered."""

    hashes: tuple[bytes, ...]
    host_blocks: tuple[int, ...]


TierAction = LoadBlocks | CancelLoad | StoreBlocks | ShareBlocks


@dataclass(frozen=True, slots=True)
class RunLoaded:
    """A load is over. num_blocks: the leading ones that are in their host blocks, each verified (from disk by its
    checksum, from a peer by its hash, and that it was not overwritten meanwhile). duration_ns: of reading them, without
    waiting for other loads."""

    load_id: int
    num_blocks: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class RunStored:
    """A store is over; nothing reads its host blocks any more. num_blocks: how many were written."""

    store_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class DiskContents:
    """Changes of what can be found on disk, also those that other processes made."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskState:
    """Whether the disk may be used from now on. message: why not."""

    is_on: bool
    message: str = ""


TierEvent = RunLoaded | RunStored | DiskContents | DiskState
TIER_EVENTS = {cls.__name__: cls for cls in (RunLoaded, RunStored, DiskContents, DiskState)}
