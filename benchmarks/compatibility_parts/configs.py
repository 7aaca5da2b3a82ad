"""Variants of config.json and of weights, in Diptych and in transformers: the same logits, or a refusal by name.

    python benchmarks/compatibility.py configs [--limit 20] [--json compatibility-configs.json]

A random checkpoint of each architecture is changed one field at a time, in older and newer spellings, and in
combinations. Both compute a prompt in float32: transformers at once and token by token with its cache. A variant is

    equal       the largest difference of logits is below TOLERANCE
    refused     Diptych raises an error with the name of a field or tensor that the variant changed
    not theirs  transformers raises an error, or gives other logits with its cache than without
    unnamed     Diptych refuses, but names nothing that was changed
    different   neither: the worst that can happen
"""

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from common import report
from safetensors.torch import load_file, save_file

from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import ConfigError
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import LocalEngine, engine_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner

TOLERANCE = 5e-4  # of logits that lie between -60 and 60
NUM_TOKENS, VOCAB_SIZE, NUM_LAYERS, MAX_POSITIONS = 56, 96, 3, 256
CLASSES = ("equal", "refused", "not theirs", "unnamed", "different")
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
REMOVED = object()  # a field that is not there
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, torch.Tensor]
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Variant:
    """changes: of config.json. weights: changes the tensors in place. names: what a refusal may name besides fields
    that were changed."""

    name: str
    changes: dict[str, Any]
    weights: Callable[[Tensors], None] | None = None
    names: tuple[str, ...] = ()


# ---------------------------------------------------------------- the variants


def variants() -> Iterator[Variant]:
    """All of them; each is tried with every family."""
    for name, values in SINGLE.items():
        for value in values:
            yield Variant(f"{name}={_words(value)}", {name: value})
    yield from _ropes()
    yield from _windows()
    yield from _heads()


SINGLE: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, None, True),
    "use_bidirectional_attention": (True, False),
    "is_encoder_decoder": (True,),
    "hidden_act": ("gelu", "gelu_pytorch_tanh", "relu", "swish", REMOVED),
    "rms_norm_eps": (1e-2, REMOVED),
    "attention_bias": (True, False, REMOVED),
    "mlp_bias": (True, False),
    "head_dim": (8, 32, None, REMOVED),
    "num_key_value_heads": (4, 1, None, REMOVED),
    "num_attention_heads": (8,),
    "num_hidden_layers": (2, 4),
    "intermediate_size": (64,),
    "vocab_size": (64, 128),
    "hidden_size": (32,),
    "model_type": ("gemma", "llama", "qwen2", REMOVED),
    "pretraining_tp": (2,),
    "attention_dropout": (0.5,),
    "initializer_range": (1.0,),
    "use_cache": (False,),
    "return_dict": (False,),
    "output_hidden_states": (True,),
    "output_attentions": (True,),
    "torch_dtype": ("float16",),
    "dtype": ("bfloat16", None),
    "pad_token_id": (3,),
    "eos_token_id": ([1, 2], None),
    "id2label": ({"0": "a", "1": "b", "2": "c"},),
    "chunk_size_feed_forward": (4,),
    "gradient_checkpointing": (True,),
    "tie_last_hidden_states": (False,),
    "auto_map": ({"AutoModelForCausalLM": "modeling_own.Own"},),
    "attn_implementation": ("eager",),
    "attention_chunk_size": (8,),
    "kv_sharing_modes": (["store", "reuse", "reuse"],),
    "attention_multiplier": (0.5,),
    "query_pre_attn_scalar": (64,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "logits_scaling": (4.0,),
    "logit_scale": (0.5,),
    "embedding_multiplier": (12.0,),
    "residual_multiplier": (0.2,),
    "scale_emb": (12,),
    "clip_qkv": (1.0,),
    "num_local_experts": (4,),
    "num_experts": (4,),
    "no_rope_layers": ([1, 0, 1],),
    "rope_interleave": (True,),
    "qk_norm": (True, False),
    "use_qk_norm": (True,),
    "per_layer_config": (
        {"1": {"intermediate_size": 64}},
        {"1": {"sliding_window": 4}},
        {"0": {"rms_norm_eps": 0.1}},
        {},
    ),
    "skip": (["mlp"],),
    "mlp_layer_types": (["dense"] * 3,),
    "attribute_map": ({"rms_norm_eps": "initializer_range"},),
    "text_config": ({"hidden_size": 32},),
    "transformers_weights": ("other.safetensors",),
    "quantization_config": ({"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
    "unknown_field": (5,),
}


def _ropes() -> Iterator[Variant]:
    """Rotary embeddings, as rope_parameters, as rope_scaling with rope_theta beside it, and as both."""
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "default with a factor": {"factor": 4.0},
        "linear": {"factor": 4.0},
        "llama3": LLAMA3,
        "llama3 without an original": {key: value for key, value in LLAMA3.items() if "original" not in key},
        "yarn": YARN,
        "yarn without an original": {"factor": 4.0},
        "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        "yarn with mscale of all alone": YARN | {"mscale_all_dim": 1.0},
        "yarn with betas": YARN | {"beta_fast": 8, "beta_slow": 2},
        "yarn with an attention factor": YARN | {"attention_factor": 1.7},
        "yarn not truncated": YARN | {"truncate": False},
        "yarn with truncate null": YARN | {"truncate": None},
        "yarn with partial rotation": YARN | {"partial_rotary_factor": 0.5},
        "yarn finetuned": YARN | {"finetuned": True},
        "dynamic": {"factor": 4.0},
        "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
        "proportional": {"partial_rotary_factor": 0.5},
        "mrope": {"mrope_section": [2, 3, 3]},
        "default with sections": {"mrope_section": [2, 3, 3]},
        "linear with beta": {"factor": 4.0, "llama_4_scaling_beta": 0.1},
    }
    for name, values in kinds.items():
        kind = name.split()[0]
        new = {"rope_type": kind, "rope_theta": 200.0, **values}
        yield Variant(f"rope_parameters: {name}", {"rope_parameters": new}, names=tuple(new))
        old = {"rope_parameters": REMOVED, "rope_theta": 200.0, "rope_scaling": {"type": kind, **values}}
        yield Variant(f"rope_scaling: {name}", old, names=("rope_type", "type", *values))
    linear, yarn = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", **YARN}
    yield Variant("rope_theta alone", {"rope_parameters": REMOVED, "rope_theta": 200.0})
    yield Variant("no rope at all", {"rope_parameters": REMOVED})
    yield Variant("rope_theta beside rope_parameters", {"rope_theta": 200.0})
    yield Variant("rope_scaling beside rope_parameters", {"rope_scaling": linear})
    both = {"rope_scaling": linear, "rope_parameters": yarn | {"rope_theta": 200.0}}
    yield Variant("rope_scaling beside other rope_parameters", both)
    yield Variant("the same with rope_theta", both | {"rope_theta": 50.0})
    yield Variant("an empty rope_scaling", {"rope_scaling": {}, "rope_parameters": yarn})
    yield Variant("rope_scaling null", {"rope_scaling": None, "rope_parameters": yarn})
    yield Variant("both spellings of the type", {"rope_parameters": linear | {"type": "yarn"}})
    top = {"original_max_position_embeddings": 32}
    for kind, values in (("yarn", YARN), ("llama3", LLAMA3), ("linear", {"factor": 2.0})):
        nested = {"rope_type": kind, "rope_theta": 200.0, **values}
        yield Variant(f"{kind}: an original beside the nested one", {"rope_parameters": nested, **top})
        yield Variant(f"{kind}: the same, older", {"rope_parameters": REMOVED, "rope_scaling": nested, **top})
    yield Variant("partial_rotary_factor beside default", {"partial_rotary_factor": 0.5})
    yield Variant("partial_rotary_factor beside linear", {"rope_parameters": linear, "partial_rotary_factor": 0.5})
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 100.0}}
    yield Variant(
        "rope_parameters by kind of layer", {"rope_parameters": by_kind, "layer_types": ["full_attention"] * 3}
    )


def _windows() -> Iterator[Variant]:
    """Sliding windows."""
    full, sliding = "full_attention", "sliding_attention"
    for window in (8, 100, 1000, None, 0):
        yield Variant(f"sliding_window={window}", {"sliding_window": window})
        for first in (0, 1, 3):
            changes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
            yield Variant(f"window of {window} from layer {first}", changes)
    yield Variant("a window that is off", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0})
    for kinds in ([full] * 3, [sliding] * 3, [full, sliding, full], [full] * 2, ["chunked_attention"] * 3):
        for window in (True, False):
            changes = {"layer_types": kinds, "use_sliding_window": window, "sliding_window": 8}
            yield Variant(f"layer_types {'/'.join(kinds)}, {'on' if window else 'off'}", changes)
        yield Variant(f"layer_types {'/'.join(kinds)} alone", {"layer_types": kinds, "sliding_window": REMOVED})


def _heads() -> Iterator[Variant]:
    """Tied and untied heads, with one of both tensors or both."""

    def head_alone(tensors: Tensors) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    def equal_head(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    def no_head(tensors: Tensors) -> None:
        tensors.pop(HEAD, None)

    def other_head(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()

    names = ("lm_head", "embed_tokens")
    for is_tied in (True, False, None, REMOVED):
        for change in (head_alone, equal_head, no_head, other_head):
            name = f"tie_word_embeddings={_words(is_tied)}, {change.__name__.replace('_', ' ')}"
            yield Variant(name, {"tie_word_embeddings": is_tied}, change, names)


def _words(value: Any) -> str:
    return "absent" if value is REMOVED else json.dumps(value)


# ---------------------------------------------------------------- both engines


def make_checkpoint(family: str, directory: Path) -> None:
    """A random checkpoint whose every part matters to its logits."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_vocabulary = "embed" in name or "lm_head" in name
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * (0.5 if is_vocabulary else 0.15))
    model.save_pretrained(directory)


def write(base: Path, variant: Variant, directory: Path) -> None:
    """The changed checkpoint."""
    config = json.loads((base / "config.json").read_text()) | variant.changes
    kept = {name: value for name, value in config.items() if value is not REMOVED}
    (directory / "config.json").write_text(json.dumps(kept))
    tensors = load_file(base / "model.safetensors")
    if variant.weights is not None:
        variant.weights(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def their_logits(directory: Path, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, vocab] at once, and token by token behind a first half."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if missing := [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]:
        raise ValueError(f"no values for {missing[0]}")
    given = torch.tensor([tokens])
    whole = model(given, return_dict=True).logits[0]
    half = len(tokens) // 2
    step = model(given[:, :half], use_cache=True, return_dict=True)
    rows = [step.logits[0]]
    for place in range(half, len(tokens)):
        step = model(
            given[:, place : place + 1], past_key_values=step.past_key_values, use_cache=True, return_dict=True
        )
        rows.append(step.logits[0])
    return whole, torch.cat(rows)


def our_logits(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab]: those that the log probabilities of a prompt and the first token are taken from."""
    runner = load_runner(RunnerConfig(directory, dtype="float32", num_blocks=16, block_size=16, max_num_seqs=2))
    seen: list[torch.Tensor] = []
    compute = runner.model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    runner.model.logits = logits  # type: ignore[method-assign]
    engine = LocalEngine(EngineCore(engine_config(runner)), runner)
    engine.add("all", list(tokens), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    while engine.step() is not None:
        pass
    return torch.cat([part.float() for part in seen])[: len(tokens)]


def compare(base: Path, variant: Variant, tokens: Sequence[int]) -> dict[str, Any]:
    """What became of one variant."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = Path(name)
        write(base, variant, directory)
        try:
            ours = our_logits(directory, tokens)
        except ConfigError as error:
            changed = {*variant.changes, *variant.names}
            is_named = any(field in str(error) for field in changed) or "tensor model." in str(error)
            return {"found": "refused" if is_named else "unnamed", "message": str(error).replace(name, "")}
        try:
            with redirect_stderr(StringIO()):
                whole, stepwise = their_logits(directory, tokens)
        except Exception as error:  # whatever it is: there is nothing to compare with
            return {
                "found": "not theirs",
                "message": f"{type(error).__name__}: {error}".replace(name, "the folder")[:160],
            }
    apart = float((whole - stepwise).abs().max())
    difference = float((ours - whole).abs().max())
    if apart > TOLERANCE:
        return {"found": "not theirs", "message": f"with its cache and without it differs by {apart:.3g}"}
    return {"found": "equal" if difference <= TOLERANCE else "different", "difference": difference}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare them all. Returns rows (a family each), the largest difference of equal ones, and what differs."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokens = torch.randint(0, 64, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    rows, bad, largest, unread = [], [], 0.0, []
    seen = Counter[str]()
    for family in FAMILIES:
        counts = Counter[str]()
        with tempfile.TemporaryDirectory() as name:
            make_checkpoint(family, Path(name))
            for variant in list(variants())[: arguments.limit]:
                result = compare(Path(name), variant, tokens)
                counts[result["found"]] += 1
                entry = {"family": family, "variant": variant.name, **result}
                if result["found"] == "equal":
                    largest = max(largest, result["difference"])
                elif result["found"] == "not theirs":
                    unread.append(entry)
                elif result["found"] != "refused":
                    bad.append(entry)
        seen += counts
        rows.append({"family": family, **{kind: counts[kind] for kind in CLASSES}})
    rows.append({"family": "all", **{kind: seen[kind] for kind in CLASSES}})
    for entry in bad[: arguments.show]:
        print(json.dumps(entry))
    print(
        f"{seen.total()} variants, {seen['different']} silently different; largest difference of equals {largest:.2g}"
    )
    return {
        "rows": rows,
        "variants": seen.total(),
        "tolerance": TOLERANCE,
        "largest_difference_of_equals": largest,
        "packages": [f"{package}=={metadata.version(package)}" for package in ("transformers", "torch")],
        "differences": bad,
        "not_theirs": unread,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--limit", type=int, help="cases of each source, for a quick look")
    parser.add_argument("--show", type=int, default=20, help="how many differences are printed")


def main(options: argparse.Namespace) -> None:
    """Print the table and what differs."""
    found = run(options)
    report("Compatibility: configs", found.pop("rows"), options.json, **found)
