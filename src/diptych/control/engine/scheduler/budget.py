"""How much one step may do, in tokens, sequences and milliseconds. One object per scheduler, opened once per step."""

import math
from typing import Protocol

from diptych.control.config import BudgetConfig
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.slo import Slo
from diptych.control.step import StepFeatures

ALIGNMENT = 16  # chunks that do not end a prompt are whole multiples of this: the tile height of matrix units


class Budget(Protocol):
    """What the scheduler asks while it plans a step."""

    mixes_phases: bool  # whether decodes and prefills share steps

    def open(self, decode: StepFeatures, batch: DecodeBatch) -> None:
        """A new step, in which ``decode`` runs already."""
        ...

    def chunk(self, start: int, remaining: int, *, is_stream: bool = False) -> int:
        """How many of the ``remaining`` tokens of a prompt may run in this step (0: none). is_stream: they are computed
        once more, for a stream that lost its blocks."""
        ...

    def take(self, start: int, num_tokens: int) -> None:
        """The scheduler put this chunk into the step."""
        ...

    def copies(self, count: int, price_ns: int) -> int:
        """Take copies from the host into this step. Returns how many of ``count``, of ``price_ns`` nanoseconds each,
        fit."""
        ...

    def room(self) -> tuple[int, float]:
        """Rows and nanoseconds that the step may still hold."""
        ...


class WholeBudget:
    """A Budget under which prompts run whole and before decodes: the unified shape. One prompt may exceed the limit
    when it is alone."""

    mixes_phases = False

    def __init__(self, config: BudgetConfig) -> None:
        self._limit = config.max_batched_tokens
        self._taken = 0

    def open(self, decode: StepFeatures, batch: DecodeBatch) -> None:
        self._taken = 0

    def copies(self, count: int, price_ns: int) -> int:
        return count

    def room(self) -> tuple[int, float]:
        return self._limit - self._taken, math.inf

    def chunk(self, start: int, remaining: int, *, is_stream: bool = False) -> int:
        return remaining if self._taken == 0 or self._taken + remaining <= self._limit else 0

    def take(self, start: int, num_tokens: int) -> None:
        self._taken += num_tokens


class FixedBudget:
    """A Budget that takes decodes first, then prompt tokens up to a fixed number: chunked prefill as Sarathi-Serve
    describes it."""

    mixes_phases = True

    def __init__(self, config: BudgetConfig) -> None:
        self._limit = config.max_batched_tokens
        self._left = 0

    def open(self, decode: StepFeatures, batch: DecodeBatch) -> None:
        self._left = self._limit - decode.decode_seqs

    def copies(self, count: int, price_ns: int) -> int:
        return count

    def room(self) -> tuple[int, float]:
        return self._left, math.inf

    def chunk(self, start: int, remaining: int, *, is_stream: bool = False) -> int:
        return min(remaining, self._left)

    def take(self, start: int, num_tokens: int) -> None:
        self._left -= num_tokens


class SloBudget:
    """A Budget of the largest chunk whose predicted step still keeps the objective of every running stream.

    A stream whose objective the decodes alone already miss is hopeless and does not shrink the step for the others (the
    rule of xLLM). The prediction is stretched by the model's recent spread, so that an honest but noisy model keeps its
    promise nine times out of ten. A stream that is computed once more may lengthen the step by a quarter, whatever the
    objectives: it has no token at all meanwhile.
    """

    mixes_phases = True

    def __init__(self, config: BudgetConfig, slo: Slo, model: StepTimeModel) -> None:
        self._config = config
        self._default_ns = slo.tpot_ns or config.target_ns
        self._model = model
        self._tokens_left = 0
        self._ns_left = 0.0
        self._stream_ns_left = 0.0
        self._is_empty = True
        self._rows = 0  # that the step computes so far

    def open(self, decode: StepFeatures, batch: DecodeBatch) -> None:
        self._tokens_left = self._config.max_batched_tokens - decode.decode_seqs
        self._rows = decode.decode_seqs
        base_ns = self._model.predict_ns(decode)
        scale = self._config.margin / self._model.spread
        objectives = [tpot_ns or self._default_ns for tpot_ns in batch.tpot_objectives()]
        if not objectives:  # no stream runs: only a newcomer could be kept waiting by this step
            objectives = [self._config.idle_target_ns or min(self._default_ns, self._config.target_ns)]
        reachable = [limit for limit in objectives if limit * scale > base_ns] or [self._default_ns]
        self._ns_left = min(reachable) * scale - base_ns
        if base_ns >= self._default_ns * scale:  # even the default is out of reach: half as much again
            self._ns_left = max(self._ns_left, base_ns / 2)
        self._stream_ns_left = max(self._ns_left, base_ns / 4)
        self._is_empty = True

    def copies(self, count: int, price_ns: int) -> int:
        least = 1 if self._is_empty else 0
        count = min(count, max(int(self._ns_left) // price_ns, least)) if price_ns else count
        self._is_empty = self._is_empty and not count
        self._ns_left -= count * price_ns
        self._stream_ns_left -= count * price_ns
        return count

    def room(self) -> tuple[int, float]:
        return self._tokens_left, self._ns_left

    def chunk(self, start: int, remaining: int, *, is_stream: bool = False) -> int:
        ns_left = self._stream_ns_left if is_stream else self._ns_left
        fits = min(self._model.largest_chunk(start, ns_left, self._rows), self._tokens_left)
        if remaining <= fits:
            return remaining
        if fits < self._config.min_chunk_tokens:
            # the first prefill of a step always moves on, or a slow machine would never start one
            fits = min(self._config.min_chunk_tokens, self._tokens_left) if self._is_empty else 0
            return min(fits, remaining)
        return fits - fits % ALIGNMENT if fits >= 2 * ALIGNMENT else fits

    def take(self, start: int, num_tokens: int) -> None:
        self._is_empty = False
        self._tokens_left -= num_tokens
        work_ns = self._model.prefill_work_ns(start, num_tokens, self._rows)
        self._rows += num_tokens
        self._ns_left -= work_ns
        self._stream_ns_left -= work_ns


def make_budget(config: BudgetConfig, slo: Slo, model: StepTimeModel) -> Budget:
    """The budget policy that the configuration names."""
    if config.kind == "whole":
        return WholeBudget(config)
    if config.kind == "fixed":
        return FixedBudget(config)
    return SloBudget(config, slo, model)
