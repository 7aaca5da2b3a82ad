"""The bodies of DATA frames: how each connector describes them to the stream that carries them.

A *part* is a rectangle, some layers of some tokens: the body of one frame. A body format cuts what is sent into parts,
and knows where the bytes of a part are read and written. It takes no lock and touches no socket: the caller sees to it
that the blocks may be read or written.

Frame.encoding names a body format on the wire:
    0         empty: the KV lies in one shared pool (shared_memory_connector.py)
    1 to 5    one more than the number of a WireEncoding of the codec (tcp_connector.py)
    16        addresses, from which the receiver reads (nixl_connector.py)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from diptych.runtime.transfer.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class Part:
    """``num_layers`` layers from ``first_layer`` of the tokens [start, start + num_tokens), K and V."""

    start: int
    num_tokens: int
    first_layer: int
    num_layers: int
    is_last: bool  # of its send


class BodyFormat(Protocol):
    """One way for KV to travel. ``parts`` and ``pack`` are the sender's, ``accepts``, ``targets`` and ``unpack`` the
    receiver's."""

    encoding: int

    def parts(self, start: int, num_tokens: int, layers: range | None = None) -> Iterator[Part]:
        """These tokens in these layers (None: all), cut into bodies of about the frame size; the last one says so."""
        ...

    def pack(self, block_ids: Sequence[int], part: Part) -> list[memoryview]:
        """The body, in pieces. May point into the blocks."""
        ...

    def num_bytes(self, part: Part) -> int:
        """Bytes of KV, as they are moved."""
        ...

    def accepts(self, part: Part, body_bytes: int) -> bool:
        """Whether the body of this part can have that length. Raises ProtocolError for a part that cannot be one."""
        ...

    def targets(self, block_ids: Sequence[int], part: Part) -> list[memoryview] | None:
        """Where the body belongs, piece by piece; None when it has to be unpacked."""
        ...

    def unpack(self, block_ids: Sequence[int], part: Part, body: memoryview) -> None:
        """Write a body that has no targets into its blocks. Raises ProtocolError when it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Neighbouring layers that have one block table, the number ``group``."""

    layers: range
    group: int


def layer_runs(num_layers: int, groups: Sequence[int] = ()) -> tuple[LayerRun, ...]:
    """The layers of a model, in runs of one group. groups: of each layer, its number ((): all are in one)."""
    groups = groups or (0,) * num_layers
    begins = [layer for layer in range(num_layers) if not layer or groups[layer] != groups[layer - 1]]
    ends = [*begins[1:], num_layers]
    return tuple([LayerRun(range(begin, end), groups[begin]) for begin, end in zip(begins, ends, strict=True)])


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """Where the KV of a sequence lies, layer by layer. tables: by group, a block id for each block of the sequence (of
    blocks that do not travel, any). starts: by group, the first token that travels. groups: of each layer, its group
    ((): all are in the first)."""

    tables: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, block_ids: Sequence[int], start: int) -> "SequenceTables":
        """All layers in one block table, of which the tokens from ``start`` on travel."""
        return cls((tuple(block_ids),), (start,))

    def from_token(self, start: int) -> "SequenceTables":
        """The same, but that what lies before ``start`` does not travel."""
        return replace(self, starts=tuple([max(start, begin) for begin in self.starts]))

    def group_of(self, layer: int) -> int:
        """The group of a layer."""
        return self.groups[layer] if self.groups else 0

    def table_of(self, part: Part) -> tuple[int, ...]:
        """The block table of a part."""
        return self.tables[self.group_of(part.first_layer)]

    def covers(self, part: Part, end: int) -> bool:
        """Whether the part has one block table, and its tokens, which end at ``end``, travel."""
        group = self.group_of(part.first_layer)
        rest = self.groups[part.first_layer : part.first_layer + part.num_layers]
        is_one = not self.groups or set(rest) == {group}
        return is_one and self.starts[group] <= part.start and part.start + part.num_tokens <= end

    def num_cells(self, end: int, num_layers: int) -> int:
        """Tokens before ``end`` that travel, counted in each layer."""
        return sum([max(0, end - self.starts[self.group_of(layer)]) for layer in range(num_layers)])


def parts_of_runs(body_format: BodyFormat, runs: Sequence[LayerRun], starts: Sequence[int], end: int) -> Iterator[Part]:
    """The tokens before ``end``, from the start of each layer's group on, cut into parts that have one block table
    each."""
    sent = [run for run in runs if starts[run.group] < end]
    for number, run in enumerate(sent):
        start = starts[run.group]
        for part in body_format.parts(start, end - start, run.layers):
            is_last = part.is_last and number + 1 == len(sent)
            yield part if is_last == part.is_last else replace(part, is_last=is_last)


class BodyFormats(Protocol):
    """The body formats of one connector."""

    def for_sending(self, receiver: KVFormat, num_tokens: int, link_bytes_per_s: float | None) -> BodyFormat:
        """The format of a send of this many tokens; ``link_bytes_per_s``: None while the link's speed is not known.

        Raises ConfigError when there is none that a receiver with this cache can take.
        """
        ...

    def for_receiving(self, encoding: int, sender: KVFormat) -> BodyFormat:
        """The format of a frame. Raises ProtocolError for an encoding that this connector does not know or take."""
        ...
