"""What grows while an answer or an event comes in pieces: the work is counted, and grows with the length alone."""

import random
import re
from typing import Any, ClassVar

import pytest

from diptych.serving import edge_limits
from diptych.serving.answers.detokenizer import StopStrings
from diptych.serving.answers.template_messages import is_whole
from diptych.serving.front import reply_chunks
from diptych.serving.front.reply_chunks import EventSplitter, UnreadableReplyError


def pieces_of(whole: Any, rng: random.Random, most: int) -> list[Any]:
    pieces, at = [], 0
    while at < len(whole):
        size = rng.randint(1, most)
        pieces.append(whole[at : at + size])
        at += size
    return pieces


class CountedPattern:
    """A pattern that counts the bytes that it may look at."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self.num_bytes = 0

    def search(self, data: bytes, begin: int) -> re.Match[bytes] | None:
        found = self._pattern.search(data, begin)
        self.num_bytes += (found.end() if found else len(data)) - begin
        return found


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_long_event_is_searched_once_and_grows_in_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedPattern(reply_chunks._BLANK_LINE)
    monkeypatch.setattr(reply_chunks, "_BLANK_LINE", counted)
    payload = b"x" * 20_000
    event = b"data: " + payload + b"\n\n"
    splitter, found = EventSplitter(), []
    rest = splitter.rest
    for at in range(0, len(event), size):
        found += splitter.feed(event[at : at + size])
        assert splitter.rest is rest  # a new one for each piece would copy all that has come
    assert found == [payload] and not splitter.rest
    assert counted.num_bytes <= len(event) + 4 * (len(event) // size + 1)


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [
        b"data: a\n\n",
        b"data:b\r\n\r\n",
        b": c\n\n",
        b"data: d\ndata: e\n\n",
        b"event: f\ndata: \xc3\xa9\n\n",
        b"\n\n",
    ]
    stream = b"".join(rng.choices(kinds, k=50))
    splitter = EventSplitter()
    whole = [
        payload for event in re.findall(rb"(?s).*?(?:\r\n\r\n|\n\n)", stream) for payload in EventSplitter().feed(event)
    ]
    assert [payload for piece in pieces_of(stream, rng, 9) for payload in splitter.feed(piece)] == whole


def test_an_event_is_taken_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "ENGINE_EVENT_BYTES", 1000)
    splitter = EventSplitter()
    assert splitter.feed(b"x" * 1000) == []
    with pytest.raises(UnreadableReplyError, match="1000 bytes"):
        splitter.feed(b"x")


class CountedText(str):
    """A text that counts the characters that are looked at in it."""

    num_looked: ClassVar[int] = 0

    def _count(self, number: int) -> None:
        CountedText.num_looked += number

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        self._count(len(found))
        return found

    def __contains__(self, text: Any) -> bool:
        self._count(len(self))
        return super().__contains__(text)

    def find(self, text: str, begin: int = 0, end: Any = None) -> int:
        found = super().find(text, begin)
        self._count((found + len(text) if found >= 0 else len(self)) - begin)
        return found


@pytest.mark.parametrize("stop", ["a" * 1000 + "b", "ab" * 500 + "c", ("a" * 30 + "b") * 30 + "c"])
def test_the_work_for_stop_strings_grows_with_the_text(stop: str) -> None:
    CountedText.num_looked = 0
    stops = StopStrings([CountedText(stop)])
    text = stop[:-1] * 4
    said = "".join(stops.push(character) for character in text) + stops.flush()
    assert said == text and stops.matched is None
    assert CountedText.num_looked <= 4 * (len(text) + len(stop))


def naively(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What is said, and what matched: the first piece in which a stop string ends decides."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            at, _, matched = min(found)
            return text[:at], matched
    return text, None


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_stop_where_a_plain_search_does(seed: int) -> None:
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4))]
    pieces = pieces_of("".join(rng.choices("abc", weights=[5, 5, 1], k=40)), rng, 5)
    checker, said = StopStrings(stops), ""
    for number, piece in enumerate(pieces):
        said += checker.push(piece)
        so_far = "".join(pieces[: number + 1])
        if checker.matched is None:  # held back is what may begin a stop string, and nothing else
            held = max(size for stop in stops for size in range(len(stop)) if so_far.endswith(stop[:size]))
            assert said == so_far[: len(so_far) - held]
    assert (said + checker.flush(), checker.matched) == naively(stops, pieces)


@pytest.mark.parametrize("is_system_first", [False, True])
def test_a_prompt_is_read_twice_and_not_once_for_each_message(is_system_first: bool) -> None:
    messages = [{"role": "system" if n % 3 else "user", "content": f" text {n:05} "} for n in range(1000)]
    ordered = sorted(messages, key=lambda message: message["role"] == "user") if is_system_first else messages
    prompt = CountedText("".join(f"<{message['role']}>{message['content']}" for message in ordered))
    CountedText.num_looked = 0
    assert is_whole(prompt, messages)
    assert CountedText.num_looked <= 2 * len(prompt)


def test_a_text_that_is_missing_is_found_out_wherever_it_stood() -> None:
    texts = ["one", "two", "three", "one", ""]
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
    assert is_whole("three two one", messages)
    assert is_whole("one two three", [*messages, {"role": "assistant", "content": "left out"}])
    for text in ("one", "two", "three"):
        assert not is_whole("one two three".replace(text, ""), messages)
    assert not is_whole("one", [{"role": "user", "content": [{"type": "text", "text": "two"}]}])
