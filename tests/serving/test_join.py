"""Workers that join: real agents, real TLS, make-believe models. Links break, processes die, front ends come back; the
client must see exactly the tokens of an undisturbed run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_worker import fake_command
from stalling_relay import StallingRelay
from virtual_time import in_virtual_time, virtual_time

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.errors import ConfigError
from diptych.control.request import SamplingParams
from diptych.runtime.transfer import CONNECTORS
from diptych.serving import edge_limits
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.join_listener import Expected, JoinListener
from diptych.serving.fleet.join_options import JoinOptions, parse_host_port
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.join import worker_agent
from diptych.serving.join.framed_link import FramedLink
from diptych.serving.join.join_messages import PROTOCOL, Accepted, Refused, Registration, read_from_door, told
from diptych.serving.join.worker_agent import AgentOptions, WorkerAgent
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions, MemoryOptions
from diptych.serving.outputs import RequestOutput
from diptych.tls.shared_key import SharedKey

KEY, OTHER_KEY = SharedKey(b"k" * 32), SharedKey(b"o" * 32)
PROMPT = list(range(100, 196))
MEMORY = MemoryOptions(kv_cache_bytes=32 * 2**20)
OPTIONS = EngineOptions(memory=MEMORY)
SILENCE_S = 2.0  # more than this process stands still on a busy machine


@asynccontextmanager
async def front_end(port: int = 0, wait: bool = False, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """A front end without workers of its own."""
    options = settings.pop("options", OPTIONS)
    decisions = cluster_config(disaggregate=settings.pop("disaggregate", "auto"))
    join = JoinOptions(f"127.0.0.1:{port}", KEY)
    settings = {"both": 0, "heartbeat_timeout_s": SILENCE_S, **settings}
    fleet = FleetOptions(join=join, cluster=decisions, **settings)
    llm = AsyncLLM(options, Fleet(options, fleet, LocalLauncher(fake_command())))
    await llm.start(wait=wait)
    try:
        yield llm
    finally:
        await llm.shutdown()


def port_of(llm: AsyncLLM) -> int:
    assert llm.fleet.door is not None
    return llm.fleet.door.port


@asynccontextmanager
async def agent(port: int, **settings: Any) -> AsyncIterator[WorkerAgent]:
    """An agent with a make-believe worker, which ends with the block."""
    worker = settings.pop("worker", {})
    settings = {"key": KEY, "model": str(BUNDLED_MODEL), "name": "a host", "grace_s": 20.0, **settings}
    found = WorkerAgent(AgentOptions(host="127.0.0.1", port=port, command=fake_command(**worker), **settings))
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        if not task.done():
            await found.leave()
            await found.leave()
        await task


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[AsyncLLM, WorkerAgent, WorkerAgent]]:
    """A prefill worker and a decode worker that have joined."""
    worker = settings.pop("worker", {})
    async with AsyncExitStack() as stack:
        llm = await stack.enter_async_context(front_end(disaggregate="always", **settings))
        port = port_of(llm)
        agents = [
            await stack.enter_async_context(agent(port, role=role, worker=worker, drain_s=0.1))
            for role in ("prefill", "decode")
        ]
        await ready(llm)
        yield llm, agents[0], agents[1]


async def ready(llm: AsyncLLM) -> None:
    assert llm.fleet.ready is not None
    await asyncio.wait_for(asyncio.shield(llm.fleet.ready), 60)


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


async def ask(llm: AsyncLLM, max_tokens: int = 60, prompt: list[int] = PROMPT) -> RequestOutput:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = [output async for output in llm.generate(prompt, sampling)]
    assert outputs[-1].finished
    return outputs[-1]


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def expected(max_tokens: int = 60, prompt: list[int] = PROMPT) -> list[int]:
    return list(range(len(prompt), len(prompt) + max_tokens))


def process(agent: WorkerAgent) -> int:
    """The process id of the worker."""
    running = agent._worker._process
    return running.pid or 0 if running is not None else 0


def number_of(agent: WorkerAgent) -> int:
    assert agent.number is not None
    return agent.number


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_agent, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(worker_agent, "LONGEST_PAUSE_S", 0.1)


@pytest.mark.system
@pytest.mark.asyncio
async def test_workers_of_two_hosts_join_and_share_requests() -> None:
    async with pair() as (llm, prefill, decode):
        assert tokens(await ask(llm)) == expected()
        infos = llm.fleet.core.members.infos
        assert {infos[number_of(prefill)].role, infos[number_of(decode)].role} == {"prefill", "decode"}
        assert all(info.host == "a host" and info.memory_domain is None for info in infos.values())
        assert llm.metrics.fleet.num_transfers == 1
        outputs = await asyncio.gather(*(ask(llm, 30, [*PROMPT, number]) for number in range(8)))
        assert all(tokens(output) == expected(30, [*PROMPT, 0]) for output in outputs)


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_worker_of_this_host_and_one_of_another_serve_together() -> None:
    async with front_end(both=1) as llm, agent(port_of(llm), role="decode"):
        await ready(llm)
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        assert tokens(await ask(llm)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_process_that_crashes_joins_again_and_its_streams_go_on() -> None:
    async with pair(worker={"step_ms": 3}) as (llm, _, decode):
        asking = asyncio.create_task(ask(llm, 200))
        await until(lambda: llm.fleet.metrics.fleet.num_transfers)
        before = process(decode)
        os.kill(before, signal.SIGSEGV)
        assert tokens(await asking) == expected(200)
        await until(lambda: llm.fleet.workers[number_of(decode)].state is WorkerState.READY)
        assert process(decode) not in (0, before)
        assert llm.fleet.workers[number_of(decode)].num_restarts == 1
        assert tokens(await ask(llm)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.parametrize("lost", ["both", "up", "down"])
async def test_a_partition_between_front_end_and_decode_worker_loses_no_token(lost: str) -> None:
    """The worker keeps its process, and what it computes for the front end of before is never taken."""
    async with AsyncExitStack() as stack:
        llm = await stack.enter_async_context(front_end(disaggregate="always"))
        relay = await stack.enter_async_context(StallingRelay(port_of(llm)))
        await stack.enter_async_context(agent(port_of(llm), role="prefill", worker={"step_ms": 3}, drain_s=0.1))
        far = await stack.enter_async_context(
            agent(relay.port, role="decode", name="far", worker={"step_ms": 3}, drain_s=0.1)
        )
        await ready(llm)
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        port, before = llm.fleet.workers[number_of(far)], process(far)
        asking = asyncio.create_task(ask(llm, 300))
        await until(lambda: llm.metrics.fleet.num_transfers)
        if lost != "down":
            relay.up.clear()
        if lost != "up":
            relay.down.clear()
        await until(lambda: port.state is WorkerState.LOST)
        assert tokens(await asyncio.wait_for(asking, 60)) == expected(300)
        relay.heal()
        relay.cut()
        await until(lambda: port.state is WorkerState.READY)
        assert process(far) == before, "its process was kept"
        assert tokens(await ask(llm)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
async def test_workers_outlive_their_front_end_with_their_caches() -> None:
    prompt = list(range(200, 600))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(front_end(disaggregate="never"))
        port = port_of(first)
        worker = await stack.enter_async_context(agent(port, drain_s=0.1))
        await ready(first)
        await ask(first, prompt=prompt)
        before = process(worker)
        asyncio.get_running_loop().call_later(0.1, lambda: None)
        await first.shutdown()
        async with front_end(port) as second:
            await ready(second)
            assert process(worker) == before
            output = await ask(second, prompt=prompt)
            assert tokens(output) == expected(prompt=prompt)
            assert output.num_cached_tokens >= 384


@pytest.mark.system
@pytest.mark.asyncio
async def test_without_a_front_end_the_model_is_unloaded_after_the_grace_period() -> None:
    async with AsyncExitStack() as stack:
        llm = await stack.enter_async_context(front_end())
        worker = await stack.enter_async_context(agent(port_of(llm), grace_s=0.3))
        await ready(llm)
        assert process(worker)
        await llm.shutdown()
        await until(lambda: not process(worker))


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_front_end_with_other_settings_gets_a_new_process() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(front_end())
        port = port_of(first)
        worker = await stack.enter_async_context(agent(port, drain_s=0.1))
        await ready(first)
        before = process(worker)
        await first.shutdown()
        async with front_end(port, explain_misses="on") as second:
            await ready(second)
            assert process(worker) not in (0, before)
            assert tokens(await ask(second)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
async def test_an_agent_that_is_asked_to_end_drains_its_worker() -> None:
    async with front_end() as llm, agent(port_of(llm), worker={"step_ms": 3}):
        await ready(llm)
        async with agent(port_of(llm), name="leaver", worker={"step_ms": 3}) as leaver:
            await until(lambda: len(llm.fleet.core.members.up) == 2)
            asking = [asyncio.create_task(ask(llm, 100, [*PROMPT, number])) for number in range(8)]
            await until(lambda: llm.num_open == 8)
            await asyncio.wait_for(leaver.leave(), 60)
            assert llm.fleet.workers[number_of(leaver)].state is WorkerState.STOPPED
        for output in await asyncio.gather(*asking):
            assert tokens(output) == expected(100, [*PROMPT, 0])
        assert llm.metrics.fleet.losses.total() == 0
        async with agent(port_of(llm), name="another"):  # takes the free number
            await until(lambda: len(llm.fleet.core.members.up) == 2)


@pytest.mark.system
@pytest.mark.asyncio
async def test_the_last_worker_of_a_phase_may_leave_and_requests_wait_for_another() -> None:
    async with front_end() as llm:
        async with agent(port_of(llm)) as leaver:
            await ready(llm)
            await leaver.leave()
        assert not llm.fleet.core.members.up and not llm.is_routable
        async with agent(port_of(llm)):
            await until(lambda: llm.is_routable)
            assert tokens(await ask(llm)) == expected()


@pytest.mark.system
@pytest.mark.asyncio
async def test_an_agent_that_is_asked_to_end_while_its_front_end_does_waits_for_nobody() -> None:
    async with AsyncExitStack() as stack:
        llm = await stack.enter_async_context(front_end())
        worker = await stack.enter_async_context(agent(port_of(llm), drain_s=30.0))
        await ready(llm)
        assert llm.fleet.door is not None
        await llm.fleet.door.close()  # answers nobody any more
        leaving = asyncio.create_task(worker.leave())
        await llm.shutdown()
        await asyncio.wait_for(leaving, 20)


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_refusal_that_stays_one_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_end() as llm:
        worker = WorkerAgent(AgentOptions(host="127.0.0.1", port=port_of(llm), key=KEY, model=str(BUNDLED_MODEL)))
        monkeypatch.setattr("diptych.__version__", "0.0.1")
        with pytest.raises(ConfigError, match=r"front end is diptych .* the worker diptych 0\.0\.1"):
            await asyncio.wait_for(worker.run(), 60)
        assert llm.fleet.door is not None and llm.fleet.door.refused == {"incompatible": 1}


@pytest.mark.system
@pytest.mark.asyncio
async def test_both_sides_have_a_model_computed_by_transformers_or_none() -> None:
    pytest.importorskip("transformers")
    options = EngineOptions(memory=MEMORY, model_impl="transformers")
    async with front_end(options=options) as llm, agent(port_of(llm), model_impl="transformers") as worker:
        await ready(llm)
        assert tokens(await ask(llm)) == expected()
        assert worker._worker.options is not None and worker._worker.options.model_impl == "transformers"
        other = WorkerAgent(AgentOptions(host="127.0.0.1", port=port_of(llm), key=KEY, model=str(BUNDLED_MODEL)))
        with pytest.raises(ConfigError, match="model_impl is transformers at the front end, auto at the worker"):
            await asyncio.wait_for(other.run(), 60)


@pytest.mark.asyncio
async def test_who_does_not_know_the_key_stays_outside_on_either_side() -> None:
    async with front_end() as llm:
        port, loop = port_of(llm), asyncio.get_running_loop()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await loop.create_connection(FramedLink, "127.0.0.1", port, ssl=OTHER_KEY.client_tls("worker", "front end"))
        blind = OTHER_KEY.client_tls("worker", "front end")
        blind.verify_mode = 0  # type: ignore[assignment]
        _, link = await loop.create_connection(FramedLink, "127.0.0.1", port, ssl=blind)
        await until(lambda: not link.is_open)
        posing = KEY.client_tls("front end", "front end")
        _, link = await loop.create_connection(FramedLink, "127.0.0.1", port, ssl=posing)
        await until(lambda: not link.is_open)
        _, plain = await loop.create_connection(FramedLink, "127.0.0.1", port)
        plain.tell(told(registration()))
        await until(lambda: not plain.is_open)
        assert not llm.fleet.workers and not llm.fleet.door.refused  # type: ignore[union-attr]


def registration(**changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL, "version": "1", "model": "m" * 32, "model_name": "m", "agent": b"a", "host": "h",
        "rack": "", "role": "both", "num_cores": 1,
    }  # fmt: skip
    return Registration(**fields | changes)


@pytest.mark.asyncio
@pytest.mark.parametrize("frame", [b"\x00orders", b"\x01nonsense", b"\x02", b"x" * 70_000])
async def test_what_is_not_a_registration_ends_the_connection(frame: bytes) -> None:
    async with front_end() as llm:
        tls = KEY.client_tls("worker", "front end")
        _, link = await asyncio.get_running_loop().create_connection(FramedLink, "127.0.0.1", port_of(llm), ssl=tls)
        link.tell(frame)
        await until(lambda: not link.is_open)
        assert not llm.fleet.workers


@pytest.mark.asyncio
@pytest.mark.parametrize("settings", [{"max_workers": 1}, {}], ids=["by the option", "by the limit"])
async def test_there_are_no_more_workers_than_may_be(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "JOINED_WORKERS", 1)
    async with front_end(**settings) as llm:
        assert llm.fleet.door is not None
        wanted, tls = llm.fleet.door._expected, KEY.client_tls("worker", "front end")
        fitting = registration(version=wanted.version, model=wanted.model)
        answers: list[object] = []
        links = []
        for name in (b"1", b"2"):
            _, link = await asyncio.get_running_loop().create_connection(FramedLink, "127.0.0.1", port_of(llm), ssl=tls)
            link.on_told = lambda data: answers.append(read_from_door(data))
            link.introduced()
            link.tell(told(replace_agent(fitting, name)))
            links.append(link)
            await until(lambda: [answer for answer in answers if not is_beat(answer)][len(links) - 1 :])
        refused = answers[-1]
        assert isinstance(refused, Refused) and not refused.is_final and "there are 1 workers" in refused.message
        for link in links:
            link.close("done")


def test_as_many_workers_may_join_as_the_limit_besides_those_that_are_started() -> None:
    fleet = FleetOptions(both=2, join=JoinOptions("127.0.0.1:0", KEY))
    assert len(fleet.slots) == 2 + edge_limits.JOINED_WORKERS


@pytest.mark.asyncio
async def test_connections_that_never_register_are_bounded_and_keep_no_worker_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge_limits, "UNREGISTERED_WORKERS", 3)
    async with front_end() as llm:
        door, tls = llm.fleet.door, KEY.client_tls("worker", "front end")
        assert door is not None
        loop = asyncio.get_running_loop()
        links: list[FramedLink] = []
        for number in (1, 2, 3, 3):
            _, link = await loop.create_connection(FramedLink, "127.0.0.1", door.port, ssl=tls)
            links.append(link)
            await until(lambda least=number: len(door._unknown) >= least)  # type: ignore[misc]
            if len(links) == 3:
                assert all(link.is_open for link in links)
        await until(lambda: not links[0].is_open)  # the limit and one more: the oldest has made room
        assert len(door._unknown) == 3 and all(link.is_open for link in links[1:])
        answers: list[object] = []
        _, fitting = await loop.create_connection(FramedLink, "127.0.0.1", door.port, ssl=tls)
        fitting.on_told = lambda data: answers.append(read_from_door(data))
        fitting.introduced()
        fitting.tell(told(registration(version=door._expected.version, model=door._expected.model)))
        await until(lambda: any(isinstance(answer, Accepted) for answer in answers))
        await until(lambda: not links[1].is_open)
        assert links[2].is_open and links[3].is_open and len(door._unknown) == 2
        for link in [fitting, *links]:
            link.close("done")


@in_virtual_time
async def test_a_registration_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = SimpleNamespace(workers=[], on_defect=print)
    options = JoinOptions("127.0.0.1:0", KEY)
    door = JoinListener(fleet, options, Expected("1", "m" * 32, "m"), range(4), SILENCE_S)  # type: ignore[arg-type]
    begun, closed = virtual_time().now, []
    link = Mock(close=lambda why: closed.append((why, virtual_time().now - begun)))
    door._greet(link)
    limit_ns = round(edge_limits.WORKER_HANDSHAKE_S * 1e9)
    await virtual_time().until(begun + limit_ns - 1)
    assert door._unknown and not closed
    await virtual_time().until(begun + limit_ns + 1)
    assert not door._unknown and closed == [("it did not register in time", limit_ns)]


def replace_agent(known: Registration, agent: bytes) -> Registration:
    import msgspec

    return msgspec.structs.replace(known, agent=agent, host=str(agent))


def is_beat(message: object) -> bool:
    return type(message).__name__ == "Beat"


def test_skew_is_refused_with_the_values_of_both_sides() -> None:
    wanted = Expected("1.2", "a" * 32, "llama")
    fitting = {"version": "1.2", "model": "a" * 32}
    assert wanted.refusal(registration(**fitting)) == ""
    assert "1.2" in (words := wanted.refusal(registration(**fitting | {"version": "1.3"}))) and "1.3" in words
    words = wanted.refusal(registration(**fitting | {"model": "b" * 32, "model_name": "qwen"}))
    assert "llama (aaaaaaaaaaaa)" in words and "qwen (bbbbbbbbbbbb)" in words
    words = wanted.refusal(registration(**fitting | {"model_impl": "transformers", "model": "b" * 32}))
    assert words == "model_impl is auto at the front end, transformers at the worker (--model-impl)"
    assert "protocol" in wanted.refusal(registration(**fitting | {"protocol": 99}))
    with pytest.raises(ConfigError, match="host is"):
        registration(host="x" * 65)


def test_settings_that_cannot_be_with_workers_of_other_hosts_are_refused() -> None:
    join = JoinOptions("127.0.0.1:0", KEY)
    assert FleetOptions(both=0, join=join).roles == ()
    for changes, match in (
        ({"transfer": "shared_memory"}, "one host only"),
        ({"join": JoinOptions("0.0.0.0:7000", KEY)}, "--both 0"),
        ({"transfer": "nixl"}, "transfer_plain"),
    ):
        if changes.get("transfer") in (None, *(name for name, kind in CONNECTORS.items() if kind.is_installed)):
            with pytest.raises(ConfigError, match=match):
                FleetOptions(**{"join": join} | changes)  # type: ignore[arg-type]
    FleetOptions(both=0, join=replace(join, listen="0.0.0.0:7000"))


@pytest.mark.parametrize("text", ["", "7000", "host:7000", "1.2.3.4", "1.2.3.4:70000", "::1:7000", "[::1]", ":7000"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="listen_workers is"):
        JoinOptions(text, KEY)


def test_addresses_of_both_families_and_names_to_dial() -> None:
    assert parse_host_port("[::1]:7000", "x") == ("::1", 7000)
    assert parse_host_port("localhost:7000", "x") == ("127.0.0.1", 7000)
    assert parse_host_port("front.example:7000", "x", may_be_name=True) == ("front.example", 7000)
    assert JoinOptions("[::1]:7000", KEY).kv_listen == "tcp://[::1]:0"


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    options = AgentOptions(host="h", port=1, key=KEY, model="m")
    assert "kkkk" not in repr(options) and "kkkk" not in repr(JoinOptions("127.0.0.1:0", KEY))
