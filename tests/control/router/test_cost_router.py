"""Which workers serve a request: the costs, the pairs, and what the front end remembers."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.request import PeerRun, Submission
from diptych.control.router import path_speeds
from diptych.control.router.cost_router import CostRouter
from diptych.control.router.costs import (
    LASTING,
    LEAST_BUSY,
    LEAST_STREAMS,
    OTHERS_SHARE,
    WINDOW_NS,
    BusyShare,
    WorkerPrices,
    WorkerView,
    kv_price_ns,
    prompt_ns,
    raised,
    work_ns,
)
from diptych.control.router.hit_rate_monitor import MIN_ADMISSIONS, WINDOW, HitRateMonitor
from diptych.control.router.path_speeds import MEMORY_NS, PathSpeeds
from diptych.control.router.prefix_index import PERIOD_NS
from diptych.control.router.routing import Route, RoutingConfig, RoutingRequest
from diptych.control.router.tier_index import TierIndex
from diptych.control.router.topology import Level, LinkCost, LinkCosts, Role, WorkerInfo, level
from diptych.control.slo import NS_PER_MS, NS_PER_S
from tests.laws import law

SIZE = 16
# 10 us a prompt token; a step of 5 ms, and 1 ms for each stream
REPORT = LoadReport(0, 0, 1000, 0, 10_000.0, 0.0, 5e6, 1e6, 0.0, tpot_ns=50 * NS_PER_MS)


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "little") for number in numbers)


def router_of(*workers: Role | WorkerInfo, reports: dict[int, LoadReport] | None = None, **config: Any) -> CostRouter:
    """Workers that are up and idle, in one memory unless they say otherwise."""
    router = CostRouter(RoutingConfig(**config))
    for number, worker in enumerate(workers):
        info = worker if isinstance(worker, WorkerInfo) else WorkerInfo(number, worker, 1000, SIZE, memory_domain=0)
        router.set_up(info)
        router.on_load(info.number, (reports or {}).get(info.number, REPORT))
    return router


def ask(
    request_id: str = "a",
    tokens: int = 1000,
    answer: int = 100,
    *,
    hashes: tuple[bytes, ...] = (),
    hands_off: bool = True,
    **more: Any,
) -> RoutingRequest:
    return RoutingRequest(Submission(request_id, tokens, answer, hashes, hands_off=hands_off), **more)


def route(router: CostRouter, request: RoutingRequest, now: int = 0) -> Route:
    found = router.route(request, now)
    assert found is not None
    return found


def stream(router: CostRouter, worker: int, count: int, answer: int = 200) -> None:
    """Streams that decode on a worker and have nothing left to prefill."""
    others = frozenset(range(64)) - {worker}
    for number in range(count):
        name = f"stream{worker}.{number}"
        assert route(router, ask(name, 1, answer, avoid=others, hands_off=False)).decode == worker
        router.on_admitted(name, worker, 0)
        router.on_first_token(name)


# -- laws --------------------------------------------------------------------------------------------------------------


def queue_ns(prices: WorkerPrices, now: int) -> float:
    """What any prompt pays before it begins: work in front of it, and memory."""
    return prices.standing + max(0, prices.idle_at - now) * prices.stretch


def answer_ns(prices: WorkerPrices, num_tokens: int, answer: int) -> float:
    """The expected steps after the first token, and what they cost the other streams."""
    return (answer - 1) * (prices.step + (num_tokens + answer // 2) * prices.context)


def brute_force(router: CostRouter, request: RoutingRequest, answer: int, now: int) -> float:
    """The least cost of all ways to serve a request, each computed by itself."""
    workers, views, links = router._workers, router._views, router._config.links
    num_tokens = request.num_prompt_tokens
    longest = (num_tokens - 1) // SIZE * SIZE
    held = [min(matched * SIZE, longest) for matched in router.index.matches(request.submission.hashes, now)]

    raised = [
        brute_raised(router, p, request.submission.hashes[: longest // SIZE], held[p]) for p in range(len(workers))
    ]

    demand = router._search._demand(request, answer, now)
    may_pair = demand.may_hand_off and len({worker.role for worker in workers}) > 1
    costs = []
    for p, source in enumerate(workers):
        prices, left = views[p].prices, num_tokens - held[p]
        ready, raise_ns = raised[p]
        memory = prices.block * -(-(left + answer) // SIZE)
        own = queue_ns(prices, now) + prompt_ns(prices, num_tokens - ready, ready) + raise_ns
        if not (source.role == "decode" and may_pair and router._search._disturbs(demand, p)):
            costs.append(own + answer_ns(prices, num_tokens, answer) + memory)
        for d, target in enumerate(workers):
            if p == d or source.role == "decode" or target.role == "prefill" or source.role == target.role == "both":
                continue
            there = views[d].prices
            cached = max(held[d], ready) if level(source, target) is Level.MEMORY else ready
            cost = queue_ns(prices, now) + prompt_ns(prices, num_tokens - cached, cached)
            cost += raise_ns if cached == ready and ready > held[p] else 0
            if level(source, target) is not Level.MEMORY:
                cost += prices.block * -(-left // SIZE)
            work = work_ns(prices, num_tokens - cached, cached)
            link = links.link(level(source, target))
            link = link and router._search.speeds.link((source.number, target.number), link)
            cost += links.exposed_ns(link, num_tokens - held[d], int(work))
            rest = there.memory + answer_ns(there, num_tokens, answer)
            rest += there.block * -(-(num_tokens + answer - held[d]) // SIZE)
            costs.append(cost + rest)
            if level(source, target) is Level.MEMORY:  # the target brings up what it has, and the source goes on there
                there_ready, there_ns = raised[d]
                cost = queue_ns(prices, now) + prompt_ns(prices, num_tokens - there_ready, there_ready) + there_ns
                costs.append(cost + links.exposed_ns(None, 0, 0) + rest)
    return min(costs)


def brute_raised(router: CostRouter, p: int, hashes: tuple[bytes, ...], held: int) -> tuple[int, float]:
    """(tokens that need not be computed, what bringing up those costs that are below the cache) of one worker."""
    report, prices = router._views[p].report, router._views[p].prices
    assert report is not None
    crowd = prices.token / prices.work_token  # what a step costs more because of the streams there
    bit, ready, cost, host, disk = 1 << p, held, 0.0, [], []
    left = list(hashes[held // SIZE :])
    while left and router.host._masks.get(left[0], 0) & bit:
        host.append(left.pop(0))
    while left and router.disk._masks.get(left[0], 0) & bit:
        disk.append(left.pop(0))
    if host:
        if len(host) * report.copy_block_ns >= work_ns(prices, len(host) * SIZE, ready):
            return held, 0
        cost += len(host) * report.copy_block_ns * crowd
        ready += len(host) * SIZE
    start, domain = ready // SIZE, router._workers[p].host_domain
    mates = [q for q, worker in enumerate(router._workers) if domain is not None and worker.host_domain == domain]
    at_peers = [router.host.run(q, hashes, start) for q in mates if q != p]
    choices = [(0.0, ready, cost)]
    for count, price, wait in (
        (len(disk), report.read_block_ns, report.read_wait_ns),
        (max(at_peers, default=0), report.peer_block_ns, report.peer_wait_ns),
    ):
        gain, alone = work_ns(prices, count * SIZE, ready), wait + count * (price + report.copy_block_ns)
        if count and price and 2 * alone < gain:
            there = wait + count * price + count * report.copy_block_ns * crowd
            choices.append((gain - alone, ready + count * SIZE, cost + there))
    return max(choices, key=lambda choice: choice[0])[1:]


def random_fleet(rng: random.Random) -> CostRouter:
    """Any roles, hosts, memory domains, prices, loads and caches; in half of the fleets with tiers below them."""
    infos = []
    has_tiers = rng.random() < 0.5
    for number in range(rng.randrange(2, 14)):
        host = rng.randrange(3)
        role: Role = rng.choice(("prefill", "decode", "both"))
        rack = rng.choice(("", "r0", "r1"))
        domain, host_domain = rng.choice((None, host)), rng.choice((None, host))
        infos.append(WorkerInfo(number, role, 1000, SIZE, f"h{host}", domain, rack=rack, host_domain=host_domain))
    links = LinkCosts(bytes_per_token=rng.choice((0, 1000, 100_000)))
    router = CostRouter(RoutingConfig(links=links))
    for info in infos:
        router.set_up(info)
        report = LoadReport(
            0, rng.randrange(50 * NS_PER_MS), 1000, rng.randrange(1000), rng.uniform(1e3, 2e4), rng.uniform(0, 5),
            rng.uniform(0, 1e7), rng.uniform(0, 1e6), rng.uniform(0, 50), 10, rng.choice((0, 30 * NS_PER_MS)),
            rng.choice((0, 10_000, 10**6)), rng.choice((0, 10_000, 50_000)), rng.choice((0, 0, 10**6)),
            rng.choice((0, 5_000, 40_000)), rng.choice((0, 0, 10**6)),
        )  # fmt: skip
        router.on_load(info.number, report)
        router.on_kv_events(info.number, 1, stored=blocks(*range(rng.choice((0, 0, 3, 30)))))
        if has_tiers:
            for tier in ("host", "disk"):
                first = rng.choice((0, 0, 3, 6, 20))
                lower = blocks(*range(first, first + rng.choice((0, 3, 10, 20))))
                router.on_kv_events(info.number, 1, stored=lower, tier=tier)
    for _ in range(rng.choice((0, 0, 5))):  # some of the paths are not what the labels say
        a, b = rng.sample(range(len(infos)), 2)
        router.on_transfer(a, b, 10**7, rng.randrange(1, NS_PER_S), 0)
    return router


@law(weight=0.4, seeds=(1309117666,))  # a decode worker may not take a prompt that would disturb its streams
def test_no_way_to_serve_a_request_is_cheaper_than_the_one_chosen(seed: int) -> None:
    rng = random.Random(seed)
    router = random_fleet(rng)
    for number in range(15):
        request = ask(str(number), rng.randrange(1, 600), rng.randrange(2, 200), hashes=blocks(*range(40)))
        answer = max(1, min(request.num_expected, request.max_tokens))
        least_ns = brute_force(router, request, answer, number)
        assert abs(route(router, request, number).cost_ns - least_ns) <= 1 + least_ns * 1e-9


@law(weight=0.3)
def test_nothing_is_left_when_all_have_ended(seed: int) -> None:
    rng = random.Random(seed)
    router = random_fleet(rng)
    count = len(router._workers)
    before = [view.prices for view in router._views]
    running: list[tuple[str, Route]] = []
    for number in range(60):
        found = route(router, ask(str(number), rng.randrange(1, 600), 100, hashes=blocks(*range(40))), 1)
        running.append((str(number), found))
        name, one = rng.choice(running)
        position = rng.randrange(count)
        router.on_load(position, router._views[position].report or REPORT)
        what = rng.randrange(3)
        if what == 0:
            router.on_queued(name, one.prefill)
        elif what == 1:
            router.on_admitted(name, rng.choice((one.prefill, one.decode)), 0)
        else:
            router.on_first_token(name)
    for name, _ in running:
        router.on_ended(name)
    assert not router._sent
    for view, old in zip(router._views, before, strict=True):
        assert (view.streams, view.context, view.growth, view.work, view.memory) == (0, 0, 0, {}, {})
        assert (view.work_sum_ns, view.memory_sum) == (0, 0)
        assert view.prices.memory == old.memory


def test_costs_grow_with_the_prompt_the_queue_the_answer_and_the_memory() -> None:
    def cost(report: LoadReport = REPORT, tokens: int = 100, answer: int = 50, streams: int = 0) -> int:
        router = router_of("both", reports={0: report})
        stream(router, 0, streams)
        return route(router, ask(tokens=tokens, answer=answer)).cost_ns

    for costs in (
        [cost(tokens=tokens) for tokens in (10, 100, 1000)],
        [cost(replace(REPORT, backlog_ns=backlog)) for backlog in (0, 10**6, 10**8)],
        [cost(answer=answer) for answer in (1, 2, 10, 100)],
        [cost(replace(REPORT, used_blocks=used)) for used in (0, 500, 900, 990, 1000)],
        [cost(streams=streams) for streams in (0, 1, 4, 16)],
    ):
        assert costs == sorted(set(costs))


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def test_memory_is_priced_by_used_over_free_up_to_999() -> None:
    assert [kv_price_ns(used, 100, 1000) for used in (0, 50, 75, 99)] == [0, 1000, 3000, 99_000]
    assert kv_price_ns(100, 100, 1000) == kv_price_ns(150, 100, 1000) == 999_000


def test_a_prompt_costs_its_uncached_work_and_a_share_of_it_for_those_who_come_later() -> None:
    view = WorkerView()
    view.on_report(replace(REPORT, pair_ns=2.0))
    view.reprice(0)
    assert work_ns(view.prices, 10, 30) == 10 * 10_000 + 2 * (10 * 30 + 55)
    assert prompt_ns(view.prices, 10, 30) == work_ns(view.prices, 10, 30) * (1 + 1 / OTHERS_SHARE)


def test_a_prompt_next_to_streams_gets_what_their_objective_leaves_and_costs_them_time() -> None:
    view = WorkerView(role="decode")
    view.on_report(REPORT)
    view.reprice(0)
    assert view.prices.token == 10_000 * (1 + 1 / OTHERS_SHARE + LEAST_STREAMS)
    for _ in range(5):
        view.join(1, 100, 100)
    view.reprice(0)  # a step takes 10 of 50 ms
    assert view.prices.stretch == 1 / (1 - 0.2)
    assert view.prices.token == pytest.approx(10_000 * (1.25 + 1 / OTHERS_SHARE + 0.2 * 5))


def test_a_step_of_an_answer_costs_itself_and_what_the_others_steps_grow_by() -> None:
    own_ns, others_ns = 5e6 + 4 * 1e6 + 10 * 300, 3 * 1e6
    for role, lasting in (("decode", 1), ("both", LASTING)):
        view = WorkerView(role=role)
        view.on_report(replace(REPORT, context_ns=10.0))
        for _ in range(3):
            view.join(1, 80, 40)
        view.reprice(0)
        assert view.prices.step == 6e6 + lasting * (own_ns + others_ns - 6e6)
        assert view.prices.context == 10 * (1 + lasting * 3)
    prefill = WorkerView(role="prefill")
    prefill.on_report(REPORT)
    prefill.reprice(0)
    slower, waiting = 1 / (1 - LEAST_BUSY), LEAST_BUSY / (1 - LEAST_BUSY)
    assert prefill.prices.step == 6e6 * slower + 1e6 * waiting


def test_expected_growth_fills_memory_until_it_is_there() -> None:
    view = WorkerView()
    view.on_report(replace(REPORT, used_blocks=400))
    view.join(1, 100, 1600)
    view.reprice(900, 0, SIZE)
    assert view.prices.memory == 900 * 500 // 500
    view.on_report(replace(REPORT, used_blocks=450, output_tokens=800))
    view.reprice(900, 0, SIZE)
    assert view.prices.memory == 900 * 500 // 500


def test_the_share_of_busy_time_forgets_in_two_windows() -> None:
    busy = BusyShare()
    busy.add(1, WINDOW_NS // 2)
    assert busy.share(2) == 0.5
    assert busy.share(WINDOW_NS + WINDOW_NS // 2) == 0.25
    assert busy.share(3 * WINDOW_NS) == 0


def test_a_transfer_shows_its_last_piece_and_what_the_prefill_did_not_cover() -> None:
    links = LinkCosts(bytes_per_token=1000, chunk_tokens=100, host=LinkCost(10**9, 5), memory_latency_ns=7)
    assert links.exposed_ns(None, 5000, 0) == 7
    assert links.exposed_ns(links.host, 1000, 10**9) == 5 + 10**5
    assert links.exposed_ns(links.host, 1000, 400_000) == 5 + 600_000
    assert links.exposed_ns(links.host, 0, 0) == 5


def test_workers_are_as_near_as_the_nearest_thing_they_share() -> None:
    worker = WorkerInfo(0, "both", 1, 1, "a", 3)
    assert level(worker, replace(worker, number=1)) is Level.MEMORY
    assert level(worker, replace(worker, memory_domain=4)) is Level.HOST
    assert level(replace(worker, memory_domain=None), replace(worker, memory_domain=None)) is Level.HOST
    assert level(worker, replace(worker, memory_domain=None, host="b")) is Level.NETWORK


def test_what_lies_below_is_brought_up_where_that_is_faster_than_computing() -> None:
    view = WorkerView()
    view.on_report(replace(REPORT, copy_block_ns=20_000, read_block_ns=30_000, read_wait_ns=10**6))
    view.reprice(0)
    alone = 1 + 1 / OTHERS_SHARE
    assert raised(view.prices, 32, 10, 0, 0, SIZE) == (32 + 160, 200_000 * alone)
    assert raised(view.prices, 32, 0, 60, 0, SIZE) == (32 + 960, 2_800_000 + 1_200_000 * alone)
    assert raised(view.prices, 32, 0, 2, 0, SIZE) == (32, 0)  # two blocks are computed in 0.32 ms
    both = raised(view.prices, 32, 10, 60, 0, SIZE)
    assert both == (32 + 160 + 960, 200_000 * alone + 2_800_000 + 1_200_000 * alone)
    for changes in ({"copy_block_ns": 160_000}, {"read_block_ns": 0, "copy_block_ns": 10**6}):
        view.on_report(replace(REPORT, **changes))
        view.reprice(0)
        assert raised(view.prices, 32, 10, 60, 0, SIZE) == (32, 0)


def test_of_disk_and_peer_the_one_that_saves_more_is_asked() -> None:
    view = WorkerView()
    prices = replace(REPORT, copy_block_ns=20_000, read_block_ns=30_000, peer_block_ns=10_000, peer_wait_ns=10**6)
    view.on_report(prices)
    view.reprice(0)
    alone = 1 + 1 / OTHERS_SHARE
    by_disk, by_peer = 1_800_000 + 1_200_000 * alone, 1_600_000 + 1_200_000 * alone
    assert raised(view.prices, 32, 0, 60, 0, SIZE) == (32 + 960, by_disk)
    assert raised(view.prices, 32, 0, 60, 60, SIZE) == (32 + 960, by_peer)
    assert raised(view.prices, 32, 0, 60, 50, SIZE) == (32 + 960, by_disk)  # the peer has less
    assert raised(view.prices, 32, 0, 0, 2, SIZE) == (32, 0)  # two blocks are computed in 0.32 ms
    view.on_report(replace(prices, peer_block_ns=0))  # it reads from no peer
    view.reprice(0)
    assert raised(view.prices, 32, 0, 0, 60, SIZE) == (32, 0)


# -- one or two workers ------------------------------------------------------------------------------------------------


def test_streams_are_protected_from_a_long_prompt() -> None:
    router = router_of("prefill", "decode")
    stream(router, 1, 4)
    found = route(router, ask(tokens=4000))
    assert (found.prefill, found.decode, found.reason) == (0, 1, "remote")


def test_an_idle_decode_worker_computes_prompts_when_prefill_workers_are_busy_or_they_are_short() -> None:
    router = router_of("prefill", "decode")
    assert route(router, ask(tokens=4000)).reason == "remote"
    assert route(router_of("prefill", "decode"), ask(tokens=40)).reason == "local_idle_decode"
    busy = router_of("prefill", "decode", reports={0: replace(REPORT, backlog_ns=NS_PER_S)})
    assert route(busy, ask(tokens=4000)).reason == "local_idle_decode"


def test_a_short_or_cached_rest_is_computed_where_the_streams_are() -> None:
    router = router_of("prefill", "decode")
    stream(router, 1, 2)
    assert route(router, ask("short", 20)).reason == "local_short"
    router = router_of("prefill", "decode", links=LinkCosts(memory_latency_ns=10 * NS_PER_MS))
    stream(router, 1, 2)
    router.on_kv_events(1, 1, stored=blocks(*range(100)))
    turn = route(router, ask("turn", 1650, hashes=blocks(*range(100))))
    assert (turn.reason, turn.num_cached_tokens) == ("local_cached", 1600)
    for limit, reason in (
        (0, "local_backlog"),
        (256, "remote"),
    ):  # the limit protects the streams from a busy neighbour
        late = {0: replace(REPORT, backlog_ns=NS_PER_S)}
        swamped = router_of("prefill", "decode", reports=late, max_local_tokens=limit)
        stream(swamped, 1, 2)
        assert route(swamped, ask("late", 1000)).reason == reason


def test_with_objectives_as_the_limit_a_decode_worker_takes_long_prompts_while_its_steps_leave_room() -> None:
    late = {0: replace(REPORT, backlog_ns=NS_PER_S)}
    for streams, is_deflected in ((2, True), (44, False)):  # steps of 7 and of 49 ms, of 50 ms that they may take
        router = router_of("prefill", "decode", reports=late, local_prefill="objective")
        stream(router, 1, streams)
        assert (route(router, ask("late", 4000)).prefill == 1) is is_deflected


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_conversation_that_comes_back_goes_where_a_tier_holds_it_unless_the_queue_there_costs_more(
    tier: Tier,
) -> None:
    prices = replace(REPORT, copy_block_ns=10_000, read_block_ns=20_000)
    conversation = blocks(*range(100))
    for backlog_ns, expected in ((0, (1, 1600)), (5 * NS_PER_MS, (1, 1600)), (NS_PER_S, (0, 0))):
        router = router_of("both", "both", reports={0: prices, 1: replace(prices, backlog_ns=backlog_ns)})
        router.on_kv_events(1, 1, stored=conversation, tier=tier)
        found = route(router, ask(tokens=1650, hashes=conversation))
        assert (found.decode, found.num_cached_tokens) == expected
        router.on_admitted("a", found.decode, found.num_cached_tokens, found.num_cached_tokens)
        assert router.hit_error == 0
    router.on_ended("a")
    router.on_load(1, prices)
    router.on_kv_events(1, 2, evicted=conversation[:50], tier=tier)  # then the rest is of no use
    late = 3 * PERIOD_NS  # what was predicted of the other worker is forgotten
    assert route(router, ask("b", tokens=1650, hashes=conversation), late).num_cached_tokens == 0


def test_the_cache_beats_the_host_and_the_host_the_disk_and_a_folder_of_all_moves_nothing() -> None:
    prices = dict.fromkeys(range(3), replace(REPORT, copy_block_ns=10_000, read_block_ns=20_000))
    conversation = blocks(*range(100))
    router = router_of("both", "both", "both", reports=prices)
    for worker in range(3):
        router.on_kv_events(worker, 1, stored=conversation, tier="disk")
    chosen = []
    for name, tier in (("disk", None), ("host", "host"), ("device", "device")):
        if tier is not None:
            router.on_kv_events(len(chosen), 1, stored=conversation, tier=tier)
        found = route(router, ask(name, tokens=1650, hashes=conversation))
        assert found.num_cached_tokens == 1600
        chosen.append(found.decode)
        router.on_ended(name)
        router.on_kv_events(found.decode, 2 if tier == "device" else 1, evicted=conversation)  # forget the prediction
    assert chosen == [0, 1, 2]


def of_hosts(*domains: int | None, reports: dict[int, LoadReport], copies: tuple[int, ...] = ()) -> CostRouter:
    """Workers of both phases, each with memory of its own, that may read the host blocks of those of their domain."""
    infos = [
        WorkerInfo(number, "both", 1000, SIZE, host_domain=domain, model_copy=copies[number] if copies else 0)
        for number, domain in enumerate(domains)
    ]
    return router_of(*infos, reports=reports)


def test_a_worker_is_told_which_peer_holds_what_comes_next_when_the_holder_has_too_much_to_do() -> None:
    prices = replace(REPORT, copy_block_ns=10_000, peer_block_ns=20_000)
    busy = replace(prices, backlog_ns=NS_PER_S)
    conversation = blocks(*range(100))
    router = of_hosts(0, 0, 1, reports={0: busy, 1: prices, 2: prices})
    router.on_kv_events(0, 1, stored=conversation, tier="host")
    router.on_kv_events(1, 1, stored=conversation[:30], tier="host")
    found = route(router, ask(tokens=1650, hashes=conversation))
    assert (found.decode, found.num_cached_tokens) == (1, 1600)
    assert found.decode_peer == PeerRun(0, 30, 70)  # behind what it has itself
    router = of_hosts(0, 0, 1, reports=dict.fromkeys(range(3), prices))
    router.on_kv_events(0, 1, stored=conversation, tier="host")
    found = route(router, ask(tokens=1650, hashes=conversation))  # the holder itself needs to read from nobody
    assert (found.decode, found.decode_peer) == (0, None)


@pytest.mark.parametrize("why", ["other host", "other copy", "none reads", "dear", "gone", "evicted"])
def test_no_peer_is_named_that_cannot_be_read(why: str) -> None:
    prices = replace(REPORT, copy_block_ns=10_000, peer_block_ns=20_000)
    if why == "none reads":
        prices = replace(prices, peer_block_ns=0)
    if why == "dear":
        prices = replace(prices, peer_block_ns=10**6)
    conversation = blocks(*range(100))
    domains = {"other host": (0, 1), "none reads": (None, None)}.get(why, (0, 0))
    copies = (0, 1) if why == "other copy" else (0, 0)
    reports = {0: replace(prices, backlog_ns=NS_PER_S), 1: prices}
    router = of_hosts(*domains, reports=reports, copies=copies)
    router.on_kv_events(0, 1, stored=conversation, tier="host")
    if why == "gone":
        router.set_down(0)
    if why == "evicted":
        router.on_kv_events(0, 2, evicted=conversation[:1], tier="host")
    found = route(router, ask(tokens=1650, hashes=conversation))
    assert (found.decode, found.num_cached_tokens) == (1, 0)
    assert found.decode_peer is None or why == "dear"  # that worker will see for itself


def test_of_several_peers_the_one_with_the_longest_run_is_named() -> None:
    index = TierIndex()
    for worker, count in enumerate((3, 5, 5, 9)):
        index.add_worker()
        index.on_events(worker, 1, stored=blocks(*range(count)))
    assert index.shared_run(0b0111, blocks(*range(9)), 0) == (5, 1)
    assert index.shared_run(0b0111, blocks(*range(9)), 2) == (3, 1)
    assert index.shared_run(0b0001, blocks(*range(9)), 2) == (1, 0)
    assert index.shared_run(0b0111, blocks(*range(9)), 5) == (0, -1)
    assert index.shared_run(0b1111, blocks(*range(9)), 9) == (0, -1)


def test_more_from_below_than_was_counted_on_is_no_error_of_the_index() -> None:
    router = router_of("both", "both")
    for number, (found, below, error) in enumerate(((800, 800, 0), (800, 0, 0.8), (0, 0, 0))):
        router.watch = HitRateMonitor()
        at = route(router, ask(str(number))).decode
        router.on_admitted(str(number), at, found, below)
        assert router.hit_error == error


def test_one_token_needs_no_decode_worker_and_few_stay_with_their_prefill_worker() -> None:
    router = router_of("prefill", "decode")
    stream(router, 1, 4)
    assert route(router, ask("one", answer=1)).reason == "one_token"
    far = LinkCosts(memory_latency_ns=60 * NS_PER_MS)
    router = router_of("prefill", "decode", links=far)
    stream(router, 1, 4)
    assert route(router, ask("two", 12_000, 2)).reason == "prefill_keeps"
    router.on_ended("two")
    assert route(router, ask("many", 12_000, 200)).reason == "remote"


def test_requests_without_an_answer_leave_decode_workers_alone_as_long_as_others_can_serve_them() -> None:
    late = {0: replace(REPORT, backlog_ns=NS_PER_S)}
    for settings, streams, tokens, taker in (
        ({}, 0, 1000, 1),  # nobody is disturbed there, and the prefill worker is late
        ({}, 2, 1000, 0),
        ({}, 2, 200, 1),  # short enough
        ({"max_local_tokens": 0}, 2, 1000, 1),
        ({"disaggregate": "always"}, 0, 1000, 0),
        ({"disaggregate": "never"}, 2, 1000, 1),
    ):
        router = router_of("prefill", "decode", reports=late, **settings)  # type: ignore[arg-type]
        stream(router, 1, streams)
        for hands_off in (False, True):
            found = route(router, ask("vector", tokens, 1, hands_off=hands_off))
            assert (found.prefill, found.decode) == (taker, taker), (settings, streams, tokens)
            router.on_ended("vector")
        router.set_down(0)
        assert route(router, ask("alone", tokens, 1, hands_off=False)).prefill == 1


def test_settings_and_requests_overrule_the_costs() -> None:
    assert route(router_of("prefill", "decode", disaggregate="always"), ask(tokens=40)).reason == "remote"
    never = router_of("prefill", "decode", disaggregate="never")
    stream(never, 1, 4)
    assert route(never, ask(tokens=4000)).reason == "never"
    router = router_of("prefill", "decode")
    stream(router, 1, 4)
    assert route(router, ask(tokens=4000, hands_off=False)).reason == "whole"
    capped = router_of("prefill", "decode", max_local_tokens=10)
    stream(capped, 1, 1)
    assert route(capped, ask(tokens=20)).reason == "remote"


def test_without_a_partner_one_worker_does_it_all() -> None:
    router = router_of("prefill", "decode", disaggregate="always")
    router.set_down(0)
    found = route(router, ask())
    assert (found.prefill, found.decode, found.reason) == (1, 1, "only_worker")
    router.set_down(1)
    assert router.route(ask(), 0) is None


def test_a_worker_to_avoid_gets_it_only_if_nobody_else_can() -> None:
    router = router_of("both", "both")
    assert route(router, ask(avoid=frozenset({0}))).decode == 1
    router.set_down(1)
    assert route(router, ask(avoid=frozenset({0}))).decode == 0


def test_a_pair_in_one_pool_beats_a_pair_across_hosts() -> None:
    near = [WorkerInfo(0, "prefill", 1000, SIZE, "a", 1), WorkerInfo(1, "decode", 1000, SIZE, "a", 1)]
    far = [WorkerInfo(2, "prefill", 1000, SIZE, "b", 2), WorkerInfo(3, "decode", 1000, SIZE, "b", 2)]
    router = router_of(*near, *far, disaggregate="always", links=LinkCosts(bytes_per_token=100_000))
    pairs = {(one.prefill, one.decode) for one in (route(router, ask(str(number))) for number in range(10))}
    assert pairs == {(0, 1), (2, 3)}


def test_between_racks_is_farther_than_within_one() -> None:
    near, far = WorkerInfo(1, "decode", 1000, SIZE, "b", rack="r"), WorkerInfo(2, "decode", 1000, SIZE, "c", rack="s")
    source = WorkerInfo(0, "prefill", 1000, SIZE, "a", rack="r")
    assert [level(source, other) for other in (near, far, replace(far, rack=""))] == [
        Level.NETWORK,
        Level.FAR,
        Level.NETWORK,
    ]
    router = router_of(source, far, near, disaggregate="always", links=LinkCosts(bytes_per_token=100_000))
    assert route(router, ask()).decode == 1


def measured_fleet() -> CostRouter:
    """Labels say that worker 1 is on the host of worker 0, and worker 2 far away."""
    infos = [
        WorkerInfo(0, "prefill", 1000, SIZE, "a", rack="r"),
        WorkerInfo(1, "decode", 1000, SIZE, "a", rack="r"),
        WorkerInfo(2, "decode", 1000, SIZE, "b", rack="s"),
    ]
    return router_of(*infos, disaggregate="always", links=LinkCosts(bytes_per_token=100_000))


def decoder(router: CostRouter, now: int = 0) -> int:
    """Where the next request decodes; it ends at once."""
    found = route(router, ask(), now)
    router.on_ended("a")
    return found.decode


def test_labels_that_lie_are_overruled_by_what_was_measured() -> None:
    router = measured_fleet()
    assert decoder(router) == 1
    router.on_transfer(0, 1, 10**8, 10 * NS_PER_S, 1)  # 10 MB/s "within one host"
    assert decoder(router, 1) == 2
    router.on_transfer(0, 2, 10**8, 100 * NS_PER_S, 2)  # 1 MB/s: worse still
    assert decoder(router, 2) == 1


def test_what_was_measured_is_forgotten_when_it_is_old_or_its_worker_has_gone() -> None:
    router = measured_fleet()
    router.on_transfer(0, 1, 10**8, 10 * NS_PER_S, 1)
    assert decoder(router, MEMORY_NS) == 2
    assert decoder(router, MEMORY_NS + 1) == 1
    router.on_transfer(0, 1, 10**8, 10 * NS_PER_S, MEMORY_NS + 2)
    assert decoder(router, MEMORY_NS + 3) == 2
    router.set_down(1)
    router.set_up(replace(measured_fleet()._workers[1]))
    router.on_load(1, REPORT)
    assert decoder(router, MEMORY_NS + 4) == 1


def test_measurements_move_slowly_and_noise_moves_nothing() -> None:
    speeds, link = PathSpeeds(), LinkCost(10**9, 10**6)
    assert not speeds.observe((0, 1), link, 1000, NS_PER_S, 0)  # so few bytes say nothing
    assert not speeds.observe((0, 1), link, 10**9, NS_PER_S, 0)  # as guessed
    assert not speeds.observe((0, 1), link, 10**9, NS_PER_S * 11 // 10, 0)
    assert speeds.link((0, 1), link) is link
    changes = [speeds.observe((0, 1), link, 10**8, NS_PER_S, 0) for _ in range(40)]  # a tenth of it from now on
    assert 1 < sum(changes) < 12
    assert 1e8 <= speeds.link((0, 1), link).bytes_per_s < 1.3e8
    assert speeds.link((1, 0), link) is link  # the other direction is another path


def test_the_number_of_paths_that_are_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_speeds, "MAX_PATHS", 3)
    speeds, link = PathSpeeds(), LinkCost(10**9, 0)
    for target in range(1, 6):
        assert speeds.observe((0, target), link, 10**6, NS_PER_S, target)
    assert list(speeds.measured) == [(0, 3), (0, 4), (0, 5)]


def test_the_conversation_goes_back_to_the_decode_worker_that_holds_it() -> None:
    router = router_of("prefill", "decode", "decode", disaggregate="always")
    router.on_kv_events(2, 1, stored=blocks(*range(50)))
    found = route(router, ask(tokens=900, hashes=blocks(*range(56))))
    assert (found.decode, found.num_cached_tokens) == (2, 800)


def test_expected_answers_count_against_decode_memory() -> None:
    full = replace(REPORT, used_blocks=0, num_blocks=100)
    infos = [WorkerInfo(number, "both", 100, SIZE, memory_domain=0) for number in range(2)]
    router = router_of(*infos, reports={0: full, 1: full}, kv_price_ns=NS_PER_S)
    first = route(router, ask("essay", 16, 1200, num_expected=1000))
    assert route(router, ask("next", 16, 1200, num_expected=2)).decode != first.decode
    router.on_ended("essay")
    assert router._views[first.decode].growth == 0


def test_prompts_that_do_not_fit_go_where_they_do() -> None:
    router = router_of(WorkerInfo(0, "both", 10, SIZE), WorkerInfo(1, "both", 1000, SIZE))
    router.on_load(1, replace(REPORT, backlog_ns=NS_PER_S))
    assert route(router, ask(tokens=300)).decode == 1


def test_a_worker_whose_role_has_changed_gets_the_requests_of_its_new_role() -> None:
    router = router_of("prefill", "decode", "decode", disaggregate="always")
    assert {route(router, ask(str(number))).prefill for number in range(4)} == {0}
    router.set_role(1, "prefill")
    assert {route(router, ask(f"more{number}")).prefill for number in range(8)} == {0, 1}
    assert {route(router, ask(f"again{number}")).decode for number in range(4)} == {2}
    router.set_down(1)
    router.set_up(WorkerInfo(1, "decode", 1000, SIZE, memory_domain=0))
    assert {route(router, ask(f"back{number}")).prefill for number in range(4)} == {0}


def test_a_stream_that_leaves_goes_from_its_worker_to_the_cheapest_other_that_decodes() -> None:
    busy = replace(REPORT, backlog_ns=NS_PER_S, used_blocks=900)
    router = router_of("prefill", "decode", "decode", "both", reports={2: busy, 3: busy})
    stream(router, 3, 1)
    moved = route(router, ask("stream3.0", 1, 200, num_output_tokens=40, leaves=3))
    assert (moved.prefill, moved.decode, moved.reason) == (3, 1, "moved")
    whole = route(router, ask("stream3.0", 1, 200, num_output_tokens=40, leaves=3, hands_off=False))
    assert (whole.prefill, whole.decode, whole.reason) == (1, 1, "moved")
    router.set_down(1)
    router.set_down(2)
    assert router.route(ask("stream3.0", 1, 200, leaves=3), 0) is None
    assert "stream3.0" in router._sent  # it runs where it was sent


def test_a_worker_that_is_down_may_still_hand_its_streams_over() -> None:
    router = router_of("both", "both")
    stream(router, 0, 1)
    router.set_down(0)
    moved = route(router, ask("stream0.0", 1, 200, num_output_tokens=40, leaves=0))
    assert (moved.prefill, moved.decode) == (0, 1)


def test_what_a_prefill_worker_holds_in_the_same_memory_is_copied_and_not_computed() -> None:
    router = router_of("prefill", "prefill", "decode", disaggregate="always")
    router.on_kv_events(1, 1, stored=blocks(*range(100)))
    router.on_kv_events(2, 1, stored=blocks(*range(20)))
    found = route(router, ask("a", 1601, hashes=blocks(*range(100))))
    assert (found.prefill, found.num_cached_tokens) == (1, 1600)


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_shorter_queue_wins_and_a_queue_melts_with_time() -> None:
    reports = {0: replace(REPORT, backlog_ns=50 * NS_PER_MS), 1: replace(REPORT, backlog_ns=40 * NS_PER_MS)}
    assert route(router_of("both", "both", reports=reports), ask()).decode == 1
    router = router_of("both", "both", reports=reports)
    router.on_load(1, replace(reports[1], time_ns=100 * NS_PER_MS))
    assert route(router, ask(), 100 * NS_PER_MS).decode == 0


def test_a_cached_prompt_goes_where_it_is_cached_unless_the_queue_there_costs_more() -> None:
    for backlog_ms, worker in ((5, 0), (30, 1)):  # it saves 16 ms of prefill
        router = router_of("both", "both", reports={0: replace(REPORT, backlog_ns=backlog_ms * NS_PER_MS)})
        router.on_kv_events(0, 1, stored=blocks(*range(100)))
        assert route(router, ask(tokens=1601, hashes=blocks(*range(100)))).decode == worker


def test_an_equal_prompt_follows_the_first_before_anybody_has_published_its_blocks() -> None:
    router = router_of("both", "both")
    first = route(router, ask("first", 1601, 2, hashes=blocks(*range(100))))
    router.on_first_token("first")
    second = route(router, ask("second", 1601, 2, hashes=blocks(*range(100))))
    assert (second.decode, second.num_cached_tokens) == (first.decode, 1600)


def test_full_memory_is_dear() -> None:
    reports = {0: replace(REPORT, used_blocks=950), 1: replace(REPORT, used_blocks=100, backlog_ns=100 * NS_PER_MS)}
    assert route(router_of("both", "both", reports=reports), ask()).decode == 1


def test_its_own_dispatches_count_until_a_report_covers_them() -> None:
    router = router_of("both", "both", "both")
    assert [route(router, ask(str(number))).decode for number in range(3)] == [0, 1, 2]
    queue = router._views[1].work_sum_ns
    router.on_load(1, REPORT)  # which it wrote before it heard of the request
    assert router._views[1].work_sum_ns == queue > 0
    router.on_queued("1", 1)
    router.on_load(1, REPORT)
    assert (router._views[1].work_sum_ns, router._views[1].memory_sum) == (0, 63)
    router.on_admitted("1", 1, 0)
    router.on_load(1, REPORT)
    assert router._views[1].memory_sum == 0
    assert route(router, ask("next")).decode == 1


def test_a_prefill_worker_is_free_after_the_first_token_and_the_decode_worker_after_the_end() -> None:
    router = router_of("prefill", "decode", disaggregate="always")
    route(router, ask())
    assert router._views[0].work and router._views[1].memory and router._views[1].streams == 1
    router.on_first_token("a")
    assert not router._views[0].work and router._views[1].streams == 1
    router.on_ended("a")
    assert not router._views[1].memory and router._views[1].streams == 0


def test_a_worker_that_comes_back_knows_nothing_of_what_it_was_given() -> None:
    router = router_of("both")
    route(router, ask())
    router.set_down(0)
    router.set_up(WorkerInfo(0, "both", 1000, SIZE, memory_domain=0))
    router.on_ended("a")
    assert router._views[0].streams == 0
    assert router._views[0].prices.standing == 0


def test_a_worker_that_comes_back_elsewhere_is_as_far_as_it_is_now() -> None:
    pool, network = NS_PER_MS, 5 * NS_PER_MS
    links = LinkCosts(memory_latency_ns=pool, network=LinkCost(1, network))
    router = router_of("prefill", "decode", disaggregate="always", links=links)
    near = route(router, ask()).cost_ns
    router.on_ended("a")
    moved = WorkerInfo(1, "decode", 1000, SIZE, host="other", memory_domain=None)
    for info, further_ns in ((moved, network - pool), (replace(moved, host="local", memory_domain=0), 0)):
        router.set_down(1)
        router.set_up(info)
        router.on_load(1, REPORT)
        copy_ns = 50 * NS_PER_MS * -(-1000 // SIZE) // 1000 if further_ns else 0  # blocks that the sender fills too
        assert route(router, ask()).cost_ns == pytest.approx(near + further_ns + copy_ns, abs=10_000)
        router.on_ended("a")


def test_before_any_report_a_prompt_token_costs_the_same_everywhere_and_what_was_sent_is_in_front() -> None:
    router = CostRouter(RoutingConfig())
    for number in range(2):
        router.set_up(WorkerInfo(number, "both", 1000, SIZE))
    routes = [route(router, ask(name, tokens)) for name, tokens in (("a", 800), ("b", 320), ("c", 320))]
    assert [found.decode for found in routes] == [0, 1, 1]
    later = 1 + 1 / OTHERS_SHARE
    assert [found.cost_ns for found in routes] == [800 * later, 320 * later, 320 + 320 * later]
    router.on_first_token("a")
    assert route(router, ask("d", 100)).decode == 0


def test_an_equal_prompt_goes_back_to_the_prefill_worker_that_has_a_copy_of_its_own() -> None:
    apart = [WorkerInfo(number, role, 1000, SIZE) for number, role in enumerate(("prefill", "prefill", "decode"))]
    router = router_of(*apart, disaggregate="always")
    hashes = blocks(*range(100))
    first = route(router, ask("first", 1601, hashes=hashes))
    router.on_first_token("first")
    second = route(router, ask("second", 1601, hashes=hashes))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 1600)
    assert second.prefill == first.prefill


def test_a_worker_gets_what_just_fits_its_memory_and_nothing_larger() -> None:
    small = WorkerInfo(1, "both", 100, SIZE, memory_domain=0)
    for tokens, worker in ((1500, 1), (1501, 0)):
        router = router_of("both", small, reports={0: replace(REPORT, backlog_ns=NS_PER_S)})
        assert route(router, ask(tokens=tokens, answer=100)).decode == worker


def test_prompts_of_long_ago_make_an_answer_no_dearer() -> None:
    router = router_of("both")

    def cost_ns(name: str, tokens: int, now: int) -> int:
        cost = route(router, ask(name, tokens), now).cost_ns
        router.on_first_token(name)
        router.on_ended(name)
        return cost

    idle_ns = cost_ns("idle", 1000, 0)
    for number in range(5):  # a second each
        cost_ns(f"before{number}", 100_000, 0)
    assert cost_ns("busy", 1000, 0) > 1.2 * idle_ns
    cost_ns("later", 1000, 3 * WINDOW_NS)
    assert cost_ns("much later", 1000, 3 * WINDOW_NS) == pytest.approx(idle_ns, rel=0.01)


def test_a_request_that_is_routed_again_is_counted_once() -> None:
    router = router_of("both", "both")
    route(router, ask())
    route(router, ask(avoid=frozenset({0})))
    assert [view.streams for view in router._views] == [0, 1]


def test_missing_publications_are_noticed_and_a_snapshot_heals() -> None:
    router = router_of("both", "both")
    assert router.on_kv_events(1, 1, stored=blocks(0))
    assert not router.on_kv_events(1, 3, stored=blocks(1))
    router.on_kv_snapshot(1, 3, blocks(0, 1, 2))
    assert route(router, ask(tokens=64, hashes=blocks(0, 1, 2))).num_cached_tokens == 48


def test_wrong_predictions_raise_an_alarm_that_ends_when_they_are_right_again() -> None:
    router = router_of("both", "both")
    router.on_kv_events(0, 1, stored=blocks(*range(50)))
    for number in range(MIN_ADMISSIONS):
        assert not router.alarm
        route(router, ask(str(number), hashes=blocks(*range(50)), avoid=frozenset({1})))
        router.on_admitted(str(number), 0, 0)
    assert "25600 tokens were expected in a prefix cache and 0 were found; 80 %" in router.alarm
    assert router.hit_error == 0.8
    watch = router.watch
    for _ in range(WINDOW - MIN_ADMISSIONS + 28):  # 4 of them are left in the window: 1.25 %
        assert watch.alarm or watch.error <= 0.1
        watch.observe(800, 800, 1000)
    assert not watch.alarm


def test_one_worker_alone_need_not_say_what_it_holds() -> None:
    router = router_of("both")
    for number in range(MIN_ADMISSIONS):
        route(router, ask(str(number)))
        router.on_admitted(str(number), 0, 1000)
    assert not router.alarm


def test_the_alarm_has_hysteresis() -> None:
    watch = HitRateMonitor()
    for _ in range(WINDOW):
        watch.observe(150, 0, 1000)
    assert not watch.alarm
    for _ in range(WINDOW):
        watch.observe(300, 0, 1000)
    assert f"of the last {WINDOW} prompts ({WINDOW}000 tokens) {300 * WINDOW} tokens were expected" in watch.alarm
    for _ in range(WINDOW):
        watch.observe(150, 0, 1000)
    assert watch.alarm


def test_impossible_fleets_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="role"):
        WorkerInfo(0, "planner", 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="disaggregate is 'maybe'"):
        RoutingConfig(disaggregate="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="routing is 'nearest'"):
        RoutingConfig(routing="nearest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_price_ns"):
        RoutingConfig(kv_price_ns=-1)


# -- workers of unequal contexts and copies ----------------------------------------------------------------------------


def unequal(*roles_and_lengths: tuple[Role, int], copies: Sequence[int] = ()) -> CostRouter:
    """Workers with memory in abundance, whose contexts differ."""
    pairs_of = enumerate(zip(roles_and_lengths, copies or [0] * len(roles_and_lengths), strict=True))
    infos = [
        WorkerInfo(number, role, 10_000, SIZE, memory_domain=copy, max_model_len=length, model_copy=copy)
        for number, ((role, length), copy) in pairs_of
    ]
    return router_of(*infos, reports={info.number: REPORT for info in infos})


def test_a_long_prompt_goes_to_the_worker_that_can_hold_it_however_busy_that_is() -> None:
    router = unequal(("both", 1000), ("both", 13_000))
    stream(router, 1, 20)
    assert route(router, ask("long", 5000, 100)).decode == 1
    assert route(router, ask("short", 500, 100)).decode == 0
    assert route(router, ask("long answer", 500, 600)).decode == 1


def test_the_large_worker_takes_short_prompts_while_it_is_idle() -> None:
    router = unequal(("both", 1000), ("both", 13_000))
    assert {route(router, ask(str(number), 500, 100)).decode for number in range(2)} == {0, 1}


def test_a_long_prompt_waits_for_the_large_worker_instead_of_failing_on_a_small_one() -> None:
    router = unequal(("both", 1000), ("both", 13_000))
    router.set_down(1)
    assert router.route(ask("long", 5000, 100), 0) is None
    assert route(router, ask("short", 500, 100)).decode == 0
    router.set_up(WorkerInfo(1, "both", 10_000, SIZE, memory_domain=0, max_model_len=13_000))
    assert route(router, ask("long", 5000, 100), 1).decode == 1


def test_a_wish_to_avoid_the_only_large_worker_is_given_up() -> None:
    router = unequal(("both", 1000), ("both", 13_000))
    assert route(router, ask("long", 5000, 100, avoid=frozenset({1}))).decode == 1


def test_a_prefill_worker_need_not_hold_the_answer() -> None:
    router = unequal(("prefill", 1000), ("decode", 13_000))
    stream(router, 1, 8)
    assert (route(router, ask("one", 900, 2000)).prefill, route(router, ask("two", 900, 2000)).decode) == (0, 1)
    assert route(router, ask("long", 5000, 100)).prefill == 1
    router.set_down(1)
    assert router.route(ask("three", 900, 2000), 0) is None


def test_only_workers_of_one_copy_share_a_request() -> None:
    router = unequal(("prefill", 1000), ("decode", 1000), ("prefill", 1000), ("decode", 1000), copies=(0, 0, 1, 1))
    for number in range(40):
        found = route(router, ask(str(number), 300, 100))
        assert (found.prefill < 2) == (found.decode < 2), found


def test_a_stream_moves_to_a_worker_of_its_own_copy_or_not_at_all() -> None:
    router = unequal(("both", 1000), ("both", 1000), ("both", 1000), copies=(0, 1, 0))
    assert route(router, ask("stream", 100, 100, avoid=frozenset({1, 2}))).decode == 0
    assert route(router, ask("stream", 100, 100, leaves=0)).decode == 2
    router.set_down(0)
    assert router.route(ask("stream", 100, 100, leaves=2), 0) is None


@law(weight=0.3)
def test_a_request_never_gets_a_worker_that_cannot_hold_it(seed: int) -> None:
    rng = random.Random(seed)
    kinds: list[tuple[Role, int]] = [
        (rng.choice(("prefill", "decode", "both")), rng.choice((500, 2000, 9000))) for _ in range(rng.randrange(1, 8))
    ]
    router = unequal(*kinds, copies=[rng.randrange(2) for _ in kinds])
    copies = [info.model_copy for info in router._workers]
    largest = max(length for _, length in kinds)
    for number in range(30):
        prompt, answer = rng.randrange(1, largest), rng.randrange(1, 3000)
        found = route(router, ask(str(number), prompt, answer))
        assert kinds[found.decode][1] >= min(prompt + answer, largest)
        assert kinds[found.prefill][1] > prompt or found.prefill == found.decode
        assert copies[found.prefill] == copies[found.decode]
