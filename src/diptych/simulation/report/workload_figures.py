"""What a workload is in figures: how long its requests are, how they come, and how much of them is shared."""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from diptych.control.slo import NS_PER_S
from diptych.report.statistics import distribution
from diptych.simulation.results import RequestTable
from diptych.workload.spec import RequestSpec


def workload_figures(requests: Iterable[RequestSpec]) -> dict[str, Any]:
    """Of requests in the order of their arrival; see ``figures_of``."""
    arrivals, prompts, outputs = array("q"), array("q"), array("q")
    known: set[int] = set()
    shared = 0
    for request in requests:
        arrivals.append(request.arrival_ns)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        if request.hash_ids:
            shared += _known_tokens(request, known)
            known.update(request.hash_ids)
    return figures_of(arrivals, prompts, outputs, shared)


def measured_figures(table: RequestTable) -> dict[str, Any]:
    """Of the requests that ran, where the workload cannot be asked again, as that of a closed loop: answers are those
    that were given, and what is shared is not known."""
    outputs = [table.output_tokens[row] for row in table.completed_rows()]
    return figures_of(sorted(table.arrival_ns), table.prompt_tokens, outputs, None)


def figures_of(
    arrivals_ns: Sequence[int], prompts: Sequence[int], outputs: Sequence[int], shared_tokens: int | None
) -> dict[str, Any]:
    """rate_rps: between the first and the last arrival. gap_cv: the coefficient of variation of the gaps between
    arrivals: 0 at even distances, 1 of a Poisson process, more where requests come in bursts. Lengths in tokens.
    shared_token_share: of the prompt tokens, those that came earlier at the same place of a prompt or an answer: what
    an unbounded prefix cache could hit (None: not known). None, too, where there are too few requests to say."""
    span = arrivals_ns[-1] - arrivals_ns[0] if arrivals_ns else 0
    return {
        "num_requests": len(arrivals_ns),
        "rate_rps": (len(arrivals_ns) - 1) * NS_PER_S / span if span else None,
        "gap_cv": _variation([later - earlier for earlier, later in pairwise(arrivals_ns)]),
        "prompt_tokens": distribution(prompts),
        "output_tokens": distribution(outputs),
        "shared_token_share": None if shared_tokens is None or not prompts else shared_tokens / sum(prompts),
    }


def _known_tokens(request: RequestSpec, known: set[int]) -> int:
    """Leading prompt tokens whose content came before; the last token of a prompt is computed in any case."""
    count = 0
    for identity in request.hash_ids:
        if identity not in known:
            break
        count += request.hash_block_tokens
    return min(count, request.prompt_tokens - 1)


def _variation(gaps: Sequence[int]) -> float | None:
    """Standard deviation over mean; None of fewer than two gaps, or where all is at once."""
    total = sum(gaps)
    if len(gaps) < 2 or not total:
        return None
    mean = total / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
