"""A model with windows, served: what lies before them is free for others, and each answer is that of a cache that keeps
everything."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from servers import CLI, RunningServer, running, wait_until
from tests.runtime.checkpoints import FAMILIES, make_model

from diptych import LLM, SamplingParams
from diptych.serving.kv_memory import kv_geometry_of
from diptych.serving.link.engine_options import BUNDLED_MODEL, DeviceOptions, EngineOptions, MemoryOptions

pytestmark = pytest.mark.system
LENGTH, VOCABULARY = 1200, 4096
NUM_BLOCKS = 150  # of three groups: what two sequences of the greatest length would take if all was kept
SYSTEM = [random.Random(1).randrange(VOCABULARY) for _ in range(320)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 of random weights, with the tokenizer of the bundled model."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("gemma3")
    made = make_model("Gemma3", FAMILIES["gemma3"][1] | {"vocab_size": VOCABULARY, "eos_token_id": 0})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, directory / name)
    return directory


def options_of(model: Path, **memory: Any) -> EngineOptions:
    device = DeviceOptions(device="cpu", threads=1)
    return EngineOptions(model=str(model), device=device, max_model_len=LENGTH, memory=MemoryOptions(**memory))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    geometry = kv_geometry_of(options_of(model))
    assert len(geometry.layers.groups) == 3
    memory = ("--kv-cache-memory", f"{NUM_BLOCKS * geometry.block_bytes}B", "--max-model-len", str(LENGTH))
    with running([*CLI, "serve", "--model", str(model), "--port", "0", "--threads", "1", *memory]) as found:
        yield found


@pytest.fixture(scope="module")
def keeps_all(model: Path) -> LLM:
    return LLM(options=options_of(model, frees_windows=False))


def post(found: RunningServer, path: str, body: dict[str, Any]) -> Any:
    request = Request(f"{found.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as reply:
        return json.loads(reply.read())


def complete(found: RunningServer, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were not computed."""
    body = {"model": served_name(found), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = post(found, "/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True})
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def served_name(found: RunningServer) -> str:
    with urlopen(f"{found.url}/v1/models") as reply:
        return str(json.loads(reply.read())["data"][0]["id"])


def prompt_of(length: int, seed: int, begin: list[int] = SYSTEM) -> list[int]:
    rng = random.Random(seed)
    return (begin + [rng.randrange(VOCABULARY) for _ in range(length)])[:length]


def expected_of(llm: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in counts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def test_the_start_says_that_windows_are_freed(model: Path) -> None:
    with LLM(options=options_of(model)) as freed:
        assert "windows freed" in freed.ready.description and len(freed.ready.groups) == 3
        assert freed.ready.kv_capacity_tokens >= LENGTH


def test_answers_are_those_of_a_cache_that_keeps_everything(server: RunningServer, keeps_all: LLM) -> None:
    """More at once than memory holds, of all lengths, most of which begin alike; then again, and their next turns."""
    lengths = [1000, 340, 700, 20, 1100, 500, 900, 64, 333, 1050]
    counts = [60, 90, 120, 80, 40, 150, 100, 200, 70, 90]
    prompts = [prompt_of(length, length) for length in lengths]
    expected = expected_of(keeps_all, prompts, counts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda asked: complete(server, *asked), zip(prompts, counts, strict=True)))
    assert [tokens for tokens, _ in found] == expected
    again, cached = complete(server, prompts[-1], counts[-1])
    assert again == expected[-1] and cached >= len(SYSTEM)
    turn = [*prompts[1], *expected[1], *prompt_of(50, 5, [])]
    answer, _ = complete(server, prompts[1], counts[1])
    assert answer == expected[1]
    tokens, cached = complete(server, turn, 50)
    assert tokens == expected_of(keeps_all, [turn], [50])[0]
    assert cached == (len(prompts[1]) + counts[1] - 1) // 32 * 32


def test_clients_that_go_leave_nothing_behind(server: RunningServer) -> None:
    name = served_name(server)
    for seed in range(4):
        body = {"model": name, "prompt": prompt_of(800, seed, []), "max_tokens": 300, "stream": True}
        request = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urlopen(request) as reply:
            reply.readline()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
    wait_until(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0)


def test_a_grammar_is_followed_cold_and_cached(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["alpha", "beta"]}, "size": {"type": "boolean"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    body = {
        "model": served_name(server),
        "messages": [{"role": "user", "content": "def f(x): return x\n" * 40}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "temperature": 0,
        "max_tokens": 60,
    }
    texts = [post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"] for _ in range(2)]
    assert texts[0] == texts[1] and json.loads(texts[0])["name"] in ("alpha", "beta")
