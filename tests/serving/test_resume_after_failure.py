"""A recorded stream goes on after its server's core has failed, again and again, without a lost or a doubled token.

In one process and virtual time: each life of the server is an AsyncLLM with its own fleet over the same folder."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process_fleet import engine_options
from in_process_worker import Host
from tests.laws import law
from virtual_time import in_virtual_time, virtual_time

from diptych.control.cluster.cluster_events import ClusterEvent
from diptych.control.commands import Command
from diptych.control.errors import BrokenInvariantError
from diptych.serving.answers.stream_journal import StreamJournal
from diptych.serving.api.app import build_app
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions

LENGTH = 24
COMPLETION = {"model": "fake", "prompt": "def add(a, b):\n", "max_tokens": LENGTH, "stream": True}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": LENGTH, "stream": True}
BODIES: dict[str, dict[str, Any]] = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@dataclass
class Part:
    """What one connection brought: the text up to its last id, that id, and how it ended."""

    text: str = ""
    last_id: str = ""
    ends: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None


def read(reply: httpx.Response) -> Part:
    """Text without an id behind it is not counted: it would come again."""
    part, fresh = Part(), ""
    for event in reply.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if not fields.get("data") or fields["data"] == "[DONE]":
            continue
        content = json.loads(fields["data"])
        part.error = content.get("error") or part.error
        for choice in content.get("choices", ()):
            fresh += choice.get("text") or choice.get("delta", {}).get("content") or ""
            part.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        if "id" in fields:
            part.text, part.last_id, fresh = part.text + fresh, fields["id"], ""
    return part


@asynccontextmanager
async def life(folder: Path | None, fails_after: int | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A server whose core fails when ``fails_after`` tokens are known of its streams."""
    time = virtual_time()
    options = engine_options(failures=str(folder.parent / "failures") if folder is not None else "")
    fleet = Fleet(options, FleetOptions(both=2), Host(time), clock=time.clock)
    journal = StreamJournal(folder) if folder is not None else None
    async with AsyncLLM(options, fleet, journal) as llm:
        sound = fleet.core.on_event

        def failing(event: ClusterEvent, now: int) -> list[Command]:
            if fails_after is not None and sum(fleet.progress().values()) >= fails_after:
                raise BrokenInvariantError("planted")
            return sound(event, now)

        fleet.core.on_event = failing  # type: ignore[method-assign]
        transport = httpx.ASGITransport(build_app(llm, "fake"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
        assert fleet.failures.ended.is_set() == (fails_after is not None)
        assert not len(fleet.streams)


async def goes_on(path: str, failures: list[int], folder: Path) -> None:
    """Each of these lives fails after its number of the stream's tokens, also over the same one; the last is sound."""
    async with life(folder.with_name("whole")) as client:
        whole = read(await client.post(path, json=BODIES[path]))
    assert whole.ends == ["length"] and whole.error is None
    text, last_id = "", ""
    for number, fails_after in enumerate([*failures, None]):
        async with life(folder, fails_after) as client:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            reply = await client.post(path, json=BODIES[path], headers=headers)
            part = read(reply)
            text, last_id = text + part.text, part.last_id or last_id
            assert whole.text.startswith(text)
            if fails_after is None:
                assert (text, part.ends, part.error) == (whole.text, ["length"], None), number
            elif reply.status_code == 200:
                assert part.error is not None and part.error["code"] == "core_failed" and not part.ends
                assert "the cluster core has failed" in part.error["message"]
            else:  # it had not begun
                assert reply.status_code == 500 and "the cluster core has failed" in reply.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("failures", [[1], [LENGTH - 1], [4, 4, 9]], ids=str)
@in_virtual_time
async def test_a_stream_goes_on_over_one_folder_though_the_core_fails(
    path: str, failures: list[int], tmp_path: Path
) -> None:
    await goes_on(path, failures, tmp_path / "streams")


@law(weight=2.0)
def test_it_goes_on_however_often_and_wherever_the_core_fails(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    failures = [rng.randrange(1, LENGTH) for _ in range(rng.randrange(1, 5))]

    @in_virtual_time
    async def run() -> None:
        await goes_on(rng.choice(list(BODIES)), failures, tmp_path_factory.mktemp("lives") / "streams")

    run()


@in_virtual_time
async def test_a_stream_that_is_not_recorded_ends_with_the_error() -> None:
    async with life(None, 5) as client:
        part = read(await client.post("/v1/completions", json=COMPLETION))
        assert part.error is not None and part.error["code"] == "core_failed" and not part.last_id
        assert (await client.get("/health")).status_code == 503
