"""Prefix misses while serving: feeds the explainer with what clients send and workers report, and keeps the latest.

Text is kept only where that was asked for. Then the token ids of prompts and answers lie in memory as they are, within
the bounds of the history; else nothing that is kept can be read (see hashed_prompts.py).
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.cluster.cluster_events import Arrived, ClusterEvent, Reported, WorkerDown, WorkerUp
from diptych.control.misses.miss_explainer import MissExplainer
from diptych.control.misses.miss_summary import MAX_PLACES
from diptych.control.misses.prefix_miss import PrefixMiss
from diptych.control.request import Submission
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream
from diptych.serving.misses.difference import BEFORE_TOKENS, MAX_TOKENS, Decode, TextDifference, difference
from diptych.serving.misses.hashed_prompts import HashedPrompt, unsealed

KEY_BYTES = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExplainedMiss:
    """A miss, and where texts are kept how it differs from the prompt that it left."""

    miss: PrefixMiss
    text: TextDifference | None = None


class MissRecorder:
    """The prefix-cache misses of one front end. keeps_text: token ids stay readable. stream_of: the open answer of a
    request, by its id."""

    def __init__(
        self,
        block_size: int,
        *,
        keeps_text: bool,
        stream_of: Callable[[str], AnswerStream | None],
        clock: Callable[[], int],
    ) -> None:
        self._log = LimitedLog(logger)
        self.explainer = MissExplainer(block_size)
        self.keeps_text = keeps_text
        self.recent: deque[ExplainedMiss] = deque(maxlen=edge_limits.SHOWN_MISSES)
        self.texts: dict[bytes, TextDifference] = {}  # of places (see MissSummary), the latest of each
        self.decode: Decode | None = None  # token ids to text; set by the owner of the tokenizer
        self._stream_of = stream_of
        self._clock = clock
        self._key = None if keeps_text else secrets.token_bytes(KEY_BYTES)
        self._open: dict[str, tuple[AnswerStream, HashedPrompt]] = {}

    @property
    def now_ns(self) -> int:
        """The time on the clock of the misses."""
        return self._clock()

    def spent_within(self, window_ns: int) -> dict[str, int]:
        """What the prompt tokens of the last SHOWN_MISSES requests, within the last ``window_ns`` nanoseconds, were
        computed for."""
        since_ns, spent = self._clock() - window_ns, Counter[str]()
        for explained in self.recent:
            if explained.miss.time_ns >= since_ns:
                spent.update(dict(explained.miss.spent))
        return dict(spent)

    def on_event(self, event: ClusterEvent) -> None:
        """What the ClusterCore is about to get."""
        match event:
            case Reported():
                self._on_report(event)
            case Arrived():
                stream = self._stream_of(event.submission.request_id)
                if stream is not None:
                    self._on_arrived(stream, event.submission)
            case WorkerUp():
                info = event.info
                self.explainer.on_worker_up(info.number, info.num_blocks, has_windows=info.has_windows)
            case WorkerDown():
                self.explainer.on_worker_down(event.worker, self._clock())

    def on_gone(self, stream: AnswerStream) -> None:
        """A request is over. The last token of its answer was sampled and never computed: no cache can hold it."""
        found = self._open.pop(stream.request_id, None)
        if found is not None:
            self.explainer.on_gone(stream.request_id, found[1].followed_by(stream.token_ids[:-1]))

    def _on_arrived(self, stream: AnswerStream, submission: Submission) -> None:
        options, size = stream.options, self.explainer.block_size
        owner = options.cache_salt, options.tenant
        prompt = HashedPrompt(stream.prompt_token_ids, size, self._key, *owner, submission.hashes)
        self._open[stream.request_id] = stream, prompt
        reads_cache = stream.sampling.reads_prefix_cache
        self.explainer.on_arrived(stream.request_id, prompt, options.tenant, reads_cache=reads_cache)

    def _on_report(self, report: Reported) -> None:
        for miss in self.explainer.on_events(report.worker, report.events, self._clock()):
            stream, prompt = self._open[miss.request_id]
            text = self._difference(miss, prompt)
            self.recent.append(ExplainedMiss(miss, text))
            stream.prefix_miss = miss
            if text is not None and miss.group:
                self._note_text(miss.group, text)

    def _note_text(self, group: bytes, text: TextDifference) -> None:
        """An example of what differs at a place; one whose kind is known stays."""
        if group in self.texts and self.texts[group].kind and not text.kind:
            return
        self.texts.pop(group, None)
        self.texts[group] = text
        if len(self.texts) > MAX_PLACES:
            del self.texts[next(iter(self.texts))]

    def _difference(self, miss: PrefixMiss, prompt: HashedPrompt) -> TextDifference | None:
        if not self.keeps_text or self.decode is None or not miss.key:
            return None
        size, at = self.explainer.block_size, miss.num_seen_tokens
        pieces = self.explainer.history.continuation(miss.key, 2 + MAX_TOKENS // size)
        was = unsealed(pieces)[at % size :]
        now = prompt.tokens(at, at + MAX_TOKENS)
        try:
            return difference(prompt.tokens(at - BEFORE_TOKENS, at), was, now, self.decode)
        except Exception as error:  # a text that cannot be shown must not disturb the request
            self._log.error(kind_of(error), "the difference of two prompts cannot be shown", error=error)
            return None
