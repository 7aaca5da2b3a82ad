"""Prefill and decode on separate replicas, under virtual time: the handoffs that control decides, over shared links.

Owns the wires between the pools and the bytes on them. Must decide nothing: who sends what when is
diptych.control.handoff's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.control.config import ReplicaConfig
from diptych.control.errors import ConfigError
from diptych.control.events import Event, HandoffReserved, RequestAdmitted, StepFinished
from diptych.control.handoff import Command, Deliver, Handoffs, Prefill, Release, Reserve, Transfer
from diptych.control.request import Request
from diptych.simulation.environment import Environment
from diptych.simulation.links import Link, Network
from diptych.simulation.replica import SimulatedReplica
from diptych.simulation.workload.spec import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """How a fleet is split. Replicas 0 .. num_prefill - 1 prefill, the others decode.

    link: one of simulation.links.LINKS; every replica has one for each direction. kv_bytes_per_token: of the whole
    model, as it travels. prefill: settings of the prefill replicas (None: those of the others).
    """

    num_prefill: int
    num_decode: int
    kv_bytes_per_token: int
    link: str = "ib400"
    prefill: ReplicaConfig | None = None

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "kv_bytes_per_token"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        Link.named(self.link)


MakeRequest = Callable[[str], tuple[Request, RequestSpec]]


class HandoffDriver:
    """Carries out what the handoffs command, and tells them what happened."""

    def __init__(
        self,
        pools: Pools,
        block_size: int,
        environment: Environment,
        replicas: list[SimulatedReplica],
        make: MakeRequest,
    ) -> None:
        self.handoffs = Handoffs(block_size)
        self.num_bytes = 0
        self._bytes_per_token = pools.kv_bytes_per_token
        self._environment = environment
        self._replicas = replicas
        self._make = make
        self._network = Network(environment)
        self._out = [Link.named(pools.link) for _ in replicas]
        self._in = [Link.named(pools.link) for _ in replicas]
        self._transfers: dict[str, list[int]] = {}

    def begin(self, request_id: str, num_prompt_tokens: int, prefill: int, decode: int) -> None:
        """A request comes to the pools."""
        self._do(self.handoffs.begin(request_id, num_prompt_tokens, prefill, decode))

    def drop(self, request_id: str) -> None:
        """The request ended otherwise: stop what is on its way and free what it holds on both sides."""
        replicas = self.handoffs.replicas(request_id)
        if replicas is None:
            return
        self.handoffs.drop(request_id)
        for number in self._transfers.pop(request_id, ()):
            self._network.cancel(number)
        for replica in replicas:
            self._replicas[replica].abort(request_id)

    def on_events(self, events: list[Event]) -> None:
        """What a replica reports, as far as handoffs care."""
        for event in events:
            if isinstance(event, HandoffReserved):
                self._do(self.handoffs.on_reserved(event.request_id, event.num_cached_tokens))
            elif isinstance(event, RequestAdmitted) and event.is_first:
                self.handoffs.on_started(event.request_id, event.time_ns)
            elif isinstance(event, StepFinished):
                for request_id, start, num_tokens in event.prefills:
                    if request_id in self.handoffs:
                        now = self._environment.now
                        self._do(self.handoffs.on_computed(request_id, start + num_tokens, now))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Reserve):
                self._replicas[command.replica].reserve(*self._make(command.request_id))
            elif isinstance(command, Prefill):
                request, spec = self._make(command.request_id)
                request.hands_off = True
                self._replicas[command.replica].submit(request, spec)
            elif isinstance(command, Transfer):
                self._send(command)
            elif isinstance(command, Deliver):
                self._transfers.pop(command.request_id, None)
                times = (command.first_step_ns, command.first_token_ns)
                self._replicas[command.replica].deliver(command.request_id, *times)
            elif isinstance(command, Release):
                self._replicas[command.replica].release(command.request_id)

    def _send(self, transfer: Transfer) -> None:
        num_bytes = transfer.num_tokens * self._bytes_per_token
        self.num_bytes += num_bytes
        path = (self._out[transfer.source], self._in[transfer.target])
        number = self._network.send(num_bytes, path, partial(self._arrive, transfer.request_id))
        self._transfers.setdefault(transfer.request_id, []).append(number)

    def _arrive(self, request_id: str) -> None:
        self._do(self.handoffs.on_arrived(request_id))
