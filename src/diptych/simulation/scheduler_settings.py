"""The table ``scheduler`` of the settings, of the whole fleet or of one pool."""

from diptych.control.config import BudgetName, OrderName, PreemptionName
from diptych.simulation.number_limits import Positive
from diptych.workload.description import SettingsTable


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
