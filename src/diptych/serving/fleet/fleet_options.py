"""How many workers of which kind, on which cores, and how they hand over KV: the settings of a fleet.

Owns the refusal of settings that contradict each other or have no effect. Must never start anything.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.config import KVDTypeName
from diptych.control.errors import ConfigError
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.router.topology import ROLES, Role
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import CodecName
from diptych.serving import edge_limits
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import ExplainMisses, parse_cores
from diptych.serving.ray.ray_options import RayOptions

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The workers of one front end.

    both None: one when there is no other worker, else none. transfer: how KV goes from worker to worker, a name of
    CONNECTORS (auto: the first that serves the device). kv_codec: what it is packed with on a wire (int8 and int4
    round, and auto may choose them: answers can differ in places). heartbeat_timeout_s: silence after which a worker is
    killed and started again. cores_per_worker: a number, or lists of CPUs such as 0-3/4-7 in the order prefill, decode,
    both (None: the machine's cores are divided). core_split: cores by the weights of the roles, divided again when a
    role changes or a worker comes or goes (None: never again). max_workers: how many there may be at once, with those
    that are added while serving (None: as many as there are at the start). cluster: how requests are routed, let in and
    tried again. groups: unequal workers instead of prefill, decode and both; workers that are added later are as the
    fleet has it. plan: of the planner (its max_workers is that of the fleet). twin_command: starts the process that
    simulates for it. explain_misses: find out for each prompt why it was not in a cache; "text": and keep token ids, to
    show what differs. join: where workers of other hosts come in (None: there are none); they count in
    max_workers. ray: Ray starts the workers, on its hosts (None: they are processes of this one).
    """

    prefill: int = 0
    decode: int = 0
    both: int | None = None
    transfer: str = "auto"
    kv_codec: CodecName = "none"
    heartbeat_timeout_s: float = 10.0
    cores_per_worker: str | None = None
    core_split: CoreSplit | None = None
    max_workers: int | None = None
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    groups: tuple[WorkerGroup, ...] = ()
    plan: PlannerConfig = field(default_factory=lambda: PlannerConfig("off"))
    twin_command: tuple[str, ...] = ()
    explain_misses: ExplainMisses = "off"
    join: JoinOptions | None = None
    ray: RayOptions | None = None

    def __post_init__(self) -> None:
        self._check_groups()
        for name in ("prefill", "decode", "both"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_WORKERS:
                raise ConfigError(f"{name} is {value}; it must be in [0, {MAX_WORKERS}]", param=name)
        for name, known in (
            ("transfer", ("auto", *CONNECTORS)),
            ("kv_codec", get_args(CodecName)),
            ("explain_misses", get_args(ExplainMisses)),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; one of {', '.join(known)}", param=name)
        if not self.heartbeat_timeout_s >= 0.5:
            raise ConfigError(
                f"heartbeat_timeout_s is {self.heartbeat_timeout_s}; it must be at least 0.5",
                param="heartbeat_timeout_s",
            )
        if self.plan.mode != "off" and not self.twin_command:
            raise ConfigError(f"plan is {self.plan.mode} and there is no twin_command", param="plan")
        self._check_roles()
        if self.max_workers is not None and not len(self.roles) <= self.max_workers <= MAX_WORKERS:
            raise ConfigError(
                f"max_workers is {self.max_workers}; it must be in [{len(self.roles)}, {MAX_WORKERS}]: "
                f"{len(self.roles)} are started",
                param="max_workers",
            )
        self._check_effects()

    @property
    def slots(self) -> tuple[Role, ...]:
        """The roles of all workers that there may be: those that are added begin with both."""
        both: Role = "both"
        most = self.max_workers or (len(self.roles) + edge_limits.JOINED_WORKERS if self.join is not None else 0)
        return self.roles + (both,) * (most - len(self.roles))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of all workers in their order: prefill, decode, both."""
        if self.groups:
            return tuple(group.role for group in self.groups_of_workers)
        num_both = int(not self.prefill and not self.decode) if self.both is None else self.both
        counts: tuple[tuple[Role, int], ...] = (("prefill", self.prefill), ("decode", self.decode), ("both", num_both))
        return tuple(role for role, count in counts for _ in range(count))

    @property
    def groups_of_workers(self) -> tuple[WorkerGroup, ...]:
        """The group of each worker, in the order of ``roles``; within a role as the groups are given."""
        ordered = sorted(self.groups, key=lambda group: ROLES.index(group.role))
        return tuple(group for group in ordered for _ in range(group.replicas))

    def _check_groups(self) -> None:
        if not self.groups:
            return
        for name, default in (("prefill", 0), ("decode", 0), ("both", None), ("cores_per_worker", None)):
            if (value := getattr(self, name)) != default:
                raise ConfigError(f"{name} is {value}, but the pools say what workers there are", param=name)
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ConfigError(f"two pools have one name: {', '.join(names)}", param="pools")
        if len(self.groups_of_workers) > MAX_WORKERS:
            raise ConfigError(
                f"the pools have {len(self.groups_of_workers)} workers; at most {MAX_WORKERS}", param="pools"
            )

    def _check_roles(self) -> None:
        roles = set(self.roles)
        if self.join is not None:  # what is missing may join
            return
        if not roles:
            raise ConfigError("both is 0 and there is no other worker; at least one must serve", param="both")
        for missing, given in (("decode", "prefill"), ("prefill", "decode")):
            if roles == {given}:
                raise ConfigError(
                    f"{given} is {len(self.roles)} and no worker can {missing}; give --{missing} or --both",
                    param=missing,
                )

    def _check_effects(self) -> None:
        """Refuse settings that have no effect with this number of workers."""
        disaggregate = self.cluster.routing.disaggregate
        if self.join is not None:
            self._check_join(self.join)
        if self.ray is not None:
            if self.join is None:
                raise ConfigError("launcher is ray, which needs listen_workers: its workers join", param="launcher")
            if self.cores_per_worker is not None:
                raise ConfigError(
                    "launcher is ray; ray_cpus says what a worker has, not cores_per_worker", param="cores_per_worker"
                )
        if self.core_split is not None:
            if len(self.slots) == 1:
                raise ConfigError("core_split has no effect with one worker", param="core_split")
            if self.cores_per_worker is not None:
                raise ConfigError("core_split and cores_per_worker exclude each other", param="core_split")
        if len(self.slots) == 1:
            if self.plan.mode != "off":
                raise ConfigError(f"plan is {self.plan.mode}: no effect with one worker", param="plan")
            for name, default in (("transfer", "auto"), ("kv_codec", "none")):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name} has no effect with one worker", param=name)
            if disaggregate == "always":
                raise ConfigError("disaggregate is always and there is only one worker", param="disaggregate")
        if "both" not in self.roles and disaggregate == "never" and self.prefill:
            logger.warning("disaggregate is never: prefill workers only help when no decode worker is up")
        if self.transfer != "auto":
            check_codec(self.transfer, self.kv_codec)
            kind = CONNECTORS[self.transfer]
            if not kind.is_installed:
                raise ConfigError(
                    f"transfer is {self.transfer}, which is not installed ({kind.cure})", param="transfer"
                )

    def _check_join(self, join: JoinOptions) -> None:
        """Refuse what cannot be with workers on other hosts."""
        for name in ("core_split", "groups"):
            if getattr(self, name):
                raise ConfigError(f"{name} and listen_workers exclude each other", param=name)
        if self.transfer != "auto" and CONNECTORS[self.transfer].shares_pool:
            raise ConfigError(
                f"transfer is {self.transfer}, which serves one host only, and workers of others may join",
                param="transfer",
            )
        if self.transfer == "nixl" and not join.transfer_plain:
            raise ConfigError("transfer is nixl, which does not encrypt: it needs transfer_plain", param="transfer")
        if self.roles and join.is_everywhere and self.ray is None:
            raise ConfigError(
                f"listen_workers is {join.listen}: workers of this host need an address that others reach; name it, or "
                "give --both 0",
                param="listen_workers",
            )


def check_codec(transfer: str, kv_codec: CodecName, kv_dtype: KVDTypeName = "auto") -> None:
    """Raises ConfigError for a codec that would have no effect with this connector, or on a cache of 8 bits."""
    if kv_codec not in ("auto", "none") and kv_dtype != "auto":
        raise ConfigError(
            f"kv_codec is {kv_codec} and kv_dtype is {kv_dtype}: KV is in 8 bits already; supported: auto, none",
            param="kv_codec",
        )
    if kv_codec not in ("auto", "none") and not CONNECTORS[transfer].packs:
        packing = ", ".join(name for name, kind in CONNECTORS.items() if kind.packs)
        raise ConfigError(
            f"kv_codec is {kv_codec} and has no effect with transfer {transfer}, which packs nothing ({packing} does)",
            param="kv_codec",
        )


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What a worker computes on. cpus: a list such as "0,1" (None: wherever the process may run). num_threads: one for
    each core of these (None: as many as there are CPUs)."""

    cpus: str | None
    num_threads: int | None


def divide_cores(cores: Sequence[tuple[int, ...]], num_workers: int, wish: str | None) -> tuple[CoreShare | None, ...]:
    """The share of each worker of ``cores``, each the CPUs in it (None: all of it, for one worker without a wish).

    Each worker gets whole cores, at least one, with all their SMT siblings: two workers on siblings would take each
    other's execution units and cache. With more workers than cores they overlap, with a warning in the log. Raises
    ConfigError for a wish that cannot be met.
    """
    if wish is None:
        if num_workers == 1:
            return (None,)
        count = max(1, len(cores) // num_workers)
        if num_workers > len(cores):
            logger.warning(
                "%d workers on %d cores: some share a core and will disturb each other", num_workers, len(cores)
            )
    elif not wish.isdigit():
        return _listed_cores(wish, num_workers)
    else:
        count = int(wish)
        if not 1 <= count <= len(cores):
            raise ConfigError(f"cores_per_worker is {count}; it must be in [1, {len(cores)}]", param="cores_per_worker")
        if count * num_workers > len(cores):
            logger.warning("%d workers of %d cores each on %d cores: they overlap", num_workers, count, len(cores))
    shares = []
    for worker in range(num_workers):
        own = [cores[(worker * count + at) % len(cores)] for at in range(count)]
        shares.append(CoreShare(",".join(str(cpu) for core in own for cpu in core), count))
    return tuple(shares)


def _listed_cores(wish: str, num_workers: int) -> tuple[CoreShare, ...]:
    lists = wish.split("/")
    if len(lists) != num_workers:
        raise ConfigError(
            f"cores_per_worker is {wish!r}: {len(lists)} lists for {num_workers} workers", param="cores_per_worker"
        )
    return tuple(CoreShare(",".join(map(str, parse_cores(cpus))), None) for cpus in lists)
