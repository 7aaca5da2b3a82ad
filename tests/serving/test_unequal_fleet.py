"""Workers of unequal contexts and memories, in virtual time: long prompts find their worker, and others give way."""

import pytest
from in_process_fleet import ALWAYS, expected, in_process_fleet
from virtual_time import in_virtual_time

from diptych.control.config import QuantizeName
from diptych.control.router.topology import Role
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.timeline.ring import TransferRecord

SMALL = WorkerGroup(name="small", max_model_len=512, kv_cache_tokens=8192)
LARGE = WorkerGroup(name="large", max_model_len=2048, kv_cache_tokens=2560)


@in_virtual_time
async def test_long_and_short_prompts_are_served_side_by_side() -> None:
    async with in_process_fleet(groups=(SMALL, LARGE)) as fleet:
        prompts = {f"r{number}": list(range(1, (1500 if number % 4 == 0 else 100) + number)) for number in range(12)}
        for name, prompt in prompts.items():
            fleet.client.submit(name, prompt)
        for name, prompt in prompts.items():
            assert await fleet.client.read(name) == expected(prompt, 8)
        await fleet.check_nothing_is_left()


@in_virtual_time
async def test_streams_give_way_to_a_prompt_that_only_their_worker_can_hold() -> None:
    """Five streams fill the large worker while the small one is away; the long prompt needs their memory."""
    async with in_process_fleet(groups=(SMALL, LARGE)) as fleet:
        fleet.workers[0].lose(restart_ns=200_000_000)
        prompts = {f"s{number}": list(range(2000 + 300 * number, 2300 + 301 * number)) for number in range(5)}
        await fleet.time.until(fleet.time.now + 50_000_000)
        streams = [fleet.client.submit(name, prompt, max_tokens=200) for name, prompt in prompts.items()]
        await fleet.when(lambda: all(stream.num_tokens > 10 for stream in streams))
        await fleet.when(lambda: 0 in fleet.fleet.core.members.up)
        longest = list(range(1, 1800))
        answer = fleet.client.submit("long", longest, max_tokens=16)
        await fleet.when(lambda: answer.num_tokens > 0)
        assert all(stream.num_tokens < 200 for stream in streams), "it waited until some had ended"
        assert fleet.fleet.core.counts["moved"] > 0
        assert await fleet.client.read("long") == expected(longest, 16)
        for name, prompt in prompts.items():
            assert await fleet.client.read(name) == expected(prompt, 200)
        await fleet.check_nothing_is_left()


@in_virtual_time
async def test_a_long_prompt_waits_for_its_worker_to_come_back() -> None:
    async with in_process_fleet(groups=(SMALL, LARGE)) as fleet:
        fleet.workers[1].lose()
        await fleet.time.until(fleet.time.now + 20_000_000)
        prompt = list(range(1, 1500))
        fleet.client.submit("long", prompt)
        assert await fleet.client.read("long") == expected(prompt, 8)
        await fleet.check_nothing_is_left()


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_workers_with_other_weights_hand_nothing_over(transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        roles: tuple[Role, ...] = ("prefill", "decode")
        names: tuple[QuantizeName, ...] = ("none", "int8")
        groups = tuple(WorkerGroup(name=role + name, role=role, quantize=name) for role in roles for name in names)
        async with in_process_fleet(groups=groups, transfer=transfer, cluster=ALWAYS) as fleet:
            prompts = {f"r{number}": list(range(1, 400 + number)) for number in range(8)}
            for name, prompt in prompts.items():
                fleet.client.submit(name, prompt, max_tokens=40)
            for name, prompt in prompts.items():
                assert await fleet.client.read(name) == expected(prompt, 40)
            infos = fleet.fleet.core.members.infos
            moves = [record for record in fleet.fleet.timeline.since(0) if isinstance(record, TransferRecord)]
            assert [infos[worker].model_copy for worker in range(4)] == [0, 1, 0, 1]
            assert len(moves) == 8
            assert all(infos[move.sender].model_copy == infos[move.worker].model_copy for move in moves)
            await fleet.check_nothing_is_left()

    scenario()
