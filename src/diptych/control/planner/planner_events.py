"""The inputs of PlannerCore and its commands, as frozen records. The drivers make the ones and carry out the others."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.config import EngineConfig, PresetName
from diptych.control.engine.reports import LoadReport
from diptych.control.kv_layout import KVGroup, KVLayout
from diptych.control.planner.fleet_layout import STARTED_GROUP, Layout
from diptych.control.router.topology import ANY_LENGTH, Role
from diptych.control.slo import Slo

# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demanded:
    """A request has arrived at the front end. num_output_tokens: expected."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class PromptBegun:
    """A worker computes the prompt, and has found this much of it in its cache."""

    request_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerBegun:
    """The request has its first token."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The request is over. num_output_tokens: of a whole answer (None: it was cut short, and teaches no length)."""

    request_id: str
    num_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One worker as it is now. load: its last report (None: there is none). group: of equal workers that it belongs to.
    num_cores: that it computes on, where a rule divides them (else 0). max_tokens: of the longest sequence that it
    takes. model_copy: only workers of one hand requests to each other. groups: see WorkerInfo."""

    worker: int
    role: Role
    shape: PresetName
    block_size: int
    load: LoadReport | None
    is_pinned: bool = False
    group: str = STARTED_GROUP
    num_cores: int = 0
    max_tokens: int = ANY_LENGTH
    model_copy: int = 0
    groups: tuple[KVGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Cores:
    """How cores are divided among the workers: ``num_cores`` by the rule ``split``. is_pinned: by an operator."""

    num_cores: int
    split: CoreSplit
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """The fleet at a tick: its usable workers, how many prompts wait for room on a decode worker, and how cores are
    divided (None: each worker keeps its own)."""

    workers: tuple[ObservedWorker, ...]
    num_reserving: int = 0
    cores: Cores | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the twin says of one configuration. goodput_rps: requests per second that met their objectives. attainment:
    their share. nearness_rps: requests per second, each counted as min(1, objective / measured). throughput_rps:
    requests per second that had their first token within the time of the arrivals, and that ended in it: the mean of
    the two, with the requests that run or wait already when it begins."""

    goodput_rps: float
    attainment: float
    nearness_rps: float
    throughput_rps: float = 0.0


@dataclass(frozen=True, slots=True)
class TwinAnswered:
    """The answer to the question of this number, in the order of its candidates. cost_ns: processor time it took."""

    number: int
    predictions: tuple[Prediction, ...]
    cost_ns: int


@dataclass(frozen=True, slots=True)
class TwinFailed:
    """There will be no answer to the question of this number. is_defect: the simulation's own code has failed."""

    number: int
    message: str
    is_defect: bool = False


@dataclass(frozen=True, slots=True)
class ChangeEnded:
    """The commands of the last decision were carried out; or not, and what had been changed was changed back."""

    error: str = ""


PlannerEvent = (
    Demanded | PromptBegun | AnswerBegun | AnswerEnded | Observed | TwinAnswered | TwinFailed | ChangeEnded
)  # fmt: skip
PLANNER_EVENT_CLASSES: dict[str, type[PlannerEvent]] = {cls.__name__: cls for cls in get_args(PlannerEvent)}

# -- the twin ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwinPool:
    """Workers that are unlike the fleet's others. engine: as they were started. model_copy: see ObservedWorker."""

    name: str
    engine: EngineConfig
    model_copy: int = 0


@dataclass(frozen=True, slots=True)
class TwinSettings:
    """The fleet that a twin simulates. engine: of one worker as it was started; its cache and its costs come with each
    question. kv_bytes_per_token: as it travels. shares_memory: handoffs move no bytes. pools: groups of other
    workers."""

    engine: EngineConfig
    cluster: ClusterConfig
    kv_bytes_per_token: int
    shares_memory: bool = True
    pools: tuple[TwinPool, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedArrival:
    """A recorded request. at_ns: from the start of the replay. num_prompt_tokens: those that no cache had. is_running:
    it has tokens already: num_prompt_tokens are its context, and num_output_tokens are still to come."""

    at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo
    is_running: bool = False


Terms = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Costs of equal workers with ``num_blocks`` blocks each. terms: the prices of the step-time model (a step, a
    prompt token, a pair, a sequence, a context token), in nanoseconds; on one core where a rule divides the cores.
    groups: see WorkerInfo."""

    terms: Terms
    num_blocks: int
    block_size: int
    group: str = STARTED_GROUP
    groups: tuple[KVGroup, ...] = field(default=(), repr=False)  # digests of recordings are made of the rest

    def kv_tokens(self, context: float) -> int:
        """Tokens that the cache of such a worker holds, in sequences of ``context`` tokens."""
        if self.groups:
            return KVLayout(self.groups).tokens_within(self.num_blocks, max(1, round(context)))
        return self.num_blocks * self.block_size

    def terms_on(self, num_cores: int) -> Terms:
        """Prices on a worker with ``num_cores`` cores (0: cores are not divided); steps last in inverse proportion to
        them."""
        fixed_ns, token_ns, pair_ns, sequence_ns, context_ns = self.terms
        units = max(1, num_cores)
        return fixed_ns / units, token_ns / units, pair_ns / units, sequence_ns / units, context_ns / units


@dataclass(frozen=True, slots=True)
class TwinQuestion:
    """Which of these configurations serves these requests best? The first candidate is the present one. The first
    ``num_before`` requests run or wait already when it begins, and do not count; the others arrive within span_ns.
    costs: of each group of workers."""

    number: int
    arrivals: tuple[ReplayedArrival, ...]
    num_before: int
    span_ns: int
    candidates: tuple[Layout, ...]
    costs: tuple[GroupCosts, ...]


# -- decisions and commands -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DemandSummary:
    """Arrivals of the window: rate now and as forecast, mean lengths, and whether they only follow completions."""

    rate: float
    forecast: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    is_closed_loop: bool


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """A configuration that was considered."""

    layout: str
    num_workers: int
    prediction: Prediction


PlannerVerdict = Literal["hold", "keep", "advise", "change"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Why the fleet changes, or does not. hold: the inputs allow no judgement. keep: no candidate wins. advise: one
    does, and ``--plan`` is advise. change: the commands beside it carry it out."""

    number: int
    time_ns: int
    verdict: PlannerVerdict
    reason: str
    present: str
    chosen: str
    demand: DemandSummary
    candidates: tuple[CandidateScore, ...] = ()


@dataclass(frozen=True, slots=True)
class AskTwin:
    """Have this simulated; TwinAnswered or TwinFailed follows."""

    question: TwinQuestion


@dataclass(frozen=True, slots=True)
class Decided:
    """Show and record this decision."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class SetRole:
    """This worker gets another role."""

    worker: int
    role: Role


@dataclass(frozen=True, slots=True)
class SetShape:
    """This worker gets the scheduler settings of another shape."""

    worker: int
    shape: PresetName


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Start one more worker, of this role and shape."""

    role: Role
    shape: PresetName


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Drain this worker and stop it."""

    worker: int


@dataclass(frozen=True, slots=True)
class SetSplit:
    """Divide the cores by another rule."""

    split: CoreSplit


FleetChange = SetRole | SetShape | AddWorker | RemoveWorker | SetSplit
PlannerCommand = AskTwin | Decided | FleetChange
