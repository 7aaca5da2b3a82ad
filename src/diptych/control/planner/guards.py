"""When the planner must not judge, or must not change: each a predicate of its arguments alone."""

from collections.abc import Collection, Mapping, Sequence

from diptych.control.planner.fleet_layout import Layout
from diptych.control.planner.planner_events import ObservedWorker, Prediction, ReplayedArrival
from diptych.control.router.topology import has_both_phases

FEW_OPEN_COUNTS = 32
CLOSED_LOOP_RANGE = 0.02
MOST_UTILISATION = 0.85
INFEASIBLE_SHARE = 0.5
OVERLOADED_ATTAINMENT = 0.5


def metrics_are_lost(workers: Sequence[ObservedWorker], now: int, stale_ns: int, is_demanded: bool) -> bool:
    """Whether a worker has not reported its load, or not for so long although there are requests (an idle worker has
    nothing to report)."""
    if not workers or any(worker.load is None for worker in workers):
        return True
    newest_ns = max(worker.load.time_ns for worker in workers if worker.load is not None)
    return is_demanded and now - newest_ns > stale_ns


def is_cold(num_arrivals: int, least: int) -> bool:
    """Whether the window holds too few requests to say anything."""
    return num_arrivals < least


def is_cooling_down(now: int, last_change_ns: int | None, cooldown_ns: int) -> bool:
    """Whether the last change is too recent for its effect to be seen."""
    return last_change_ns is not None and now - last_change_ns < cooldown_ns


def is_closed_loop(open_counts: Sequence[int]) -> bool:
    """Whether arrivals only follow completions: at each, as many requests were open as at the others. A faster fleet
    makes such load rise, so that its trend says nothing of what is wanted."""
    if len(open_counts) < FEW_OPEN_COUNTS:
        return False
    return max(open_counts) > 1 and max(open_counts) - min(open_counts) <= CLOSED_LOOP_RANGE * max(open_counts)


def is_overloaded(predictions: Sequence[Prediction]) -> bool:
    """Whether even the best configuration serves few requests in time. Which ones then depends on the moment more than
    on the configuration, and what works off more ends the overload sooner."""
    return max(prediction.attainment for prediction in predictions) < OVERLOADED_ATTAINMENT


def can_spare_a_worker(utilisation: float, num_workers: int) -> bool:
    """Whether one worker fewer would leave the others below MOST_UTILISATION: their work grows by N / (N - 1)."""
    return num_workers > 1 and utilisation * num_workers / (num_workers - 1) <= MOST_UTILISATION


def is_within_budget(num_workers: int, most: int) -> bool:
    """Whether ``num_workers`` workers may run."""
    return num_workers <= most


def respects_pins(present: Layout, proposed: Layout, pinned: Collection[int]) -> bool:
    """Whether every worker that an operator has pinned keeps its role and shape."""
    kept = {(setting.worker, setting.kind) for setting in proposed.settings}
    return all((setting.worker, setting.kind) in kept for setting in present.settings if setting.worker in pinned)


def keeps_both_phases(proposed: Layout) -> bool:
    """Whether a worker is left for prompts, and one for answers."""
    return has_both_phases(setting.role for setting in proposed.settings)


def keeps_what_it_serves(present: Layout, proposed: Layout, limits: Mapping[str, tuple[int, int]]) -> bool:
    """Whether no request is left without workers for both phases that hand requests to each other and take it as long
    as it is. limits: (model copy, tokens of the longest sequence) of the workers of each group that has some."""
    before, after = _longest_of_copies(present, limits), _longest_of_copies(proposed, limits)
    if any(before.get(copy) and not longest for copy, longest in after.items()):
        return False
    return max(after.values(), default=0) >= max(before.values(), default=0)


def _longest_of_copies(layout: Layout, limits: Mapping[str, tuple[int, int]]) -> dict[int, int]:
    """Tokens of the longest sequence for which workers of a model copy can do both phases (0: for none)."""
    longest: dict[int, list[int]] = {}  # that can be prefilled, and that can be decoded
    for setting in layout.settings:
        if setting.group in limits:
            copy, tokens = limits[setting.group]
            phases = longest.setdefault(copy, [0, 0])
            for at, other in enumerate(("decode", "prefill")):
                if setting.role != other:
                    phases[at] = max(phases[at], tokens)
    return {copy: min(phases) for copy, phases in longest.items()}


def infeasible_ttft_ns(arrivals: Sequence[ReplayedArrival], terms: Sequence[float]) -> int | None:
    """The median time to first token of lone requests whose objective no idle worker could meet, when most requests are
    such; None: they are not. More workers would not help them."""
    fixed_ns, token_ns, pair_ns = terms[:3]
    impossible = []
    for arrival in arrivals:
        length = arrival.num_prompt_tokens
        lone_ns = int(fixed_ns + token_ns * length + pair_ns * length * (length + 1) / 2)
        if arrival.slo.ttft_ns is not None and lone_ns > arrival.slo.ttft_ns:
            impossible.append(lone_ns)
    if not arrivals or len(impossible) <= INFEASIBLE_SHARE * len(arrivals):
        return None
    return sorted(impossible)[len(impossible) // 2]
