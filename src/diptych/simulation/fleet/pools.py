"""How a fleet is split into workers that prefill, decode or do both, and which of them share memory.

Owns the numbers of the workers: those that prefill first, then those that decode, then those that do both.
"""

from dataclasses import dataclass

from diptych.control.config import EngineConfig
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.simulation.fleet.links import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """link: one of simulation.links.LINKS; every worker has one for each direction. kv_bytes_per_token: of the whole
    model, as it travels. prefill: settings of the workers that only prefill (None: those of the others). num_hosts:
    worker i is on host i % num_hosts, and the workers of a host borrow blocks of each other instead of sending them
    (0: every worker is on a host of its own; with the link "shared_memory" all are on one).
    """

    num_prefill: int
    num_decode: int
    kv_bytes_per_token: int
    link: str = "ib400"
    prefill: EngineConfig | None = None
    num_both: int = 0
    num_hosts: int = 0

    def __post_init__(self) -> None:
        Link.named(self.link)
        for name, least in (
            ("num_prefill", 0), ("num_decode", 0), ("num_both", 0), ("num_hosts", 0), ("kv_bytes_per_token", 1)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}", param=name)
        for name in ("num_prefill", "num_decode"):
            if not getattr(self, name) + self.num_both:
                raise ConfigError(
                    f"{name} is 0 and num_both is 0; no worker could do that work: at least 1 of either", param=name
                )
        if self.link == "shared_memory":
            object.__setattr__(self, "num_hosts", 1)

    @property
    def num_workers(self) -> int:
        """Of all roles."""
        return self.num_prefill + self.num_decode + self.num_both

    def role(self, worker: int) -> Role:
        """The role of a worker."""
        if worker < self.num_prefill:
            return "prefill"
        return "decode" if worker < self.num_prefill + self.num_decode else "both"
