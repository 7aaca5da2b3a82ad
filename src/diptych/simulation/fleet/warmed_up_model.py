"""The step-time model of a worker before its first request: the steps that a live worker's warm-up measures, priced."""

from collections.abc import Sequence

from diptych.control.config import EngineConfig
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_model import CostModel

CHUNKS = (16, 64, 256, 512, 1024, 2048)
STARTS = (0, 512, 2048)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (64, 512, 2048)


def warmed_up_model(
    config: EngineConfig, cost: CostModel, measured: Sequence[tuple[StepFeatures, int]] = ()
) -> StepTimeModel:
    """A step-time model that has seen these steps, or else prefills and decodes of all sizes that the worker can
    run, at what they cost."""
    model = StepTimeModel(experts=config.experts)
    for features, duration_ns in measured:
        model.observe(features, duration_ns)
    if measured:
        return model
    capacity = min(config.max_model_len, config.cache.layout.capacity_tokens(config.cache.num_blocks))
    longest = config.scheduler.budget.max_batched_tokens
    for start in STARTS:
        for chunk in CHUNKS:
            if start + chunk <= capacity and chunk <= longest:
                _observe(model, cost, chunk, start, 0, 0)
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch <= config.scheduler.max_num_seqs and context < config.max_model_len:
                _observe(model, cost, 0, 0, batch, batch * context)
    for chunk in CHUNKS:  # both phases in one step
        if chunk + 4 <= min(capacity, longest) and config.scheduler.max_num_seqs >= 4:
            _observe(model, cost, chunk, 0, 4, 4 * min(256, config.max_model_len - 1))
    return model


def _observe(model: StepTimeModel, cost: CostModel, chunk: int, start: int, seqs: int, context: int) -> None:
    features = StepFeatures(chunk, chunk_attention(start, chunk), seqs, context)
    prefills = (ScheduledPrefill("", start, chunk, (), True),) if chunk else ()
    model.observe(features, cost.step_ns(SchedulerOutput(0, prefills=prefills, num_decodes=seqs, features=features)))
