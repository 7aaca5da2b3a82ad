"""Who is in the fleet right now, and who may come back: the lives of the workers as the cluster should see them.

A worker that died comes back into the same blocks of the shared pool. It is told to the cluster only when every living
peer has said that it touches nothing of the old one any more. Must never send anything itself.
"""

from collections.abc import Sequence

from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role, WorkerInfo
from diptych.serving.link.messages import Ready


class Membership:
    """Workers 0 .. n - 1 with their roles. shares_pool: their blocks lie in one memory."""

    def __init__(self, roles: Sequence[Role], *, shares_pool: bool) -> None:
        self.roles = tuple(roles)
        self.shares_pool = shares_pool
        self.is_up = [False] * len(self.roles)  # as the cluster knows it
        self.known: list[Ready | None] = [None] * len(self.roles)  # what each said of itself last
        self._is_ready = [False] * len(self.roles)
        self._owed: list[set[int]] = [set() for _ in self.roles]  # worker -> peers that may still touch its old memory

    @property
    def is_complete(self) -> bool:
        """Whether every worker has been ready at least once."""
        return all(self.known)

    @property
    def is_routable(self) -> bool:
        """Whether a request would find a place: any worker can serve one whole when its peers are gone."""
        return any(self.is_up)

    def on_ready(self, worker: int, ready: Ready) -> None:
        """A new process of this worker serves."""
        self.known[worker] = ready
        self._is_ready[worker] = True

    def on_lost(self, worker: int) -> list[int]:
        """Its process has ended: the peers that must forget it (a process that was never up is known to none)."""
        was_up, self.is_up[worker], self._is_ready[worker] = self.is_up[worker], False, False
        for owed in self._owed:
            owed.discard(worker)
        if not (was_up and self.shares_pool):
            return []
        peers = [peer for peer, is_ready in enumerate(self._is_ready) if is_ready]
        self._owed[worker] |= set(peers)
        return peers

    def on_forgotten(self, peer: int, worker: int) -> None:
        """``peer`` touches nothing of ``worker`` any more."""
        self._owed[worker].discard(peer)

    def take_newcomers(self) -> list[int]:
        """Workers that may be told to the cluster now; they count as up from here on."""
        newcomers = [
            worker
            for worker, is_ready in enumerate(self._is_ready)
            if is_ready and not self.is_up[worker] and not self._owed[worker]
        ]
        for worker in newcomers:
            self.is_up[worker] = True
        return newcomers

    def infos(self) -> list[WorkerInfo]:
        """All workers for the cluster. Raises ConfigError when their blocks differ in a way that nobody has planned."""
        infos = []
        for number, (role, ready) in enumerate(zip(self.roles, self.known, strict=True)):
            assert ready is not None, "not complete"
            pool = 0 if self.shares_pool else None
            infos.append(WorkerInfo(number, role, ready.num_blocks, ready.block_size, pool=pool))
        if len({info.block_size for info in infos}) > 1:
            raise ConfigError("the workers' block sizes differ", param="block_size")
        return infos

    def joint_ready(self) -> Ready:
        """The fleet as one worker: what all can do, and what the largest decode worker can hold."""
        known = [ready for ready in self.known if ready is not None]
        decoders = [
            ready for role, ready in zip(self.roles, self.known, strict=True) if ready is not None and role != "prefill"
        ]
        prefillers = [
            ready for role, ready in zip(self.roles, self.known, strict=True) if ready is not None and role != "decode"
        ]
        first = known[0]
        return Ready(
            min(ready.vocab_size for ready in known),
            min(ready.max_model_len for ready in known),
            max(ready.kv_capacity_tokens for ready in decoders),
            sum(ready.max_waiting for ready in prefillers),
            sum(ready.max_num_seqs for ready in decoders),
            first.eos_token_ids,
            first.description if len(known) == 1 else f"{self.describe()}; each: {first.description}",
            num_blocks=sum(ready.num_blocks for ready in known),
            block_size=first.block_size,
        )

    def describe(self) -> str:
        """The roles in words: "1 prefill + 1 decode"."""
        counts = {role: self.roles.count(role) for role in ("prefill", "decode", "both")}
        return " + ".join(f"{count} {role}" for role, count in counts.items() if count)
