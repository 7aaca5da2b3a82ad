"""Whether Ray starts the workers of a fleet, and what each of them needs: a part of the settings of a fleet."""

from dataclasses import dataclass
from pathlib import Path

from diptych.control.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """address: of the Ray cluster ("auto": the one that runs on this host). key_file: on every host. num_cpus,
    num_gpus: that Ray keeps for each worker. wait_s: how long Ray may take to find room for one."""

    key_file: Path
    address: str = "auto"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value, is_right in (
            ("ray_cpus", self.num_cpus, self.num_cpus >= 0),
            ("ray_gpus", self.num_gpus, self.num_gpus >= 0),
            ("ray_wait", self.wait_s, self.wait_s > 0),
        ):
            if not is_right:
                limit = "more than 0" if name == "ray_wait" else "at least 0"
                raise ConfigError(f"{name} is {value}; it must be {limit}", param=name)

    @property
    def needs(self) -> str:
        """What a worker takes, for people."""
        return f"{self.num_cpus:g} CPUs, {self.num_gpus:g} GPUs"
