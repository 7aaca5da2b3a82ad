"""Green contexts by a fake: the order of CUDA's calls, and what is refused. Then on a GPU, where there is one."""

import pytest
import torch

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError
from diptych.runtime.device.multiprocessors import SMALLEST, Multiprocessors, multiprocessors_of


class FakeContexts:
    """What the driver was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def create(self, count: int) -> "FakeContext":
        if count == 40:
            raise RuntimeError("the driver has no room\nand a stack trace")
        self.log.append(f"create {count}")
        return FakeContext(count, self.log)


class FakeContext:
    def __init__(self, count: int, log: list[str]) -> None:
        self._count = count
        self._log = log

    def set_context(self) -> None:
        self._log.append(f"set {self._count}")

    def pop_context(self) -> None:
        self._log.append(f"pop {self._count}")


def on(count: int) -> ComputeShare:
    return ComputeShare(num_sms=count)


def test_a_worker_leaves_its_green_context_before_it_enters_the_next_and_captures_its_graphs_again() -> None:
    fake = FakeContexts()
    units = Multiprocessors(132, fake.create, lambda: fake.log.append("forget graphs"))
    assert (units.share, units.num_units) == (on(132), 132)
    units.resize(on(64))
    units.resize(on(96))
    assert (units.share, units.num_units) == (on(96), 96)
    units.resize(on(132))  # the whole GPU needs no green context
    assert fake.log == [
        *("create 64", "set 64", "forget graphs"),
        *("create 96", "pop 64", "set 96", "forget graphs"),
        *("pop 96", "forget graphs"),
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (133, "num_sms is 133; between 8 and 132"),
        (0, "num_sms is 0; between 8"),
        (40, "num_sms is 40: the driver has no room"),
    ],
)
def test_a_share_that_the_gpu_does_not_have_changes_nothing(count: int, words: str) -> None:
    fake = FakeContexts()
    units = Multiprocessors(132, fake.create, lambda: fake.log.append("forget graphs"))
    units.resize(on(64))
    before = list(fake.log)
    with pytest.raises(ConfigError, match=words) as refused:
        units.resize(on(count))
    assert "stack trace" not in refused.value.message
    assert fake.log == before and units.share == on(64)


def test_a_gpu_without_green_contexts_says_so_and_shows_no_share() -> None:
    units = Multiprocessors(132, None, lambda: None)
    assert units.share == ComputeShare() and units.num_units == 132
    with pytest.raises(ConfigError, match="no CUDA green contexts"):
        units.resize(on(64))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_answers_on_half_of_its_multiprocessors() -> None:
    units = multiprocessors_of(torch.device("cuda"), lambda: None)
    if not units.share.num_sms:
        pytest.skip("PyTorch or the driver has no green contexts")
    total = units.num_units
    first, second = torch.randn(2, 4096, 4096, device="cuda", dtype=torch.bfloat16)
    expected = first @ second
    for count in (total // 2 // SMALLEST * SMALLEST, SMALLEST, total):
        units.resize(on(count))
        torch.testing.assert_close(first @ second, expected, rtol=2e-2, atol=2e-2)
        torch.cuda.synchronize()
