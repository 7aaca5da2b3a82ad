"""All answers that are being made, and which attempt on which worker each of them is fed by.

Owns the open sequences. A token counts only when it comes from the worker that its attempt is on, so what an older
attempt still says goes nowhere, and each token reaches the client exactly once. Must never decide where a request runs:
the fleet tells, and is asked to cancel.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from diptych.control.errors import DiptychError, RequestError
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S, LatencyBreakdown, Slo
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.link.messages import Delivered, Finished, Tokens, WireRequest, pack_tokens, unpack_error
from diptych.serving.metrics.serving_metrics import ServingMetrics

logger = logging.getLogger(__name__)

Cancel = Callable[[Iterable[AnswerStream], FinishReason], None]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asked for besides its tokens. service_class: interactive, standard or batch. deadline_s: from its
    arrival to when its first token is of no use any more. tenant: whose it is ("": nobody's)."""

    priority: int = 0
    slo: Slo | None = None
    cache_salt: str | None = None
    tenant: str = ""
    service_class: str = "standard"
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Takeover:
    """A decode worker goes on with what ``sender`` has prefilled. exposed_s: how long the stream stood still for it."""

    sender: int
    exposed_s: float


class OutputStreams:
    """Open sequences by request id, and by worker and attempt id. ``cancel`` is set by whoever owns the fleet."""

    def __init__(self, metrics: ServingMetrics, num_workers: int) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_untouched = 0  # submitted, no token yet
        self.cancel: Cancel = lambda request_ids, reason: None
        self._metrics = metrics
        self._sequences: dict[str, AnswerStream] = {}
        self._terms: dict[str, RequestOptions] = {}
        self._current: dict[str, AnswerStream] = {}  # by attempt id
        self._attempts: list[dict[str, AnswerStream]] = [
            {} for _ in range(num_workers)
        ]  # of these, whom a worker feeds
        self._news: list[Generation] = []  # those that ``deliver`` tells
        self._stopping: dict[
            str, AnswerStream
        ] = {}  # attempt -> has its stop string; only the worker's last word is missing

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequences: Iterable[AnswerStream], terms: RequestOptions) -> None:
        """These are submitted now."""
        now = time.monotonic()
        for one in sequences:
            one.submitted_s = now
            self._sequences[one.request_id] = one
            self._terms[one.request_id] = terms
            self.num_untouched += 1
        self.idle.clear()

    def abort(self, generation: Generation) -> None:
        """End what still runs of a request; its blocks are free for the workers' next step."""
        still_open = [one for one in generation.sequences if one.request_id in self._sequences]
        for one in still_open:
            self._forget(one)
        if still_open:
            self._metrics.on_aborted(len(still_open))
            self.cancel(still_open, FinishReason.ABORT)

    def fail_all(self, error: DiptychError) -> None:
        """Nothing will be served any more."""
        for one in list(self._sequences.values()):
            self._forget(one)
            assert one.generation is not None
            one.generation.fail(error)

    # What the fleet tells.

    def wire_request(self, request_id: str, attempt_id: str) -> WireRequest | None:
        """An attempt of a request for a worker, with the tokens that the client has already; None when it is over."""
        one = self._sequences.get(request_id)
        if one is None:
            return None
        terms = self._terms[request_id]
        sampling = replace(one.sampling, stop=()) if one.sampling.stop else one.sampling
        return WireRequest(
            attempt_id,
            pack_tokens(one.prompt_token_ids),
            sampling,
            terms.priority,
            terms.slo,
            terms.cache_salt,
            pack_tokens(one.token_ids) if one.num_tokens else b"",
        )

    def progress(self) -> Mapping[str, int]:
        """How many tokens the client of each open request has."""
        return {request_id: one.num_tokens for request_id, one in self._sequences.items() if one.num_tokens}

    def on_placed(self, request_id: str, attempt_id: str, worker: int) -> None:
        """Tokens of this attempt come from this worker."""
        if one := self._sequences.get(request_id):
            self.on_restarted(request_id, attempt_id)
            one.num_before_attempt = one.num_tokens
            self._current[attempt_id] = self._attempts[worker][attempt_id] = one

    def on_restarted(self, request_id: str, attempt_id: str) -> None:
        """Another attempt begins; what the older one still says is not heard."""
        one = self._sequences.get(request_id)
        if one is not None and one.attempt_id != attempt_id:
            self._unplace(one)
            one.attempt_id = attempt_id

    def on_worker_lost(self, worker: int) -> None:
        """Nothing comes from it any more. Answers that only waited for its last word end now."""
        self._attempts[worker].clear()
        for attempt_id in list(self._stopping):
            self.on_gone(attempt_id)

    def on_gone(self, attempt_id: str) -> None:
        """A worker has forgotten this attempt; one that had its stop string ends without the worker's own account."""
        if one := self._stopping.get(attempt_id):
            self._end(one, _last_word(one))

    def on_end(self, request_id: str, finished: Finished | None, error: DiptychError | None) -> None:
        """The one end of a request: as a worker reported it, or with an error."""
        one = self._sequences.get(request_id)
        if one is None:
            return
        if error is None and finished is not None and finished.error is not None:
            error = unpack_error(finished.error)
        if error is None and finished is not None:
            self._end(one, finished)
            return
        assert one.generation is not None
        was_known = finished is not None and finished.slo_met is not None
        was_refused = isinstance(error, RequestError)  # never begun, as those that are refused at the door
        has_slo = self._terms[request_id].slo is not None
        self._metrics.on_failed(had_slo=was_known or (has_slo and not was_refused))
        self._forget(one)
        one.generation.fail(error or DiptychError("internal error: a request ended without a word"))
        self.abort(one.generation)

    def on_delivered(self, worker: int, message: Delivered) -> Takeover | None:
        """The decode worker goes on with an attempt. Its first token is news when the prefill worker has not told
        it."""
        attempt_id = message.attempt_id
        one = self._current.get(attempt_id)
        if one is None:
            return None
        sender = next((number for number, attempts in enumerate(self._attempts) if attempts.pop(attempt_id, None)), -1)
        self._attempts[worker][attempt_id] = one
        exposed_s = 0.0
        if one.num_tokens == one.num_before_attempt:
            logprobs = {} if message.logprobs is None else {attempt_id: message.logprobs}
            self.on_tokens(worker, Tokens([attempt_id], [message.first_token], logprobs=logprobs))
        else:
            exposed_s = time.monotonic() - one.last_token_s
        self._metrics.fleet.handoff_seconds.observe(exposed_s)
        return Takeover(sender, exposed_s)

    def on_tokens(self, worker: int, message: Tokens) -> list[str]:
        """A step's record: push every token. Metrics are added up per step. (Who ends with it, the fleet tells.)
        Returns the attempts whose requests got their very first token."""
        now = time.monotonic()
        begun: list[str] = []
        sequences, news, stopped_by_text = self._attempts[worker], self._news, []
        stopped = {end.request_id for end in message.finished if end.reason is FinishReason.STOP}
        for attempt_id, cached in message.cached.items():
            if (one := sequences.get(attempt_id)) and not one.num_tokens:
                one.cached_tokens = cached
        for attempt_id, (first, entries) in message.prompt_logprobs.items():
            if one := sequences.get(attempt_id):
                one.add_prompt_logprobs(first, entries)
        gaps: dict[float, int] = {}
        num_tokens, logprobs = 0, message.logprobs
        for attempt_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
            one = sequences.get(attempt_id)
            if one is None:
                continue
            num_tokens += 1
            if one.last_token_s:
                gap_s = now - one.last_token_s
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
            else:
                begun.append(attempt_id)
                one.first_token_s = now
                self.num_untouched -= 1
                self._metrics.time_to_first_token.observe(now - one.submitted_s)
            one.last_token_s = now
            try:
                if one.push(token_id, is_stop_token=attempt_id in stopped, logprobs=logprobs.get(attempt_id)):
                    stopped_by_text.append(one)
                news.append(one.mark())
            except Exception as error:  # the text of one answer must not cost the others theirs
                self._fail_one(one, error)
        self._metrics.on_gaps(gaps, num_tokens)
        if stopped_by_text:
            ended = {end.request_id for end in message.finished}
            self._stop([one for one in stopped_by_text if one.attempt_id not in ended])
        return begun

    def on_finished(self, end: Finished) -> None:
        """A worker's last word on an attempt: awaited only when the front end had found a stop string."""
        if one := self._stopping.get(end.request_id):
            self._end(one, end)

    def deliver(self) -> None:
        """A worker's message has been dealt with: what it gave goes to the readers, all of it at once."""
        news, self._news = self._news, []
        for generation in news:
            generation.deliver()

    def _stop(self, sequences: list[AnswerStream]) -> None:
        for one in sequences:
            self._stopping[one.attempt_id] = one
        self.cancel(sequences, FinishReason.STOP)

    def _end(self, one: AnswerStream, finished: Finished) -> None:
        e2e_s = time.monotonic() - one.submitted_s
        if one.attempt_id != one.request_id or not finished.latency.total_ns:
            finished = self._as_seen_here(one, finished, e2e_s)
        self._metrics.on_finished(finished, e2e_s)
        self._forget(one)
        one.end(finished)
        one.mark().wake()

    def _fail_one(self, one: AnswerStream, error: Exception) -> None:
        logger.error("request %s failed in the front end", one.request_id, exc_info=error)
        assert one.generation is not None
        one.generation.fail(DiptychError("internal error; the server's log has the details"))
        self.abort(one.generation)

    def _as_seen_here(self, one: AnswerStream, finished: Finished, e2e_s: float) -> Finished:
        """The account of a request that was begun more than once: a worker only knows its own part of it."""
        total_ns, prefill_ns = int(e2e_s * NS_PER_S), int((one.first_token_s - one.submitted_s) * NS_PER_S)
        latency = LatencyBreakdown(0, prefill_ns, total_ns - prefill_ns, one.num_tokens)
        slo = self._terms[one.request_id].slo
        return msgspec.structs.replace(
            finished,
            num_prompt_tokens=len(one.prompt_token_ids),
            latency=latency,
            slo_met=slo.is_met(latency) if slo else finished.slo_met,
        )

    def _forget(self, one: AnswerStream) -> None:
        del self._sequences[one.request_id], self._terms[one.request_id]
        self._unplace(one)
        self._stopping.pop(one.attempt_id, None)
        if not one.last_token_s:
            self.num_untouched -= 1
        if not self._sequences:
            self.idle.set()

    def _unplace(self, one: AnswerStream) -> None:
        self._current.pop(one.attempt_id, None)
        for attempts in self._attempts:
            attempts.pop(one.attempt_id, None)


def _last_word(one: AnswerStream) -> Finished:
    """The end of a request that had its stop string, made here because its worker is gone."""
    prompt, latency = len(one.prompt_token_ids), LatencyBreakdown(0, 0, 0, one.num_tokens)
    return Finished(one.request_id, FinishReason.STOP, prompt, one.cached_tokens, 0, latency, None)
