"""Moving the KV cache of requests between workers: the table of connectors.

Reading the table loads neither torch nor NIXL; ``make_connector`` imports the one connector that it makes. To add a
connector, write its file and its entry here (docs/disaggregation.md); options, defaults and help follow the entry.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diptych.control.errors import ConfigError
from diptych.runtime.transfer.connector import ConnectorKind, KVConnector, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat

if TYPE_CHECKING:  # this file is read where torch must not be loaded
    from diptych.runtime.kv_cache.kv_tensors import LayerCache

_PACKAGE = "diptych.runtime.transfer.connectors"

# Where no connector is named, the first that serves the device and is installed is taken.
CONNECTORS: dict[str, ConnectorKind] = {
    "shared_memory": ConnectorKind(f"{_PACKAGE}.shared_memory_connector:SharedMemoryConnector", shares_pool=True,
                                   serves_cuda=False, listen="unix://{directory}/kv"),
    "tcp": ConnectorKind(f"{_PACKAGE}.tcp_connector:TcpConnector", packs=True),
    "nixl": ConnectorKind(f"{_PACKAGE}.nixl_connector:NixlConnector", needs="nixl_cu13", extra="nixl"),
}  # fmt: skip


def make_connector(
    name: str,
    layers: "Sequence[LayerCache]",
    kv_format: KVFormat,
    options: TransferOptions,
    groups: Sequence[int] = (),
) -> KVConnector:
    """The connector of this name for these caches: (k, v) of each layer, block i is [i] of each. groups: of each layer,
    the number of its block table ((): all have one).

    Raises ConfigError for another name, for options that the connector cannot have, and when its extra is missing.
    """
    if name not in CONNECTORS:
        raise ConfigError(f"connector is {name!r}; one of {', '.join(CONNECTORS)}", param="connector")
    kind = CONNECTORS[name]
    if options.codec != "none" and not kind.packs:
        raise ConfigError(f"codec is {options.codec!r}; the connector {name} packs nothing: none", param="codec")
    try:
        connector = kind.load()
    except ImportError as error:
        raise ConfigError(f"connector is {name}, which cannot be imported ({error}): {kind.cure}",
                          param="connector") from error  # fmt: skip
    return connector(layers, kv_format, options, groups) if groups else connector(layers, kv_format, options)
