"""The devices' part of a step as the roofline prices it, and the host's part as an engine adds it."""

from functools import lru_cache

from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import FRACTION_BITS, DecodeLine
from diptych.simulation.costs.interpolation import Curve
from diptych.simulation.costs.roofline import RooflineCost

NS_PER_US = 1000.0
CACHE_LIMIT = 65_536


class EngineCost:
    """CostModel: ``device``, priced without a host, plus ``host_us`` microseconds by the sequences of a step."""

    def __init__(self, device: RooflineCost, host_us: Curve, engine: str) -> None:
        self.name = f"{device.name}+{engine}"
        self.device = device
        self.assumptions = device.assumptions
        self.host_us = host_us
        self._later = lru_cache(CACHE_LIMIT)(self._make_later)

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        return self._later(self.device.decode_line(num_seqs, context), num_seqs)

    def step_ns(self, output: SchedulerOutput) -> int:
        num_seqs = output.features.decode_seqs + len(output.prefills)
        return self.device.step_ns(output) + self._host_ns(num_seqs)

    def _host_ns(self, num_seqs: int) -> int:
        return round(NS_PER_US * self.host_us(num_seqs))

    def _make_later(self, line: DecodeLine, num_seqs: int) -> DecodeLine:
        added = self._host_ns(num_seqs) << FRACTION_BITS
        return DecodeLine(line.intercept + added, line.slope, line.until_context)
