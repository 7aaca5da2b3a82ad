"""Handoffs between real worker processes with a small random model: the tokens of one engine, over each transport."""

import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.gathering_engine import GatheringEngine, GeneratedTokens
from worker_peers import Attempt, Peer, ProcessPeer, ThreadPeer, attempt, hand_off

from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import HandoffDelivered, HandoffReleased, RequestAdmitted
from diptych.control.request import FinishReason
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.kv_cache.shared_pool import SharedPool
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.serving.fleet.private_directory import private_directory
from diptych.serving.fleet.shared_memory import create_shared_memory
from diptych.serving.link.engine_options import (
    DeviceOptions,
    EngineOptions,
    MemoryOptions,
    PoolShare,
    WorkerPlace,
)
from diptych.serving.link.heartbeat import FILE_NAME, read_pulse
from diptych.serving.worker.load_engine import connect_peers

pytestmark = pytest.mark.system
NUM_BLOCKS, BLOCK_SIZE = 96, 32
SCHEDULER = SchedulerConfig(order="fcfs", budget=BudgetConfig(kind="fixed", max_batched_tokens=64), max_num_seqs=16)

Pair = tuple[Peer, Peer, bool]  # prefill, decode, whether blocks are borrowed


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """A prefill worker and a decode worker that share a pool, and two that send. One of each pair runs in this process,
    to spare the other tests the time: torch is slow to load."""
    model = str(reference("llama").directory)
    geometry = read_kv_geometry(model, "auto", BLOCK_SIZE)
    memory = create_shared_memory(geometry, [NUM_BLOCKS, NUM_BLOCKS])
    options = EngineOptions(
        model=model,
        device=DeviceOptions(device="cpu", threads=1),
        memory=MemoryOptions(block_size=BLOCK_SIZE, kv_cache_bytes=NUM_BLOCKS * geometry.block_bytes),
        scheduler=SCHEDULER,
        warm_up=False,
    )
    secret = secrets.token_bytes(32)

    def at(number: int, transfer: str) -> EngineOptions:
        place = WorkerPlace(number=number, transfer=transfer, secret=secret)
        if transfer == "shared_memory":
            total, first = memory.total_blocks, memory.first_blocks[number]
            share = PoolShare(fd=memory.pool_fd, total_blocks=total, first_block=first, num_blocks=NUM_BLOCKS)
            place = msgspec.structs.replace(place, pool=share, weights_fd=memory.weights_fd)
        return msgspec.structs.replace(options, place=place)

    with ExitStack() as stack:
        stack.callback(memory.close)
        sharing = ProcessPeer(at(1, "shared_memory"), memory.fds)
        stack.callback(sharing.close)
        sending = ProcessPeer(at(0, "tcp"))
        stack.callback(sending.close)
        directory = private_directory()
        stack.callback(shutil.rmtree, directory)
        workers = {
            "shared_memory": (thread_peer(at(0, "shared_memory"), directory), sharing, True),
            "tcp": (sending, thread_peer(at(1, "tcp"), directory), False),
        }
        mine = [peer for pair in workers.values() for peer in pair[:2] if isinstance(peer, ThreadPeer)]
        for peer in mine:
            stack.callback(peer.close)
        yield workers
        for peer in mine:
            peer.stop()
            peer.check_empty()


def thread_peer(options: EngineOptions, directory: Path) -> ThreadPeer:
    """What a worker process would be, on a thread."""
    assert options.place is not None
    share = options.place.pool
    pool = SharedPool(share.fd, share.total_blocks, share.first_block) if share else None
    config = RunnerConfig(options.model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, shared_pool=pool)
    model_runner = load_runner(config)
    connector = connect_peers(options, model_runner, directory)
    assert connector is not None
    return ThreadPeer(EngineCore(engine_config(model_runner, SCHEDULER)), model_runner, connector)


@pytest.fixture(params=["shared_memory", "tcp"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    """One of them, ready."""
    prefill, decode, borrowed = pairs[request.param]
    for peer in (prefill, decode):
        if isinstance(peer, ProcessPeer):
            assert peer.ready().num_blocks == NUM_BLOCKS
            assert peer.ready().address == peer.address
    return prefill, decode, borrowed


def alone(requests: list[Attempt]) -> dict[str, GeneratedTokens]:
    """What one engine answers."""
    engine_runner = runner("llama")
    engine = GatheringEngine(engine_runner, engine_config(engine_runner, SCHEDULER))
    for request in requests:
        engine.add(request.attempt_id, request.prompt, request.sampling)
    return engine.run()


def serve(pair: Pair, requests: list[Attempt]) -> dict[str, list[int]]:
    """All of them handed off, one behind the other, then run together."""
    prefill, decode, borrowed = pair
    names = [request.attempt_id for request in requests]
    for request in requests:
        hand_off(prefill, decode, request, borrowed=borrowed)
    for name in names:
        delivered = decode.wait_event(HandoffDelivered, name)
        assert (delivered.num_bytes == 0) == borrowed
        prefill.until(lambda name=name: name in prefill.tokens)
        assert prefill.tokens[name] == [decode.first_tokens[name][0]]
        prefill.release(name)
        prefill.wait_event(HandoffReleased, name)
    for name in names:
        assert decode.wait_end(name).reason is FinishReason.LENGTH
    return {name: prefill.tokens[name] + decode.tokens[name] for name in names}


def test_the_tokens_are_those_of_one_engine_and_the_answer_is_found_again(pair: Pair) -> None:
    requests = [attempt(f"a{length}", prompt_of(length), max_tokens=70) for length in (31, 64, 200, 333)]
    requests.append(
        attempt("a95", prompt_of(95), max_tokens=40, temperature=0.9, seed=7, repetition_penalty=1.2, min_tokens=5)
    )
    expected, got = alone(requests), serve(pair, requests)
    for request in requests:
        assert got[request.attempt_id] == expected[request.attempt_id].token_ids, request.attempt_id
    follow_ups = []
    for request in requests:
        prompt = request.prompt + got[request.attempt_id] + prompt_of(9)
        follow_ups.append(attempt(f"b{request.attempt_id}", prompt, max_tokens=8))
    expected, got = alone(follow_ups), serve(pair, follow_ups)
    decode = pair[1]
    for request in follow_ups:
        assert got[request.attempt_id] == expected[request.attempt_id].token_ids, request.attempt_id
        computed = (len(request.prompt) - 9 - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert decode.finished[request.attempt_id].num_cached_tokens == computed


def test_attempts_dropped_at_any_moment_leave_the_others_as_they_are(pair: Pair) -> None:
    prefill, decode, borrowed = pair
    name = "shm" if borrowed else "tcp"
    rng = random.Random(3)
    kept = [attempt(f"{name}-kept{number}", prompt_of(150, number), max_tokens=30) for number in range(3)]
    expected = alone(kept)
    dropped = [attempt(f"{name}-gone{number}", prompt_of(1200, 10 + number)) for number in range(4)]
    for request in dropped:
        hand_off(prefill, decode, request, borrowed=borrowed)
        if rng.random() < 0.7:
            prefill.wait_event(RequestAdmitted, request.attempt_id)
        for peer in (prefill, decode):  # in this order: the sender's blocks are the receiver's
            peer.drop(request.attempt_id)
            peer.until(lambda peer=peer, gone=request.attempt_id: peer.has_let_go(gone))
    got = serve(pair, kept)
    for request in kept:
        assert got[request.attempt_id] == expected[request.attempt_id].token_ids


def test_an_answer_goes_on_elsewhere_with_the_tokens_of_an_undisturbed_run(pair: Pair) -> None:
    _, decode, borrowed = pair
    name = "shm" if borrowed else "tcp"
    more = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "logprobs": 2, "frequency_penalty": 0.5, "min_tokens": 30}
    whole = attempt(f"{name}-moved", prompt_of(77), **more)
    tokens = alone([whole])[whole.attempt_id].token_ids
    again = attempt(f"{name}-moved~1", prompt_of(77), tokens[:19], **more)
    decode.serve(again)
    decode.wait_end(again.attempt_id)
    assert decode.tokens[again.attempt_id] == tokens[19:]
    handed = attempt(f"{name}-moved~2", prompt_of(77), tokens[:18], **more)
    assert serve(pair, [handed])[handed.attempt_id] == tokens[18:]
    _, logprobs = decode.first_tokens[handed.attempt_id]
    assert logprobs is not None and len(logprobs.top) == 2


def test_a_worker_process_shows_that_it_lives(pairs: dict[str, Pair]) -> None:
    decode = pairs["shared_memory"][1]
    assert isinstance(decode, ProcessPeer)
    decode.ready()
    pulse = read_pulse(decode.directory / FILE_NAME)
    assert pulse is not None and pulse.num_turns > 0


def test_a_prefill_worker_that_is_killed_leaves_a_decode_worker_that_serves(pairs: dict[str, Pair]) -> None:
    """The last test of this file: it costs the TCP pair its prefill worker."""
    prefill, decode, _ = pairs["tcp"]
    assert isinstance(prefill, ProcessPeer)
    lost = attempt("lost", prompt_of(1500, 99))
    decode.reserve(lost)
    prefill.prefill(lost, decode.address)
    prefill.wait_event(RequestAdmitted, "lost")
    prefill.kill()
    decode.drop("lost")
    assert decode.wait_end("lost").reason is FinishReason.ABORT
    request = attempt("alone", prompt_of(50), max_tokens=5)
    decode.serve(request)
    decode.wait_end("alone")
    assert decode.tokens["alone"] == alone([request])["alone"].token_ids
