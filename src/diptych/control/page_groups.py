"""Which layers of a model share a page of its KV cache: layers of one kind, dealt into groups of equally many.

Arithmetic over the windows of layers, for the runtime, which lays pages out by it, and for the simulator, which counts
them as a worker would. How many pages a sequence holds is said in kv_layout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.kv_layout import GroupKind, KVGroup, KVLayout

REFERENCE_TOKENS = 16_384  # the length of a sequence whose memory a choice of groups is judged by
MOST_MEMORY = 1.05  # of a sequence of that length, in parts of the least that any choice takes
SAID_EMPTY, MOST_EMPTY = 0.1, 0.5  # shares of the places that no layer has


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one model, and where each layer is: ``place_of[layer]`` is (group, place), where a page of a group
    has a place for each of its layers: room for K and V of ``tokens_per_page`` tokens of one layer."""

    groups: tuple[KVGroup, ...]
    place_of: tuple[tuple[int, int], ...]

    @classmethod
    def dense(cls, num_layers: int, block_size: int) -> "LayerGroups":
        """One group of all layers: pages are the blocks of a model whose layers all attend to everything."""
        return cls((KVGroup(block_size),), tuple([(0, layer) for layer in range(num_layers)]))

    @property
    def is_dense(self) -> bool:
        """Whether all layers are in one group without a window."""
        return KVLayout(self.groups).is_dense

    @property
    def num_places(self) -> int:
        """Places of a page."""
        return 1 + max([place for _, place in self.place_of])

    @property
    def empty_share(self) -> float:
        """Share of the places of all groups that no layer has, 0 to 1."""
        return 1 - len(self.place_of) / (self.num_places * len(self.groups))

    @property
    def note(self) -> str:
        """What people should know of the groups ("": nothing)."""
        if self.empty_share <= SAID_EMPTY:
            return ""
        return (
            f"{self.empty_share:.0%} of the KV cache stays empty, as layers of different windows are "
            f"{len(self.groups)} groups of {self.num_places}"
        )


def deal_windows(windows: Sequence[int], block_size: int, max_tokens: int) -> LayerGroups:
    """Deal layers into groups, by how many tokens each attends to (0: all before), for sequences of up to
    ``max_tokens`` tokens: the fewest groups whose memory, for a sequence of REFERENCE_TOKENS tokens or the longest
    there is, is within MOST_MEMORY of the least. A window that holds the longest sequence is none. Groups come in the
    order of their windows, those without one first."""
    kinds: dict[int, list[int]] = {}  # layers by their window
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window < max_tokens else 0, []).append(layer)
    length = min(max_tokens, REFERENCE_TOKENS)
    choices = []
    for num_places in range(1, max(map(len, kinds.values())) + 1):
        groups: list[KVGroup] = []
        place_of, pages = [(0, 0)] * len(windows), 0
        for window, members in sorted(kinds.items()):
            group = KVGroup(block_size, GroupKind.WINDOW if window else GroupKind.FULL, window)
            for index, layer in enumerate(members):
                place_of[layer] = (len(groups) + index // num_places, index % num_places)
            count = -(-len(members) // num_places)
            groups += [group] * count
            pages += group.peak_pages(length, 1) * count
        dealt = LayerGroups(tuple(groups), tuple(place_of))
        if dealt.empty_share <= MOST_EMPTY:
            choices.append((pages * num_places, dealt))
    most = min([size for size, _ in choices]) * MOST_MEMORY
    fitting = [choice for choice in choices if choice[0] <= most]
    return min(fitting, key=lambda choice: (len(choice[1].groups), choice[0]))[1]
