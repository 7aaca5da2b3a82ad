"""KV through NIXL (RDMA, NVLink, or the copy between processes that UCX finds): the receiver reads the sender's blocks.

Needs the extra [nixl]. The protocol is that of stream/, over TCP or a unix socket; but the body of a part says where
its blocks lie, and the receiver has NIXL read them before it acknowledges the part. The receiver does the copying, so
both fences are local: forget waits for the part that is being read, and what is read of a transfer that its sender has
cancelled is never committed (its blocks may still be read while cancel returns, to no effect).

Blocks must have one format on both sides. Reads are authenticated and encrypted no better than the fabric below does
it: the handshake keeps strangers from learning the addresses, it does not guard the fabric.
"""

import importlib
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.connector import BlockIds, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.body_format import BodyFormat, Part
from diptych.runtime.transfer.stream.frames import ProtocolError
from diptych.runtime.transfer.stream.stream_connector import StreamConnector

_nixl: Any = importlib.import_module("nixl_cu13._api")  # has no types, and is not installed everywhere

READ = 16  # value of Frame.encoding: a body that says where to read
PART_BYTES = 1 << 23  # read at once: long enough that posting it does not matter, short enough for others to wait
POLL_S = 50e-6  # between two looks at a read that is under way; NIXL has nothing to sleep on
MAX_METADATA_BYTES = 1 << 20
_ERRORS = ("Backend", "Cancelled", "InvalidParam", "Mismatch", "NotAllowed", "NotFound", "NotPosted", "NotSupported",
           "RemoteDisconnect", "RepostActive", "Unknown")  # fmt: skip
_BODY = struct.Struct("<IIi")  # bytes of metadata, blocks of K or V, device (-1: host memory)


class NixlConnector(StreamConnector):
    """A KVConnector whose receiver reads the sender's blocks through NIXL."""

    def __init__(
        self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions, groups: Sequence[int] = ()
    ) -> None:
        self._reads = NixlReads(layers, kv_format, options.resume_timeout_s)
        super().__init__(self._reads, kv_format, options, groups)

    def send(
        self, attempt_id: str, start: int, num_tokens: int, block_ids: BlockIds, num_layers: int | None = None
    ) -> None:
        """Queue KV once the GPU has done what is queued: the blocks are read from outside of its queue."""
        if self._reads.device >= 0:
            torch.cuda.current_stream(self._reads.device).synchronize()
        super().send(attempt_id, start, num_tokens, block_ids, num_layers)

    def close(self) -> None:
        super().close()
        self._reads.close()


class NixlReads:
    """The only BodyFormat (and BodyFormats) of this connector. Owns the NIXL agent."""

    encoding = READ

    def __init__(self, layers: Sequence[LayerCache], kv_format: KVFormat, timeout_s: float) -> None:
        caches = [cache for pair in layers for cache in pair]
        if not all(cache.is_contiguous() for cache in caches):
            raise ConfigError("the tensors of the KV cache must be contiguous to be transferred", param="layers")
        # Layers of several groups lie in the same regions, in other blocks. Registered memory must not go away.
        self._caches = [*{cache.data_ptr(): cache for cache in caches}.values()]
        self._format = kv_format
        self._timeout_s = timeout_s
        self._bases = np.array([cache.data_ptr() for cache in caches], dtype=np.int64)
        self._num_blocks = caches[0].shape[0]
        self.device: int = caches[0].device.index if caches[0].device.type == "cuda" else -1  # -1: host memory
        self._agent: Any = _nixl.nixl_agent(secrets.token_hex(8), _nixl.nixl_agent_config(backends=["UCX"]))
        self._registered: Any = self._agent.register_memory(self._caches)
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._errors = tuple(getattr(_nixl.nixlBind, f"nixl{name}Error") for name in _ERRORS)
        self._peers: dict[bytes, str] = {}  # names of agents, by their metadata

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> BodyFormat:
        """This format. Raises ConfigError when the formats of both sides differ."""
        if receiver != self._format:
            raise ConfigError(f"NIXL needs one format; here {self._format}, there {receiver}", param="kv_format")
        return self

    def for_receiving(self, encoding: int, sender: KVFormat) -> BodyFormat:
        if encoding != READ or sender != self._format:
            raise ProtocolError(f"encoding {encoding}, where only blocks of one format can be read")
        return self

    def parts(self, start: int, num_tokens: int, layers: range | None = None) -> Iterator[Part]:
        form = self._format
        span = layers or range(form.num_layers)
        per_layer = 2 * form.bytes_per_layer_block * -(-num_tokens // form.block_size)
        height = min(len(span), max(1, PART_BYTES // per_layer))
        for layer in span[::height]:
            rows = min(height, span.stop - layer)
            yield Part(start, num_tokens, layer, rows, layer + rows == span.stop)

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """A body that says where the part lies."""
        addresses = self._addresses(block_ids, part)
        head = _BODY.pack(len(self._metadata), len(addresses), self.device)
        return [memoryview(head), memoryview(self._metadata), memoryview(addresses.tobytes())]

    def num_bytes(self, part: Part) -> int:
        size = self._format.block_size
        blocks = -(-(part.start + part.num_tokens) // size) - part.start // size
        return 2 * part.num_layers * blocks * self._format.bytes_per_layer_block

    def accepts(self, part: Part, body_bytes: int) -> bool:
        addresses = 8 * (self.num_bytes(part) // self._format.bytes_per_layer_block)
        return 0 <= body_bytes - _BODY.size - addresses <= MAX_METADATA_BYTES

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        return None

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """Read the blocks. Returns when they are here. Raises ProtocolError when they cannot be had."""
        metadata_bytes, count, device = _BODY.unpack_from(body)
        local = self._addresses(block_ids, part)
        if count != len(local) or len(body) != _BODY.size + metadata_bytes + 8 * count:
            raise ProtocolError("the addresses of a part do not fit it")
        metadata = bytes(body[_BODY.size : _BODY.size + metadata_bytes])
        remote = np.frombuffer(body[_BODY.size + metadata_bytes :], dtype=np.int64)
        unit = self._format.bytes_per_layer_block
        ends = np.flatnonzero((np.diff(local) != unit) | (np.diff(remote) != unit)) + 1
        begins = np.concatenate(([0], ends))
        sizes = np.diff(np.concatenate((begins, [count]))) * unit
        try:
            if metadata not in self._peers:
                self._peers[metadata] = self._agent.add_remote_agent(metadata)
            self._read(
                self._descriptors(local[begins], sizes, self.device),
                self._descriptors(remote[begins], sizes, device),
                self._peers[metadata],
            )
        except self._errors as error:
            raise ProtocolError(f"NIXL cannot read the sender's blocks: {error}") from error

    def close(self) -> None:
        """Give the memory back."""
        for name in self._peers.values():
            self._agent.remove_remote_agent(name)
        self._peers.clear()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None

    def _addresses(self, block_ids: Sequence[int], part: Part) -> npt.NDArray[np.int64]:
        """[layers, K and V, blocks] in one row: where each block of K or V begins. Raises ProtocolError."""
        size = self._format.block_size
        if part.start % size:
            raise ProtocolError(f"KV from token {part.start} on, which is no multiple of {size}")
        ids = np.array(block_ids[part.start // size : -(-(part.start + part.num_tokens) // size)], dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self._num_blocks:
            raise ProtocolError(f"block ids go from {ids.min()} to {ids.max()}; there are {self._num_blocks}")
        bases = self._bases[2 * part.first_layer : 2 * (part.first_layer + part.num_layers)]
        return (bases[:, None] + ids * self._format.bytes_per_layer_block).reshape(-1)

    def _descriptors(self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], device: int) -> Any:
        rows = np.stack([addresses, sizes, np.full(len(sizes), max(0, device))], axis=1).astype(np.uint64)
        return self._agent.get_xfer_descs(rows, mem_type="DRAM" if device < 0 else "VRAM")

    def _read(self, local: Any, remote: Any, name: str) -> None:
        handle = self._agent.initialize_xfer("READ", local, remote, name)
        deadline = time.monotonic() + self._timeout_s
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise ProtocolError(f"NIXL has not read the sender's blocks within {self._timeout_s:g} s")
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ProtocolError("NIXL could not read the sender's blocks")
