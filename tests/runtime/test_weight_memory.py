"""Private memory for weights: aligned pieces of slabs that never overlap, and large tensors apart."""

import pytest
import torch

from diptych.runtime.weights import weight_memory
from diptych.runtime.weights.weight_memory import ALIGNMENT, PrivateMemory

SLAB_BYTES = 1 << 20  # 64 times smaller than usual, to be written sooner


def test_weights_lie_side_by_side_and_keep_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "SLAB_BYTES", SLAB_BYTES)
    memory = PrivateMemory(torch.device("cpu"))
    shapes = [(3, 5), (SLAB_BYTES // 8, 1), (7,), (SLAB_BYTES // 2, 3), (100, 101), (0, 4), (11,)] * 3
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    tensors = []
    for number, shape in enumerate(shapes):
        tensor = memory.new(shape, dtypes[number % 3], lambda one, value=number: one.fill_(value))
        assert tensor.shape == shape and tensor.dtype == dtypes[number % 3] and tensor.is_contiguous()
        tensors.append(tensor)
    assert all(one.data_ptr() % ALIGNMENT == 0 for one in tensors if one.numel())
    assert all(bool((one == number).all()) for number, one in enumerate(tensors))
    small = [one for one in tensors[:3] if one.nbytes < SLAB_BYTES // 4]
    assert small[1].data_ptr() - small[0].data_ptr() < SLAB_BYTES
