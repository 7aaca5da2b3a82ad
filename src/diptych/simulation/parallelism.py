"""How the devices of one worker share a model.

A worker has ``tensor * data`` devices in each of its ``pipeline`` stages. Tensor parallelism cuts every matrix. Data
parallelism of the attention (``data`` > 1) gives each group of ``tensor`` devices its own sequences, while the experts
of a mixture are shared by all groups. Expert parallelism places whole experts: ``expert`` groups of devices have other
experts each, and inside a group the matrices of an expert are cut.
"""

from dataclasses import dataclass

from diptych.control.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """tensor, pipeline, data: at least 1. expert: divides tensor * data; 1: every expert is cut over all of them."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "data"):
            if getattr(self, name) < 1:
                param = f"{name}_parallel"
                raise ConfigError(f"{param} is {getattr(self, name)}; it must be at least 1", param=param)
        if self.stage_devices % self.expert:
            raise ConfigError(
                f"expert_parallel is {self.expert}; it must divide the {self.stage_devices} devices of a stage "
                f"(tensor_parallel {self.tensor} x data_parallel {self.data})",
                param="expert_parallel",
            )

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.tensor * self.data

    @property
    def devices(self) -> int:
        """Devices of one worker."""
        return self.stage_devices * self.pipeline

    @property
    def is_tensor_only(self) -> bool:
        """Whether the devices only cut matrices, as most measurements were taken."""
        return self.devices == self.tensor and self.expert == 1

    def __str__(self) -> str:
        """The degrees in words, such as tp8 or tp4-pp2; what is 1 is left out, but the first."""
        rest = (("pp", self.pipeline), ("ep", self.expert), ("dp", self.data))
        return "-".join([f"tp{self.tensor}", *(f"{name}{size}" for name, size in rest if size > 1)])


ONE_DEVICE = Parallelism()
