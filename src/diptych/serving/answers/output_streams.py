"""All open answers, and which attempt on which worker feeds each of them.

A token counts only when it comes from the worker that its attempt runs on: tokens of an older attempt are ignored, and
each token reaches the client exactly once. Where a request runs is decided in control; the fleet passes that on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.errors import DiptychError, RequestError
from diptych.control.events import Event, RequestAdmitted, RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S, Slo
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.link.messages import AttemptTokens, pack_token_ids
from diptych.serving.metrics.serving_metrics import ServingMetrics
from diptych.timeline.records import AnswerRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompletedHandoff:
    """Another worker feeds a stream now. sender: the worker that fed it before. exposed_s: how long the stream stood
    still. stopped: see OutputStreams.on_tokens."""

    sender: int
    exposed_s: float
    stopped: list[AnswerStream]


class OutputStreams:
    """Open answer streams by request id, and by attempt id."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self.on_gone: Callable[[AnswerStream], None] = lambda stream: None  # called when an answer is no longer open
        self.on_news: Callable[[Iterable[Generation]], None] | None = None  # called before anything of them is sent
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_awaiting_first_token = 0  # submitted, no token yet
        self._log = LimitedLog(logger)
        self._metrics = metrics
        self._streams: dict[str, AnswerStream] = {}
        self._fed: dict[str, AnswerStream] = {}  # by attempt id: those that a worker feeds
        self._news: list[Generation] = []  # those that ``deliver`` wakes

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def num_besides(self, service_class: str) -> int:
        """Open answers of requests of other classes."""
        return sum(stream.options.service_class != service_class for stream in self._streams.values())

    def add(self, streams: Iterable[AnswerStream]) -> None:
        """These are submitted now."""
        now = time.monotonic()
        for stream in streams:
            stream.submitted_s = now
            self._streams[stream.request_id] = stream
            self.num_awaiting_first_token += 1
        self.idle.clear()

    def get(self, request_id: str) -> AnswerStream | None:
        """The open answer of a request."""
        return self._streams.get(request_id)

    def abandon(self, generation: Generation) -> list[AnswerStream]:
        """Forget the open answers of a request whose client has left. Returns them; the caller cancels them."""
        still_open = [stream for stream in generation.streams if stream.request_id in self._streams]
        for stream in still_open:
            self._forget(stream)
        if still_open:
            self._metrics.on_aborted(len(still_open))
        return still_open

    def fail_all(self, error: DiptychError) -> None:
        """The server stops, or has failed: every open answer fails with this error."""
        for stream in list(self._streams.values()):
            for end in (partial(self._forget, stream), partial(stream.generation.fail, error)):
                try:
                    end()
                except Exception as failure:  # what it leaves behind must not keep the others from their ends
                    logger.error("request %s could not be ended", stream.request_id, exc_info=failure)

    # -- what the fleet passes on -------------------------------------------------------------------------------------

    def attempt_tokens(self, request_id: str) -> AttemptTokens | None:
        """What a worker must know to begin an attempt, with the tokens that the client has already; None when the
        request is over."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        sampling = replace(stream.sampling, stop=()) if stream.sampling.stop else stream.sampling
        output = pack_token_ids(stream.token_ids) if stream.num_tokens else b""
        return AttemptTokens(pack_token_ids(stream.prompt_token_ids), sampling, output, stream.options)

    def progress(self) -> Mapping[str, int]:
        """How many tokens the client of each open request has."""
        return {request_id: stream.num_tokens for request_id, stream in self._streams.items() if stream.num_tokens}

    def on_placed(self, request_id: str, attempt_id: str, worker: int) -> None:
        """Tokens of this attempt come from this worker."""
        if stream := self._streams.get(request_id):
            self.on_restarted(request_id, attempt_id)
            stream.num_before_attempt = stream.num_tokens
            stream.worker = worker
            self._fed[attempt_id] = stream

    def on_restarted(self, request_id: str, attempt_id: str) -> None:
        """Another attempt begins; tokens of the older one are ignored from now on."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt_id != attempt_id:
            self._fed.pop(stream.attempt_id, None)
            stream.attempt_id = attempt_id

    def on_events(self, worker: int, events: Iterable[Event]) -> None:
        """The events of a report, before its tokens."""
        for event in events:
            if isinstance(event, RequestAdmitted) and (stream := self._fed_by(worker, event.request_id)) is not None:
                if event.is_first and event.num_cached_tokens and not stream.num_tokens:
                    stream.cached_tokens = event.num_cached_tokens
                stream.generation.admit()

    def on_tokens(self, worker: int, tokens: StepTokens, stop_tokens: frozenset[str]) -> list[AnswerStream]:
        """A step's tokens: push every one. stop_tokens: attempts whose token is a stop token. Metrics are added up per
        step. Returns the streams that are complete: a stop string was found."""
        now = time.monotonic()
        fed, news, stopped = self._fed, self._news, []
        for attempt_id, (first, entries) in tokens.prompt_logprobs.items():
            if stream := self._fed_by(worker, attempt_id):
                stream.add_prompt_logprobs(first, entries)
        for attempt_id, vector in tokens.embeddings.items():
            if stream := self._fed_by(worker, attempt_id):
                stream.embedding = vector
        gaps: dict[float, int] = {}  # one for each stream and step, however many tokens it got
        num_tokens, logprobs = 0, tokens.logprobs
        for index, (attempt_id, token_id) in enumerate(zip(tokens.request_ids, tokens.token_ids, strict=True)):
            stream = fed.get(attempt_id)
            if stream is None or stream.worker != worker:
                continue
            num_tokens += 1
            if stream.last_token_s == now:
                pass
            elif stream.last_token_s:
                gap_s = now - stream.last_token_s
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
            else:
                stream.first_token_s = now
                self.num_awaiting_first_token -= 1
                self._metrics.time_to_first_token.observe(now - stream.submitted_s)
            stream.last_token_s = now
            try:
                is_stop_token = attempt_id in stop_tokens and tokens.is_last(index)
                if stream.push(token_id, is_stop_token=is_stop_token, logprobs=logprobs.get(index)):
                    stopped.append(stream)
                news.append(stream.mark())
            except Exception as error:  # a failure in the text of one answer must not harm the others
                self._log.error(kind_of(error), "request %s failed in the front end", stream.request_id, error=error)
                stream.generation.fail(DiptychError("internal error; the server's log has the details"))
                stopped.append(stream)
        self._metrics.on_gaps(gaps, num_tokens)
        return stopped

    def on_delivered(
        self, worker: int, attempt_id: str, first_token: int, logprobs: TokenLogprobs | None
    ) -> CompletedHandoff | None:
        """The decode worker has taken an attempt over. Its first token is new here when the prefill worker has not
        reported it. None: the attempt feeds no stream any more."""
        stream = self._fed.get(attempt_id)
        if stream is None:
            return None
        sender, stream.worker = stream.worker, worker
        exposed_s, stopped = 0.0, []
        if stream.num_tokens == stream.num_before_attempt:
            entries = {} if logprobs is None else {0: logprobs}
            stopped = self.on_tokens(worker, StepTokens([attempt_id], [first_token], entries), frozenset())
        else:
            exposed_s = time.monotonic() - stream.last_token_s
        self._metrics.fleet.handoff_seconds.observe(exposed_s)
        return CompletedHandoff(sender, exposed_s, stopped)

    def on_end(
        self, request_id: str, finished: RequestFinished | None, error: DiptychError | None
    ) -> Generation | None:
        """The one end of a request: ``finished`` as its client sees it, or an error. Returns a generation that has
        failed, of which other answers may still be open."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        if error is None and finished is not None and finished.error is not None:
            error = finished.error.exception()
        self._forget(stream)
        if error is None and finished is not None:
            self._metrics.on_finished(finished, time.monotonic() - stream.submitted_s)
            stream.end(finished)
            if self.on_news is not None:
                self.on_news((stream.generation,))
            stream.mark().wake()
            return None
        was_known = finished is not None and finished.slo_met is not None
        was_refused = isinstance(error, RequestError)  # never begun, like those that are refused on arrival
        self._metrics.on_failed(had_slo=was_known or (stream.options.slo is not None and not was_refused))
        stream.generation.fail(error or DiptychError("internal error: a request ended without its last event"))
        return stream.generation

    def answer_of(self, request_id: str, finished: RequestFinished | None, now: int) -> AnswerRecord | None:
        """What the timeline keeps of an answer that ends now; None when the request is unknown. Times are nanoseconds
        of the clock of ``now``."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        generation, slo = stream.generation, stream.options.slo or Slo()
        return AnswerRecord(
            0,
            stream.worker,
            now,
            request_id,
            round(stream.submitted_s * NS_PER_S),
            round(stream.first_token_s * NS_PER_S),
            round(stream.last_token_s * NS_PER_S),
            stream.num_prompt_tokens,
            stream.cached_tokens,
            stream.num_tokens,
            str(finished.reason if finished else FinishReason.ERROR),
            generation.unread_ns,
            slo.ttft_ns or 0,
            slo.tpot_ns or 0,
            stream.options.service_class,
            generation.count_unsent() if generation.count_unsent is not None else 0,
            self._metrics.fleet.stats_of(stream.worker).cpu_wait_ns,
        )

    def deliver(self) -> None:
        """A worker's report has been handled: what it brought goes to the readers, all of it at once."""
        news, self._news = self._news, []
        if self.on_news is not None:
            self.on_news(news)
        for generation in news:
            generation.deliver()

    def _fed_by(self, worker: int, attempt_id: str) -> AnswerStream | None:
        stream = self._fed.get(attempt_id)
        return stream if stream is not None and stream.worker == worker else None

    def _forget(self, stream: AnswerStream) -> None:
        del self._streams[stream.request_id]
        self._fed.pop(stream.attempt_id, None)
        self.on_gone(stream)
        if not stream.last_token_s:
            self.num_awaiting_first_token -= 1
        if not self._streams:
            self.idle.set()


def stopped_by_token(events: Iterable[Event]) -> frozenset[str]:
    """Attempts whose newest token is a stop token."""
    return frozenset(
        event.request_id for event in events if isinstance(event, RequestFinished) and event.reason is FinishReason.STOP
    )
