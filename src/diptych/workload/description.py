"""What a workload is, in words that a TOML file or flags can say: one frozen record per noun.

Owns names, types, defaults and limits. Must never draw a number or open a file; see config.py for what they become.
"""

from typing import Literal

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.request import ServiceClass
from diptych.control.slo import NS_PER_MS, Slo

ArrivalKind = Literal["poisson", "gamma", "constant", "on_off", "closed"]
LengthKind = Literal["fixed", "uniform", "lognormal", "empirical", "bimodal"]
TraceFormat = Literal["auto", "azure", "mooncake", "own"]


def require(condition: bool, message: str, param: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message, param=param)


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a file of settings."""


class ArrivalConfig(SettingsTable, frozen=True, kw_only=True):
    """When requests come; how many per second is ``WorkloadConfig.rate``.

    gamma: gaps with coefficient of variation ``cv`` (1 is Poisson, larger is burstier). on_off: Poisson at ``rate`` for
    on_s seconds, then at ``off_rate`` for off_s seconds, and so on; with ``random_phases`` the two are means of
    exponential durations. closed: ``concurrency`` clients, each asks again think_s after its answer.
    """

    kind: ArrivalKind = "poisson"
    cv: float = 1.0
    on_s: float = 1.0
    off_s: float = 1.0
    off_rate: float = 0.0
    random_phases: bool = False
    concurrency: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        require(0.01 <= self.cv <= 100, f"cv is {self.cv}; it must be in [0.01, 100]", "cv")
        require(1e-6 <= self.on_s < 1e9, f"on_s is {self.on_s}; it must be in [1e-6, 1e9)", "on_s")
        require(0 <= self.off_s < 1e9, f"off_s is {self.off_s}; it must be in [0, 1e9)", "off_s")
        require(0 <= self.off_rate <= 1e6, f"off_rate is {self.off_rate}; it must be in [0, 1e6]", "off_rate")
        require(self.concurrency >= 1, f"concurrency is {self.concurrency}; it must be at least 1", "concurrency")
        require(0 <= self.think_s < 1e9, f"think_s is {self.think_s}; it must be in [0, 1e9)", "think_s")


class LongConfig(SettingsTable, frozen=True, kw_only=True):
    """The long part of a bimodal distribution: this share of the requests, lognormal around ``mean`` tokens."""

    share: float = 0.1
    mean: float = 8192.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"share is {self.share}; it must be in [0, 1]", "share")
        require(1 <= self.mean <= 1e8, f"mean is {self.mean}; it must be in [1, 1e8]", "mean")
        require(0 <= self.sigma <= 10, f"sigma is {self.sigma}; it must be in [0, 10]", "sigma")


class LengthConfig(SettingsTable, frozen=True, kw_only=True):
    """A distribution of lengths in tokens; what is drawn is rounded and clamped to [min, max].

    fixed: ``mean``. uniform: whole numbers min .. max. lognormal: ``sigma`` of the logarithm, and ``median`` or else
    ``mean`` (before clamping). bimodal: lognormal like that (sigma 0: fixed), and ``long`` for a share of the requests.
    empirical: one of ``values``, or of the ``column`` of the CSV or JSONL file at ``path`` (.gz accepted).
    """

    kind: LengthKind = "fixed"
    mean: float = 512.0
    median: float | None = None
    sigma: float = 0.0
    min: int = 1
    max: int | None = None
    long: LongConfig = LongConfig()
    values: tuple[int, ...] = ()
    path: str = ""
    column: str = ""

    def __post_init__(self) -> None:
        require(1 <= self.mean <= 1e8, f"mean is {self.mean}; it must be in [1, 1e8]", "mean")
        middle = self.mean if self.median is None else self.median
        require(1 <= middle <= 1e8, f"median is {self.median}; it must be in [1, 1e8]", "median")
        require(0 <= self.sigma <= 10, f"sigma is {self.sigma}; it must be in [0, 10]", "sigma")
        require(self.min >= 1, f"min is {self.min}; it must be at least 1", "min")
        require(self.max is None or self.max >= self.min, f"max is {self.max}; it must be at least min", "max")
        if self.kind == "uniform":
            require(self.max is not None, "max is not given; a uniform length needs it", "max")
        if self.kind == "empirical":
            given = bool(self.values) + bool(self.path)
            require(given == 1, "an empirical length needs either values or path", "values")
            require(bool(self.column) or not self.path, "column is not given; path needs it", "column")
            require(all(value >= 0 for value in self.values), "values holds a negative length; minimum 0", "values")


class LengthsConfig(SettingsTable, frozen=True, kw_only=True):
    """Lengths of prompts and answers, drawn independently; or together, as pairs out of a trace.

    pairs: the name or path of a trace (see TraceConfig; arrival times are not needed) whose pairs replace both.
    """

    prompt: LengthConfig = LengthConfig(mean=512)
    output: LengthConfig = LengthConfig(mean=128)
    pairs: str = ""


class PrefixConfig(SettingsTable, frozen=True, kw_only=True):
    """Shared system prompts: one of ``prompts`` of ``tokens`` tokens each stands before every prompt that is drawn.

    zipf: the i-th is chosen with weight 1 / i**exponent.
    """

    prompts: int = 0
    tokens: int = 1024
    choice: Literal["uniform", "zipf"] = "uniform"
    exponent: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.prompts <= 10**6, f"prompts is {self.prompts}; it must be in [0, 1000000]", "prompts")
        require(1 <= self.tokens <= 10**7, f"tokens is {self.tokens}; it must be in [1, 10000000]", "tokens")
        require(0 <= self.exponent <= 10, f"exponent is {self.exponent}; it must be in [0, 10]", "exponent")


class SessionConfig(SettingsTable, frozen=True, kw_only=True):
    """Conversations: each has min_turns .. max_turns turns (uniform); max_turns 1: there are none.

    The prompt of a turn is all that was said, answers included, and a new prompt of the drawn length. The next turn
    comes think_s after the answer (``random_think``: exponential with that mean). An open loop does not know when an
    answer ends: it takes token_ms per answer token for granted. A conversation that would exceed max_context_tokens
    ends. The rate counts requests; conversations start at rate / mean number of turns.
    """

    min_turns: int = 1
    max_turns: int = 1
    think_s: float = 0.0
    random_think: bool = True
    token_ms: float = 30.0
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        require(self.min_turns >= 1, f"min_turns is {self.min_turns}; it must be at least 1", "min_turns")
        require(self.max_turns >= self.min_turns, f"max_turns is {self.max_turns}; at least min_turns", "max_turns")
        require(0 <= self.think_s < 1e9, f"think_s is {self.think_s}; it must be in [0, 1e9)", "think_s")
        require(0 <= self.token_ms < 1e6, f"token_ms is {self.token_ms}; it must be in [0, 1e6)", "token_ms")
        limit = self.max_context_tokens
        require(limit is None or limit >= 2, f"max_context_tokens is {limit}; minimum 2", "max_context_tokens")

    @property
    def mean_turns(self) -> float:
        """Requests per conversation, when no context limit ends it."""
        return (self.min_turns + self.max_turns) / 2


class SloConfig(SettingsTable, frozen=True, kw_only=True):
    """Objectives in milliseconds; None: no objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            require(value is None or 1e-3 <= value <= 1e9, f"{name} is {value}; it must be in [0.001, 1e9]", name)

    def to_slo(self) -> Slo | None:
        """None when nothing is asked for."""
        if self.ttft_ms is None and self.tpot_ms is None:
            return None
        ttft, tpot = self.ttft_ms, self.tpot_ms
        return Slo(
            None if ttft is None else round(ttft * NS_PER_MS),
            None if tpot is None else round(tpot * NS_PER_MS),
        )


class ClassConfig(SettingsTable, frozen=True, kw_only=True):
    """One class of a mix. share: weight among the classes. patience_s: the client goes away this long after it asked.

    None: as the workload has it.
    """

    kind: str
    share: float = 1.0
    lengths: LengthsConfig | None = None
    prefix: PrefixConfig | None = None
    slo: SloConfig | None = None
    priority: int = 0
    service_class: ServiceClass = "standard"
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require(0 < self.share <= 1e9, f"share is {self.share}; it must be in (0, 1e9]", "share")
        patience = self.patience_s
        require(patience is None or patience > 0, f"patience_s is {patience}; it must be positive", "patience_s")


class TraceConfig(SettingsTable, frozen=True, kw_only=True):
    """Requests out of a file, or of a trace inside the package: azure-conv, mooncake-conversation.

    start_s, end_s: only requests that arrive in [start_s, end_s) of the trace; start_s becomes time 0.
    scale: arrivals come this many times as fast (WorkloadConfig.rate instead: at that mean rate).
    """

    path: str
    format: TraceFormat = "auto"
    start_s: float = 0.0
    end_s: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.start_s < 1e9, f"start_s is {self.start_s}; it must be in [0, 1e9)", "start_s")
        end = self.end_s
        require(end is None or end > self.start_s, f"end_s is {end}; it must be later than start_s", "end_s")
        require(1e-6 <= self.scale <= 1e6, f"scale is {self.scale}; it must be in [1e-6, 1e6]", "scale")


class WorkloadConfig(SettingsTable, frozen=True, kw_only=True):
    """A workload. rate: requests per second (None: 1, or the trace's own). num_requests: None: 1000, or the trace.

    classes: a mix; empty: all requests are alike. hash_block_tokens: tokens per identity of shared content (spec.py).
    """

    num_requests: int | None = None
    rate: float | None = None
    arrivals: ArrivalConfig = ArrivalConfig()
    lengths: LengthsConfig = LengthsConfig()
    prefix: PrefixConfig = PrefixConfig()
    sessions: SessionConfig = SessionConfig()
    slo: SloConfig = SloConfig()
    classes: tuple[ClassConfig, ...] = ()
    trace: TraceConfig | None = None
    hash_block_tokens: int = 32

    def __post_init__(self) -> None:
        number, rate, width = self.num_requests, self.rate, self.hash_block_tokens
        require(number is None or number >= 1, f"num_requests is {number}; it must be at least 1", "num_requests")
        require(rate is None or 1e-6 <= rate <= 1e6, f"rate is {rate}; it must be in [1e-6, 1e6]", "rate")
        require(1 <= width <= 2**16, f"hash_block_tokens is {width}; it must be in [1, 65536]", "hash_block_tokens")
        if self.trace is not None:
            for name in ("arrivals", "lengths", "prefix", "sessions", "classes"):
                default = () if name == "classes" else type(getattr(self, name))()
                message = f"{name} has no effect with a trace; leave it out (lengths.pairs draws lengths from a trace)"
                require(getattr(self, name) == default, message, name)
            both = rate is not None and self.trace.scale != 1.0
            require(not both, f"rate is {rate} and trace.scale {self.trace.scale}; give one of them", "rate")
        elif self.arrivals.kind == "closed":
            require(rate is None, f"rate is {rate}; a closed loop has none (concurrency sets the pace)", "rate")
