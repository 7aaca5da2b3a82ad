"""Whose turn it is, what passes what, and what is dropped in the queue of long work."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from diptych.control.errors import DrainingError, OverloadedError
from diptych.serving import edge_limits
from diptych.serving.long_work import LONG, VERY_LONG, LongWork

pytestmark = pytest.mark.anyio


class Gate:
    """Work that runs until it is opened, and the order in which work began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def held(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            self.open.wait()
            return name

        return work

    def quick(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            return name

        return work


async def test_short_input_passes_very_long_ones() -> None:
    gate, queue = Gate(), LongWork()
    very_long = [asyncio.create_task(queue.run(gate.held(f"long {n}"), VERY_LONG)) for n in range(3)]
    await asyncio.sleep(0)
    assert await queue.run(gate.quick("short"), LONG) == "short"
    assert gate.begun[-1] == "short" and len(gate.begun) <= 2
    gate.open.set()
    assert await asyncio.gather(*very_long) == ["long 0", "long 1", "long 2"]
    assert (queue.num_waiting, queue.num_bytes) == (0, 0)


async def test_tenants_take_turns() -> None:
    gate, queue = Gate(), LongWork()
    held = [asyncio.create_task(queue.run(gate.held("held"), LONG)) for _ in range(2)]
    await asyncio.sleep(0)
    many = [asyncio.create_task(queue.run(gate.quick(f"a{n}"), LONG, "a")) for n in range(6)]
    await asyncio.sleep(0)
    few = asyncio.create_task(queue.run(gate.quick("b0"), LONG, "b"))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*held, *many, few)
    assert gate.begun.index("b0") < gate.begun.index("a3")


async def test_work_whose_caller_is_gone_never_begins() -> None:
    gate, queue = Gate(), LongWork()
    held = [asyncio.create_task(queue.run(gate.held("held"), LONG)) for _ in range(2)]
    await asyncio.sleep(0)
    gone = asyncio.create_task(queue.run(gate.quick("gone"), LONG))
    await asyncio.sleep(0)
    assert queue.num_waiting == 1
    gone.cancel()
    await asyncio.wait([gone])
    assert queue.num_waiting == 0
    gate.open.set()
    await asyncio.gather(*held)
    assert "gone" not in gate.begun


async def test_more_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "LONG_WORK_WAITING", 2)
    gate, queue = Gate(), LongWork()
    held = [asyncio.create_task(queue.run(gate.held("held"), LONG)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as caught:
        await queue.run(gate.quick("more"), LONG)
    assert caught.value.code == "too_much_to_read"
    gate.open.set()
    await asyncio.gather(*held)
    monkeypatch.setattr(edge_limits, "LONG_WORK_BYTES", LONG + 1)
    gate.open.clear()
    first = asyncio.create_task(queue.run(gate.held("first"), LONG))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await queue.run(gate.quick("more"), LONG)
    gate.open.set()
    await first


async def test_an_error_of_the_work_is_raised_to_its_caller() -> None:
    def fails() -> None:
        raise ValueError("wrong")

    for size in (0, LONG):
        with pytest.raises(ValueError, match="wrong"):
            await LongWork().run(fails, size)


async def test_what_waits_when_the_server_ends_and_what_comes_later_is_told() -> None:
    """Neither waits for ever, and neither ends as an internal error."""
    gate, queue = Gate(), LongWork()
    held = [asyncio.create_task(queue.run(gate.held("held"), LONG)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(queue.run(gate.quick("waits"), LONG))
    await asyncio.sleep(0)
    assert queue.num_waiting == 1
    queue.close()
    with pytest.raises(DrainingError):
        await waiting
    with pytest.raises(DrainingError):
        await queue.run(gate.quick("later"), LONG)
    gate.open.set()
    assert await asyncio.gather(*held) == ["held", "held"]
    assert (queue.num_waiting, queue.num_bytes) == (0, 0) and set(gate.begun) == {"held"}
