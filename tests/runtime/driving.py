"""Drives ModelRunners with plans made by hand: one request, any chunks, any blocks; and handoffs between two."""

import random
import select
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.engine.worker_core import ChunkArrived
from diptych.control.request import SamplingParams
from diptych.control.step import ResumedDecode, ScheduledPrefill, SchedulerOutput, StepResult
from diptych.runtime.step.model_runner import ModelRunner
from diptych.runtime.transfer.connector import Committed, ConnectorEvent, KVConnector


def greedy(max_tokens: int = 64, **changes: object) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def chunks_of(length: int, size: int) -> list[int]:
    """A prompt's chunks of at most this size."""
    return [min(size, length - start) for start in range(0, length, size)]


def generate(
    runner: ModelRunner,
    prompt: Sequence[int],
    chunks: Sequence[int],
    sampling: SamplingParams,
    *,
    block_seed: int = 0,
    request_id: str = "r",
) -> tuple[list[int], list[StepResult]]:
    """Prefill in these chunks, then decode to max_tokens, in blocks scattered over the whole cache."""
    size = runner.block_size
    needed = -(-(len(prompt) + sampling.max_tokens) // size)
    blocks = random.Random(block_seed).sample(range(runner.first_block, runner.first_block + runner.num_blocks), needed)
    runner.add_request(request_id, prompt, sampling)
    held = -(-len(prompt) // size)
    results, tokens, start = [], [], 0
    for number in chunks:
        is_last = start + number == len(prompt)
        chunk = ScheduledPrefill(request_id, start, number, (tuple(blocks[:held]),), is_last)
        results.append(runner.execute(SchedulerOutput(len(results), prefills=(chunk,))))
        start += number
    tokens += results[-1].payload.token_ids
    while len(tokens) < sampling.max_tokens:
        new_blocks = []
        if len(prompt) + len(tokens) > held * size:
            new_blocks = [(request_id, 0, blocks[held])]
            held += 1
        results.append(runner.execute(SchedulerOutput(len(results), num_decodes=1, new_blocks=tuple(new_blocks))))
        tokens += results[-1].payload.token_ids
    runner.execute(SchedulerOutput(len(results), finished=(request_id,)))
    assert runner.num_requests == 0
    return tokens, results


@dataclass(frozen=True)
class ConnectedRunner:
    """A worker without its loop."""

    runner: ModelRunner
    connector: KVConnector


def hand_off(
    prefill: ConnectedRunner,
    decode: ConnectedRunner,
    attempt_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    chunk_tokens: int,
) -> list[int]:
    """Compute the prompt on one runner, in blocks from 20 on, and the answer on the other, in blocks from 10 on."""
    num_blocks = -(-len(prompt) // prefill.runner.block_size)
    sent, received = range(20, 20 + num_blocks), range(10, 10 + num_blocks)
    decode.connector.expect(attempt_id, received, 0, len(prompt))
    prefill.connector.open(attempt_id, decode.connector.address, 0)
    prefill.runner.add_request(attempt_id, prompt, sampling)
    tokens = [compute_and_send(prefill, attempt_id, len(prompt), sent, chunk_tokens)]
    prefill.runner.execute(SchedulerOutput(0, finished=(attempt_id,)))
    happened: list[ConnectorEvent] = []
    while not happened or isinstance(happened[-1], ChunkArrived):
        select.select([decode.connector], [], [], 30)
        happened += decode.connector.poll()
    assert isinstance(happened[-1], Committed), happened
    decode.runner.add_request(attempt_id, prompt, sampling, output_token_ids=tokens)
    resumed: tuple[ResumedDecode, ...] = (ResumedDecode(attempt_id, len(prompt), (tuple(received),)),)
    while len(tokens) < sampling.max_tokens:
        tokens += decode.runner.execute(SchedulerOutput(0, num_decodes=1, resumed=resumed)).payload.token_ids
        resumed = ()
    decode.runner.execute(SchedulerOutput(0, finished=(attempt_id,)))
    return tokens


def compute_and_send(
    worker: ConnectedRunner, attempt_id: str, num_tokens: int, blocks: Sequence[int], chunk_tokens: int
) -> int:
    """Compute a prompt in chunks, and send whole blocks of each as its layers are done; commit. The first token."""
    start = sent = 0
    for number in chunks_of(num_tokens, chunk_tokens):
        is_last = start + number == num_tokens
        count = start + number - sent
        count -= 0 if is_last else count % worker.runner.block_size

        def on_layer(num_layers: int, sent: int = sent, count: int = count) -> None:
            if num_layers:
                worker.connector.send(attempt_id, sent, count, blocks, num_layers)

        worker.runner.on_layer = on_layer
        chunk = ScheduledPrefill(attempt_id, start, number, (tuple(blocks),), is_last)
        tokens = worker.runner.execute(SchedulerOutput(0, prefills=(chunk,))).payload.token_ids
        worker.runner.on_layer = None
        worker.connector.send(attempt_id, sent, count, blocks)
        start, sent = start + number, sent + count
    worker.connector.commit(attempt_id, b"")
    return int(tokens[0])
