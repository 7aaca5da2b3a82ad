"""The five-term law of the scheduler's own step-time model, as a cost model; also constant service times."""

from dataclasses import dataclass
from functools import lru_cache

from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import FRACTION_BITS, DecodeLine

_line = lru_cache(maxsize=8192)(DecodeLine.of)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """t = base + prefill_token * tokens + prefill_pair * (query, key) pairs + decode_seq * sequences
    + decode_token * context tokens, all in nanoseconds; in fixed point, so that equal plans cost the same everywhere.
    """

    base_ns: float
    prefill_token_ns: float = 0.0
    prefill_pair_ns: float = 0.0
    decode_seq_ns: float = 0.0
    decode_token_ns: float = 0.0
    name: str = "linear"

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        return _line(self.base_ns + self.decode_seq_ns * num_seqs, self.decode_token_ns)

    def step_ns(self, output: SchedulerOutput) -> int:
        features = output.features
        line = self.decode_line(features.decode_seqs, features.decode_context)
        if not features.prefill_tokens:
            return line.step_ns(features.decode_context)
        rest = self.prefill_token_ns * features.prefill_tokens + self.prefill_pair_ns * features.prefill_attention
        rest += self.base_ns + self.decode_seq_ns * features.decode_seqs
        return max(1, (round(rest * (1 << FRACTION_BITS)) + line.slope * features.decode_context) >> FRACTION_BITS)
