"""Rates of prefill and decode, and their share of what the GPU gives in the same run.

The floor of a decode step is the time to read the weights and the KV cache once, at the rate of a copy; that of a
prompt is its multiplications at the rate of a large product.
"""

from statistics import median
from typing import Any

import torch
from benchmarks.gpu_parts.models import DEVICE, DTYPE, Loaded, batch_of, ceilings, load, row, seconds_of

from diptych.runtime.kernels.instruction_set import available

ON_GPU = DEVICE.type == "cuda"
SHAPES = ("0.5B", "1B", "8B") if ON_GPU else ("tiny",)
PROMPTS = (2048, 8192) if ON_GPU else (70,)
CONTEXT, LONG = (1024, 8192) if ON_GPU else (64, 96)
BATCHES, LONG_BATCHES = ((1, 8, 32, 64, 256), (1, 8, 32)) if ON_GPU else ((1, 3), (1,))


def step(loaded: Loaded, batch: Any) -> torch.Tensor:
    """One step of the model and the most likely tokens, as the runner computes it."""
    hidden = loaded.runner.forward(batch)
    return loaded.runner.model.logits(hidden[: len(batch.sample_rows)]).argmax(-1)


def prefill(loaded: Loaded, tokens: int, found: dict[str, float]) -> dict[str, Any]:
    """Measure the prefill of one prompt."""
    config = loaded.runner.model_config
    batch = batch_of([(0, tokens)], config.vocab_size)
    seconds = seconds_of(lambda: step(loaded, batch), 5)
    heads = config.attention
    attention = 2 * tokens * tokens * heads.query_width * config.num_layers  # causal: half of q k and of p v
    operations = 2 * tokens * loaded.layer_parameters + attention
    rate = operations / median(seconds)
    return {
        "tokens_s": round(tokens / median(seconds)),
        "spread": f"{tokens / max(seconds):.0f}..{tokens / min(seconds):.0f}",
        "share": round(rate / found["product_flop_s"], 3),
    }


def decode(loaded: Loaded, num_seqs: int, context: int, found: dict[str, float]) -> dict[str, Any]:
    """Measure decode steps at one context."""
    batch = batch_of([(context - 1, 1)] * num_seqs, loaded.runner.model_config.vocab_size)
    seconds = seconds_of(lambda: step(loaded, batch), 20, warm_up=6)
    moved = loaded.weight_bytes + num_seqs * context * loaded.kv_bytes_per_token
    floor = moved / found["copy_bytes_s"]
    return {
        "tokens_s": round(num_seqs / median(seconds)),
        "step_ms": round(1e3 * median(seconds), 3),
        "spread_ms": f"{1e3 * min(seconds):.3f}..{1e3 * max(seconds):.3f}",
        "share": round(floor / median(seconds), 3),
    }


@torch.inference_mode()
def main() -> None:
    """Print a row for each shape, set of kernels and size; the largest shape first."""
    found = ceilings()
    for shape in reversed(SHAPES):
        room = max(max(BATCHES) * CONTEXT, max(LONG_BATCHES) * LONG, max(PROMPTS))
        for kernels in available(DTYPE, DEVICE.type):
            loaded = load(shape, kernels, num_tokens=room)
            names = {"shape": shape, "kernels": kernels, "attention": loaded.runner.attention.name}
            for tokens in PROMPTS:
                row(**names, what=f"prefill {tokens}", **prefill(loaded, tokens, found))
            for context, batches in ((CONTEXT, BATCHES), (LONG, LONG_BATCHES)):
                for num_seqs in batches:
                    row(**names, what=f"decode b{num_seqs} at {context}", **decode(loaded, num_seqs, context, found))
            del loaded
            if ON_GPU:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
