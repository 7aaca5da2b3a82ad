"""KV within one shared pool: the sender has computed straight into the receiver's blocks. No byte of KV moves.

What travels is that a transfer begins, how far it is, its commit, and the acknowledgement: the protocol of TCP over a
unix socket in the worker's private directory. Written blocks are visible to the receiver before it learns of them: the
sender's stores come before its system call, the receiver's loads after its own, on memory that both have mapped.
"""

from collections.abc import Iterator, Sequence

from diptych.control.errors import ConfigError
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.connector import TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.body_format import BodyFormat, Part
from diptych.runtime.transfer.stream.frames import ProtocolError
from diptych.runtime.transfer.stream.stream_connector import StreamConnector

EMPTY = 0  # value of Frame.encoding


class SharedMemoryConnector(StreamConnector):
    """A KVConnector for workers with one pool of memory. ``send`` only reports to the receiver how far the sender is;
    the caches are never touched."""

    def __init__(
        self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions, groups: Sequence[int] = ()
    ) -> None:
        if not options.listen.startswith("unix:"):
            raise ConfigError(f"listen is {options.listen!r}; one shared pool needs unix:///path", param="listen")
        super().__init__(EmptyBody(kv_format.num_layers), kv_format, options, groups)


class EmptyBody:
    """The only BodyFormat (and BodyFormats) of this connector: frames without a body."""

    encoding = EMPTY

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> BodyFormat:
        return self

    def for_receiving(self, encoding: int, sender: KVFormat) -> BodyFormat:
        if encoding != EMPTY:
            raise ProtocolError(f"encoding {encoding}, where no KV is sent")
        return self

    def parts(self, start: int, num_tokens: int, layers: range | None = None) -> Iterator[Part]:
        span = layers or range(self._num_layers)
        yield Part(start, num_tokens, span.start, len(span), True)

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        return []

    def num_bytes(self, part: Part) -> int:
        return 0

    def accepts(self, part: Part, body_bytes: int) -> bool:
        return body_bytes == 0

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        return []

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """Do nothing: the KV is in the shared pool already."""
