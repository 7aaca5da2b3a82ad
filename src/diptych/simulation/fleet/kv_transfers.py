"""The KV connectors of a simulated fleet: bytes and commits on their way from worker to worker.

An attempt is expected by its receiver and sent by its sender; when the commit and all bytes have arrived, the receiver
gets TransferCommitted. A transfer that is not expected is refused, and one that stands still for too long is given up
by both ends. Which worker sends what when is decided by diptych.control.

Where faults say so, messages between two workers (chunks with the commit, acknowledgements, refusals) are late, come
twice or overtake each other. They are numbered: the receiver counts each once, and takes the attempt over when all are
there. A sender keeps a transfer until it is acknowledged.

A chunk begins to travel when its step has ended, as it does from a GPU. CPU workers send its layers while others are
computed: where their link keeps up with the prefill, what is left at its end is about one layer of the last chunk, and
here the whole of it. Between workers whose devices cut the KV differently the same bytes travel, and when all are
there, the receiver copies them once more into its own cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import (
    CancelTransfer,
    ChunkArrived,
    CommitTransfer,
    ExpectTransfer,
    ForgetTransfer,
    OpenTransfer,
    TransferAction,
    TransferBroken,
    TransferCommitted,
    TransferEvent,
)
from diptych.control.router.topology import WorkerInfo
from diptych.control.slo import NS_PER_S
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.fleet.control_channels import Deliver
from diptych.simulation.fleet.kv_network import KVNetwork, Pair
from diptych.simulation.fleet.links import Link
from diptych.simulation.fleet.pools import Pools

Span = tuple[int, int]  # the first token of a chunk, and how many
NOTHING: Span = (0, 0)  # a commit alone
Arrival = Callable[[str, int, int, Span], None]  # (attempt id, sender (-1: it has given it up), receiver, chunk)
Tell = Callable[[int, TransferEvent], None]  # (worker, what happened)


@dataclass(eq=False, slots=True)
class _Sender:
    attempt_id: str
    source: int
    target: int
    transfers: set[int] = field(default_factory=set)  # of the network, on their way
    num_pending: int = 0
    num_bytes: int = 0
    first_ns: int = -1
    commit: CommitTransfer | None = None
    is_stranded: bool = False  # its receiver's process has died: what is still sent finds none
    num_sent: int = 0  # messages
    arrived: set[int] = field(default_factory=set)  # messages that the receiver has counted
    is_delivered: bool = False  # the receiver has taken it over; the acknowledgement is on its way
    is_broken: bool = False
    wire_ns: int = 0  # while bytes of it were coming in
    wired_until_ns: int = 0


class KVTransfers:
    """All connectors. Workers of one memory domain only send commits."""

    def __init__(
        self,
        environment: Environment,
        infos: Sequence[WorkerInfo],
        pools: Pools,
        wires: KVNetwork,
        resume_ns: int,
        tell: Tell,
    ) -> None:
        self.num_bytes = 0
        self.on_arrival: Arrival | None = None  # for tests
        self._environment = environment
        self._domains = [info.memory_domain for info in infos]
        self._bytes_per_token = pools.kv_bytes_per_token
        self._block_sizes = [info.block_size for info in infos]
        self._resume_ns = resume_ns
        self._tell = tell
        self._wires = wires
        self._network = wires.network
        self._places = pools.places()
        self._outages = [0] * len(infos)  # how many; odd while the link is down
        self._lost: set[int] = set()  # workers without a process
        self._expected: dict[tuple[int, str], None] = {}
        self._senders: dict[tuple[int, str], _Sender] = {}

    def __len__(self) -> int:
        """Ends of attempts that have not been settled."""
        return len(self._expected) + len(self._senders)

    @property
    def num_travelling(self) -> int:
        """Transfers that the network carries."""
        return len(self._network)

    def act(self, worker: int, action: TransferAction) -> None:
        """What a worker wants of its connector."""
        key = (worker, action.attempt_id)
        match action:
            case OpenTransfer():
                opened = self._senders[key] = _Sender(action.attempt_id, worker, action.target)
                if action.target in self._lost:
                    self._strand(opened)
            case ExpectTransfer():
                self._expected[key] = None
            case SendChunk():
                if (sender := self._senders.get(key)) and not sender.is_stranded:
                    self._send(sender, (action.start, action.num_tokens), self._num_bytes(worker, action))
            case CommitTransfer():
                if (sender := self._senders.get(key)) and not sender.is_stranded:
                    self._commit(sender, action)
            case CancelTransfer():
                if sender := self._senders.pop(key, None):
                    self._stop(sender)
            case ForgetTransfer():
                self._expected.pop(key, None)

    def set_link(self, worker: int, is_up: bool) -> None:
        """The links of a worker break, or work again."""
        if is_up != bool(self._outages[worker] % 2):
            return
        self._outages[worker] += 1
        for link in (self._wires.out[worker], self._wires.into[worker]):
            self._network.set_up(link, is_up)
        if not is_up:
            for sender in self._senders.values():
                self._watch(sender)

    def lose(self, worker: int) -> None:
        """The worker's process has died. The other ends notice when they have tried for long enough."""
        now = self._environment.now
        self._lost.add(worker)
        self._wires.cut(worker)
        for key in [key for key in self._expected if key[0] == worker]:
            del self._expected[key]
        for key, sender in list(self._senders.items()):
            if sender.source == worker:
                del self._senders[key]
                self._stop(sender)
                if (sender.target, sender.attempt_id) in self._expected:
                    fail = partial(self._fail_receiver, sender.target, sender.attempt_id, "the sender is gone")
                    self._environment.at(now + self._resume_ns, MESSAGE, fail)
            elif sender.target == worker:
                self._stop(sender)
                self._strand(sender)

    def restore(self, worker: int) -> None:
        """A new process of the worker is there (or the old one still)."""
        if worker in self._lost:
            self._lost.discard(worker)
            self._wires.connect(worker, self._lost)

    def _strand(self, sender: _Sender) -> None:
        sender.is_stranded = True
        fail = partial(self._fail_sender, sender, "the receiver is gone")
        self._environment.at(self._environment.now + self._resume_ns, MESSAGE, fail)

    def _is_near(self, sender: _Sender) -> bool:
        domain = self._domains[sender.source]
        return domain is not None and domain == self._domains[sender.target]

    def _num_bytes(self, worker: int, chunk: SendChunk) -> int:
        """What of these tokens is still read when their prompt is computed: each group of layers has equally many
        bytes of a token."""
        if not chunk.first_blocks:
            return chunk.num_tokens * self._bytes_per_token
        size, end = self._block_sizes[worker], chunk.start + chunk.num_tokens
        rows = sum([max(0, end - max(chunk.start, first * size)) for first in chunk.first_blocks])
        return rows * self._bytes_per_token // len(chunk.first_blocks)

    def _send(self, sender: _Sender, span: Span, num_bytes: int = 0) -> None:
        self.num_bytes += num_bytes
        sender.num_bytes += num_bytes
        sender.num_pending += 1
        if sender.first_ns < 0:
            sender.first_ns = self._environment.now
        number, sender.num_sent = sender.num_sent, sender.num_sent + 1
        path = self._wires.path(sender.source, sender.target)
        begun_ns = self._environment.now + sum(link.latency_ns for link in path)
        transfers: list[int] = []
        transfers.append(
            self._network.send(num_bytes, path, lambda: self._carried(sender, transfers[0], (number, span), begun_ns))
        )
        sender.transfers.add(transfers[0])
        self._watch(sender)

    def _commit(self, sender: _Sender, commit: CommitTransfer) -> None:
        """The commit travels with the last bytes, or alone; within one memory beside the links."""
        sender.commit = commit
        if sender.num_pending > 0:
            return
        if self._is_near(sender):
            sender.num_pending += 1
            at_ns = self._environment.now + Link.named("shared_memory").latency_ns
            self._environment.at(at_ns, MESSAGE, partial(self._arrive, sender, 0, NOTHING))
        else:
            self._send(sender, NOTHING)

    def _carried(self, sender: _Sender, transfer: int, message: tuple[int, Span], begun_ns: int) -> None:
        """The network has carried a message to its end."""
        sender.transfers.discard(transfer)
        sender.wire_ns += max(0, self._environment.now - max(begun_ns, sender.wired_until_ns))
        sender.wired_until_ns = self._environment.now
        self._pass(sender, (sender.source, sender.target), partial(self._arrive, sender, *message))

    def _pass(self, sender: _Sender, pair: Pair, deliver: Deliver) -> None:
        """A message of this transfer, from one of its ends to the other."""
        channel = self._wires.channel(*pair)
        if channel is None:
            deliver()
            return
        if channel.held_back_ns > self._resume_ns:
            at_ns = self._environment.now + self._resume_ns
            self._environment.at(at_ns, MESSAGE, partial(self._break, sender, pair))
        channel.send(deliver)

    def _break(self, sender: _Sender, pair: Pair) -> None:
        """Nothing came through between the two for as long as they try."""
        message = f"nothing comes through from worker {pair[0]} to worker {pair[1]}"
        if self._senders.get((sender.source, sender.attempt_id)) is sender:
            self._fail_sender(sender, message)
            if not sender.is_delivered:
                self._fail_receiver(sender.target, sender.attempt_id, message)

    def _arrive(self, sender: _Sender, number: int, span: Span) -> None:
        is_current = self._senders.get((sender.source, sender.attempt_id)) is sender
        if sender.is_stranded or sender.is_broken or number in sender.arrived:
            return
        if not is_current and self._wires.channel(sender.source, sender.target) is None:
            return
        key = (sender.target, sender.attempt_id)
        if key not in self._expected:
            if not sender.is_delivered:
                refuse = partial(self._fail_sender, sender, "the receiver does not know the attempt")
                self._pass(sender, (sender.target, sender.source), refuse)
            return
        if self.on_arrival is not None:
            self.on_arrival(sender.attempt_id, sender.source if is_current else -1, sender.target, span)
        sender.arrived.add(number)
        sender.num_pending -= 1
        if sender.num_pending or sender.commit is None:
            self._tell(sender.target, ChunkArrived(sender.attempt_id))
            return
        del self._expected[key]
        sender.is_delivered = True
        self._pass(sender, (sender.target, sender.source), partial(self._acknowledge, sender))
        self._deliver(sender, sender.commit)

    def _deliver(self, sender: _Sender, commit: CommitTransfer) -> None:
        """The receiver takes the attempt over."""
        transfer_ns = 0 if sender.first_ns < 0 else self._environment.now - sender.first_ns
        times = (commit.first_step_ns, commit.first_token_ns)
        committed = TransferCommitted(sender.attempt_id, *times, sender.num_bytes, transfer_ns, sender.wire_ns)
        if relayout_ns := self._relayout_ns(sender):
            at_ns = self._environment.now + relayout_ns
            self._environment.at(at_ns, MESSAGE, partial(self._tell, sender.target, committed))
        else:
            self._tell(sender.target, committed)

    def _acknowledge(self, sender: _Sender) -> None:
        """The sender learns that the attempt was taken over."""
        if self._senders.get((sender.source, sender.attempt_id)) is sender:
            del self._senders[sender.source, sender.attempt_id]

    def _relayout_ns(self, sender: _Sender) -> int:
        """What the receiver takes to cut the KV anew."""
        source, target = self._places[sender.source].pool, self._places[sender.target].pool
        if source.layout == target.layout or not target.relayout_bytes_per_s:
            return 0
        return -(-sender.num_bytes * NS_PER_S // target.relayout_bytes_per_s)

    def _watch(self, sender: _Sender) -> None:
        """This attempt sends something: while a link is down, give it up in time."""
        for worker in (sender.source, sender.target):
            outage = self._outages[worker]
            if outage % 2 and sender.transfers:
                check = partial(self._give_up, sender, worker, outage)
                self._environment.at(self._environment.now + self._resume_ns, MESSAGE, check)

    def _give_up(self, sender: _Sender, worker: int, outage: int) -> None:
        is_here = self._senders.get((sender.source, sender.attempt_id)) is sender
        if not is_here or self._outages[worker] != outage or not sender.transfers:
            return
        message = f"the link of worker {worker} is broken"
        self._fail_sender(sender, message)
        self._fail_receiver(sender.target, sender.attempt_id, message)

    def _fail_sender(self, sender: _Sender, message: str) -> None:
        if self._senders.get((sender.source, sender.attempt_id)) is sender:
            del self._senders[sender.source, sender.attempt_id]
            sender.is_broken = True
            self._stop(sender)
            self._tell(sender.source, TransferBroken(sender.attempt_id, True, message))

    def _fail_receiver(self, worker: int, attempt_id: str, message: str) -> None:
        if (worker, attempt_id) in self._expected:
            self._tell(worker, TransferBroken(attempt_id, False, message))

    def _stop(self, sender: _Sender) -> None:
        for number in sender.transfers:
            self._network.cancel(number)
        sender.transfers.clear()
