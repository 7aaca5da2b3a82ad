"""Large CPU memory: where it begins, and that all of it is there before it is written."""

import os

import pytest
import torch

from diptych.runtime.device.memory import map_file, populate_beside, zero_pages
from diptych.runtime.kv_cache.kv_geometry import HUGE_PAGE_BYTES

SIZE = 5_000_000


@pytest.mark.parametrize("num_bytes", [0, 1, SIZE])
def test_zero_pages_begin_at_a_huge_page(num_bytes: int) -> None:
    memory = zero_pages(num_bytes)
    assert len(memory) == num_bytes and not memory.any()
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0


def test_memory_that_is_taken_beside_other_work_keeps_what_is_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.runtime.device.memory.POPULATE_BYTES", 1 << 20)
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    try:
        for region in (map_file(fd, SIZE, is_shared=True), zero_pages(SIZE)):
            thread = populate_beside(region)
            content = torch.randint(256, (SIZE,), dtype=torch.uint8)
            region[:] = content
            assert thread is not None
            thread.join()
            assert torch.equal(region, content)
        assert os.fstat(fd).st_blocks * 512 >= SIZE
    finally:
        os.close(fd)


def test_nothing_is_taken_of_nothing() -> None:
    assert populate_beside(zero_pages(0)) is None
