"""Models of real shapes whose random weights are made on the device: nothing is read, and nothing travels."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from diptych.runtime.attention import make_attention
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.kernels.instruction_set import choose
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.layers.layer_loader import LayerLoader
from diptych.runtime.layers.rope import RotaryTables
from diptych.runtime.models.registry import MODELS, read_model_config
from diptych.runtime.ops import make_ops
from diptych.runtime.step.model_runner import LoadedModel, ModelRunner, sampler_of
from diptych.runtime.weights.loader import Weights
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from diptych.runtime.weights.weight_memory import PrivateMemory

# DIPTYCH_GPU_DEVICE=cpu tries the programs of this folder where there is no GPU, on the smallest shape.
DEVICE = torch.device(os.environ.get("DIPTYCH_GPU_DEVICE", "cuda"))
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BLOCK_SIZE = 32
VOCABULARY = 128256
SHAPES: dict[str, dict[str, int | float | bool]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": VOCABULARY, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": False},
}  # fmt: skip
MAX_MODEL_LEN = 16384


class RandomWeights:
    """Stands for Weights: every tensor that is asked for is there, drawn on the device."""

    def __init__(self) -> None:
        self.dtype, self.memory = DTYPE, PrivateMemory(DEVICE)
        self.num_bytes = 0

    def tensor(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        """A vector of a norm is ones; all others are small."""
        self.num_bytes += DTYPE.itemsize * torch.Size(shape).numel()
        if len(shape) == 1:
            return torch.ones(*shape, dtype=dtype or DTYPE, device=DEVICE)
        return torch.empty(*shape, dtype=DTYPE, device=DEVICE).normal_(std=0.02)

    def fused(self, names: Sequence[str], rows: Sequence[int], *shape: int) -> torch.Tensor:
        """Tensors stacked along the first dimension."""
        return self.tensor(names[0], (sum(rows), *shape))

    def quantized(self, names: Sequence[str], rows: Sequence[int], columns: int) -> None:
        """None is stored in whole numbers."""

    def has(self, name: str) -> bool:
        """An lm_head only where the shape says so."""
        return False

    def ignore(self, name: str) -> None:
        """Nothing is left over."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner over random weights. kernels: those that compute."""

    runner: ModelRunner
    kernels: str
    weight_bytes: int
    layer_parameters: int
    kv_bytes_per_token: int


def load(shape: str, kernels: str = "auto", *, num_tokens: int, max_num_seqs: int = 256) -> Loaded:
    """A model of SHAPES with room for ``num_tokens`` tokens in its KV cache."""
    torch.manual_seed(0)
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": str(DTYPE).removeprefix("torch."),
        "eos_token_id": 0, **SHAPES[shape],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        config = read_model_config(Path(folder))
    chosen = choose(DTYPE, kernels, DEVICE.type)
    attention = make_attention(config.attention, BLOCK_SIZE, DTYPE, DEVICE, chosen)
    weights = RandomWeights()
    rotary = RotaryTables(config.attention.head_dim, MAX_MODEL_LEN, DEVICE)
    ops = make_ops(DTYPE, chosen)
    loader = LayerLoader(cast(Weights, weights), ops, attention, rotary, QUANTIZATIONS["none"])
    model = MODELS[config.architecture](config, loader)
    kv = KVTensors(attention, -(-num_tokens // BLOCK_SIZE) + max_num_seqs, 0, None, None)
    loaded, sampler = LoadedModel(model, "bf16", "bfloat16", chosen), sampler_of(DEVICE, chosen)
    runner = ModelRunner(loaded, attention, kv, max_num_seqs, MAX_MODEL_LEN, sampler=sampler)
    vocabulary = int(values["vocab_size"]) * int(values["hidden_size"])
    tables = vocabulary if values["tie_word_embeddings"] else 2 * vocabulary
    layers = weights.num_bytes // DTYPE.itemsize - tables
    return Loaded(
        runner, chosen, (layers + vocabulary) * DTYPE.itemsize, layers, attention.geometry.block_bytes // BLOCK_SIZE
    )


def batch_of(lengths: Sequence[tuple[int, int]], vocabulary: int) -> InputBatch:
    """Sequences of (tokens before, new tokens), decodes first, with random tokens, in blocks that nobody shares."""
    counts = [-(-(before + new) // BLOCK_SIZE) for before, new in lengths]
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    positions = torch.cat([torch.arange(before, before + new) for before, new in lengths])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([new for _, new in lengths]))
    slots = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    ends = torch.tensor([new for _, new in lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (len(positions),), generator=generator)
    tensors = {
        "token_ids": tokens, "positions": positions,
        "query_start": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        "context_lens": torch.tensor([before + new for before, new in lengths], dtype=torch.int32),
        "sample_rows": ends - 1,
    }  # fmt: skip
    return InputBatch(
        **{name: tensor.to(DEVICE) for name, tensor in tensors.items()},
        slot_mappings=(slots.to(DEVICE),),
        block_tables=(table.to(DEVICE),),
        num_decodes=sum(new == 1 for _, new in lengths),
        max_query_len=max(new for _, new in lengths),
        max_context_len=max(before + new for before, new in lengths),
    )


def synchronize() -> None:
    """Wait until the device has done all that it was asked for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], repetitions: int, warm_up: int = 3) -> list[float]:
    """How long a call takes each time, until the device has done it."""
    for _ in range(warm_up):
        call()
    synchronize()
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - began)
    return found


def row(**values: Any) -> None:
    """Print one."""
    print(json.dumps(values), flush=True)


def ceilings() -> dict[str, float]:
    """Bytes per second of a copy (read and written counted each), and multiplications and additions per second of a
    large product, measured now: what a GPU gives changes with its clock."""
    size = 1 << (31 if DEVICE.type == "cuda" else 24)
    copy_s = _copy_s(size)
    side = 8192 if DEVICE.type == "cuda" else 256
    left, right = (torch.empty(side, side, dtype=DTYPE, device=DEVICE).normal_() for _ in range(2))
    product_s = median(seconds_of(lambda: left @ right, 10))
    return {"copy_bytes_s": 2 * size / copy_s, "product_flop_s": 2 * side**3 / product_s}


def _copy_s(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).zero_()
    target = torch.empty_like(source)
    return median(seconds_of(lambda: target.copy_(source), 10))
