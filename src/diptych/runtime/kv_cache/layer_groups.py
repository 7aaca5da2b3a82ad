"""The groups of a model's layers: control's arithmetic (control/page_groups.py) over how its layers attend.

Never imports torch.
"""

from collections.abc import Sequence

from diptych.control.page_groups import LayerGroups, deal_windows
from diptych.runtime.models.model_config import LayerAttention

__all__ = ["LayerGroups", "deal"]


def deal(layers: Sequence[LayerAttention], block_size: int, max_tokens: int) -> LayerGroups:
    """Deal layers into groups, for sequences of up to ``max_tokens`` tokens (see ``deal_windows``)."""
    return deal_windows([how.window or 0 for how in layers], block_size, max_tokens)
