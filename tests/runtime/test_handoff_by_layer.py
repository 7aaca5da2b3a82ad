"""A prompt computed in one runner and answered by another, whose KV leaves while later layers are computed."""

from collections.abc import Iterator

import pytest
import torch

from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.transfer import make_connector
from diptych.runtime.transfer.connector import TransferOptions
from diptych.runtime.transfer.kv_format import KVFormat
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import ConnectedRunner, chunks_of, generate, greedy, hand_off

FAMILY = "qwen2-window"
LENGTH = 200


def connected(model_runner: ModelRunner) -> ConnectedRunner:
    """Each frame of its connector holds one block of one layer."""
    geometry, layers = model_runner.attention.geometry, model_runner.kv.layers
    kv_format = KVFormat(
        "m", len(layers), geometry.num_kv_heads, geometry.head_dim, geometry.dtype, geometry.block_size, "cpu"
    )
    options = TransferOptions(bytes(32), frame_bytes=1)
    return ConnectedRunner(model_runner, make_connector("tcp", layers, kv_format, options))


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[ConnectedRunner, ConnectedRunner]]:
    """A prefill worker and a decode worker."""
    prefill = connected(runner(FAMILY))
    decode = connected(load_runner(RunnerConfig(reference(FAMILY).directory, num_blocks=30)))
    yield prefill, decode
    prefill.connector.close()
    decode.connector.close()


@pytest.mark.parametrize("chunk_tokens", [40, 96, 110, LENGTH])
def test_the_answer_is_that_of_one_runner(workers: tuple[ConnectedRunner, ConnectedRunner], chunk_tokens: int) -> None:
    prefill, decode = workers
    prompt, sampling = prompt_of(LENGTH), greedy(8)
    expected, _ = generate(prefill.runner, prompt, chunks_of(LENGTH, chunk_tokens), sampling)
    assert hand_off(prefill, decode, f"chunks of {chunk_tokens}", prompt, sampling, chunk_tokens) == expected
    num_full = LENGTH // prefill.runner.block_size
    for sent, received in zip(prefill.runner.kv.layers, decode.runner.kv.layers, strict=True):
        for computed, arrived in zip(sent, received, strict=True):
            assert torch.equal(computed[20 : 20 + num_full], arrived[10 : 10 + num_full])
