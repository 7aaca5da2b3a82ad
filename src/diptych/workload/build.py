"""From the description of a workload to the workload.

The same description and seed give the same requests, in the simulator and in the load generator, on every platform.
"""

from diptych.workload.closed_loop import SyntheticClosedLoop
from diptych.workload.description import (
    ArrivalConfig,
    ClassConfig,
    LengthConfig,
    LengthsConfig,
    LongConfig,
    PrefixConfig,
    SessionConfig,
    SloConfig,
    TraceConfig,
    WorkloadConfig,
)
from diptych.workload.spec import ClosedLoop, Workload
from diptych.workload.synthetic import SyntheticWorkload
from diptych.workload.traces import trace_workload

__all__ = [
    "ArrivalConfig",
    "ClassConfig",
    "LengthConfig",
    "LengthsConfig",
    "LongConfig",
    "PrefixConfig",
    "SessionConfig",
    "SloConfig",
    "TraceConfig",
    "WorkloadConfig",
    "build",
]


def build(config: WorkloadConfig, seed: int) -> Workload | ClosedLoop:
    """An open loop can be iterated again and again; a closed loop serves one run.

    Files are read here. Raises ConfigError naming the field, or the file, line, field and value.
    """
    if config.trace is not None:
        return trace_workload(config.trace, config.num_requests, config.rate, config.slo)
    if config.arrivals.kind == "closed":
        return SyntheticClosedLoop(config, seed)
    return SyntheticWorkload(config, seed)
