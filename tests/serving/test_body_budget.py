import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diptych.control.errors import UnavailableError
from diptych.serving import edge_limits
from diptych.serving.api.direct_body import DIRECT_BODY
from diptych.serving.api.middleware import BodyBudget, BodyLimit, HalfReadBody


def test_a_budget_of_half_read_bodies_and_one_byte_more() -> None:
    budget, woken = BodyBudget(edge_limits.UNREAD_BODIES_BYTES), []
    first, second = HalfReadBody(lambda: woken.append("first")), HalfReadBody(lambda: woken.append("second"))
    budget.add(first, 1)
    budget.add(second, edge_limits.UNREAD_BODIES_BYTES - 1)
    assert not woken
    budget.add(second, 1)
    assert woken == ["first"] and first.is_refused and not second.is_refused
    with pytest.raises(UnavailableError) as caught:
        budget.add(second, 1)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "too_many_bodies", 1.0)
    assert budget.num_bytes == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_sum_keeps_to_the_budget_and_the_oldest_makes_room(seed: int) -> None:
    rng = random.Random(seed)
    budget, held, woken = BodyBudget(1000), {}, []  # held: by age, as a simple model has it
    for _ in range(500):
        if held and rng.random() < 0.2:
            budget.release(leaver := rng.choice(list(held)))
            del held[leaver]
        else:
            is_new = not held or rng.random() < 0.4
            body = HalfReadBody(None) if is_new else rng.choice(list(held))
            if is_new:
                body.wake = lambda body=body: woken.append(body)
            held[body] = held.get(body, 0) + (size := rng.randrange(1, 400))
            refused = []
            while sum(held.values()) > 1000:
                refused.append(next(iter(held)))
                del held[refused[-1]]
                if refused[-1] is body:
                    break
            woken.clear()
            try:
                budget.add(body, size)
                assert body not in refused
            except UnavailableError:
                assert refused[-1] is body
                woken.append(body)
            assert woken == refused and all(one.is_refused and one.num_bytes == 0 for one in refused)
        assert budget.num_bytes == sum(held.values()) <= 1000
        assert all(body.num_bytes == count for body, count in held.items())
    for body in held:
        budget.release(body)
        budget.release(body)
    assert budget.num_bytes == 0


def test_who_comes_is_refused_where_the_oldest_cannot_be_woken() -> None:
    budget = BodyBudget(10)
    oldest, newcomer = HalfReadBody(None), HalfReadBody(None)
    budget.add(oldest, 8)
    with pytest.raises(UnavailableError):
        budget.add(newcomer, 3)
    assert newcomer.is_refused and not oldest.is_refused and budget.num_bytes == 8


class _Client:
    """One request of a server that wakes: its messages come from the test."""

    def __init__(self, path: str = "/v1/completions") -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.scope = {"type": "http", "path": path, "headers": [], "extensions": {DIRECT_BODY: {"body": self}}}
        self.receive = self._messages.get

    def wake_receive(self) -> None:
        self.put(b"")

    def put(self, body: bytes, *, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


async def _send(_: Any) -> None:
    raise AssertionError("nothing is answered here")


async def _read_all(_: Any, receive: Callable[[], Awaitable[dict[str, Any]]], __: Any) -> None:
    while (await receive()).get("more_body"):
        pass


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_end_of_a_request_gives_its_bytes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "UNREAD_BODIES_BYTES", 30)

    async def run() -> None:
        layer = BodyLimit(_read_all, 20, {"/v1/files": 1000})  # type: ignore[arg-type]
        clients = [_Client(), _Client(), _Client(), _Client("/v1/files")]
        tasks = [asyncio.ensure_future(layer(client.scope, client.receive, _send)) for client in clients]
        clients[3].put(b"x" * 500)  # a file, on its way to disk
        for client in clients[:2]:
            client.put(b"x" * 15)
            await _turns()
        assert layer.budget.num_bytes == 30
        clients[2].put(b"x" * 5)
        await _turns()
        with pytest.raises(UnavailableError):  # the oldest, though nothing more came of it
            await tasks[0]
        assert layer.budget.num_bytes == 20
        clients[1].put(b"x", more=False)
        await tasks[1]
        assert layer.budget.num_bytes == 5
        clients[2].leave()
        clients[3].leave()
        await asyncio.gather(*tasks[2:])
        assert layer.budget.num_bytes == 0
        cancelled = asyncio.ensure_future(layer((one := _Client()).scope, one.receive, _send))
        one.put(b"x" * 15)
        await _turns()
        assert layer.budget.num_bytes == 15
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert layer.budget.num_bytes == 0

    asyncio.run(run())
