"""Messages between the front end and its workers, and the faults of any channel.

Owns when a message arrives and how often; a message to or from a process that has ended since never arrives. Does not
read messages.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from diptych.control.slo import NS_PER_MS
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.faults import Fault

Deliver = Callable[[], None]


class FaultyChannel:
    """One direction between two processes. Messages keep their order, except under the fault ``reorder``."""

    def __init__(self, environment: Environment, faults: Sequence[Fault], seed: int) -> None:
        self._environment = environment
        self._faults = faults
        self._rng = random.Random(seed)
        self._last_ns = -1  # when the last message arrives
        self._life = 0  # of the worker's process
        self.is_connected = True

    def send(self, deliver: Deliver, *, delay_ns: int = 0) -> None:
        """Deliver the message after ``delay_ns``, or as late and as often as the faults of this moment say."""
        if not self.is_connected:
            return
        now = self._environment.now
        copies, keeps_order = 1, True
        repeated: list[int] = []  # how much later the message comes again
        for fault in self._active():
            most = max(1, int(fault.factor * NS_PER_MS))
            if fault.kind == "link_loss":
                delay_ns = max(delay_ns, fault.end_ns - now)
            elif fault.kind == "duplicate":
                copies = 2
            elif fault.kind == "repeat":
                repeated.append(1 + self._rng.randrange(most))
            else:  # delay: the same for all at one time; reorder: each message its own
                keeps_order = keeps_order and fault.kind == "delay"
                delay_ns += most if fault.kind == "delay" else self._rng.randrange(most)
        at_ns = now + delay_ns
        if keeps_order:
            at_ns = max(at_ns, self._last_ns)
        for later_ns in repeated:
            self._environment.at(at_ns + later_ns, MESSAGE, partial(self._arrive, self._life, deliver))
        if keeps_order:
            if at_ns == now and copies == 1 and self._last_ns < now:
                deliver()
                return
            self._last_ns = at_ns + copies - 1
        for copy in range(copies):
            self._environment.at(at_ns + copy, MESSAGE, partial(self._arrive, self._life, deliver))

    @property
    def held_back_ns(self) -> int:
        """How long nothing will come through from now on (0: it does)."""
        now = self._environment.now
        return max([fault.end_ns - now for fault in self._active() if fault.kind == "link_loss"], default=0)

    def _active(self) -> list[Fault]:
        now = self._environment.now
        return [fault for fault in self._faults if fault.at_ns <= now < fault.end_ns]

    def cut(self) -> None:
        """The connection ends: what is on its way is lost, and so is what is sent before ``connect``."""
        self._life += 1
        self._last_ns = -1
        self.is_connected = False

    def connect(self) -> None:
        """There is another connection."""
        self.is_connected = True

    def _arrive(self, life: int, deliver: Deliver) -> None:
        if life == self._life:
            deliver()


class ControlChannels:
    """Both directions of every worker. Without faults in a scenario no message is late, and nothing is paid for it."""

    def __init__(self, environment: Environment, num_workers: int, faults: Sequence[Fault], seed: int) -> None:
        self._environment = environment
        self._to: list[FaultyChannel] = []
        self._from: list[FaultyChannel] = []
        self._begun: list[set[str]] = [set() for _ in range(num_workers)]  # attempts that each worker has got
        if not faults:
            return
        for worker in range(num_workers):
            mine = [fault for fault in faults if fault.worker == worker and fault.is_of_control_messages]
            number = (seed * 1_000_003 + worker) * 2
            there = [fault for fault in mine if fault.direction != "from"]
            back = [fault for fault in mine if fault.direction != "to"]
            self._to.append(FaultyChannel(environment, there, number))
            self._from.append(FaultyChannel(environment, back, number + 1))

    def post(self, worker: int, act: Deliver, later: bool) -> None:
        """A message to a worker. later: it leaves after this nanosecond (which worker ends its step first within it
        must not matter)."""
        if self._to:
            self._to[worker].send(act, delay_ns=int(later))
        elif later:
            self._environment.at(self._environment.now + 1, MESSAGE, act)
        else:
            act()

    def report(self, worker: int, act: Deliver) -> None:
        """A message of a worker."""
        if self._from:
            self._from[worker].send(act)
        else:
            act()

    def is_news(self, worker: int, attempt_id: str) -> bool:
        """Whether the worker gets this attempt for the first time (messages may come twice)."""
        if not self._to:
            return True
        if attempt_id in self._begun[worker]:
            return False
        self._begun[worker].add(attempt_id)
        return True

    def on_death(self, worker: int) -> None:
        """The process is gone: nothing reaches it."""
        self._to[worker].cut()
        self._begun[worker].clear()

    def on_down(self, worker: int) -> None:
        """Take in a worker's end: reports that were not read yet are lost."""
        self._from[worker].cut()

    def on_cut(self, worker: int) -> None:
        """The connection breaks; the process goes on."""
        self._to[worker].cut()
        self._from[worker].cut()

    def is_cut(self, worker: int) -> bool:
        """Whether nothing of what the worker reports now arrives."""
        return bool(self._from) and not self._from[worker].is_connected

    def on_up(self, worker: int) -> None:
        """A new process is there, or the old one again."""
        self._to[worker].connect()
        self._from[worker].connect()
