"""A joined prefill worker and a joined decode worker under load, whose ways are cut at named points of the protocol.

Real agents, worker processes, model and TLS; KV over TCP. Every token that a client sees is compared with that of an
undisturbed run as it comes. Used by test_partitions.py and benchmarks/transfer.py partitions.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from partition_proxy import DOWN, UP, ControlProxy, KVProxy, Names, Way

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.errors import DiptychError
from diptych.control.request import RequestOptions, SamplingParams
from diptych.control.slo import NS_PER_S
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.worker_handle import WorkerState
from diptych.serving.join.worker_agent import AgentOptions, WorkerAgent
from diptych.serving.link.engine_options import BUNDLED_MODEL, DeviceOptions, EngineOptions, MemoryOptions
from diptych.tls.shared_key import SharedKey

KEY = SharedKey(b"k" * 32)
OPTIONS = EngineOptions(
    memory=MemoryOptions(kv_cache_bytes=32 * 2**20),
    scheduler=SchedulerConfig(order="fcfs", budget=BudgetConfig(kind="fixed", max_batched_tokens=64), max_num_seqs=16),
    warm_up=False,
)
VOCABULARY, PROMPT_TOKENS, ANSWER_TOKENS, NUM_PROMPTS = 1000, 300, 80, 6
NUM_CLIENTS = 2
LEASE_S, HOLD_S = 3.0, 0.5  # of a handoff; of each piece of KV, where a handoff is to outlast a renewal
REACHED_S, OVER_S = 30.0, 60.0  # until the point; until everything is as before
SHORT_SHARE = 0.2  # of the partitions end before anybody gives anything up
CANCELLED_AFTER = 5  # tokens

Doing = Literal["", "cancel", "change role", "connect", "connect KV", "slow KV"]
PREFILL, DECODE, KV = "prefill", "decode", "KV"


@dataclass(frozen=True)
class Point:
    """Where a way is cut: at this message (see partition_proxy.py) on the way between the front end and the worker of
    this role, or on that of KV. doing: what makes the message come, beside the load."""

    name: str
    way: str
    direction: str
    message: str
    doing: Doing = ""


POINTS = (
    Point("registration", DECODE, UP, "Registration", "connect"),
    Point("acceptance", PREFILL, DOWN, "Accepted", "connect"),
    Point("ready", DECODE, UP, "Ready", "connect"),
    Point("sign of life of the worker", DECODE, UP, "Vital"),
    Point("sign of life of the front end", PREFILL, DOWN, "Beat"),
    Point("reserve order", DECODE, DOWN, "Reserve"),
    Point("reserved", DECODE, UP, "HandoffReserved"),
    Point("prefill order", PREFILL, DOWN, "Prefill"),
    Point("send order", PREFILL, DOWN, "Send"),
    Point("lease renewal, prefill", PREFILL, DOWN, "Renew", "slow KV"),
    Point("lease renewal, decode", DECODE, DOWN, "Renew", "slow KV"),
    Point("first token", PREFILL, UP, "FirstToken"),
    Point("KV greeting", KV, DOWN, "KV greeting", "connect KV"),
    Point("KV hello", KV, UP, "KV hello", "connect KV"),
    Point("KV opening", KV, UP, "KV open"),
    Point("KV first chunk", KV, UP, "KV first chunk"),
    Point("KV later chunk", KV, UP, "KV later chunk"),
    Point("KV acknowledgement", KV, DOWN, "KV acknowledgement"),
    Point("KV commit", KV, UP, "KV commit"),
    Point("KV last acknowledgement", KV, DOWN, "KV last acknowledgement"),
    Point("delivered", DECODE, UP, "HandoffDelivered"),
    Point("release order", PREFILL, DOWN, "Release"),
    Point("released", PREFILL, UP, "HandoffReleased"),
    Point("decode step", DECODE, UP, "DecodeStep"),
    Point("cancel order", DECODE, DOWN, "Drop", "cancel"),
    Point("finished", DECODE, UP, "RequestFinished"),
    Point("role change", PREFILL, DOWN, "Configure", "change role"),
)
LOSSES = ((UP,), (DOWN,), (UP, DOWN))


@dataclass(frozen=True)
class Trial:
    """One partition. is_short: it ends before anybody gives anything up."""

    point: Point
    lost: tuple[str, ...]
    seed: int
    is_short: bool = False

    def __str__(self) -> str:
        return f"{self.point.name}, {' and '.join(self.lost)} lost{', for a moment' * self.is_short} ({self.seed})"


@dataclass
class Outcome:
    """recovery_s: the longest time from the cut, or from a token after it, to the next token of a client. whole_s: from
    the end of the partition until both workers can be used. problems: everything that must not be, in words."""

    trial: Trial
    recovery_s: float = 0.0
    whole_s: float = 0.0
    num_answers: int = 0
    problems: list[str] = field(default_factory=list)


def trials(repeats: int, seed: int = 0) -> list[Trial]:
    """Each point, with each direction lost and with both, ``repeats`` times; in a random order."""
    rng = random.Random(seed)
    found = [
        Trial(point, lost, number, rng.random() < SHORT_SHARE)
        for point in POINTS
        for lost in LOSSES
        for number in range(repeats)
    ]
    rng.shuffle(found)
    return found


class CutFleet:
    """The fleet, with a proxy on each way. silence_s: after which ends give each other up. Make it by ``cut_fleet``."""

    def __init__(self, llm: AsyncLLM, silence_s: float) -> None:
        self.llm = llm
        self.silence_s = silence_s
        self.ways = {name: Way() for name in (PREFILL, DECODE, KV)}
        self.agents: dict[str, WorkerAgent] = {}
        self.controls: dict[str, ControlProxy] = {}
        self.kv: dict[int, KVProxy] = {}
        self._answers: list[list[int]] = []
        rng = random.Random("prompts")
        self._prompts = [[rng.randrange(5, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
        self._sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self._trial: Trial | None = None
        self._cut_s = 0.0
        self._is_cut = asyncio.Event()

    # -- what there is ------------------------------------------------------------------------------------------------

    def kv_port(self, port: int) -> int:
        """The port of the proxy before a KV connector."""
        if port not in self.kv:
            self.kv[port] = KVProxy(self.ways[KV], port, KEY)
        return self.kv[port].port

    def number(self, role: str) -> int:
        """The number of the worker."""
        number = self.agents[role].number
        assert number is not None
        return number

    def is_whole(self) -> bool:
        """Whether both workers can be used, and none leaves the other alone."""
        core = self.llm.fleet.core
        states = [self.llm.fleet.workers[self.number(role)].state for role in self.agents]
        is_up = all(core.members.is_ready(self.number(role)) for role in self.agents)
        return is_up and all(state is WorkerState.READY for state in states)

    def left_behind(self) -> str:
        """What there is of requests, now that there are none; "": nothing."""
        core = self.llm.fleet.core
        try:
            core.check_idle()
        except AssertionError as error:
            return str(error) or "something of a request"
        used = {role: load.used_blocks for role in self.agents if (load := core.loads.get(self.number(role)))}
        return f"blocks in use: {used}" if any(used.values()) else ""

    # -- the load -----------------------------------------------------------------------------------------------------

    async def learn(self) -> None:
        """The answers of an undisturbed run."""
        for prompt in self._prompts:
            outputs = [output async for output in self.llm.generate(prompt, self._sampling)]
            self._answers.append(list(outputs[-1].outputs[0].token_ids))

    async def _ask(self, which: int, salt: str, outcome: Outcome, most: int = ANSWER_TOKENS) -> None:
        """Send a request, of which at most ``most`` tokens are read. Its KV is in no cache."""
        expected = self._answers[which]
        asked = self.llm.generate(self._prompts[which], self._sampling, options=RequestOptions(cache_salt=salt))
        seen, last_s = 0, time.monotonic()
        try:
            async with aclosing(asked) as outputs:
                async for output in outputs:
                    now, tokens = time.monotonic(), output.outputs[0].token_ids
                    if self._is_cut.is_set():
                        outcome.recovery_s = max(outcome.recovery_s, now - max(last_s, self._cut_s))
                    if tokens[seen:] != expected[seen : len(tokens)]:
                        outcome.problems.append(f"tokens {seen} to {len(tokens)} are wrong")
                        return
                    seen, last_s = len(tokens), now
                    if seen >= most:
                        break
        except DiptychError as error:
            outcome.problems.append(f"after {seen} tokens: {error.message}")
            return
        if seen < most:
            outcome.problems.append(f"{most - seen} tokens are missing")
        outcome.num_answers += 1

    async def _client(self, client: int, outcome: Outcome) -> None:
        """Requests, one after the other, until one that was asked after the cut is answered."""
        number = 0
        while True:
            is_last = self._is_cut.is_set()
            salt = f"{outcome.trial} {client} {number}"
            await self._ask((client + number) % NUM_PROMPTS, salt, outcome)
            if is_last or outcome.problems:
                return
            number += 1

    # -- a trial ------------------------------------------------------------------------------------------------------

    async def run(self, trial: Trial) -> Outcome:
        """Cut the way at the point, and see that nothing is lost and all is as before."""
        outcome = Outcome(trial)
        await until(lambda: self.is_whole() and not self._broken_paths(), OVER_S)
        self._trial = trial
        self._is_cut.clear()
        for name, way in self.ways.items():
            way.watch = lambda names, direction, name=name: self._look(name, names, direction)  # type: ignore[misc]
        for proxy in self.kv.values():
            proxy.hold_s = HOLD_S if trial.point.doing == "slow KV" else 0.0
        clients = [asyncio.create_task(self._client(number, outcome)) for number in range(NUM_CLIENTS)]
        provoking = asyncio.create_task(self._provoke(trial.point, outcome))
        try:
            await self._wait(clients, outcome)
        finally:
            for task in (*clients, provoking):
                task.cancel()
            await asyncio.gather(*clients, provoking, return_exceptions=True)
            self._trial = None
            for way in self.ways.values():
                way.heal()
        await self._see_it_whole(outcome)
        return outcome

    async def _wait(self, clients: list[asyncio.Task[None]], outcome: Outcome) -> None:
        trial = outcome.trial
        try:
            await asyncio.wait_for(self._is_cut.wait(), REACHED_S)
            for proxy in self.kv.values():
                proxy.hold_s = 0.0
            if trial.is_short:
                await asyncio.sleep(random.Random(str(trial)).uniform(0.05, self.silence_s / 3))
                self.ways[trial.point.way].heal()
            await asyncio.wait_for(asyncio.gather(*clients), OVER_S)
        except TimeoutError:
            what = f"no answer for {OVER_S:g} s" if self._is_cut.is_set() else "the point was not reached"
            outcome.problems.append(what)

    async def _see_it_whole(self, outcome: Outcome) -> None:
        healed_s = time.monotonic()
        try:
            await until(self.is_whole, OVER_S)
            outcome.whole_s = time.monotonic() - healed_s
            await until(lambda: not self.left_behind(), OVER_S)
        except TimeoutError:
            states = {role: self.llm.fleet.workers[self.number(role)].state.value for role in self.agents}
            outcome.problems.append(f"afterwards: {states} {self.left_behind()}")
        prefill = self.number(PREFILL)
        if self.llm.fleet.core.members.infos[prefill].role != PREFILL:
            self.llm.fleet.changes.change_role(prefill, PREFILL)

    async def _provoke(self, point: Point, outcome: Outcome) -> None:
        await asyncio.sleep(0.1)  # the load has begun
        match point.doing:
            case "connect":
                self.controls[point.way].cut()
            case "connect KV":
                for proxy in self.kv.values():
                    proxy.cut()
            case "change role":
                self.llm.fleet.changes.change_role(self.number(PREFILL), "both")
            case "cancel":
                while not self._is_cut.is_set():
                    await self._ask(0, f"{outcome.trial} cancelled", outcome, CANCELLED_AFTER)

    def _look(self, way: str, names: Names, direction: str) -> None:
        trial = self._trial
        if trial is None or self._is_cut.is_set() or way != trial.point.way or direction != trial.point.direction:
            return
        if trial.point.message in names:
            self._cut_s = time.monotonic()
            self._is_cut.set()
            self.ways[way].lose(*trial.lost)

    def _broken_paths(self) -> bool:
        return bool(self.llm.fleet.core.paths.broken_at(time.monotonic_ns()))


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def cut_fleet(silence_s: float) -> AsyncIterator[CutFleet]:
    """It serves, and knows the undisturbed answers."""
    cluster = replace(cluster_config(disaggregate="always"), lease_ns=int(LEASE_S * NS_PER_S))
    join = JoinOptions("127.0.0.1:0", KEY)
    options = FleetOptions(both=0, join=join, cluster=cluster, heartbeat_timeout_s=silence_s)
    llm = AsyncLLM(OPTIONS, Fleet(OPTIONS, options))
    async with AsyncExitStack() as stack:
        await llm.start(wait=False)
        stack.push_async_callback(llm.shutdown)
        fleet = CutFleet(llm, silence_s)
        assert llm.fleet.door is not None
        for role in get_args(Literal["prefill", "decode"]):
            control = ControlProxy(fleet.ways[role], llm.fleet.door.port, KEY, fleet.kv_port)
            stack.push_async_callback(control.close)
            fleet.controls[role] = control
            fleet.agents[role] = await stack.enter_async_context(_agent(control.port, role))
        assert llm.fleet.ready is not None
        await asyncio.wait_for(asyncio.shield(llm.fleet.ready), 2 * OVER_S)
        await until(lambda: None not in {agent.number for agent in fleet.agents.values()}, OVER_S)
        await until(fleet.is_whole, OVER_S)
        await fleet.learn()
        try:
            yield fleet
        finally:
            for proxy in fleet.kv.values():
                await proxy.close()


@asynccontextmanager
async def _agent(port: int, role: Literal["prefill", "decode"]) -> AsyncIterator[WorkerAgent]:
    device = DeviceOptions(device="cpu", threads=1)
    agent = WorkerAgent(
        AgentOptions(
            host="127.0.0.1",
            port=port,
            key=KEY,
            model=str(BUNDLED_MODEL),
            role=role,
            name=role,
            device=device,
            drain_s=0.1,
        )
    )
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        await agent.leave()
        await agent.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Counts, and the longest recoveries, of these."""
    problems = Counter(problem for outcome in outcomes for problem in outcome.problems)
    return {
        "partitions": len(outcomes),
        "answers": sum(outcome.num_answers for outcome in outcomes),
        "problems": sum(problems.values()),
        "recovery_s": max(outcome.recovery_s for outcome in outcomes),
        "whole_s": max(outcome.whole_s for outcome in outcomes),
    }
