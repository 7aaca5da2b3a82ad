"""What a PlannerCore is to know of a ClusterCore: its events and commands as the planner's inputs, for either driver.

Reads the cluster, never changes it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diptych.control.cluster.attempts import AttemptState
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Arrived, Cancelled, ClusterEvent, Reported
from diptych.control.commands import Command, End
from diptych.control.config import PresetName, SchedulerConfig
from diptych.control.events import Event, FirstToken, HandoffReserved, RequestAdmitted
from diptych.control.planner.fleet_layout import STARTED_GROUP
from diptych.control.planner.planner_events import (
    AnswerBegun,
    AnswerEnded,
    Cores,
    Demanded,
    Observed,
    ObservedWorker,
    PlannerEvent,
    PromptBegun,
)
from diptych.control.request import FinishReason
from diptych.control.router.topology import Role
from diptych.control.slo import objectives

WHOLE_ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class PoolMember:
    """The pool of a worker, and the scheduler settings that it began with."""

    pool: str
    started: SchedulerConfig


class PlannerObserver:
    """One cluster. started: the scheduler settings that its workers began with. members: the first workers, where these
    are of pools."""

    def __init__(self, core: ClusterCore, started: SchedulerConfig, members: Sequence[PoolMember] = ()) -> None:
        self._core = core
        self._started = started
        self._members = members
        self._open: set[str] = set()  # requests that have not ended

    def read(self, event: ClusterEvent, commands: Sequence[Command]) -> list[PlannerEvent]:
        """What the planner learns when the cluster was given this event, and answered with these commands."""
        found: list[PlannerEvent] = []
        if type(event) is Arrived:
            found.append(self._demanded(event))
        elif type(event) is Reported:
            for happened in event.events:
                if (begun := self._begun(happened)) is not None:
                    found.append(begun)
        elif type(event) is Cancelled and event.reason is FinishReason.ABORT and event.request_id in self._open:
            found.append(self._ended(event.request_id, None))
        for command in commands:
            if type(command) is End and command.request_id in self._open:
                finished = command.finished
                is_whole = finished is not None and finished.reason in WHOLE_ANSWERS
                num_tokens = finished.latency.num_output_tokens if finished is not None and is_whole else None
                found.append(self._ended(command.request_id, num_tokens))
        return found

    def observe(self, pinned: Collection[int] = (), cores: Cores | None = None) -> Observed:
        """The fleet as it is now. pinned: workers whose role and shape an operator has set. cores: how they are
        divided."""
        core = self._core
        workers = tuple(self._observed(worker, worker in pinned, cores is not None) for worker in core.members.usable)
        return Observed(workers, core.attempts.count_in(AttemptState.RESERVING), cores)

    def _observed(self, worker: int, is_pinned: bool, has_rule: bool) -> ObservedWorker:
        info = self._core.members.infos[worker]
        return ObservedWorker(
            worker,
            info.role,
            self.shape(worker),
            info.block_size,
            self._core.loads.get(worker),
            is_pinned,
            self._members[worker].pool if worker < len(self._members) else STARTED_GROUP,
            info.share.num_units if has_rule else 0,
            info.max_sequence_tokens,
            info.model_copy,
            info.groups,
        )

    def role(self, worker: int) -> Role:
        """What this worker is for."""
        return self._core.members.infos[worker].role

    def shape(self, worker: int) -> PresetName:
        """The scheduling preset of this worker's settings."""
        started = self._members[worker].started if worker < len(self._members) else self._started
        scheduler = self._core.members.schedulers.get(worker, started)
        return "unified" if scheduler.budget.kind == "whole" else "chunked"

    def _demanded(self, event: Arrived) -> Demanded:
        submission, lengths = event.submission, self._core.lengths
        self._open.add(submission.request_id)
        entry = self._core.requests.get(submission.request_id)
        if entry is not None:
            num_expected = entry.num_expected
        else:  # refused: it is a part of the demand
            group = lengths.group(submission.options.service_class, submission.num_prompt_tokens)
            num_expected = lengths.mean(group, 0, submission.max_tokens)
        slo = objectives(submission.options.slo, self._core.config.slo)
        return Demanded(submission.request_id, submission.num_prompt_tokens, num_expected, slo)

    def _begun(self, event: Event) -> PlannerEvent | None:
        if type(event) is RequestAdmitted or type(event) is HandoffReserved:
            attempt = self._core.attempts.get(event.request_id)
            if attempt is not None and not attempt.num_output_tokens:  # what moves or returns is no new demand
                return PromptBegun(attempt.request_id, event.num_cached_tokens)
        elif type(event) is FirstToken:
            attempt = self._core.attempts.get(event.request_id)
            return None if attempt is None else AnswerBegun(attempt.request_id)
        return None

    def _ended(self, request_id: str, num_tokens: int | None) -> AnswerEnded:
        self._open.remove(request_id)
        return AnswerEnded(request_id, num_tokens)
