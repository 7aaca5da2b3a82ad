"""Which workers the cluster may use right now, and for what.

A worker that died comes back into the same blocks of its memory domain (one memory that several workers map). It is
used again only when every living worker of that domain has reported that it writes nothing for the old process any
more.
"""

from dataclasses import replace

from diptych.control.cluster.cluster_events import SchedulerChanged
from diptych.control.commands import Command, Configure
from diptych.control.compute_share import ComputeShare
from diptych.control.config import SchedulerConfig
from diptych.control.errors import ConflictError, NotFoundError
from diptych.control.router.topology import Role, WorkerInfo


class Membership:
    """Workers by number: what each said of itself when it was last ready, and whether it is up."""

    def __init__(self) -> None:
        self.infos: dict[int, WorkerInfo] = {}
        self.up: dict[int, None] = {}  # in the order of their coming
        self.schedulers: dict[int, SchedulerConfig] = {}  # of workers whose settings were changed since the start
        self.draining: dict[int, bool] = {}  # worker -> whether nothing is left there
        self.shortest = self.longest = 0  # of the longest sequences that each takes
        self._roles: dict[int, Role] = {}  # of workers whose roles were changed since the start
        self._ready: dict[int, None] = {}
        self._owed: dict[int, set[int]] = {}  # worker -> peers that may still write into its old memory

    def on_scheduler_changed(self, event: SchedulerChanged, now: int) -> list[Command]:
        """Take in SchedulerChanged: the worker has new scheduler settings."""
        self.schedulers[event.worker] = event.scheduler
        return self._configure(event.worker) if self.is_ready(event.worker) else []

    def _configure(self, worker: int) -> list[Command]:
        scheduler = self.schedulers.get(worker)
        return [] if scheduler is None else [Configure(worker, scheduler)]

    def on_ready(self, info: WorkerInfo) -> list[Command]:
        """A new process of this worker serves; it begins with the settings of the start."""
        self.infos[info.number] = replace(info, role=self._roles.get(info.number, info.role))
        self._ready[info.number] = None
        limits = [known.max_sequence_tokens for known in self.infos.values()]
        self.shortest, self.longest = min(limits), max(limits)
        return self._configure(info.number)

    def is_usable(self, worker: int) -> bool:
        """Whether it is up and not draining."""
        return worker in self.up and worker not in self.draining

    @property
    def are_unequal(self) -> bool:
        """Whether some take longer sequences than others."""
        return self.shortest < self.longest

    def of_other_copies(self, worker: int) -> frozenset[int]:
        """The workers with another copy of the model than this one."""
        copy = self.infos[worker].model_copy
        return frozenset(number for number, info in self.infos.items() if info.model_copy != copy)

    @property
    def usable(self) -> list[int]:
        """The workers that are up and not draining."""
        return [worker for worker in self.up if worker not in self.draining]

    @property
    def num_usable(self) -> int:
        """How many workers are up and not draining."""
        return len(self.up) - sum(worker in self.up for worker in self.draining)

    def change_role(self, worker: int, role: Role) -> None:
        """This worker has another role from now on, also when it is started again."""
        self._roles[worker] = role
        self.infos[worker] = replace(self.infos[worker], role=role)

    def on_resized(self, worker: int, share: ComputeShare) -> None:
        """The process of this worker computes on another share."""
        self.infos[worker] = replace(self.infos[worker], share=share)

    def check_change(self, worker: int, role: Role | None) -> None:
        """Raise NotFoundError when the worker is not known, and ConflictError when with this role (None: drained) no
        usable worker would be left for a phase."""
        if worker not in self.infos:
            raise NotFoundError(f"worker is {worker}; there are {', '.join(map(str, self.infos))}", param="worker")
        roles = [self.infos[other].role for other in self.usable if other != worker]
        roles += [] if role is None else [role]
        for phase, other in (("prefill", "decode"), ("decode", "prefill")):
            if all(left == other for left in roles):
                change = "is drained" if role is None else f"gets the role {role}"
                raise ConflictError(f"no worker that can {phase} is left when worker {worker} {change}", param="role")

    def is_ready(self, worker: int) -> bool:
        """Whether a process of this worker serves."""
        return worker in self._ready

    def on_lost(self, worker: int) -> list[int]:
        """Take in that a worker's process has ended. Returns the peers that must forget it (none know a process that
        was never up)."""
        was_up = worker in self.up
        self.up.pop(worker, None)
        self._ready.pop(worker, None)
        for owed in self._owed.values():
            owed.discard(worker)
        domain = self.infos[worker].memory_domain if worker in self.infos else None
        if not was_up or domain is None:
            return []
        peers = [peer for peer in sorted(self._ready) if self.infos[peer].memory_domain == domain]
        self._owed.setdefault(worker, set()).update(peers)
        return peers

    def on_forgotten(self, peer: int, worker: int) -> None:
        """``peer`` writes nothing into the memory of ``worker`` any more."""
        self._owed.get(worker, set()).discard(peer)

    def take_newcomers(self) -> list[WorkerInfo]:
        """Workers that may be used from now on; they count as up."""
        newcomers = [
            self.infos[worker] for worker in self._ready if worker not in self.up and not self._owed.get(worker)
        ]
        for info in newcomers:
            self.up[info.number] = None
        return newcomers
