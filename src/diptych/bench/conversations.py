"""Conversations: the prompt of a turn is the one before it, what the server answered to that, and something new.

Owns what has been said. Lengths are the workload's, whatever the answers hold: a shorter answer is followed by a longer
question. Where the answer is not known (it has not ended, it failed, the server returns no token ids) a made-up one of
the same length takes its place, and is counted as such. Must never wait for an answer.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from diptych.bench.client_stream import TokenStream
from diptych.bench.objectives import Objectives
from diptych.bench.prompts import PromptMaker, as_text
from diptych.bench.target import Target
from diptych.workload.spec import RequestSpec

Kind = Literal["token ids", "text", "made up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """Later turns by what stands for the answers before them. kind: what could be known of an answer at best."""

    kind: Kind
    real: int
    made_up: int


class TextStream(TokenStream):
    """A stream that keeps what it was fed: its text is wanted once it is over."""

    __slots__ = ("_payloads",)

    def __init__(self, intended_ns: int) -> None:
        super().__init__(intended_ns)
        self._payloads: list[bytes] = []

    def feed(self, payload: bytes, now_ns: int) -> None:
        """The next bytes of a body of server-sent events."""
        self._payloads.append(payload)
        super().feed(payload, now_ns)

    def text(self) -> str | None:
        """All text of the answer; of a model that thinks aloud, what it says after that. None: it cannot be read."""
        pieces = []
        for line in b"".join(self._payloads).splitlines():
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            try:
                choices = _decode(line[5:]).choices
            except msgspec.DecodeError:
                return None  # an event of several lines: nobody sends those
            pieces += [one.text or (one.delta.content if one.delta else None) or "" for one in choices or ()]
        return "".join(pieces) or None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class _Talk:
    """The last turn of a conversation. Its prompt is ``ids`` or ``texts``, by the kind of the prompts; its answer, of
    the same kind, is None until it is known. num_tokens: of prompt and answer."""

    spec: RequestSpec
    ids: list[int]
    texts: tuple[str, ...]
    has_ended: bool = False
    answer_ids: list[int] | None = None
    answer_text: str | None = None
    num_tokens: int = 0


class Conversations:
    """What the requests of one run ask; of conversations, in the order of their turns."""

    def __init__(self, target: Target, maker: PromptMaker, *, are_kept: bool) -> None:
        self._target = target
        self._maker = maker
        self._are_kept = are_kept
        self._is_text = target.config.prompts == "text"
        self._glue = " " if target.config.api == "completions" else ""
        self._talks: dict[int, _Talk] = {}
        self._num_delayed: dict[int, int] = {}
        self._num_real = self._num_made_up = 0

    @property
    def kind(self) -> Kind:
        """What can be known of an answer."""
        if self._is_text:
            return "text"
        return "token ids" if self._target.facts.returns_token_ids else "made up"

    @property
    def counts(self) -> TurnCounts | None:
        """Of the later turns so far; None where nothing is a conversation."""
        if not self._are_kept:
            return None
        return TurnCounts(kind=self.kind, real=self._num_real, made_up=self._num_made_up)

    def can_be_made(self, spec: RequestSpec) -> bool:
        """Whether nothing that belongs into the prompt is still on its way. One that cannot is made when it is due."""
        if not self._is_turn(spec):
            return True
        talk = self._talks.get(spec.session)
        return spec.session not in self._num_delayed and (talk is None or talk.has_ended)

    def delay(self, spec: RequestSpec) -> None:
        """Its body is made when it is due, and those of later turns after it."""
        self._num_delayed[spec.session] = self._num_delayed.get(spec.session, 0) + 1

    def delayed_body(self, number: int, spec: RequestSpec, slo: Objectives) -> bytes:
        """The body of a request that was delayed."""
        self._num_delayed[spec.session] -= 1
        if not self._num_delayed[spec.session]:
            del self._num_delayed[spec.session]
        return self.body(number, spec, slo)

    def body(self, number: int, spec: RequestSpec, slo: Objectives) -> bytes:
        """The body of the ``number``-th request."""
        talk = self._talks.get(spec.session) if self._is_turn(spec) else None
        if talk is not None:
            return self._later_turn(number, spec, talk, slo)
        units = self._maker.units(spec, number)
        if self._is_turn(spec):
            self._talks[spec.session] = _Talk(spec, units, (as_text(units),) if self._is_text else ())
        return self._target.body(units, spec, slo)

    def stream(self, due_ns: int, spec: RequestSpec) -> TokenStream:
        """What receives the answer."""
        if not self._is_turn(spec) or self.kind == "made up":
            return TokenStream(due_ns)
        return TextStream(due_ns) if self._is_text else TokenStream(due_ns, keep_token_ids=True)

    def on_end(self, spec: RequestSpec, stream: TokenStream) -> None:
        """An answer is over: the next turn may be made."""
        talk = self._talks.get(spec.session) if self._is_turn(spec) else None
        if talk is None or talk.spec is not spec:
            return
        talk.has_ended = True
        if not stream.is_complete:
            return
        usage = stream.usage
        if isinstance(stream, TextStream):
            talk.answer_text = stream.text()
            is_counted = usage is not None and usage.prompt_tokens
            talk.num_tokens = usage.prompt_tokens + usage.completion_tokens if usage and is_counted else 0
        elif stream.token_ids:
            talk.answer_ids = stream.token_ids

    def _is_turn(self, spec: RequestSpec) -> bool:
        return self._are_kept and spec.session >= 0

    def _later_turn(self, number: int, spec: RequestSpec, talk: _Talk, slo: Objectives) -> bytes:
        is_real = talk.answer_text is not None or talk.answer_ids is not None
        self._num_real += is_real
        self._num_made_up += not is_real
        before, output = talk.spec.prompt_tokens, talk.spec.output_tokens
        name = f"request/{number}"
        if not self._is_text:
            answer = talk.answer_ids if talk.answer_ids is not None else self._maker.fresh(f"{name}/answer", output)
            ids = talk.ids + answer
            ids += self._maker.fresh(name, max(1, spec.prompt_tokens - len(ids)))
            self._talks[spec.session] = _Talk(spec, ids, ())
            return self._target.body(ids, spec, slo)
        said = talk.answer_text
        if said is None:
            said = self._glue + as_text(self._maker.words(f"{name}/answer", output))
        left = spec.prompt_tokens - (talk.num_tokens or before + output) - self._target.facts.turn_tokens
        texts = (*talk.texts, said, self._glue + as_text(self._maker.words(name, left)))
        self._talks[spec.session] = _Talk(spec, [], texts)
        return self._target.body(texts, spec, slo)
