"""One flat record per forward pass: what every layer reads. Built once per step by the ModelRunner."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of one step, all sequences side by side; decode sequences (one token each) come first.

    Sequences are numbered as in ``query_start``; the first ``num_decodes`` of them are decodes. All index tensors
    live on the model's device. Slots and block tables are by group of layers (see LayerGroups): a dense model has one.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mappings: tuple[torch.Tensor, ...]  # [num_tokens] int64 each: block_id * block_size + offset in the block
    query_start: torch.Tensor  # [num_seqs + 1] int32: first row of each sequence, then num_tokens
    context_lens: torch.Tensor  # [num_seqs] int32: tokens in the KV cache after this step (this step's included)
    block_tables: tuple[torch.Tensor, ...]  # [num_seqs, max_blocks] int32 each; entries past the sequence's blocks are
    # arbitrary, and so are those of blocks that lie before all windows
    sample_rows: torch.Tensor  # [num_samples] int64: rows whose logits are wanted
    num_decodes: int
    max_query_len: int
    max_context_len: int
    packed: torch.Tensor | None = None  # uint8: the one piece of memory of all tensors but the block tables, if it is

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return self.token_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token, and each of them is sampled from."""
        return self.num_decodes == self.num_tokens

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return self.context_lens.shape[0]
