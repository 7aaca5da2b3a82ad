"""Two workers that do not reach each other: requests go elsewhere or are computed whole; the path is tried again."""

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Arrived, ClusterEvent, Reported, WorkerDown, WorkerUp
from diptych.control.cluster.paths import FIRST_PAUSE_NS, LONGEST_PAUSE_NS
from diptych.control.commands import Command, Drop, Prefill, Reserve, Serve
from diptych.control.events import Event, HandoffDelivered, HandoffReleased, HandoffReserved, TransferFailed
from diptych.control.request import Submission
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import Role, WorkerInfo


class Fleet:
    """A core, its clock, and workers that answer at once."""

    def __init__(self, *roles: Role) -> None:
        self.core = ClusterCore(ClusterConfig(routing=RoutingConfig(disaggregate="always")))
        self.now, self.count = 0, 0
        for number, role in enumerate(roles):
            self.tell(WorkerUp(WorkerInfo(number, role, 1000, 16)))

    def tell(self, event: ClusterEvent) -> list[Command]:
        self.now += 1
        return self.core.on_event(event, self.now)

    def report(self, worker: int, *events: Event) -> list[Command]:
        return self.tell(Reported(worker, events))

    def submit(self) -> list[Command]:
        self.count += 1
        return self.tell(Arrived(Submission(f"r{self.count}", 100, 8)))

    def path(self, commands: list[Command]) -> tuple[int, int]:
        """Who prefills and who decodes; the handoff is under way afterwards."""
        begun = next(command for command in commands if isinstance(command, Reserve | Serve))
        if isinstance(begun, Serve):
            return begun.worker, begun.worker
        prefill = next(command for command in commands if isinstance(command, Prefill))
        self.report(begun.worker, HandoffReserved(self.now, begun.attempt_id, 0, ((1,),)))
        self.attempt = begun.attempt_id
        return prefill.worker, begun.worker

    def fail(self, path: tuple[int, int]) -> list[Command]:
        """KV of the newest attempt does not arrive; both workers let go of it."""
        commands = self.report(path[0], TransferFailed(self.now, self.attempt, True, "no way"))
        for drop in [command for command in commands if isinstance(command, Drop)]:
            self.report(drop.worker, HandoffReleased(self.now, drop.attempt_id))
        return commands

    def break_path(self, prefill: int = 0, decode: int = 1) -> list[Command]:
        """Fail as often as it takes; what becomes of the last request."""
        commands: list[Command] = []
        while not self.core.paths.broken_at(self.now):
            begun = self.submit()
            while self.path(begun) != (prefill, decode):
                begun = self.submit()
            commands = self.fail((prefill, decode))
        return commands

    def deliver(self, path: tuple[int, int]) -> None:
        self.report(path[1], HandoffDelivered(self.now, self.attempt))


def test_a_request_after_broken_transfers_takes_another_prefill_worker() -> None:
    fleet = Fleet("prefill", "prefill", "decode")
    fleet.break_path(0, 2)
    for _ in range(6):
        assert fleet.path(fleet.submit()) == (1, 2), "no other request waits for that path"
    assert fleet.core.paths.broken_at(fleet.now) == [(0, 2)] and fleet.core.counts["paths_broken"] == 1


def test_where_there_is_no_other_worker_requests_are_computed_whole() -> None:
    fleet = Fleet("prefill", "decode")
    for commands in (fleet.break_path(), fleet.submit(), fleet.submit()):
        worker, same = fleet.path(commands)
        assert worker == same


def test_one_failure_may_be_chance() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.fail(fleet.path(fleet.submit()))
    assert fleet.path(fleet.submit()) == (0, 1)
    fleet.deliver((0, 1))
    fleet.fail(fleet.path(fleet.submit()))
    assert fleet.path(fleet.submit()) == (0, 1)


def test_the_path_is_tried_again_after_a_pause_that_doubles_until_it_is_whole() -> None:
    fleet, pause_ns = Fleet("prefill", "decode"), FIRST_PAUSE_NS
    fleet.break_path()
    for _ in range(8):
        fleet.now += pause_ns - 100
        assert fleet.path(fleet.submit()) != (0, 1), "before the pause is over"
        fleet.now += 200
        path = fleet.path(fleet.submit())
        assert path == (0, 1)
        fleet.fail(path)
        assert fleet.path(fleet.submit()) != (0, 1)
        pause_ns = min(2 * pause_ns, LONGEST_PAUSE_NS)
    fleet.now += pause_ns
    fleet.deliver(fleet.path(fleet.submit()))
    assert fleet.core.paths.broken == {}
    fleet.break_path()
    fleet.now += FIRST_PAUSE_NS
    assert fleet.path(fleet.submit()) == (0, 1), "the pause is short again"


def test_attempts_of_before_do_not_lengthen_the_pause() -> None:
    fleet = Fleet("prefill", "decode")
    attempts = []
    for _ in range(4):
        path = fleet.path(fleet.submit())
        attempts.append(fleet.attempt)
    for attempt in attempts:
        fleet.attempt = attempt
        fleet.fail(path)
    assert fleet.core.counts["paths_broken"] == 1
    fleet.now += FIRST_PAUSE_NS
    assert fleet.path(fleet.submit()) == (0, 1)


def test_a_new_process_at_either_end_makes_the_path_whole() -> None:
    for lost in (0, 1):
        fleet = Fleet("prefill", "decode")
        fleet.break_path()
        fleet.tell(WorkerDown(lost))
        assert not fleet.core.paths.broken
        fleet.tell(WorkerUp(fleet.core.members.infos[lost]))
        assert fleet.path(fleet.submit()) == (0, 1)
