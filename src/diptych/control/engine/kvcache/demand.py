"""How much KV will be needed: the future peak of what is admitted.

The peak is the exact maximum under the expected lengths, assuming that all grow one token per step (the rule that
LightLLM calls "future token peak"): sort by remaining length; just before the i-th longest ends, the i longest are
there and each has grown by that much.
"""

from collections.abc import Iterable


def future_peak_blocks(demands: Iterable[tuple[int, int]], block_size: int, num_growing: int = 1) -> int:
    """Largest number of blocks ever held by requests given as (blocks held now, tokens still to come). num_growing:
    block tables of each that get a block for every ``block_size`` tokens."""
    held, peak = 0, 0
    for count, (blocks, remaining) in enumerate(sorted(demands, key=lambda demand: -demand[1]), start=1):
        held += blocks
        peak = max(peak, held + count * num_growing * -(-remaining // block_size))
    return peak
