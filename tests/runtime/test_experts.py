"""Routed experts: who computes a row and with which weight, with the same bits in any batch, from any kind of file."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.layers.parts import GatedMlp, MixtureOfExperts
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.models.experts import ClampedSwish, ExpertRouting, ExpertsConfig
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.native_experts import NativeExperts
from diptych.runtime.ops.ops import Ops
from diptych.runtime.ops.torch_experts import TorchExperts
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.quantized_weight import QuantizedSource, quantize
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from diptych.runtime.weights.weight_format import WeightFormat
from diptych.runtime.weights.weight_memory import PrivateMemory
from tests import gguf_files
from tests.runtime.checkpoints import MIXTURES, make_model, prompt_of, reference, runner
from tests.runtime.driving import generate, greedy
from tests.runtime.kernel_sets import EVERY, NATIVE, every_pair

ROUTINGS = {
    "softmax": ExpertRouting(12, 4),
    "softmax-normalized": ExpertRouting(12, 4, is_normalized=True, scale=2.5),
    "softmax-of-top": ExpertRouting(12, 3, "softmax_of_top"),
    "sigmoid": ExpertRouting(12, 4, "sigmoid", is_normalized=True, scale=1.8),
    "sigmoid-raw": ExpertRouting(12, 1, "sigmoid"),
    "sparsemixer": ExpertRouting(12, 2, "sparsemixer", jitter=0.1),
    "all": ExpertRouting(5, 5, is_normalized=True),
}
HIDDEN, INNER = 64, 96


def logits_of(routing: ExpertRouting, rows: int = 200) -> torch.Tensor:
    """Random ones."""
    return torch.randn(rows, routing.num_experts, generator=torch.Generator().manual_seed(3))


def expected_weights(logits: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    """The weight of each expert for each row in float64, 0 where it is not chosen: [rows, num_experts]."""
    wide = logits.double()
    scores = {"softmax": wide.softmax(-1), "softmax_of_top": wide, "sigmoid": wide.sigmoid()}[routing.scoring]
    best, chosen = scores.topk(routing.top_k)
    if routing.scoring == "softmax_of_top":
        best = best.softmax(-1)
    if routing.is_normalized:
        best = best / best.sum(-1, keepdim=True)
    return torch.zeros_like(wide).scatter(-1, chosen, best * routing.scale)


# ---------------------------------------------------------------- the choice


@pytest.fixture(params=EVERY, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The operations of each instruction set."""
    dtype, instruction_set = request.param
    return make_ops(getattr(torch, dtype), instruction_set)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "sparsemixer"])
def test_experts_and_weights_are_those_of_the_formula(ops: Ops, name: str) -> None:
    routing = ROUTINGS[name]
    logits = logits_of(routing)
    chosen, weights = ops.route(logits, routing)
    assert chosen.shape == weights.shape == (200, routing.top_k) and weights.dtype is torch.float32
    assert bool((chosen.diff(dim=-1) > 0).all())  # ascending, each once
    found = torch.zeros(logits.shape, dtype=torch.float64).scatter(-1, chosen, weights.double())
    torch.testing.assert_close(found, expected_weights(logits, routing), rtol=1e-5, atol=1e-7)


def test_sparsemixer_is_that_of_transformers(ops: Ops) -> None:
    for jitter in (0.01, 0.1, 0.5):
        routing = replace(ROUTINGS["sparsemixer"], jitter=jitter)
        logits = logits_of(routing)
        theirs, experts = sparsemixer(logits, jitter_eps=jitter, training=False, top_k=2)
        chosen, weights = ops.route(logits, routing)
        order = experts.argsort(-1)
        assert torch.equal(chosen, experts.gather(-1, order))
        torch.testing.assert_close(weights, theirs.gather(-1, order))


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_equal_experts_the_first_are_taken(ops: Ops, name: str) -> None:
    routing = ROUTINGS[name]
    first = torch.arange(routing.top_k).expand(3, -1)
    assert torch.equal(ops.route(torch.full((3, routing.num_experts), 0.5), routing)[0], first)
    some = torch.full((2, routing.num_experts), -1.0)
    some[:, -1] = 1.0  # the best; all others are equal
    expected = [*range(routing.top_k - 1), routing.num_experts - 1]
    assert ops.route(some, routing)[0].tolist() == [expected, expected]


def test_a_correction_chooses_and_does_not_weigh(ops: Ops) -> None:
    routing = ROUTINGS["sigmoid-raw"]
    logits = logits_of(routing)
    correction = torch.zeros(routing.num_experts)
    correction[7] = 10.0
    chosen, weights = ops.route(logits, routing, correction)
    assert bool((chosen == 7).all())
    torch.testing.assert_close(weights, logits[:, 7:8].sigmoid())


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_for_a_row_is_bitwise_the_same_in_any_batch(ops: Ops, name: str) -> None:
    routing = ROUTINGS[name]
    logits, order = logits_of(routing), torch.randperm(200)
    chosen, weights = ops.route(logits, routing)
    for part in (slice(0, 1), slice(7, 8), slice(0, 17), slice(100, 200), order):
        again = ops.route(logits[part], routing)
        assert torch.equal(again[0], chosen[part]) and torch.equal(again[1], weights[part])


# ---------------------------------------------------------------- the sum


def make_experts(ops: Ops, dtype: torch.dtype, kind: str, count: int) -> tuple[list[GatedMlp], list[Any]]:
    """Packed experts, and the (gate_up, down) that each of them stands for."""
    packed, weights = [], []
    for _ in range(count):
        pair = [(torch.randn(2 * INNER, HIDDEN) * 0.2).to(dtype), (torch.randn(HIDDEN, INNER) * 0.2).to(dtype)]
        if kind == "floating":
            packed.append(GatedMlp(ops.pack_gate_up(pair[0].clone(), None), ops.pack_linear(pair[1].clone(), None)))
        else:
            number = WeightFormat(8 if kind == "int8" else 4, 32)
            made = [quantize(weight, number) for weight in pair]
            sources = [QuantizedSource(number, *one.values.shape, lambda one=one: one) for one in made]
            gate_up = ops.pack_quantized_gate_up(sources[0], None, dtype)
            packed.append(GatedMlp(gate_up, ops.pack_quantized(sources[1], None, dtype)))
            pair = [one.dequantize() for one in made]
        weights.append(pair)
    return packed, weights


def sum_of(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Sequence[Callable[..., Any]]) -> Any:
    """Each row's experts in ascending order, in the dtype of what they give."""
    total = torch.zeros_like(experts[0](x))
    for index, expert in enumerate(experts):
        factor = (weights * (chosen == index)).sum(-1, keepdim=True).to(total.dtype)
        total += factor * expert(x)
    return total


def exact(pair: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One expert in float64."""
    gate, up = (x.double() @ pair[0].double().t()).chunk(2, -1)
    return (F.silu(gate) * up) @ pair[1].double().t()


@pytest.mark.parametrize(("kind", "dtype", "instruction_set"), every_pair(["floating", "int8", "int4"], NATIVE))
def test_a_row_of_experts_is_their_weighted_sum_and_bitwise_the_same_in_any_batch(
    kind: str, dtype: str, instruction_set: str
) -> None:
    computed = getattr(torch, dtype)
    ops, routing = make_ops(computed, instruction_set), ExpertRouting(20, 3, is_normalized=True)
    experts, pairs = make_experts(ops, computed, kind, routing.num_experts)
    joined = ops.join_experts(experts)
    x, logits = torch.randn(450, HIDDEN).to(computed), logits_of(routing, 450)
    logits[:, 2] += 4.0  # one expert of nearly all rows
    chosen, weights = ops.route(logits, routing)
    whole = joined(x, chosen, weights)
    wanted = sum_of(x, chosen, weights, [partial(exact, pair) for pair in pairs])
    lost = (whole.double() - wanted).norm() / wanted.norm()
    assert isinstance(joined, NativeExperts) and torch.equal(whole, TorchExperts(experts)(x, chosen, weights))
    assert lost < (1e-5 if (kind, dtype) == ("floating", "float32") else 0.03)
    in_order = sum_of(x, chosen, weights, [lambda rows, one=one: one(rows).float() for one in experts])
    assert torch.equal(whole, in_order.to(computed))
    for part in (slice(0, 1), slice(9, 10), slice(3, 20), slice(50, 450), torch.randperm(450)):
        rows = x[part].contiguous()
        assert torch.equal(joined(rows, chosen[part], weights[part]), whole[part])
    turned = joined(x, chosen.flip(1), weights.flip(1))  # in whatever order a router names them
    assert torch.equal(turned, whole)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(joined(x, chosen, weights), whole)
    finally:
        torch.set_num_threads(before)
    assert joined(x[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


def test_a_shared_expert_is_added_with_its_gate_or_without() -> None:
    ops, routing = TorchOps(), ExpertRouting(4, 2)
    experts, pairs = make_experts(ops, torch.float32, "floating", 5)
    router, gate = torch.randn(4, HIDDEN), torch.randn(1, HIDDEN)
    bias = torch.randn(4)
    x = torch.randn(40, HIDDEN)
    mixture = MixtureOfExperts(ops, routing, ops.pack_linear(router, bias), ops.join_experts(experts[:4]))
    logits = F.linear(x, router, bias)
    routed = sum_of(x, *ops.route(logits, routing), [partial(exact, pair) for pair in pairs[:4]])
    torch.testing.assert_close(mixture(x).double(), routed, rtol=1e-4, atol=1e-4)
    shared = exact(pairs[4], x)
    both = replace(mixture, shared=experts[4])
    torch.testing.assert_close(both(x).double(), routed + shared, rtol=1e-4, atol=1e-4)
    gated = replace(both, shared_gate=ops.pack_linear(gate, None))
    expected = routed + shared * (x.double() @ gate.double().t()).sigmoid()
    torch.testing.assert_close(gated(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
@pytest.mark.parametrize("inner", [INNER, 40])  # which fills no panel
def test_experts_with_biases_and_a_clamped_activation(dtype: str, instruction_set: str, inner: int) -> None:
    computed, (limit, alpha) = getattr(torch, dtype), (1.5, 1.702)
    ops, routing = make_ops(computed, instruction_set), ExpertRouting(3, 2, "softmax_of_top")
    made, wanted = [], []
    for _ in range(3):
        up, down = (torch.randn(2 * inner, HIDDEN) * 0.3).to(computed), torch.randn(HIDDEN, inner).to(computed)
        biases = torch.randn(2 * inner).to(computed), torch.randn(HIDDEN).to(computed)
        gate_up = ops.pack_gate_up(up.clone(), biases[0], activation=ClampedSwish(limit, alpha))
        made.append(GatedMlp(gate_up, ops.pack_linear(down.clone(), biases[1])))

        def expert(x: torch.Tensor, up: Any = up, down: Any = down, biases: Any = biases) -> torch.Tensor:
            gate, value = F.linear(x.double(), up.double(), biases[0].double()).chunk(2, -1)
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
            inner = (value + 1) * gate * (alpha * gate).sigmoid()
            return F.linear(inner, down.double(), biases[1].double())

        wanted.append(expert)
    x = torch.randn(30, HIDDEN).to(computed)
    chosen, weights = ops.route(logits_of(routing, 30), routing)
    joined = ops.join_experts(made)
    found, exact_sum = joined(x, chosen, weights), sum_of(x, chosen, weights, wanted)
    assert (found.double() - exact_sum).norm() < (1e-5 if dtype == "float32" else 0.02) * exact_sum.norm()
    if isinstance(joined, NativeExperts):
        assert torch.equal(found, TorchExperts(made)(x, chosen, weights))
        for part in (slice(0, 1), slice(4, 13)):
            assert torch.equal(joined(x[part].contiguous(), chosen[part], weights[part]), found[part])


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_a_router_in_fp32_gives_a_row_the_same_bits_in_any_batch(dtype: str, instruction_set: str) -> None:
    computed = getattr(torch, dtype)
    weight, bias = torch.randn(20, HIDDEN), torch.randn(20)
    router = make_ops(computed, instruction_set).pack_router(weight.clone(), bias)
    x = torch.randn(50, HIDDEN).to(computed)
    logits = router(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, F.linear(x.float(), weight, bias), rtol=1e-5, atol=1e-5)
    for part in (slice(0, 1), slice(3, 20), slice(20, 50)):
        assert torch.equal(router(x[part].contiguous()), logits[part])


# ---------------------------------------------------------------- checkpoints


def experts_of(path: Path) -> ExpertsConfig:
    """The experts that a checkpoint has."""
    config = read_model_config(path)
    assert isinstance(config, DecoderConfig) and config.experts is not None
    return config.experts


def load(path: Path, **changes: Any) -> Any:
    """A small runner."""
    return load_runner(RunnerConfig(path, num_blocks=16, **changes))


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_one_tensor_are_those_of_many(family: str, tmp_path: Path) -> None:
    prompt, expected = prompt_of(60), generate(runner(family), prompt_of(60), [60], greedy(12))[0]
    model = make_model(*MIXTURES[family])
    model.load_state_dict(reference(family).model.state_dict())
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert generate(load(tmp_path), prompt, [60], greedy(12))[0] == expected


@pytest.mark.parametrize("quantize_to", ["int8", "int4"])
def test_experts_are_quantised_one_by_one_and_the_router_is_not(quantize_to: str) -> None:
    shared = runner("qwen3-moe", dtype="bfloat16", quantize=quantize_to)
    mixture = shared.model.layers.layers[0].mlp
    assert isinstance(mixture, MixtureOfExperts) and mixture.routing.num_experts == 8
    assert isinstance(shared.model.layers.layers[1].mlp, GatedMlp)
    assert not shared.model.fits_cuda_graphs and shared.model.layers.native_step is not None
    assert len(generate(shared, prompt_of(40), [40], greedy(5))[0]) == 5


def changed(tmp_path: Path, family: str, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    """The checkpoint of a family with other tensors, or another config."""
    directory = tmp_path / "model"
    tmp_path.mkdir(parents=True, exist_ok=True)
    shutil.copytree(reference(family).directory, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


SCALE_BLOCK = (24, 40)


def to_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values in FP8, the scale of each block, what they stand for) of one matrix or of several."""
    rows, columns = tensor.shape[-2:]
    counts = -(-rows // SCALE_BLOCK[0]), -(-columns // SCALE_BLOCK[1])
    scale = torch.rand(*tensor.shape[:-2], *counts, generator=torch.Generator().manual_seed(1)) * 0.05 + 0.001
    wide = scale.repeat_interleave(SCALE_BLOCK[0], -2).repeat_interleave(SCALE_BLOCK[1], -1)[..., :rows, :columns]
    values = (tensor / wide).to(torch.float8_e4m3fn)
    return values, scale, values.float() * wide


def experts_in_fp8(tensors: dict[str, torch.Tensor], *, is_together: bool, is_exact: bool) -> None:
    """Put experts into FP8, a tensor for each or one for all of a layer. is_exact: into what these stand for."""
    names = [name for name in tensors if ".experts." in name]
    found = {name: tensors.pop(name) for name in names}
    if is_together:
        for layer in {name.partition(".experts.")[0] for name in names}:
            count = sum(name.startswith(f"{layer}.experts.") for name in names) // 3
            gate, up, down = (
                torch.stack([found.pop(f"{layer}.experts.{e}.{part}_proj.weight") for e in range(count)])
                for part in ("gate", "up", "down")
            )
            found |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    for name, tensor in found.items():
        values, scale, exact = to_fp8(tensor.float())
        if is_exact:
            tensors[name] = exact
        else:
            tensors |= {
                name: values,
                f"{name}_scale_inv": scale,
                f"{name}_activation_scale".replace("weight_", ""): torch.ones(1),
            }


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("quantize_to", ["none", "int8"])
def test_experts_in_fp8_are_those_in_floating_point(is_together: bool, quantize_to: str, tmp_path: Path) -> None:
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": list(SCALE_BLOCK)}
    prompt, found, sizes = prompt_of(40), [], []
    for is_exact in (True, False):
        change = partial(experts_in_fp8, is_together=is_together, is_exact=is_exact)
        config = {} if is_exact else {"quantization_config": said}
        path = changed(tmp_path / str(is_exact), "qwen3-moe", change, **config)
        shared = load(path, dtype="float32", quantize=quantize_to)
        found.append(generate(shared, prompt, [40], greedy(6, logprobs=3)))
        sizes.append(loaded_weight_bytes(path, "float32", quantize_to))
    assert found[0][0] == found[1][0] and sizes[0] == sizes[1]
    tops = [[step.payload.logprobs[0].top for step in results] for _, results in found]
    assert tops[0] == tops[1]


def test_a_scale_of_experts_that_has_another_shape_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        experts_in_fp8(tensors, is_together=True, is_exact=False)
        tensors["model.layers.2.mlp.experts.down_proj_scale_inv"] = torch.ones(8, 7)

    said = {"quant_method": "fp8", "weight_block_size": list(SCALE_BLOCK), "activation_scheme": "dynamic"}
    with pytest.raises(
        ConfigError, match=r"down_proj_scale_inv is F32 \[8, 7\]; for a weight \[8, 64, 64\] it must be"
    ):
        load(changed(tmp_path, "qwen3-moe", change, quantization_config=said))


EXPERTS = "model.layers.2.mlp.experts"
WRONG: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (
        "qwen3-moe",
        lambda t: t.pop(f"{EXPERTS}.5.up_proj.weight"),
        r"tensor model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight is missing",
    ),
    "first missing": (
        "qwen3-moe",
        lambda t: t.pop(f"{EXPERTS}.0.down_proj.weight"),
        r"tensor model\.layers\.2\.mlp\.experts\.0\.down_proj\.weight is missing",
    ),
    "router missing": (
        "mixtral",
        lambda t: t.pop("model.layers.1.block_sparse_moe.gate.weight"),
        r"tensor model\.layers\.1\..*gate\.weight is missing",
    ),
    "other shape": (
        "qwen3-moe",
        lambda t: t.update({f"{EXPERTS}.7.down_proj.weight": torch.zeros(64, 48)}),
        r"experts\.7\.down_proj\.weight has shape \[64, 48\]; .* asks for \[64, 64\], by num_\w*experts \(8\), "
        r"moe_intermediate_size \(64\) and hidden_size \(64\)",
    ),
    "too many": (
        "mixtral",
        lambda t: t.update({"model.layers.0.block_sparse_moe.experts.4.w2.weight": torch.zeros(64, 112)}),
        r"experts\.4\.w2\.weight is of an expert beyond the last one; num_local_experts is 4",
    ),
    "other count": (
        "granite-moe",
        lambda t: t.update({"model.layers.2.block_sparse_moe.input_linear.weight": torch.zeros(6, 128, 64)}),
        r"input_linear\.weight has shape \[6, 128, 64\]; .* \[5, 128, 64\], by num_local_experts \(5\)",
    ),
    "flat": (
        "granite-moe",
        lambda t: t.update({"model.layers.0.block_sparse_moe.output_linear.weight": torch.zeros(64, 64)}),
        r"output_linear\.weight has shape \[64, 64\]; .* \[5, 64, 64\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_experts_that_disagree_are_refused_before_memory_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, change, message = WRONG[name]
    taken: list[object] = []
    monkeypatch.setattr(PrivateMemory, "new", lambda *arguments: taken.append(arguments))
    with pytest.raises(ConfigError, match=message):
        load(changed(tmp_path, family, change))
    assert not taken


def test_a_tensor_that_is_no_expert_is_left_over(tmp_path: Path) -> None:
    more = {f"{EXPERTS}.0.bias_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(ConfigError, match=r"experts\.0\.bias_proj\.weight is not part of this architecture"):
        load(changed(tmp_path, "qwen3-moe", lambda t: t.update(more)))


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; supported: at most 8, the value of num_"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; supported: a whole number of at least 1"),
        ("mixtral", {"num_experts": 3}, "num_local_experts is 4; supported: 3, as num_experts says"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, r"mlp_only_layers is \['1'\]; supported: a list of the numbers"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; supported: a whole number"),
        ("qwen3-moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; supported: true or false"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported: softmax"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported: null"),
        ("granite-moe", {"n_shared_experts": 1}, "n_shared_experts is 1; supported: "),
    ],
)
def test_what_is_not_computed_is_refused_by_field(
    family: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(changed(tmp_path, family, lambda _: None, **config))


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [..., columns] as (blocks, scales) of MXFP4, and what these stand for."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6.0).log2().ceil().clamp(min=-20)
    scaled = groups / exponents.exp2()
    places = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    codes = (places + 8 * (scaled < 0)).to(torch.uint8)
    exact = (values[places] * scaled.sign() * exponents.exp2()).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + 127).to(torch.uint8), exact


def in_mxfp4(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None) -> tuple[Path, Path]:
    """gpt-oss with experts in MXFP4, and the checkpoint that they stand for."""
    exact_tensors: dict[str, torch.Tensor] = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales, exact = mxfp4(tensors.pop(name).transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact_tensors[name] = exact.transpose(1, 2)
        change(tensors)

    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    packed = changed(tmp_path / "packed", "gpt-oss", pack, **config)
    return packed, changed(tmp_path / "exact", "gpt-oss", lambda tensors: tensors.update(exact_tensors))


def test_experts_in_mxfp4_are_what_their_blocks_stand_for(tmp_path: Path) -> None:
    packed, exact = in_mxfp4(tmp_path)
    prompt = prompt_of(60)
    in_torch = [generate(load(path, instruction_set="torch"), prompt, [60], greedy(12))[0] for path in (packed, exact)]
    assert in_torch[0] == in_torch[1]  # which multiplies with the exact weights
    shared = load(packed)
    assert "int8 in groups of 32" in shared.loaded.weights
    assert len(generate(shared, prompt, [60], greedy(12))[0]) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), r"experts\.down_proj_scales is missing"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.zeros(6, 64, 3, dtype=torch.uint8)}),
            r"down_proj_scales is U8 \[6, 64, 3\]; .* must be U8 \[6, 64, 2\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj_blocks": torch.zeros(6, 128, 2, 8, dtype=torch.uint8)}),
            r"gate_up_proj_blocks is U8 \[6, 128, 2, 8\]; it must be U8 \[experts, rows, groups, 16\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.full((6, 64, 2), 150, dtype=torch.uint8)}),
            r"down_proj_scales holds 150; supported: at most 143",
        ),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), r"experts\.down_proj_bias is missing"),
        (lambda t: t.pop("model.layers.2.mlp.router.bias"), r"mlp\.router\.bias is missing"),
        (lambda t: t.pop("model.layers.1.self_attn.sinks"), r"self_attn\.sinks is missing"),
    ],
)
def test_what_is_wrong_with_experts_in_mxfp4_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load(in_mxfp4(tmp_path, change)[0])


def test_layers_for_drafts_are_not_loaded(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {
            name.replace("layers.2.", "layers.3."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.2." in name
        }
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)

    prompt, expected = prompt_of(30), generate(runner("glm4-moe"), prompt_of(30), [30], greedy(8))[0]
    path = changed(tmp_path, "glm4-moe", add, num_nextn_predict_layers=1)
    assert generate(load(path), prompt, [30], greedy(8))[0] == expected
    with pytest.raises(ConfigError, match=r"model\.layers\.3\..* not part of this architecture"):
        load(changed(tmp_path / "without", "glm4-moe", add, num_nextn_predict_layers=0, num_mtp_layers=0))


def test_weights_are_normalised_where_the_file_says_it(tmp_path: Path) -> None:
    plain = experts_of(changed(tmp_path, "qwen3-moe", lambda _: None, norm_topk_prob=None))
    assert not plain.routing.is_normalized
    assert experts_of(reference("qwen3-moe").directory).routing.is_normalized


# ---------------------------------------------------------------- GGUF


def write_model(path: Path, family: str, **changes: Any) -> Path:
    """The checkpoint of a family. Layers without experts have no entry of their own in the format, so all have them."""
    return gguf_files.write_model(path, reference(family).directory, **changes)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "granite-moe", "glm4-moe"])
def test_a_gguf_file_answers_as_its_checkpoint(family: str, tmp_path: Path) -> None:
    prompt, path = prompt_of(40), write_model(tmp_path / "m.gguf", family)
    assert experts_of(path) == experts_of(reference(family).directory)
    tokens, _ = generate(load(path), prompt, [40], greedy(20))
    reference(family).check_greedy(prompt, tokens)


def test_quantised_experts_of_a_gguf_file_are_read_one_by_one(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    floating = generate(load(write_model(tmp_path / "a.gguf", "olmoe")), prompt, [40], greedy(1, logprobs=5))
    path = write_model(tmp_path / "b.gguf", "olmoe", kind=Kind.Q8_0)
    shared = load(path, dtype="float32")
    [mlp] = {type(layer.mlp) for layer in shared.model.layers.layers}
    assert mlp is MixtureOfExperts
    found = generate(shared, prompt, [40], greedy(1, logprobs=5))
    best = [dict(results[0].payload.logprobs[0].top) for _, results in (floating, found)]
    common = best[0].keys() & best[1].keys()
    assert common and all(abs(best[0][token] - best[1][token]) < 0.5 for token in common)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q4_0])
def test_quantised_experts_may_lie_in_several_files(kind: Kind, tmp_path: Path) -> None:
    prompt, directory = prompt_of(30), reference("olmoe").directory
    parts = gguf_files.split_model(tmp_path, directory, kind=kind)
    assert len(parts) == 3
    whole = write_model(tmp_path / "m.gguf", "olmoe", kind=kind)
    shared = load(parts[0], dtype="float32")
    assert isinstance(shared.model.layers.layers[0].mlp, MixtureOfExperts)
    assert (
        generate(shared, prompt, [30], greedy(6))[0]
        == generate(load(whole, dtype="float32"), prompt, [30], greedy(6))[0]
    )


def test_gates_and_ups_may_lie_in_one_tensor_of_a_gguf_file(tmp_path: Path) -> None:
    directory, prompt = reference("olmoe").directory, prompt_of(30)
    tensors: dict[str, Any] = dict(gguf_files.model_tensors(directory))
    for layer in range(3):
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight")[0] for part in ("gate", "up"))
        both = torch.cat([torch.from_numpy(gate), torch.from_numpy(up)], dim=1)
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = both.numpy()
    path = gguf_files.write_gguf(tmp_path / "m.gguf", gguf_files.model_metadata(directory), tensors)
    tokens, _ = generate(load(path), prompt, [30], greedy(12))
    reference("olmoe").check_greedy(prompt, tokens)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmoe", {"olmoe.expert_gating_func": 2}, r"olmoe\.expert_gating_func is 2; supported: 1: softmax"),
        ("olmoe", {"olmoe.expert_used_count": 13}, r"olmoe\.expert_used_count is 13; supported: at most 12, the value"),
        ("olmoe", {"olmoe.expert_used_count": None}, r"olmoe\.expert_used_count is None; supported: a whole number"),
        ("olmoe", {"olmoe.expert_count": 0}, r"olmoe\.expert_count is 0; supported: a whole number"),
        ("olmoe", {"olmoe.expert_feed_forward_length": 32}, r"length is 32; supported: feed_forward_length \(64\)"),
        ("olmoe", {"olmoe.expert_weights_scale": 2.5}, r"expert_weights_scale is 2.5; supported: 0.0 or 1.0"),
        ("mixtral", {"llama.expert_weights_norm": False}, r"expert_weights_norm is False; supported: true"),
        ("mixtral", {"llama.expert_shared_count": 1}, r"expert_shared_count is 1; supported: no such key"),
    ],
)
def test_what_a_gguf_file_of_experts_asks_for_beyond_that_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(write_model(tmp_path / "m.gguf", family, **changes))


def test_experts_of_a_gguf_file_whose_shapes_disagree_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "olmoe", **{"olmoe.expert_count": 11, "olmoe.expert_used_count": 5})
    with pytest.raises(
        ConfigError, match=r"has shape \[12, .*; the config asks for \[11, .*olmoe\.expert_count \(11\)"
    ):
        load(path)


@pytest.mark.parametrize(
    ("family", "fixed"), [("phimoe", {"router_jitter_noise": 0.01}), ("gpt-oss", {"swiglu_limit": 7.0})]
)
def test_what_a_gguf_file_does_not_say_is_that_of_the_published_models(
    family: str, fixed: dict[str, float], tmp_path: Path
) -> None:
    directory, prompt = changed(tmp_path, family, lambda _: None, **fixed), prompt_of(60)
    path = gguf_files.write_model(tmp_path / "m.gguf", directory)
    found, expected = (generate(load(one), prompt, [60], greedy(20))[0] for one in (path, directory))
    assert found == expected


def test_layers_for_drafts_of_a_gguf_file_are_not_loaded(tmp_path: Path) -> None:
    directory, prompt = reference("glm4-moe").directory, prompt_of(30)
    tensors: dict[str, Any] = dict(gguf_files.model_tensors(directory))
    tensors |= {name.replace("blk.2.", "blk.3."): one for name, one in tensors.items() if name.startswith("blk.2.")}
    tensors["blk.3.nextn.eh_proj.weight"] = torch.zeros(64, 128).numpy()
    metadata = gguf_files.model_metadata(directory) | {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = gguf_files.write_gguf(tmp_path / "m.gguf", metadata, tensors)
    tokens, _ = generate(load(path), prompt, [30], greedy(12))
    reference("glm4-moe").check_greedy(prompt, tokens)
    metadata["glm4moe.nextn_predict_layers"] = 4
    with pytest.raises(UnsupportedModelError, match=r"nextn_predict_layers is 4; supported: below block_count \(4\)"):
        read_model_config(gguf_files.write_gguf(tmp_path / "n.gguf", metadata, tensors))
