"""How the KV of one sequence lies in pages: which groups of layers there are, and how many pages each of them holds.

Layers of one kind are dealt into groups of equally many, so that a page of any group takes the same number of bytes,
and all groups draw theirs from one pool: what counts free or reserved pages needs to know nothing of groups. Arithmetic
alone: which layer is in which group, and where a page lies in memory, is the runtime's business.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from diptych.control.errors import ConfigError

UNLIMITED_TOKENS = 2**62


class GroupKind(StrEnum):
    """What the layers of a group attend to."""

    FULL = "full"  # all tokens before
    WINDOW = "window"  # the newest ones


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that hold ``tokens_per_page`` tokens in a page. window_tokens: how many tokens each of theirs attends to,
    itself among them (0: all, kind FULL)."""

    tokens_per_page: int
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tokens_per_page < 1:
            raise ConfigError(f"tokens_per_page is {self.tokens_per_page}; at least 1", param="tokens_per_page")
        least, words = (1, "at least 1") if self.kind is GroupKind.WINDOW else (0, "0 without a window")
        if self.window_tokens < least or (self.kind is GroupKind.FULL and self.window_tokens):
            raise ConfigError(f"window_tokens is {self.window_tokens}; {words}", param="window_tokens")

    def first_live(self, num_tokens: int) -> int:
        """The first page that is still read when ``num_tokens`` tokens are committed: the others have expired. Only
        committed tokens count, so that one that is taken back never needs a page that is gone."""
        if self.kind is GroupKind.FULL:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // self.tokens_per_page

    def num_pages(self, num_committed: int, num_tokens: int) -> int:
        """Pages that hold the first ``num_tokens`` tokens, without those that have expired."""
        return max(0, -(-num_tokens // self.tokens_per_page) - self.first_live(num_committed))

    def peak_pages(self, num_tokens: int, step_tokens: int) -> int:
        """The most pages that a sequence ever holds on its way to ``num_tokens`` tokens, if a step computes at most
        ``step_tokens`` of them: before it ends, no page of the window behind its first token can be given up. That is
        as many as a run of window_tokens - 1 + step_tokens tokens can touch."""
        pages = -(-num_tokens // self.tokens_per_page)
        if self.kind is GroupKind.FULL:
            return pages
        return min(pages, -(-(self.window_tokens + step_tokens - 2) // self.tokens_per_page) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of one model. A dense model has one, whose pages are the blocks of its cache."""

    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("groups is empty; a model has at least 1 group of layers", param="groups")

    @classmethod
    def dense(cls, block_size: int) -> "KVLayout":
        """All layers alike, each attending to all tokens before."""
        return cls((KVGroup(block_size),))

    @property
    def is_dense(self) -> bool:
        """Whether all layers are alike and attend to all tokens before."""
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL

    @property
    def hash_tokens(self) -> int:
        """Tokens of a block that is hashed: those of the smallest page."""
        return min([group.tokens_per_page for group in self.groups])

    @property
    def hit_tokens(self) -> int:
        """A prompt that begins as another one did is computed from a multiple of this many tokens on: there a page
        begins in every group."""
        return lcm(*[group.tokens_per_page for group in self.groups])

    def last_boundary(self, num_tokens: int) -> int:
        """How many tokens of a prompt are found again at most: whole pages, and at least one token is computed."""
        return max(0, num_tokens - 1) // self.hit_tokens * self.hit_tokens

    def first_handed_over(self, num_tokens: int) -> tuple[int, ...]:
        """By group, the first page that a worker gets which decodes a prompt of ``num_tokens`` tokens that another one
        computes: all that its next token reads, or a prompt that goes on at its last boundary."""
        committed = self.last_boundary(num_tokens)
        return tuple([group.first_live(committed) for group in self.groups])

    @property
    def num_growing(self) -> int:
        """Groups that never give up a page while their sequence lives: their pages grow with its length."""
        return sum([group.kind is GroupKind.FULL for group in self.groups])

    def longest_chunk(self, window_chunk: int) -> int:
        """The most tokens of one prompt that a step may compute: ``window_chunk`` where there are windows, because a
        step holds what its first token reads until it ends."""
        return UNLIMITED_TOKENS if self.num_growing == len(self.groups) else window_chunk

    def peak_pages(self, num_tokens: int, step_tokens: int = 1) -> int:
        """What a sequence is charged from its admission on: the most pages that it holds, of all groups, on its way to
        ``num_tokens`` tokens. At least as many as it ever holds at once; fewer for no number of tokens."""
        return sum([group.peak_pages(num_tokens, step_tokens) for group in self.groups])

    def capacity_tokens(self, num_pages: int, step_tokens: int = 1) -> int:
        """The longest sequence that fits into ``num_pages`` pages; UNLIMITED_TOKENS where one of any length does."""
        is_bounded = any(group.kind is GroupKind.FULL for group in self.groups)
        if not is_bounded and self.peak_pages(UNLIMITED_TOKENS, step_tokens) <= num_pages:
            return UNLIMITED_TOKENS
        longest = max(0, num_pages) * max([group.tokens_per_page for group in self.groups])
        lengths = range(longest + 1)
        return bisect_right(lengths, num_pages, key=lambda length: self.peak_pages(length, step_tokens)) - 1

    def tokens_within(self, num_pages: int, num_tokens: int) -> int:
        """Tokens that ``num_pages`` pages hold in sequences of ``num_tokens`` tokens, a part of one included: with
        windows, these are more the longer the sequences are."""
        if self.is_dense:
            return num_pages * self.groups[0].tokens_per_page
        return num_pages * num_tokens // self.peak_pages(num_tokens)
