"""Links: what a transfer takes alone, in company, and along a path."""

import random
from functools import partial

import pytest

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.fleet.links import GB, LINKS, Link, Network
from tests.laws import law


def ends(links: list[Link], transfers: list[tuple[int, int, tuple[int, ...]]]) -> list[int]:
    """When each transfer (start in ns, bytes, indices of its links) has arrived."""
    environment = Environment()
    network = Network(environment)
    done = [-1] * len(transfers)

    def start(index: int) -> None:
        _, num_bytes, path = transfers[index]

        def arrive() -> None:
            done[index] = environment.now

        network.send(num_bytes, tuple(links[one] for one in path), arrive)

    for index, (at_ns, _, _) in enumerate(transfers):
        environment.at(at_ns, MESSAGE, partial(start, index))
    environment.run()
    return done


def test_a_transfer_alone_takes_latency_and_bytes_over_bandwidth() -> None:
    assert ends([Link(10 * GB, 2_000)], [(500, 10_000, (0,))]) == [500 + 2_000 + 1_000]


def test_two_transfers_share_a_link_and_the_second_half_of_the_longer_goes_at_full_speed() -> None:
    assert ends([Link(GB)], [(0, 1000, (0,)), (0, 3000, (0,))]) == [2000, 4000]


def test_one_that_comes_later_takes_its_share_from_then_on() -> None:
    assert ends([Link(GB)], [(0, 2000, (0,)), (1000, 500, (0,))]) == [2500, 2000]


def test_what_a_slow_link_leaves_of_a_fast_one_goes_to_the_others() -> None:
    fast, slow = Link(10 * GB), Link(GB)
    # the second crosses both and gets 1 GB/s; the first gets the other 9
    assert ends([fast, slow], [(0, 9000, (0,)), (0, 1000, (0, 1))]) == [1000, 1000]


@law(weight=0.2)
def test_no_link_carries_more_than_it_can_and_every_byte_arrives(seed: int) -> None:
    rng = random.Random(seed)
    links = [Link(rng.randrange(1, 5) * GB, rng.randrange(3000)) for _ in range(4)]
    transfers = [
        (rng.randrange(10**6), rng.randrange(1, 10**6), tuple(rng.sample(range(4), rng.randrange(1, 4))))
        for _ in range(40)
    ]
    done = ends(links, transfers)
    for end_ns, (at_ns, num_bytes, path) in zip(done, transfers, strict=True):
        alone = sum(links[one].latency_ns for one in path) + num_bytes * 10**9 // min(
            links[one].bandwidth for one in path
        )
        assert end_ns >= at_ns + alone
    for index, link in enumerate(links):
        carried = sum(num_bytes for _, num_bytes, path in transfers if index in path)
        assert link.num_bytes == carried
        assert not link.transfers
        assert carried <= link.busy_ns * link.bandwidth // 10**9 + 1


def test_a_cancelled_transfer_makes_room() -> None:
    environment = Environment()
    network, link = Network(environment), Link(GB)
    arrived: list[int] = []
    number = network.send(10_000, (link,), lambda: arrived.append(-1))
    network.send(1000, (link,), lambda: arrived.append(environment.now))
    environment.at(1000, MESSAGE, lambda: network.cancel(number))
    environment.run()
    assert arrived == [1500]


def test_named_links() -> None:
    assert Link.named("nvlink4").bandwidth == LINKS["nvlink4"][0]
    with pytest.raises(ConfigError, match="pcie5"):
        Link.named("string")


def test_a_transfer_stands_still_while_a_link_is_down() -> None:
    environment = Environment()
    network = Network(environment)
    broken, other = Link(1000), Link(1000)
    done: dict[str, int] = {}
    network.send(1000, (broken,), lambda: done.update(broken=environment.now))
    network.send(1000, (other,), lambda: done.update(other=environment.now))
    network.send(1000, (broken, other), lambda: done.update(both=environment.now))
    environment.at(NS_PER_S, 0, lambda: network.set_up(broken, False))
    environment.at(3 * NS_PER_S, 0, lambda: network.set_up(broken, True))
    environment.run()
    assert done["other"] == NS_PER_S + NS_PER_S // 2  # alone on its link from second 1 on
    assert done["broken"] == 4 * NS_PER_S
    assert done["both"] == 4 * NS_PER_S
