"""Engines behind ``diptych front`` are killed (SIGKILL) and stopped (SIGSTOP) under load, one at a time.

Used by the part fleet. Clients ask for streams and whole replies, greedy, whose answers an engine gave
before the first fault. A killed engine is started again at once; a stopped one goes on after a while, which is
sometimes longer than the front waits for a sign of life. An answer may be whole, or end with an error where the front
had said (header x-diptych-recovery: none) that it cannot go on elsewhere, and its client had tokens already. It counts
as lost when it ended with an error though it could have been tried elsewhere, and as hung after HANG_S.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from front_parts.cost import DIPTYCH, process
from front_parts.engines import Engine, llamacpp_engine, running, vllm_engine
from servers import free_port

HANG_S = 90.0
NUM_CLIENTS = 6
NUM_PROMPTS = 24
ANSWER_TOKENS = 32
STOP_S = (0.3, 4.0)
SILENCE_S = 1.0
UP_S = 300.0
Expected = dict[tuple[str, bool], str]  # by prompt, and whether it is a stream: llama.cpp's leave out a half character


@dataclass
class Outcome:
    """What became of the answers. reasons: of errors, by their codes."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def prompts(kind: str) -> list[str]:
    """What clients ask."""
    rng = random.Random(kind)
    return [" ".join(str(rng.randrange(10_000)) for _ in range(rng.randint(5, 60))) for _ in range(NUM_PROMPTS)]


def body_of(model: str, prompt: str, *, stream: bool) -> dict[str, Any]:
    """The body of a request; the answer always has the same length."""
    given = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**given, "stream": stream}


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str, str]:
    """(text, code of the error or "", what the front said of recovery) of an answer."""
    if not body["stream"]:
        reply = await http.post("/v1/completions", json=body)
        content = reply.json()
        if reply.status_code != 200:
            return "", str(content["error"].get("code") or reply.status_code), "whole"
        return content["choices"][0]["text"], "", "whole"
    text, code, is_done = "", "", False
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        recovery = reply.headers.get("x-diptych-recovery", "")
        if reply.status_code != 200:
            error = json.loads(await reply.aread())["error"]
            return "", str(error.get("code") or reply.status_code), recovery
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    code = str(event["error"].get("code") or "error")
                for choice in event.get("choices", ()):
                    text += choice["text"]
    return text, code or ("" if is_done else "no end"), recovery


async def client(url: str, model: str, number: int, expected: Expected, until: asyncio.Event, to: Outcome) -> None:
    """Asks again and again."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        while not until.is_set():
            prompt, is_stream = rng.choice(prompts(model)), rng.random() < 0.7
            undisturbed = expected[prompt, is_stream]
            begin = time.monotonic()
            try:
                async with asyncio.timeout(HANG_S):
                    text, code, recovery = await ask(http, body_of(model, prompt, stream=is_stream))
            except TimeoutError:
                to.counts["hung"] += 1
                continue
            to.longest_s = max(to.longest_s, time.monotonic() - begin)
            to.counts["answers"] += 1
            if not code:
                to.counts["whole"] += 1
                to.counts["as undisturbed"] += text == undisturbed
                if text != undisturbed:
                    print(
                        f"differs (stream: {is_stream}):\n{text!r}, not\n{undisturbed!r}", file=sys.stderr, flush=True
                    )
                continue
            to.reasons[code] += 1
            may_end = is_stream and bool(text) and recovery == "none" and undisturbed.startswith(text)
            to.counts["ended as announced" if may_end else "lost"] += 1


async def up(url: str, count: int) -> None:
    """Wait until the front uses ``count`` engines, and has no open request of its own making."""
    async with httpx.AsyncClient(base_url=url, timeout=10) as http, asyncio.timeout(UP_S):
        while sum(engine["is_up"] for engine in (await http.get("/engines")).json()["engines"]) < count:
            await asyncio.sleep(0.1)


async def storm(url: str, model: str, engines: Sequence[Engine], count: int, seed: int) -> Outcome:
    """``count`` faults, and what became of the answers."""
    expected: Expected = {}
    close = {"Connection": "close"}  # llama.cpp closes kept connections without notice
    async with httpx.AsyncClient(base_url=engines[0].url, timeout=HANG_S, headers=close) as http:
        for prompt in prompts(model):
            for is_stream in (False, True):
                expected[prompt, is_stream] = (await ask(http, body_of(model, prompt, stream=is_stream)))[0]
    found, until, rng = Outcome(), asyncio.Event(), random.Random(seed)
    await up(url, len(engines))
    clients = [asyncio.create_task(client(url, model, one, expected, until, found)) for one in range(NUM_CLIENTS)]
    for number in range(count):
        await asyncio.sleep(rng.uniform(0.1, 0.8))
        victim = rng.choice(engines)
        if rng.random() < 2 / 3:
            found.counts["kills"] += 1
            victim.kill()
            victim.start()
            await asyncio.to_thread(victim.wait_ready)
        else:
            found.counts["stops"] += 1
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(*STOP_S))
            victim.signal(signal.SIGCONT)
        await up(url, max(2, len(engines) - 1))  # the next fault must leave one
        if number % 20 == 19:
            print(number + 1, dict(found.counts), dict(found.reasons), file=sys.stderr, flush=True)
    until.set()
    await asyncio.wait_for(asyncio.gather(*clients), 2 * HANG_S)
    await up(url, len(engines))
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        found.counts["open at the end"] = (await http.get("/ui/state")).json()["open_requests"]
    return found


def row(engines: Sequence[Engine], model: str, count: int, seed: int) -> dict[str, Any]:
    """One storm over engines of one kind."""
    port = free_port()
    with running(engines):
        given = [part for engine in engines for part in ("--engine", engine.option(reads_events=False))]
        settings = ["--silence", str(SILENCE_S), "--probe-interval", "0.2"]
        with process([*DIPTYCH, "front", *given, *settings, "--port", str(port)], port, model):
            found = asyncio.run(storm(f"http://127.0.0.1:{port}", model, engines, count, seed))
    names = ("kills", "stops", "answers", "whole", "as undisturbed", "ended as announced", "lost", "hung")
    return {
        "engines": f"{len(engines)} {engines[0].kind}",
        **{name: found.counts[name] for name in names},
        "open at the end": found.counts["open at the end"],
        "errors": " ".join(f"{code}:{number}" for code, number in found.reasons.items()),
        "longest answer s": round(found.longest_s, 1),
    }


def faults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the engines that there are."""
    rows = []
    if options.llamacpp is not None and options.gguf is not None and options.faults:
        engines = [llamacpp_engine(options.llamacpp, options.gguf) for _ in range(3)]
        rows.append(row(engines, options.gguf.stem, options.faults, options.seed))
    if options.vllm is not None and options.vllm_faults:
        engines = [vllm_engine(options.vllm, options.model, core, dtype=options.dtype, max_len=2048) for core in (0, 1)]
        rows.append(row(engines, options.model.name, options.vllm_faults, options.seed))
    return rows
