"""How many experts of a layer the tokens of a step visit together: what the step-time model, the simulator and the
roofline say of mixtures of experts alike."""

from dataclasses import dataclass

from diptych.control.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertLaw:
    """The experts of each layer that is a mixture, and how many of them a token visits."""

    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; 1 to num_experts ({self.num_experts})", param="top_k")

    def touched(self, num_tokens: int) -> float:
        """Expected number of experts that at least one of ``num_tokens`` tokens visits."""
        return self.num_experts * touched_share(self.num_experts, self.top_k, num_tokens)


def touched_share(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Expected share of the experts that at least one of ``num_tokens`` tokens visits, each choosing at random: 1 - (1
    - k/E)^n."""
    return 1.0 - _power(1.0 - top_k / num_experts, num_tokens)


def _power(base: float, exponent: int) -> float:
    """base ** exponent by squaring: the same bits on every platform, unlike the mathematical library."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
