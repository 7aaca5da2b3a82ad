"""The seam between a worker and the compute units that it runs on, which may change while it serves."""

from typing import Protocol

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError


class ComputeDevice(Protocol):
    """A processor (threads.ThreadPool) or a GPU (multiprocessors.Multiprocessors). ``resize`` is called between two
    steps, on the thread that computes them."""

    @property
    def share(self) -> ComputeShare:
        """What steps are computed on."""
        ...

    @property
    def num_units(self) -> int:
        """How many units these are; the time of a step is expected to be in inverse proportion."""
        ...

    def resize(self, share: ComputeShare) -> None:
        """Compute on this share from the next step on. Raises ConfigError when that cannot be, and changes nothing
        then."""
        ...


class UndividedDevice:
    """A ComputeDevice of which every worker uses all."""

    share = ComputeShare()
    num_units = 1

    def resize(self, share: ComputeShare) -> None:
        raise ConfigError(f"share is {share}; this worker's device cannot be divided", param="share")
