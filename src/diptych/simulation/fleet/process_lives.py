"""The lives of the simulated workers' processes: how they fail, when that is noticed, and when they are back.

The front end knows of a dead process after Watch.detection_ns, and a process that hangs for too long is killed. A new
one takes its place when the fault is over; ClusterCore decides when it may be used.

A worker of another host outlives its connection to the front end. Both ends give the other up when they have not heard
it for Watch.heartbeat_ns, or at once when another connection is made: a connection is a life of the worker. The process
drops its attempts then, and comes back with what it has cached.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.faults import Fault, Watch
from diptych.simulation.fleet.simulated_worker import SimulatedWorker


class FrontEndOfWorkers(Protocol):
    """Gets the news of the processes. ``tokens``: how many each attempt had got from the worker that died."""

    def on_death(self, worker: int) -> None:
        """The process is gone; the front end does not know yet."""
        ...

    def on_down(self, worker: int, tokens: dict[str, int], *, crashed: bool) -> None:
        """Take in a worker's death, or that it was silent for too long (then it did not crash, as far as is known)."""
        ...

    def on_cut(self, worker: int) -> None:
        """Take in that a worker's connection breaks; the process goes on."""
        ...

    def on_up(self, worker: int) -> None:
        """A new process is ready, and empty; or one that was isolated is back, without attempts."""
        ...

    def set_link(self, worker: int, is_up: bool) -> None:
        """The worker's KV links break, or work again."""
        ...


@dataclass(slots=True)
class _Process:
    is_alive: bool = True
    life: int = 0
    back_ns: int = 0  # when the next process may begin
    num_outages: int = 0  # of its link, at this moment
    is_known: bool = True  # to the front end, as one that serves
    is_isolated: bool = False
    isolated_until_ns: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


class ProcessLives:
    """All processes."""

    def __init__(
        self, environment: Environment, watch: Watch, workers: list[SimulatedWorker], front_end: FrontEndOfWorkers
    ) -> None:
        self._environment = environment
        self._watch = watch
        self._workers = workers
        self._front_end = front_end
        self._processes = [_Process() for _ in workers]

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Schedule these faults (ControlChannels handles those of messages)."""
        for fault in faults:
            is_of_process = fault.channel == "control" and not fault.is_of_control_messages
            if is_of_process and fault.kind != "front_end_crash" and fault.worker < len(self._workers):
                self._environment.at(fault.at_ns, MESSAGE, partial(self._strike, fault))

    def is_alive(self, worker: int) -> bool:
        """Whether its process lives."""
        return self._processes[worker].is_alive

    def life(self, worker: int) -> int:
        """How many processes of it have died."""
        return self._processes[worker].life

    def _strike(self, fault: Fault) -> None:
        worker, environment = fault.worker, self._environment
        simulated, process = self._workers[worker], self._processes[worker]
        end_ns = environment.now + fault.duration_ns
        if fault.kind == "crash":
            self._kill(worker, end_ns)
        elif fault.kind == "link_down":
            self._break_link(worker, 1)
            environment.at(end_ns, MESSAGE, partial(self._break_link, worker, -1))
        elif fault.kind == "isolate":
            self._isolate(worker, end_ns)
        elif not process.is_alive:
            return
        elif fault.kind == "hang":
            simulated.hang(end_ns)
            environment.at(end_ns, MESSAGE, simulated.wake)
            at_ns = environment.now + self._watch.heartbeat_ns
            environment.at(at_ns, MESSAGE, partial(self._look_at, worker, process.life))
        else:
            simulated.slow_down(fault.factor)
            environment.at(end_ns, MESSAGE, partial(simulated.slow_down, 1))

    def _break_link(self, worker: int, by: int) -> None:
        process = self._processes[worker]
        process.num_outages += by
        self._front_end.set_link(worker, not process.num_outages)

    def _look_at(self, worker: int, life: int) -> None:
        """A heartbeat did not come."""
        if self._processes[worker].life == life and self._workers[worker].is_hung:
            self._kill(worker, self._environment.now + self._watch.detection_ns)

    def _kill(self, worker: int, until_ns: int) -> None:
        """The process dies; another may begin at ``until_ns``."""
        process = self._processes[worker]
        process.back_ns = max(process.back_ns, until_ns)
        if not process.is_alive:
            return
        process.is_alive = False
        process.life += 1
        tokens = self._workers[worker].crash(until_ns)
        if process.is_isolated:  # the front end knows what it knew when it was cut off
            process.back_ns = max(process.back_ns, process.isolated_until_ns)
        else:
            process.tokens = tokens
        self._front_end.on_death(worker)
        detected_ns = self._environment.now + self._watch.detection_ns
        self._environment.at(detected_ns, MESSAGE, partial(self._detect, worker))

    def _detect(self, worker: int) -> None:
        process, now = self._processes[worker], self._environment.now
        self._lose(worker, crashed=not process.is_isolated)
        process.is_isolated = False
        at_ns = max(process.back_ns, now + 1)
        self._environment.at(at_ns, MESSAGE, partial(self._begin, worker, process.life))

    def _lose(self, worker: int, *, crashed: bool) -> None:
        """The front end gives it up, unless it has."""
        process = self._processes[worker]
        if process.is_known:
            process.is_known = False
            self._front_end.on_down(worker, process.tokens, crashed=crashed)
        process.tokens = {}

    def _begin(self, worker: int, life: int) -> None:
        process = self._processes[worker]
        if process.is_alive or process.life != life:
            return
        if process.back_ns > self._environment.now:  # it was to crash again meanwhile
            self._environment.at(process.back_ns, MESSAGE, partial(self._begin, worker, life))
            return
        process.is_alive = process.is_known = True
        self._front_end.on_up(worker)

    # -- workers that the front end cannot reach ----------------------------------------------------------------------

    def _isolate(self, worker: int, until_ns: int) -> None:
        process, now = self._processes[worker], self._environment.now
        process.isolated_until_ns = max(process.isolated_until_ns, until_ns)
        if not process.is_alive:  # the next process finds nobody before then
            process.back_ns = max(process.back_ns, until_ns)
            return
        if process.is_isolated:
            return
        process.is_isolated = True
        process.tokens = self._workers[worker].cut_off()
        self._front_end.on_cut(worker)
        notice_ns = min(now + self._watch.heartbeat_ns, until_ns)
        self._environment.at(notice_ns, MESSAGE, partial(self._give_up, worker, process.life))
        self._environment.at(until_ns, MESSAGE, partial(self._reconnect, worker, process.life))

    def lose_front_end(self, until_ns: int) -> list[dict[str, int]]:
        """The front end dies, and nothing is known of any process; none finds another before ``until_ns``. Returns how
        many tokens each attempt had got from each worker, as far as the front end knew."""
        given = []
        cut = []
        for worker, process in enumerate(self._processes):
            if process.is_alive and not process.is_isolated:
                process.is_isolated = True
                process.tokens = self._workers[worker].cut_off()
                cut.append(worker)
            process.isolated_until_ns = max(process.isolated_until_ns, until_ns)
            process.back_ns = max(process.back_ns, until_ns)
            given.append(process.tokens if process.is_known else {})
            process.is_known, process.tokens = False, {}
        for worker in range(len(self._processes)):
            self._front_end.on_cut(worker)
        for worker, process in enumerate(self._processes):
            if process.is_alive:
                self._workers[worker].abandon()
        for worker in cut:
            self._environment.at(until_ns, MESSAGE, partial(self._reconnect, worker, self._processes[worker].life))
        return given

    def _give_up(self, worker: int, life: int) -> None:
        """Neither end has heard the other for too long."""
        process = self._processes[worker]
        if process.life == life and process.is_isolated and process.is_known:
            self._lose(worker, crashed=False)
            self._workers[worker].abandon()

    def _reconnect(self, worker: int, life: int) -> None:
        """The worker is to start over, and to be another life of itself then: what it has said before counts for
        nothing."""
        if self._processes[worker].life == life:
            self._workers[worker].start_over(partial(self._is_back, worker, life))

    def _is_back(self, worker: int, life: int) -> bool:
        process = self._processes[worker]
        assert process.life == life and process.is_isolated and not process.is_known
        if process.isolated_until_ns > self._environment.now:  # it is cut off again
            self._environment.at(process.isolated_until_ns, MESSAGE, partial(self._reconnect, worker, life))
            return False
        process.is_isolated, process.is_known = False, True
        self._front_end.on_up(worker)
        return True
