"""A prompt computed in one runner and answered by another, whose KV leaves while later layers are computed."""

import select
from collections.abc import Iterator, Sequence

import pytest
import torch

from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput
from diptych.runtime.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.transfer import make_connector
from diptych.runtime.transfer.connector import (
    ChunkArrived,
    Committed,
    KVConnector,
    KVFormat,
    TransferEvent,
    TransferOptions,
)
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import chunks_of, generate, greedy

FAMILY = "qwen2-window"
LENGTH = 200


def connector_of(one: ModelRunner) -> KVConnector:
    """Each of its frames holds one block of one layer."""
    geometry = one.attention.geometry
    size = "m", geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    options = TransferOptions(bytes(32), frame_bytes=1)
    return make_connector("tcp", one.kv.layers, KVFormat(*size, "float32", one.block_size, "cpu"), options)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[ModelRunner, KVConnector, ModelRunner, KVConnector]]:
    """A prefill worker and a decode worker, each a runner and its connector."""
    mine, theirs = runner(FAMILY), load_runner(RunnerConfig(reference(FAMILY).directory, num_blocks=30))
    sender, receiver = connector_of(mine), connector_of(theirs)
    yield mine, sender, theirs, receiver
    sender.close()
    receiver.close()


def prefill(one: ModelRunner, connector: KVConnector, attempt: str, blocks: Sequence[int], chunk_tokens: int) -> int:
    """Compute the prompt of an attempt in chunks, and send whole blocks of each as its layers are done. The first
    token."""
    start = sent = 0
    for number in chunks_of(LENGTH, chunk_tokens):
        is_last = start + number == LENGTH
        count = start + number - sent
        count -= 0 if is_last else count % one.block_size

        def on_layer(num_layers: int, sent: int = sent, count: int = count) -> None:
            if num_layers:
                connector.send(attempt, sent, count, blocks, num_layers)

        one.on_layer = on_layer
        chunk = ScheduledPrefill(attempt, start, number, tuple(blocks), is_last)
        tokens = one.execute(SchedulerOutput(0, prefills=(chunk,))).payload.token_ids
        one.on_layer = None
        connector.send(attempt, sent, count, blocks)
        start, sent = start + number, sent + count
    connector.commit(attempt, b"")
    return int(tokens[0])


@pytest.mark.parametrize("chunk_tokens", [40, 96, 110, LENGTH])
def test_the_answer_is_that_of_one_runner(
    workers: tuple[ModelRunner, KVConnector, ModelRunner, KVConnector], chunk_tokens: int
) -> None:
    mine, sender, theirs, receiver = workers
    attempt, prompt, sampling = f"chunks of {chunk_tokens}", prompt_of(LENGTH), greedy(8)
    expected, _ = generate(mine, prompt, chunks_of(LENGTH, chunk_tokens), sampling)
    full = LENGTH // mine.block_size
    receiver.expect(attempt, range(10, 10 + full + 1), 0, LENGTH)
    sender.open(attempt, receiver.address, 0)
    mine.add_request(attempt, prompt, sampling)
    first = prefill(mine, sender, attempt, range(20, 20 + full + 1), chunk_tokens)
    mine.execute(SchedulerOutput(0, finished=(attempt,)))
    happened: list[TransferEvent] = []
    while not happened or isinstance(happened[-1], ChunkArrived):
        select.select([receiver], [], [], 30)
        happened += receiver.poll()
    assert isinstance(happened[-1], Committed)
    for ours, there in zip(mine.kv.layers, theirs.kv.layers, strict=True):
        for computed, arrived in zip(ours, there, strict=True):
            assert torch.equal(computed[20 : 20 + full], arrived[10 : 10 + full])
    theirs.add_request(attempt, prompt, sampling, output_token_ids=[first])
    resumed = (ResumedDecode(attempt, LENGTH, tuple(range(10, 10 + full + 1))),)
    tokens = [first, *theirs.execute(SchedulerOutput(0, num_decodes=1, resumed=resumed)).payload.token_ids]
    while len(tokens) < len(expected):
        tokens += theirs.execute(SchedulerOutput(0, num_decodes=1)).payload.token_ids
    theirs.execute(SchedulerOutput(0, finished=(attempt,)))
    assert tokens == expected
