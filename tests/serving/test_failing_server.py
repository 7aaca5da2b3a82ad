"""Defects planted into real processes: a server's cluster core, a worker's engine core and its step, an LLM."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_worker import VOCAB_SIZE

from diptych.control.errors import BrokenInvariantError, CoreFailedError, WorkerError
from diptych.control.request import SamplingParams
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions

FAILING_WORKER = """
import sys
sys.path.insert(0, {tests!r})
import fake_worker
from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import BrokenInvariantError
from pathlib import Path

flag = Path({flag!r})
where, times = {where!r}, {times}
owner, name = (EngineCore, "begin_step") if where == "core" else (fake_worker.FakeRunner, "execute")
sound = getattr(owner, name)


def planted(self, *arguments):
    num_failed = len(flag.read_text()) if flag.exists() else 0
    if num_failed < times and (where == "step" or self.requests):
        flag.write_text("x" * (num_failed + 1))
        raise BrokenInvariantError("planted")
    return sound(self, *arguments)


setattr(owner, name, planted)
sys.argv[1:1] = []
sys.exit(fake_worker.main())
"""


def failing_worker(folder: Path, where: str, times: int) -> tuple[str, ...]:
    """The command of a worker that fails ``times`` times in all."""
    script = folder / "failing_worker.py"
    tests = str(Path(__file__).parent)
    script.write_text(FAILING_WORKER.format(tests=tests, flag=str(folder / "flag"), where=where, times=times))
    return (sys.executable, str(script))


async def answer(llm: AsyncLLM, count: int) -> list[int]:
    """Tokens after a prompt of four."""
    token_ids: list[int] = []
    async for output in llm.generate([5, 6, 7, 8], SamplingParams(max_tokens=count, temperature=0.0)):
        token_ids = list(output.outputs[0].token_ids)
    return token_ids


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["core", "step"])
async def test_a_worker_that_fails_by_a_defect_is_replaced_and_its_stream_goes_on(tmp_path: Path, where: str) -> None:
    options = EngineOptions(failures=str(tmp_path / "failures"))
    async with AsyncLLM(options, Fleet(options, launcher=LocalLauncher(failing_worker(tmp_path, where, 1)))) as llm:
        assert await answer(llm, 12) == [(4 + at) % VOCAB_SIZE for at in range(12)]
        (failure,) = llm.fleet.failures.recent
        assert failure.core == "worker 0" and "BrokenInvariantError: planted" in failure.error
        assert ("the step of worker 0" if where == "step" else "the engine core of worker 0") in failure.error
        header = json.loads(Path(failure.recording).read_bytes().split(b"\n")[0])
        assert header["failure"]["error"] == "BrokenInvariantError: planted"
        assert llm.health()[0] == 200


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_request_whose_step_breaks_two_workers_is_refused_and_says_why(tmp_path: Path) -> None:
    options = EngineOptions(failures=str(tmp_path / "failures"))
    async with AsyncLLM(options, Fleet(options, launcher=LocalLauncher(failing_worker(tmp_path, "step", 99)))) as llm:
        with pytest.raises(WorkerError, match="BrokenInvariantError: planted") as caught:
            await answer(llm, 4)
        assert caught.value.code == "poison_request" and caught.value.status == 500


FAILING_SERVER = """
import sys
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Reported
from diptych.control.events import FirstToken
from diptych.control.errors import BrokenInvariantError

sound = ClusterCore._take_first_token


def planted(self, worker, event, now):
    raise BrokenInvariantError("planted")


ClusterCore._take_first_token = planted
from diptych.cli.main import main

sys.argv = ["diptych", *sys.argv[1:]]
main()
"""


def free_port() -> int:
    """One that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of a reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_whose_core_fails_answers_says_so_and_ends(tmp_path: Path, stream: bool) -> None:
    script, port = tmp_path / "server.py", free_port()
    script.write_text("from diptych.base import compiled_modules\ncompiled_modules.use_sources()\n" + FAILING_SERVER)
    log = tmp_path / "access.log"
    command = [sys.executable, str(script), "serve", "--port", str(port), "--access-log", str(log), "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    assert server.stderr is not None
    reader = threading.Thread(target=lambda: errors.extend(server.stderr or ()))
    reader.start()
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _is_ready(url), server)
        body = {"model": "stdlib-python", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}
        status, text = ask(f"{url}/v1/chat/completions", {**body, "stream": stream})
        assert "the cluster core has failed" in text and "BrokenInvariantError: planted" in text
        assert status == 500 or (stream and text.endswith("data: [DONE]\n\n"))
        assert str(tmp_path) not in text
        status, text = ask(f"{url}/health")
        assert status == 503 and "planted" in text and "diptych-failure-the-cluster-core" in text
        assert ask(f"{url}/ready")[0] == 503
        assert ask(f"{url}/v1/chat/completions", body)[0] == 503
        assert server.wait(60) == 1
        (recording,) = tmp_path.glob("diptych-failure-*.jsonl")
        assert recording.stat().st_mode & 0o777 == 0o600
        reader.join(10)
        assert str(recording) in "".join(errors)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        reader.join(10)
        server.stderr.close()


POISONED_SERVER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path

from diptych.base import compiled_modules

compiled_modules.use_sources()
from fake_worker import fake_command

from diptych.cli.error_messages import errors_in_words
from diptych.control.errors import BrokenInvariantError
from diptych.serving.answers.stream_journal import StreamJournal
from diptych.serving.api import server
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions

server.FAILED_S = 0.5
folder, sound = Path({folder!r}), Fleet._handle


def planted(self, event, now):
    if sum(self.progress().values()) >= {fails_after}:
        raise BrokenInvariantError("planted")
    return sound(self, event, now)


Fleet._handle = planted
options = EngineOptions(failures=str(folder))
fleet = Fleet(options, launcher=LocalLauncher(fake_command(step_ms=5)))
llm = AsyncLLM(options, fleet, StreamJournal(folder / "streams"))
with errors_in_words():
    server.run_server(llm, server.ServerOptions(port={port}, served_model_name="fake"))
"""


@pytest.mark.system
def test_a_server_whose_core_fails_again_over_one_folder_ends_each_time_and_its_stream_goes_on(tmp_path: Path) -> None:
    """It is started anew over the same recorded streams: they do not break it by themselves."""
    script, port = tmp_path / "server.py", free_port()
    url, body = f"http://127.0.0.1:{port}/v1/completions", {"model": "fake", "prompt": "def add(a, b):"}
    body |= {"max_tokens": 100, "stream": True, "ignore_eos": True}
    places = {"tests": str(Path(__file__).parent), "folder": str(tmp_path), "port": port}
    text, last_id = "", ""
    for number, fails_after in enumerate((3, 7, 1000)):
        script.write_text(POISONED_SERVER.format(fails_after=fails_after, **places))
        server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: _is_ready(url.partition("/v1")[0]), server)
            found, last_id, said = stream_of(url, body, last_id)
            text += found
            assert last_id, "a part of the answer was given"
            assert len(list(tmp_path.glob("diptych-failure-*.jsonl"))) == min(number + 1, 2)
            if fails_after < 1000:
                assert "the cluster core has failed" in said and server.wait(60) == 1
            else:
                assert text == stream_of(url, body, "")[0]
        finally:
            server.kill()
            server.wait()


def stream_of(url: str, body: dict[str, Any], last_id: str) -> tuple[str, str, str]:
    """The text up to the last id of a stream that goes on after this one, that id, and all that was said. (A failure
    before its first new token is a plain 500.)"""
    headers = {"Content-Type": "application/json"} | ({"Last-Event-ID": last_id} if last_id else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            said = reply.read().decode()
    except urllib.error.HTTPError as error:
        return "", last_id, error.read().decode()
    text = fresh = ""
    for event in said.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if fields.get("data", "[DONE]") != "[DONE]":
            fresh += "".join(choice["text"] for choice in json.loads(fields["data"]).get("choices", ()))
        if "id" in fields:
            text, last_id, fresh = text + fresh, fields["id"], ""
    return text, last_id, said


def _is_ready(url: str) -> bool:
    try:
        return ask(f"{url}/ready")[0] == 200
    except OSError:
        return False


def until(condition: Any, server: "subprocess.Popen[str]") -> None:
    """Wait for it while the server runs."""
    while not condition():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.05)


def test_an_llm_whose_engine_fails_says_so_and_computes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.serving.llm import LLM

    llm = LLM(options=EngineOptions(failures=str(tmp_path)))
    sampling = SamplingParams(max_tokens=4, temperature=0.0)

    def planted(*_: Any) -> None:
        raise BrokenInvariantError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "execute", planted)
        with pytest.raises(CoreFailedError, match="BrokenInvariantError: planted; make another LLM"):
            llm.generate("def f(", sampling, progress=False)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(CoreFailedError, match="make another LLM"):
        llm.generate("def f(", sampling, progress=False)


def test_an_llm_that_is_interrupted_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.serving.llm import LLM

    llm = LLM()
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    before = llm.generate("def f(", sampling, progress=False)[0].outputs[0].token_ids

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner._sampling, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("def g(", sampling, progress=False)
    assert llm.generate("def f(", sampling, progress=False)[0].outputs[0].token_ids == before
