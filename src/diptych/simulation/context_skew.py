"""How unequal the contexts of a decode batch are, estimated from the lengths of a workload.

Attention of a batch takes longer when its contexts differ; layer tables that measured it know by how much. Which
contexts meet in a batch is known only while a simulation runs, so the estimate is of the workload: a batch of about a
hundred sequences holds one as long as the 99th percentile.
"""

from itertools import islice

from diptych.workload.spec import ClosedLoop, Workload

SAMPLE = 1000  # requests that are looked at
LONGEST_PERCENT = 99


def context_skew(workload: Workload | ClosedLoop) -> float:
    """Longest context of a decode batch over its mean, at least 1. A request counts half of its answer. A closed loop
    cannot be read before it runs: 1."""
    if isinstance(workload, ClosedLoop):
        return 1.0
    contexts = sorted(2 * spec.prompt_tokens + spec.output_tokens for spec in islice(workload, SAMPLE))
    if not contexts:
        return 1.0
    longest = contexts[(len(contexts) - 1) * LONGEST_PERCENT // 100]
    return max(1.0, longest * len(contexts) / sum(contexts))
