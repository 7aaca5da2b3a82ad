"""Workers that map one pool see each other's blocks, and nothing that lay in a block before changes a result."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.control.step import ResumedDecode, SchedulerOutput
from diptych.runtime.device.memory import map_file, populate
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.kv_cache.shared_pool import SharedPool
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.step.warm_up import warm_up
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import generate, greedy
from tests.runtime.kernel_sets import EVERY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")

TOTAL_BLOCKS = 48

PREFILL_WORKER = """
import sys, torch
from diptych.control.request import SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.kv_cache.shared_pool import SharedPool

torch.set_num_threads(1)
model, fd, total_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
block_ids, prompt, chunks = (eval(argument) for argument in sys.argv[4:])
runner = load_runner(RunnerConfig(model, num_blocks=8, shared_pool=SharedPool(fd, total_blocks, 0)))
runner.add_request("r", prompt, SamplingParams(max_tokens=99, temperature=0.0))
start = 0
for count in chunks:
    chunk = ScheduledPrefill("r", start, count, (tuple(block_ids),), start + count == len(prompt))
    result = runner.execute(SchedulerOutput(0, prefills=(chunk,)))
    start += count
print(result.payload.token_ids[0])
"""


@contextmanager
def pool_file(geometry: KVGeometry, total_blocks: int = TOTAL_BLOCKS) -> Iterator[int]:
    """An empty pool's descriptor."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, geometry.pool_bytes(total_blocks))
    yield fd
    os.close(fd)


def load(family: str, fd: int, first_block: int = 16) -> ModelRunner:
    """A worker that owns 20 blocks in the middle of the pool."""
    pool = SharedPool(fd, TOTAL_BLOCKS, first_block)
    return load_runner(RunnerConfig(reference(family).directory, num_blocks=20, shared_pool=pool))


@pytest.mark.system
def test_one_process_prefills_into_the_blocks_of_another_which_decodes_from_them() -> None:
    directory, prompt = reference("qwen2").directory, prompt_of(300)
    alone, _ = generate(runner("qwen2"), prompt, [300], greedy(40))
    with pool_file(read_kv_geometry(directory, "auto", 32)) as fd:
        decoder = load("qwen2", fd)
        block_ids = [35, 16, 20, 33, 18, 19, 30, 31, 29, 22, 24]
        arguments = (directory, fd, TOTAL_BLOCKS, block_ids, prompt, [128, 32, 96, 44])
        command = [sys.executable, "-c", PREFILL_WORKER, *map(str, arguments)]
        first = int(subprocess.run(command, pass_fds=[fd], check=True, capture_output=True, text=True).stdout)
    decoder.add_request("r", prompt, greedy(), output_token_ids=[first])
    plan = SchedulerOutput(0, num_decodes=1, resumed=(ResumedDecode("r", 300, (tuple(block_ids),)),))
    tokens = [first]
    for _ in range(39):
        tokens += decoder.execute(plan).payload.token_ids
        plan = SchedulerOutput(0, num_decodes=1)
    assert tokens == alone


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_whatever_an_earlier_owner_left_in_the_pool_changes_nothing(dtype: str, instruction_set: str) -> None:
    directory, prompt = reference("mistral-window", dtype).directory, prompt_of(121)
    alone, _ = generate(runner("mistral-window", instruction_set, dtype), prompt, [50, 71], greedy(30))
    geometry = read_kv_geometry(directory, dtype, 32)
    with pool_file(geometry) as fd:
        map_file(fd, geometry.pool_bytes(TOTAL_BLOCKS), is_shared=True).fill_(0xFF)  # not a number, in both dtypes
        pool = SharedPool(fd, TOTAL_BLOCKS, 28)
        config = RunnerConfig(directory, dtype, instruction_set=instruction_set, num_blocks=20, shared_pool=pool)
        worker = load_runner(config)
        for k_cache, v_cache in worker.kv.layers:
            assert k_cache.isnan().all() and v_cache.isnan().all()
    tokens, _ = generate(worker, prompt, [50, 71], greedy(30))
    assert tokens == alone


def test_a_worker_touches_no_block_that_is_not_its_own() -> None:
    geometry = read_kv_geometry(reference("llama").directory, "auto", 32)
    with pool_file(geometry) as fd:
        worker = load("llama", fd)
        warm_up(worker, budget_s=0.05)
        generate(worker, prompt_of(90), [90], greedy(8), block_seed=1)
        assert (worker.first_block, worker.num_blocks) == (16, 20)
        for layer in worker.kv.layers:
            for cache in layer:
                assert not cache[:16].any() and not cache[36:].any() and cache[16:36].any()


def test_taking_memory_changes_no_byte_of_it() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 7_000_000)
    ours, theirs = (map_file(fd, 7_000_000, is_shared=True) for _ in range(2))
    os.close(fd)
    ours[1_000_000:5_000_000].random_()
    before = ours.clone()
    populate(theirs, 2_500_000, 7_000_000)
    assert torch.equal(ours, before) and torch.equal(theirs, before)


def test_a_pool_that_does_not_fit_the_model_is_refused() -> None:
    geometry = read_kv_geometry(reference("llama").directory, "auto", 32)
    with pool_file(geometry) as fd:
        with pytest.raises(ConfigError, match="first_block is 30 and num_blocks is 20; the shared pool has 48 blocks"):
            load("llama", fd, first_block=30)
        os.ftruncate(fd, 4096)
        with pytest.raises(ConfigError, match="the shared pool has 4096 bytes; 48 blocks"):
            load("llama", fd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_geometry_of_a_checkpoint_is_that_of_its_runner(dtype: str) -> None:
    directory = reference("mistral-window", dtype).directory
    worker = runner("mistral-window", dtype=dtype)
    geometry = read_kv_geometry(directory, "auto", 32)
    assert geometry == worker.attention.geometry
    assert worker.num_blocks * geometry.block_bytes == sum(
        cache.nbytes for layer in worker.kv.layers for cache in layer
    )


def test_the_front_end_needs_no_torch_to_size_and_to_make_a_pool() -> None:
    program = (
        "import os, sys\n"
        "from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry\n"
        "from diptych.serving.fleet.shared_memory import create_shared_memory\n"
        "geometry = read_kv_geometry(sys.argv[1], 'auto', 32)\n"
        "memory = create_shared_memory(geometry, [10, 20, 7])\n"
        "assert memory.first_blocks == (0, 10, 30) and memory.total_blocks == 37\n"
        "assert os.fstat(memory.pool_fd).st_size == geometry.pool_bytes(37)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "memory.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, reference("llama").directory], check=True)
