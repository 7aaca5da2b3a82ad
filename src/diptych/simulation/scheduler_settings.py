"""The table ``scheduler`` of the settings, of the whole fleet or of one pool; and numbers with their limits, which a
wrong value is refused with."""

from typing import Annotated

import msgspec

from diptych.control.config import BudgetName, OrderName, PreemptionName
from diptych.workload.description import SettingsTable

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SchedulerSettings(SettingsTable, frozen=True, kw_only=True):
    """Details on top of the shape's preset; the names of ``diptych serve``. None: as the preset has it."""

    order: OrderName | None = None
    budget: BudgetName | None = None
    max_batched_tokens: int | None = None
    step_target_ms: Positive | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    max_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_threshold: int | None = None
    preemption: PreemptionName | None = None
    preempt_for_priority: bool = False
