"""PlannerCore: which configuration the fleet should have, decided from its load.

    commands = planner.on_event(event, now)        # the only entry: planner_events in, planner_events out

A state machine without a clock, as ClusterCore is: the same inputs give the same decisions, live and simulated. At each
tick (PlannerConfig.tick_ns):

1. Demand is counted when requests arrive, so that a fleet too slow to complete anything still shows its load. Level and
   damped trend of the rate give the rate at PlannerConfig.horizon_ns; where arrivals only follow completions (a closed
   loop), the trend is not used.
2. guards.py says when nothing can be judged.
3. The candidates are the configurations one change away (a role, a shape, a worker more or fewer, cores from one role
   to another) and every division of as many workers among the roles. ``pressure`` ranks them with the workers' own
   step-time models.
4. A twin (a simulation that begins with the present streams, of the latest arrivals at the forecast rate) gives the
   goodput of the best few. Its processor time stays below PlannerConfig.twin_share in the long run, and may be ahead by
   twin_burst_ns where there is news. A settled fleet is not judged again until its work changes by SETTLED_CHANGE, or
   requests wait for longer than their TTFT objective.
5. A candidate that wins by the margin in answers running, or by less in more of them, becomes a decision. With fewer
   workers it wins when it loses at most the tolerance; of equally good ones the one with the fewest changes is taken.
6. In an overload (no candidate serves half of the requests in time) what is worked off counts, too: which requests are
   in time then depends on the moment, and how long the overload lasts on the configuration.
"""

from collections.abc import Callable, Sequence
from typing import Any

from diptych.control.planner import guards
from diptych.control.planner.edge_demand import Demand
from diptych.control.planner.fleet_layout import (
    NEW_WORKER,
    Configuration,
    Layout,
    Reach,
    WorkerSetting,
    assign,
    reachable,
)
from diptych.control.planner.observed_costs import Pricing, fastest_terms, group_costs
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_events import (
    AddWorker,
    AnswerBegun,
    AnswerEnded,
    AskTwin,
    CandidateScore,
    ChangeEnded,
    Decided,
    Decision,
    Demanded,
    DemandSummary,
    FleetChange,
    GroupCosts,
    Observed,
    PlannerCommand,
    PlannerEvent,
    PlannerVerdict,
    Prediction,
    PromptBegun,
    RemoveWorker,
    SetRole,
    SetShape,
    SetSplit,
    Terms,
    TwinAnswered,
    TwinFailed,
    TwinQuestion,
)
from diptych.control.planner.pressure import OfferedWork, pressure, work_of
from diptych.control.slo import NS_PER_MS, NS_PER_S

NEARNESS_WEIGHT = 0.1  # where no request meets its objectives, the configuration that comes nearest wins
SETTLED_ATTAINMENT = 0.99
SETTLED_CHANGE = 0.15  # of the load, for which the last answer still holds
MOST_LATE = 0.01  # of the arrivals of the window, that a settled configuration may keep waiting for too long
ROUNDING = 1e-9
MOST_WINNERS = 2  # candidates that are asked about again
SAMPLE = 200  # arrivals that prices and objectives are read from


class PlannerCore:
    """The decisions of one fleet."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.demand = Demand(config.window_ns, config.tick_ns)
        self.last: Decision | None = None
        self._workers: Observed = Observed(())
        self._question: TwinQuestion | None = None  # that is not answered yet
        self._asked_demand: DemandSummary | None = None
        self._settled_at: DemandSummary | None = None  # for which the present configuration is good enough
        self._next_question_ns = 0
        self._next_repeat_ns = 0  # of a question that has been answered for such a load
        self._twin_ns = 0.0  # processor time that the twin has had beyond its share
        self._twin_counted_ns = 0  # until when its share has been taken off
        self._winners: dict[Configuration, float] = {}  # candidates -> what they gained in answers running
        self._is_changing = False
        self._last_change_ns: int | None = None
        self._num_questions = 0
        self._num_decisions = 0
        self._handlers: dict[type, Callable[[Any, int], list[PlannerCommand]]] = {
            Observed: self._on_observed,
            TwinAnswered: self._on_answered,
            TwinFailed: self._on_failed,
            ChangeEnded: self._on_change_ended,
        }
        self._counters: dict[type, Callable[[Any, int], None]] = {
            Demanded: self.demand.on_demanded,
            PromptBegun: lambda event, now: self.demand.on_prompt_begun(event),
            AnswerBegun: self.demand.on_answer_begun,
            AnswerEnded: lambda event, now: self.demand.on_answer_ended(event),
        }

    def on_event(self, event: PlannerEvent, now: int) -> list[PlannerCommand]:
        """Take in an event. Returns the commands to carry out."""
        count = self._counters.get(type(event))
        if count is not None:
            count(event, now)
            return []
        return self._handlers[type(event)](event, now)

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _on_observed(self, event: Observed, now: int) -> list[PlannerCommand]:
        self._workers = event
        self.demand.on_tick(now)
        demand = self.demand.summary(self.config.horizon_ns)
        if reason := self._hold_reason(demand, now):
            self._winners.clear()
            return self._hold(reason, demand, now)
        if self._is_changing or self._question is not None or now < self._next_question_ns:
            return []
        if guards.is_cooling_down(now, self._last_change_ns, self.config.cooldown_ns) or self._is_settled(demand, now):
            return []
        if now < self._next_repeat_ns and not self._has_news(demand, now):
            return []
        return self._ask(demand, now)

    def _hold_reason(self, demand: DemandSummary, now: int) -> str:
        """Why nothing can be said of the fleet now ("": something can)."""
        workers = self._workers.workers
        if guards.metrics_are_lost(workers, now, self.config.stale_ns, self.demand.num_open > 0):
            return "the workers' load reports are missing or old"
        if guards.is_cold(len(self.demand), self.config.min_arrivals):
            return f"fewer than {self.config.min_arrivals} requests arrived lately"
        sample = self.demand.latest(SAMPLE)
        if not any(arrival.slo.ttft_ns or arrival.slo.tpot_ns for arrival in sample):
            return "no request has an objective (--ttft-slo-ms, --tpot-slo-ms), so no configuration is better"
        lone_ns = [guards.infeasible_ttft_ns(sample, terms) for terms in self._fastest_terms()]
        impossible_ns = [time_ns for time_ns in lone_ns if time_ns is not None]
        if len(impossible_ns) == len(lone_ns):
            return f"infeasible: one request alone needs {min(impossible_ns) / NS_PER_MS:.0f} ms to its first token"
        return ""

    def _is_settled(self, demand: DemandSummary, now: int) -> bool:
        settled = self._settled_at
        return settled is not None and not self._are_many_late(now) and _is_like(demand, settled)

    def _has_news(self, demand: DemandSummary, now: int) -> bool:
        """Whether there may be another answer than the last: what the twin may be ahead of its share is for this."""
        asked = self._asked_demand
        return asked is None or bool(self._winners) or self._are_many_late(now) or not _is_like(demand, asked)

    def _are_many_late(self, now: int) -> bool:
        return self.demand.num_late(now) > MOST_LATE * len(self.demand)

    def _fastest_terms(self) -> list[Terms]:
        """The step-time models that a lone request may meet: where cores move, with all that others can spare."""
        workers, cores = self._workers.workers, self._workers.cores
        most = max((worker.num_cores for worker in workers), default=0)
        if cores is not None and self._moves_cores:
            most = cores.num_cores - len(workers) + 1
        return fastest_terms(group_costs(workers), workers, most)

    @property
    def _moves_cores(self) -> bool:
        """Whether the rule that divides the cores is the planner's to change, and all workers have what it gave."""
        cores = self._workers.cores
        if cores is None or cores.is_pinned:
            return False
        return sum(worker.num_cores for worker in self._workers.workers) == cores.num_cores

    # -- the question -------------------------------------------------------------------------------------------------

    @property
    def present(self) -> Layout:
        """The configuration as observed last."""
        cores = self._workers.cores
        settings = (
            WorkerSetting(worker.worker, worker.role, worker.shape, worker.group, worker.num_cores)
            for worker in self._workers.workers
        )
        return Layout(tuple(sorted(settings)), cores.split if cores is not None else None)

    def _ask(self, demand: DemandSummary, now: int) -> list[PlannerCommand]:
        arrivals, num_waiting, span_ns = self.demand.replay(
            demand.forecast, self.config.max_replayed, self.config.least_replay_ns
        )
        if not arrivals:
            return []
        workers = self._workers.workers
        generated = sum(worker.load.output_tokens for worker in workers if worker.load is not None)
        running = self.demand.running(generated, now)
        costs = group_costs(workers)
        work = work_of(demand, self.demand.latest(SAMPLE), self._workers.num_reserving)
        self._num_questions += 1
        self._question = TwinQuestion(
            self._num_questions,
            (*running, *arrivals),
            len(running) + num_waiting,
            span_ns,
            self._candidates(work, costs),
            costs,
        )
        self._asked_demand = demand
        return [AskTwin(self._question)]

    def _candidates(self, work: OfferedWork, costs: Sequence[GroupCosts]) -> tuple[Layout, ...]:
        """The present configuration, and the most promising ones in reach."""
        workers, present, pricing = self._workers.workers, self.present, Pricing(costs, work)
        most = self.config.max_workers or len(workers)
        spares = guards.can_spare_a_worker(min(pressure(pricing.parts(present), work), 1.0), len(workers))
        useful = [
            layout
            for layout in self._others(present, most)
            if len(layout.settings) >= len(workers) or spares
            if guards.is_within_budget(len(layout.settings), most)
        ]
        ranked = [
            (round(pressure(pricing.parts(layout), work), 3), len(layout.settings), number)
            for number, layout in enumerate(useful)
        ]
        useful = [useful[number] for _, _, number in sorted(ranked)]
        fewer = [layout for layout in useful if len(layout.settings) < len(workers)][:1]  # else it never has its turn
        useful = fewer + [layout for layout in useful if not fewer or layout is not fewer[0]]
        if self._winners:  # what has won once is asked about again, without those that lost: the answer comes sooner
            useful = [layout for layout in useful if layout.configuration in self._winners] or useful
        return (present, *useful[: self.config.max_candidates - 1])

    def _others(self, present: Layout, most: int) -> list[Layout]:
        """What the present configuration may become."""
        workers, cores = self._workers.workers, self._workers.cores
        pinned = frozenset(worker.worker for worker in workers if worker.is_pinned)
        limits = {worker.group: (worker.model_copy, worker.max_tokens) for worker in workers}
        num_cores = cores.num_cores if cores is not None else 0
        reach = Reach(
            self.config.shapes,
            1 if self.config.max_workers else most,
            most,
            pinned,
            {pool.name: pool.shapes for pool in self.config.pools},
            self._moves_cores,
        )
        idlest = [worker.worker for worker in sorted(workers, key=_used_blocks)]
        layouts = [
            assign(present, wanted, idlest, pinned, num_cores)
            for wanted in reachable(present, reach)[1:]
            if not num_cores or wanted.num_workers <= num_cores
        ]
        return [
            layout
            for layout in layouts
            if guards.respects_pins(present, layout, pinned)
            and guards.keeps_both_phases(layout)
            and guards.keeps_what_it_serves(present, layout, limits)
        ]

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _on_failed(self, event: TwinFailed, now: int) -> list[PlannerCommand]:
        question = self._question
        if question is None or event.number != question.number or self._asked_demand is None:
            return []
        self._question = None
        self._next_question_ns = now + self.config.window_ns
        return self._hold(f"the simulation failed: {event.message}", self._asked_demand, now)

    def _on_answered(self, event: TwinAnswered, now: int) -> list[PlannerCommand]:
        question, demand = self._question, self._asked_demand
        if question is None or event.number != question.number or demand is None:
            return []
        self._question = None
        self._pay(event.cost_ns, now)
        if question.candidates[0] != self.present:  # the fleet has changed meanwhile
            self._winners.clear()
            return []
        scored = tuple(zip(question.candidates, event.predictions, strict=True))
        first, present = scored[0]
        offered = NS_PER_S * (len(question.arrivals) - question.num_before) / question.span_ns
        is_overloaded = guards.is_overloaded(event.predictions)
        score = _progress if is_overloaded else _score
        best_first = sorted(scored[1:], key=lambda pair: (-score(pair[1]), _num_changed(pair[0], first)))
        gains = {
            layout.configuration: gain
            for layout, prediction in best_first
            if (gain := self._gain(layout, prediction, first, present, offered, score)) > 0
        }
        self._winners = {
            wanted: self._winners.get(wanted, 0.0) + gain for wanted, gain in list(gains.items())[:MOST_WINNERS]
        }
        has_won = any(gain >= self.config.margin for gain in gains.values())
        is_served = present.attainment >= SETTLED_ATTAINMENT
        self._settled_at = demand if is_served and not gains else None
        enough = self.config.wins * self.config.margin - ROUNDING
        ripe = [pair for pair in best_first if self._winners.get(pair[0].configuration, 0.0) >= enough]
        scores = tuple(
            CandidateScore(layout.label, len(layout.settings), prediction) for layout, prediction in scored
        )  # fmt: skip
        if not ripe:
            reason = f"no other configuration wins by {self.config.margin:.0%}"
            if has_won:  # asked again at once: when the twin is within its share again, the change may come too late
                reason = f"one wins by {self.config.margin:.0%}, not yet {self.config.wins} times running"
                self._next_question_ns = now
            elif gains:
                reason = f"one is better by less than {self.config.margin:.0%}, not yet often enough"
            return [self._decide("keep", reason, first, demand, scores, now)]
        chosen, prediction = min(ripe, key=lambda pair: (-score(pair[1]), len(pair[0].settings)))
        reason = f"goodput {prediction.goodput_rps:.2f} instead of {present.goodput_rps:.2f} requests/s, as simulated"
        if is_overloaded:
            done = f"{prediction.throughput_rps:.2f} instead of {present.throughput_rps:.2f}"
            reason += f"; overloaded, {done} worked off"
        if self.config.mode != "auto":
            return [self._decide("advise", reason, chosen, demand, scores, now)]
        self._is_changing = True
        self._winners.clear()
        self._settled_at = None
        return [
            self._decide("change", reason, chosen, demand, scores, now),
            *changes(question.candidates[0], chosen),
        ]

    def _pay(self, cost_ns: int, now: int) -> None:
        """The twin has worked so long: the next question waits until it is within its share again, but for a burst;
        one without news waits for all of it."""
        config = self.config
        self._twin_ns = max(0.0, self._twin_ns - config.twin_share * (now - self._twin_counted_ns)) + cost_ns
        self._twin_counted_ns = now
        self._next_question_ns = now + int(max(0.0, self._twin_ns - config.twin_burst_ns) / config.twin_share)
        self._next_repeat_ns = now + int(self._twin_ns / config.twin_share)

    def _gain(
        self,
        layout: Layout,
        prediction: Prediction,
        present: Layout,
        now: Prediction,
        offered_rps: float,
        score: Callable[[Prediction], float],
    ) -> float:
        """What a change gains, at most the margin, and 0 where that is too little to count. As a share of what is asked
        for: where hardly any request is served in time, twice as many are still no reason to move streams about. With
        fewer workers the margin, when almost nothing is lost."""
        config = self.config
        if len(layout.settings) < len(present.settings):
            return config.margin if prediction.goodput_rps >= (1 - config.tolerance) * now.goodput_rps else 0.0
        gain = (score(prediction) - score(now)) / max(ROUNDING, (1 + NEARNESS_WEIGHT) * offered_rps)
        return min(gain, config.margin) if gain >= min(config.least_gain, config.margin) else 0.0

    def _on_change_ended(self, event: ChangeEnded, now: int) -> list[PlannerCommand]:
        self._is_changing = False
        self._last_change_ns = now
        if not event.error:
            return []
        demand = self.demand.summary(self.config.horizon_ns)
        return self._hold(f"the change failed and was taken back: {event.error}", demand, now)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _hold(self, reason: str, demand: DemandSummary, now: int) -> list[PlannerCommand]:
        """Said once, until there is another decision."""
        if (
            self.last is not None
            and self.last.verdict == "hold"
            and self.last.reason.split(":")[0] == reason.split(":")[0]
        ):
            return []
        return [self._decide("hold", reason, self.present, demand, (), now)]

    def _decide(
        self,
        verdict: PlannerVerdict,
        reason: str,
        chosen: Layout,
        demand: DemandSummary,
        scores: tuple[CandidateScore, ...],
        now: int,
    ) -> Decided:
        self._num_decisions += 1
        self.last = Decision(
            self._num_decisions, now, verdict, reason, self.present.label, chosen.label, demand, scores
        )  # fmt: skip
        return Decided(self.last)


def changes(present: Layout, chosen: Layout) -> list[FleetChange]:
    """The changes from one configuration to another: new workers first, and workers that go last, so that no phase is
    ever without one for longer than a change takes. The cores are divided for the new roles."""
    wanted = {setting.worker: setting for setting in chosen.settings if setting.worker != NEW_WORKER}
    commands: list[FleetChange] = [
        AddWorker(setting.role, setting.shape) for setting in chosen.settings if setting.worker == NEW_WORKER
    ]
    changed = [(setting, wanted[setting.worker]) for setting in present.settings if setting.worker in wanted]
    commands += [SetRole(old.worker, "both") for old, new in changed if old.role != new.role and old.role != "both"]
    commands += [SetShape(old.worker, new.shape) for old, new in changed if old.shape != new.shape]
    commands += [SetRole(old.worker, new.role) for old, new in changed if old.role != new.role and new.role != "both"]
    if chosen.split is not None and chosen.split != present.split:
        commands.append(SetSplit(chosen.split))
    return commands + [RemoveWorker(setting.worker) for setting in present.settings if setting.worker not in wanted]


def _load(demand: DemandSummary) -> tuple[float, float]:
    """Prompt tokens and tokens of answers per second."""
    return demand.forecast * demand.mean_prompt_tokens, demand.forecast * demand.mean_output_tokens


def _is_like(demand: DemandSummary, other: DemandSummary) -> bool:
    pairs = zip(_load(demand), _load(other), strict=True)
    return all(abs(new - old) <= SETTLED_CHANGE * old for new, old in pairs)


def _score(prediction: Prediction) -> float:
    return prediction.goodput_rps + NEARNESS_WEIGHT * prediction.nearness_rps


def _progress(prediction: Prediction) -> float:
    """Progress of an overloaded fleet: what is in time now, and how fast the overload is worked off."""
    return prediction.goodput_rps + prediction.throughput_rps


def _num_changed(layout: Layout, present: Layout) -> int:
    """Workers that are others, or for something else."""
    kept = {(setting.worker, setting.kind) for setting in present.settings}
    return sum((setting.worker, setting.kind) not in kept for setting in layout.settings)


def _used_blocks(worker: Any) -> tuple[int, int]:
    return (worker.load.used_blocks if worker.load is not None else 0), worker.worker
