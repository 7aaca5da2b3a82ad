"""What is known of a KV connector before it is made.

The front end chooses a connector and checks options against it. It never loads torch, which most connectors need; so
these facts stand in the table of connectors, beside the name of the class.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.transfer.connector import KVConnector


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """One entry of CONNECTORS.

    implementation: "module:class" of a KVConnector that is made with (layers, kv_format, options).
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
