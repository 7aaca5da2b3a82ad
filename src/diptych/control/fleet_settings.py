"""How a running fleet is set up, as it says to those who ask: enough to simulate it, and to explain what limits it."""

from dataclasses import dataclass, field

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import EngineConfig
from diptych.control.router.topology import Role


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker as it is now. terms_ns: of its step-time model, in nanoseconds (see EngineStats; empty: not reported
    yet). measured: the steps of its warm-up, each (prompt tokens, attention pairs, streams, tokens of their contexts,
    nanoseconds)."""

    worker: int
    role: Role
    engine: EngineConfig
    terms_ns: tuple[float, ...] = ()
    measured: tuple[tuple[int, int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """All workers that are up, and the front end. kv_bytes_per_token: as KV travels (0: it never does).
    shares_memory: handoffs move no bytes."""

    version: str
    model: str
    workers: tuple[WorkerSettings, ...] = ()
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kv_bytes_per_token: int = 0
    shares_memory: bool = True
