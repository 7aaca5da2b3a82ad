"""The bundled model on one worker and on a prefill and a decode worker: the same tokens, even when a worker dies."""

import asyncio
import os
import signal
from typing import Any

import pytest
from servers import process_of

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.request import SamplingParams
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.llm import LLM

pytestmark = pytest.mark.system
LENGTHS = (5, 33, 64, 150)
SAMPLING = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)


def prompt(length: int) -> list[int]:
    return [(7 * position + 3 * length) % 1000 for position in range(length)]


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """What one engine in this process says."""
    llm = LLM(dtype="float32", threads=1)
    return [output.outputs[0].token_ids for output in llm.generate([prompt(length) for length in LENGTHS], SAMPLING)]


async def answers(llm: AsyncLLM) -> list[list[int]]:
    async def one(length: int) -> list[int]:
        outputs = [output async for output in llm.generate(prompt(length), SAMPLING)]
        return outputs[-1].outputs[0].token_ids

    return list(await asyncio.gather(*map(one, LENGTHS)))


@pytest.mark.asyncio
@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
async def test_two_workers_say_what_one_says(
    whole: list[list[int]], transfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.serving.fleet.supervisor.FIRST_PAUSE_S", 0.05)
    memory, device = MemoryOptions(kv_cache_bytes=32 * 2**20), DeviceOptions(device="cpu", dtype="float32")
    options = EngineOptions(memory=memory, device=device, warm_up=False)
    cluster = cluster_config(disaggregate="always")
    fleet = Fleet(options, FleetOptions(prefill=1, decode=1, transfer=transfer, cluster=cluster))
    async with AsyncLLM(options, fleet) as llm:
        assert await answers(llm) == whole
        assert await answers(llm) == whole  # with cached prefixes on both sides
        niceness = [os.getpriority(os.PRIO_PROCESS, process_of(fleet, worker)) for worker in range(2)]
        assert niceness[0] > niceness[1]  # the prefill worker gives way
        assert llm.metrics.fleet.num_transfers == 2 * len(LENGTHS)
        travelled = llm.metrics.fleet.transferred_bytes
        assert travelled == 0 if transfer == "shared_memory" else travelled > 0
        if transfer == "shared_memory":
            running = asyncio.create_task(answers(llm))
            await asyncio.sleep(0.05)
            os.kill(process_of(fleet, 1), signal.SIGKILL)
            assert await running == whole


@pytest.mark.asyncio
async def test_a_small_and_a_large_worker_say_what_one_says(whole: list[list[int]]) -> None:
    options = EngineOptions(device=DeviceOptions(device="cpu", dtype="float32"), warm_up=False)
    small = WorkerGroup(name="small", max_model_len=128, kv_cache_tokens=1024)
    large = WorkerGroup(name="large", kv_cache_tokens=2048)
    async with AsyncLLM(options, Fleet(options, FleetOptions(groups=(small, large)))) as llm:
        assert llm.ready is not None and llm.ready.sequence_limits[0] == 128 < llm.ready.max_model_len
        assert await answers(llm) == whole
        assert await answers(llm) == whole
