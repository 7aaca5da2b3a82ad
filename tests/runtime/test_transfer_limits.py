"""Every limit of a KV transfer, at the last value that is taken and the first that is not, and what its seals cover.

The parts alone: options, formats, addresses, frames, handshakes, the two ends of a transfer. No thread, and no tensor.
"""

import re
import socket
import stat
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.control.errors import ConfigError
from diptych.runtime.transfer import connector as contract
from diptych.runtime.transfer.connector import TransferOptions
from diptych.runtime.transfer.connectors.shared_memory_connector import EmptyBody
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.runtime.transfer.stream import frames, handshake
from diptych.runtime.transfer.stream.addresses import SocketAddress, listen, parse_address
from diptych.runtime.transfer.stream.body_format import Part, SequenceTables
from diptych.runtime.transfer.stream.frames import Frame, Kind, ProtocolError, Seal
from diptych.runtime.transfer.stream.handshake import HELLO_BYTES, WELCOME_BYTES, Identity
from diptych.runtime.transfer.stream.stream_connector import OutgoingFrame, RecvTransfer, SendTransfer, skip_bytes

SECRET = b"0123456789abcdef" * 2
FORMAT = KVFormat("m", 3, 2, 32, "bfloat16", 16, "cpu")


def sender_of(num_layers: int = 3, start: int = 0) -> SendTransfer:
    return SendTransfer("abc", 7, parse_address("tcp://127.0.0.1:1"), start, num_layers)


# Options, formats, addresses


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("secret", [b"x" * 32, b"x" * 33], [b"", b"x" * 31]),
        ("frame_bytes", [1, 1 << 24], [0, -1, (1 << 24) + 1]),
        ("resume_timeout_s", [1e-9, 10.0, 1e6], [0.0, -1.0, float("nan")]),
        ("codec", ["none", "int8", "int4", "auto"], ["", "int2", "None"]),
    ],
)
def test_options_are_taken_up_to_their_limits_and_refused_by_name_beyond(
    name: str, taken: list[Any], refused: list[Any]
) -> None:
    for value in taken:
        assert getattr(TransferOptions(**{"secret": SECRET, name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError) as failed:
            TransferOptions(**{"secret": SECRET, name: value})
        assert failed.value.param == name
    assert "0123456789" not in repr(TransferOptions(SECRET))


def test_the_limits_of_the_contract_are_those_that_are_documented() -> None:
    assert (contract.MAX_PAYLOAD_BYTES, contract.MAX_ATTEMPT_ID_BYTES) == (65_536, 1024)
    assert (contract.MIN_SECRET_BYTES, contract.MAX_FRAME_BYTES, contract.RESUME_TIMEOUT_S) == (32, 1 << 24, 10.0)
    options = TransferOptions(SECRET)
    assert (options.listen, options.codec, options.resume_timeout_s) == ("tcp://127.0.0.1:0", "none", 10.0)
    assert (options.frame_bytes, options.encrypts) == (1 << 19, False)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_a_dimension_of_a_kv_format_is_1_to_2_to_the_20(name: str) -> None:
    for value in (1, 1 << 20):
        assert getattr(KVFormat.from_bytes(replace(FORMAT, **{name: value}).to_bytes()), name) == value
    for wrong in (0, -1, (1 << 20) + 1, 1.0, "16", None):
        with pytest.raises(ConfigError) as failed:
            replace(FORMAT, **{name: wrong})
        assert failed.value.param == name


def test_kv_formats_differ_by_each_field_and_only_three_can_be_translated() -> None:
    others = {"model": "n", "dtype": "float32", "block_size": 32, "layout": "cuda", "num_layers": 4,
              "num_kv_heads": 1, "head_dim": 64, "protocol_version": 2, "windows": (0, 8, 8)}  # fmt: skip
    assert others.keys() == {field.name for field in fields(KVFormat)}
    FORMAT.check_compatible(FORMAT)
    for name, value in others.items():
        other = replace(FORMAT, **{name: value})
        assert KVFormat.from_bytes(other.to_bytes()) == other != FORMAT
        if name in ("block_size", "dtype", "layout"):
            FORMAT.check_compatible(other)
            continue
        words = re.escape(f"{name} is {getattr(FORMAT, name)!r} here and {value!r} there")
        with pytest.raises(ConfigError, match=words):
            FORMAT.check_compatible(other)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"7", b"null", b'"text"', b"{}", b"\xff", FORMAT.to_bytes()[:-1], FORMAT.to_bytes() + b",",
     FORMAT.to_bytes().replace(b'"m"', b"7"), FORMAT.to_bytes().replace(b'"cpu"', b"null"),
     FORMAT.to_bytes().replace(b'"bfloat16"', b"16"), FORMAT.to_bytes().replace(b'"bfloat16"', b'"float64"'),
     FORMAT.to_bytes().replace(b'"protocol_version": 1', b'"protocol_version": "1"'),
     FORMAT.to_bytes().replace(b'"layout"', b'"lay_out"'), FORMAT.to_bytes().replace(b'{', b'{"more": 1, ')],
)  # fmt: skip
def test_what_is_no_kv_format_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        KVFormat.from_bytes(text)


@pytest.mark.parametrize(
    ("dtype", "item"), [("bfloat16", 2), ("float32", 4)]
)  # fmt: skip
def test_bytes_of_a_block_are_its_tokens_heads_and_channels_twice_in_each_layer(dtype: str, item: int) -> None:
    form = replace(FORMAT, dtype=dtype)
    assert form.bytes_per_layer_block == 16 * 2 * 32 * item and form.bytes_per_block == 2 * 3 * 16 * 2 * 32 * item


@pytest.mark.parametrize(
    ("text", "family", "target"),
    [
        ("tcp://127.0.0.1:0", socket.AF_INET, ("127.0.0.1", 0)),
        ("tcp://localhost:65535", socket.AF_INET, ("127.0.0.1", 65535)),
        ("tcp://[::1]:41234", socket.AF_INET6, ("::1", 41234)),
        ("unix:///a", socket.AF_UNIX, "/a"),
        ("unix:///" + 106 * "x", socket.AF_UNIX, "/" + 106 * "x"),
        ("unix:///" + 53 * "é", socket.AF_UNIX, "/" + 53 * "é"),
    ],
)
def test_addresses_are_read_and_written_back(text: str, family: int, target: Any) -> None:
    address = parse_address(text)
    assert address == SocketAddress(family, target)
    assert str(address) == text.replace("localhost", "127.0.0.1")


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:1/path",
     "tcp://:1", "tcp://a.name:1", "tcp:///path", "udp://127.0.0.1:1", "unix://", "unix:///", "unix://host/path",
     "unix:///" + 107 * "x", "unix:///" + 54 * "é", "/path", "127.0.0.1:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as failed:
        parse_address(text)
    assert failed.value.param == "address"


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o740, 0o720, 0o704, 0o702, 0o777])
def test_a_socket_is_made_only_where_nobody_else_may_look(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    path = folder / "kv"
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700") as failed:
        listen(parse_address(f"unix://{path}"))
    assert failed.value.param == "listen" and not path.exists()
    folder.chmod(0o700)
    sock, bound = listen(parse_address(f"unix://{path}"))
    with sock:
        assert str(bound) == f"unix://{path}" and stat.S_ISSOCK(path.stat().st_mode) and not sock.getblocking()
    again, _ = listen(parse_address(f"unix://{path}"))  # what a killed worker has left behind is no obstacle
    again.close()
    path.unlink()
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(parse_address(f"unix://{path}"))
    assert path.read_text() == "a file of somebody"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_port_0_becomes_the_port_that_was_free_and_a_taken_one_is_refused(host: str) -> None:
    sock, bound = listen(parse_address(f"tcp://{host}:0"))
    with sock:
        assert str(bound) == f"tcp://{host}:{sock.getsockname()[1]}" and not sock.getblocking()
        with pytest.raises(ConfigError, match="cannot listen") as failed:
            listen(bound)
        assert failed.value.param == "listen"
    again, _ = listen(bound)
    again.close()


# Frames


@pytest.mark.parametrize(
    ("kind", "most"),
    [(Kind.OPEN, 1024), (Kind.DATA, 1 << 26), (Kind.COMMIT, 65_536), (Kind.CANCEL, 0), (Kind.ACK, 0),
     (Kind.REFUSE, 2048)],
)  # fmt: skip
def test_the_body_of_each_kind_of_frame_has_its_limit(kind: Kind, most: int) -> None:
    assert frames.parse_header(Seal(b"k").seal(Frame(kind, 1, body_bytes=most))).body_bytes == most
    with pytest.raises(ProtocolError, match=f"{most + 1} bytes; at most {most}"):
        frames.parse_header(Seal(b"k").seal(Frame(kind, 1, body_bytes=most + 1)))


def test_kinds_that_are_none_are_refused() -> None:
    header = Seal(b"k").seal(Frame(Kind.ACK, 1))
    for number in (0, 7, 255):
        with pytest.raises(ProtocolError, match=f"unknown kind of frame {number}"):
            frames.parse_header(bytes([number]) + header[1:])


def test_each_field_of_a_frame_arrives_and_each_byte_of_it_is_sealed() -> None:
    values = {field.name: at for at, field in enumerate(fields(Frame), 1)} | {"kind": Kind.DATA}
    frame = Frame(**values)  # type: ignore[arg-type]
    header = Seal(b"key").seal(frame)
    assert len(header) == frames.HEADER_BYTES and frames.parse_header(header) == frame
    Seal(b"key").check(header)
    for at in range(len(header)):
        damaged = bytearray(header)
        damaged[at] ^= 1
        with pytest.raises(ProtocolError, match="seal"):
            Seal(b"key").check(damaged)
    with pytest.raises(ProtocolError, match="seal"):
        Seal(b"another key").check(header)


def test_a_seal_covers_the_body_and_the_place_in_the_stream() -> None:
    ours, theirs, late = Seal(b"key"), Seal(b"key"), Seal(b"key")
    sealed = [(ours.seal(Frame(Kind.COMMIT, 1, body_bytes=3), body), body) for body in (b"one", b"one", b"two")]
    for header, body in sealed:
        theirs.check(header, body)
    with pytest.raises(ProtocolError, match="seal"):
        theirs.check(*sealed[2])  # repeated
    with pytest.raises(ProtocolError, match="seal"):
        late.check(*sealed[1])  # in the place of the first
    with pytest.raises(ProtocolError, match="seal"):
        Seal(b"key").check(sealed[0][0], b"onf")
    with pytest.raises(ProtocolError, match="seal"):
        Seal(b"key").check(sealed[0][0])


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_the_checksum_of_pieces_is_that_of_their_bytes(pieces: list[bytes]) -> None:
    assert frames.checksum(pieces) == zlib.crc32(b"".join(pieces))


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.integers(0, 5), max_size=9))
def test_what_has_not_left_a_frame_is_the_rest_of_its_bytes(pieces: list[bytes], counts: list[int]) -> None:
    whole, done = b"".join(pieces), 0
    out = OutgoingFrame([memoryview(piece) for piece in pieces])
    for count in [*counts, len(whole)]:
        count = min(count, len(whole) - done)
        done += count
        assert out.advance(count) is (done == len(whole))
        assert b"".join(out.pieces[out.at :]) == whole[done:]
    assert skip_bytes([memoryview(b"ab"), memoryview(b"c")], 0, 2) == 1


def test_detached_pieces_keep_what_the_blocks_held() -> None:
    block = bytearray(b"abcdef")
    out = OutgoingFrame([memoryview(b"header"), memoryview(block)[:3], memoryview(block)[3:]])
    assert not out.advance(8)
    out.detach()
    block[:] = b"------"
    assert b"".join(out.pieces[out.at :]) == b"cdef"


# Handshakes


def shake(
    sender: Identity, receiver: Identity, address: str = "unix:///kv", dial: int = 3
) -> tuple[bytes, bytes, bytes]:
    """The three messages, as they should be."""
    greeted = handshake.greeting()
    said = handshake.hello(sender, greeted, address, dial)
    return greeted, said, handshake.accept_hello(receiver, greeted, said)[0]


OURS, THEIRS = Identity(SECRET, b"s" * 16, FORMAT), Identity(SECRET, b"r" * 16, replace(FORMAT, block_size=32))


def test_both_ends_learn_who_is_there_and_have_the_keys_of_this_connection_alone() -> None:
    known: set[bytes] = set()
    for _ in range(2):
        greeted, said, welcome = shake(OURS, THEIRS)
        assert len(greeted) == handshake.GREETING_BYTES == len(handshake.MAGIC) + 32
        _, sender = handshake.accept_hello(THEIRS, greeted, said)
        receiver = handshake.accept_welcome(OURS, greeted, said, welcome)
        assert (sender.instance, sender.dial, sender.kv_format) == (b"s" * 16, 3, FORMAT)
        assert (receiver.instance, receiver.dial, receiver.line) == (b"r" * 16, 0, b"")
        assert receiver.kv_format == THEIRS.kv_format
        assert (sender.key_to_sender, sender.key_to_receiver) == (receiver.key_to_sender, receiver.key_to_receiver)
        known |= {sender.key_to_sender, sender.key_to_receiver}
    assert len(known) == 4


def test_a_line_is_an_instance_and_the_address_that_it_has_dialled() -> None:
    lines = set()
    for instance, address in ((b"a" * 16, "unix:///1"), (b"a" * 16, "unix:///2"), (b"b" * 16, "unix:///1")):
        for dial in (1, 2):
            greeted = handshake.greeting()
            said = handshake.hello(replace(OURS, instance=instance), greeted, address, dial)
            who = handshake.accept_hello(THEIRS, greeted, said)[1]
            assert who.line.startswith(instance) and len(who.line) == 24 and who.dial == dial
            lines.add(who.line)
    assert len(lines) == 3


def test_each_byte_of_a_handshake_is_proved() -> None:
    greeted, said, welcome = shake(OURS, THEIRS)
    for at in range(len(said)):
        if at in (HELLO_BYTES - 2, HELLO_BYTES - 1):  # the length of the format: what was read says it
            continue
        changed = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
        with pytest.raises(ProtocolError, match="did not prove"):
            handshake.accept_hello(THEIRS, greeted, changed)
    for at in range(len(welcome)):
        if at in (WELCOME_BYTES - 2, WELCOME_BYTES - 1):
            continue
        changed = welcome[:at] + bytes([welcome[at] ^ 1]) + welcome[at + 1 :]
        with pytest.raises(ProtocolError, match="did not prove"):
            handshake.accept_welcome(OURS, greeted, said, changed)
    for other in (greeted[:-1] + bytes([greeted[-1] ^ 1]), handshake.greeting()):  # a proof of another conversation
        with pytest.raises(ProtocolError, match="did not prove"):
            handshake.accept_hello(THEIRS, other, said)
        with pytest.raises(ProtocolError, match="did not prove"):
            handshake.accept_welcome(OURS, other, said, welcome)
    stranger = replace(OURS, secret=SECRET[::-1])
    with pytest.raises(ProtocolError, match="did not prove"):
        handshake.accept_hello(stranger, greeted, said)
    with pytest.raises(ProtocolError, match="did not prove"):
        handshake.accept_welcome(stranger, greeted, said, welcome)


def test_a_greeting_of_another_version_is_not_answered() -> None:
    for greeted in (b"", b"HTTP/1.1 400", b"x" + handshake.greeting()[1:], handshake.MAGIC[:-2] + b"\2\0" + bytes(32)):
        with pytest.raises(ProtocolError, match="this version"):
            handshake.hello(OURS, greeted, "unix:///kv", 1)


def test_a_format_in_a_handshake_has_1_to_4096_bytes() -> None:
    for count in (1, 4096):
        assert handshake.format_bytes_of(b"anything" + count.to_bytes(2, "little")) == count
    for count in (0, 4097, 65_535):
        with pytest.raises(ProtocolError, match=f"{count} bytes"):
            handshake.format_bytes_of(b"anything" + count.to_bytes(2, "little"))


# The receiver's end


@pytest.mark.parametrize(("start", "tokens"), [(0, 48), (32, 16), (16, 20)])
def test_a_part_is_taken_where_it_lies_within_the_tokens_and_layers_that_are_expected(start: int, tokens: int) -> None:
    expected = RecvTransfer("abc", SequenceTables.of(range(9), start), start, tokens)
    for at in range(0, start + tokens + 2):
        for count in (0, 1, tokens - 1, tokens, tokens + 1):
            for first, layers in ((0, 0), (0, 1), (0, 3), (0, 4), (2, 1), (2, 2), (3, 0), (3, 1), (4, 1)):
                fits = start <= at and at + count <= start + tokens and count > 0
                fits = fits and layers >= 1 and first + layers <= 3
                part = Part(at, count, first, layers, True)
                if fits:
                    expected.check(part, 3)
                else:
                    with pytest.raises(ProtocolError, match="not what transfer abc expects"):
                        expected.check(part, 3)
    borrowed = RecvTransfer("abc", SequenceTables.of((), start), start, 0)
    borrowed.check(Part(0, 10**6, 0, 99, True), 3)  # no KV comes
    with pytest.raises(ProtocolError):
        RecvTransfer("abc", SequenceTables.of((1,), start), start, 0).check(Part(start, 1, 0, 1, True), 3)


def test_tokens_are_missing_until_all_their_layers_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    expected = RecvTransfer("abc", SequenceTables.of(range(2), 16), 16, 20)
    assert (expected.missing(3), expected.arrived, expected.next_sequence) == (20, 16, 0)
    steps = [  # first token, tokens, layers, is it the last of its send -> missing, arrived
        (16, 16, 2, False, 10, 16),
        (16, 16, 1, True, 4, 32),
        (32, 4, 2, False, 2, 32),
        (32, 4, 1, True, 0, 36),
    ]
    for sequence, (start, tokens, layers, is_last, missing, arrived) in enumerate(steps):
        now[0] += 10
        frame = Frame(Kind.DATA, 7, sequence, start, tokens, 0, layers, flags=frames.LAST_OF_CHUNK * is_last)
        assert expected.count(frame, 100, now[0] - 3) is is_last
        assert (expected.missing(3), expected.arrived, expected.next_sequence) == (missing, arrived, sequence + 1)
    assert (expected.num_bytes, expected.wire_ns) == (400, 12)
    assert (expected.first_byte_ns, expected.last_byte_ns) == (1010, 1040)
    assert RecvTransfer("abc", SequenceTables.of((), 16), 16, 0).missing(3) == 0
    again = Frame(Kind.DATA, 7, 4, 16, 16, 0, 1, flags=frames.LAST_OF_CHUNK)
    assert expected.count(again, 1, now[0]) and expected.arrived == 36  # what has arrived does not go back


def test_one_token_in_one_layer_is_still_a_missing_token() -> None:
    expected = RecvTransfer("abc", SequenceTables.of(range(1), 0), 0, 1)
    expected.count(Frame(Kind.DATA, 7, 0, 0, 1, 0, 2), 1, 0)
    assert expected.missing(3) == 1


# The sender's end


def take(transfer: SendTransfer, formats: EmptyBody | None = None) -> list[int]:
    """Numbers of the parts that can leave now."""
    found = []
    while (following := transfer.next_part(lambda _: formats or EmptyBody(3))) is not None:
        found.append(following[0])
    return found


def test_a_transfer_is_over_with_the_acknowledgement_of_its_commit_and_no_sooner() -> None:
    transfer = sender_of()
    assert not transfer.is_waiting and not transfer.has_data and not transfer.has_commit and transfer.is_cut
    assert transfer.next_commit() is None
    for start in (0, 16, 32):
        assert transfer.queue_send(start, 16, SequenceTables.of((0, 1, 2), start), 3)
    assert transfer.has_data and not transfer.is_cut
    transfer.queue_commit(b"payload")
    assert not transfer.has_commit and transfer.next_commit() is None
    assert take(transfer) == [0, 1, 2]
    assert transfer.is_cut and transfer.is_waiting and not transfer.has_data and transfer.has_commit
    assert not transfer.acknowledge(1) and transfer.is_waiting and transfer.acknowledged == 1
    assert not transfer.acknowledge(1) and not transfer.acknowledge(0) and transfer.acknowledged == 1
    assert transfer.next_commit() == (3, b"payload")
    assert transfer.next_commit() is None and not transfer.has_commit
    assert not transfer.acknowledge(3) and transfer.is_waiting
    with pytest.raises(ProtocolError, match="5 is acknowledged, 4 were sent"):
        transfer.acknowledge(5)
    assert transfer.acknowledge(4)


@pytest.mark.parametrize("num_known", range(5))
def test_a_new_connection_repeats_what_is_not_acknowledged_under_its_number(num_known: int) -> None:
    transfer = sender_of()
    for start in (0, 16, 32):
        transfer.queue_send(start, 16, SequenceTables.of((0, 1, 2), start), 3)
    transfer.restart()
    assert not transfer.is_resuming  # nothing has ever left: there is nothing to ask for
    transfer.queue_commit(b"payload")
    take(transfer)
    transfer.next_commit()
    transfer.is_announced = transfer.is_ready = True
    assert not transfer.acknowledge(1)
    transfer.restart()
    assert (transfer.is_resuming, transfer.is_announced, transfer.is_ready) == (True, False, False)
    assert transfer.acknowledge(num_known) is (num_known == 4)
    if num_known < 4:
        done = max(1, num_known)
        assert transfer.has_data is (done < 3)
        assert take(transfer) == list(range(done, 3))
        assert transfer.has_commit and transfer.next_commit() == (3, b"payload")
        assert transfer.acknowledge(4)


def test_tokens_are_queued_once_in_order_and_before_the_commit() -> None:
    transfer = sender_of(start=16)
    with pytest.raises(ValueError, match="tokens 16 to 32 were never sent"):
        transfer.queue_send(32, 16, SequenceTables.of((), 32), 3)
    assert transfer.queue_send(16, 16, SequenceTables.of((), 16), 3)
    assert not transfer.queue_send(16, 16, SequenceTables.of((), 16), 3)
    assert not transfer.queue_send(0, 32, SequenceTables.of((), 0), 3)
    assert transfer.queue_send(16, 32, SequenceTables.of((4, 5, 6), 16), 3) and transfer.queued_until == 48
    parts = [transfer.next_part(lambda _: EmptyBody(3)) for _ in range(2)]
    assert [(part[1].start, part[1].num_tokens, part[3]) for part in parts if part] == [
        (16, 16, ()),
        (32, 16, (4, 5, 6)),
    ]
    transfer.queue_commit(b"")
    assert not transfer.queue_send(16, 32, SequenceTables.of((), 16), 3)
    with pytest.raises(ValueError, match="KV after its commit"):
        transfer.queue_send(48, 1, SequenceTables.of((), 48), 3)
    with pytest.raises(ValueError, match="committed already"):
        transfer.queue_commit(b"")


def test_layers_come_for_the_same_tokens_until_all_are_there() -> None:
    transfer = sender_of()
    assert transfer.queue_send(0, 16, SequenceTables.of((), 0), 1)
    assert take(transfer) == [] and not transfer.has_data and not transfer.is_cut
    with pytest.raises(ValueError, match=r"tokens up to 32, while those up to 16 have 1 of 3 layers"):
        transfer.queue_layers(32, 3)
    with pytest.raises(ValueError, match="committed with 1 layers"):
        transfer.queue_commit(b"")
    assert transfer.lacks_layers and not transfer.queue_layers(16, 2)  # the part waits for the third: no notice
    assert not transfer.queue_layers(16, 1)  # never fewer than before
    with pytest.raises(ValueError, match="committed with 2 layers"):
        transfer.queue_commit(b"")
    assert transfer.queue_layers(16, 3) and transfer.has_data and not transfer.lacks_layers
    assert take(transfer) == [0]
    assert transfer.queue_send(16, 16, SequenceTables.of((), 16), 3)
    other = sender_of()
    other.queue_send(0, 16, SequenceTables.of((), 0), 1)
    assert other.close()
    other.queue_commit(b"")  # it has ended meanwhile


def test_a_transfer_is_closed_once_and_lets_go_of_its_blocks() -> None:
    for transfer in (sender_of(), RecvTransfer("abc", SequenceTables.of((0,), 0), 0, 16)):
        assert not transfer.is_closed and transfer.close() and transfer.is_closed and not transfer.close()
    block = bytearray(b"abc")
    sending = sender_of()
    frame = sending.in_flight = OutgoingFrame([memoryview(block)], sending.fence)
    sending.close()
    block[:] = b"---"
    assert bytes(frame.pieces[0]) == b"abc" and sending.in_flight is None
