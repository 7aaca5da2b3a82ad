"""What the audits say of planted states, a line each: ``python -m tests.planted_states compiled|python``.

Each state is one that no sound core reaches: a request in two places or in none, a block that nobody has, a count that
agrees with nothing. The code that a worker and a front end run must raise the same, compiled and as Python.
"""

import sys
from collections.abc import Callable

from diptych.base import compiled_modules

if __name__ == "__main__" and sys.argv[1] == "python":
    compiled_modules.use_sources()

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Arrived, Tick
from diptych.control.cluster.cluster_recording import RecordingClusterCore
from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import BrokenInvariantError
from diptych.control.request import DEFAULT_OPTIONS, Request, Submission
from diptych.control.step import StepResult

NUM_STEPS = 150  # audits come every so many steps


def running() -> EngineCore:
    """An engine with a request that decodes."""
    core = RecordingEngineCore(EngineConfig(cache=CacheConfig(num_blocks=64, block_size=16)), lambda row: None)
    core.add_request(Request("a", 40, 500), 0)
    turn(core, 0, 3)
    return core


def turn(core: EngineCore, now: int, num_steps: int) -> None:
    """Steps, as long as there are some."""
    for number in range(num_steps):
        output = core.begin_step(now + number)
        if output is None:
            return
        core.end_step(StepResult(output.step_id), now + number)


def two_places(core: EngineCore) -> None:
    """A request runs, and is lent to another worker."""
    core.scheduler.block_owners.outgoing["a"] = core.requests["a"]


def lost_block(core: EngineCore) -> None:
    """A block is neither free nor held."""
    core.kv.pool._free.pop()


def forgotten(core: EngineCore) -> None:
    """A request runs that nobody has asked for."""
    del core.requests["a"]
    core.add_request(Request("b", 40, 500), 3)
    core.add_request(Request("c", 40, 500), 3)


def reserved(core: EngineCore) -> None:
    """Blocks are reserved for nobody, once nothing is open."""
    core.kv._num_reserved += 1
    core.abort("a", 3)


def leased(core: EngineCore) -> None:
    """A lease of a request that has ended."""
    core.leases.grant("b", 10**12, 3)
    core.abort("a", 3)


def result_of_another_step(core: EngineCore) -> None:
    """The result of a step that was not begun."""
    core.begin_step(3)
    core.end_step(StepResult(99), 3)


def nowhere(core: ClusterCore) -> None:
    """A request waits in no queue."""
    core.admission.remove("a")
    core._audit.check()


def uncounted(core: ClusterCore) -> None:
    """A count of requests that agrees with nothing."""
    core._num_awaiting_first_token[0] += 1
    for now in range(200):
        core.on_event(Tick(), now)


ENGINE: tuple[Callable[[EngineCore], None], ...] = (
    two_places, lost_block, forgotten, reserved, leased, result_of_another_step,
)  # fmt: skip
CLUSTER: tuple[Callable[[ClusterCore], None], ...] = (nowhere, uncounted)


def said(name: str, act: Callable[[], None]) -> str:
    """What an act raises, as a line."""
    try:
        act()
    except BrokenInvariantError as error:
        return f"{name}: {error}"
    return f"{name}: nothing was noticed"


def main() -> None:
    """Print what is said of each state."""
    for plant in ENGINE:
        core = running()

        def act(plant: Callable[[EngineCore], None] = plant, core: EngineCore = core) -> None:
            plant(core)
            turn(core, 4, NUM_STEPS)

        print(said(plant.__name__, act))
    for harm in CLUSTER:
        cluster = RecordingClusterCore(ClusterConfig(), lambda row: None)
        cluster.on_event(Arrived(Submission("a", 10, 10, (), DEFAULT_OPTIONS)), 0)

        def break_it(harm: Callable[[ClusterCore], None] = harm, cluster: ClusterCore = cluster) -> None:
            harm(cluster)

        print(said(harm.__name__, break_it))


if __name__ == "__main__":
    main()
