"""What needs a GPU. Skipped where there is none; the gathering path is checked on the CPU."""

import pytest
import torch

from diptych.runtime.attention import make_attention
from diptych.runtime.attention.cuda_attention import CudaAttention
from tests.runtime.test_attention import Sequences, Shape

SHAPE = Shape(8, 2, 64, 32, "bfloat16")
CHUNKS = [(0, 299, 1), (1, 50, 1), (2, 100, 400), (3, 0, 33)]


@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize("window", [None, 64])
def test_the_gathering_path_equals_the_cpu_backend(window: int | None, softcap: float | None) -> None:
    how, reference = SHAPE.how(window, softcap), SHAPE.backend()
    gathering = CudaAttention(reference.geometry, (how,), torch.device("cpu"), paged=None)
    assert not gathering.fits_cuda_graphs
    sequences = Sequences(SHAPE, [300, 60, 500, 33])
    ours, theirs = sequences.attend(gathering, CHUNKS, how), sequences.attend(reference, CHUNKS, how)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 64])
def test_cuda_attention_equals_the_cpu(window: int | None) -> None:
    how = SHAPE.how(window)
    sequences = Sequences(SHAPE, [300, 60, 500, 33])
    theirs = sequences.attend(SHAPE.backend(), CHUNKS, how)
    with torch.device("cuda"):
        sequences.q = [q.cuda() for q in sequences.q]
        sequences.k, sequences.v = [k.cuda() for k in sequences.k], [v.cuda() for v in sequences.v]
        backend = make_attention(SHAPE.config(how), SHAPE.block_size, SHAPE.dtype, torch.device("cuda"))
        ours = sequences.attend(backend, CHUNKS, how)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=2e-2)
