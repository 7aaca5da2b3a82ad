"""What requests share: system prompts, and the identities of blocks of text.

Owns the numbering of identities. A system prompt's are negative, a conversation's positive: they never meet.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from diptych.workload.description import PrefixConfig
from diptych.workload.distributions import Stream, exp, log

Chooser = Callable[[], tuple[int, ...]]
BLOCKS_PER_TEXT = 2**24
PROMPTS_PER_CLASS = 2**20


def prefix_chooser(config: PrefixConfig, class_index: int, block_tokens: int, stream: Stream) -> Chooser:
    """Draws a system prompt: the identities of its full blocks of ``block_tokens`` tokens (the rest is not shared)."""
    count, num_blocks = config.prompts, config.tokens // block_tokens
    if count == 0:
        return lambda: ()
    texts: dict[int, tuple[int, ...]] = {}

    def identities(prompt: int) -> tuple[int, ...]:
        if prompt not in texts:
            base = (class_index * PROMPTS_PER_CLASS + prompt) * BLOCKS_PER_TEXT
            texts[prompt] = tuple(-1 - base - block for block in range(num_blocks))
        return texts[prompt]

    uniform = stream.uniform
    if config.choice == "uniform":
        return lambda: identities(int(uniform() * count))
    limits = list(accumulate(exp(-config.exponent * log(rank)) for rank in range(1, count + 1)))
    return lambda: identities(min(bisect_right(limits, uniform() * limits[-1]), count - 1))


def conversation_ids(system: tuple[int, ...], session: int, num_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Identities of the full blocks in the first ``num_tokens`` tokens of a conversation after a system prompt."""
    base = (session + 1) * BLOCKS_PER_TEXT
    return system + tuple(range(base + len(system), base + num_tokens // block_tokens))
