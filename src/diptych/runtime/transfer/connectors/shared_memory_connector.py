"""KV within one shared pool: the sender has computed straight into the receiver's blocks. No byte of KV moves.

What travels is that a transfer begins, how far it is, its commit, and the acknowledgement: the protocol of TCP over a
unix socket in a directory of our own. Written blocks are visible to the receiver before it hears of them: the sender's
stores come before its system call, the receiver's loads after its own, on memory that both have mapped.
"""

from collections.abc import Sequence

from diptych.control.errors import ConfigError
from diptych.runtime.kv_tensors import LayerCache
from diptych.runtime.transfer.connector import KVFormat, TransferOptions
from diptych.runtime.transfer.stream.carriers import Carriers
from diptych.runtime.transfer.stream.stream_connector import StreamConnector


class SharedMemoryConnector(StreamConnector):
    """See KVConnector. ``send`` only tells the receiver how far the sender is; the caches are never touched."""

    def __init__(self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions) -> None:
        if not options.listen.startswith("unix:"):
            raise ConfigError(f"listen is {options.listen!r}; one shared pool needs unix:///path", param="listen")
        if options.codec != "none":
            raise ConfigError(f"codec is {options.codec!r}; nothing is coded within one shared pool", param="codec")
        super().__init__(Carriers(layers, kv_format, "none", options.frame_bytes, moves=False), kv_format, options)
