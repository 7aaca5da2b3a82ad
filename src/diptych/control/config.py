"""Frozen settings of the control code, one class per owner. Every class checks itself on construction."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from diptych.control.errors import ConfigError
from diptych.control.expert_law import ExpertLaw
from diptych.control.kv_layout import KVGroup, KVLayout
from diptych.control.slo import NS_PER_MS, Slo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OrderName = Literal["fcfs", "priority", "shortest", "deadline"]
BudgetName = Literal["whole", "fixed", "slo"]
PreemptionName = Literal["recompute", "swap"]
AdmissionName = Literal["expected", "greedy"]
PresetName = Literal["unified", "chunked"]
DTypeName = Literal["auto", "bfloat16", "float32"]  # in which a worker computes
ModelImplName = Literal["auto", "transformers"]  # what computes a model; auto: the engine's own families
KVDTypeName = Literal["auto", "int8"]  # of the KV cache; auto: in which the worker computes
QuantizeName = Literal["none", "int8", "int4"]  # whole numbers instead of those in floating point
DEFAULT_SHAPE: PresetName = "chunked"
PREFILL_STEP_NS, MIN_PREFILL_STEP_NS, MAX_PREFILL_STEP_NS = 400 * NS_PER_MS, 100 * NS_PER_MS, 1000 * NS_PER_MS


Record = TypeVar("Record", bound="DataclassInstance")


def changed(config: Record, **changes: Any) -> Record:
    """A copy of a settings record with those changes that are not None."""
    return replace(config, **{name: value for name, value in changes.items() if value is not None})


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise ConfigError(message, param=param)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Prices and sizes of the tiers below the KV cache; those of the disk are a first guess, and measured from then on.

    copy_block_ns: copying one block between device and host (0: no time). clean_blocks: of those that are evicted next,
    how many have a copy on the host. has_disk: whether there is a disk. load_block_ns: reading one block from it.
    shares_host: whether the workers of this host read each other's host blocks. peer_block_ns: reading one of them.
    """

    copy_block_ns: int = 0
    clean_blocks: int = 256
    has_disk: bool = False
    load_block_ns: int = 2_000_000
    shares_host: bool = False
    peer_block_ns: int = 0

    def __post_init__(self) -> None:
        for name in ("copy_block_ns", "clean_blocks", "load_block_ns", "peer_block_ns"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} is {value}; minimum 0", name)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache of one worker, in blocks of ``block_size`` tokens.

    watermark_blocks: blocks that admission leaves free for the growth of running decodes.
    num_host_blocks: the host tier (0: none), for blocks that were evicted, requests that were preempted, and what is on
    its way to or from a disk. admission: a prompt is let in when the expected peak of all
    that run fits ("expected"), or as soon as its own blocks do ("greedy", as other engines do: more run at once, more
    are preempted). first_block: the number of the first block; workers that share one pool of memory number theirs
    one after the other. names_evictors: KV events say for which requests blocks were evicted. groups: of the model's
    layers, each with a block table of its own (none: all layers are alike and attend to all tokens before).
    window_chunk: of models with windows, the most tokens of one prompt that a step computes.
    """

    num_blocks: int
    block_size: int = 32
    num_host_blocks: int = 0
    watermark_blocks: int = 4
    enable_prefix_cache: bool = True
    admission: AdmissionName = "expected"
    first_block: int = 0
    names_evictors: bool = False
    tiers: TierConfig = TierConfig()
    groups: tuple[KVGroup, ...] = ()
    window_chunk: int = 2048

    def __post_init__(self) -> None:
        _require(self.window_chunk >= 1, f"window_chunk is {self.window_chunk}; at least 1", "window_chunk")
        for group in self.groups:
            _require(
                group.tokens_per_page == self.block_size,
                f"groups has pages of {group.tokens_per_page} tokens; block_size is {self.block_size}",
                "groups",
            )
        _require(self.block_size >= 1, f"block_size is {self.block_size}; it must be at least 1", "block_size")
        _require(
            self.num_blocks > self.watermark_blocks >= 0,
            f"num_blocks is {self.num_blocks}; it must exceed watermark_blocks ({self.watermark_blocks})",
            "num_blocks",
        )
        _require(self.first_block >= 0, f"first_block is {self.first_block}; minimum 0", "first_block")
        _require(self.num_host_blocks >= 0, f"num_host_blocks is {self.num_host_blocks}; minimum 0", "num_host_blocks")
        _require(
            not self.tiers.has_disk or self.num_host_blocks > 0,
            f"num_host_blocks is {self.num_host_blocks}; blocks pass through host memory on their way to a disk",
            "num_host_blocks",
        )
        known = ("expected", "greedy")
        _require(self.admission in known, f"admission is {self.admission!r}; expected or greedy", "admission")

    @property
    def layout(self) -> KVLayout:
        """The groups of layers, and how many blocks of each a sequence holds."""
        return KVLayout(self.groups) if self.groups else KVLayout.dense(self.block_size)

    @property
    def charged_chunk(self) -> int:
        """The tokens of one step by which a sequence is charged the blocks of its windows: a prompt keeps its last
        boundary until it ends, also where a step begins behind it."""
        return max(self.layout.longest_chunk(self.window_chunk), self.block_size)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.layout.capacity_tokens(self.num_blocks - self.watermark_blocks, self.charged_chunk)


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """How much one step may do.

    whole: prompts run whole and before decodes. fixed: decodes first, then prompt tokens up to max_batched_tokens.
    slo: like fixed, and the step must end within the time that the objectives of running streams leave
    (``target_ns`` applies when a stream has no TPOT objective of its own, and also when nothing is running, so that
    a newcomer never waits longer than that for the step in front of it). idle_target_ns: how long a step may take
    while nothing streams, where that differs: workers that prefill for others read their weights for more tokens at
    once, and leave the memory bandwidth to those that decode.
    """

    kind: BudgetName = "slo"
    max_batched_tokens: int = 2048
    target_ns: int = 100 * NS_PER_MS
    margin: float = 0.9  # share of the objective that a predicted step may take
    min_chunk_tokens: int = 16  # smaller chunks are refused unless they end the prompt
    idle_target_ns: int | None = None

    def __post_init__(self) -> None:
        _require(self.kind in ("whole", "fixed", "slo"), f"budget is {self.kind!r}; whole, fixed or slo", "budget")
        for name in ("max_batched_tokens", "target_ns", "min_chunk_tokens"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}; it must be at least 1", name)
        idle_ns = self.idle_target_ns
        _require(idle_ns is None or idle_ns >= 1, f"idle_target_ns is {idle_ns}; at least 1", "idle_target_ns")
        _require(0 < self.margin <= 1, f"margin is {self.margin}; it must be in (0, 1]", "margin")
        _require(
            self.min_chunk_tokens <= self.max_batched_tokens,
            f"min_chunk_tokens is {self.min_chunk_tokens}; at most max_batched_tokens ({self.max_batched_tokens})",
            "min_chunk_tokens",
        )


@dataclass(frozen=True, slots=True)
class CapsConfig:
    """Limits on prompts that are being prefilled at the same time. 0 means no limit.

    A prompt is long when more than ``long_prefill_threshold`` of its tokens are not in the prefix cache.
    max_partial_prefills: admitted prompts whose prefill is not finished after the step.
    max_long_partial_prefills: long prompts with a share of the step or admitted and unfinished.
    """

    max_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    long_prefill_threshold: int = 0

    def __post_init__(self) -> None:
        for name in ("max_partial_prefills", "max_long_partial_prefills", "long_prefill_threshold"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} is {value}; it must be at least 0 (0: no limit)", name)
        _require(
            not self.max_long_partial_prefills or self.long_prefill_threshold > 0,
            f"max_long_partial_prefills is {self.max_long_partial_prefills} but long_prefill_threshold is 0; "
            "set a threshold or remove the cap",
            "long_prefill_threshold",
        )
        _require(
            not (self.max_partial_prefills and self.max_long_partial_prefills > self.max_partial_prefills),
            f"max_long_partial_prefills is {self.max_long_partial_prefills}; "
            f"at most max_partial_prefills ({self.max_partial_prefills})",
            "max_long_partial_prefills",
        )


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """What happens when a decode needs a block and none is free, or a more important request waits.

    from_waiting: a waiting request whose priority is better by at least ``priority_gap`` may displace a running
    decode that has taken at least ``min_steps`` steps since it (re)started and was displaced fewer than
    ``max_per_request`` times (the hysteresis).
    """

    kind: PreemptionName = "recompute"
    from_waiting: bool = False
    priority_gap: int = 1
    min_steps: int = 8
    max_per_request: int = 3

    def __post_init__(self) -> None:
        _require(self.kind in ("recompute", "swap"), f"preemption is {self.kind!r}; recompute or swap", "preemption")
        for name in ("priority_gap", "min_steps", "max_per_request"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}; it must be at least 1", name)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The policies of one worker's scheduler.

    aging: in order "shortest", nanoseconds of predicted work that one nanosecond of waiting outweighs.
    """

    order: OrderName = "shortest"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    caps: CapsConfig = field(default_factory=CapsConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    max_num_seqs: int = 256
    max_waiting: int = 4096
    aging: float = 0.25

    def __post_init__(self) -> None:
        orders = get_args(OrderName)
        _require(self.order in orders, f"order is {self.order!r}; one of {', '.join(orders)}", "order")
        _require(self.max_num_seqs >= 1, f"max_num_seqs is {self.max_num_seqs}; at least 1", "max_num_seqs")
        _require(self.max_waiting >= 1, f"max_waiting is {self.max_waiting}; at least 1", "max_waiting")
        _require(self.aging > 0, f"aging is {self.aging}; it must be positive, or long prompts starve", "aging")
        _require(
            self.budget.kind == "whole" or self.max_num_seqs <= self.budget.max_batched_tokens,
            f"max_num_seqs is {self.max_num_seqs}; at most max_batched_tokens ({self.budget.max_batched_tokens}), "
            "because every running decode takes one token of each step",
            "max_num_seqs",
        )
        caps, tokens = self.caps, self.budget.max_batched_tokens
        _require(
            self.budget.kind == "whole" or not caps.long_prefill_threshold or caps.long_prefill_threshold < tokens,
            f"long_prefill_threshold is {caps.long_prefill_threshold}; it must be below max_batched_tokens ({tokens}) "
            "to have any effect",
            "long_prefill_threshold",
        )
        _require(
            self.budget.kind != "whole" or caps == CapsConfig(),
            "caps on partial prefills have no effect with budget 'whole', where prompts run whole",
            "max_partial_prefills",
        )
        _require(
            not self.preemption.from_waiting or self.order == "priority",
            f"preemption from the waiting queue needs order 'priority', not {self.order!r}",
            "preemption",
        )

    def check_change_to(self, changed: "SchedulerConfig") -> None:
        """Raise ConfigError when a worker that was started with these settings cannot take the changed ones: its
        executor has rows for ``max_num_seqs`` sequences."""
        most = self.max_num_seqs
        words = f"max_num_seqs is {changed.max_num_seqs}; this worker was started for {most}"
        _require(changed.max_num_seqs <= most, words, "max_num_seqs")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One worker: its cache, its scheduler, the objectives that requests inherit. experts: of a model that is a mixture
    (None: every step reads all weights)."""

    cache: CacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    slo: Slo = field(default_factory=Slo)
    max_model_len: int = 8192
    experts: ExpertLaw | None = None

    def __post_init__(self) -> None:
        _require(self.max_model_len >= 2, f"max_model_len is {self.max_model_len}; at least 2", "max_model_len")

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def shape_preset(shape: PresetName, **overrides: Any) -> SchedulerConfig:
    """The scheduler settings behind ``--shape``; ``overrides`` replace fields of SchedulerConfig.

    unified: whole prompts, prefill first, first come first served. chunked: prompts in chunks sized by time, shortest
    first with aging, one long prompt at a time among at most eight.
    """
    if shape == "unified":
        base = SchedulerConfig(order="fcfs", budget=BudgetConfig(kind="whole", max_batched_tokens=8192))
    elif shape == "chunked":
        base = SchedulerConfig(
            caps=CapsConfig(max_partial_prefills=8, max_long_partial_prefills=1, long_prefill_threshold=1024)
        )
    else:
        raise ConfigError(f"shape is {shape!r}; unified or chunked", param="shape")
    return replace(base, **overrides)


def reshaped(scheduler: SchedulerConfig, shape: PresetName) -> SchedulerConfig:
    """The preset of another shape with the limits, the preemption and the step time of these settings."""
    base = shape_preset(shape)
    return replace(
        base,
        order="priority" if scheduler.order == "priority" else base.order,
        budget=replace(base.budget, target_ns=scheduler.budget.target_ns),
        preemption=scheduler.preemption,
        max_num_seqs=scheduler.max_num_seqs,
        max_waiting=scheduler.max_waiting,
    )


def scheduler_config(
    shape: "PresetName | SchedulerConfig",
    *,
    order: OrderName | None = None,
    budget: BudgetName | None = None,
    max_batched_tokens: int | None = None,
    step_target_ms: float | None = None,
    max_num_seqs: int | None = None,
    max_waiting: int | None = None,
    max_partial_prefills: int | None = None,
    max_long_partial_prefills: int | None = None,
    long_prefill_threshold: int | None = None,
    preemption: PreemptionName | None = None,
    preempt_for_priority: bool = False,
) -> SchedulerConfig:
    """The preset of ``--shape``, or the rules of an engine of others, with the details that were given on top (None:
    not given). ``diptych serve`` and ``diptych simulate`` both begin here."""
    base = shape if isinstance(shape, SchedulerConfig) else shape_preset(shape)
    target_ns = None if step_target_ms is None else int(step_target_ms * NS_PER_MS)
    budget_config = changed(base.budget, kind=budget, max_batched_tokens=max_batched_tokens, target_ns=target_ns)
    caps = base.caps if budget_config.kind != "whole" else CapsConfig()
    if caps.long_prefill_threshold >= budget_config.max_batched_tokens and long_prefill_threshold is None:
        caps = replace(caps, long_prefill_threshold=budget_config.max_batched_tokens // 2)
    return changed(
        base,
        order=order,
        budget=budget_config,
        caps=changed(
            caps,
            max_partial_prefills=max_partial_prefills,
            max_long_partial_prefills=max_long_partial_prefills,
            long_prefill_threshold=long_prefill_threshold,
        ),
        preemption=changed(base.preemption, kind=preemption, from_waiting=preempt_for_priority or None),
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )


def prefill_scheduler(scheduler: SchedulerConfig, slo: Slo) -> SchedulerConfig:
    """The settings of a worker that prefills for others: steps as long as a newcomer may be kept waiting, a fifth of
    the TTFT objective. Short steps would read all weights for few tokens each, and compete with the decode workers for
    the memory."""
    idle_ns = PREFILL_STEP_NS
    if slo.ttft_ns:
        idle_ns = min(max(slo.ttft_ns // 5, MIN_PREFILL_STEP_NS), MAX_PREFILL_STEP_NS)
    return replace(scheduler, budget=replace(scheduler.budget, idle_target_ns=idle_ns))
