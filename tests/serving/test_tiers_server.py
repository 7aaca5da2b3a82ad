"""A server whose KV survives it: restarts, kills, and the command that looks at the folder."""

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from servers import CLI, RunningServer, running, wait_until
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.cli.cache import read_prompts
from diptych.control.errors import ConfigError

pytestmark = pytest.mark.system
SLOW = "torch"  # kernels, so that reading the KV of so small a model is clearly faster than computing it
PROMPT = [random.Random(1).randrange(500) for _ in range(1000)]


@contextmanager
def server(disk: Path, *options: str) -> Iterator[RunningServer]:
    memory = ("--kv-disk", str(disk), "--kv-disk-gb", "0.5", "--kv-host-gb", "0.05")
    with running([*CLI, "serve", "--port", "0", "--threads", "1", "--isa", SLOW, *memory, *options]) as found:
        yield found


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as reply:
        return json.loads(reply.read())


def complete(found: RunningServer, prompt: list[int], **fields: Any) -> tuple[str, int]:
    """The text and how many prompt tokens were not computed."""
    body = {"model": "stdlib-python", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    reply = post(f"{found.url}/v1/completions", body)
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def stored(found: RunningServer, count: int) -> None:
    names = ('diptych:kv_disk_blocks{role="both",worker="0"}', 'diptych:kv_disk_blocks{worker="0",role="both"}')
    try:
        wait_until(lambda: max(found.metrics().get(name, 0) for name in names) >= count)
    except AssertionError:
        print({name: value for name, value in found.metrics().items() if "kv_" in name or "step_time" in name})
        raise


@pytest.mark.parametrize("options", [(), ("--prefill", "1", "--decode", "1", "--disaggregate", "always")])
def test_a_server_that_was_killed_finds_its_cache_again(tmp_path: Path, options: tuple[str, ...]) -> None:
    with server(tmp_path, *options) as first:
        text, cached = complete(first, PROMPT)
        assert cached == 0
        if options:
            wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.kv")))
            wait_until(lambda: "31 " in cli_ls(tmp_path))
        else:
            stored(first, 31)
        first.process.kill()
    with server(tmp_path, *options) as second:
        assert complete(second, PROMPT) == (text, 31 * 32)
        assert complete(second, PROMPT, cache_salt="another tenant") == (text, 0)
        with urlopen(f"{second.url}/ui/state") as reply:
            tiers = json.loads(reply.read())["tiers"]
        assert tiers and tiers[0]["had_disk"]
    result = CliRunner().invoke(cli.app, ["cache", "verify", str(tmp_path)])
    assert result.exit_code == 0 and " 0 damaged" in result.output


def test_conversations_return_to_the_worker_whose_host_memory_holds_them() -> None:
    """Two workers, whose caches hold two of the conversations each, and whose host memories hold all."""
    rng = random.Random(2)
    prompts = [[rng.randrange(500) for _ in range(1000)] for _ in range(8)]
    memory = ("--workers", "2", "--kv-cache-memory", "5MiB", "--max-model-len", "1100", "--kv-host-gb", "0.06")
    with running([*CLI, "serve", "--port", "0", "--threads", "1", "--isa", SLOW, *memory]) as found:
        first = [complete(found, prompt) for prompt in prompts]
        assert {cached for _, cached in first} == {0}
        again = [complete(found, prompt) for prompt in reversed(prompts)]  # (taking turns would be wrong each time)
        assert [text for text, _ in reversed(again)] == [text for text, _ in first]
        assert sum(cached for _, cached in again) >= 6 * 31 * 32
        name = "diptych:kv_host_hit_tokens_total"
        # Four of them are in the device caches, or most of their blocks are.
        wait_until(lambda: sum(value for key, value in found.metrics().items() if key.startswith(name)) >= 2 * 31 * 32)
        assert found.metrics()["diptych:router_cache_alarm"] == 0


def hits(found: RunningServer, name: str) -> float:
    """The hits of all workers together."""
    return sum(value for key, value in found.metrics().items() if key.startswith(f"diptych:{name}"))


def test_a_worker_reads_from_the_host_memory_of_another_what_it_would_compute_again() -> None:
    """A conversation lies in the host memory of one of two workers; then many ask for it at once, so that some of them
    go to the other one. A worker that is killed takes nothing from the other, and comes back."""
    rng = random.Random(4)
    prompts = [[rng.randrange(500) for _ in range(1000)] for _ in range(8)]
    memory = ("--workers", "2", "--kv-cache-memory", "5MiB", "--max-model-len", "1100", "--kv-host-gb", "0.06")
    with running([*CLI, "serve", "--port", "0", "--threads", "1", "--isa", SLOW, *memory]) as found:
        texts = [complete(found, prompt, max_tokens=30)[0] for prompt in prompts]
        assert hits(found, "kv_peers_on") == 2
        for prompt, text in zip(prompts, texts, strict=True):
            with ThreadPoolExecutor(6) as pool:
                replies = list(pool.map(lambda _, asked=prompt: complete(found, asked, max_tokens=30), range(6)))
            assert {reply[0] for reply in replies} == {text}
        wait_until(lambda: hits(found, "kv_peer_hit_tokens_total") >= 31 * 32)
        assert hits(found, "kv_peer_missed_blocks_total") < hits(found, "kv_peer_hit_tokens_total") / 32
        first, _ = worker_pids(found)
        os.kill(first, signal.SIGKILL)
        assert [complete(found, prompt, max_tokens=30)[0] for prompt in prompts] == texts


def worker_pids(found: RunningServer) -> list[int]:
    """The worker processes of this server."""
    children = Path(f"/proc/{found.process.pid}/task/{found.process.pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [pid for pid, command in commands.items() if b"diptych.serving.worker" in command]


def test_a_decode_worker_brings_up_what_it_holds_of_a_prompt_before_another_computes_the_rest() -> None:
    """Only that worker of the two which decodes keeps anything; its cache holds two of the conversations."""
    rng = random.Random(3)
    prompts = [[rng.randrange(500) for _ in range(1000)] for _ in range(6)]
    memory = ("--kv-cache-memory", "5MiB", "--max-model-len", "1100", "--kv-host-gb", "0.06")
    options = ("--prefill", "1", "--decode", "1", "--disaggregate", "always", *memory)
    with running([*CLI, "serve", "--port", "0", "--threads", "1", "--isa", SLOW, *options]) as found:
        first = [complete(found, prompt) for prompt in prompts]
        assert {cached for _, cached in first} == {0}
        assert [complete(found, prompt) for prompt in prompts] == [(text, 31 * 32) for text, _ in first]
        assert found.metrics()['diptych:placements_total{reason="remote"}'] == 12
        name = 'diptych:kv_host_hit_tokens_total{role="decode",worker="1"}'
        wait_until(lambda: found.metrics()[name] >= 4 * 31 * 32)  # a worker reports five times a second


def cli_ls(folder: Path) -> str:
    return CliRunner().invoke(cli.app, ["cache", "ls", str(folder)]).output


def test_prompts_can_be_computed_ahead_and_the_folder_be_looked_at(tmp_path: Path) -> None:
    folder, prompts = tmp_path / "kv", tmp_path / "prompts.jsonl"
    text = "def read(self):\n    return self.file.read()\n" * 70
    prompts.write_text(json.dumps(text) + "\n" + json.dumps({"prompt": text[::-1]}) + "\n")
    arguments = ["cache", "warm", str(prompts), "--kv-disk", str(folder), "--threads", "1", "--isa", SLOW]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "stdlib-python" in cli_ls(folder)
    with server(folder) as found:
        reply = post(f"{found.url}/v1/completions", {"model": "stdlib-python", "prompt": text, "max_tokens": 1})
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    (segment,) = list(folder.glob("*.kv"))[:1]
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(data)
    result = CliRunner().invoke(cli.app, ["cache", "verify", str(folder)])
    assert result.exit_code == 1 and "damaged" in result.output
    result = CliRunner().invoke(cli.app, ["cache", "verify", str(folder)])
    assert result.exit_code == 0  # the extent is gone
    result = CliRunner().invoke(cli.app, ["cache", "clear", str(folder)])
    assert result.exit_code == 0 and "GB freed" in result.output
    assert not list(folder.glob("*.kv"))


@pytest.mark.parametrize("line", ["{", "3", '{"text": "a"}', '{"prompt": 3}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)
