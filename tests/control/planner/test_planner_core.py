"""What the planner decides, given observations and the answers of a twin."""

from collections.abc import Callable

import pytest

from diptych.control.cluster.core_split import CoreSplit
from diptych.control.engine.reports import LoadReport
from diptych.control.planner.fleet_layout import Layout
from diptych.control.planner.planner_config import PlanMode, PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import (
    AnswerBegun,
    AskTwin,
    ChangeEnded,
    Cores,
    Decided,
    Demanded,
    Observed,
    ObservedWorker,
    PlannerCommand,
    Prediction,
    RemoveWorker,
    SetRole,
    SetSplit,
    TwinAnswered,
    TwinFailed,
)
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo

SLO = Slo(500 * NS_PER_MS, 50 * NS_PER_MS)
GOOD, MUCH_BETTER = Prediction(1.0, 0.5, 1.5), Prediction(2.0, 1.0, 2.0)

Says = Callable[[Layout], Prediction]


class Rig:
    """A planner, workers whose roles its commands change, and a clock. ``says``: what the twin answers."""

    def __init__(
        self, mode: PlanMode = "auto", *, pinned: tuple[int, ...] = (), slo: Slo = SLO, max_workers: int = 0
    ) -> None:
        self.planner = PlannerCore(PlannerConfig(mode, cooldown_ns=0, max_workers=max_workers))
        self.removed: set[int] = set()
        self.roles: list[Role] = ["both"] * 4
        self.now = 0
        self.decisions: list[str] = []
        self.reasons: list[str] = []
        self.num_questions = 0
        self.questions_ns: list[int] = []
        self.cores: Cores | None = None
        self.num_missing_cores = 0  # that no worker has now
        self.cost_ns = 0
        self.prompt_tokens = 1000
        self._pinned = pinned
        self._slo = slo
        self._num_arrived = 0

    def observed(self) -> Observed:
        load = LoadReport(self.now, 0, 4000, 0, 2e4, 0.5, 5e6, 1e4, 2.0)
        roles = {number: role for number, role in enumerate(self.roles) if number not in self.removed}
        counts = dict.fromkeys(roles, 0)
        if self.cores is not None:
            counts = self.cores.split.counts(roles, self.cores.num_cores - self.num_missing_cores)
        return Observed(
            tuple(
                ObservedWorker(number, role, "chunked", 16, load, number in self._pinned, num_cores=counts[number])
                for number, role in roles.items()
            ),
            cores=self.cores,
        )

    def ticks(self, count: int, says: Says, *, rate: int = 2) -> None:
        """Five seconds each."""
        for _ in range(count):
            for _ in range(5 * rate):
                self.now += NS_PER_S // rate
                self._num_arrived += 1
                self.planner.on_event(AnswerBegun(str(self._num_arrived - 1)), self.now)
                demanded = Demanded(str(self._num_arrived), self.prompt_tokens, 100, self._slo)
                self.planner.on_event(demanded, self.now)
            self.take(self.planner.on_event(self.observed(), self.now), says)

    def take(self, commands: list[PlannerCommand], says: Says) -> None:
        is_changed = False
        for command in commands:
            if isinstance(command, AskTwin):
                self.num_questions += 1
                self.questions_ns.append(self.now)
                answers = tuple(says(candidate) for candidate in command.question.candidates)
                answer = TwinAnswered(command.question.number, answers, self.cost_ns)
                self.take(self.planner.on_event(answer, self.now), says)
            elif isinstance(command, Decided):
                self.decisions.append(command.decision.verdict)
                self.reasons.append(command.decision.reason)
            elif isinstance(command, SetRole):
                self.roles[command.worker] = command.role
                is_changed = True
            elif isinstance(command, SetSplit):
                assert self.cores is not None
                self.cores = Cores(self.cores.num_cores, command.split)
                is_changed = True
            elif isinstance(command, RemoveWorker):
                self.removed.add(command.worker)
                is_changed = True
        if is_changed:
            self.planner.on_event(ChangeEnded(), self.now)


def likes_a_split(layout: Layout) -> Prediction:
    return MUCH_BETTER if layout.label == "3 decode + 1 prefill" else GOOD


def likes_all_equally(layout: Layout) -> Prediction:
    return GOOD


def test_a_candidate_that_wins_twice_running_becomes_the_fleet() -> None:
    rig = Rig()
    rig.ticks(10, likes_a_split)
    assert sorted(rig.roles) == ["decode", "decode", "decode", "prefill"]
    assert rig.decisions.count("change") == 1


def test_a_candidate_that_wins_once_changes_nothing() -> None:
    rig = Rig()
    answers = [likes_a_split]

    def says(layout: Layout) -> Prediction:
        return answers[0](layout)

    while not rig.num_questions:
        rig.ticks(1, says)
    answers[0] = likes_all_equally
    rig.ticks(10, says)
    assert rig.roles == ["both"] * 4


def test_an_advising_planner_says_what_it_would_do_and_does_nothing() -> None:
    rig = Rig("advise")
    rig.ticks(10, likes_a_split)
    assert rig.roles == ["both"] * 4
    assert "advise" in rig.decisions
    assert "change" not in rig.decisions


def test_a_pinned_worker_is_never_changed() -> None:
    rig = Rig(pinned=(0, 1, 2, 3))
    rig.ticks(10, likes_a_split)
    assert rig.roles == ["both"] * 4


def test_workers_that_do_not_report_hold_everything_and_it_is_said_once() -> None:
    rig = Rig()
    rig.ticks(4, likes_all_equally)
    before = rig.num_questions
    for _ in range(60):
        rig.now += 5 * NS_PER_S
        rig.take(rig.planner.on_event(Observed(()), rig.now), likes_a_split)
    assert rig.num_questions == before
    assert rig.decisions.count("hold") <= 2
    assert "missing" in rig.reasons[-1]


def test_objectives_that_no_worker_can_meet_are_named_instead_of_scaled_for() -> None:
    rig = Rig(slo=Slo(ttft_ns=10 * NS_PER_MS))
    rig.ticks(10, likes_a_split)
    assert rig.num_questions == 0
    assert rig.reasons[-1] == "infeasible: one request alone needs 25 ms to its first token"


def test_without_objectives_no_configuration_is_better() -> None:
    rig = Rig(slo=Slo())
    rig.ticks(10, likes_a_split)
    assert rig.num_questions == 0
    assert "no request has an objective" in rig.reasons[-1]


def test_the_twin_is_asked_as_seldom_as_its_cost_demands() -> None:
    rig = Rig()
    rig.cost_ns = 2 * NS_PER_S  # at 10 % of a core: one question in 20 s, which are four ticks
    rig.ticks(120, likes_all_equally)
    assert 28 <= rig.num_questions <= 32


def test_a_change_of_the_load_is_judged_at_once_though_the_same_load_would_wait() -> None:
    rig = Rig()
    rig.cost_ns = 4 * NS_PER_S  # one question in 40 s
    rig.ticks(40, likes_all_equally)
    steady_ns = rig.questions_ns[-1] - rig.questions_ns[-2]
    assert steady_ns >= 40 * NS_PER_S
    while rig.questions_ns[-1] < rig.now:  # to the tick of a question
        rig.ticks(1, likes_all_equally)
    changed_ns = rig.now
    rig.ticks(3, likes_all_equally, rate=4)
    assert changed_ns < rig.questions_ns[-1] <= changed_ns + 10 * NS_PER_S


def test_a_fleet_that_meets_its_objectives_is_not_judged_again_while_the_load_stays() -> None:
    rig = Rig()
    rig.ticks(40, lambda layout: MUCH_BETTER)
    assert rig.num_questions == pytest.approx(1, abs=1)


def test_other_lengths_at_the_same_rate_are_judged_anew() -> None:
    rig = Rig()
    rig.ticks(40, lambda layout: MUCH_BETTER)
    before = rig.num_questions
    rig.prompt_tokens = 4000
    rig.ticks(10, lambda layout: MUCH_BETTER)
    assert rig.num_questions > before


def test_twice_as_much_as_hardly_anything_is_no_reason_to_move_streams() -> None:
    rig = Rig()
    hardly, twice = Prediction(0.02, 0.01, 0.02), Prediction(0.04, 0.02, 0.04)
    rig.ticks(20, lambda layout: hardly if layout.label == "4 both" else twice)
    assert set(rig.decisions) <= {"keep", "hold"}


def test_what_won_once_is_asked_about_again_alone() -> None:
    rig = Rig("advise")
    asked: list[int] = []
    for _ in range(3):  # the first has no rate yet
        rig.now += 5 * NS_PER_S
        for number in range(30):
            rig.planner.on_event(Demanded(f"{rig.now}-{number}", 1000, 100, SLO), rig.now)
        for command in rig.planner.on_event(rig.observed(), rig.now):
            if isinstance(command, AskTwin):
                candidates = command.question.candidates
                asked.append(len(candidates))
                answers = tuple(MUCH_BETTER if layout != candidates[0] else GOOD for layout in candidates)
                rig.planner.on_event(TwinAnswered(command.question.number, answers, 0), rig.now)
    assert asked == [rig.planner.config.max_candidates, 3]


def with_cores(*roles: Role, is_pinned: bool = False) -> Rig:
    """Workers with two cores each, whose roles an operator has set."""
    rig = Rig(pinned=tuple(range(len(roles))))
    rig.roles = list(roles)
    rig.cores = Cores(2 * len(roles), CoreSplit(), is_pinned)
    return rig


def likes_cores_for_prompts(layout: Layout) -> Prediction:
    return MUCH_BETTER if "prefill on 6 cores" in layout.label else GOOD


def test_cores_move_when_another_split_wins_twice_running() -> None:
    rig = with_cores("prefill", "prefill", "decode", "decode")
    rig.ticks(10, likes_cores_for_prompts)
    assert rig.cores is not None
    assert rig.decisions.count("change") == 1
    counts = rig.cores.split.counts(dict(enumerate(rig.roles)), 8)
    assert [counts[0] + counts[1], counts[2] + counts[3]] == [6, 2]


def test_a_split_that_an_operator_has_set_stays() -> None:
    rig = with_cores("prefill", "prefill", "decode", "decode", is_pinned=True)
    rig.ticks(10, likes_cores_for_prompts)
    assert rig.cores == Cores(8, CoreSplit(), True)
    assert "change" not in rig.decisions


def test_no_other_split_is_asked_about_while_cores_are_on_the_move() -> None:
    rig = with_cores("prefill", "prefill", "decode", "decode")
    rig.num_missing_cores = 1
    asked: list[str] = []
    rig.ticks(6, lambda layout: asked.append(layout.label) or GOOD)  # type: ignore[func-returns-value]
    assert set(asked) == {"2 decode on 3 cores + 2 prefill on 4 cores"}


def test_roles_and_cores_change_together_and_the_cores_follow_the_roles() -> None:
    planner = Rig()
    planner.cores = Cores(8, CoreSplit(decode=5))
    planner.ticks(10, lambda layout: MUCH_BETTER if layout.label == "3 both on 6 cores + 1 decode on 2 cores" else GOOD)
    assert sorted(planner.roles) == ["both", "both", "both", "decode"]
    assert planner.cores == Cores(8, CoreSplit())


OVERLOADED = Prediction(0.2, 0.1, 0.5, 1.0)


def test_an_overloaded_fleet_changes_to_what_works_off_more() -> None:
    rig = Rig()
    quicker = Prediction(0.2, 0.1, 0.5, 1.4)
    rig.ticks(10, lambda layout: quicker if layout.label == "3 decode + 1 prefill" else OVERLOADED)
    assert sorted(rig.roles) == ["decode", "decode", "decode", "prefill"]
    assert "overloaded, 1.40 instead of 1.00 worked off" in " ".join(rig.reasons)


def test_an_overloaded_fleet_does_not_change_for_a_moment_in_time_that_works_off_less() -> None:
    rig = Rig()
    myopic = Prediction(0.5, 0.25, 0.9, 0.7)
    rig.ticks(20, lambda layout: OVERLOADED if layout.label == "4 both" else myopic)
    assert rig.roles == ["both"] * 4
    assert set(rig.decisions) <= {"keep", "hold"}


def test_what_has_won_once_is_asked_about_at_the_next_tick_whatever_the_twin_has_used() -> None:
    rig = Rig()
    rig.cost_ns = 12 * NS_PER_S  # at 10 % of a core: 20 s and more to the next question
    rig.ticks(8, likes_a_split)
    first, second = rig.questions_ns[:2]
    assert second - first == 5 * NS_PER_S
    assert sorted(rig.roles) == ["decode", "decode", "decode", "prefill"]
    advised = Rig("advise")
    advised.cost_ns = 12 * NS_PER_S
    advised.ticks(120, likes_a_split)
    assert advised.num_questions <= 2 + 600 // 120 + 1, "advice that stays is not asked about without end"


def test_small_gains_add_up_while_they_come_in_answers_running() -> None:
    def better_by(share: float) -> Says:
        better = Prediction(1.0 + 2 * share, 0.5 + share, 1.5 + 2 * share)
        return lambda layout: better if layout.label == "3 decode + 1 prefill" else GOOD

    rig = Rig()
    rig.ticks(30, better_by(0.03))
    assert sorted(rig.roles) == ["decode", "decode", "decode", "prefill"]
    asked = rig.questions_ns
    change = rig.decisions.index("change") - rig.decisions.count("hold")
    assert change >= 3 and len(asked) > change, "three answers of three points each are not enough"
    rig = Rig()
    rig.ticks(60, better_by(0.015))
    assert rig.roles == ["both"] * 4
    rig, answers = Rig(), [better_by(0.04), better_by(0.04), likes_all_equally]
    for number in range(60):
        rig.ticks(1, answers[number % 3])
    assert rig.roles == ["both"] * 4, "an answer without a gain begins anew"


def test_of_equally_good_configurations_the_one_that_changes_fewest_workers_is_taken() -> None:
    rig = Rig()
    rig.ticks(10, lambda layout: GOOD if layout.label == "4 both" else MUCH_BETTER)
    assert sum(role != "both" for role in rig.roles) == 1


def test_a_failed_simulation_is_shown_and_the_next_one_comes_later() -> None:
    rig = Rig()
    found: list[AskTwin] = []
    while not found:
        rig.now += 5 * NS_PER_S
        for number in range(30):
            rig.planner.on_event(Demanded(f"{rig.now}-{number}", 1000, 100, SLO), rig.now)
        commands = rig.planner.on_event(rig.observed(), rig.now)
        found = [command for command in commands if isinstance(command, AskTwin)]
    rig.take(rig.planner.on_event(TwinFailed(found[0].question.number, "killed"), rig.now), likes_all_equally)
    assert rig.reasons[-1] == "the simulation failed: killed"


def test_workers_that_add_no_goodput_are_removed_while_the_others_have_room() -> None:
    rig = Rig(max_workers=4)
    rig.ticks(60, likes_all_equally)
    assert 1 <= len(rig.removed) <= 3
    kept = Rig(max_workers=4)
    kept.prompt_tokens = 15_000  # a lone one takes 0.36 of the 0.5 s to its first token: a wait would be too long
    kept.ticks(60, likes_all_equally)
    assert not kept.removed


def test_equal_inputs_give_equal_decisions() -> None:
    first, second = Rig(), Rig()
    for rig in (first, second):
        rig.ticks(12, likes_a_split)
    assert first.planner.last == second.planner.last
    assert first.reasons == second.reasons
