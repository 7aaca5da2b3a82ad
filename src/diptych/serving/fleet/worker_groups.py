"""Groups of equal workers within a fleet of unequal ones: what each group has of its own.

Workers with the same weights in the same arithmetic are of one *model copy*. Two copies compute different KV from the
same prompt, so workers of different copies share no memory and hand no request to each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from diptych.control.config import DTypeName, QuantizeName, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, Role
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.serving.kv_memory import kv_geometry_of
from diptych.serving.link.engine_options import EngineOptions, parse_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """``replicas`` equal workers. What is None is as the fleet has it.

    max_model_len: context length in tokens. kv_cache_bytes, kv_cache_tokens: of each worker, at most one of the two;
    tokens as all layers would keep them, also those that attend to a window. cores: a list of CPUs such as "0-3", which
    the group's workers divide, or the number of cores of each worker. dtype, quantize: of its copy of the model.
    scheduler: all of its settings.
    """

    name: str
    role: Role = "both"
    replicas: int = 1
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    cores: str | int | None = None
    dtype: DTypeName | None = None
    quantize: QuantizeName | None = None
    scheduler: SchedulerConfig | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role of {self.name} is {self.role!r}; one of {', '.join(ROLES)}", param="role")
        limits = {"replicas": 1, "max_model_len": 2, "kv_cache_bytes": 1, "kv_cache_tokens": 1, "cores": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{name} of {self.name} is {value}; it must be at least {least}", param=name)
        if self.kv_cache_bytes is not None and self.kv_cache_tokens is not None:
            raise ConfigError(
                f"{self.name} has kv_cache_bytes and kv_cache_tokens; give one of them", param="kv_cache_tokens"
            )
        if isinstance(self.cores, str):
            parse_cores(self.cores)

    def applied_to(self, options: EngineOptions) -> EngineOptions:
        """The options of its workers, of which ``options`` are the fleet's. Raises ConfigError."""
        device = {name: value for name in ("dtype", "quantize") if (value := getattr(self, name)) is not None}
        changes = {name: value for name in ("max_model_len", "scheduler") if (value := getattr(self, name)) is not None}
        options = msgspec.structs.replace(options, device=msgspec.structs.replace(options.device, **device), **changes)
        kv_cache_bytes = self.kv_cache_bytes
        if self.kv_cache_tokens is not None:
            geometry = kv_geometry_of(options)
            kv_cache_bytes = geometry.blocks_for(self.kv_cache_tokens) * geometry.block_bytes
        if kv_cache_bytes is None:
            return options
        memory = msgspec.structs.replace(options.memory, kv_cache_bytes=kv_cache_bytes)
        return msgspec.structs.replace(options, memory=memory)


def copies_of(
    options: Sequence[EngineOptions], geometries: Sequence[KVGeometry], roles: Sequence[Role]
) -> tuple[int, ...]:
    """The number of each worker's model copy, from 0: workers of one copy also lay their KV out alike. Raises
    ConfigError for a copy that can do only one phase."""
    numbers: dict[object, int] = {}
    copies = []
    for own, geometry in zip(options, geometries, strict=True):
        copies.append(numbers.setdefault((own.model, own.device.quantize, geometry), len(numbers)))
    for copy in numbers.values():
        of_copy = {role for role, number in zip(roles, copies, strict=True) if number == copy}
        for role, missing in (("prefill", "decode"), ("decode", "prefill")):
            if of_copy == {role}:
                own = options[copies.index(copy)]
                raise ConfigError(
                    f"no worker can {missing} with the weights of worker {copies.index(copy)} (quantize is "
                    f"{own.device.quantize}, dtype {own.device.dtype}): KV of other weights is never handed over",
                    param="pools",
                )
    return tuple(copies)
