"""Short convolutions: what they compute, in any cut of the rows and on every instruction set, and how the cache holds
their inputs."""

from pathlib import Path

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.kv_cache.layer_groups import deal
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.lfm2 import Lfm2
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.ops import Ops
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from tests.runtime.checkpoints import reference
from tests.runtime.kernel_sets import EVERY

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
SHAPES = [(3, 64, True), (2, 40, False), (5, 1536, True), (1, 16, False), (16, 33, True)]  # taps, width, with a bias


def parts_of(rows: int, taps: int, width: int, has_bias: bool, dtype: torch.dtype) -> Parts:
    """(b, c and x of each row, weight, bias)."""
    generator = torch.Generator().manual_seed(taps)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return values(rows, 3 * width), values(taps, width), values(width) if has_bias else None


def run(ops: Ops, parts: Parts, cuts: list[int]) -> torch.Tensor:
    """The convolution of one sequence, computed in chunks that end at ``cuts``."""
    projected, weight, bias = parts
    count, width = weight.shape[0] - 1, weight.shape[1]
    seen, results, start = projected.new_zeros((count, width)), [], 0
    for end in cuts:
        rows, bounds = projected[start:end].contiguous(), torch.tensor([0, end - start], dtype=torch.int32)
        out, inputs = ops.short_convolution(rows, weight, bias, seen[None], bounds), rows[:, :width] * rows[:, -width:]
        seen = torch.cat((seen, inputs))[len(seen) + len(inputs) - count :]
        results.append(out)
        start = end
    return torch.cat(results)


@pytest.mark.parametrize(("taps", "width", "has_bias"), SHAPES)
@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_every_set_computes_it_and_no_cut_changes_a_bit(
    dtype: str, instruction_set: str, taps: int, width: int, has_bias: bool
) -> None:
    kind = getattr(torch, dtype)
    ops, parts = make_ops(kind, instruction_set), parts_of(90, taps, width, has_bias, kind)
    whole = run(ops, parts, [90])
    b, c, x = parts[0].chunk(3, dim=-1)
    inputs = torch.cat((x.new_zeros((taps - 1, width)), b * x)).double()
    total = torch.stack([inputs[tap : tap + 90] * parts[1][tap].double() for tap in range(taps)]).sum(0)
    total = total if parts[2] is None else total + parts[2].double()
    expected = total.to(kind) * c
    torch.testing.assert_close(whole, expected, rtol=2e-5 if kind is torch.float32 else 2e-2, atol=2e-5)
    for cuts in (list(range(1, 91)), [1, 2, 4, 37, 90], [taps, 80, 90]):
        assert torch.equal(run(ops, parts, cuts), whole)


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_sequences_side_by_side_give_what_each_gives_alone(dtype: str, instruction_set: str) -> None:
    kind, lengths = getattr(torch, dtype), [1, 40, 1, 2, 7]
    ops, (projected, weight, bias) = make_ops(kind, instruction_set), parts_of(51, 4, 48, True, kind)
    before = parts_of(15, 4, 48, False, kind)[0][:, :48].reshape(5, 3, 48)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    together = ops.short_convolution(projected, weight, bias, before, bounds)
    for index, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        rows, own = projected[start:end].contiguous(), torch.tensor([0, end - start], dtype=torch.int32)
        alone = ops.short_convolution(rows, weight, bias, before[index : index + 1], own)
        assert torch.equal(together[start:end], alone)


def lfm2(**changes: object) -> ConfigFields:
    """A config.json as of the model with 1.2B weights."""
    values = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "block_ff_dim": 12_288,
        **changes,
    }
    return ConfigFields(Path("config.json"), values)


def test_inputs_of_a_layer_lie_in_as_many_layers_of_the_cache_as_they_fill() -> None:
    config = Lfm2.read_config(lfm2())
    assert config.num_layers == 16 and len(config.attention.layers) == 6 + 2 * 10
    assert config.caches[:4] == (range(2), range(2, 4), range(4, 5), range(5, 7))
    assert config.intermediate_size == 8192
    dealt = deal(config.attention.layers, 32, 128_000)
    assert [group.window_tokens for group in dealt.groups] == [0, 3, 3, 3, 3] and dealt.num_places == 6
    held = [group.num_pages(16_384, 16_384) for group in dealt.groups]
    assert held == [512, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_L_cache": 17}, "conv_L_cache is 17; supported: at most 16"),
        ({"full_attn_idxs": [16]}, "full_attn_idxs"),
        ({"full_attn_idxs": 3}, "full_attn_idxs"),
        ({"layer_types": ["conv"] * 15}, "layer_types"),
        ({"layer_types": ["mamba"] * 16}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Lfm2.read_config(lfm2(**changes))


def test_a_width_is_what_it_says_where_nothing_is_to_be_adjusted() -> None:
    assert Lfm2.read_config(lfm2(block_auto_adjust_ff_dim=False)).intermediate_size == 12_288
    assert Lfm2.read_config(lfm2(block_ffn_dim_multiplier=None)).intermediate_size == 8192
    assert Lfm2.read_config(lfm2(block_ffn_dim_multiplier=1.01)).intermediate_size == 8448


def test_a_cache_of_whole_numbers_is_refused_before_anything_is_read() -> None:
    directory = reference("lfm2").directory
    with pytest.raises(ConfigError, match="kv_dtype is int8; layers of this model keep inputs of convolutions"):
        read_kv_geometry(directory, "auto", 32, kv_dtype="int8")
    with pytest.raises(ConfigError, match="kv_dtype is int8"):
        load_runner(RunnerConfig(directory, num_blocks=16, instruction_set=TORCH, kv_dtype="int8"))
