"""Random checkpoints of every family, made by Hugging Face transformers, which is also the reference for results.

Initial weights are wide (std 0.12 and more), so that the best logit leads by far more than rounding can move it, and
norms and biases are not left at 1 and 0.
"""

import atexit
import shutil
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers

from diptych.runtime.kernels.instruction_set import AUTO
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner

VOCAB_SIZE = 384
MAX_POSITIONS = 4096
MOST_RUNNERS = 24  # each has tens of megabytes of KV cache, and a file of tests has its own families and kernels
ROUNDING = 2e-4  # of fp32 logits that lie between -100 and 100, after three layers

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}
MINISTRAL_ROPE = {
    **YARN_ROPE,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.3,
}
OLMO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": YARN_ROPE,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE, "num_key_value_heads": 4}),
    "mistral-window": ("Mistral", {"sliding_window": 77, "head_dim": 32}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3-biased": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "sliding_window": 40, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            },
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL_ROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 45}),
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 4096, "sliding_window": 60},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_multiplier": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": OLMO_ROPES,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_hidden_layers": 4,
            "block_multiple_of": 16,
            "norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "lfm2-biased": (
        "Lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 5,
            "conv_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "muse-glimmer": (
        "MuseGlimmer",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [10_000.0, 0, 10_000.0],
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.7,
            "post_norm_eps": 1e-8,
        },
    ),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {  # families with experts
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 50,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 60}),
    "olmoe": ("Olmoe", {"num_experts": 12, "num_experts_per_tok": 5, "intermediate_size": 64}),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 5,
            "intermediate_size": 64,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 70,
            "router_jitter_noise": 0.1,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 9.0, 9.5],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": MAX_POSITIONS,
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "sliding_window": 40,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.75,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_multiplier": 0.3,
            "tie_word_embeddings": True,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
        },
    ),
}
FAMILIES.update(MIXTURES)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLES: dict[str, dict[str, Any]] = {  # of architectures that hold a text model beside others: what the others are
    "MuseGlimmer": {
        "vision_config": {**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
    },
    "Mistral3": {"vision_config": {"model_type": "pixtral", **VISION}},
    "Gemma3": {"vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 28, "patch_size": 14}},
}


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model in fp32 and the directory that holds its weights in ``dtype``."""

    model: Any
    directory: Path
    accepted: set[tuple[int, ...]] = field(default_factory=set, compare=False)  # by check_greedy: not computed again

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab] fp32."""
        return self.model(torch.tensor([token_ids])).logits[0].float()

    def check_greedy(self, prompt: list[int], outputs: list[int]) -> None:
        """Assert that each output is the most likely token after what precedes it, or that the reference itself
        cannot tell it from that: its logit is within ROUNDING of the best."""
        assert outputs, "no token was generated"
        whole = (len(prompt), *prompt, *outputs)
        if whole in self.accepted:
            return
        logits = self.logits(prompt + outputs[:-1])[len(prompt) - 1 :]
        chosen = logits[torch.arange(len(outputs)), torch.tensor(outputs)]
        lost = logits.max(dim=-1).values - chosen
        index = int(lost.argmax())
        assert float(lost[index]) <= ROUNDING, (
            f"token {index} of {len(outputs)} is {outputs[index]}, not {int(logits[index].argmax())}: "
            f"its logit is {float(lost[index]):.4f} lower; the best are {logits[index].topk(3).values.tolist()}"
        )
        self.accepted.add(whole)


def make_model(name: str, changes: dict[str, Any], whole: str | None = None) -> Any:
    """A model of transformers with its initial weights. whole: the architecture that holds it beside other models, by
    its name; else that of text alone, where there is one."""
    values = BASE | changes
    if whole is None and hasattr(transformers, f"{name}ForCausalLM"):
        config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
        return getattr(transformers, f"{name}ForCausalLM")(config_class(**values)).eval()
    whole = whole or name
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = getattr(transformers, f"{whole}Config")(
        text_config={"model_type": kind.model_type, **values}, **WHOLES[whole], attn_implementation="eager"
    )
    return getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()


@cache
def reference(family: str, dtype: str = "float32") -> Reference:
    """The checkpoint of one entry of FAMILIES, written once per test session."""
    torch.manual_seed(0)
    model = make_model(*FAMILIES[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 1.0, generator=generator)
            if "norm" in key:
                is_centered = bool((parameter == 0.0).all())  # what is added to 1
                parameter.copy_((0.0 if is_centered else 1.0) + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.5 if "lm_head" in key or "embed" in key or "sinks" in key else 0.15))
            parameter.copy_(parameter.to(getattr(torch, dtype)))  # the reference computes with the stored values
        for key, buffer in model.named_buffers():
            if "correction" in key:
                buffer.copy_((0.2 * torch.randn(buffer.shape, generator=generator)).to(getattr(torch, dtype)))
    directory = Path(mkdtemp(prefix=f"diptych-{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return Reference(model.float(), directory)


@lru_cache(MOST_RUNNERS)
def runner(
    family: str,
    instruction_set: str = AUTO,
    dtype: str = "float32",
    num_blocks: int = 700,
    quantize: str = "none",
    kv_dtype: str = "auto",
) -> ModelRunner:
    """A runner of that checkpoint, shared by tests until MOST_RUNNERS others were asked for; tests leave it without
    requests."""
    config = RunnerConfig(
        model=reference(family, dtype).directory,
        instruction_set=instruction_set,
        num_blocks=num_blocks,
        num_host_blocks=64,
        max_num_seqs=64,
        block_size=32,
        quantize=quantize,
        kv_dtype=kv_dtype,
    )
    return load_runner(config)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
