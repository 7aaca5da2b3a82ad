"""Conversations: the prompt of a turn is the prompt before it, what the server answered to that, and something new.

Lengths are the workload's, whatever the answers hold: a shorter answer is followed by a longer question. No turn waits
for an answer: where it is not known (it has not ended, it failed, the server returns no token ids) a made-up answer of
the same length takes its place, and is counted as such.
"""

from dataclasses import dataclass
from typing import Literal

from diptych.bench.objectives import LatencyObjectives
from diptych.bench.prompts import PromptMaker, as_text
from diptych.bench.target import Target
from diptych.bench.token_stream import TokenStream
from diptych.workload.spec import RequestSpec

Kind = Literal["token ids", "text", "made up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """Later turns, by whether the answer before them is the server's. kind: the most that can be known of an answer."""

    kind: Kind
    real: int
    made_up: int


@dataclass(slots=True)
class _Turn:
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
    """The bodies of a run's requests; those of a conversation must be asked for in the order of their turns."""

    def __init__(self, target: Target, maker: PromptMaker, *, are_kept: bool) -> None:
        self._target = target
        self._maker = maker
        self._are_kept = are_kept
        self._is_text = target.config.prompts == "text"
        self._glue = " " if target.config.api == "completions" else ""
        self._last_turns: dict[int, _Turn] = {}
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
        """Counts of the later turns so far; None if nothing is a conversation."""
        if not self._are_kept:
            return None
        return TurnCounts(kind=self.kind, real=self._num_real, made_up=self._num_made_up)

    def can_be_made(self, spec: RequestSpec) -> bool:
        """Whether all that belongs into the prompt is known. If not, ``delay`` the request and make it when due."""
        if not self._is_turn(spec):
            return True
        last = self._last_turns.get(spec.session)
        return spec.session not in self._num_delayed and (last is None or last.has_ended)

    def delay(self, spec: RequestSpec) -> None:
        """Make the request's body when it is due, and those of later turns after it."""
        self._num_delayed[spec.session] = self._num_delayed.get(spec.session, 0) + 1

    def delayed_body(self, number: int, spec: RequestSpec, slo: LatencyObjectives) -> bytes:
        """The body of a request that was delayed."""
        self._num_delayed[spec.session] -= 1
        if not self._num_delayed[spec.session]:
            del self._num_delayed[spec.session]
        return self.body(number, spec, slo)

    def body(self, number: int, spec: RequestSpec, slo: LatencyObjectives) -> bytes:
        """The body of the ``number``-th request."""
        last = self._last_turns.get(spec.session) if self._is_turn(spec) else None
        if last is not None:
            return self._later_turn(number, spec, last, slo)
        units = self._maker.units(spec, number)
        if self._is_turn(spec):
            self._last_turns[spec.session] = _Turn(spec, units, (as_text(units),) if self._is_text else ())
        return self._target.body(units, spec, slo)

    def stream(self, due_ns: int, spec: RequestSpec) -> TokenStream:
        """The stream for the answer, which keeps of it what the next turn needs."""
        if not self._is_turn(spec) or self.kind == "made up":
            return TokenStream(due_ns)
        return TokenStream(due_ns, keep_token_ids=not self._is_text, keep_text=self._is_text)

    def on_end(self, spec: RequestSpec, stream: TokenStream) -> None:
        """An answer is over: the next turn may be made."""
        last = self._last_turns.get(spec.session) if self._is_turn(spec) else None
        if last is None or last.spec is not spec:
            return
        last.has_ended = True
        if not stream.is_complete:
            return
        usage = stream.usage
        if self._is_text:
            last.answer_text = stream.text
            is_counted = usage is not None and usage.prompt_tokens
            last.num_tokens = usage.prompt_tokens + usage.completion_tokens if usage and is_counted else 0
        elif stream.token_ids:
            last.answer_ids = stream.token_ids

    def _is_turn(self, spec: RequestSpec) -> bool:
        return self._are_kept and spec.session >= 0

    def _later_turn(self, number: int, spec: RequestSpec, last: _Turn, slo: LatencyObjectives) -> bytes:
        is_real = last.answer_text is not None or last.answer_ids is not None
        self._num_real += is_real
        self._num_made_up += not is_real
        before, output = last.spec.prompt_tokens, last.spec.output_tokens
        name = f"request/{number}"
        if not self._is_text:
            answer = last.answer_ids if last.answer_ids is not None else self._maker.fresh(f"{name}/answer", output)
            ids = last.ids + answer
            ids += self._maker.fresh(name, max(1, spec.prompt_tokens - len(ids)))
            self._last_turns[spec.session] = _Turn(spec, ids, ())
            return self._target.body(ids, spec, slo)
        said = last.answer_text
        if said is None:
            said = self._glue + as_text(self._maker.words(f"{name}/answer", output))
        left = spec.prompt_tokens - (last.num_tokens or before + output) - self._target.facts.turn_tokens
        texts = (*last.texts, said, self._glue + as_text(self._maker.words(name, left)))
        self._last_turns[spec.session] = _Turn(spec, [], texts)
        return self._target.body(texts, spec, slo)
