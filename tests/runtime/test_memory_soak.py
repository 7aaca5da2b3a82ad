"""A worker that meets prompts of ever new lengths takes no more memory for them, with any instruction set."""

import gc
import random
import sys

import pytest

from diptych.runtime.kernels.instruction_set import AMX_EMULATED
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.serving.link.engine_options import BUNDLED_MODEL
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import EVERY

psutil = pytest.importorskip("psutil")
MIB = 2**20
FAST = [kernels for kernels in EVERY if kernels[1] != AMX_EMULATED]  # which would take minutes
# What allocators may hold back (24 MiB were seen, beside other tests); code that is kept for each of 105 lengths takes
# 1 to 3 MiB a length.
ALLOWED_BYTES = 48 * MIB


def soak(dtype: str, instruction_set: str, num_lengths: int, longest: int) -> int:
    """Bytes by which this process grows while three quarters of the lengths are served, after the first quarter."""
    config = RunnerConfig(BUNDLED_MODEL, dtype, instruction_set=instruction_set, num_blocks=-(-longest // 32) + 4)
    runner = load_runner(config)
    engine = GatheringEngine(runner, engine_config(runner, enable_prefix_cache=False))
    rng = random.Random(0)
    lengths = rng.sample(range(2, longest), num_lengths)
    before = 0
    for number, length in enumerate(lengths):
        if number == num_lengths // 4:
            gc.collect()
            before = psutil.Process().memory_info().rss
        engine.add(str(number), [rng.randrange(4096) for _ in range(length)], greedy(2, ignore_eos=True))
        engine.run()
    gc.collect()
    return int(psutil.Process().memory_info().rss - before)


@pytest.mark.system  # it fills the memory of this process
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured on linux")
@pytest.mark.parametrize(("dtype", "instruction_set"), FAST)
def test_a_hundred_new_prompt_lengths_take_no_memory(dtype: str, instruction_set: str) -> None:
    grown = soak(dtype, instruction_set, num_lengths=140, longest=200)
    assert grown < ALLOWED_BYTES, f"grew by {grown / MIB:.1f} MiB"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured on linux")
@pytest.mark.parametrize(("dtype", "instruction_set"), FAST)
def test_hundreds_of_new_prompt_lengths_take_no_memory(dtype: str, instruction_set: str) -> None:
    grown = soak(dtype, instruction_set, num_lengths=500, longest=1200)
    assert grown < ALLOWED_BYTES, f"grew by {grown / MIB:.1f} MiB"
