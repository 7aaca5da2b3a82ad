"""The traces inside the package: a compact form of recorded requests, with source and licence in every file.

A file is gzipped JSON: gaps between arrivals in units of time, lengths, and the prompts' block identities as a tree.
An identity stands for a whole prefix, so it has one parent; and a request's new blocks are numbered in order. Thus the
last identity that was known and the number of identities say it all.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import accumulate

BUNDLED = ("azure-conv", "mooncake-conversation")
FORMAT = "diptych-trace-1"


@dataclass(frozen=True, kw_only=True)
class PackedTrace:
    """The content of a file. known_ids: the last identity of a request that came before, -1 for none; id_counts: how
    many it has."""

    format: str = FORMAT
    name: str
    source: str
    licence: str
    changes: str
    unit_ns: int
    gaps: Sequence[int]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    hash_block_tokens: int = 512
    known_ids: Sequence[int] = ()
    id_counts: Sequence[int] = ()

    def arrival_ns(self) -> Iterator[int]:
        """Nanoseconds from the first request."""
        return (units * self.unit_ns for units in accumulate(self.gaps))

    def hash_ids(self) -> list[tuple[int, ...]]:
        """Identities of each prompt's blocks; empty when the trace has none."""
        parents: list[int] = []
        rows = []
        for known, count in zip(self.known_ids, self.id_counts, strict=True):
            path = []
            while known >= 0:
                path.append(known)
                known = parents[known]
            path.reverse()
            while len(path) < count:
                parents.append(path[-1] if path else -1)
                path.append(len(parents) - 1)
            rows.append(tuple(path))
        return rows


def tree_columns(hash_ids: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(known_ids, id_counts) of rows of identities; ValueError when they are no tree numbered in order."""
    parents: list[int] = []
    known_ids, counts = [], []
    for row in hash_ids:
        parent = known = -1
        for identity in row:
            if identity < len(parents) and known == parent:
                known = identity
            elif identity == len(parents):
                parents.append(parent)
            if identity >= len(parents) or parents[identity] != parent:
                raise ValueError(f"block identity {identity} after {parent} fits no tree numbered in order")
            parent = identity
        known_ids.append(known)
        counts.append(len(row))
    return known_ids, counts


def pack(trace: PackedTrace) -> bytes:
    """The file; equal traces give equal bytes."""
    return gzip.compress(json.dumps(asdict(trace), separators=(",", ":")).encode(), compresslevel=9, mtime=0)


@cache
def read_bundled(name: str) -> PackedTrace:
    """One of ``BUNDLED``."""
    file = resources.files("diptych.workload").joinpath("data", f"{name}.json.gz")
    return PackedTrace(**json.loads(gzip.decompress(file.read_bytes())))
