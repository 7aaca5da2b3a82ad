"""No form makes its reader hold, or do, more than so much: parts and heads of parts have a limit."""

import pytest

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits
from diptych.serving.api.multipart import MultipartParser, PartBegin

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


def test_the_head_of_a_part_may_have_its_whole_limit_in_one_line_and_no_byte_more() -> None:
    fields = b"content-disposition" + b"form-data; name=x" + b"x"  # separators are not counted
    rest = edge_limits.PART_HEAD_BYTES - len(fields)

    def form(length: int) -> bytes:
        return b"--b\r\ncontent-disposition: form-data; name=x\r\nx: " + b"y" * length + b"\r\n\r\n\r\n"

    assert list(parser().feed(form(rest))) == [PartBegin("x", None)]
    with pytest.raises(InvalidRequestError, match=f"more than {edge_limits.PART_HEAD_BYTES} bytes") as caught:
        list(parser().feed(form(rest + 1)))
    assert caught.value.code == "invalid_multipart"
