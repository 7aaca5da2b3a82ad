#!/usr/bin/env python3
"""Train the small language model that ships with Diptych, on a CPU, from nothing but a Python installation.

The text is the Python standard library of the interpreter that runs this script (its tests included); about 3 % of
the files, chosen by a hash of their contents, are held out. Phases, in order, sharing one work directory:

    python scripts/train_bundled_model.py corpus    --work build/bundled
    python scripts/train_bundled_model.py tokenizer --work build/bundled
    python scripts/train_bundled_model.py train     --work build/bundled --minutes 85
    python scripts/train_bundled_model.py export    --work build/bundled
    python scripts/train_bundled_model.py evaluate  --work build/bundled

`train` goes on from its own checkpoint when there is one. Its schedule follows a share of progress from 0 to 1, which
is either tokens seen (`--tokens`) or the wall clock (`--minutes` or `--deadline HH:MM`), so that a paused or slowed
run still decays its learning rate in time. Needs torch, numpy, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import lzma
import math
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

OUT = Path(__file__).resolve().parent.parent / "src" / "diptych" / "bundled" / "stdlib-python"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words take one preceding character, as in other byte-level vocabularies, but a line break is never glued to what
# precedes it and an indent is one piece: a prompt may then end after a colon, a line break or an indent.
SPLIT = r"[^\s\p{L}\p{N}]\p{L}+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
CONFIG: dict[str, Any] = json.loads((OUT / "config.json").read_text())
# Progress at which each phase begins, sequence length, sequences per micro-batch, micro-batches per step.
PHASES = [(0.0, 512, 16, 1), (0.72, 2048, 4, 1), (0.86, 8192, 1, 1)]


def corpus(args: argparse.Namespace) -> None:
    """Collect the standard library's source files, once each, split by content hash into train and held-out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    split: dict[str, list[str]] = {"train": [], "heldout": []}
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "__pycache__"} & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        table = sum(map(str.isdigit, text)) > 0.2 * len(text)  # code pages, digests: nothing to learn there
        if digest in seen or len(text) < 64 or table:
            continue
        seen.add(digest)
        split["heldout" if int(digest[:8], 16) % 1000 < 30 else "train"].append(text)
    args.work.mkdir(parents=True, exist_ok=True)
    for name, texts in split.items():
        (args.work / f"{name}.json").write_text(json.dumps(texts))
        print(f"{name}: {len(texts)} files, {sum(len(t.encode()) for t in texts):,} bytes")


def documents(work: Path, name: str) -> list[str]:
    """The files of one side of the split."""
    return json.loads((work / f"{name}.json").read_text())


def tokenizer(args: argparse.Namespace) -> None:
    """Train the byte-level BPE vocabulary on the train split, then encode both splits."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tok.train_from_iterator(documents(args.work, "train"), trainer)
    tok.save(str(args.work / "tokenizer.json"))
    for name in ("train", "heldout"):
        texts = documents(args.work, name)
        rows = [[0, *enc.ids] for enc in tok.encode_batch(texts, add_special_tokens=False)]
        np.save(args.work / f"{name}.npy", np.concatenate([np.array(r, np.uint16) for r in rows]))
        np.save(args.work / f"{name}_lengths.npy", np.array([len(r) for r in rows]))
        total, size = sum(map(len, rows)), sum(len(t.encode()) for t in texts)
        print(f"{name}: {total:,} tokens, {size / total:.2f} bytes per token")


class Layer(nn.Module):
    """One Llama decoder layer, with the parameter names Hugging Face gives them."""

    def __init__(self) -> None:
        super().__init__()
        d, f, hd = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
        q, kv = CONFIG["num_attention_heads"] * hd, CONFIG["num_key_value_heads"] * hd
        self.input_layernorm = nn.RMSNorm(d, eps=CONFIG["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(d, eps=CONFIG["rms_norm_eps"])
        shapes = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
        self.self_attn = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in shapes.items()})
        shapes = {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        self.mlp = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in shapes.items()})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then the gated feed-forward, each on a residual branch."""
        a, m, hd = self.self_attn, self.mlp, CONFIG["head_dim"]
        h = self.input_layernorm(x)
        q, k, v = (a[n](h).unflatten(-1, (-1, hd)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj"))
        groups = q.shape[1] // k.shape[1]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["o_proj"](y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """A plain Llama with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(CONFIG["hidden_size"], eps=CONFIG["rms_norm_eps"])
        half = CONFIG["head_dim"] // 2
        angle = torch.outer(
            torch.arange(CONFIG["max_position_embeddings"]).float(),
            CONFIG["rope_theta"] ** (-torch.arange(half).float() / half),
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = 0.02 if "embed" in name else 0.5 * p.shape[1] ** -0.5
                nn.init.zeros_(p) if "o_proj" in name or "down" in name else nn.init.normal_(p, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """Per-position negative log-likelihood, in nats, of ids[:, 1:] given ids[:, :-1]."""
        x = self.embed_tokens(ids[:, :-1])
        t = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(-1, t)


def batches(work: Path, length: int, rows: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Endless batches of `rows` sequences cut from the documents, laid end to end in a fresh order each epoch."""
    ids, lengths = np.load(work / "train.npy"), np.load(work / "train_lengths.npy")
    starts = np.cumsum(lengths) - lengths
    while True:
        order = rng.permutation(len(lengths))
        stream = np.concatenate([ids[starts[i] : starts[i] + lengths[i]] for i in order])
        stream = stream[rng.integers(length) :]
        count = (len(stream) - 1) // length
        for pick in np.array_split(rng.permutation(count), max(1, count // rows)):
            if len(pick) >= rows:
                grid = pick[:rows, None] * length + np.arange(length + 1)[None]
                yield torch.from_numpy(stream[grid].astype(np.int64))


def lr_share(progress: float) -> float:
    """Warm up, hold, then fall linearly to (almost) nothing from 40 % on."""
    return min(1.0, 0.05 + progress / 0.01) * min(1.0, max(0.01, (1 - progress) / 0.6))


def save_checkpoint(work: Path, model: Llama, opts: list[torch.optim.Optimizer], state: dict[str, float]) -> None:
    """Write the checkpoint in one atomic step."""
    part = work / "checkpoint.part"
    torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts], "state": state}, part)
    part.replace(work / "checkpoint.pt")


def end_time(args: argparse.Namespace) -> float | None:
    """When the run has to be over, in seconds since the epoch, if the clock decides."""
    if args.deadline:
        hour, minute = map(int, args.deadline.split(":"))
        when = datetime.datetime.now().replace(hour=hour, minute=minute, second=0)
        return when.timestamp()
    return None if args.tokens else time.time() + 60 * args.minutes


def restore(work: Path, model: Llama, opts: list[torch.optim.Optimizer]) -> dict[str, float]:
    """Load the checkpoint, if there is one; how far it got."""
    if not (work / "checkpoint.pt").exists():
        return {"progress": 0.0, "step": 0, "tokens": 0}
    saved = torch.load(work / "checkpoint.pt")
    model.load_state_dict(saved["model"])
    for opt, values in zip(opts, saved["opts"], strict=True):
        opt.load_state_dict(values)
    return saved["state"]


def train(args: argparse.Namespace) -> None:
    """Train, saving a checkpoint and an export every few minutes."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    model = Llama()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    muon = torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.1, momentum=0.95)
    opts: list[torch.optim.Optimizer] = [muon, adam]
    state = restore(args.work, model, opts)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, from {state}", flush=True)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    begun, end, first = time.time(), end_time(args), state["progress"]
    rng = np.random.default_rng([args.seed, int(state["step"])])
    phase, stream, saved_at, mean = None, iter(()), begun, 0.0
    while state["progress"] < 1:
        wanted = max(p for p in PHASES if state["progress"] >= p[0])
        if wanted != phase:
            phase, stream = wanted, batches(args.work, wanted[1], wanted[2], rng)
        tick, loss = time.time(), 0.0
        for _ in range(phase[3]):
            with torch.autocast("cpu", torch.bfloat16):
                part = forward(next(stream)).mean() / phase[3]
            part.backward()
            loss += part.item()
        for opt, lr in zip(opts, (args.muon_lr, args.adam_lr), strict=True):
            opt.param_groups[0]["lr"] = lr * lr_share(state["progress"])
            opt.step()
            opt.zero_grad(set_to_none=True)
        seen, now = phase[1] * phase[2] * phase[3], time.time()
        state["step"] += 1
        state["tokens"] += seen
        state["progress"] = (
            first + (1 - first) * (now - begun) / (end - begun) if end else state["tokens"] / args.tokens
        )
        mean = 0.95 * mean + 0.05 * loss if mean else loss
        if state["step"] % args.report == 0:
            left = (1 - state["progress"]) * (now - begun) / max(1e-9, state["progress"] - first) / 60
            print(
                f"step {state['step']} tokens {state['tokens'] / 1e6:.2f}M length {phase[1]} loss {mean:.4f} "
                f"{seen / (now - tick):,.0f} tokens/s progress {state['progress']:.3f} left {left:.1f} min",
                flush=True,
            )
        if now - saved_at > 60 * args.save_minutes or state["progress"] >= 1:
            save_checkpoint(args.work, model, opts, state)
            export(args)
            saved_at = now


def export(args: argparse.Namespace) -> None:
    """Write the checkpoint's weights, in bfloat16, and the tokenizer into the model directory."""
    saved = torch.load(args.work / "checkpoint.pt")
    weights = {f"model.{n}": t.to(torch.bfloat16).contiguous() for n, t in saved["model"].items()}
    part = args.work / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    shutil.copyfile(part, args.out / "model.safetensors")
    shutil.copyfile(args.work / "tokenizer.json", args.out / "tokenizer.json")


@torch.no_grad()
def nll(model: Llama, ids: np.ndarray) -> np.ndarray:
    """Bits of each token of `ids` after the first, in bfloat16 arithmetic."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.from_numpy(ids.astype(np.int64))[None])[0].numpy() / math.log(2)


def model_bits(model: Llama, work: Path) -> float:
    """Bits the model spends on the held-out files, each on its own; long files slide by half a window."""
    ids, total, start, window = np.load(work / "heldout.npy"), 0.0, 0, CONFIG["max_position_embeddings"]
    for length in np.load(work / "heldout_lengths.npy"):
        doc, done = ids[start : start + length], 0
        start += length
        while done < length - 1:
            end = min(length - 1, max(window, done + window // 2))
            first = max(0, end - window)
            total += float(nll(model, doc[first : end + 1])[done - first :].sum())
            done = end
    return total


def position_bits(model: Llama, work: Path, buckets: int = 8) -> list[float]:
    """Bits per token by position; every held-out token is seen once in every bucket, so only position differs."""
    ids, window = np.load(work / "heldout.npy"), CONFIG["max_position_embeddings"]
    ring, stride = np.concatenate([ids, ids[: window + 1]]), window // buckets
    rows = [nll(model, ring[i : i + window + 1]) for i in range(0, len(ids), stride)]
    return [round(float(x), 4) for x in np.mean(rows, axis=0).reshape(buckets, -1).mean(axis=1)]


def xz_bits(train_text: bytes, text: bytes) -> float:
    """Bits xz adds for `text` when it comes right after `train_text`, all of it within the window."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]
    sizes = [len(lzma.compress(t, lzma.FORMAT_XZ, filters=filters)) for t in (train_text + text, train_text)]
    return 8.0 * (sizes[0] - sizes[1])


def ngram_bits(train_text: bytes, text: bytes, order: int = 5) -> float:
    """Bits of `text` under a Witten-Bell interpolated byte n-gram of `train_text`."""

    def grams(data: bytes, n: int) -> np.ndarray:
        padded = np.frombuffer(bytes(order) + data, np.uint8).astype(np.uint64)
        key = np.zeros(len(data), np.uint64)
        for i in range(n):
            key = key << np.uint64(8) | padded[order - n + 1 + i : order - n + 1 + i + len(data)]
        return key

    def lookup(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, counts[at], 0)

    p = np.full(len(text), 1 / 256)
    for n in range(1, order + 1):
        keys, counts = np.unique(grams(train_text, n), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        sums, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(keys)))
        wanted = grams(text, n)
        context = wanted >> np.uint64(8)
        total, types = lookup(contexts, sums, context), lookup(contexts, kinds, context)
        p = np.where(total > 0, (lookup(keys, counts, wanted) + types * p) / np.maximum(1, total + types), p)
    return float(-np.log2(p).sum())


def evaluate(args: argparse.Namespace) -> None:
    """Measure the exported model against the baselines; write the figures beside it and into its card."""
    torch.set_num_threads(args.threads)
    model = Llama()
    weights = load_file(args.out / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): t.float() for n, t in weights.items()})
    train_text, text = ("".join(documents(args.work, n)).encode() for n in ("train", "heldout"))
    size, state = len(text), torch.load(args.work / "checkpoint.pt")["state"]
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "python": platform.python_version(),
        "train_files": len(documents(args.work, "train")),
        "train_bytes": len(train_text),
        "train_tokens": len(np.load(args.work / "train.npy")),
        "tokens_seen": int(state["tokens"]),
        "heldout_files": len(documents(args.work, "heldout")),
        "heldout_bytes": size,
        "heldout_tokens": len(np.load(args.work / "heldout.npy")),
        "bits_per_byte": {
            "model": round(model_bits(model, args.work) / size, 4),
            "xz -9e after the train split": round(xz_bits(train_text, text) / size, 4),
            "xz -9e alone": round(xz_bits(b"", text) / size, 4),
            "interpolated byte 5-gram": round(ngram_bits(train_text, text) / size, 4),
        },
        "bits_per_token_by_position_eighth": position_bits(model, args.work),
    }
    (args.out / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    phases = {f.__name__: f for f in (corpus, tokenizer, train, export, evaluate)}
    parser.add_argument("phase", choices=phases)
    parser.add_argument("--work", type=Path, default=Path("build/bundled"), help="where intermediate files live")
    parser.add_argument("--out", type=Path, default=OUT, help="the model directory to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--tokens", type=float, default=0, help="train on this many tokens")
    parser.add_argument("--minutes", type=float, default=85, help="or for this long")
    parser.add_argument("--deadline", default="", help="or until this time of day, HH:MM")
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    phases[args.phase](args)


if __name__ == "__main__":
    main()
