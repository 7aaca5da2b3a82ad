"""Shared weights are the same weights, bit for bit, whoever wrote them and however often that had to be tried."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.runtime.kernels.instruction_set import TORCH, available
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import generate, greedy
from tests.runtime.kernel_sets import EVERY, FLOAT32

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on linux only")

WORKER = """
import os, signal, sys, torch
from diptych.runtime.step.model_runner import RunnerConfig, load_runner

def progress(done, total):
    if sys.argv[3] == "dies" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
runner = load_runner(RunnerConfig(sys.argv[1], num_blocks=4, shared_weights=int(sys.argv[2])), progress)
assert runner.loaded.note == "" and sys.argv[3] == "lives"
"""


@pytest.fixture
def weights_fd() -> Iterator[int]:
    """An empty file for weights, as the front end makes it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def load(directory: Path, fd: int, **changes: object) -> tuple[ModelRunner, list[int]]:
    """A runner over the shared weights, and how many bytes of the checkpoint it had read at each progress report."""
    seen: list[int] = []
    config = RunnerConfig(directory, num_blocks=32, shared_weights=fd, **changes)
    return load_runner(config, lambda done, total: seen.append(done)), seen


def logits(worker: ModelRunner) -> torch.Tensor:
    """Logits of one row of hidden states."""
    hidden = torch.linspace(-1, 1, worker.model_config.hidden_size)[None].to(worker.attention.dtype)
    return worker.model.logits(hidden)


FASTEST = [("float32", FLOAT32[0]), ("bfloat16", available(torch.bfloat16)[0])]


@pytest.mark.parametrize(
    ("family", "dtype", "instruction_set"),
    [
        *(("llama-tied-biased", *kernels) for kernels in EVERY),
        *((family, *kernels) for family in ("mistral-window", "qwen2", "qwen3") for kernels in FASTEST),
    ],
)
def test_writer_and_reader_compute_what_a_private_copy_does(
    family: str, dtype: str, instruction_set: str, weights_fd: int
) -> None:
    prompt = prompt_of(60)
    private = runner(family, instruction_set, dtype)
    expected, _ = generate(private, prompt, [60], greedy(12))
    directory = reference(family, dtype).directory
    (writer, written), (reader, read) = (load(directory, weights_fd, instruction_set=instruction_set) for _ in range(2))
    assert len(written) > 5 and len(read) == 1
    for worker in (writer, reader):
        assert generate(worker, prompt, [60], greedy(12))[0] == expected
        assert torch.equal(logits(worker), logits(private))
        assert worker.loaded.note == ""


@pytest.mark.system
def test_a_writer_that_dies_half_way_is_followed_by_one_of_those_who_wait(weights_fd: int) -> None:
    directory = reference("qwen2").directory
    command = [sys.executable, "-c", WORKER, str(directory), str(weights_fd)]
    dying = subprocess.run([*command, "dies"], pass_fds=[weights_fd], check=False)
    assert dying.returncode == -signal.SIGKILL and os.fstat(weights_fd).st_size > 0
    others = [subprocess.Popen([*command, "lives"], pass_fds=[weights_fd]) for _ in range(2)]
    assert [other.wait() for other in others] == [0, 0]
    late, read = load(directory, weights_fd)
    assert len(read) == 1 and torch.equal(logits(late), logits(runner("qwen2")))


def test_weights_of_another_kind_are_left_alone(tmp_path: Path, weights_fd: int) -> None:
    directory = reference("qwen2").directory
    load(directory, weights_fd)
    before = os.fstat(weights_fd).st_size
    shutil.copytree(directory, tmp_path / "copy")
    others = [load(directory, weights_fd, dtype="bfloat16"), load(tmp_path / "copy", weights_fd)]
    if FLOAT32[0] != TORCH:
        others.append(load(directory, weights_fd, instruction_set=TORCH))  # packed for other kernels
    for worker, read in others:
        assert worker.loaded.note == "the shared weights are those of another model or dtype: loaded its own"
        assert len(read) > 5
    assert os.fstat(weights_fd).st_size == before
    again, read = load(directory, weights_fd)
    assert len(read) == 1 and torch.equal(logits(again), logits(runner("qwen2")))


def test_no_process_can_change_the_shared_weights(weights_fd: int) -> None:
    directory = reference("qwen2").directory
    careless, _ = load(directory, weights_fd)
    with pytest.raises(PermissionError):
        os.pwrite(weights_fd, b"x", 8192)
    careless.model.embed_tokens.weight.zero_()  # its own copy of the pages from here on
    careful, _ = load(directory, weights_fd)
    assert torch.equal(careful.model.embed_tokens.weight, runner("qwen2").model.embed_tokens.weight)
