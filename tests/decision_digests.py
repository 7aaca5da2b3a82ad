"""Digests of everything that seeded simulations decide, as lines "name digest", to compare two ways to run the code.

    python -m tests.decision_digests compiled|python NUM_SEEDS [RECORDING ...]

Plans are digested whole (blocks, predictions, strides), and events as in the log. Recordings of live workers are
decided again; a decision that differs ends the program.
"""

import sys
from collections.abc import Iterator
from hashlib import blake2b

from diptych.base import compiled_modules


def decided(kind: str, seed: int) -> str:
    """The digest of one simulation."""
    from diptych.control.engine.recording import canonical_plan
    from diptych.control.step import SchedulerOutput
    from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
    from tests.simulation.fault_schedules import LIMIT_NS, random_schedule
    from tests.simulation.scenarios import random_scenario

    plans = blake2b(digest_size=16)

    def audit(worker: int, output: SchedulerOutput) -> None:
        plans.update(b"%d " % worker + canonical_plan(output))

    scenario = random_scenario(seed) if kind == "scenario" else random_schedule(seed)
    cluster = SimulatedCluster(scenario, auditor=audit)
    cluster.run(LIMIT_NS)
    assert cluster.log is not None
    return f"{cluster.log.digest()}{plans.hexdigest()}"


def digests(num_seeds: int, recordings: list[str]) -> Iterator[str]:
    """All lines."""
    from diptych.simulation.replay import replay

    for kind in ("scenario", "schedule"):
        for seed in range(num_seeds):
            yield f"{kind}-{seed} {decided(kind, seed)}"
    for path in recordings:
        found = replay(path)
        assert found.is_identical, f"{path}: {found.difference}"
        yield f"{path} {found.num_steps}"


if __name__ == "__main__":
    if sys.argv[1] == "python":
        compiled_modules.use_sources()
    assert compiled_modules.what_runs().lower() == sys.argv[1]
    for line in digests(int(sys.argv[2]), sys.argv[3:]):
        print(line)
