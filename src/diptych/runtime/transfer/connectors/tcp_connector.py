"""KV between hosts: blocks are sent from where they lie and received to where they belong. No RDMA, no broker."""

from collections.abc import Sequence

from diptych.runtime.kv_tensors import LayerCache
from diptych.runtime.transfer.connector import KVFormat, TransferOptions
from diptych.runtime.transfer.stream.carriers import Carriers
from diptych.runtime.transfer.stream.stream_connector import StreamConnector


class TcpConnector(StreamConnector):
    """See KVConnector. Authenticated, checksummed, resumable; also over unix sockets, between pools of one host."""

    def __init__(self, layers: Sequence[LayerCache], kv_format: KVFormat, options: TransferOptions) -> None:
        carriers = Carriers(layers, kv_format, options.codec, options.frame_bytes, moves=True)
        super().__init__(carriers, kv_format, options)
