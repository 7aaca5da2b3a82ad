"""The KV connectors of a simulated fleet: bytes and commits on their way from worker to worker.

An attempt is expected by its receiver and sent by its sender; when the commit and all bytes have arrived, the receiver
is told. What nobody expects any more is refused, and what stands still for too long is given up by both ends. Must
decide nothing: who sends what when is diptych.control's business (cluster.py, outgoing.py).

A chunk begins to travel when its step has ended, as it does from a GPU. CPU workers send its layers while others are
computed: where their link keeps up with the prefill, what is left at its end is about one layer of the last chunk, and
here the whole of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.fleet.links import Link, Network

Failed = Callable[[str], None]  # (why)


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a handoff: everything is computed, the first token is known."""

    first_step_ns: int
    first_token_ns: int


@dataclass(eq=False, slots=True)
class Receiver:
    """What one attempt's decode worker waits for. on_commit: everything is here. on_chunk: a sign of life."""

    on_commit: Callable[[Commit], None]
    on_chunk: Callable[[], None]
    on_failed: Failed


@dataclass(eq=False, slots=True)
class _Sender:
    attempt_id: str
    source: int
    target: int
    on_failed: Failed
    transfers: set[int] = field(default_factory=set)  # of the network, on their way
    num_pending: int = 0
    commit: Commit | None = None


class Transfers:
    """All connectors. ``link``: of every worker, in each direction."""

    def __init__(
        self, environment: Environment, num_workers: int, link: str, kv_bytes_per_token: int, resume_ns: int
    ) -> None:
        self.num_bytes = 0
        self.on_arrival: Callable[[str, int, int], None] | None = None  # (attempt id, sender, receiver): for tests
        self._environment = environment
        self._bytes_per_token = kv_bytes_per_token
        self._resume_ns = resume_ns
        self._network = Network(environment)
        self._out = [Link.named(link) for _ in range(num_workers)]
        self._in = [Link.named(link) for _ in range(num_workers)]
        self._outages = [0] * num_workers  # how many; odd while the link is down
        self._expected: dict[tuple[int, str], Receiver] = {}
        self._senders: dict[tuple[int, str], _Sender] = {}

    def __len__(self) -> int:
        """Ends of attempts that have not been settled."""
        return len(self._expected) + len(self._senders)

    def expect(self, worker: int, attempt_id: str, receiver: Receiver) -> None:
        """The receiver has a place for it."""
        self._expected[worker, attempt_id] = receiver

    def forget(self, worker: int, attempt_id: str) -> None:
        """The receiver takes nothing of this attempt from now on."""
        self._expected.pop((worker, attempt_id), None)

    def open(self, worker: int, attempt_id: str, target: int, on_failed: Failed) -> None:
        """A sender begins."""
        self._senders[worker, attempt_id] = _Sender(attempt_id, worker, target, on_failed)

    def send(self, worker: int, attempt_id: str, num_tokens: int, commit: Commit | None, *, is_near: bool) -> None:
        """KV of so many more tokens, with ``commit`` the last of it. is_near: both ends see the same memory, and only
        the commit travels, beside the links."""
        sender = self._senders.get((worker, attempt_id))
        if sender is None:
            return
        sender.commit = commit
        sender.num_pending += 1
        if is_near:
            at_ns = self._environment.now + Link.named("shared_memory").latency_ns
            self._environment.at(at_ns, MESSAGE, partial(self._arrive, sender, 0))
            return
        num_bytes = num_tokens * self._bytes_per_token
        self.num_bytes += num_bytes
        path = (self._out[worker], self._in[sender.target])
        numbers: list[int] = []
        number = self._network.send(num_bytes, path, lambda: self._arrive(sender, numbers[0]))
        numbers.append(number)
        sender.transfers.add(number)
        self._watch(sender)

    def cancel(self, worker: int, attempt_id: str) -> None:
        """The sender stops."""
        if sender := self._senders.pop((worker, attempt_id), None):
            self._stop(sender)

    def set_link(self, worker: int, is_up: bool) -> None:
        """The links of a worker break, or work again."""
        if is_up != bool(self._outages[worker] % 2):
            return
        self._outages[worker] += 1
        for link in (self._out[worker], self._in[worker]):
            self._network.set_up(link, is_up)
        if not is_up:
            for sender in self._senders.values():
                self._watch(sender)

    def lose(self, worker: int) -> None:
        """The worker's process has died. The other ends notice when they have tried for long enough."""
        now = self._environment.now
        for key in [key for key in self._expected if key[0] == worker]:
            del self._expected[key]
        for key, sender in list(self._senders.items()):
            if sender.source == worker:
                del self._senders[key]
                self._stop(sender)
                receiver = self._expected.get((sender.target, sender.attempt_id))
                if receiver is not None:
                    fail = partial(
                        self._fail_receiver, sender.target, sender.attempt_id, receiver, "the sender is gone"
                    )
                    self._environment.at(now + self._resume_ns, MESSAGE, fail)
            elif sender.target == worker:
                self._stop(sender)
                sender.num_pending = -1  # what is still sent finds nobody
                fail = partial(self._fail_sender, sender, "the receiver is gone")
                self._environment.at(now + self._resume_ns, MESSAGE, fail)

    def _arrive(self, sender: _Sender, number: int) -> None:
        sender.transfers.discard(number)
        if self._senders.get((sender.source, sender.attempt_id)) is not sender or sender.num_pending < 0:
            return
        receiver = self._expected.get((sender.target, sender.attempt_id))
        if receiver is None:
            self._fail_sender(sender, "the receiver does not know the attempt")
            return
        if self.on_arrival is not None:
            self.on_arrival(sender.attempt_id, sender.source, sender.target)
        sender.num_pending -= 1
        if sender.num_pending or sender.commit is None:
            receiver.on_chunk()
            return
        del self._senders[sender.source, sender.attempt_id]
        del self._expected[sender.target, sender.attempt_id]
        receiver.on_commit(sender.commit)

    def _watch(self, sender: _Sender) -> None:
        """Something of this attempt is on its way: while a link is down, give it up in time."""
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
        receiver = self._expected.get((sender.target, sender.attempt_id))
        self._fail_sender(sender, message)
        if receiver is not None:
            self._fail_receiver(sender.target, sender.attempt_id, receiver, message)

    def _fail_sender(self, sender: _Sender, message: str) -> None:
        if self._senders.get((sender.source, sender.attempt_id)) is sender:
            self.cancel(sender.source, sender.attempt_id)
            sender.on_failed(message)

    def _fail_receiver(self, worker: int, attempt_id: str, receiver: Receiver, message: str) -> None:
        if self._expected.get((worker, attempt_id)) is receiver:
            receiver.on_failed(message)

    def _stop(self, sender: _Sender) -> None:
        for number in sender.transfers:
            self._network.cancel(number)
        sender.transfers.clear()
