"""Whether a row has the same bits alone, in any batch, in any chunking, and beside a cached prefix."""

from typing import Any

import torch
from benchmarks.gpu_parts.models import BLOCK_SIZE, DEVICE, DTYPE, Loaded, batch_of, load, row

from diptych.runtime.kernels.instruction_set import available

SHAPE = "1B" if DEVICE.type == "cuda" else "tiny"
PROMPT = 1500 if DEVICE.type == "cuda" else 70


def logits(loaded: Loaded, batch: Any) -> torch.Tensor:
    """Logits of the rows that are sampled from."""
    model = loaded.runner.model
    return model.logits(loaded.runner.forward(batch)[: len(batch.sample_rows)]).clone()


def part_of(batch: Any, first: int, last: int) -> Any:
    """Tokens [first, last) of the only sequence of a batch, those before them cached."""
    from dataclasses import replace

    return replace(
        batch,
        token_ids=batch.token_ids[first:last],
        positions=batch.positions[first:last],
        slot_mappings=(batch.slot_mappings[0][first:last],),
        query_start=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor([last], dtype=torch.int32, device=DEVICE),
        sample_rows=torch.tensor([last - first - 1], device=DEVICE),
        num_decodes=int(last - first == 1),
        max_query_len=last - first,
        max_context_len=last,
    )


@torch.inference_mode()
def main() -> None:
    """Print the share of equal rows of each set of kernels."""
    for kernels in available(DTYPE, DEVICE.type):
        loaded = load(SHAPE, kernels, num_tokens=64 * (PROMPT + BLOCK_SIZE))
        vocabulary = loaded.runner.model_config.vocab_size
        whole = batch_of([(0, PROMPT)], vocabulary)
        reference = logits(loaded, whole)
        found: list[bool] = []
        for size in (1, 7, 64, 255, 512, PROMPT // 2 + 1):
            first = 0 if size > 1 else PROMPT - 3  # the rest is cached already: a prefix hit
            for start in range(first, PROMPT, size):
                result = logits(loaded, part_of(whole, start, min(start + size, PROMPT)))
            found.append(torch.equal(result, reference))
        row(what="a prompt in chunks and behind a prefix", kernels=kernels, equal=sum(found), of=len(found))
        alone = logits(loaded, batch_of([(PROMPT, 1)], vocabulary))
        counts = []
        for num_seqs in (2, 3, 8, 33, 64):
            crowd = batch_of([(PROMPT, 1), *[(PROMPT - 1 - index, 1) for index in range(num_seqs - 1)]], vocabulary)
            counts.append(torch.equal(logits(loaded, crowd)[:1], alone))
        row(what="a decode beside others", kernels=kernels, equal=sum(counts), of=len(counts))
        del loaded


if __name__ == "__main__":
    main()
