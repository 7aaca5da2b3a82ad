"""A fleet of make-believe workers behind AsyncLLM: token i after p prompt tokens is p + i, whoever computes it.

Workers are real processes that are killed, stopped and lost in every state of a request; the client must see exactly
the tokens of an undisturbed run.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_worker import CRASH_TOKEN, FAIL_TOKEN, fake_command
from servers import process_of

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.errors import DiptychError, UnavailableError, WorkerError
from diptych.control.request import RequestOptions, SamplingParams
from diptych.control.slo import NS_PER_S
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet import supervisor as supervisors
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions, MemoryOptions
from diptych.serving.outputs import RequestOutput

pytestmark = [pytest.mark.asyncio, pytest.mark.system]
PROMPT = list(range(100, 196))
P, D = 0, 1  # of one prefill worker and one decode worker
CLUSTER_OPTIONS = ("disaggregate", "on_failure", "max_prefills_in_flight_per_worker")
MEMORY = MemoryOptions(kv_cache_bytes=32 * 2**20)


@pytest.fixture(autouse=True)
def _restart_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "FIRST_PAUSE_S", 0.05)


@asynccontextmanager
async def serving(prefill: int = 1, decode: int = 1, worker: Any = None, **settings: Any) -> AsyncIterator[AsyncLLM]:
    options = EngineOptions(memory=MEMORY)
    settings = {"disaggregate": "always", "transfer": "shared_memory", **settings}
    decisions = {name: settings.pop(name) for name in CLUSTER_OPTIONS if name in settings}
    fleet = FleetOptions(prefill=prefill, decode=decode, cluster=cluster_config(**decisions), **settings)
    launcher = LocalLauncher(fake_command(**(worker or {})))
    async with AsyncLLM(options, Fleet(options, fleet, launcher)) as llm:
        yield llm


async def ask(llm: AsyncLLM, prompt: list[int] = PROMPT, max_tokens: int = 60, **sampling: Any) -> RequestOutput:
    sampling = {"ignore_eos": True, **sampling}
    outputs = [output async for output in llm.generate(prompt, SamplingParams(max_tokens=max_tokens, **sampling))]
    assert outputs[-1].finished
    return outputs[-1]


def expected(prompt: list[int] = PROMPT, max_tokens: int = 60) -> list[int]:
    return list(range(len(prompt), len(prompt) + max_tokens))


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def pid(llm: AsyncLLM, worker: int) -> int:
    found = process_of(llm.fleet, worker)
    assert found
    return found


def counts(llm: AsyncLLM) -> Any:
    return llm.metrics.fleet.view().counts


def is_idle(llm: AsyncLLM) -> bool:
    stats = llm.metrics.worker
    return llm.num_open == 0 and not (stats.num_decoding or stats.num_prefilling or stats.num_waiting)


async def check_idle(llm: AsyncLLM) -> None:
    """Nothing is left of any request, here or on a worker."""

    def is_forgotten() -> bool:
        try:
            llm.fleet.core.check_idle()
        except AssertionError:
            return False
        return True

    await until(is_forgotten)
    await until(lambda: is_idle(llm))


async def test_a_request_is_prefilled_here_and_decoded_there() -> None:
    async with serving() as llm:
        outputs = await asyncio.gather(*(ask(llm, PROMPT[:length]) for length in range(40, 96, 8)))
        for length, output in zip(range(40, 96, 8), outputs, strict=True):
            assert output.outputs[0].token_ids == expected(PROMPT[:length])
        assert llm.metrics.fleet.num_transfers == len(outputs)
        assert counts(llm)["handoffs"] == len(outputs)
        await check_idle(llm)


async def test_logprobs_stop_strings_and_stop_tokens_cross_the_handoff() -> None:
    async with serving(worker={"step_ms": 2}) as llm:
        output = await ask(llm, max_tokens=3, logprobs=2)
        assert output.outputs[0].logprobs is not None
        assert [sorted(row) for row in output.outputs[0].logprobs] == [[96, 97], [97, 98], [98, 99]]
        text = llm.tokenizer.decode(list(range(64, 96)))
        output = await ask(llm, PROMPT[:64], 2000, stop=(text[9:13],))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text[:9], "stop")
        output = await ask(llm, PROMPT[:64], 2000, stop=(text[0],))  # found in the first token already
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
        output = await ask(llm, stop_token_ids=(96,))  # the prefill worker ends it: nobody takes it over
        assert output.outputs[0].token_ids == [96]
        assert (await ask(llm, max_tokens=1)).outputs[0].token_ids == [96]
        output = await ask(llm, max_tokens=2, prompt_logprobs=1)  # one worker serves it whole
        assert output.prompt_logprobs is not None
        assert [next(iter(row)) for row in output.prompt_logprobs[1:] if row] == PROMPT[1:]
        await check_idle(llm)


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
@pytest.mark.parametrize("worker", [P, D])
@pytest.mark.parametrize("tokens_per_s", [0, 300])
async def test_a_killed_worker_is_a_pause_and_nothing_else(worker: int, tokens_per_s: int, transfer: Any) -> None:
    """tokens_per_s 300: in the middle of the prefill; 0: while it decodes."""
    async with serving(transfer=transfer, worker={"step_ms": 3, "tokens_per_s": tokens_per_s}) as llm:
        running = [asyncio.create_task(ask(llm, max_tokens=80)), asyncio.create_task(ask(llm, PROMPT[:50]))]
        await asyncio.sleep(0.1)
        os.kill(pid(llm, worker), signal.SIGKILL)
        first, second = await asyncio.gather(*running)
        assert first.outputs[0].token_ids == expected(PROMPT, 80)
        assert second.outputs[0].token_ids == expected(PROMPT[:50])
        await until(lambda: all(llm.metrics.fleet.view().is_up))
        assert llm.fleet.num_restarts == 1
        assert (await ask(llm)).outputs[0].token_ids == expected()
        await check_idle(llm)


async def test_every_worker_dies_and_the_streams_go_on() -> None:
    async with serving(prefill=1, decode=2, worker={"step_ms": 2}) as llm:
        running = [asyncio.create_task(ask(llm, PROMPT[:length], 200)) for length in (40, 60, 90)]
        for worker in (0, 1, 2):
            await asyncio.sleep(0.1)
            os.kill(pid(llm, worker), signal.SIGKILL)
        outputs = await asyncio.gather(*running)
        for length, output in zip((40, 60, 90), outputs, strict=True):
            assert output.outputs[0].token_ids == expected(PROMPT[:length], 200)
        await check_idle(llm)


async def test_a_stopped_worker_is_killed_and_its_streams_go_on() -> None:
    async with serving(worker={"step_ms": 3}, heartbeat_timeout_s=2.0) as llm:
        running = asyncio.create_task(ask(llm, max_tokens=200))
        await asyncio.sleep(0.1)
        os.kill(pid(llm, D), signal.SIGSTOP)
        assert (await running).outputs[0].token_ids == expected(PROMPT, 200)
        assert llm.metrics.fleet.losses == {D: 1}


async def test_a_request_that_kills_workers_is_refused_and_the_others_end_well() -> None:
    async with serving(worker={"step_ms": 3}) as llm:
        other = asyncio.create_task(ask(llm, max_tokens=300))
        await asyncio.sleep(0.1)
        with pytest.raises(WorkerError, match="died while they computed this request"):
            await ask(llm, [1, CRASH_TOKEN])
        assert (await other).outputs[0].token_ids == expected(PROMPT, 300)
        with pytest.raises(WorkerError, match="make-believe"):
            await ask(llm, [1, FAIL_TOKEN])
        await check_idle(llm)


async def test_on_failure_fail_tells_the_client_at_once() -> None:
    async with serving(worker={"step_ms": 3}, on_failure="fail") as llm:
        running = asyncio.create_task(ask(llm, max_tokens=2000))
        await until(lambda: llm.metrics.fleet.stats_of(D).num_decoding == 1)
        os.kill(pid(llm, D), signal.SIGKILL)
        with pytest.raises(WorkerError, match="lost"):
            await running
        await until(lambda: llm.is_routable)
        assert (await ask(llm)).finished
        await check_idle(llm)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.4])
async def test_a_client_that_leaves_in_any_state_frees_everything(delay_s: float) -> None:
    async with serving(worker={"step_ms": 3, "tokens_per_s": 400}) as llm:
        running = [asyncio.create_task(ask(llm, max_tokens=3000)) for _ in range(3)]
        await asyncio.sleep(delay_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await check_idle(llm)
        assert (await ask(llm, PROMPT[:10], 3)).outputs[0].token_ids == [10, 11, 12]


async def test_draining_waits_for_handoffs_and_refuses_newcomers() -> None:
    async with serving(worker={"step_ms": 2, "tokens_per_s": 500}) as llm:
        running = asyncio.create_task(ask(llm))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(llm.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="draining"):
            await ask(llm)
        assert (await running).outputs[0].token_ids == expected()
        assert await drained


async def test_one_worker_serves_alone_while_its_peer_is_gone_and_none_means_not_ready() -> None:
    async with serving(worker={"load_s": 0.3}) as llm:
        os.kill(pid(llm, D), signal.SIGKILL)
        await until(lambda: llm.metrics.fleet.losses[D] == 1)
        assert llm.is_routable
        assert (await ask(llm)).outputs[0].token_ids == expected()
        assert counts(llm)["handoffs"] == 0
        await until(lambda: all(llm.metrics.fleet.view().is_up))
        assert (await ask(llm)).outputs[0].token_ids == expected()
        assert counts(llm)["handoffs"] == 1
        for worker in (P, D):
            os.kill(pid(llm, worker), signal.SIGKILL)
        await until(lambda: not llm.is_routable)
        assert llm.state == "lost"
        with pytest.raises(UnavailableError):
            await ask(llm)
        await until(lambda: llm.is_routable)
        assert (await ask(llm)).finished


async def test_a_deadline_that_cannot_be_met_is_refused_in_words() -> None:
    async with serving(worker={"step_ms": 5, "tokens_per_s": 200}, max_prefills_in_flight_per_worker=1) as llm:
        running = [asyncio.create_task(ask(llm, PROMPT[:90], 3)) for _ in range(6)]
        await asyncio.sleep(0.05)
        options = RequestOptions(deadline_ns=NS_PER_S // 10)
        with pytest.raises(DiptychError, match="deadline"):
            async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=2), options=options):
                pass
        assert all(output.finished for output in await asyncio.gather(*running))
        await check_idle(llm)
