"""Tables of rotary embeddings: one cosine and one sine per position and frequency."""

import math

import torch

from diptych.runtime.models.model_config import RopeConfig


class RotaryTables:
    """The tables of one model, made once each. num_positions: the longest context that it is asked for."""

    def __init__(self, head_dim: int, num_positions: int, device: torch.device) -> None:
        self._head_dim = head_dim
        self._num_positions = num_positions
        self._device = device
        self._tables: dict[RopeConfig, torch.Tensor] = {}

    def table(self, rope: RopeConfig) -> torch.Tensor:
        """The table that ``cos_sin_table`` makes for these settings, made once."""
        if rope not in self._tables:
            self._tables[rope] = cos_sin_table(rope, self._head_dim, self._num_positions, self._device)
        return self._tables[rope]


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, head_dim] fp32: head_dim/2 cosines, then head_dim/2 sines (Su et al. 2021, "half" pairing)."""
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * scale).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] fp32 angle per position, factor on cosines and sines)."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "factors":
        return base / torch.tensor(rope.factors), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, with a linear blend in between.

    The blend variable is how many times a wave fits into the original context.
    """
    turns = rope.original_max_positions / (2 * math.pi / base)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow dimensions, keep fast ones, a ramp between the two."""

    def dimension_with(turns: float) -> float:
        """The (fractional) dimension pair that turns this often within the original context."""
        length = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return base / rope.factor * interpolate + base * (1 - interpolate)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature, applied to both q and k through the table: 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
