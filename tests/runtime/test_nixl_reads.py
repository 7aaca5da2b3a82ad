"""What the connector of NIXL asks of NIXL: which memory is read into which, for how long, and what is given back.

NIXL itself is played: an agent that copies memory of this process. Whether the real one does what is asked of it,
test_transfer.py says where it is installed.
"""

import ctypes
import importlib.util
import random
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import diptych
from diptych.control.errors import ConfigError
from diptych.runtime.attention.layout import allocate_cpu
from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.transfer.connector import Committed, TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream.body_format import Part
from diptych.runtime.transfer.stream.frames import ProtocolError
from tests.laws import law

if TYPE_CHECKING:  # it cannot be imported where NIXL is not installed
    from diptych.runtime.transfer.connectors.nixl_connector import NixlReads

LAYERS, BLOCKS = 3, 12
FORMAT = KVFormat("m", LAYERS, 2, 32, "bfloat16", 16, "cpu")
UNIT = FORMAT.bytes_per_layer_block
ERRORS = ("Backend", "Cancelled", "InvalidParam", "Mismatch", "NotAllowed", "NotFound", "NotPosted", "NotSupported",
          "RemoteDisconnect", "RepostActive", "Unknown")  # fmt: skip
BINDING = SimpleNamespace(**{f"nixl{name}Error": type(name, (Exception,), {}) for name in ERRORS})


class Agent:
    """A NIXL agent. looks: the states of a read, the last one for ever; "DONE" copies."""

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.config = name, config
        self.looks = ["DONE"]
        self.registered: Any = None
        self.peers: list[str] = []
        self.num_added = 0
        self.handles: set[int] = set()
        self.read: list[tuple[np.ndarray, np.ndarray, str]] = []
        self.kinds: list[str] = []
        self.error: Exception | None = None

    def register_memory(self, caches: list[torch.Tensor]) -> str:
        self.registered = caches
        return "registered"

    def deregister_memory(self, what: str) -> None:
        assert what == "registered" and self.registered is not None
        self.registered = None

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        if self.error is not None:
            raise self.error
        self.num_added += 1
        self.peers.append(f"peer {metadata.decode()}")
        return self.peers[-1]

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, rows: np.ndarray, mem_type: str) -> np.ndarray:
        assert rows.dtype == np.uint64
        self.kinds.append(mem_type)
        return rows

    def initialize_xfer(self, operation: str, local: np.ndarray, remote: np.ndarray, name: str) -> int:
        assert operation == "READ" and name in self.peers
        self.read.append((local, remote, name))
        self.handles.add(len(self.read))
        self._left = list(self.looks)
        return len(self.read)

    def transfer(self, handle: int) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: int) -> str:
        assert handle in self.handles
        state = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if state == "DONE":
            for (to, size, _), (source, other, _) in zip(*self.read[-1][:2], strict=True):
                assert size == other
                ctypes.memmove(int(to), int(source), int(size))
        return state

    def release_xfer_handle(self, handle: int) -> None:
        self.handles.remove(handle)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The connector's module, with this NIXL below it; no other test sees it."""
    played = ModuleType("nixl_cu13._api")
    played.nixl_agent = Agent  # type: ignore[attr-defined]
    played.nixl_agent_config = lambda **settings: settings  # type: ignore[attr-defined]
    played.nixlBind = BINDING  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl_cu13", ModuleType("nixl_cu13"))
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", played)
    path = Path(diptych.__file__).parent / "runtime/transfer/connectors/nixl_connector.py"
    spec = importlib.util.spec_from_file_location("played_nixl_connector", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def caches(seed: int, kv_format: KVFormat = FORMAT) -> list[LayerCache]:
    layers = [allocate_cpu(BLOCKS, 2, kv_format.block_size, 32, torch.bfloat16) for _ in range(kv_format.num_layers)]
    generator = torch.Generator().manual_seed(seed)
    for cache in (cache for pair in layers for cache in pair):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return layers


Make = Callable[..., "NixlReads"]


@pytest.fixture
def make(module: ModuleType) -> Iterator[Make]:
    made: list[NixlReads] = []

    def reads(seed: int = 0, timeout_s: float = 5.0) -> "NixlReads":
        made.append(module.NixlReads(caches(seed), FORMAT, timeout_s))
        return made[-1]

    yield reads
    for one in made:
        one.close()


def runs_of(*columns: list[int]) -> int:
    """How many stretches these blocks are that neighbour on both sides."""
    steps = zip(*(pairwise(column) for column in columns), strict=True)
    return 1 + sum(any(after - before != 1 for before, after in step) for step in steps)


@law(weight=0.2)
def test_a_part_is_read_from_the_senders_blocks_into_the_receivers_and_nothing_else_changes(
    make: Make, seed: int
) -> None:
    rng = random.Random(seed)
    sender, receiver = make(1), make(2)
    num_blocks = rng.randint(1, 6)
    start = 16 * rng.randrange(num_blocks)
    tokens = rng.randint(1, 16 * num_blocks - start)
    first = rng.randrange(LAYERS)
    part = Part(start, tokens, first, rng.randint(1, LAYERS - first), True)
    tables = [rng.sample(range(BLOCKS), num_blocks) for _ in range(2)]
    if rng.random() < 0.5:
        at = rng.randrange(BLOCKS - num_blocks + 1)
        tables[rng.randrange(2)] = list(range(at, at + num_blocks))
    expected = [cache.clone() for cache in receiver._caches]
    used = range(start // 16, -(-(start + tokens) // 16))
    for at in range(2 * part.first_layer, 2 * (part.first_layer + part.num_layers)):
        for block in used:
            expected[at][tables[1][block]] = sender._caches[at][tables[0][block]]
    pieces = sender.pack(tables[0], part)
    body = memoryview(b"".join(pieces))
    assert receiver.targets(tables[1], part) is None
    assert receiver.accepts(part, len(body))
    receiver.unpack(tables[1], part, body)
    assert all(map(torch.equal, expected, receiver._caches))
    local, _, _ = receiver._agent.read[-1]
    assert sum(int(size) for _, size, _ in local) == receiver.num_bytes(part) == 2 * part.num_layers * len(used) * UNIT
    # neighbours on both sides are read at once; K and V of a layer, and layers, may lie next to each other, too
    ids = [[table[block] for block in used] for table in tables]
    assert len(local) <= 2 * part.num_layers * runs_of(*ids)
    assert all(device == 0 for _, _, device in local) and set(receiver._agent.kinds) == {"DRAM"}
    assert not receiver._agent.handles
    sender.close()
    receiver.close()


def test_a_body_says_how_long_its_metadata_is_how_many_blocks_follow_and_where_they_are(make: Make) -> None:
    sender = make()
    part = Part(16, 20, 1, 2, True)
    head, metadata, addresses = map(bytes, sender.pack([9, 3, 5], part))
    assert head == b"\x10\0\0\0" + b"\x08\0\0\0" + b"\xff\xff\xff\xff"
    assert metadata == sender._agent.name.encode() and len(metadata) == 16
    expected = [sender._caches[at].data_ptr() + block * UNIT for at in (2, 3, 4, 5) for block in (3, 5)]
    assert np.frombuffer(addresses, dtype=np.int64).tolist() == expected
    assert sender.num_bytes(part) == 8 * UNIT
    least = 12 + 64
    assert [sender.accepts(part, least + more) for more in (-1, 0, 16, 1 << 20, (1 << 20) + 1)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert sender._agent.config == {"backends": ["UCX"]}


@pytest.mark.parametrize("num_layers", [1, 5, 8])
@pytest.mark.parametrize("num_blocks", [1, 3, 64, 1000])
def test_parts_are_as_many_layers_as_8_mib_hold_and_at_least_one(
    module: ModuleType, num_layers: int, num_blocks: int
) -> None:
    form = replace(FORMAT, num_layers=num_layers, head_dim=256)  # 32 KiB of K and V for a block of a layer
    reads = module.NixlReads(caches(0), form, 1.0)
    tokens = 16 * num_blocks - 3
    parts = list(reads.parts(48, tokens))
    most = max(1, min(num_layers, (8 << 20) // (num_blocks * (32 << 10))))
    assert [part.num_layers for part in parts[:-1]] == [most] * (len(parts) - 1)
    assert [part.first_layer for part in parts] == list(range(0, num_layers, most))
    assert sum(part.num_layers for part in parts) == num_layers
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {(part.start, part.num_tokens) for part in parts} == {(48, tokens)}


def test_only_blocks_of_the_same_format_are_sent_and_taken(make: Make) -> None:
    reads = make()
    other = replace(FORMAT, block_size=32)
    assert reads.for_sending(FORMAT, 1, None) is reads and reads.for_receiving(16, FORMAT) is reads
    with pytest.raises(ConfigError, match="one format"):
        reads.for_sending(other, 1, None)
    for encoding, form in ((16, other), (15, FORMAT), (0, FORMAT)):
        with pytest.raises(ProtocolError, match=f"encoding {encoding}"):
            reads.for_receiving(encoding, form)


@pytest.mark.parametrize(
    ("table", "start", "why"),
    [([0, 1], 8, "no multiple of 16"), ([0, -1], 0, "from -1 to 0; there are 12"), ([BLOCKS, 0], 0, "from 0 to 12")],
)
def test_blocks_that_are_none_are_not_read(make: Make, table: list[int], start: int, why: str) -> None:
    sender, receiver = make(), make()
    part = Part(start, 17, 0, LAYERS, True)
    with pytest.raises(ProtocolError, match=why):
        sender.pack(table, part)
    with pytest.raises(ProtocolError, match=why):
        receiver.unpack(table, part, memoryview(b"".join(sender.pack([0, BLOCKS - 1], Part(0, 17, 0, LAYERS, True)))))
    assert not receiver._agent.read


@pytest.mark.parametrize("change", [lambda body: body + bytes(8), lambda body: body[:-8], lambda body: body[:-1]])
def test_addresses_that_do_not_fit_their_part_are_not_read(make: Make, change: Callable[[bytes], bytes]) -> None:
    sender, receiver = make(), make()
    part = Part(0, 32, 0, LAYERS, True)
    body = b"".join(sender.pack([0, 1], part))
    with pytest.raises(ProtocolError, match="do not fit"):
        receiver.unpack([0, 1], part, memoryview(change(body)))
    with pytest.raises(ProtocolError, match="do not fit"):  # of fewer tokens
        receiver.unpack([0, 1], Part(0, 16, 0, LAYERS, True), memoryview(body))
    assert not receiver._agent.read


def test_a_peer_is_made_known_once_and_forgotten_at_the_end_with_the_memory(make: Make) -> None:
    one, two, receiver = make(), make(), make()
    part = Part(0, 16, 0, 1, True)
    for sender in (one, two, one, two):
        receiver.unpack([0], part, memoryview(b"".join(sender.pack([3], part))))
    agent = receiver._agent
    names = [name for _, _, name in agent.read]
    assert names == [f"peer {sender._agent.name}" for sender in (one, two, one, two)]
    assert agent.num_added == 2 and sorted(agent.peers) == sorted(set(names))
    assert agent.registered is receiver._caches
    for _ in range(2):  # idempotent
        receiver.close()
        assert agent.peers == [] and agent.registered is None


@pytest.mark.parametrize("name", ERRORS)
def test_each_error_of_nixl_is_one_of_the_connection(make: Make, name: str) -> None:
    sender, receiver = make(), make()
    part = Part(0, 16, 0, 1, True)
    receiver._agent.error = getattr(BINDING, f"nixl{name}Error")("no such place")
    with pytest.raises(ProtocolError, match="no such place"):
        receiver.unpack([0], part, memoryview(b"".join(sender.pack([3], part))))


def test_a_read_is_waited_for_until_its_time_is_over_and_its_handle_is_given_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = make(), make(timeout_s=5.0)
    part = Part(0, 16, 0, 1, True)
    now, slept = [100.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", slept.append)

    def read(step_s: float, *looks: str) -> None:
        receiver._agent.looks = list(looks)
        monkeypatch.setattr("time.sleep", lambda seconds: (slept.append(seconds), now.append(now.pop() + step_s)))
        receiver.unpack([0], part, memoryview(b"".join(sender.pack([3], part))))

    read(2.5, "PROC", "PROC", "DONE")  # 5 s, and no more
    assert torch.equal(receiver._caches[0][0], sender._caches[0][3])
    with pytest.raises(ProtocolError, match="within 5 s"):
        read(2.6, "PROC")
    with pytest.raises(ProtocolError, match="could not read"):
        read(0.0, "PROC", "ERR")
    assert not receiver._agent.handles and len(receiver._agent.read) == 3
    assert slept == [50e-6] * 5


def test_memory_of_a_gpu_is_read_from_its_device_after_what_is_queued_there(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    connector = module.NixlConnector(caches(0), FORMAT, TransferOptions(b"x" * 32))
    try:
        connector.send("unknown", 0, 16, [0])
        assert waited == []
        connector._reads.device = 0
        connector.send("unknown", 0, 16, [0])
        assert waited == [0]
        rows = connector._reads._descriptors(np.array([64]), np.array([5]), 3)
        assert rows.tolist() == [[64, 5, 3]] and connector._reads._agent.kinds[-1] == "VRAM"
        assert connector._reads._descriptors(np.array([64]), np.array([5]), 0).tolist() == [[64, 5, 0]]
        assert connector._reads._agent.kinds[-1] == "VRAM"
    finally:
        connector.close()
    assert connector._reads._agent.registered is None


def test_memory_that_layers_share_is_registered_once(module: ModuleType) -> None:
    first, second, _ = caches(0)
    reads = module.NixlReads([first, second, first], FORMAT, 1.0)
    assert [id(cache) for cache in reads._caches] == [id(cache) for cache in (*first, *second)]
    body = b"".join(reads.pack([3], Part(0, 16, 2, 1, True)))
    assert body[-16:] == b"".join(reads.pack([3], Part(0, 16, 0, 1, True)))[-16:]
    reads.close()


def test_caches_with_gaps_are_refused(module: ModuleType) -> None:
    layers = [(k.transpose(0, 1), v) for k, v in caches(0)]
    with pytest.raises(ConfigError, match="contiguous"):
        module.NixlReads(layers, FORMAT, 1.0)


def test_a_whole_transfer_is_read_and_committed(module: ModuleType) -> None:
    sides = [module.NixlConnector(caches(seed), FORMAT, TransferOptions(b"x" * 32)) for seed in (1, 2)]
    sender, receiver = sides
    try:
        receiver.expect("abc", [4, 2, 7], 0, 40)
        sender.open("abc", receiver.address, 0)
        sender.send("abc", 0, 40, [1, 9, 0])
        sender.commit("abc", b"first")
        events: list[object] = []
        while not any(isinstance(event, Committed) for event in events):
            select.select([receiver], [], [], 30)
            events += receiver.poll()
        assert [event.num_bytes for event in events if isinstance(event, Committed)] == [3 * FORMAT.bytes_per_block]
        for ours, theirs in zip(sender._reads._caches, receiver._reads._caches, strict=True):
            assert torch.equal(ours[[1, 9, 0]], theirs[[4, 2, 7]])
    finally:
        for side in sides:
            side.close()
