"""AsyncLLM against a real worker process with the make-believe model (token i after p prompt tokens is p + i)."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_worker import CRASH_TOKEN, FAIL_TOKEN, VOCAB_SIZE, fake_command

from diptych.control.config import SchedulerConfig
from diptych.control.errors import (
    ContextLengthError,
    DiptychError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WorkerError,
)
from diptych.control.request import SamplingParams
from diptych.control.slo import Slo
from diptych.serving.async_llm import AsyncLLM, derive_seed
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.outputs import RequestOutput

pytestmark = [pytest.mark.asyncio, pytest.mark.system]
PROMPT = list(range(100, 164))


@asynccontextmanager
async def serving(scheduler: SchedulerConfig | None = None, **arguments: Any) -> AsyncIterator[AsyncLLM]:
    options = EngineOptions(scheduler=scheduler or SchedulerConfig())
    async with AsyncLLM(options, Fleet(options, launcher=LocalLauncher(fake_command(**arguments)))) as llm:
        yield llm


async def last(
    llm: AsyncLLM, prompt: Any = PROMPT, sampling: SamplingParams | None = None, **more: Any
) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, sampling or SamplingParams(max_tokens=8), **more)]
    assert outputs[-1].finished
    return outputs[-1]


async def until(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


async def test_tokens_arrive_in_order_and_grow() -> None:
    async with serving(step_ms=2) as llm:
        seen = [output async for output in llm.generate(PROMPT, SamplingParams(max_tokens=8))]
        assert seen[-1].outputs[0].token_ids == list(range(64, 72))
        assert [len(output.outputs[0].token_ids) for output in seen] == sorted(
            {len(output.outputs[0].token_ids) for output in seen}
        )
        assert seen[-1].outputs[0].finish_reason == "length"
        assert seen[-1].outputs[0].text == llm.tokenizer.decode(list(range(64, 72)))


async def test_the_latency_adds_up_and_the_second_time_is_cached() -> None:
    async with serving() as llm:
        first, second = await last(llm), await last(llm)
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 32  # of 64: the last token is always computed
        assert second.metrics is not None
        latency = second.metrics.latency
        assert latency.queue_ns + latency.prefill_ns + latency.decode_ns == latency.total_ns > 0


async def test_several_answers_have_seeds_of_their_own() -> None:
    async with serving() as llm:
        output = await last(llm, sampling=SamplingParams(max_tokens=3, n=3, seed=7))
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({derive_seed(7, number) for number in range(3)}) == 3
        assert derive_seed(7, 0) == 7


async def test_a_stop_string_across_tokens_ends_the_request_at_the_worker_too() -> None:
    async with serving(step_ms=2) as llm:
        text = llm.tokenizer.decode(list(range(64, 96)))
        stop = text[9:13]
        output = await last(llm, sampling=SamplingParams(max_tokens=5000, stop=(stop,)))
        assert output.outputs[0].text == text[:9]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        await until(lambda: llm.metrics.worker.num_decoding == 0)


async def test_a_stop_string_is_not_searched_before_min_tokens() -> None:
    async with serving() as llm:
        text = llm.tokenizer.decode(list(range(64, 84)))
        sampling = SamplingParams(max_tokens=20, min_tokens=10, stop=(text[2],))
        assert (await last(llm, sampling=sampling)).outputs[0].text == text


async def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    async with serving() as llm:
        output = await last(llm, sampling=SamplingParams(max_tokens=20, stop_token_ids=(70,)))
        assert output.outputs[0].token_ids == list(range(64, 71))
        assert output.outputs[0].text == llm.tokenizer.decode(list(range(64, 70)))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 70)


async def test_logprobs_of_tokens_and_of_the_prompt() -> None:
    async with serving() as llm:
        output = await last(llm, sampling=SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1))
        assert output.outputs[0].logprobs is not None
        assert [sorted(row) for row in output.outputs[0].logprobs] == [[64, 65], [65, 66], [66, 67]]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert [next(iter(row)) for row in output.prompt_logprobs[1:] if row] == PROMPT[1:]


async def test_leaving_the_loop_aborts_and_frees() -> None:
    async with serving(step_ms=2) as llm:
        stream = llm.generate(PROMPT, SamplingParams(max_tokens=5000, ignore_eos=True))
        await anext(stream)
        await until(lambda: llm.metrics.worker.num_decoding == 1)
        await stream.aclose()
        await until(lambda: llm.metrics.worker.num_decoding == 0 and llm.num_open == 0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ([], {}, InvalidRequestError, "0 tokens"),
        ([VOCAB_SIZE], {}, InvalidRequestError, "4096"),
        ([-1], {}, InvalidRequestError, "-1"),
        ([1] * 8192, {}, ContextLengthError, "prompt is too long: it has 8192"),  # words that LangChain knows
        ([1], {"stop_token_ids": (9999,)}, InvalidRequestError, "stop_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, InvalidRequestError, "logit_bias"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    prompt: list[int], sampling: dict[str, Any], error: type[DiptychError], words: str
) -> None:
    async with serving() as llm:
        with pytest.raises(error, match=words):
            await last(llm, prompt, SamplingParams(**sampling))
        assert (await last(llm)).finished


async def test_a_text_that_the_tokenizer_panics_on_is_refused_and_others_go_on() -> None:
    async with serving(step_ms=2) as llm:
        other = asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=300, ignore_eos=True)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="retry-limit"):
            await last(llm, "x" + " " * 10_100_000 + "x")
        assert (await other).outputs[0].token_ids == list(range(64, 364))


async def test_a_cache_that_is_too_small_is_named() -> None:
    async with serving(num_blocks=16) as llm:
        with pytest.raises(ContextLengthError, match="KV cache holds"):
            await last(llm, [1] * 400, SamplingParams(max_tokens=400))


async def test_a_failing_request_fails_alone() -> None:
    async with serving(step_ms=2) as llm:
        other = asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=50)))
        with pytest.raises(WorkerError, match="make-believe"):
            await last(llm, [1, FAIL_TOKEN])
        assert (await other).outputs[0].token_ids == list(range(64, 114))


async def test_more_than_may_wait_is_overload() -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_waiting=2)
    async with serving(scheduler, step_ms=5) as llm:
        tasks = [asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=30))) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in results if isinstance(one, OverloadedError)]
        assert 3 <= len(refused) <= 4
        assert all(isinstance(one, RequestOutput | OverloadedError) for one in results)
        assert llm.num_open == 0


async def test_a_lost_worker_is_a_pause_for_the_innocent_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.serving.fleet.supervisor.FIRST_PAUSE_S", 0.1)
    async with serving(step_ms=2) as llm:
        other = asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=300, ignore_eos=True)))
        await asyncio.sleep(0.05)
        with pytest.raises(WorkerError, match="died while they computed this request"):
            await last(llm, [1, CRASH_TOKEN])
        with pytest.raises(UnavailableError):
            await last(llm)
        assert (await other).outputs[0].token_ids == list(range(64, 364))
        assert (await last(llm)).finished
        assert llm.fleet.num_restarts >= 2


async def test_draining_refuses_newcomers_and_lets_the_running_end() -> None:
    async with serving(step_ms=2) as llm:
        running = asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=100)))
        await until(lambda: llm.num_open == 1)
        drained = asyncio.create_task(llm.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="draining"):
            await last(llm)
        assert (await running).finished
        assert await drained


async def test_goodput_counts_who_met_the_objective() -> None:
    async with serving(step_ms=5) as llm:
        await last(llm, slo=Slo(ttft_ns=10**10, tpot_ns=10**10))
        await last(llm, slo=Slo(tpot_ns=1))
        await last(llm)
        assert (llm.metrics.num_with_slo, llm.metrics.num_meeting_slo) == (2, 1)


async def test_an_id_in_use_is_refused() -> None:
    async with serving(step_ms=5) as llm:
        running = asyncio.create_task(last(llm, sampling=SamplingParams(max_tokens=100), request_id="x"))
        await until(lambda: llm.num_open == 1)
        with pytest.raises(InvalidRequestError, match="in use"):
            await last(llm, request_id="x")
        await running


async def test_a_worker_that_cannot_start_says_why() -> None:
    options = EngineOptions(model="/nonexistent")
    llm = AsyncLLM(options)
    with pytest.raises(DiptychError, match="nonexistent"):
        async with llm:
            pass


async def test_workers_die_with_their_parent_and_leave_nothing_behind(tmp_path: Path) -> None:
    source = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_fleet import serving\n"
        "async def main():\n"
        "    async with serving() as llm:\n"
        "        print(*(worker.worker_pid for worker in llm.fleet.workers), flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen((sys.executable, "-c", source), stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert len(list(tmp_path.iterdir())) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    await until(lambda: not any(map(is_alive, workers)))
    await until(lambda: not list(tmp_path.iterdir()))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_front_end_imports_no_torch() -> None:
    source = "import sys, diptych.cli.main, diptych.serving.api.server; print('torch' in sys.modules)"
    result = subprocess.run((sys.executable, "-c", source), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
