"""Mixed requests whose answers are compared, token for token, with those of a quiet run of the same server.

Streams (with token ids; recorded, which go on after a restart), whole replies, calls of tools, stored responses,
batches, and clients that hang up. What may go wrong with a request is what the blows that fell during its life allow;
everything else is a fault: a wrong answer, an end without a word, a refusal that is not documented or names no time,
no end within two minutes.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from chaos import make_cases
from loopback import http_request
from soak import RESPONSES, essence, whole_cases

COMPLETIONS = "/v1/completions"
VOCABULARY, LONGEST = 256, 400
SILENCE_S = 30.0  # of a stream on a busy machine; a comment comes after 10 to 15 s
STUCK_S = 120.0  # of a request as a whole
BATCH_LINES = 6
RETRY_S = 0.2
CONVERSATION = {"input": "and then?", "max_output_tokens": 12, "temperature": 0}


class Broken(Exception):
    """The connection ended before the reply did."""


@dataclass
class Refused(Exception):
    """An error, as a reply or in a stream. is_stated: it says when to come again where it must."""

    status: int
    code: str
    is_stated: bool = True


@dataclass
class Allowed:
    """What may become of requests while, and shortly after, something befell the server. codes: of errors. broken:
    connections may end. unstored: responses may be left out of the store, and records of streams may be missing."""

    codes: frozenset[str] = frozenset()
    broken: bool = False
    unstored: bool = False

    def __or__(self, other: "Allowed") -> "Allowed":
        broken, unstored = self.broken or other.broken, self.unstored or other.unstored
        return Allowed(self.codes | other.codes, broken, unstored)


@dataclass
class Outcome:
    """counts: of ends of requests. faults: what is not right, in words. pause_s, silence_s: the longest between two
    tokens of a stream, and between two signs of life."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    silence_s: float = 0.0

    def fault(self, words: str) -> None:
        """Something is not right."""
        self.faults.append(words[:400])

    def compare(self, kind: str, found: Any, expected: Any) -> None:
        """An answer that is whole."""
        if found == expected:
            self.counts["right"] += 1
        else:
            self.counts["wrong"] += 1
            self.fault(f"{kind}: {found!r} instead of {expected!r}")


@dataclass
class Question:
    """A request and its quiet answer. follow: the answer to CONVERSATION behind it."""

    kind: str
    path: str
    body: dict[str, Any]
    answer: Any = None
    follow: Any = None


def questions(seed: int) -> list[Question]:
    """What is asked: kinds in turn."""
    found = []
    for number, case in enumerate(make_cases(12, VOCABULARY, LONGEST, seed)):
        plain = {name: value for name, value in case.body.items() if name != "return_token_ids"}
        found.append(Question("stream", COMPLETIONS, {**case.body, "stream": True}))
        found.append(Question("recorded", COMPLETIONS, {**plain, "stream": True, "seed": number}))
        if number % 2:
            found.append(Question("whole", COMPLETIONS, case.body))
    for whole in whole_cases():
        kind = "stored" if whole.path == RESPONSES else "tools"
        found.append(Question(kind, whole.path, whole.body))
    return found


@dataclass
class Event:
    """An event of a stream. id: "" where it has none."""

    data: str
    id: str = ""


class Client:
    """Asks one server. outcome: where ends are counted; the owner may exchange it. allows: what may become of a request
    that began then (seconds of time.monotonic)."""

    def __init__(self, port: int, allows: Callable[[float], Allowed]) -> None:
        self.port = port
        self.allows = allows
        self.outcome = Outcome()

    async def load(self, asked: list[Question], rng: random.Random, over: asyncio.Event) -> None:
        """One question after another, until it is over."""
        while not over.is_set():
            question = rng.choice(asked)
            begun = time.monotonic()
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._ask(question, rng, begun)
            except TimeoutError:
                self.outcome.counts["stuck"] += 1
                self.outcome.fault(f"{question.kind}: no end within {STUCK_S:g} s")
            except (Broken, OSError, asyncio.IncompleteReadError) as error:
                await self._broken(question.kind, begun, error)
            except Refused as error:
                self._refused(question.kind, begun, error)

    async def _broken(self, kind: str, begun: float, error: Exception) -> None:
        self.outcome.counts["broken"] += 1
        if not self.allows(begun).broken:
            self.outcome.fault(f"{kind}: {type(error).__name__} {error}")
        await asyncio.sleep(RETRY_S)

    def _refused(self, kind: str, begun: float, error: Refused) -> None:
        self.outcome.counts[f"refused {error.code}"] += 1
        if error.code not in self.allows(begun).codes:
            self.outcome.fault(f"{kind}: {error.status} {error.code}")
        elif not error.is_stated:
            self.outcome.fault(f"{kind}: {error.status} {error.code} without Retry-After")

    async def _ask(self, question: Question, rng: random.Random, begun: float) -> None:
        kind, answer = question.kind, question.answer
        match kind:
            case "stream":
                hang_up = rng.randrange(question.body["max_tokens"]) if rng.random() < 0.25 else None
                found = await self.stream_tokens(question, hang_up)
                if hang_up is None:
                    self.outcome.compare(kind, found, answer)
                elif found == answer[: len(found)]:
                    self.outcome.counts["cancelled"] += 1
                else:
                    self.outcome.compare(kind, found, answer)
            case "recorded":
                self.outcome.compare(kind, await self.recorded_text(question, begun), answer)
            case "stored":
                await self._ask_stored(question, rng, begun)
            case _:
                self.outcome.compare(kind, self.essence(question, await self.whole(question)), answer)

    # -- whole replies ------------------------------------------------------------------------------------------------

    async def exchange(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a reply. Raises Refused, Broken, OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        try:
            writer.write(http_request(method, path, body, "Connection: close"))
            status, headers = await read_head(reader)
            text = await reader.read()
            if len(text) < int(headers.get("content-length", 0)):
                raise Broken("a reply was cut")
        finally:
            writer.close()
        return checked(status, headers, text)

    async def whole(self, question: Question) -> Any:
        """The reply to a question that asks for no stream."""
        return await self.exchange("POST", question.path, question.body)

    @staticmethod
    def essence(question: Question, reply: Any) -> Any:
        """What of a reply must be the same again."""
        if question.path == COMPLETIONS:
            return reply["choices"][0]["token_ids"]
        return essence(question.path, reply)

    async def _ask_stored(self, question: Question, rng: random.Random, begun: float) -> None:
        """A response, which must be there afterwards, and be gone on with, unless its reply says otherwise."""
        reply = await self.whole(question)
        self.outcome.compare("stored", essence(RESPONSES, reply), question.answer)
        if not reply.get("store", True):
            self.outcome.counts["not stored"] += 1
            warned = any(each.get("code") == "response_not_stored" for each in reply.get("warnings") or ())
            if not (self.allows(begun).unstored and warned):
                self.outcome.fault(f"a response was not stored: {reply.get('warnings')}")
            return
        again = await self.exchange("GET", f"{RESPONSES}/{reply['id']}")
        self.outcome.compare("read again", essence(RESPONSES, again), question.answer)
        if rng.random() < 0.3:
            more = await self.exchange("POST", RESPONSES, {**CONVERSATION, "previous_response_id": reply["id"]})
            self.outcome.compare("gone on with", essence(RESPONSES, more), question.follow)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def events(self, question: Question, *headers: str) -> AsyncIterator[Event]:
        """The events of a stream, up to its end. Raises Refused, Broken, OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        try:
            writer.write(http_request("POST", question.path, question.body, "Connection: close", *headers))
            status, head = await read_head(reader)
            if status != 200:
                checked(status, head, await reader.read())
            last, event_id = time.monotonic(), ""
            while line := await reader.readline():
                now = time.monotonic()
                self.outcome.silence_s, last = max(self.outcome.silence_s, silence := now - last), now
                if silence > SILENCE_S:
                    self.outcome.fault(f"{question.kind}: no sign of life for {silence:.0f} s")
                if line.startswith(b"id: "):
                    event_id = line[4:].strip().decode()
                elif line.startswith(b"data: "):
                    if not line.endswith(b"\n"):
                        raise Broken("an event was cut")
                    data, found_id, event_id = line[6:].strip().decode(), event_id, ""
                    if data == "[DONE]":
                        return
                    yield Event(data, found_id)
            raise Broken("a stream without its end")
        finally:
            writer.close()

    async def stream_tokens(self, question: Question, hang_up_after: int | None = None) -> list[int]:
        """The tokens of a stream, up to where its client hangs up."""
        tokens: list[int] = []
        last = time.monotonic()
        async with aclosing(self.events(question)) as events:  # type: ignore[type-var]
            async for event in events:
                found = json.loads(event.data)
                refuse_error(found)
                now = time.monotonic()
                self.outcome.pause_s, last = max(self.outcome.pause_s, now - last), now
                for choice in found["choices"]:
                    tokens += choice.get("token_ids") or []
                if hang_up_after is not None and len(tokens) >= hang_up_after:
                    break
        return tokens

    async def recorded_text(self, question: Question, begun: float) -> str:
        """The text of a recorded stream, gone on with as often as its server dies."""
        text, kept, seen, resumes = "", "", "", False
        while True:
            text = kept
            try:
                async with aclosing(self.events(question, *([f"Last-Event-ID: {seen}"] if seen else []))) as events:  # type: ignore[type-var]
                    async for event in events:
                        self.outcome.counts["resumed"] += resumes
                        resumes = False
                        found = json.loads(event.data)
                        refuse_error(found)
                        text += "".join(choice["text"] for choice in found["choices"])
                        if event.id:
                            seen, kept = event.id, text
                return text
            except (Broken, OSError, asyncio.IncompleteReadError):
                if not self.allows(begun).broken:
                    raise
                resumes = bool(seen)
            except Refused as error:
                if error.status == 404 and seen and self.allows(begun).unstored:
                    self.outcome.counts["no record"] += 1
                    text = kept = seen = ""
                elif error.code not in self.allows(begun).codes or not error.is_stated:
                    raise
            await asyncio.sleep(RETRY_S)

    # -- batches ------------------------------------------------------------------------------------------------------

    async def batches(self, asked: list[Question], over: asyncio.Event, pause_s: float) -> None:
        """A batch every so often; once it is taken, it must complete, whatever befalls the server meanwhile."""
        lines = [question for question in asked if question.kind == "whole"][:BATCH_LINES]
        rows = [
            {"custom_id": str(n), "method": "POST", "url": COMPLETIONS, "body": each.body}
            for n, each in enumerate(lines)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        while not over.is_set():
            begun = time.monotonic()
            try:
                async with asyncio.timeout(2 * STUCK_S):
                    await self._batch(text, lines)
            except TimeoutError:
                self.outcome.counts["stuck"] += 1
                self.outcome.fault("a batch does not end")
            except (Broken, OSError, asyncio.IncompleteReadError) as error:
                await self._broken("batch", begun, error)
            except Refused as error:
                self._refused("batch", begun, error)
            await asyncio.wait([asyncio.ensure_future(over.wait())], timeout=pause_s)

    async def _batch(self, text: str, lines: list[Question]) -> None:
        file = await self._upload(text)
        created = await self.exchange(
            "POST", "/v1/batches", {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        )
        while created["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.5)
            created = await self._patient("GET", f"/v1/batches/{created['id']}")
        if created["status"] != "completed" or not created.get("output_file_id"):
            self.outcome.fault(f"a batch: {created}")
            return
        rows = await self._patient("GET", f"/v1/files/{created['output_file_id']}/content")
        found = {row["custom_id"]: row["response"]["body"]["choices"][0]["token_ids"] for row in rows}
        self.outcome.compare("batch", found, {str(n): each.answer for n, each in enumerate(lines)})
        for name in (file, created["output_file_id"]):
            await self._patient("DELETE", f"/v1/files/{name}")

    async def _patient(self, method: str, path: str) -> Any:
        """As ``exchange``, again while something befalls the server."""
        while True:
            begun = time.monotonic()
            try:
                return await self.exchange(method, path)
            except (Broken, OSError, asyncio.IncompleteReadError):
                if not self.allows(begun).broken:
                    raise
            except Refused as error:
                if error.code not in self.allows(begun).codes:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _upload(self, text: str) -> str:
        mark = "blow-boundary"
        parts = [("purpose", "", "batch"), ("file", '; filename="lines.jsonl"', text)]
        body = "".join(
            f'--{mark}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
            for name, more, value in parts
        )
        data = f"{body}--{mark}--\r\n".encode()
        form = f"Content-Type: multipart/form-data; boundary={mark}"
        request = http_request("POST", "/v1/files", None, "Connection: close", form, f"Content-Length: {len(data)}")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request + data)
            status, headers = await read_head(reader)
            return str(checked(status, headers, await reader.read())["id"])
        finally:
            writer.close()

    # -- the quiet run ------------------------------------------------------------------------------------------------

    async def learn(self, asked: list[Question]) -> None:
        """Fill in the quiet answers."""
        for question in asked:
            if question.kind == "stream":
                question.answer = await self.stream_tokens(question)
                if len(question.answer) != question.body["max_tokens"]:
                    raise RuntimeError(f"the quiet run gave {len(question.answer)} tokens")
            elif question.kind == "recorded":
                question.answer = await self.recorded_text(question, time.monotonic())
            else:
                reply = await self.whole(question)
                question.answer = self.essence(question, reply)
                if question.kind == "stored":
                    more = await self.exchange("POST", RESPONSES, {**CONVERSATION, "previous_response_id": reply["id"]})
                    question.follow = essence(RESPONSES, more)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of a reply. Raises Broken when there is none."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError as error:
        raise Broken(f"a reply without its head: {error.partial[:60]!r}") from None
    pairs = [line.partition(":") for line in lines[1:] if line]
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


def checked(status: int, headers: dict[str, str], text: bytes) -> Any:
    """What a reply says: JSON, or lines of it. Raises Refused, or Broken where it was cut."""
    try:
        if status == 200 and headers.get("content-type", "").startswith("application/jsonl"):
            return [json.loads(line) for line in text.splitlines()]
        found = json.loads(text)
    except ValueError:
        try:
            return [json.loads(line) for line in text.splitlines()]
        except ValueError:
            raise Broken(f"status {status}, {text[:80]!r}") from None
    if status >= 400:
        stated = status not in (429, 503) or "retry-after" in headers
        raise Refused(status, str(found["error"].get("code")), stated)
    return found


def refuse_error(event: dict[str, Any]) -> None:
    """Raises Refused for the event of a stream that ends with an error."""
    if error := event.get("error"):
        raise Refused(200, str(error.get("code")))
