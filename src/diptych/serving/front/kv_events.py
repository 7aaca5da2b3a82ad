"""The KV events of vLLM and SGLang: ZeroMQ messages of three frames (topic, number, batch in msgpack), and the request
that has them repeated.

Owns the sockets and the reading of batches; kv_source.py decides what they mean. Needs pyzmq (``diptych[front]``).
Fields that are not known are ignored; blocks that are not plain prompt blocks (an adapter, images, a salt, a group of
layers without full attention, another tier of memory) do not count.
"""

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.router.kv_bridge import BlocksRemoved, CacheCleared, EngineBlocksStored, EngineCacheEvent
from diptych.control.router.kv_source import Batch, KVSource, SourceChange

logger = logging.getLogger(__name__)

RECEIVE_LIMIT = 100_000  # messages that wait in the socket
REPLAY_S = 2.0  # that the engine may take for the next batch of a replay
FIRST_CHECK_S, CHECK_S, LONGEST_CHECK_S = 0.1, 2.0, 60.0  # without a batch, until it is asked whether one was missed
END_OF_REPLAY = -1
IGNORED_TOPICS = (b"load",)
FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class UnreadableBatchError(Exception):
    """A batch is not what the protocol says."""


def require_zmq(param: str) -> None:
    """Raise ConfigError where pyzmq is missing. param: of the option that needs it."""
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError(f"{param} needs pyzmq: pip install '.[front]' in the checkout", param=param)


def read_batch(payload: bytes, other_groups: set[int] | None = None) -> list[EngineCacheEvent]:
    """The events of a batch, those that count. other_groups: the engine's groups of layers that do not (sliding
    windows, states): they are learned from what is stored, and what they remove has the names of blocks that others
    still hold. Raises UnreadableBatchError."""
    try:
        content = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBatchError(str(error)) from None
    if isinstance(content, Mapping):
        events = content.get("events")
    else:
        events = content[1] if isinstance(content, Sequence) and len(content) > 1 else None
    if not isinstance(events, list):
        raise UnreadableBatchError("a batch without a list of events")
    groups = set() if other_groups is None else other_groups
    found = [read_event(event, groups) for event in events]
    return [event for event in found if event is not None]


def read_event(event: Any, other_groups: set[int]) -> EngineCacheEvent | None:
    """An event as a map or as an array with its name first; None for one that does not count. other_groups: see
    read_batch. Raises UnreadableBatchError."""
    if isinstance(event, Mapping):
        name, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        name = event[0]
        names = STORED_FIELDS if name == "BlockStored" else REMOVED_FIELDS
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise UnreadableBatchError(f"an event is {type(event).__name__}")
    if name == "AllBlocksCleared":
        return CacheCleared()
    group = found if isinstance(found := fields.get("group_idx"), int) else -1
    if name == "BlockRemoved":
        return BlocksRemoved(_hashes(fields)) if _is_first_tier(fields) and group not in other_groups else None
    if name == "BlockStored" and group >= 0 and fields.get("kv_cache_spec_kind") not in FULL_ATTENTION:
        other_groups.add(group)
    if name != "BlockStored" or not _counts(fields):
        return None
    parent, tokens, size = fields.get("parent_block_hash"), fields.get("token_ids"), fields.get("block_size")
    if not isinstance(tokens, list) or not all(isinstance(token, int) and 0 <= token < 1 << 32 for token in tokens):
        raise UnreadableBatchError("token_ids of a stored block are not tokens")
    if not isinstance(size, int) or not (parent is None or isinstance(parent, int | bytes)):
        raise UnreadableBatchError("a stored block without block_size, or with an odd parent")
    return EngineBlocksStored(_hashes(fields), parent, tokens, size)


def _hashes(fields: Mapping[str, Any]) -> list[int | bytes]:
    found = fields.get("block_hashes")
    if not isinstance(found, list) or not all(isinstance(block, int | bytes) for block in found):
        raise UnreadableBatchError("block_hashes are not hashes")
    return found


def _is_first_tier(fields: Mapping[str, Any]) -> bool:
    medium = fields.get("medium")
    return medium is None or (isinstance(medium, str) and medium.upper() in ("GPU", "DEVICE", ""))


def _counts(fields: Mapping[str, Any]) -> bool:
    extra = fields.get("extra_keys")
    is_plain = not extra or (isinstance(extra, list) and all(not keys for keys in extra))
    has_adapter = fields.get("lora_id") is not None or fields.get("lora_name") is not None
    kind = fields.get("kv_cache_spec_kind")
    return _is_first_tier(fields) and is_plain and not has_adapter and kind in FULL_ATTENTION


class KVEventReader:
    """Reads one engine's events until it is closed. on_change: called with what follows from each of them."""

    def __init__(self, source: KVSource, address: str, replay: str, on_change: Callable[[SourceChange], None]) -> None:
        self.source = source
        self._address = address
        self._replay = replay
        self._on_change = on_change
        self._has_warned = False
        self._is_mute = False  # the engine repeats nothing, and that was said
        self._other_groups: set[int] = set()

    async def run(self) -> None:
        """Read for ever; cancel it to stop."""
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.set_hwm(RECEIVE_LIMIT)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._address)
            await self._take(self.source.on_connected(), context)
            pause_s = FIRST_CHECK_S
            while True:
                if not await socket.poll(1000 * pause_s):
                    # Batches may have come while the connection was not there yet, or was lost and made again.
                    is_answered = await self._take(self.source.on_connected(), context)
                    pause_s = CHECK_S if is_answered else min(2 * max(pause_s, CHECK_S), LONGEST_CHECK_S)
                    continue
                frames = await socket.recv_multipart()
                if len(frames) >= 2 and not (len(frames) > 2 and frames[0] in IGNORED_TOPICS):
                    await self._take(self._on_frames(frames, self.source.on_batch), context)
        finally:
            socket.close()
            context.destroy(linger=0)

    def _on_frames(self, frames: Sequence[bytes], take: Callable[[int, Batch], SourceChange]) -> SourceChange:
        """A batch that cannot be read counts as one that is lost for good; only without a number is nothing known."""
        if len(frames[-2]) != 8:
            self._warn(f"a batch number of {len(frames[-2])} bytes")
            return self.source.on_lost()
        events: Batch = None
        try:
            events = read_batch(frames[-1], self._other_groups)
        except UnreadableBatchError as error:
            self._warn(str(error))
        return take(int.from_bytes(frames[-2], "big", signed=True), events)

    def _warn(self, words: str) -> None:
        if not self._has_warned:
            logger.warning("KV events of %s cannot be read: %s", self._address, words)
            self._has_warned = True

    async def _take(self, change: SourceChange, context: Any) -> bool:
        """Returns whether the engine has repeated what it was asked for."""
        self._on_change(change)
        if change.replay_from is None:
            return False
        is_answered = await self._ask_again(change.replay_from, context)
        self._on_change(self.source.on_replay_end())
        return is_answered

    async def _ask_again(self, number: int, context: Any) -> bool:
        """Have the batches from this number on repeated, as far as the engine has them. Returns whether it did."""
        import zmq

        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", number.to_bytes(8, "big", signed=True)])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 2 or frames[-2] == END_OF_REPLAY.to_bytes(8, "big", signed=True):
                    return True
                self._on_change(self._on_frames(frames, self.source.on_replayed))
        except TimeoutError:
            if not self._is_mute:
                logger.warning("KV events of %s: %s repeats nothing", self._address, self._replay)
            self._is_mute = True
            return False
        finally:
            socket.close()
