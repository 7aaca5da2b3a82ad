"""One conversation with an OpenAI-compatible server: what was said so far, and the answers as they come.

Reads the server's stream of events. Prints nothing.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request

from diptych.control.errors import ConfigError, RequestError
from diptych.diagnosis.adapters.http_get import Site, open_url
from diptych.serving.link.engine_options import BUNDLED_MODEL

ANSWER_TIMEOUT_S = 600.0  # between two events: a long prompt may wait behind others
MOST_ERROR_BYTES = 2**16
MOST_PIECES = 1024  # of an answer, a token each or a few
COMPLETION_TOKENS = 64  # of a continuation, which may have no end of its own
PARAGRAPH = "\n\n"  # where it ends earlier


class Piece(NamedTuple):
    """What one event adds to an answer: reasoning, content, or the end of the one and the beginning of the other."""

    reasoning: str = ""
    content: str = ""


@dataclass(slots=True)
class ChatClient:
    """words: what the user should know at the start. completes: texts are continued, each by itself. is_cut:
    the last answer was left before its end."""

    site: Site
    model: str
    words: str
    completes: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    is_cut: bool = False

    @classmethod
    def connect(
        cls, url: str, key: str | None, model: str | None, *, system: str | None = None, completes: bool = False
    ) -> "ChatClient":
        """Look at what the server serves. Raises ConfigError where it cannot be reached or serves no such model."""
        site = Site.of(url, key)
        cards = _cards(site)
        names = [str(card.get("id")) for card in cards]
        if not names or (model is not None and model not in names):
            served = ", ".join(names) or "nothing"
            raise ConfigError(f"model is {model!r}; {site.url} serves {served}", param="model")
        chosen = model or names[0]
        why = "" if completes else _why_no_chat(site, chosen, cards[names.index(chosen)])
        words = f"{chosen} at {site.url}" + (f" {why}: texts are continued" if why else "")
        if (completes or why) and system is not None:
            raise ConfigError("system has no effect where texts are continued", param="system")
        first = [{"role": "system", "content": system}] if system is not None else []
        return cls(site, chosen, words, completes or bool(why), messages=first)

    def answer(self, text: str) -> Iterator[Piece]:
        """The answer, piece by piece. Its content belongs to the conversation as far as it came, also when the caller
        stops; without any, the text was not said. Reasoning is not sent back. Small models may never end: without
        max_tokens it is left after MOST_PIECES (``is_cut``). Raises RequestError for what the server refuses."""
        self.is_cut = False
        body = {"model": self.model, "stream": True, **self.sampling}
        if self.completes:
            body = {"max_tokens": COMPLETION_TOKENS, "stop": [PARAGRAPH], **body, "prompt": text}
            yield from self._events("/v1/completions", body)
            return
        self.messages.append({"role": "user", "content": text})
        pieces: list[Piece] = []
        try:
            with closing(self._events("/v1/chat/completions", {**body, "messages": self.messages})) as events:
                for piece in events:
                    pieces.append(piece)
                    yield piece
                    self.is_cut = len(pieces) == MOST_PIECES and "max_tokens" not in self.sampling
                    if self.is_cut:
                        return
        finally:
            if content := "".join(piece.content for piece in pieces):
                self.messages.append({"role": "assistant", "content": content})
            else:
                self.messages.pop()

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The pieces of a stream of events."""
        try:
            with open_url(self._request(path, body), ANSWER_TIMEOUT_S) as reply:
                for line in reply:
                    data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data.startswith("{") and any(piece := _piece_of(json.loads(data))):
                        yield piece
        except HTTPError as error:
            raise RequestError(_refusal(error)) from None
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise RequestError(f"{self.site.url} went away: {getattr(error, 'reason', error)}") from None

    def _request(self, path: str, body: Mapping[str, Any]) -> Request:
        headers = {"Content-Type": "application/json"}
        if self.site.key:
            headers["Authorization"] = f"Bearer {self.site.key}"
        return Request(self.site.url + path, json.dumps(body).encode(), headers)


def _cards(site: Site) -> list[dict[str, Any]]:
    """The served models. Raises ConfigError."""
    try:
        body = site.get("/v1/models")
    except ConfigError as error:
        hint = "" if " answered " in error.message else " (is a server running? diptych serve starts one)"
        raise ConfigError(f"{error.message}{hint}", param="url") from None
    try:
        cards = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{site.url}/v1/models is no list of models; is it an OpenAI-compatible server?") from None
    return [card for card in cards if isinstance(card, dict)]


def _why_no_chat(site: Site, model: str, card: Mapping[str, Any]) -> str:
    """Why a model holds no conversation; empty where it may."""
    if str(card.get("root", "")).endswith(f"/{BUNDLED_MODEL.parent.name}/{BUNDLED_MODEL.name}"):
        return "completes Python code and follows no instructions"
    client = ChatClient(site, model, "", completes=False)
    body = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    try:
        open_url(client._request("/tokenize", body), site.timeout_s).close()
    except HTTPError as error:
        return "has no chat template" if "template" in _refusal(error) else ""
    except (URLError, HTTPException, OSError):
        return ""  # not every server counts tokens; the first answer says what is wrong
    return ""


def _piece_of(event: Mapping[str, Any]) -> Piece:
    """What one event adds. Raises RequestError for an error that comes in the stream."""
    if isinstance(error := event.get("error"), dict):
        raise RequestError(str(error.get("message", error)))
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""  # names of several servers
    return Piece(str(reasoning), str(choice.get("text") or delta.get("content") or ""))


def _refusal(error: HTTPError) -> str:
    """The message of an error reply."""
    text = error.read(MOST_ERROR_BYTES).decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}: {text[:200]}"
