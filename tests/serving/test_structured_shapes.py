"""Answers under a grammar are the same on every fleet: one worker, prefill and decode apart, and after a crash."""

import asyncio
import json
import os
import signal
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.request import SamplingParams
from diptych.serving.answers.grammar.grammar_text import GrammarWriter, with_schemas
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.supervisor import Supervisor
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.llm import LLM

pytestmark = pytest.mark.system
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 8, "maxItems": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["first", "second"]},
    },
    "required": ["names", "count", "kind"],
    "additionalProperties": False,
}
GRAMMAR = GrammarWriter({}).schema(SCHEMA, "schema")
TEXT = with_schemas(GRAMMAR.text)[0]
PROMPTS = [[5 + number, 6, 7] * 20 for number in range(6)]
OPTIONS = EngineOptions(device=DeviceOptions(threads=1), memory=MemoryOptions(kv_cache_bytes=64 * 2**20))


def sampling(number: int, text: str = TEXT) -> SamplingParams:
    return SamplingParams(max_tokens=600, temperature=number % 2 * 1.0, seed=number, grammar=text)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs = LLM(options=OPTIONS).generate(PROMPTS, [sampling(n) for n in range(6)], progress=False)
    for output in outputs:
        jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)
    return [output.outputs[0].token_ids for output in outputs]


async def answers(llm: AsyncLLM, on_token: Any = lambda: None) -> list[list[int]]:
    text = (await llm.try_grammar(GRAMMAR)).text

    async def answer(number: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(PROMPTS[number], sampling(number, text)):
            tokens = output.outputs[0].token_ids
            on_token()
        return tokens

    return await asyncio.gather(*(answer(number) for number in range(6)))


def test_prefill_and_decode_on_workers_of_their_own_change_no_token(expected: list[list[int]]) -> None:
    async def main() -> list[list[int]]:
        fleet = FleetOptions(prefill=1, decode=1, cluster=cluster_config(disaggregate="always"))
        async with AsyncLLM(OPTIONS, Fleet(OPTIONS, fleet)) as llm:
            return await answers(llm)

    assert asyncio.run(main()) == expected


def test_an_answer_whose_worker_is_killed_goes_on_under_its_grammar(expected: list[list[int]]) -> None:
    async def main() -> list[list[int]]:
        fleet = Fleet(OPTIONS, FleetOptions(both=2))
        async with AsyncLLM(OPTIONS, fleet) as llm:
            victim, seen = fleet.workers[0], [0]
            assert isinstance(victim, Supervisor)

            def on_token() -> None:
                seen[0] += 1
                if seen[0] == 30:
                    os.kill(victim.worker_pid or 0, signal.SIGKILL)

            return await answers(llm, on_token)

    assert asyncio.run(main()) == expected
