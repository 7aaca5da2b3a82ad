"""A connection to a worker of another host holds only so much, and takes only what it knows."""

import asyncio
from typing import Any

import pytest

from diptych.base.length_prefix import pack
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.join.framed_link import FramedLink
from diptych.serving.join.join_messages import RELAYED, TOLD, Registration

MIB = bytes(1 << 20)


class Deaf:
    """A transport whose other end takes nothing: it counts what it would have to hold."""

    def __init__(self) -> None:
        self.held = 0
        self.ended = ""

    def write(self, data: bytes) -> None:
        assert not self.ended
        self.held += len(data)

    def get_write_buffer_size(self) -> int:
        return self.held

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 7)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def abort(self) -> None:
        self.ended = self.ended or "at once"

    def close(self) -> None:
        self.ended = self.ended or "in the end"


def linked() -> tuple[FramedLink, Deaf, list[str]]:
    link, transport, closed = FramedLink(), Deaf(), []
    link.on_closed = closed.append
    link.connection_made(transport)  # type: ignore[arg-type]
    return link, transport, closed


@pytest.mark.asyncio
@pytest.mark.parametrize("relays", [False, True])
async def test_what_the_other_end_does_not_take_is_bounded_and_ends_the_connection(relays: bool) -> None:
    link, transport, closed = linked()
    for _ in range(64):
        link.relay(MIB) if relays else link.tell(MIB)
    assert link.is_open  # a worker may be slow
    for _ in range(4096):
        link.relay(MIB) if relays else link.tell(MIB)
    assert not link.is_open and transport.ended == "at once"  # what waits is what there is too much of
    assert transport.held < 1 << 28
    link.connection_lost(None)
    [why] = closed
    assert "wait to be sent" in why


@pytest.mark.asyncio
async def test_frames_go_where_they_belong_and_none_after_the_end() -> None:
    link, transport, closed = linked()
    told: list[bytes] = []
    relayed: list[bytes] = []
    link.on_told, link.on_relayed = told.append, relayed.append
    frames = [TOLD + b"a", RELAYED + b"b", TOLD, RELAYED + b"c"]
    for byte in b"".join(pack(frame) for frame in frames):
        link.data_received(bytes([byte]))
    assert (told, relayed) == ([b"a", b""], [b"b", b"c"])
    link.data_received(pack(b"\xffz") + pack(TOLD + b"late"))
    assert transport.ended and told == [b"a", b""]
    link.connection_lost(None)
    assert len(closed) == 1 and "unknown kind" in closed[0]
    link.tell(b"x")  # nothing happens


@pytest.mark.asyncio
async def test_a_stranger_may_send_short_frames_only() -> None:
    for is_known in (False, True):
        link, transport, _ = linked()
        if is_known:
            link.introduced()
        link.data_received(pack(TOLD + MIB))
        assert bool(transport.ended) != is_known


@pytest.mark.asyncio
async def test_the_first_reason_is_the_one_that_is_given() -> None:
    link, transport, closed = linked()
    link.close("one", at_once=False)
    link.close("two")
    link.connection_lost(OSError("three"))
    assert (transport.ended, closed) == ("in the end", ["one"])
    other, _, closed = linked()
    other.connection_lost(OSError("broken"))
    assert closed == ["broken"] and not other.is_open


@pytest.mark.asyncio
async def test_silence_is_counted_from_the_last_bytes_whatever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    link, _, _ = linked()
    loop = asyncio.get_running_loop()
    began = loop.time()
    monkeypatch.setattr(loop, "time", lambda: began + 100.0)
    assert link.silent_s() >= 99.0
    link.data_received(b"\x01")  # a part of a frame is a sign of life
    assert link.silent_s() == 0.0


@pytest.mark.asyncio
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_frame_has_its_limit_and_no_byte_more(is_known: bool) -> None:
    most = edge_limits.WORKER_FRAME_BYTES if is_known else edge_limits.WORKER_FIRST_BYTES
    for size in (most, most + 1):
        link, transport, closed = linked()
        if is_known:
            link.introduced()
        link.data_received(size.to_bytes(4, "little"))  # the length is enough to be refused
        assert bool(transport.ended) == (size > most)
        link.connection_lost(None)
        assert ("at most" in closed[0]) == (size > most)


@pytest.mark.asyncio
async def test_as_many_bytes_wait_as_the_limit_and_no_more() -> None:
    link, transport, _ = linked()
    transport.held = edge_limits.WORKER_UNSENT_BYTES - len(pack(b"x"))
    link.tell(b"x")
    assert link.is_open
    link.tell(b"x")
    assert not link.is_open


@pytest.mark.parametrize("name", ["host", "rack"])
def test_a_worker_s_label_has_its_limit_and_no_character_more(name: str) -> None:
    known: dict[str, Any] = {"host": "h", "rack": "r", "protocol": 1, "version": "", "model": "", "model_name": ""}
    known |= {"agent": b"", "role": "both", "num_cores": 1}
    assert getattr(Registration(**known | {name: "x" * edge_limits.WORKER_LABEL}), name)
    with pytest.raises(ConfigError) as refused:
        Registration(**known | {name: "x" * (edge_limits.WORKER_LABEL + 1)})
    assert refused.value.param == name
