"""How near a configuration is to its limits, from the step-time model alone: which candidates are worth simulating.

Prefill: the work of the forecast prompts in seconds per second, against the TTFT that a queue at that utilisation has
(M/D/1: mean wait = s * u / (2 (1 - u)), Pollaczek 1930, with service time s). Decode: as many streams as Little's law
has at the step time of that many streams, against the tightest TPOT and the KV blocks. 1 is the limit of an objective;
a worker that cannot keep up has OVERLOAD and more. A step of a chunked worker that has streams ends within their TPOT:
what is left of it beside them is all that it has for prompts. Unequal workers of one role share its work in proportion
to their speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.config import PresetName
from diptych.control.planner.planner_events import DemandSummary, ReplayedArrival, Terms
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S

OVERLOAD = 1000.0
SHORTEST_S = 1e-9  # of a prompt or a step that the model prices at nothing
STEP_SHARE = 0.9  # of the TPOT objective that a step of a chunked worker may take (see BudgetConfig.margin)


@dataclass(frozen=True, slots=True)
class OfferedWork:
    """What is asked for. rate: requests/s. prompt_tokens, prompt_pairs: of a mean prompt, and its (query, key) pairs.
    ttft_s, tpot_s: the tightest objectives (None: there is none). output_tokens, context_tokens: means. num_reserving:
    prompts that wait for room on a decode worker now: streams that its count does not have yet."""

    rate: float
    prompt_tokens: float
    prompt_pairs: float
    output_tokens: float
    context_tokens: float
    ttft_s: float | None
    tpot_s: float | None
    num_reserving: int = 0


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Prices of one worker: seconds of a mean prompt, of a step, of a stream in it with its context; tokens that its
    blocks hold. prompt_speed, answer_speed: prompts a second, and steps of one stream."""

    prompt_s: float
    step_s: float
    stream_s: float
    kv_tokens: int
    prompt_speed: float
    answer_speed: float


Part = tuple[Role, PresetName, StepPrices, int]  # and the number of equal workers


def work_of(demand: DemandSummary, arrivals: Sequence[ReplayedArrival], num_reserving: int) -> OfferedWork:
    """Work of such arrivals at the forecast rate."""
    count = max(1, len(arrivals))
    lengths = [arrival.num_prompt_tokens for arrival in arrivals]
    outputs = sum(arrival.num_output_tokens for arrival in arrivals) / count
    ttfts = [arrival.slo.ttft_ns for arrival in arrivals if arrival.slo.ttft_ns]
    tpots = [arrival.slo.tpot_ns for arrival in arrivals if arrival.slo.tpot_ns]
    return OfferedWork(
        rate=demand.forecast,
        prompt_tokens=sum(lengths) / count,
        prompt_pairs=sum(length * (length + 1) for length in lengths) / (2 * count),
        output_tokens=outputs,
        context_tokens=sum(lengths) / count + outputs / 2,
        ttft_s=min(ttfts) / NS_PER_S if ttfts else None,
        tpot_s=min(tpots) / NS_PER_S if tpots else None,
        num_reserving=num_reserving,
    )


def prices_of(work: OfferedWork, terms: Terms, kv_tokens: int) -> StepPrices:
    """What such work costs by the terms of a step-time model."""
    fixed_ns, token_ns, pair_ns, sequence_ns, context_ns = terms
    prompt_s = (token_ns * work.prompt_tokens + pair_ns * work.prompt_pairs) / NS_PER_S
    step_s = fixed_ns / NS_PER_S
    stream_s = (sequence_ns + context_ns * work.context_tokens) / NS_PER_S
    return StepPrices(
        prompt_s, step_s, stream_s, kv_tokens, 1 / max(prompt_s, SHORTEST_S), 1 / max(step_s + stream_s, SHORTEST_S)
    )


def pressure(parts: Sequence[Part], work: OfferedWork) -> float:
    """Pressure on the worst worker, when prompts and answers are divided as well as a few divisions allow."""
    prompt_speed, answer_speed = {"prefill": 0.0, "both": 0.0}, {"decode": 0.0, "both": 0.0}
    for role, _, prices, count in parts:
        if role != "decode":
            prompt_speed[role] += count * prices.prompt_speed
        if role != "prefill":
            answer_speed[role] += count * prices.answer_speed
    best = float("inf")
    for prompt_share in _shares(prompt_speed["prefill"], prompt_speed["both"]):
        for answer_share in _shares(answer_speed["decode"], answer_speed["both"]):
            worst = 0.0
            for role, shape, prices, _ in parts:
                prompts = answers = 0.0
                if role != "decode":
                    prompts = (prompt_share if role == "prefill" else 1 - prompt_share) / prompt_speed[role]
                if role != "prefill":
                    answers = (answer_share if role == "decode" else 1 - answer_share) / answer_speed[role]
                own = _of_worker(
                    prompts * prices.prompt_speed, answers * prices.answer_speed, work, prices, shape == "chunked"
                )
                worst = max(worst, own)
            best = min(best, worst)
    return best


def _shares(dedicated: float, both: float) -> tuple[float, ...]:
    """Shares of a phase to try for the workers that do nothing else (by their speeds): all of it, an equal part of each
    worker, half of that."""
    if not dedicated:
        return (0.0,)
    if not both:
        return (1.0,)
    equal = dedicated / (dedicated + both)
    return 1.0, (1 + equal) / 2, equal


def _of_worker(prompts: float, answers: float, work: OfferedWork, prices: StepPrices, is_chunked: bool) -> float:
    """A worker that gets these shares of all prompts and of all answers."""
    utilisation = work.rate * prompts * prices.prompt_s
    room = _room(answers, work, prices) if prompts and answers and is_chunked else 1.0
    if utilisation >= room:
        return OVERLOAD * min(OVERLOAD, utilisation / max(room, 1 / OVERLOAD))
    worst = 0.0
    if prompts and work.ttft_s:
        prompt_s, used = prices.prompt_s / room, utilisation / room
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
    return max(0.0, 1 - (prices.step_s + num_streams * prices.stream_s) / longest_s)


def _of_streams(answers: float, utilisation: float, work: OfferedWork, prices: StepPrices) -> float:
    """streams n = rate * tokens * step, step = (fixed + n * each) / (1 - share of prefill)."""
    tokens_per_s = work.rate * answers * work.output_tokens
    each_s = prices.stream_s
    free = 1 - utilisation
    left = free - tokens_per_s * each_s
    if left <= 0:
        return OVERLOAD * (1 + tokens_per_s * each_s / free)
    num_streams = tokens_per_s * prices.step_s / left + work.num_reserving * answers
    step_s = (prices.step_s + num_streams * each_s) / free
    kv = num_streams * work.context_tokens / max(1, prices.kv_tokens)
    worst = OVERLOAD * kv if kv >= 1 else kv
    return max(worst, step_s / work.tpot_s) if work.tpot_s else worst
