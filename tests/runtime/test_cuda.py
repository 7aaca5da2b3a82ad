"""What needs a GPU. Skipped where there is none; the gathering path is checked on the CPU."""

import pytest
import torch

from diptych.runtime.attention.attention_backend import AttentionShape
from diptych.runtime.attention.cuda_attention import CudaAttention
from diptych.runtime.attention.torch_attention import TorchCpuAttention
from tests.runtime.test_attention import Sequences

CHUNKS = [(0, 299, 1), (1, 50, 1), (2, 100, 400), (3, 0, 33)]


@pytest.mark.parametrize("window", [None, 64])
def test_the_gathering_path_equals_the_cpu_backend(window: int | None) -> None:
    shape = AttentionShape(8, 2, 64, 32, torch.bfloat16, 0.125)
    gathering = CudaAttention(shape, torch.device("cpu"))
    gathering._paged = None
    sequences = Sequences(shape, [300, 60, 500, 33])
    ours, theirs = (
        sequences.attend(gathering, CHUNKS, window),
        sequences.attend(TorchCpuAttention(shape), CHUNKS, window),
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 64])
def test_cuda_attention_equals_the_cpu(window: int | None) -> None:
    shape = AttentionShape(8, 2, 64, 32, torch.bfloat16, 0.125)
    sequences = Sequences(shape, [300, 60, 500, 33])
    theirs = sequences.attend(TorchCpuAttention(shape), CHUNKS, window)
    with torch.device("cuda"):
        sequences.q = [q.cuda() for q in sequences.q]
        sequences.k, sequences.v = [k.cuda() for k in sequences.k], [v.cuda() for v in sequences.v]
        ours = sequences.attend(CudaAttention(shape, torch.device("cuda")), CHUNKS, window)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=2e-2)
