"""No form makes its reader hold, or do, more than so much: parts and heads of parts have a limit."""

import pytest

from diptych.control.errors import InvalidRequestError
from diptych.serving.batches.multipart import MultipartParser, PartBegin

BOUND = 'multipart/form-data; boundary="b"'
FIELD = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n\r\n'


def parser() -> MultipartParser:
    return MultipartParser(BOUND)


def test_a_form_has_as_many_parts_as_any_upload_and_not_without_end() -> None:
    few = parser()
    events = [event for _ in range(16) for event in few.feed(FIELD)]
    assert [event for event in events if isinstance(event, PartBegin)] == [PartBegin("x", None)] * 16
    many = parser()
    with pytest.raises(InvalidRequestError, match="parts") as caught:
        for _ in range(1000):
            list(many.feed(FIELD))
    assert caught.value.code == "invalid_multipart"


@pytest.mark.parametrize("head", [b"x: " + b"y" * 100 + b"\r\n", b"y" * 100], ids=["many fields", "a long name"])
def test_the_head_of_a_part_does_not_grow_without_end(head: bytes) -> None:
    endless = parser()
    list(endless.feed(b"--b\r\n"))
    with pytest.raises(InvalidRequestError) as caught:
        for _ in range(10_000):
            list(endless.feed(head))
    assert caught.value.code == "invalid_multipart"
    fresh = parser()
    for _ in range(20):  # each part has a head of its own
        list(fresh.feed(b"--b\r\ncontent-disposition: form-data; name=x\r\n" + b"x: " + b"y" * 3000 + b"\r\n\r\n\r\n"))
