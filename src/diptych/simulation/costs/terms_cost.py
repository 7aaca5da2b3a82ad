"""The five terms of the scheduler's own step-time model as a cost model: what a planner knows of a live worker.

In fixed point, so that equal plans cost the same everywhere.
"""

from dataclasses import dataclass

from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import FRACTION_BITS, DecodeLine


@dataclass(frozen=True, slots=True)
class StepTermsCost:
    """A CostModel: t = step + token * prompt tokens + pair * (query, key) pairs + sequence * streams + context * their
    tokens, in nanoseconds (see control.engine.scheduler.step_time)."""

    step_term_ns: float
    token_ns: float
    pair_ns: float
    sequence_ns: float
    context_ns: float
    name: str = "step-time model"

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        return DecodeLine.of(self.step_term_ns + self.sequence_ns * num_seqs, self.context_ns)

    def step_ns(self, output: SchedulerOutput) -> int:
        features = output.features
        line = self.decode_line(features.decode_seqs, features.decode_context)
        if not features.prefill_tokens:
            return line.step_ns(features.decode_context)
        extra_ns = self.token_ns * features.prefill_tokens + self.pair_ns * features.prefill_attention
        extra = round(extra_ns * (1 << FRACTION_BITS))
        return max(1, (line.intercept + line.slope * features.decode_context + extra) >> FRACTION_BITS)
