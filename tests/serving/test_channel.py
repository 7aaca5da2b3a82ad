"""Messages between two processes arrive whole and in order, and nobody waits for a reader who does not read."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.serving.link.channel import Channel

Pair = tuple[Channel, Channel]
LARGE = 3_000_000  # more than the kernel holds


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def received(sender: Channel, receiver: Channel) -> list[bytes]:
    """Everything that comes while the sender has something left."""
    messages = receiver.receive()
    while sender.has_unsent:
        sender.flush()
        messages += receiver.receive()
    return messages


@given(st.lists(st.binary(max_size=50) | st.integers(0, 200_000).map(bytes), max_size=20))
def test_messages_of_any_size_arrive_whole_and_in_their_order(messages: list[bytes]) -> None:
    here, there = map(Channel, socket.socketpair())
    for message in messages:
        here.send(message)
    assert received(here, there) == messages
    here.close()
    there.close()


def test_a_sender_does_not_wait_for_a_reader_who_does_not_read(pair: Pair) -> None:
    here, there = pair
    messages = [bytes([number]) * LARGE for number in range(3)]
    for message in messages:
        here.send(message)
    assert here.has_unsent
    assert received(here, there) == messages


def test_both_directions_are_independent(pair: Pair) -> None:
    here, there = pair
    here.send(b"a")
    there.send(b"b")
    assert (here.receive(), there.receive()) == ([b"b"], [b"a"])
    assert here.receive() == []
    assert not here.is_closed


def test_last_words_are_heard_before_the_end(pair: Pair) -> None:
    here, there = pair
    there.send(b"never read")
    here.send(b"last words")
    here.close()
    assert there.receive() == [b"last words"]
    assert there.receive() == []
    assert there.is_closed
    there.send(b"nobody is there")
    assert not there.has_unsent
