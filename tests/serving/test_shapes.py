"""Every shape of a fleet says what one engine says: unified, chunked, and prefill and decode on workers of their own.

Real worker processes, real memory and sockets, a tiny model in fp32 and the bundled one in bf16. A fleet serves many
requests at once, so prompts are cut into chunks, batches differ, and prefixes are found in caches; no token may change.
"""

import asyncio
from array import array
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import pytest
from tests.runtime.checkpoints import prompt_of, reference

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.config import BudgetConfig, SchedulerConfig, shape_preset
from diptych.control.events import HandoffReserved
from diptych.control.request import POOLINGS, Pooling, SamplingParams
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.link.messages import StepReport, WorkerMessage, unpack_events
from diptych.serving.llm import LLM
from diptych.serving.outputs import RequestOutput

pytestmark = pytest.mark.system
BLOCK_SIZE = 32
TINY_FAMILY = "qwen2-window"  # one layer with a window, two without
KV_BYTES = {"tiny": 4 * 2**20, "bundled": 32 * 2**20}
TIGHT_KV_BYTES = 24 * 3 * 2 * 2 * 16 * 4 * BLOCK_SIZE  # 24 blocks of the tiny model: two long prompts, or a few short


@dataclass(frozen=True)
class Case:
    """One request. turns: how often its answer and a few new tokens are appended, and asked again."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    turns: int = 0


@dataclass(frozen=True)
class Shape:
    """A fleet. max_batched_tokens: the largest chunk of a prompt (0: prompts run whole). kv_bytes None: plenty."""

    model: str
    prefill: int = 0
    decode: int = 0
    both: int = 0
    max_batched_tokens: int = 64
    always: bool = False  # two workers share every request
    options: dict[str, Any] = field(default_factory=dict)
    kv_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.prefill}P{self.decode}D{self.both}B-{self.options.get('transfer', 'alone')}"


TCP, SHARED = {"transfer": "tcp"}, {"transfer": "shared_memory"}
SHAPES = (
    Shape("tiny", both=1, max_batched_tokens=0),
    Shape("tiny", prefill=1, decode=1, max_batched_tokens=16, always=True, options=SHARED),
    Shape("tiny", prefill=2, decode=1, max_batched_tokens=48, always=True, options=TCP),
    Shape("tiny", prefill=1, decode=2, max_batched_tokens=33, always=True, options=SHARED, kv_bytes=TIGHT_KV_BYTES),
    Shape("tiny", prefill=1, decode=1, both=1, max_batched_tokens=100, options=TCP),
    Shape("bundled", prefill=1, decode=1, max_batched_tokens=96, always=True, options=TCP),
    Shape("bundled", prefill=2, decode=1, max_batched_tokens=40, always=True, options=SHARED),
)


def engine_options(model: str, max_batched_tokens: int, kv_bytes: int | None = None) -> EngineOptions:
    """max_batched_tokens 0: the unified shape."""
    budget = BudgetConfig(kind="fixed", max_batched_tokens=max_batched_tokens or 2048)
    chunked = SchedulerConfig(order="fcfs", budget=budget, max_num_seqs=16)
    dtype: Any = "float32" if model == "tiny" else "bfloat16"
    options = EngineOptions(
        device=DeviceOptions(device="cpu", dtype=dtype, threads=1),
        memory=MemoryOptions(block_size=BLOCK_SIZE, kv_cache_bytes=kv_bytes or KV_BYTES[model]),
        scheduler=chunked if max_batched_tokens else shape_preset("unified", max_num_seqs=16),
        warm_up=False,
    )
    if model == "tiny":
        return msgspec.structs.replace(options, model=str(reference(TINY_FAMILY).directory))
    return options


@cache
def cases() -> tuple[Case, ...]:
    """Greedy and sampled, lengths around the borders of blocks and chunks, shared prefixes, and every option that has
    a memory or an end of its own."""
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    long = prompt_of(330, seed=1)
    picked = [Case(tuple(prompt_of(length, seed=length)), greedy) for length in (1, 31, 32, 33, 64, 97)]
    picked += [Case(tuple(long[:length]), sampled, turns=2) for length in (40, 128, 250, 330)]
    strict = replace(sampled, min_tokens=10, stop_token_ids=tuple(range(3, 60)))
    for sampling in (
        replace(greedy, max_tokens=1),
        replace(sampled, max_tokens=2),
        replace(sampled, n=3),
        replace(sampled, logprobs=4),
        replace(greedy, max_tokens=3, prompt_logprobs=2),
        replace(greedy, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
        replace(strict, repetition_penalty=1.2, presence_penalty=-1.0),
        replace(greedy, logit_bias={7: 100.0, 9: 99.5}, frequency_penalty=2.0),
    ):
        picked.append(Case(tuple(prompt_of(70, seed=5)), sampling))
    return tuple(picked)


Answer = tuple[list[list[int]], list[str | None], list[list[Any]], list[Any] | None]


def answer_of(output: RequestOutput) -> Answer:
    """What must be equal: tokens, reasons, and which alternatives were named (their values are compared apart)."""
    named = [[sorted(row) for row in one.logprobs or ()] for one in output.outputs]
    prompt = None if output.prompt_logprobs is None else [row and sorted(row) for row in output.prompt_logprobs]
    return [one.token_ids for one in output.outputs], [one.finish_reason for one in output.outputs], named, prompt


def values_of(output: RequestOutput) -> list[float]:
    rows = [row for one in output.outputs for row in one.logprobs or ()]
    rows += [row for row in output.prompt_logprobs or () if row]
    return [row[token_id].logprob for row in rows for token_id in sorted(row)]


def next_turn(case: Case, output: RequestOutput) -> Case:
    said = tuple(output.prompt_token_ids) + tuple(output.outputs[0].token_ids)
    return replace(case, prompt=(*said, 5, 6, 7), turns=case.turns - 1)


Round = list[tuple[Case, RequestOutput]]


@cache
def expected(model: str) -> list[Round]:
    """What one engine in this process says: everything at once, the next turns, and at last everything of the first
    round again, every other one to end with its first token."""
    llm = LLM(options=engine_options(model, 2048))

    def ask(cases: list[Case]) -> Round:
        outputs = llm.generate([list(one.prompt) for one in cases], [one.sampling for one in cases], progress=False)
        return list(zip(cases, outputs, strict=True))

    rounds = [ask(list(cases()))]
    while turns := [next_turn(case, output) for case, output in rounds[-1] if case.turns]:
        rounds.append(ask(turns))
    again = []
    for number, (case, output) in enumerate(rounds[0]):
        if number % 2 and not case.sampling.min_tokens:
            stop = replace(case.sampling, stop_token_ids=tuple(one.token_ids[0] for one in output.outputs))
            case = replace(case, sampling=stop)
        again.append(case)
    rounds.append(ask(again))
    assert sum(output.outputs[0].finish_reason == "stop" for _, output in rounds[-1]) >= len(again) // 2 - 1
    return rounds


EMBEDDED = [prompt_of(length, seed=length) for length in (1, 40, 100, 270)]


@cache
def expected_vectors(model: str, pooling: Pooling) -> list[list[float]]:
    """What one engine in this process makes of EMBEDDED."""
    return LLM(options=engine_options(model, 2048)).embed(EMBEDDED, pooling, progress=False)


async def embed_and_compare(llm: AsyncLLM, model: str) -> None:
    for pooling in POOLINGS:
        sampling = SamplingParams(max_tokens=1, temperature=0, pooling=pooling)
        generation = await llm.submit_in_turn(EMBEDDED, sampling)
        while not generation.is_exhausted:
            await generation.read()
        vectors = [array("f", stream.embedding).tolist() for stream in generation.streams]
        assert vectors == expected_vectors(model, pooling)
        roles = {llm.fleet.role(stream.worker) for stream in generation.streams}
        assert "decode" not in roles or len(set(llm.fleet.fleet.roles)) == 3


class WatchedFleet(Fleet):
    """Notes how much of each attempt its decode worker had cached."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cached: list[int] = []

    def on_message(self, worker: int, message: WorkerMessage) -> None:
        if isinstance(message, StepReport):
            events = unpack_events(message.events)
            self.cached += [event.num_cached_tokens for event in events if isinstance(event, HandoffReserved)]
        super().on_message(worker, message)


async def ask(llm: AsyncLLM, case: Case) -> RequestOutput:
    outputs = [output async for output in llm.generate(list(case.prompt), case.sampling)]
    assert outputs[-1].finished
    return outputs[-1]


async def ask_and_compare(llm: AsyncLLM, model: str) -> list[RequestOutput]:
    """A round at once, then the next one, as people do."""
    compared = []
    for one in expected(model):
        outputs = await asyncio.gather(*(ask(llm, case) for case, _ in one))
        for (case, wanted), output in zip(one, outputs, strict=True):
            assert answer_of(output) == answer_of(wanted), case
            assert values_of(output) == pytest.approx(values_of(wanted), abs=1e-3 if model == "tiny" else 0.2)
        compared += outputs
    return compared


def num_handoffs(outputs: list[RequestOutput]) -> int:
    """Answers that are longer than their first token, if they may be served by two workers."""
    return sum(len(one.token_ids) > 1 for each in outputs if each.prompt_logprobs is None for one in each.outputs)


# What these have, the others have apart: two workers in one memory (a crowded one of three, and test_chaos.py with the
# bundled model), several that prefill (over sockets).
SLOW = (SHAPES[1], SHAPES[-1])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow if shape in SLOW else ()) for shape in SHAPES], ids=str
)
async def test_every_shape_gives_the_tokens_of_one_engine(shape: Shape) -> None:
    options = engine_options(shape.model, shape.max_batched_tokens, shape.kv_bytes)
    cluster = cluster_config(disaggregate="always" if shape.always else "auto")
    roles = {"prefill": shape.prefill, "decode": shape.decode, "both": shape.both}
    pools = FleetOptions(**roles, **shape.options, cluster=cluster)
    fleet = WatchedFleet(options, pools)
    async with AsyncLLM(options, fleet) as llm:
        outputs = await ask_and_compare(llm, shape.model)
        await embed_and_compare(llm, shape.model)
        metrics = llm.metrics.fleet
        if shape.always:
            assert metrics.num_transfers == num_handoffs(outputs)
            assert sum(cached > 0 for cached in fleet.cached) > 4, "second turns find the first on the decode worker"
            assert (metrics.transferred_bytes > 0) == (shape.options["transfer"] == "tcp")
        assert fleet.num_restarts == 0
