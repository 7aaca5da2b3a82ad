"""How good the planner's choice of a mode is: against every configuration that the twin can simulate.

    python benchmarks/planner.py choices [--workloads 200] [--candidates 8] [--json mode_choice.json]

Random workloads: two to eight workers that cost about what an H100 costs with an 8B model, lengths, rates, burstiness
and objectives drawn log-uniformly. Each fleet begins with all both, chunked, and the planner may change it until it
keeps what it has. ``loss``: how much less goodput its last configuration has than the best of all (unified, chunked,
split, and workers that do both beside those that do one), in the same simulation. Its margin is 2 % here instead of 5:
a fleet that serves may wait for more, a figure of 3 % cannot.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from common import report

from diptych.advisor.twin import Twin
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CacheConfig, EngineConfig, PresetName, shape_preset
from diptych.control.engine.reports import LoadReport
from diptych.control.planner.fleet_layout import Layout, Reach, WorkerSetting, assign, reachable
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import (
    AnswerEnded,
    AskTwin,
    ChangeEnded,
    Demanded,
    GroupCosts,
    Observed,
    ObservedWorker,
    PlannerCommand,
    Prediction,
    SetRole,
    SetShape,
    TwinAnswered,
    TwinQuestion,
    TwinSettings,
)
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo

TERMS = (6e6, 2.4e4, 0.35, 1.5e4, 5.5)  # of a step, in nanoseconds: about an H100 with llama-3.1-8b
NUM_BLOCKS, BLOCK_SIZE = 25_000, 16
SHAPES: tuple[PresetName, ...] = ("chunked", "unified")
NUM_ARRIVALS = 100
MOST_TICKS = 40


@dataclass(frozen=True)
class Sample:
    """One workload on ``num_workers`` workers: (arrival, prompt, answer) of its requests."""

    num_workers: int
    slo: Slo
    requests: tuple[tuple[int, int, int], ...]


def sample(seed: int) -> Sample:
    """The workload of this seed."""
    rng = random.Random(seed)

    def between(least: float, most: float) -> float:
        return least * (most / least) ** rng.random()

    num_workers = rng.randint(2, 8)
    prompt, answer = between(100, 8000), between(10, 800)
    work_s = prompt * TERMS[1] / 1e9 + answer * 1e-4  # of one worker for one request, roughly
    rate = num_workers * between(0.2, 1.1) / work_s
    shape = between(0.3, 1.0)  # of gamma gaps: 1 is Poisson, less comes in bursts
    requests, now = [], 0.0
    for _ in range(NUM_ARRIVALS):
        now += rng.gammavariate(shape, 1 / (shape * rate))
        lengths = (max(1, min(20_000, int(mean * rng.lognormvariate(0, 0.5)))) for mean in (prompt, answer))
        requests.append((int(now * NS_PER_S), *lengths))
    ttft_ms = max(between(200, 4000), 2 * prompt * TERMS[1] / NS_PER_MS)
    return Sample(num_workers, Slo(int(ttft_ms * NS_PER_MS), int(between(9, 60) * NS_PER_MS)), tuple(requests))


class Choice:
    """The planner and the twin in a fleet that serves this workload again and again."""

    def __init__(self, workload: Sample, num_candidates: int) -> None:
        engine = EngineConfig(CacheConfig(NUM_BLOCKS, BLOCK_SIZE), shape_preset("chunked"), workload.slo, 32_768)
        self.settings = {number: WorkerSetting(number, "both", "chunked") for number in range(workload.num_workers)}
        self.num_questions = 0
        self.known: dict[Any, Prediction] = {}  # of the twin, by configuration
        self._twin = Twin(TwinSettings(engine, ClusterConfig(), 131_072, shares_memory=False))
        self._workload = workload
        config = PlannerConfig(
            "auto",
            cooldown_ns=0,
            margin=0.02,
            max_candidates=num_candidates,
            shapes=SHAPES,
            window_ns=3600 * NS_PER_S,
            least_replay_ns=0,
        )
        self._planner = PlannerCore(config)
        self._now = 0
        self._question: TwinQuestion | None = None

    @property
    def layout(self) -> Layout:
        """The present configuration."""
        return Layout(tuple(sorted(self.settings.values())))

    def run(self) -> tuple[Layout, Prediction, dict[str, Prediction]]:
        """What the planner ends with, and all that there is."""
        for number, (at_ns, prompt, answer) in enumerate(self._workload.requests):
            self._now = at_ns
            self._planner.on_event(Demanded(str(number), prompt, answer, self._workload.slo), at_ns)
            self._planner.on_event(AnswerEnded(str(number), answer), at_ns)
        for _ in range(MOST_TICKS):
            self._take(self._planner.on_event(self._observed(), self._now))
            last = self._planner.last
            if last is not None and last.verdict != "change" and "not yet" not in last.reason:
                break
        assert self._question is not None, "nothing was asked"
        first = self.layout
        reach = Reach(SHAPES, len(self.settings), len(self.settings))
        layouts = [assign(first, wanted, (), frozenset()) for wanted in reachable(first, reach)]
        return first, self.predict(first), {layout.label: self.predict(layout) for layout in layouts}

    def predict(self, layout: Layout) -> Prediction:
        """What the twin says of one configuration."""
        assert self._question is not None
        if layout.configuration not in self.known:
            question = TwinQuestion(
                1,
                self._question.arrivals,
                self._question.num_before,
                self._question.span_ns,
                (layout,),
                (GroupCosts(TERMS, NUM_BLOCKS, BLOCK_SIZE),),
            )
            (self.known[layout.configuration],) = self._twin.answer(question)
        return self.known[layout.configuration]

    def _observed(self) -> Observed:
        load = LoadReport(self._now, 0, NUM_BLOCKS, 0, TERMS[1], TERMS[2], TERMS[0], TERMS[3], TERMS[4])
        return Observed(
            tuple(
                ObservedWorker(setting.worker, setting.role, setting.shape, BLOCK_SIZE, load)
                for setting in self.layout.settings
            )
        )

    def _take(self, commands: list[PlannerCommand]) -> None:
        is_changed = False
        for command in commands:
            if isinstance(command, AskTwin):
                self.num_questions += 1
                self._question = command.question
                answers = tuple(self.predict(layout) for layout in command.question.candidates)
                self._take(self._planner.on_event(TwinAnswered(command.question.number, answers, 0), self._now))
            elif isinstance(command, SetRole | SetShape):
                is_changed = True
                old = self.settings[command.worker]
                role = command.role if isinstance(command, SetRole) else old.role
                shape = command.shape if isinstance(command, SetShape) else old.shape
                self.settings[command.worker] = WorkerSetting(command.worker, role, shape)
        if is_changed:
            self._take(self._planner.on_event(ChangeEnded(), self._now))


def measure(seed: int, num_candidates: int) -> dict[str, Any]:
    """One workload."""
    workload = sample(seed)
    choice = Choice(workload, num_candidates)
    layout, chosen, every = choice.run()
    best = max(every, key=lambda label: every[label].goodput_rps)
    most = every[best].goodput_rps
    return {
        "seed": seed,
        "workers": workload.num_workers,
        "configurations": len(every),
        "questions": choice.num_questions,
        "chosen": layout.label,
        "best": best,
        "goodput_rps": chosen.goodput_rps,
        "best_rps": most,
        "at first": every[f"{workload.num_workers} both"].goodput_rps,
        "loss": 1 - chosen.goodput_rps / most if most else 0.0,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=PlannerConfig().max_candidates)


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    begun = time.perf_counter()
    found = []
    for seed in range(options.workloads):
        found.append(measure(seed, options.candidates))
        print(json.dumps(found[-1]), flush=True)
    served = [entry for entry in found if entry["best_rps"]]
    rows = [
        {
            "workloads": len(found),
            "served by any": len(served),
            "within 3 %": f"{sum(entry['loss'] <= 0.03 for entry in found) / len(found):.1%}",
            "all both within 3 %": f"{sum(e['at first'] >= 0.97 * e['best_rps'] for e in found) / len(found):.1%}",
            "worst loss": f"{max(entry['loss'] for entry in found):.1%}",
            "wall_s": f"{time.perf_counter() - begun:.0f}",
        }
    ]
    report("mode choice", rows, options.json, workloads=found, candidates=options.candidates)
