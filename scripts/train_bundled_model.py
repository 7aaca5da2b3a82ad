"""Train the small model that ships inside the package, on the Python standard library's own source.

The phases run in this order, each as a subcommand, all sharing one working directory (``--work``)::

    python scripts/train_bundled_model.py corpus      # collect, deduplicate and split the .py files
    python scripts/train_bundled_model.py tokenizer   # byte-level BPE on the train split
    python scripts/train_bundled_model.py train --minutes 85
    python scripts/train_bundled_model.py export      # Hugging Face directory, bfloat16
    python scripts/train_bundled_model.py evaluate    # held-out bits per byte, baselines, model card

It needs torch, numpy, tokenizers and safetensors. The learning-rate schedule follows the wall clock, so
that a run always ends decayed at its deadline, however fast the machine is. ``train`` resumes from its
own checkpoint when there is one, and re-exports the weights every few minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "src" / "diptych" / "bundled" / "stdlib-python"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 8192
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{%- set text = message.content -%}"
    "{%- else -%}{%- set text = message.content | map(attribute='text') | join('\\n') -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}{{- text + '\\n\\n' -}}"
    "{%- else -%}{{- '# ' + text.strip() | replace('\\n', '\\n# ') + '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n' -}}{%- endif -%}"
)


# --------------------------------------------------------------------------------------------- corpus


def is_number_table(text: str) -> bool:
    """Tell generated tables (character maps and the like) from code: they are mostly digits and escapes."""
    return sum(text.count(c) for c in "0123456789\\") > 0.12 * len(text)


def collect_documents() -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) for every distinct UTF-8 .py file of the running Python's library."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if {"site-packages", "dist-packages", "__pycache__"} & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 64 or digest in seen or is_number_table(text):
            continue
        seen.add(digest)
        yield name.as_posix(), text


def build_corpus(work: Path) -> None:
    """Write train.jsonl and heldout.jsonl; a file's own hash says which of the two it belongs to."""
    work.mkdir(parents=True, exist_ok=True)
    counts = {"train": [0, 0], "heldout": [0, 0]}
    with open(work / "train.jsonl", "w") as train, open(work / "heldout.jsonl", "w") as heldout:
        for name, text in collect_documents():
            bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 1000
            split, out = ("heldout", heldout) if bucket < 30 else ("train", train)
            out.write(json.dumps({"name": name, "text": text}) + "\n")
            counts[split][0] += 1
            counts[split][1] += len(text.encode())
    summary = {split: {"files": files, "bytes": size} for split, (files, size) in counts.items()}
    summary["python"] = sys.version.split()[0]
    (work / "corpus.json").write_text(json.dumps(summary))
    print("corpus:", summary, flush=True)


def read_split(work: Path, split: str) -> list[str]:
    """The texts of one split, in corpus order."""
    with open(work / f"{split}.jsonl") as lines:
        return [json.loads(line)["text"] for line in lines]


# ------------------------------------------------------------------------------------------ tokenizer


def build_tokenizer(work: Path, vocab_size: int) -> None:
    """Train the byte-level BPE on the train split, then encode both splits as flat token streams."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_split(work, "train"), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a corpus file that spells a special token gets plain text
    for split in ("train", "heldout"):
        texts = read_split(work, split)
        stream = [i for e in tokenizer.encode_batch(texts) for i in (0, *e.ids)]
        np.save(work / f"{split}.npy", np.array(stream, dtype=np.uint16))
        size = sum(len(t.encode()) for t in texts)
        print(f"tokenizer: {split} {len(stream):,} tokens, {size / len(stream):.2f} bytes each", flush=True)


# ---------------------------------------------------------------------------------------------- model


@dataclass
class Config:
    """The Llama dimensions of the bundled model."""

    vocab: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 768
    rope_theta: float = 100000.0
    eps: float = 1e-5


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables in the half-split layout that Hugging Face's Llama uses."""
    inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, c: Config) -> None:
        """Create the four projections."""
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each row of (batch, length, width)."""
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.c.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.c.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.c.kv_heads, -1).transpose(1, 2)
        groups = self.c.heads // self.c.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, c: Config) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.up_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to itself."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: Config) -> None:
        """Create the norms, attention and feed-forward."""
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.width, eps=c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.width, eps=c.eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then feed-forward, to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are Hugging Face's, less the ``model.`` prefix."""

    def __init__(self, c: Config) -> None:
        """Create and initialise all weights."""
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)  # every layer starts as the identity
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else 0.5 / math.sqrt(p.shape[1]))

    def forward(self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The negative log-likelihood, in nats, of each target."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


# ------------------------------------------------------------------------------------------- training


class Batches:
    """Shuffled windows of the train stream: each epoch cuts it at new places and visits every window once."""

    def __init__(self, stream: np.ndarray, length: int, seed: int) -> None:
        """Serve windows of ``length`` tokens."""
        self.stream, self.length = stream, length
        self.rng = np.random.default_rng(seed)
        self.order: list[int] = []

    def take(self, rows: int) -> Tensor:
        """The next ``rows`` windows, each one token longer than ``length``."""
        picked = []
        for _ in range(rows):
            if not self.order:
                starts = np.arange(self.rng.integers(self.length), len(self.stream) - self.length - 1, self.length)
                self.order = self.rng.permutation(starts).tolist()
            start = self.order.pop()
            picked.append(self.stream[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(picked))


def window_length(progress: float, step: int) -> int:
    """Short windows first; at the end, half of the steps use the full context."""
    if progress < 0.45:
        return 512
    if progress < 0.8:
        return 1024
    return CONTEXT if step % 2 else 1024


def learning_rate(progress: float, step: int) -> float:
    """Warm up over 100 steps, hold, then decay linearly over the last 40 % of the time."""
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.0, 1.0 - progress) / 0.4)


def make_optimizers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]
