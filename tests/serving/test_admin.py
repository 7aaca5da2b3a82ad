"""Roles, shapes and workers that change while a fleet serves: through the library and through the operator's routes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from in_process_fleet import ALWAYS, InProcessFleet, expected, in_process_fleet
from virtual_time import in_virtual_time

from diptych.base.processor import Processor
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.config import shape_preset
from diptych.control.errors import ConfigError, ConflictError, NotFoundError
from diptych.control.slo import NS_PER_S
from diptych.serving.api.app import build_app
from diptych.serving.async_llm import AsyncLLM

PROMPT = [5] * 100
HERE, ELSEWHERE = ("127.0.0.1", 1234), ("10.0.0.7", 1234)


async def streams_on(setup: InProcessFleet, worker: int, count: int) -> None:
    """Until that many requests decode there."""
    engine = setup.workers[worker].engine
    assert engine is not None
    await setup.when(lambda: len(engine.core.engine.scheduler.batch) == count)


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
@pytest.mark.parametrize("change", ["role", "drain"])
@in_virtual_time
async def test_streams_that_move_lose_no_token_and_get_none_twice(transfer: str, change: str) -> None:
    async with in_process_fleet(decode=2, prefill=1, transfer=transfer, cluster=ALWAYS) as setup:
        names = [f"r{number}" for number in range(8)]
        for number, name in enumerate(names):
            setup.client.submit(name, [7 + number] * (90 + 11 * number), max_tokens=400)
        await setup.when(lambda: all(setup.client.generations[name].streams[0].num_tokens > 3 for name in names))
        leaving = 1
        moved = [name for name in names if setup.client.generations[name].streams[0].worker == leaving]
        assert moved
        if change == "role":
            setup.fleet.changes.change_role(0, "both")
            setup.fleet.changes.change_role(leaving, "prefill")
        else:
            setup.fleet.changes.drain(leaving)
        began = setup.time.now
        await streams_on(setup, leaving, 0)
        assert setup.time.now - began < NS_PER_S
        for number, name in enumerate(names):
            assert await setup.client.read(name) == expected([0] * (90 + 11 * number), 400)
            assert setup.client.generations[name].streams[0].worker != leaving
        assert setup.fleet.core.counts["moved"] == len(moved)
        await setup.check_nothing_is_left()


@in_virtual_time
async def test_a_worker_is_removed_and_another_added_while_streams_run() -> None:
    async with in_process_fleet(both=2, max_workers=3) as setup:
        changes = setup.fleet.changes
        stream = setup.client.submit("a", PROMPT, max_tokens=600)
        await setup.when(lambda: stream.num_tokens > 5)
        leaving = stream.worker
        await changes.remove(leaving)
        assert [worker.state for worker in setup.fleet.workers][leaving] == "stopped"
        assert leaving not in setup.fleet.core.members.up
        with pytest.raises(ConflictError, match="no worker that can prefill is left"):
            changes.drain(1 - leaving)
        assert await changes.add() == leaving
        assert await changes.add() == 2
        with pytest.raises(ConflictError, match="there are 3 workers, and may be no more"):
            await changes.add()
        await setup.when(lambda: sorted(setup.fleet.core.members.usable) == [0, 1, 2])
        for number in range(12):
            setup.client.submit(f"b{number}", [9 + number] * 200, max_tokens=20)
        for number in range(12):
            assert await setup.client.read(f"b{number}") == expected([0] * 200, 20)
        assert await setup.client.read("a") == expected(PROMPT, 600)
        assert {setup.client.generations[f"b{number}"].streams[0].worker for number in range(12)} == {0, 1, 2}
        await setup.check_nothing_is_left()


@in_virtual_time
async def test_a_worker_that_is_not_empty_in_time_is_used_again() -> None:
    async with in_process_fleet(prefill=1, decode=1, both=1) as setup:
        setup.workers[1].lose(restart_ns=NS_PER_S)
        stream = setup.client.submit("a", PROMPT, max_tokens=1500, prompt_logprobs=0)
        await setup.when(lambda: stream.num_tokens > 1 and 1 in setup.fleet.core.members.up)
        setup.fleet.changes.drain(1)
        setup.fleet.changes.change_role(0, "both")
        removal = asyncio.ensure_future(setup.fleet.changes.remove(stream.worker, limit_s=0.01))
        await setup.when(removal.done)
        if (error := removal.exception()) is not None:
            assert isinstance(error, ConflictError) and "has requests left after 0.01 s" in error.message
            assert not setup.fleet.changes.is_draining(stream.worker)
        setup.fleet.changes.use_again(1)
        assert await setup.client.read("a") == expected(PROMPT, 1500)


@in_virtual_time
async def test_a_shape_is_the_preset_with_the_limits_of_the_start() -> None:
    async with in_process_fleet(both=2) as setup:
        setup.fleet.changes.change_shape(1, "unified")
        await setup.time.until(setup.time.now + NS_PER_S)
        [first, second] = [worker.engine.core.engine.config.scheduler for worker in setup.workers if worker.engine]
        assert (first.budget.kind, second.budget.kind) == ("slo", "whole")
        assert second.max_num_seqs == first.max_num_seqs
        with pytest.raises(ConfigError, match="max_num_seqs is 257; this worker was started for 256"):
            setup.fleet.changes.change_scheduler(1, shape_preset("chunked", max_num_seqs=257))
        with pytest.raises(NotFoundError, match="worker is 2; there are 0, 1"):
            setup.fleet.changes.change_shape(2, "chunked")


FOUR_CORES = Processor("a processor", ((0, 4), (1, 5), (2, 6), (3, 7)), tuple(range(8)))


@in_virtual_time
async def test_a_role_change_moves_cores_by_the_rule_while_streams_run() -> None:
    split = CoreSplit(prefill=3)
    async with in_process_fleet(prefill=1, decode=1, core_split=split, processor=FOUR_CORES) as setup:
        changes, infos = setup.fleet.changes, setup.fleet.members.infos
        assert [str(infos[worker].share) for worker in (0, 1)] == ["CPUs 0-2,4-6, 3 threads", "CPUs 3,7, 1 thread"]
        stream = setup.client.submit("a", PROMPT, max_tokens=600)
        await setup.when(lambda: stream.num_tokens > 5)
        changes.change_role(0, "both")
        changes.change_role(1, "prefill")
        await setup.when(lambda: infos[1].share.num_threads == 3)
        assert infos[0].share.cpus == (0, 4)
        assert await setup.client.read("a") == expected(PROMPT, 600)
        await setup.check_nothing_is_left()


@in_virtual_time
async def test_cores_follow_workers_that_come_and_go_and_survive_a_crash() -> None:
    split = CoreSplit()
    async with in_process_fleet(both=2, max_workers=3, core_split=split, processor=FOUR_CORES) as setup:
        changes, infos = setup.fleet.changes, setup.fleet.members.infos
        await changes.add()
        await setup.time.until(setup.time.now + NS_PER_S)
        assert [infos[worker].share.num_threads for worker in range(3)] == [2, 1, 1]
        used = [cpu for worker in range(3) for cpu in infos[worker].share.cpus]
        assert sorted(used) == list(range(8))
        setup.workers[0].lose(restart_ns=NS_PER_S)
        await changes.remove(2)
        await setup.time.until(setup.time.now + 3 * NS_PER_S)
        assert sorted(infos[0].share.cpus + infos[1].share.cpus) == list(range(8))


@in_virtual_time
async def test_cores_that_a_worker_cannot_use_are_refused_before_anything_changes() -> None:
    async with in_process_fleet(both=2, processor=FOUR_CORES) as setup, client_of(setup) as client:
        for body, words in (
            ({"cores": "8"}, "CPU 8 is not one of"),
            ({"cores": "two"}, "expected a list such as 0-3,8"),
            ({"multiprocessors": 66}, "worker 1 has no GPU"),
            ({"cores": "1", "multiprocessors": 66}, "not both"),
        ):
            refused = await client.post("/admin/workers/1", json={"role": "decode", **body})
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
        assert setup.fleet.role(1) == "both"
        assert (await client.post("/admin/workers/1", json={"cores": "3,7"})).status_code == 200
        await setup.time.until(setup.time.now + NS_PER_S)
        seen = (await client.get("/admin/workers")).json()["workers"][1]
        assert (seen["cores"], seen["threads"]) == ("3,7", 2)
        assert (await client.get("/ui/state")).json()["workers"][1]["computes_on"] == "CPUs 3,7, 2 threads"


@in_virtual_time
async def test_cores_are_divided_by_another_rule_while_serving() -> None:
    async with in_process_fleet(prefill=1, decode=1, processor=FOUR_CORES) as setup, client_of(setup) as client:
        infos = setup.fleet.members.infos
        assert [infos[worker].share.num_threads for worker in (0, 1)] == [2, 2]
        divided = await client.post("/admin/core_split", json={"split": "decode=3"})
        assert (divided.status_code, divided.json()["core_split"]) == (200, "prefill=1,decode=3,both=1")
        await setup.time.until(setup.time.now + NS_PER_S)
        assert [infos[worker].share.num_threads for worker in (0, 1)] == [1, 3]
        assert divided.json()["is_core_split_pinned"]
        freed = await client.post("/admin/core_split", json={"pin": False})
        assert (freed.json()["core_split"], freed.json()["is_core_split_pinned"]) == (str(CoreSplit(decode=3)), False)
        assert (await client.post("/admin/workers/0", json={"cores": "0,4"})).status_code == 200
        assert (await client.get("/admin/workers")).json()["is_core_split_pinned"], "a worker's cores were set by hand"
        refused = await client.post("/admin/core_split", json={})
        assert refused.status_code == 400 and "give split or pin" in refused.json()["error"]["message"]
        refused = await client.post("/admin/core_split", json={"split": "decode=many"})
        assert refused.status_code == 400 and "core_split is 'decode=many'" in refused.json()["error"]["message"]
    alone = Processor("a processor", ((0,),), (0,))
    async with in_process_fleet(both=2, processor=alone) as setup, client_of(setup) as client:
        refused = await client.post("/admin/core_split", json={"split": "decode=3"})
        assert refused.status_code == 409 and "1 cores for 2 workers" in refused.json()["error"]["message"]


# -- over HTTP --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(
    setup: InProcessFleet, peer: tuple[str, int] = HERE, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(AsyncLLM(setup.fleet.options, setup.fleet), "m", **options)
    transport = httpx.ASGITransport(app, client=peer)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


@in_virtual_time
async def test_the_operators_routes_change_workers_and_show_them() -> None:
    machine = Processor("a processor", ((0,), (1,)), (0, 1))
    async with in_process_fleet(both=2, max_workers=3, processor=machine) as setup, client_of(setup) as client:
        idle = {"role": "both", "state": "ready", "restarts": 0, "open_requests": 0, "max_sequence_tokens": 2048}
        units = {"threads": 1, "multiprocessors": None, "is_pinned": False}
        both = [{"worker": number, **idle, "cores": str(number), **units} for number in (0, 1)]
        split = {"core_split": None, "is_core_split_pinned": False}
        assert (await client.get("/admin/workers")).json() == {"workers": both, "max_workers": 3, **split}
        changed = await client.post("/admin/workers/1", json={"role": "decode", "shape": "unified"})
        assert changed.status_code == 200 and changed.json()["role"] == "decode" and changed.json()["is_pinned"]
        assert not (await client.post("/admin/workers/1", json={"pin": False})).json()["is_pinned"]
        drained = await client.post("/admin/workers/1", json={"drain": True})
        assert drained.json()["state"] == "draining" and setup.fleet.timeline.workers[1].state == "draining"
        assert (await client.post("/admin/workers/1", json={"drain": False})).json()["state"] == "ready"
        added = await client.post("/admin/workers")
        assert (added.status_code, added.json()["worker"]) == (201, 2)
        removed = await client.delete("/admin/workers/1")
        assert removed.status_code == 200 and removed.json()["state"] == "stopped"
        state = (await client.get("/ui/state")).json()
        assert [worker["state"] for worker in state["workers"]] == ["ready", "stopped", "ready"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/admin/workers/7", {"drain": True}, 404, "worker is 7; there are 0"),
        ("POST", "/admin/workers/0", {"drain": True}, 409, "no worker that can prefill is left"),
        ("POST", "/admin/workers/0", {"role": "decode"}, 409, "no worker that can prefill is left"),
        ("POST", "/admin/workers/0", {"role": "writer"}, 400, "role"),
        ("POST", "/admin/workers/0", {"size": 3}, 400, "size"),
        ("POST", "/admin/workers/0", {}, 400, "nothing is to change"),
        ("POST", "/admin/workers/zero", {"drain": True}, 404, "there is no path"),
        ("DELETE", "/admin/workers/0", None, 409, "no worker that can prefill is left"),
        ("POST", "/admin/workers", None, 409, "there are 1 workers"),
    ],
)
@in_virtual_time
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    method: str, path: str, body: Mapping[str, Any] | None, status: int, message: str
) -> None:
    async with in_process_fleet(both=1) as setup, client_of(setup) as client:
        reply = await client.request(method, path, json=body)
        assert reply.status_code == status, reply.text
        assert message in reply.json()["error"]["message"]
        [worker] = (await client.get("/admin/workers")).json()["workers"]
        assert (worker["role"], worker["state"]) == ("both", "ready")


@in_virtual_time
async def test_without_an_admin_key_only_this_machine_is_answered() -> None:
    async with in_process_fleet(both=1) as setup:
        async with client_of(setup, ELSEWHERE, api_keys=["k"]) as client:
            for headers in ({}, {"Authorization": "Bearer k"}):
                assert (await client.get("/admin/workers", headers=headers)).status_code == 403
        async with client_of(setup, api_keys=["k"]) as client:
            assert (await client.get("/admin/workers")).status_code == 200


@in_virtual_time
async def test_without_an_admin_key_what_a_proxy_on_this_machine_hands_on_is_refused() -> None:
    async with in_process_fleet(both=1) as setup, client_of(setup) as client:
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
            assert (await client.get("/admin/workers", headers={header: "for=10.0.0.7"})).status_code == 403
    async with in_process_fleet(both=1) as setup, client_of(setup, admin_key="secret") as client:
        headers = {"X-Forwarded-For": "10.0.0.7", "Authorization": "Bearer secret"}
        assert (await client.get("/admin/workers", headers=headers)).status_code == 200


@in_virtual_time
async def test_an_admin_key_is_asked_for_everywhere_and_is_no_api_key() -> None:
    async with in_process_fleet(both=1) as setup:
        for peer in (HERE, ELSEWHERE):
            async with client_of(setup, peer, admin_key="secret", api_keys=["k"]) as client:
                assert (await client.get("/admin/workers")).status_code == 401
                assert (await client.get("/admin/workers", headers={"Authorization": "Bearer k"})).status_code == 401
                with_key = {"Authorization": "Bearer secret"}
                assert (await client.get("/admin/workers", headers=with_key)).status_code == 200
                assert (await client.get("/v1/models", headers=with_key)).status_code == 401


@in_virtual_time
async def test_pages_of_other_origins_are_refused() -> None:
    async with in_process_fleet(both=1) as setup, client_of(setup) as client:
        elsewhere = await client.post("/admin/workers", headers={"Origin": "http://evil.example"})
        assert elsewhere.status_code == 403 and "evil.example" in elsewhere.text
        assert (await client.get("/admin/workers", headers={"Origin": "http://127.0.0.1:8000"})).status_code == 200
