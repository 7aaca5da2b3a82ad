"""JSON in slices: the same values and the same refusals as JSON in one piece, and the limits of a body."""

import json
import random
from typing import Any

import msgspec
import pytest

from diptych.control.errors import InvalidRequestError
from diptych.serving import edge_limits, sliced_json

WORDS = ["", "a", "tail", 'a "quote"', "back\\slash\\", "line\nline", "ä", "漢字", "😀", "\\u0041", "[{,:}]", "x" * 40]
NUMBERS = [0, -1, 17, 2**40, 1.5, -2e-7, 1e300]
SPACES = [(", ", ": "), (",", ":"), (" ,\n\t", " :\r\n ")]


def random_value(dice: random.Random, depth: int) -> object:
    kind = dice.randrange(8 if depth else 4)
    if kind == 0:
        return dice.choice([None, True, False])
    if kind == 1:
        return dice.choice(NUMBERS)
    if kind in (2, 3):
        return dice.choice(WORDS) + dice.choice(WORDS)
    count = dice.choice([0, 1, 2, 5, 12])
    if kind in (4, 5):
        return [random_value(dice, depth - 1) for _ in range(count)]
    return {dice.choice(WORDS)[:6] + str(number): random_value(dice, depth - 1) for number in range(count)}


def random_text(dice: random.Random) -> bytes:
    value = [random_value(dice, 5)] if dice.random() < 0.5 else {"value": random_value(dice, 5)}
    is_ascii = dice.random() < 0.5
    text = json.dumps(value, ensure_ascii=is_ascii, separators=dice.choice(SPACES))
    return (" " * dice.randrange(3) + text + "\n" * dice.randrange(3)).encode()


def outcome(decode: object, data: bytes) -> object:
    """The value as JSON (which keeps the order of members), or that there is none."""
    try:
        return json.dumps(decode(data))  # type: ignore[operator]
    except (InvalidRequestError, msgspec.DecodeError, UnicodeDecodeError):
        return InvalidRequestError


@pytest.fixture(params=[40, 64, 500])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices so short that everything is long."""
    monkeypatch.setattr(sliced_json, "SLICE_BYTES", request.param)
    monkeypatch.setattr(sliced_json, "SMALL_BYTES", 0)
    monkeypatch.setattr(sliced_json, "DIRECT_BYTES", 0)


@pytest.mark.usefixtures("slices")
def test_slices_give_the_value_that_one_call_gives() -> None:
    dice = random.Random(1)
    for _ in range(400):
        data = random_text(dice)
        assert outcome(sliced_json.decode, data) == outcome(msgspec.json.decode, data), data


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize(("seed", "number"), [(2, 1000), pytest.param(3, 10_000, marks=pytest.mark.slow)])
def test_slices_refuse_what_one_call_refuses(seed: int, number: int) -> None:
    dice = random.Random(seed)
    num_refused = 0
    for _ in range(number):
        data = bytearray(random_text(dice))
        for _ in range(dice.choice([1, 1, 2])):
            place = dice.randrange(len(data))
            kind = dice.randrange(3)
            if kind == 0:
                del data[place]
            elif kind == 1:
                data.insert(place, dice.choice(b'[]{}",:\\u0 e\x80\xed'))
            else:
                data[place] = dice.choice(b'[]{}",:\\u0 e\x80\xed')
        expected = outcome(msgspec.json.decode, bytes(data))
        num_refused += expected is InvalidRequestError
        assert outcome(sliced_json.decode, bytes(data)) == expected, bytes(data)
    assert num_refused > number / 5


@pytest.mark.usefixtures("slices")
def test_fields_are_the_members_as_json() -> None:
    dice = random.Random(3)
    for _ in range(300):
        data = random_text(dice)
        value = msgspec.json.decode(data)
        if not isinstance(value, dict):
            with pytest.raises(InvalidRequestError):
                sliced_json.decode_fields(data)
            continue
        fields = sliced_json.decode_fields(data)
        assert json.dumps({name: msgspec.json.decode(raw) for name, raw in fields.items()}) == json.dumps(value)


@pytest.mark.usefixtures("slices")
def test_a_value_is_encoded_as_in_one_call() -> None:
    dice = random.Random(4)
    for _ in range(300):
        value = msgspec.json.decode(random_text(dice))
        assert b"".join(sliced_json.encode(value)) == msgspec.json.encode(value)
    rows = [msgspec.Raw(b'{"a":1}')] * 600
    assert msgspec.json.decode(b"".join(sliced_json.encode({"rows": rows}))) == {"rows": [{"a": 1}] * 600}


def test_no_call_of_the_decoder_takes_more_than_some_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a body is made of: the lock of the interpreter is free again after a number of bytes."""
    taken: list[int] = []
    decoded = sliced_json._decoded

    def counted(data: bytes, decoder: object, offset: int) -> object:
        taken.append(len(data))
        return decoded(data, decoder, offset)

    monkeypatch.setattr(sliced_json, "_decoded", counted)
    monkeypatch.setattr(sliced_json, "DIRECT_BYTES", 0)
    size = 40 * sliced_json.SLICE_BYTES
    deep: object = ["x" * size]
    for number in range(100):
        deep = [deep, "y" * 10] if number % 2 else {"deep": deep, "n": number}
    bodies: list[object] = [
        {"prompt": "x" * size},
        {"prompt": "\n" * size},
        {"prompt": ["word"] * (size // 8)},
        {"prompt": list(range(size // 6))},
        {"prompt": [[7] * 50] * (size // 120)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}] * (size // 80)},
        {f"field {number}": number for number in range(size // 20)},
        deep,
    ]
    for body in bodies:
        taken.clear()
        data = json.dumps(body).encode()
        assert json.dumps(sliced_json.decode(data)) == data.decode()
        assert sum(taken) <= 2 * len(data)
        assert max(taken) <= 4 * sliced_json.SLICE_BYTES


@pytest.mark.parametrize("decode", [sliced_json.decode, sliced_json.decode_fields])
def test_fields_are_refused_before_the_rest_is_built(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    decoded = sliced_json._decoded

    def counted(data: bytes, decoder: Any, offset: int) -> object:
        built.append(len(data))
        return decoded(data, decoder, offset)

    monkeypatch.setattr(sliced_json, "_decoded", counted)
    many = {f"field {number}": number for number in range(60_000)}
    for body in (many, {"first": [7] * 100_000, **many}, {"first": {"x": {"y": "z" * 10**6}}, **many}):
        built.clear()
        data = json.dumps(body).encode()
        begin = data.index(b'"field 0"')
        with pytest.raises(InvalidRequestError, match="the body has more than 1000 fields") as caught:
            decode(data, 1000)
        assert caught.value.code == "too_many_fields"
        assert sum(built) <= 2 * begin + 8 * sliced_json.SLICE_BYTES
    for size in (1000, 1001):
        for most_direct in (sliced_json.SMALL_BYTES, 0):
            monkeypatch.setattr(sliced_json, "SMALL_BYTES", most_direct)
            monkeypatch.setattr(sliced_json, "DIRECT_BYTES", 10**6 * most_direct)
            data = json.dumps({f"field {number}": {"a": 1, "b": 2} for number in range(size)}).encode()
            if size == 1000:
                assert len(decode(data, 1000)) == size and len(decode(data)) == size
            else:
                with pytest.raises(InvalidRequestError, match="more than 1000 fields"):
                    decode(data, 1000)
    assert len(decode(json.dumps({"a": many}).encode(), 1)) == 1  # only those of the body itself


def test_a_body_is_refused_beyond_its_limits_and_taken_at_them() -> None:
    depth, values, elements = edge_limits.BODY_DEPTH, edge_limits.BODY_VALUES, edge_limits.BODY_ELEMENTS
    sliced_json.decode(b"[" * depth + b"]" * depth)
    sliced_json.decode(b'{"a":' * depth + b"1" + b"}" * depth)
    for more in (b"[" * (depth + 1) + b"]" * (depth + 1), b'{"a":' * (depth + 1) + b"1" + b"}" * (depth + 1)):
        with pytest.raises(InvalidRequestError, match=f"more than {depth} deep") as caught:
            sliced_json.decode(more)
        assert caught.value.code == "body_too_deep"
        with pytest.raises(InvalidRequestError, match=f"more than {depth} deep"):
            sliced_json.decode(b'["' + b"x" * sliced_json.DIRECT_BYTES + b'",' + more + b"]")
    padding = b" " * sliced_json.SLICE_BYTES
    assert len(sliced_json.decode(b"[" + b'"",' * (values - 2) + b'""]' + padding)) == values - 1
    for one in (b'""', b"[]", b"{}"):
        with pytest.raises(InvalidRequestError, match=f"more than {values} texts, lists and objects") as caught:
            sliced_json.decode(b"[" + (one + b",") * values + b"1]")
        assert caught.value.code == "too_many_values"
    assert len(sliced_json.decode(b"[" + b"1," * elements + b"1]")) == elements + 1
    with pytest.raises(InvalidRequestError, match=f"more than {elements} elements"):
        sliced_json.decode(b"[" + b"1," * (elements + 1) + b"1]")


LONG = b'"%b",' % (b"x" * 1000) * 2200  # elements of a list, by which a body is read in slices


@pytest.mark.parametrize("letter", [b"n", "é".encode(), b"\\n"])
@pytest.mark.parametrize("spaces", [b"", b" " * 100])
def test_a_name_has_its_longest_length_and_one_byte_more_is_refused_by_that_name(letter: bytes, spaces: bytes) -> None:
    most = edge_limits.BODY_NAME_BYTES - len(b'""')

    def named(size: int) -> bytes:
        name = letter * (size // len(letter)) + b"a" * (size % len(letter))
        return b'{"a": [' + LONG + b'{"' + name + b'"' + spaces + b":1}]}"

    assert list(sliced_json.decode(named(most))["a"][-1].values()) == [1]
    with pytest.raises(InvalidRequestError, match=f"more than {most + 2} bytes") as caught:
        sliced_json.decode(named(most + 1))
    assert edge_limits.LIMITS["BODY_NAME_BYTES"].beyond == f"{caught.value.status} `{caught.value.code}`"
    text = b'{"a": [' + LONG + b'"' + letter * most + b'"]}'  # which a text may well be
    assert len(sliced_json.decode(text)["a"]) == 2201


@pytest.mark.parametrize("place", ["before", "inside", "behind"])
def test_a_gap_in_a_body_has_its_longest_length_and_what_is_longer_is_refused(place: str) -> None:
    most = edge_limits.BODY_GAP_BYTES

    def spaced(size: int) -> bytes:
        before, inside, behind = (b" " * size * (place == name) for name in ("before", "inside", "behind"))
        return before + b'{"a": [' + LONG + b"1.5" + inside + b",2]}" + behind

    assert sliced_json.decode(spaced(most))["a"][-2:] == [1.5, 2]
    with pytest.raises(InvalidRequestError, match="not valid JSON") as caught:
        sliced_json.decode(spaced(most + (1 if place != "inside" else (1 << 16) + 1)))
    assert edge_limits.LIMITS["BODY_GAP_BYTES"].beyond == f"{caught.value.status} `{caught.value.code}`"


def test_brackets_and_commas_in_texts_count_for_nothing() -> None:
    text = "[[{{,," * 100_000
    assert sliced_json.decode(json.dumps([text]).encode()) == [text]
    assert sliced_json.decode(json.dumps(["[" * 300]).encode()) == ["[" * 300]


@pytest.mark.parametrize("data", [b"", b" ", b"[", b'"', b"{", b"[1", b'["a', b"nul", b"\xff", b"[1]]", b"[1],"])
def test_what_ends_too_early_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, sliced_json.DIRECT_BYTES):
        monkeypatch.setattr(sliced_json, "DIRECT_BYTES", size)
        monkeypatch.setattr(sliced_json, "SMALL_BYTES", size)
        with pytest.raises(InvalidRequestError, match="not valid JSON") as caught:
            sliced_json.decode(data)
        assert caught.value.code == "invalid_json"


def test_an_error_names_the_byte_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_json, "DIRECT_BYTES", 0)
    monkeypatch.setattr(sliced_json, "SMALL_BYTES", 0)
    data = b'{"prompt": [' + b"1, " * 50_000 + b"wrong]}"
    with pytest.raises(InvalidRequestError, match=rf"\(byte {data.index(b'wrong')}\)"):
        sliced_json.decode(data)
    data = b'{"prompt": ["' + b"x" * 200_000 + b'\xff"]}'
    with pytest.raises(InvalidRequestError, match=rf"byte {data.index(0xFF)} \(0xff\) is not UTF-8"):
        sliced_json.decode(data)
