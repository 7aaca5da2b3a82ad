"""Tables of rotary embeddings: one cosine and one sine per position and frequency."""

import math
from dataclasses import dataclass

import torch

from diptych.runtime.models.model_config import RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """What positions do to queries and keys. query_scale: [num_positions] fp32, what rotated queries are multiplied
    with (None: nothing)."""

    cos_sin: torch.Tensor  # see cos_sin_table; of no columns where nothing is rotated
    query_scale: torch.Tensor | None = None


class RotaryTables:
    """The tables of one model, made once each. num_positions: the longest context that it is asked for."""

    def __init__(self, head_dim: int, num_positions: int, device: torch.device) -> None:
        self._head_dim = head_dim
        self._num_positions = num_positions
        self._device = device
        self._tables: dict[RopeConfig | None, RotaryTable] = {}

    def table(self, rope: RopeConfig | None) -> RotaryTable:
        """The table of a layer. None: one without rotation."""
        if rope not in self._tables:
            self._tables[rope] = self._make(rope)
        return self._tables[rope]

    def _make(self, rope: RopeConfig | None) -> RotaryTable:
        if rope is None:
            return RotaryTable(torch.empty(self._num_positions, 0, device=self._device))
        scale = query_scale(rope, self._num_positions)
        return RotaryTable(
            cos_sin_table(rope, self._head_dim, self._num_positions, self._device),
            None if scale is None else scale.to(self._device),
        )


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, rotary] fp32: rotary/2 cosines, then rotary/2 sines (Su et al. 2021, "half" pairing), where
    rotary is how many values of a head are rotated."""
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * scale).to(device)


def query_scale(rope: RopeConfig, num_positions: int) -> torch.Tensor | None:
    """[num_positions] fp32 of Llama 4's temperature, which grows with each further original context: 1 + beta ln(1 +
    floor(position / original)). None: nothing is scaled."""
    if not rope.llama_4_scaling_beta:
        return None
    positions = torch.arange(num_positions, dtype=torch.float32)
    return 1 + rope.llama_4_scaling_beta * (1 + (positions / rope.original_max_positions).floor()).log()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """([rotary / 2] fp32 angle per position, factor on cosines and sines)."""
    rotary = rope.rotary_of(head_dim)
    base = 1.0 / (rope.theta ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    if rope.kind == "longrope":
        assert rope.factors, "for_context chooses them"
        return base / torch.tensor(rope.factors), _longrope_attention_factor(rope)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "factors":
        return base / torch.tensor(rope.factors), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, rotary), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, with a linear blend in between.

    The blend variable is how many times a wave fits into the original context.
    """
    turns = rope.original_max_positions / (2 * math.pi / base)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * base / rope.factor + keep * base


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE's temperature (Ding et al. 2024): sqrt(1 + ln(factor) / ln(original context))."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _yarn(rope: RopeConfig, base: torch.Tensor, rotary: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow dimensions, keep fast ones, a ramp between the two."""

    def dimension_with(turns: float) -> float:
        """The (fractional) dimension pair that turns this often within the original context."""
        length = rope.original_max_positions / (turns * 2 * math.pi)
        return rotary * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    width = high - low or 0.001
    interpolate = ((torch.arange(rotary // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
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
