"""Arrays of a step reach a device in one copy, and results come back in one; nothing is overwritten on its way."""

import numpy as np
import pytest
import torch

from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.device.host_copies import ALIGNMENT, BUFFERS, FromDevice, ToDevice
from diptych.runtime.step import cuda_graphs
from diptych.runtime.step.cuda_graphs import MAX_BATCH, SEEN_BEFORE_CAPTURE, GraphedModel
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.request_state import RequestState
from diptych.runtime.step.step_layout import TABLE_COLUMNS, lay_out_decodes
from tests.runtime.driving import greedy
from tests.runtime.fake_device import FakeMemory

BLOCK_SIZE = 4


def arrays_of(seed: int) -> list[np.ndarray]:
    """Arrays of every type, of odd sizes, empty ones and views among them."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 99, (7, 40)).astype(np.int32)
    return [
        rng.integers(0, 9, 5),
        table[2:5, :13],
        rng.random((3, 1)),
        rng.random(7).astype(np.float32),
        np.zeros(0, dtype=np.int64),
        rng.integers(0, 255, (2, 3)).astype(np.uint8),
        rng.random(3) < 0.5,
    ]


def test_arrays_arrive_as_they_are_in_one_copy_and_may_change_at_once() -> None:
    memory = FakeMemory()
    to_device = ToDevice(memory)
    arrived = []
    for seed in range(6):
        arrays = arrays_of(seed)
        copied = to_device.copy(arrays)
        for array in arrays:
            array[...] = 0
        arrived.append(copied)
        assert len(memory.events) == seed + 1
        assert copied.memory is not None
        for tensor, offset in zip(copied.tensors, copied.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            assert not len(tensor) or tensor.data_ptr() == copied.memory.data_ptr() + offset
    for seed, copied in enumerate(arrived):
        for tensor, array in zip(copied.tensors, arrays_of(seed), strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert (tensor.numpy() == array).all()
    assert memory.num_allocations == BUFFERS


def test_page_locked_memory_is_not_written_before_its_last_copy_is_done() -> None:
    memory = FakeMemory()
    to_device = ToDevice(memory)
    for number in range(5):
        to_device.copy([np.arange(number + 1)])
        assert [event.is_waited_for for event in memory.events] == [
            place <= number - BUFFERS for place in range(number + 1)
        ]


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(5)
    copied = ToDevice(None).copy([array])
    assert copied.tensors[0].data_ptr() == array.ctypes.data and copied.packed(1) is None
    tensor = torch.arange(4)
    assert FromDevice(tensor, None).numpy().ctypes.data == tensor.data_ptr()


def test_results_are_read_when_they_are_there() -> None:
    memory = FakeMemory()
    result = FromDevice(torch.tensor([[3, 4], [5, 6]]), memory)
    assert not memory.events[0].is_waited_for
    assert result.numpy().tolist() == [[3, 4], [5, 6]]
    assert memory.events[0].is_waited_for


def decode_rows(lengths: list[int], num_groups: int = 2) -> DecodeRows:
    """A decode batch of sequences of these lengths, in blocks of two groups of layers."""
    batch = DecodeRows(MAX_BATCH, 500, BLOCK_SIZE, num_groups)
    for number, length in enumerate(lengths):
        state = RequestState(f"r{number}", list(range(length)), length, greedy())
        count = -(-length // BLOCK_SIZE)
        tables = tuple(tuple(range(100 * group + number, 100 * group + number + count)) for group in range(num_groups))
        batch.join(state, length - 1, tables)
    return batch


def test_a_decode_step_is_one_copy_with_the_blocks_that_it_needs() -> None:
    memory = FakeMemory()
    batch = decode_rows([3, 90, 14])
    plain = lay_out_decodes(batch, {}, ToDevice(None)).batch
    packed = lay_out_decodes(batch, {}, ToDevice(memory)).batch
    assert len(memory.events) == 1
    for name in ("token_ids", "positions", "query_start", "context_lens", "sample_rows"):
        assert torch.equal(getattr(packed, name), getattr(plain, name))
    assert all(map(torch.equal, packed.slot_mappings, plain.slot_mappings))
    for ours, theirs in zip(packed.block_tables, plain.block_tables, strict=True):
        assert ours.shape == (3, 2 * TABLE_COLUMNS)  # 23 blocks
        assert torch.equal(ours, theirs[:, : 2 * TABLE_COLUMNS])


class RecordedGraph:
    """Stands for a CUDA graph: what was computed while it was recorded is computed again at each replay."""

    recording: "RecordedGraph | None" = None

    def __init__(self) -> None:
        self.replays: list[object] = []

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        for replay in self.replays:
            replay()  # type: ignore[operator]


class Recording:
    """Stands for torch.cuda.graph."""

    def __init__(self, graph: RecordedGraph, pool: object) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        RecordedGraph.recording = self._graph

    def __exit__(self, *_: object) -> None:
        RecordedGraph.recording = None


class SummingModel:
    """A model whose hidden states are sums of everything that a layer reads of a sequence, by its context length."""

    def __init__(self) -> None:
        self.num_calls = 0

    def compute(self, batch: InputBatch) -> torch.Tensor:
        self.num_calls += 1
        blocks = torch.arange(batch.block_tables[0].shape[1])
        is_read = blocks < -(-batch.context_lens[:, None] // BLOCK_SIZE)
        total = batch.token_ids * 3 + batch.positions * 5 + batch.query_start[:-1] + batch.sample_rows
        for group, (slots, table) in enumerate(zip(batch.slot_mappings, batch.block_tables, strict=True)):
            total = total + (group + 2) * (slots + (table * is_read).sum(-1))
        return total

    def forward(self, forward_pass: object) -> torch.Tensor:
        batch = forward_pass.batch  # type: ignore[attr-defined]
        hidden = self.compute(batch)
        if RecordedGraph.recording is not None:
            RecordedGraph.recording.replays.append(lambda: hidden.copy_(self.compute(batch)))
        return hidden


class NoStream:
    """Stands for a stream and its context."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = cuda_graphs.torch.cuda
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(cuda, name, NoStream)
    monkeypatch.setattr(cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(cuda, "graph", Recording)


class Geometry:
    block_size = BLOCK_SIZE


class Attention:
    geometry = Geometry()


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("memory", [None, FakeMemory()])
def test_a_replayed_graph_computes_what_the_model_computes_for_any_context(memory: FakeMemory | None) -> None:
    model, to_device = SummingModel(), ToDevice(memory)
    graphed = GraphedModel(model, Attention(), [], (0, 1), 500)  # type: ignore[arg-type]
    for length in (5, 90, 7, 4, 300, 33, 480, 6):
        batch = lay_out_decodes(decode_rows([length, 3]), {}, to_device).batch
        assert torch.equal(graphed.forward(batch), SummingModel().compute(batch))
    assert list(graphed._captured) == [2]
    assert model.num_calls == SEEN_BEFORE_CAPTURE + 2 + 5  # as they are, twice to capture, and replays


@pytest.mark.usefixtures("fake_graphs")
def test_steps_run_as_they_are_where_a_graph_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph", no_memory)
    graphed = GraphedModel(SummingModel(), Attention(), [], (0, 1), 500)  # type: ignore[arg-type]
    for length in (5, 90, 7, 4, 300, 33):
        batch = lay_out_decodes(decode_rows([length, 3]), {}, ToDevice(None)).batch
        assert torch.equal(graphed.forward(batch), SummingModel().compute(batch))
    assert not graphed._captured
