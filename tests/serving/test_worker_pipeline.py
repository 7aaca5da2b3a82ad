"""A worker that launches steps ahead reports the tokens of one that does not, also where attempts are dropped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_connector import FakeConnector
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import greedy
from tests.runtime.fake_device import FakeMemory
from tests.runtime.gathering_engine import GatheringEngine
from worker_peers import ThreadPeer, attempt

from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import FinishReason
from diptych.runtime.local_engine import engine_config
from diptych.runtime.sampling.batch_sampler import BatchSampler
from diptych.runtime.step.model_runner import ModelRunner
from diptych.runtime.step.step_pipeline import StepPipeline

NUM_TOKENS = 40


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ThreadPeer]:
    shared = runner("llama")
    sampler = BatchSampler(torch.device("cpu"), FakeMemory())
    own = ModelRunner(shared.loaded, shared.attention, shared.kv, 16, shared.max_model_len, None, sampler)
    engine = EngineCore(engine_config(own, enable_prefix_cache=False))
    peer = ThreadPeer(engine, own, FakeConnector(tmp_path / "kv"), pipeline=StepPipeline(own))
    yield peer
    peer.close()


def test_clients_get_the_same_tokens_and_none_behind_the_end(peer: ThreadPeer) -> None:
    prompts = {f"r{number}": prompt_of(20 + 9 * number, seed=number) for number in range(6)}
    plain = GatheringEngine(runner("llama"), engine_config(runner("llama")))
    for request_id, prompt in prompts.items():
        plain.add(request_id, prompt, greedy(NUM_TOKENS))
    expected = plain.run()
    stop = expected["r5"].token_ids[17]
    end = expected["r5"].token_ids.index(stop) + 1
    for request_id, prompt in prompts.items():
        stops = (stop,) if request_id == "r5" else ()
        peer.serve(attempt(request_id, prompt, max_tokens=NUM_TOKENS, stop_token_ids=stops))
    peer.until(lambda: len(peer.tokens.get("r2", ())) > 5)
    peer.drop("r2")
    ends = {request_id: peer.wait_end(request_id).reason for request_id in prompts}
    peer.stop()
    peer.read()
    for request_id, generation in expected.items():
        got = peer.tokens[request_id]
        if ends[request_id] is FinishReason.ABORT:
            assert request_id == "r2" and got == generation.token_ids[: len(got)]
        else:
            assert got == generation.token_ids[: end if request_id == "r5" else None]
    assert ends["r5"] is FinishReason.STOP
    peer.check_empty()
