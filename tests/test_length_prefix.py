"""Messages in a byte stream come out as they went in, however the stream is cut."""

from io import BytesIO
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from diptych.base.length_prefix import Unpacker, pack, read_message

messages = some.lists(some.binary(max_size=300), max_size=12)


@given(messages, some.lists(some.integers(0, 4000), max_size=30))
def test_messages_come_out_whole_and_in_order_wherever_the_stream_is_cut(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(pack, sent))
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unpacker = Unpacker()
    received: list[bytes] = []
    for start, end in pairwise(borders):
        received += unpacker.feed(stream[start:end])
    assert received == sent


@given(messages)
def test_a_message_is_complete_with_its_last_byte_and_not_before(sent: list[bytes]) -> None:
    unpacker = Unpacker()
    for message in sent:
        packed = pack(message)
        assert [unpacker.feed(packed[at : at + 1]) for at in range(len(packed) - 1)] == [[]] * (len(packed) - 1)
        assert unpacker.feed(packed[-1:]) == [message]


@given(messages)
def test_a_blocking_stream_is_read_message_by_message_to_its_end(sent: list[bytes]) -> None:
    stream = BytesIO(b"".join(map(pack, sent)))
    assert [read_message(stream) for _ in sent] == sent
    with pytest.raises(EOFError):
        read_message(stream)


@given(some.binary(min_size=1, max_size=100), some.data())
def test_a_stream_that_ends_inside_a_message_is_an_error(message: bytes, data: some.DataObject) -> None:
    packed = pack(message)
    kept = data.draw(some.integers(0, len(packed) - 1))
    with pytest.raises(EOFError):
        read_message(BytesIO(packed[:kept]))
