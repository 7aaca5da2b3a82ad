"""The seam for a new model family: one file with its config and its forward, and one line in MODELS.

The family is StarCoder2, which no DecoderConfig describes: its norms subtract the mean and have a bias, its MLP has no
gate, and every linear layer has a bias.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from diptych.control.errors import UnsupportedModelError
from diptych.control.request import SamplingParams
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.layer_loader import LayerLoader
from diptych.runtime.local_engine import engine_config
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.model_config import (
    AttentionConfig,
    LayerAttention,
    ModelConfig,
    RopeConfig,
    read_common,
    read_heads,
    read_rope,
)
from diptych.runtime.models.registry import MODELS, read_model_config
from tests.runtime import checkpoints
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import chunks_of, generate, greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import BFLOAT16, EVERY, FLOAT32

# ---------------------------------------------------------------- the family: what would be models/starcoder2.py


@dataclass(frozen=True, slots=True)
class Starcoder2Config(ModelConfig):
    """has_bias: of every linear layer."""

    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    has_bias: bool


class Starcoder2Norm:
    """A norm of what differs from the mean."""

    def __init__(self, load: LayerLoader, name: str, config: Starcoder2Config) -> None:
        self._weight = load.tensor(f"{name}.weight", config.hidden_size)
        self._bias = load.tensor(f"{name}.bias", config.hidden_size)
        self._eps = config.norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)


class Starcoder2Layer:
    """The parts of one layer."""

    def __init__(self, config: Starcoder2Config, load: LayerLoader, index: int) -> None:
        heads, hidden, bias = config.attention, config.hidden_size, config.has_bias
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        self.attention_norm = Starcoder2Norm(load, f"{layer}.input_layernorm", config)
        self.qkv = load.qkv(attention, hidden, heads, bias=bias)
        self.rope = load.rope(config.rope)
        self.attention = load.attention(heads.layers[index])
        self.o_proj = load.linear(f"{attention}.o_proj", heads.query_width, hidden, bias=bias)
        self.mlp_norm = Starcoder2Norm(load, f"{layer}.post_attention_layernorm", config)
        self.up = load.linear(f"{mlp}.c_fc", hidden, config.intermediate_size, bias=bias)
        self.down = load.linear(f"{mlp}.c_proj", config.intermediate_size, hidden, bias=bias)


class Starcoder2:
    """A LanguageModel."""

    fits_cuda_graphs = True

    def __init__(self, config: Starcoder2Config, load: LayerLoader) -> None:
        self.config = config
        self.embed_tokens = load.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [Starcoder2Layer(config, load, index) for index in range(config.num_layers)]
        self.norm = Starcoder2Norm(load, "model.norm", config)
        self.lm_head = load.lm_head(self.embed_tokens, is_tied=True)

    @classmethod
    def read_config(cls, fields: ConfigFields) -> Starcoder2Config:
        fields.require("hidden_act", "gelu_pytorch_tanh")
        heads, window = read_heads(fields), fields.integer("sliding_window")
        layers = (LayerAttention(heads[-1] ** -0.5, window),) * fields.integer("num_hidden_layers")
        return Starcoder2Config(
            **read_common(fields),
            attention=AttentionConfig(*heads, layers),
            intermediate_size=fields.integer("intermediate_size"),
            norm_eps=fields.number("norm_epsilon", 1e-5),
            rope=read_rope(fields),
            has_bias=fields.flag("use_bias", True),
        )

    def forward(self, step: ForwardPass) -> torch.Tensor:
        x = self.embed_tokens(step.batch.token_ids)
        for index, layer in enumerate(self.layers):
            cache = step.begin_layer(index)
            q = layer.rope(layer.qkv(layer.attention_norm(x)), cache, step)
            attended, x = step.rows_to_keep(index, layer.attention(q, cache, step), x)
            x = x + layer.o_proj(attended)
            inner = torch.nn.functional.gelu(layer.up(layer.mlp_norm(x)), approximate="tanh")
            x = x + layer.down(inner)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


# ---------------------------------------------------------------- its tests

FAMILY = "starcoder2"
CHANGES = {"sliding_window": 40, "tie_word_embeddings": True}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """The line in the registry, and the checkpoint that transformers makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "Starcoder2ForCausalLM", Starcoder2)
        patch.setitem(checkpoints.FAMILIES, FAMILY, ("Starcoder2", CHANGES))
        yield


@pytest.mark.parametrize("instruction_set", FLOAT32)
def test_logits_are_those_of_transformers_whole_and_in_chunks(instruction_set: str) -> None:
    prompt = prompt_of(150)
    expected = reference(FAMILY).logits(prompt).log_softmax(-1)
    for chunk in (150, 37):
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        _, results = generate(runner(FAMILY, instruction_set), prompt, chunks_of(150, chunk), scored)
        entries = [entry for result in results for _, more in result.payload.prompt_logprobs.values() for entry in more]
        ours = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(ours, expected[torch.arange(149), torch.tensor(prompt[1:])], rtol=0, atol=1e-3)


@pytest.mark.parametrize("instruction_set", FLOAT32)
def test_greedy_tokens_of_a_batch_in_mixed_phases_are_those_of_transformers(instruction_set: str) -> None:
    shared = runner(FAMILY, instruction_set)
    engine = GatheringEngine(shared, engine_config(shared))
    prompts = {f"r{index}": prompt_of(3 + 40 * index, seed=index) for index in range(6)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(30))
        engine.step()
    for request_id, generation in engine.run().items():
        reference(FAMILY).check_greedy(prompts[request_id], generation.token_ids)


@pytest.mark.parametrize("instruction_set", BFLOAT16)
def test_bfloat16_is_within_its_rounding_of_fp32(instruction_set: str) -> None:
    prompt = prompt_of(100)
    exact = reference(FAMILY, "bfloat16").logits(prompt)[-1].log_softmax(-1)
    _, results = generate(runner(FAMILY, instruction_set, "bfloat16"), prompt, [100], greedy(1, logprobs=20))
    entry = results[0].payload.logprobs[0]
    for token, logprob in entry.top:
        assert logprob == pytest.approx(float(exact[token]), abs=0.25)


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_it_computes_with_native_parts_where_there_are(dtype: str, instruction_set: str) -> None:
    shared = runner(FAMILY, instruction_set, dtype)
    assert (shared.attention.name == "native-cpu") == (instruction_set != TORCH)
    assert type(shared.model.lm_head).__name__.startswith("Native") == (instruction_set != TORCH)


def test_every_layer_is_announced_before_it_is_computed() -> None:
    shared, seen = runner(FAMILY), []
    shared.on_layer = seen.append
    try:
        generate(shared, prompt_of(20), [20], greedy(1))
    finally:
        shared.on_layer = None
    assert seen == [0, 1, 2]


def test_its_config_is_read_and_refused_by_the_family() -> None:
    directory = reference(FAMILY).directory
    config = read_model_config(directory)
    assert [layer.window for layer in config.attention.layers] == [40, 40, 40]
    assert read_kv_geometry(directory, "auto", 16).head_dim == 16
    fields = ConfigFields.of_file(directory / "config.json")
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'relu'; supported: gelu_pytorch_tanh"):
        Starcoder2.read_config(ConfigFields(fields.path, {**fields.values, "hidden_act": "relu"}))
