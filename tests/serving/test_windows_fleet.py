"""A model with windows on several workers: prompts computed on one and answered on another, and streams that move, give
the tokens of one worker that keeps everything."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from servers import CLI, RunningServer, running, wait_until
from test_windows_server import (  # fixtures among them
    LENGTH,
    NUM_BLOCKS,
    complete,
    expected_of,
    keeps_all,
    model,
    options_of,
    post,
    prompt_of,
    served_name,
)

from diptych import LLM
from diptych.serving.kv_memory import kv_geometry_of

__all__ = ["keeps_all", "model"]
pytestmark = pytest.mark.system
LENGTHS = [1000, 340, 700, 20, 500, 64]
COUNTS = [60, 90, 120, 80, 150, 200]


def fleet(model: Path, *arguments: str) -> AbstractContextManager[RunningServer]:
    memory = f"{NUM_BLOCKS * kv_geometry_of(options_of(model)).block_bytes}B"
    sizes = ("--kv-cache-memory", memory, "--max-model-len", str(LENGTH), "--threads", "1")
    ways = ("--disaggregate", "always", "--routing", "round_robin")
    return running([*CLI, "serve", "--model", str(model), "--port", "0", *sizes, *ways, *arguments])


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def pair(model: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with fleet(model, "--prefill", "1", "--decode", "1", "--transfer", request.param) as found:
        yield found


def asked_at_once(found: RunningServer, prompts: list[list[int]], counts: list[int]) -> list[tuple[list[int], int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda asked: complete(found, *asked), zip(prompts, counts, strict=True)))


def test_two_workers_answer_as_one_that_keeps_everything(pair: RunningServer, keeps_all: LLM) -> None:
    prompts = [prompt_of(length, length) for length in LENGTHS]
    expected = expected_of(keeps_all, prompts, COUNTS)
    assert [tokens for tokens, _ in asked_at_once(pair, prompts, COUNTS)] == expected
    turns = [[*prompt, *answer, *prompt_of(40, 7, [])] for prompt, answer in zip(prompts, expected, strict=True)]
    expected = expected_of(keeps_all, turns, [30] * len(turns))
    assert [tokens for tokens, _ in asked_at_once(pair, turns, [30] * len(turns))] == expected
    wait_until(lambda: pair.metrics()["vllm:kv_cache_usage_perc"] == 0)


def change(found: RunningServer, worker: int, **wanted: object) -> None:
    post(found, f"/admin/workers/{worker}", wanted)


def begun(found: RunningServer, prompt: list[int], max_tokens: int) -> tuple[HTTPResponse, bytes]:
    """A stream that has its first token, with the event that says so."""
    body = {"model": served_name(found), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    content = json.dumps({**body, "return_token_ids": True, "ignore_eos": True, "stream": True}).encode()
    reply = urlopen(Request(f"{found.url}/v1/completions", content, {"content-type": "application/json"}))
    return reply, reply.readline()


def rest_of(reply: HTTPResponse, first: bytes) -> list[int]:
    """The tokens of a stream, from its first event on."""
    with reply:
        lines = [first, *reply.read().splitlines()]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def test_streams_move_away_from_a_worker_that_drains(model: Path, keeps_all: LLM) -> None:
    """Round by round, until one was caught while it ran: a fast machine may be done before it is told to drain."""
    prompts = [prompt_of(length, length) for length in (300, 450, 150)]
    counts = [400, 350, 500]
    expected = expected_of(keeps_all, prompts, counts)
    with fleet(model, "--workers", "2") as found:

        def serve_while(worker: int, **wanted: object) -> None:
            streams = [begun(found, *asked) for asked in zip(prompts, counts, strict=True)]
            change(found, worker, **wanted)
            assert [rest_of(*stream) for stream in streams] == expected

        for number in range(100):
            serve_while(number % 2, drain=True)
            change(found, number % 2, drain=False)
            if found.metrics()["diptych:streams_moved_total"]:
                break
        else:
            raise AssertionError("no stream was ever moved")
        serve_while(0, role="prefill")
        wait_until(lambda: found.metrics()["vllm:kv_cache_usage_perc"] == 0)
