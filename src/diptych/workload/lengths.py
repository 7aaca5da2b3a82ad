"""How long prompts and answers are.

Owns the length distributions. What is drawn is a whole number of tokens, at least 1.
"""

from collections.abc import Callable
from functools import cache

from diptych.workload.columns import read_column
from diptych.workload.description import LengthConfig, LengthsConfig
from diptych.workload.distributions import Stream, exp, log
from diptych.workload.traces import load_pairs

Sampler = Callable[[], int]
PairSampler = Callable[[], tuple[int, int]]  # (prompt tokens, output tokens)
UNLIMITED = 2**40


class LengthTables:
    """The numbers that configurations name, read once, so that a workload can be iterated again and again. Both
    functions raise ConfigError naming file, line and value."""

    def __init__(self) -> None:
        self.column = cache(read_column)
        self.pairs = cache(load_pairs)


def pair_sampler(config: LengthsConfig, tables: LengthTables, stream: Stream) -> PairSampler:
    """Draws (prompt tokens, output tokens)."""
    if config.pairs:
        prompts, outputs = tables.pairs(config.pairs)
        uniform, count = stream.uniform, len(prompts)

        def together() -> tuple[int, int]:
            row = int(uniform() * count)
            return prompts[row], outputs[row]

        return together
    prompt = length_sampler(config.prompt, tables, stream)
    output = length_sampler(config.output, tables, stream)
    return lambda: (prompt(), output())


def length_sampler(config: LengthConfig, tables: LengthTables, stream: Stream) -> Sampler:
    """Draws one length."""
    low, high = config.min, config.max or UNLIMITED
    uniform = stream.uniform
    match config.kind:
        case "uniform":
            return lambda: low + int(uniform() * (high - low + 1))
        case "empirical":
            found = config.values or tables.column(config.path, config.column)
            values = [min(max(value, low), high) for value in found]
            count = len(values)
            return lambda: values[int(uniform() * count)]
        case "bimodal":
            short = _lognormal(config, stream)
            tail = config.long
            long = _lognormal(LengthConfig(mean=tail.mean, sigma=tail.sigma, min=low, max=config.max), stream)
            share = tail.share
            return lambda: long() if uniform() < share else short()
        case "lognormal":
            return _lognormal(config, stream)
        case _:
            fixed = min(max(round(config.mean), low), high)
            return lambda: fixed


def _lognormal(config: LengthConfig, stream: Stream) -> Sampler:
    """The mean of a lognormal is exp(mu + sigma**2 / 2), its median exp(mu)."""
    low, high, sigma, normal = config.min, config.max or UNLIMITED, config.sigma, stream.normal
    mu = log(config.mean) - sigma * sigma / 2 if config.median is None else log(config.median)
    if sigma == 0.0:
        fixed = min(max(round(config.mean if config.median is None else config.median), low), high)
        return lambda: fixed

    def draw() -> int:
        tokens = int(exp(mu + sigma * normal()) + 0.5)
        return low if tokens < low else high if tokens > high else tokens

    return draw
