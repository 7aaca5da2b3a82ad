"""Moving the KV cache of requests between workers.

Owns the one table of connectors. Each is imported when it is asked for: the interface loads neither torch nor NIXL.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import KVConnector, KVFormat, TransferOptions

if TYPE_CHECKING:
    from diptych.runtime.kv_tensors import LayerCache

    Factory = Callable[[Sequence[LayerCache], KVFormat, TransferOptions], KVConnector]


def _shared_memory(layers: "Sequence[LayerCache]", kv_format: KVFormat, options: TransferOptions) -> KVConnector:
    from diptych.runtime.transfer.connectors.shared_memory_connector import SharedMemoryConnector

    return SharedMemoryConnector(layers, kv_format, options)


def _tcp(layers: "Sequence[LayerCache]", kv_format: KVFormat, options: TransferOptions) -> KVConnector:
    from diptych.runtime.transfer.connectors.tcp_connector import TcpConnector

    return TcpConnector(layers, kv_format, options)


def _nixl(layers: "Sequence[LayerCache]", kv_format: KVFormat, options: TransferOptions) -> KVConnector:
    from diptych.runtime.transfer.connectors.nixl_connector import NixlConnector

    return NixlConnector(layers, kv_format, options)


CONNECTORS: "dict[str, Factory]" = {"shared_memory": _shared_memory, "tcp": _tcp, "nixl": _nixl}


def make_connector(
    name: str, layers: "Sequence[LayerCache]", kv_format: KVFormat, options: TransferOptions
) -> KVConnector:
    """The connector of this name for these caches: (k, v) of each layer, block i is [i] of each.

    Raises ConfigError for another name, for options that the connector cannot have, and when its extra is missing.
    """
    if name not in CONNECTORS:
        raise ConfigError(f"connector is {name!r}, not one of {', '.join(CONNECTORS)}", param="connector")
    return CONNECTORS[name](layers, kv_format, options)
