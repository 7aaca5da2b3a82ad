"""Two vLLM servers, one for each phase, behind ``diptych front``: are the answers those of one vLLM?

    python benchmarks/front.py nixl MODEL --vllm VENV [--dtype float32] [--prompts 100] [--json front_nixl.json]

VENV: what ``scripts/bench-peers`` makes, and there ``pip install --no-deps nixl nixl-cu13``. Each engine has a core;
the one for prompts hands their KV over through NIXL (UCX, host memory); neither keeps a prompt's KV. First the engine
for decoding is asked directly, alone: that is the reference. Then the same prompts go through the front, one at a time
and eight at once, and at last while the engine for prompts is killed in their middle. An answer is equal if all of its
token ids are. NIXL's transfers, bytes and times are what the engine for decoding counted.

Several prompts at once are computed with other sums of floating point numbers than one alone, by any engine: take a
model in float32.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import report
from front_parts.cost import DIPTYCH, process
from front_parts.engines import Engine, running, vllm_engine
from servers import free_port, metric, vllm_version

TRANSFER = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
MAX_LEN = 2048
PROMPT_TOKENS = (50, 900)
ANSWER_TOKENS = 24
LIMIT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt. error: why there is none."""

    tokens: tuple[int, ...] = ()
    seconds: float = 0.0
    error: str = ""


def engines_of(asked: argparse.Namespace) -> list[Engine]:
    """The engine for prompts, and the one for decoding."""
    found = []
    for core in range(2):
        options = ["--no-enable-prefix-caching", "--kv-transfer-config", TRANSFER]
        engine = vllm_engine(asked.vllm, asked.model, core, dtype=asked.dtype, max_len=MAX_LEN, options=options)
        engine.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        found.append(engine)
    return found


async def answer(http: httpx.AsyncClient, model: str, prompt: list[int]) -> Answer:
    """Ask for one prompt, given as token ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    begin = time.monotonic()
    try:
        reply = await http.post("/v1/completions", json={**body, "return_token_ids": True}, timeout=LIMIT_S)
    except httpx.HTTPError as error:
        return Answer(seconds=time.monotonic() - begin, error=repr(error))
    if reply.status_code != 200:
        return Answer(seconds=time.monotonic() - begin, error=reply.text[:200])
    return Answer(tuple(reply.json()["choices"][0]["token_ids"]), time.monotonic() - begin)


async def answers(url: str, model: str, prompts: list[list[int]], at_once: int, kills: Engine | None) -> list[Answer]:
    """Answers to all prompts, ``at_once`` at a time. kills: the engine that is killed when half of them are asked."""
    free = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as http:

        async def ask(number: int) -> Answer:
            async with free:
                if kills is not None and number == len(prompts) // 2:
                    kills.kill()
                return await answer(http, model, prompts[number])

        return list(await asyncio.gather(*(ask(number) for number in range(len(prompts)))))


def counted(engine: Engine, front: str) -> dict[str, float]:
    """What the engine for decoding and the front have counted so far."""
    return {
        "divided": metric('diptych:placements_total{model_name="front",reason="remote"}', front),
        "transfers": metric("vllm:nixl_xfer_time_seconds_count", engine.url),
        "MB": metric("vllm:nixl_bytes_transferred_sum", engine.url) / 1e6,
        "seconds": metric("vllm:nixl_xfer_time_seconds_sum", engine.url),
    }


def row(way: str, expected: list[Answer], found: list[Answer], gained: dict[str, float]) -> dict[str, Any]:
    """The table's row for one run."""
    equal = sum(a.tokens == b.tokens != () for a, b in zip(expected, found, strict=True))
    transfers = gained["transfers"]
    return {
        "way": way,
        "prompts": len(found),
        "answers": sum(not reply.error for reply in found),
        "equal": equal,
        "divided": int(gained["divided"]),
        "NIXL transfers": int(transfers),
        "MB": round(gained["MB"], 1),
        "ms a transfer": round(1e3 * gained["seconds"] / transfers, 1) if transfers else None,
        "s an answer": round(statistics.median(reply.seconds for reply in found), 3),
        "errors": sorted({reply.error for reply in found if reply.error})[:3],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)


def main(asked: argparse.Namespace) -> None:
    """Ask one engine, then the front in each way, and compare the tokens."""
    rng = random.Random(asked.seed)
    prompts = [[rng.randrange(5, 400) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(asked.prompts)]
    name, rows = asked.model.name, []
    engines = engines_of(asked)
    with running(engines) as (first, second):
        expected = asyncio.run(answers(second.url, name, prompts, 1, None))
        nothing = {"divided": 0.0, "transfers": 0.0, "MB": 0.0, "seconds": 0.0}
        rows.append(row("one vLLM, one at a time", expected, expected, nothing))
        port = free_port()
        command = [*DIPTYCH, "front", "--port", str(port)]
        for engine, role in ((first, "prefill"), (second, "decode")):
            command += ["--engine", f"vllm={engine.url},role={role}"]
        with process(command, port, name):
            front = f"http://127.0.0.1:{port}"
            for way, at_once, kills in (
                ("front, one at a time", 1, None),
                ("front, eight at once", 8, None),
                ("front, eight at once, engine for prompts killed", 8, first),
            ):
                before = counted(second, front)
                found = asyncio.run(answers(front, name, prompts, at_once, kills))
                after = counted(second, front)
                rows.append(row(way, expected, found, {key: after[key] - before[key] for key in after}))
                print(rows[-1], flush=True)
    report("front_nixl", rows, asked.json, model=name, dtype=asked.dtype, vllm=vllm_version(asked.vllm))
