"""When requests arrive: endless sequences of times for an open loop.

Owns the arrival processes. Must never know what arrives.
"""

from collections.abc import Iterator

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.workload.description import ArrivalConfig
from diptych.workload.distributions import Stream


def arrival_times(config: ArrivalConfig, rate: float, stream: Stream, *, thinning: float = 1.0) -> Iterator[int]:
    """Nanoseconds from the start, never falling, without end.

    rate: per second (while on, for on_off). thinning: divides all rates (turns per conversation).
    """
    rate /= thinning
    match config.kind:
        case "poisson":
            return _poisson(rate, stream)
        case "gamma":
            return _gamma(rate, config.cv, stream)
        case "constant":
            return _constant(rate)
        case "on_off":
            return _on_off(config, rate, config.off_rate / thinning, stream)
        case _:
            raise ConfigError(f"arrivals.kind is {config.kind}; an open loop has no such arrivals", param="kind")


def _poisson(rate: float, stream: Stream) -> Iterator[int]:
    now, mean_ns, exponential = 0, NS_PER_S / rate, stream.exponential
    while True:
        now += int(exponential() * mean_ns)
        yield now


def _gamma(rate: float, cv: float, stream: Stream) -> Iterator[int]:
    """Gaps of shape 1 / cv**2: their standard deviation is cv times their mean."""
    shape = 1.0 / (cv * cv)
    now, scale_ns = 0, NS_PER_S / rate / shape
    while True:
        now += int(stream.gamma(shape) * scale_ns)
        yield now


def _constant(rate: float) -> Iterator[int]:
    number = 0
    while True:
        yield int(number * NS_PER_S / rate)
        number += 1


def _on_off(config: ArrivalConfig, rate: float, off_rate: float, stream: Stream) -> Iterator[int]:
    """A Poisson process forgets: at the border of a phase it starts anew at the new rate."""
    now, is_on, phase_end = 0, False, 0
    while True:
        is_on = not is_on
        seconds = config.on_s if is_on else config.off_s
        phase_end += int((stream.exponential() if config.random_phases else 1.0) * seconds * NS_PER_S)
        current = rate if is_on else off_rate
        while current > 0:
            now += int(stream.exponential() * (NS_PER_S / current))
            if now >= phase_end:
                break
            yield now
        now = phase_end
