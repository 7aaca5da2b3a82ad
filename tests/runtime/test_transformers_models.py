"""Models that transformers computes with our attention: the logits that its own attention gives, in any chunks and
beside any neighbours, and by name what keeps more than keys and values."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.control.request import SamplingParams
from diptych.runtime import required_packages
from diptych.runtime.layers.transformers_layers import INTERFACE, attend_paged
from diptych.runtime.local_engine import engine_config
from diptych.runtime.models import transformers_config
from diptych.runtime.models.registry import MODELS, read_model_config
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes, scratch_bytes
from diptych.serving.kv_memory import kv_geometry_of, longest_sequence_of
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.start_checks import check_start
from tests.runtime import checkpoints
from tests.runtime.checkpoints import prompt_of, reference
from tests.runtime.driving import chunks_of, generate, greedy
from tests.runtime.gathering_engine import GatheringEngine

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLASSES: dict[str, dict[str, Any]] = {  # names without ForCausalLM; what differs from checkpoints.BASE
    "Apertus": {},
    "Arcee": {},
    "BitNet": {},
    "Cohere": {},
    "Cohere2": {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "Dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "Exaone4": {"sliding_window": 40, "sliding_window_pattern": 3},
    "FlexOlmo": {"num_experts": 6, **EXPERTS},
    "GPTNeoX": {"rotary_pct": 0.25, "num_key_value_heads": None},
    "Gemma": {"head_dim": 32},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "Helium": {"head_dim": 16},
    "HunYuanDenseV1": {"head_dim": 16},
    "Jais2": {"head_dim": 16},
    "MiniMaxM2": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "OPT": {"word_embed_proj_dim": 64, "ffn_dim": 112, "num_key_value_heads": None},
    "Olmo": {},
    "Persimmon": {"num_key_value_heads": None},
    "Phi": {"partial_rotary_factor": 0.5},
    "Qwen2Moe": {"num_experts": 6, "shared_expert_intermediate_size": 32, **EXPERTS},
    "Starcoder2": {"sliding_window": 40},
}
QUICK = ["Cohere2", "OPT", "Qwen2Moe"]
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CLASSES]


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    """Makes their checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        for name, changes in CLASSES.items():
            patch.setitem(checkpoints.FAMILIES, f"other-{name}", (name, changes))
        yield


def load(directory: Path, **changes: Any) -> ModelRunner:
    return load_runner(RunnerConfig(directory, model_impl="transformers", num_blocks=64, **changes))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    family, prompt = f"other-{name}", prompt_of(100)
    expected = reference(family).logits(prompt).log_softmax(-1)
    shared = load(reference(family).directory)
    for chunk in (100, 37):
        scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        _, results = generate(shared, prompt, chunks_of(100, chunk), scored)
        entries = [entry for result in results for _, more in result.payload.prompt_logprobs.values() for entry in more]
        ours = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(ours, expected[torch.arange(99), torch.tensor(prompt[1:])], rtol=0, atol=1e-3)
    engine = GatheringEngine(shared, engine_config(shared))
    prompts = {f"r{index}": prompt_of(3 + 30 * index, seed=index) for index in range(4)}
    for request_id, some in prompts.items():
        engine.add(request_id, some, greedy(12))
        engine.step()
    for request_id, generation in engine.run().items():
        reference(family).check_greedy(prompts[request_id], generation.token_ids)


def test_a_family_of_our_own_may_be_computed_by_transformers_too() -> None:
    prompt, shared = prompt_of(60), load(reference("gemma3").directory)
    tokens, _ = generate(shared, prompt, [60], greedy(20))
    reference("gemma3").check_greedy(prompt, tokens)
    assert "computed by transformers' Gemma3ForCausalLM" in shared.loaded.note
    assert not shared._draft_tokens.drafts  # rows do not keep their bits


def test_bfloat16_and_a_prefix_that_is_found() -> None:
    shared = load(reference("other-Cohere2", "bfloat16").directory)
    engine, prompt = GatheringEngine(shared, engine_config(shared)), prompt_of(100)
    for request_id in ("computed", "found"):
        engine.add(request_id, prompt, greedy(5))
        assert len(engine.run()[request_id].token_ids) == 5
    assert engine.core.stats().prefix_hit_tokens == 96


def test_what_it_takes_is_known_before_it_is_loaded() -> None:
    found = reference("other-Cohere2")
    options = EngineOptions(model=str(found.directory), model_impl="transformers")
    num_bytes = sum(4 * parameter.numel() for parameter in found.model.parameters())
    assert loaded_weight_bytes(found.directory, "float32", "none", "transformers") == num_bytes
    assert scratch_bytes(found.directory, "float32", 100, "transformers") == 0
    assert longest_sequence_of(options) == checkpoints.MAX_POSITIONS
    assert kv_geometry_of(options).layers.is_dense  # also those with windows, which are known when they attend


# ---------------------------------------------------------------- refusals

TINY: dict[str, Any] = {**checkpoints.BASE, "head_dim": 16}


@dataclass(frozen=True)
class Refused:
    """A class, what differs from TINY, and what is said of it."""

    name: str
    changes: dict[str, Any]
    message: str


REFUSED = [
    Refused("DeepseekV3", {"n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": None}, "no latent attention"),
    Refused("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, r"layer_types is \['conv'.*full_attention"),
    Refused("Mamba", {}, r"layer_types is \['linear_attention'"),
    Refused("GptOss", {"num_local_experts": 4}, "s_aux"),
    Refused("Phi3", {"rope_parameters": checkpoints.LONG_ROPE}, "sequences of every length"),
]


def write(directory: Path, name: str, changes: dict[str, Any]) -> Path:
    config = getattr(transformers, f"{name}Config")(**TINY | changes)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_what_keeps_more_than_keys_and_values_is_refused_by_name(refused: Refused, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=refused.message):
        load(write(tmp_path, refused.name, refused.changes))


def test_what_the_trial_of_a_model_finds_is_refused() -> None:
    """A layer that mixes neighbouring tokens beside its attention."""
    llama = transformers.models.llama.modeling_llama.LlamaMLP
    forward = llama.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
        with pytest.raises(UnsupportedModelError, match=r"differ by .* of their length from those of its own"):
            load(reference("llama").directory)


def test_an_attention_that_asks_for_more_is_refused() -> None:
    module, parts = torch.nn.Identity(), [torch.zeros(1, 2, 3, 16)] * 3
    for more in ({"position_bias": torch.zeros(1)}, {"is_causal": False}, {"attention_mask": torch.zeros(1)}):
        mask = more.pop("attention_mask", None)
        with pytest.raises(UnsupportedModelError, match="Identity with model_impl transformers: its attention has arg"):
            attend_paged(module, *parts, mask, **more)
    assert INTERFACE in transformers.AttentionInterface()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_impl": "vllm"}, "model_impl is 'vllm'; one of auto, transformers"),
        (
            {"model_impl": "transformers", "quantize": "int8"},
            "quantize is int8 and model_impl is transformers; supported with it: none",
        ),
    ],
)
def test_options_that_it_has_not_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runner(replace(RunnerConfig(reference("llama").directory, num_blocks=8), **changes))


def test_a_gguf_file_and_a_class_that_is_unknown_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match="model_impl is transformers; it reads directories"):
        read_model_config(tmp_path / "m.gguf", "transformers")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], "model_type": "other"}))
    with pytest.raises(UnsupportedModelError, match=r"architectures is \['OtherF.*\(model_impl transformers\)"):
        read_model_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no config for it"):
        read_model_config(tmp_path, "transformers")


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "is_there", lambda name: False)
    assert required_packages.is_there("transformers")
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'diptych\[transformers\]'"):
        check_start(EngineOptions(model=str(reference("llama").directory), model_impl="transformers"))


def test_no_class_here_is_a_family_of_our_own() -> None:
    assert not {f"{name}ForCausalLM" for name in CLASSES} & MODELS.keys()
    assert len(CLASSES) >= 20
