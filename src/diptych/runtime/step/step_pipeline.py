"""Two steps at a time (depth 2): the one that follows is planned, laid out and launched while this one is computed.

A device that works by itself would wait between two steps for the host, which reads tokens, plans, and lays out. The
next decode step is queued here before the tokens of this one are known: it reads them on the device. That is done where
control says that the plan follows whatever comes of this step (``EngineCore.begin_step``), and the runner that no row
needs the host (``ModelRunner.may_run_ahead``: no constraint, no penalties, no drafts to verify). All other steps are
planned at depth 1, behind an empty pipeline, so that whatever joins, leaves, is copied or takes blocks that were given
up does so behind all steps before it. A stop that shows with this step costs a row in the next, and never a token.
"""

from collections.abc import Callable

from diptych.control.step import SchedulerOutput, StepResult
from diptych.runtime.step.model_runner import ModelRunner, StepInFlight


class StepPipeline:
    """Launches the steps of one runner, and collects them in their order."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._ahead: StepInFlight | None = None

    @property
    def under_way(self) -> SchedulerOutput | None:
        """The plan that was launched ahead: the next to ``execute``, before any other is asked for."""
        return self._ahead.output if self._ahead is not None else None

    def give_up(self) -> None:
        """Forget the step that was launched ahead: nobody asks for its result."""
        self._ahead = None

    def execute(self, output: SchedulerOutput, plan_ahead: Callable[[], SchedulerOutput | None]) -> StepResult:
        """The result of a step: of the one under way, or of a new one. plan_ahead: asks for the plan that follows."""
        flight, self._ahead = self._ahead, None
        if flight is None:
            flight = self._runner.launch(output)
        assert flight.output is output, "steps are collected in their order"
        if self._runner.may_run_ahead(flight) and (ahead := plan_ahead()) is not None:
            self._ahead = self._runner.launch(ahead, flight)
        return self._runner.collect(flight, is_followed=self._ahead is not None)
