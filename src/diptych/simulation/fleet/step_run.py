"""What a simulated worker has under way: steps of one plan in a row, priced at once."""

from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import CostModel, DecodeLine


class StepRun:
    """What is under way: ``num_steps`` steps of one plan, from ``start_ns`` to ``end_ns``. waits_ns: of that, for the
    stages of a pipeline."""

    __slots__ = ("end_ns", "last_start_ns", "num_steps", "output", "start_ns", "timer", "used_blocks", "waits_ns")

    def __init__(
        self, output: SchedulerOutput, start_ns: int, end_ns: int, num_steps: int, used_blocks: int, waits_ns: int = 0
    ) -> None:
        self.output = output
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.num_steps = num_steps
        self.used_blocks = used_blocks
        self.timer = 0
        self.last_start_ns = 0
        self.waits_ns = waits_ns

    def price(self, cost: CostModel) -> None:
        """Set the end of a run of decode steps: exact sums along the lines of the cost model."""
        seqs = self.output.num_decodes
        context = self.output.features.decode_context
        end_ns, left = self.start_ns, self.num_steps
        while left:
            line = cost.decode_line(seqs, context)
            steps = min(left, -(-(line.until_context - context) // seqs))
            left -= steps
            end_ns += line.total_ns(context, seqs, steps)
            context += steps * seqs
        self.end_ns = end_ns
        self.last_start_ns = end_ns - line.step_ns(context - seqs)

    def until(self, cost: CostModel, now: int, most: int | None = None) -> tuple[int, int, int]:
        """How many of the steps (``most``: of the first ones) have begun by now, when the last of them began, and when
        it ends."""
        seqs = self.output.num_decodes
        context = self.output.features.decode_context
        end_ns, steps, last_start_ns = self.start_ns, 0, self.start_ns
        line = DecodeLine(0, 0, 0)
        while (end_ns < now or steps == 0) and steps != most:
            if context >= line.until_context:
                line = cost.decode_line(seqs, context)
            last_start_ns = end_ns
            end_ns += line.step_ns(context)
            context += seqs
            steps += 1
        return steps, last_start_ns, end_ns
