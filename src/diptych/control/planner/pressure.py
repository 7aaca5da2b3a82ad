"""How near a configuration is to its limits, from the step-time model alone: which candidates are worth simulating.

Prefill: the work of the forecast prompts in seconds per second, against the TTFT that a queue at that utilisation has
(M/D/1: mean wait = s * u / (2 (1 - u)), Pollaczek 1930, with service time s). Decode: as many streams as Little's law
has at the step time of that many streams, against the tightest TPOT and the KV blocks. 1 is the limit of an objective;
a worker that cannot keep up has OVERLOAD and more. A step of a chunked worker that has streams ends within their TPOT:
what is left of it beside them is all that it has for prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.planner.fleet_layout import Counts
from diptych.control.planner.planner_events import DemandSummary, ReplayedArrival
from diptych.control.slo import NS_PER_S

OVERLOAD = 1000.0
STEP_SHARE = 0.9  # of the TPOT objective that a step of a chunked worker may take (see BudgetConfig.margin)


@dataclass(frozen=True, slots=True)
class OfferedWork:
    """What is asked for. rate: requests/s. prompt_s: seconds of prefill of a mean prompt. ttft_s, tpot_s: the tightest
    objectives (None: there is none). output_tokens, context_tokens: means. num_reserving: prompts that wait for room on
    a decode worker now: streams that its count does not have yet."""

    rate: float
    prompt_s: float
    output_tokens: float
    context_tokens: float
    ttft_s: float | None
    tpot_s: float | None
    num_reserving: int = 0


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Of one worker: seconds of a step, of a stream in it, of a token of its context; tokens that its blocks hold."""

    step_s: float
    sequence_s: float
    context_s: float
    kv_tokens: int


def work_of(
    demand: DemandSummary, arrivals: Sequence[ReplayedArrival], terms: Sequence[float], num_reserving: int
) -> OfferedWork:
    """The forecast rate of such arrivals through the prices of the step-time model."""
    token_ns, pair_ns = terms[1:3]
    count = max(1, len(arrivals))
    lengths = [arrival.num_prompt_tokens for arrival in arrivals]
    prompt_ns = sum(token_ns * length + pair_ns * length * (length + 1) / 2 for length in lengths) / count
    outputs = sum(arrival.num_output_tokens for arrival in arrivals) / count
    ttfts = [arrival.slo.ttft_ns for arrival in arrivals if arrival.slo.ttft_ns]
    tpots = [arrival.slo.tpot_ns for arrival in arrivals if arrival.slo.tpot_ns]
    return OfferedWork(
        rate=demand.forecast,
        prompt_s=prompt_ns / NS_PER_S,
        output_tokens=outputs,
        context_tokens=sum(lengths) / count + outputs / 2,
        ttft_s=min(ttfts) / NS_PER_S if ttfts else None,
        tpot_s=min(tpots) / NS_PER_S if tpots else None,
        num_reserving=num_reserving,
    )


def prices_of(terms: Sequence[float], kv_tokens: int) -> StepPrices:
    """The terms of a step-time model in seconds."""
    fixed_ns, _, _, sequence_ns, context_ns = terms
    return StepPrices(fixed_ns / NS_PER_S, sequence_ns / NS_PER_S, context_ns / NS_PER_S, kv_tokens)


def pressure(counts: Counts, work: OfferedWork, prices: StepPrices) -> float:
    """Of the worst worker, when prompts and answers are divided as well as is possible with a few divisions."""
    of_role = {"prefill": 0, "decode": 0, "both": 0}
    is_chunked = False
    for (role, shape), count in counts:
        of_role[role] += count
        is_chunked |= role == "both" and shape == "chunked"
    num_prefill, num_decode, num_both = of_role["prefill"], of_role["decode"], of_role["both"]
    best = float("inf")
    for prompt_share in _shares(num_prefill, num_both):
        for answer_share in _shares(num_decode, num_both):
            worst = 0.0
            for number, prompts, answers in (
                (num_prefill, prompt_share, 0.0),
                (num_decode, 0.0, answer_share),
                (num_both, 1 - prompt_share, 1 - answer_share),
            ):
                if number:
                    worst = max(worst, _of_worker(prompts / number, answers / number, work, prices, is_chunked))
            best = min(best, worst)
    return best


def _shares(num_dedicated: int, num_both: int) -> tuple[float, ...]:
    """Of a phase, for the workers that do nothing else: all of it, an equal part of each worker, half of that."""
    if not num_dedicated:
        return (0.0,)
    if not num_both:
        return (1.0,)
    equal = num_dedicated / (num_dedicated + num_both)
    return 1.0, (1 + equal) / 2, equal


def _of_worker(prompts: float, answers: float, work: OfferedWork, prices: StepPrices, is_chunked: bool) -> float:
    """A worker that gets these shares of all prompts and of all answers."""
    utilisation = work.rate * prompts * work.prompt_s
    room = _room(answers, work, prices) if prompts and answers and is_chunked else 1.0
    if utilisation >= room:
        return OVERLOAD * min(OVERLOAD, utilisation / max(room, 1 / OVERLOAD))
    worst = 0.0
    if prompts and work.ttft_s:
        prompt_s, used = work.prompt_s / room, utilisation / room
        wait_s = prompt_s * used / (2 * (1 - used))
        worst = (prompt_s + prices.step_s + wait_s) / work.ttft_s
    return max(worst, _of_streams(answers, utilisation, work, prices)) if answers else worst


def _room(answers: float, work: OfferedWork, prices: StepPrices) -> float:
    """Share of a step of the longest allowed duration that a chunked worker has for prompts, beside as many streams as
    there are at steps of that duration."""
    if not work.tpot_s:
        return 1.0
    longest_s = STEP_SHARE * work.tpot_s
    num_streams = work.rate * answers * work.output_tokens * longest_s
    each_s = prices.sequence_s + prices.context_s * work.context_tokens
    return max(0.0, 1 - (prices.step_s + num_streams * each_s) / longest_s)


def _of_streams(answers: float, utilisation: float, work: OfferedWork, prices: StepPrices) -> float:
    """streams n = rate * tokens * step, step = (fixed + n * each) / (1 - share of prefill)."""
    tokens_per_s = work.rate * answers * work.output_tokens
    each_s = prices.sequence_s + prices.context_s * work.context_tokens
    free = 1 - utilisation
    left = free - tokens_per_s * each_s
    if left <= 0:
        return OVERLOAD * (1 + tokens_per_s * each_s / free)
    num_streams = tokens_per_s * prices.step_s / left + work.num_reserving * answers
    step_s = (prices.step_s + num_streams * each_s) / free
    kv = num_streams * work.context_tokens / max(1, prices.kv_tokens)
    worst = OVERLOAD * kv if kv >= 1 else kv
    return max(worst, step_s / work.tpot_s) if work.tpot_s else worst
