"""Streams that are gone on with: after every event, in the middle, at the end, and after the server has died."""

import errno
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_worker import fake_command

from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.answers import stream_journal
from diptych.serving.answers.stream_journal import StreamHead, StreamJournal, read_record
from diptych.serving.api.app import build_app
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions

pytestmark = pytest.mark.system
COMPLETION = {"model": "fake", "prompt": "def add(a, b):\n", "max_tokens": 24, "stream": True, "temperature": 0.9}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "stream": True}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@asynccontextmanager
async def server(directory: Path | None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    options = EngineOptions()
    journal = StreamJournal(directory) if directory is not None else None
    async with AsyncLLM(options, Fleet(options, launcher=LocalLauncher(fake_command())), journal) as llm:
        app = build_app(llm, "fake", **settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield client


class Events:
    """A stream's server-sent events."""

    def __init__(self, reply: httpx.Response) -> None:
        assert reply.status_code == 200, reply.text
        self.ids: list[str] = []
        self.texts: list[str] = []  # of each id: what came since the one before
        self.ends: list[str] = []
        text = ""
        for event in reply.text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.splitlines() if line)
            if not fields or fields["data"] == "[DONE]":
                continue
            for choice in json.loads(fields["data"])["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if "id" in fields:
                self.ids.append(fields["id"])
                self.texts.append(text)
                text = ""
        assert reply.text.endswith("data: [DONE]\n\n") and not text


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_goes_on_after_each_of_its_events_with_what_would_have_come(path: str, tmp_path: Path) -> None:
    async with server(tmp_path / "streams") as client:
        whole = Events(await client.post(path, json=BODIES[path]))
        assert len(whole.ids) > 3 and whole.ends == ["length"]
        for number, event_id in enumerate(whole.ids):
            rest = Events(await client.post(path, json=BODIES[path], headers={"Last-Event-ID": event_id}))
            assert "".join(rest.texts) == "".join(whole.texts[number + 1 :])
            assert rest.ends == (whole.ends if number + 1 < len(whole.ids) else rest.ends)
            if rest.ids:
                assert rest.ids[-1] == whole.ids[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_goes_on_after_the_server_has_died_at_any_byte_of_its_record(path: str, tmp_path: Path) -> None:
    directory = tmp_path / "streams"
    async with server(directory) as client:
        whole = Events(await client.post(path, json=BODIES[path]))
    stream_id = whole.ids[0].rpartition(".")[0]
    record = (directory / stream_id).read_bytes()
    async with server(directory) as client:
        for cut in range(len(record) - 1, 0, -max(1, len(record) // 12)):
            (directory / stream_id).write_bytes(record[:cut])
            known = read_record(directory, stream_id, 1)
            for number, event_id in enumerate(whole.ids):
                headers = {"Last-Event-ID": event_id}
                num_seen = int(event_id.rpartition(".")[2])
                (directory / stream_id).write_bytes(record[:cut])
                if known is None or num_seen > len(known.token_ids):
                    assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 404
                elif number % 4 == 0:
                    rest = Events(await client.post(path, json=BODIES[path], headers=headers))
                    assert "".join(rest.texts) == "".join(whole.texts[number + 1 :]) and rest.ends == whole.ends


@pytest.mark.asyncio
async def test_a_stream_that_goes_on_can_be_gone_on_with_again(tmp_path: Path) -> None:
    directory = tmp_path / "streams"
    async with server(directory) as client:
        whole = Events(await client.post("/v1/completions", json=COMPLETION))
        stream_id = whole.ids[0].rpartition(".")[0]
        record = (directory / stream_id).read_bytes()
        (directory / stream_id).write_bytes(record[: len(record) * 2 // 3])
        known = read_record(directory, stream_id, 1)
        assert known is not None and known.finished is None
        for number in (2, 1):
            rest = await client.post("/v1/completions", json=COMPLETION, headers={"Last-Event-ID": whole.ids[number]})
            assert "".join(Events(rest).texts) == "".join(whole.texts[number + 1 :])
        after = read_record(directory, stream_id, 1)
        assert after is not None and after.finished is not None and len(after.token_ids) == 24


@pytest.mark.asyncio
async def test_who_may_go_on_and_with_what(tmp_path: Path) -> None:
    async with server(tmp_path / "streams", api_keys=("a", "b")) as client:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        whole = Events(await client.post("/v1/completions", json=COMPLETION, headers=mine))
        asked = {"Last-Event-ID": whole.ids[1]}
        stream_id = whole.ids[1].rpartition(".")[0]
        for headers, status in (
            (mine | asked, 200),
            (other | asked, 404),
            (mine | {"Last-Event-ID": "nonsense"}, 404),
            (mine | {"Last-Event-ID": f"../{whole.ids[1]}"}, 404),
            (mine | {"Last-Event-ID": f"{stream_id}.25"}, 404),
            (mine | {"Last-Event-ID": f"{stream_id}.0"}, 404),
        ):
            reply = await client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert reply.status_code == status, headers
        wrong = await client.post("/v1/chat/completions", json=CHAT, headers=mine | asked)
        assert wrong.status_code == 404 and "no such stream" in wrong.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes", [{"n": 2}, {"logprobs": 1}, {"echo": True}, {"prompt": ["a", "b"]}, {"stream": False}], ids=str
)
async def test_other_replies_have_no_ids_and_are_not_recorded(changes: dict[str, Any], tmp_path: Path) -> None:
    async with server(tmp_path / "streams") as client:
        reply = await client.post("/v1/completions", json=COMPLETION | changes)
        assert reply.status_code == 200 and "id: " not in reply.text.replace('"id":', "")
        assert os.listdir(tmp_path / "streams") == ["lock"]


@pytest.mark.asyncio
async def test_without_records_a_wish_to_go_on_is_refused_and_streams_have_no_ids() -> None:
    async with server(None) as client:
        assert "\nid: " not in (await client.post("/v1/completions", json=COMPLETION)).text
        reply = await client.post("/v1/completions", json=COMPLETION, headers={"Last-Event-ID": "cmpl-1.3"})
        assert reply.status_code == 400 and "--survive-restart" in reply.text


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="others can enter"):
        StreamJournal(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="survive_restart is"):
        StreamJournal(tmp_path / "file")


@pytest.mark.asyncio
async def test_records_are_removed_after_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "streams"
    async with server(directory) as client:
        await client.post("/v1/completions", json=COMPLETION)
        [name] = set(os.listdir(directory)) - {"lock"}
        os.utime(directory / name, (0, 0))
        (directory / "not-ours").touch()
    async with server(directory) as client:
        await client.post("/v1/completions", json=COMPLETION)
        assert name not in os.listdir(directory) and len(os.listdir(directory)) == 3


def begun(journal: StreamJournal, number: int) -> bool:
    """Whether a stream of this number is recorded, which ends at once."""
    stream = SimpleNamespace(num_tokens=1, token_ids=[7], finished=None, stop_reason=None)
    generation: Any = SimpleNamespace(request_id=f"cmpl-{number:032x}", streams=[stream])
    is_recorded = journal.begin(generation, StreamHead("text", "me", b"{}", 0, [1]))
    journal.close(generation)
    return is_recorded


def test_as_many_streams_are_recorded_as_the_limit_and_others_are_served_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_limits, "RECORDED_STREAMS", 3)
    for number in range(2):  # those of an earlier server count
        journal = StreamJournal(tmp_path / "streams")
        assert begun(journal, number)
        journal.end()
    journal = StreamJournal(tmp_path / "streams")
    assert [begun(journal, number) for number in (2, 3)] == [True, False]
    assert begun(journal, 0)  # that one goes on
    assert not begun(journal, 4) and len(os.listdir(tmp_path / "streams")) == 3 + len(["lock"])
    journal.end()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_record_is_kept_for_its_time_and_no_longer(is_over: bool, tmp_path: Path) -> None:
    journal, now = StreamJournal(tmp_path / "streams"), time.time()
    assert begun(journal, 0)
    ended = now - edge_limits.RECORDED_STREAM_S + (-1 if is_over else 3600)  # a busy machine takes a while until then
    os.utime(tmp_path / "streams" / f"cmpl-{0:032x}", (ended, ended))
    journal._swept_s = 0.0
    assert begun(journal, 1)
    assert (journal.load(f"cmpl-{0:032x}", 1) is None) == is_over
    journal.end()


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["scandir", "replace", "open", "write"])
async def test_wherever_the_disk_fails_a_stream_is_served_without_a_record(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = StreamJournal(tmp_path / "streams")
    stream = SimpleNamespace(num_tokens=0, token_ids=[], finished=None, stop_reason=None)
    generation: Any = SimpleNamespace(request_id=f"cmpl-{0:032x}", streams=[stream])
    targets = {"scandir": (os, "scandir"), "replace": (Path, "replace"), "write": (os, "write")}
    with monkeypatch.context() as patch:
        patch.setattr(*targets.get(where, (stream_journal, "open_private")), failing)
        is_recorded = journal.begin(generation, StreamHead("text", "me", b"{}", 0, [1]))
    assert is_recorded == (where == "scandir")  # a list that cannot be read hinders nothing
    assert journal.num_not_recorded == (not is_recorded)
    journal.write([generation])
    journal.close(generation)
    assert set(os.listdir(tmp_path / "streams")) == {"lock"} | ({generation.request_id} if is_recorded else set())
    journal.end()


@pytest.mark.asyncio
async def test_a_disk_that_is_full_in_the_middle_of_a_stream_ends_its_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = StreamJournal(tmp_path / "streams")
    stream = SimpleNamespace(num_tokens=0, token_ids=[], finished=None, stop_reason=None)
    generation: Any = SimpleNamespace(request_id=f"cmpl-{0:032x}", streams=[stream])
    assert journal.begin(generation, StreamHead("text", "me", b"{}", 0, [1]))
    for is_full in (False, True, True, False, False):
        stream.num_tokens += 1
        stream.token_ids.append(7)
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(os, "write", failing)
            journal.write([generation])
    assert journal.num_not_recorded == 1 and journal.live(generation.request_id) is None
    assert os.listdir(tmp_path / "streams") == ["lock"]
    journal.close(generation)
    assert not journal._written
    journal.end()
