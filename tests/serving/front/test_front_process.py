"""``diptych front`` as a process, over engines that are processes: killed and stopped under load."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import answer_to
from front_harness import read_stream

sys.path.insert(0, str(Path(__file__).parent.parent))

from servers import CLI, RunningServer, running

pytestmark = pytest.mark.system
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
QUICK = ("--probe-interval", "0.2", "--silence", "0.5", "--block-size", "16")


class EngineProcess:
    """A fake engine that is started again on the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        command = (sys.executable, str(FAKE_ENGINE), "vllm", str(self.port), "0.01")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)$", self.process.stdout.readline().strip())
        assert found
        self.port = int(found[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def engines() -> Iterator[list[EngineProcess]]:
    """Three."""
    started = [EngineProcess() for _ in range(3)]
    yield started
    for engine in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.process.pid, signal.SIGCONT)
        engine.kill()


@pytest.fixture
def front(engines: list[EngineProcess]) -> Iterator[RunningServer]:
    """Over these."""
    given = [part for engine in engines for part in ("--engine", f"vllm=http://127.0.0.1:{engine.port}")]
    with running((*CLI, "front", "--port", "0", *QUICK, *given)) as server:
        yield server


async def load(url: str, count: int, until: asyncio.Event) -> list[tuple[str, str, object]]:
    """(expected, text, error) of each answer of ``count`` clients that ask again and again."""
    found: list[tuple[str, str, object]] = []

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            turn = 0
            while not until.is_set():
                prompt, turn = f"client {number} turn {turn}", turn + 1
                body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "stream": True}
                answer = read_stream(await http.post("/v1/completions", json=body))
                found.append((answer_to(prompt, 20), answer.text, answer.error))

    await asyncio.gather(*(client(number) for number in range(count)))
    return found


async def _under_load(front: RunningServer, engines: list[EngineProcess], kind: str, times: int) -> None:
    rng, until = random.Random(3), asyncio.Event()
    clients = asyncio.create_task(load(front.url, 8, until))
    for _ in range(times):
        await asyncio.sleep(0.4)
        victim = rng.choice(engines)
        if kind == "kill":
            victim.kill()
            await asyncio.sleep(0.1)
            victim.start()
        else:
            os.kill(victim.process.pid, signal.SIGSTOP)
            await asyncio.sleep(4.0)  # longer than the front waits for a sign of life
            os.kill(victim.process.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    until.set()
    answers = await asyncio.wait_for(clients, 60)
    assert len(answers) > 8
    wrong = [answer for answer in answers if answer[0] != answer[1] or answer[2]]
    assert not wrong, wrong[:3]


def test_engines_that_are_killed_under_load_lose_no_answer(front: RunningServer, engines: list[EngineProcess]) -> None:
    asyncio.run(_under_load(front, engines, "kill", 6))
    assert front.terminate() == 0


def test_an_engine_that_is_stopped_under_load_loses_no_answer(
    front: RunningServer, engines: list[EngineProcess]
) -> None:
    asyncio.run(_under_load(front, engines, "stop", 1))


@pytest.mark.slow
def test_two_hundred_kills(front: RunningServer, engines: list[EngineProcess]) -> None:
    asyncio.run(_under_load(front, engines, "kill", 200))


def test_the_engines_of_a_file_are_served(engines: list[EngineProcess], tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    file = tmp_path / "engines.toml"
    file.write_text("".join(f'[[engine]]\nkind = "vllm"\nurl = "{url}"\n\n' for url in urls))
    with running((*CLI, "front", "--port", "0", *QUICK, "--engines", str(file))) as server:
        found = httpx.get(f"{server.url}/engines").json()["engines"]
        assert [engine["url"] for engine in found] == urls
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert reply.json()["choices"][0]["text"] == answer_to("abc", 4)


def test_a_file_of_engines_that_is_wrong_ends_the_command(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    for content, words in (
        (None, "No such file"),
        ("[[engine]", "is no TOML"),
        ("[other]\n", "only [[engine]] tables"),
    ):
        if content is not None:
            file.write_text(content)
        command = (*CLI, "front", "--engines", str(file))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = " ".join((done.stderr + done.stdout).split())
        assert done.returncode != 0 and words in said and "Traceback" not in said, (content, said)


def test_what_the_command_line_refuses() -> None:
    for given, words in (
        ((), "between 1 and"),
        (("--engine", "vllm"), "expected KIND=URL"),
        (("--engine", "tgi=http://h:1"), "one of vllm, sglang"),
        (("--engine", "vllm=http://h:1/v1"), "without a path"),
        (("--engine", "openai=http://h:1,role=prefill"), "no protocol to hand a prompt over"),
        (("--engine", "vllm=http://h:1,colour=red"), "unknown field 'colour'"),
    ):
        done = subprocess.run((*CLI, "front", *given), capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and words in done.stderr + done.stdout, (given, done.stderr)


def test_the_url_of_a_front_is_diagnosed_with_all_that_stands_behind_it(
    engines: list[EngineProcess], front: RunningServer
) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            for number in range(24):
                body = {"prompt": f"question {number}", "max_tokens": 8, "temperature": 0, "stream": True}
                assert read_stream(await http.post("/v1/completions", json=body)).is_done

    asyncio.run(ask())
    command = (*CLI, "diagnose", front.url, "--json", "--no-advice")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for name in (front.url, *(f"127.0.0.1:{engine.port}" for engine in engines)):
        assert name.removeprefix("http://") in shown.stdout + shown.stderr
