"""Embeddings: the hidden states of a prompt as one vector.

Any decoder model has them: the state behind the final norm of the last token, which has seen all others, or the mean of
the states of all tokens. What is right for a model is how it was trained; see docs/api.md.
"""

from dataclasses import dataclass, field

import torch

from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.request_state import RequestState
from diptych.runtime.step.step_layout import StepLayout

NOT_A_NUMBER = "the model computed a hidden state that is not a number"


@dataclass(slots=True)
class Pooled:
    """Results of one step's pooling requests. places: sampling slots whose requests get no token. vectors: those
    requests' results, little-endian float32. failed: requests without a vector, with the reason."""

    places: list[int] = field(default_factory=list)
    vectors: dict[str, bytes] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)


def add_rows(state: RequestState, rows: torch.Tensor) -> None:
    """The states of the next tokens of a prompt, [num_tokens, hidden], whose mean is asked for. In double precision, so
    that it does not matter how the prompt is cut into chunks."""
    total = rows.sum(0, dtype=torch.float64)
    state.pooled = total if state.pooled is None else state.pooled + total


def pool(layout: StepLayout, batch: DecodeRows, hidden: torch.Tensor) -> Pooled:
    """The embeddings of prompts that end in this step. ``hidden``: of the rows that the layout asks for."""
    pooled = Pooled()
    for slot in range(layout.num_members, layout.last_slot):
        state, place = batch.states[slot], slot - layout.first_slot
        if state.params.pooling is None:
            continue
        pooled.places.append(place)
        is_mean = state.params.pooling == "mean"
        vector = state.pooled if is_mean else hidden[int(layout.first_rows[place])].to(torch.float64)
        assert vector is not None, "each token of the prompt was computed in some chunk"
        length = float(torch.linalg.vector_norm(vector))  # (a mean and a sum have the same direction)
        if not 0.0 < length < float("inf"):
            pooled.failed.append((state.request_id, NOT_A_NUMBER))
            continue
        pooled.vectors[state.request_id] = (vector / length).cpu().numpy().astype("<f4").tobytes()
    return pooled
