"""All requests that came to a server, also those that have not ended: what its twin must serve.

Those that ended are too few where a server has more work than time, and the short ones among them too many. How many
tokens a request that has not ended will have is not known; expected are as many more as an answer has on average, by
the estimate for cut-off observations of an exponential: all tokens that were written, over the answers that ended.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.control.slo import Slo
from diptych.diagnosis.observation import Arrival
from diptych.timeline.records import AnswerRecord, Record, RequestRecord, StepRecord
from diptych.workload.spec import RequestSpec


@dataclass(slots=True)
class _Seen:
    """One request, as its records say it. end_ns: -1: it has not ended."""

    arrival_ns: int = -1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    worker: int = 0
    first_token_ns: int = -1
    end_ns: int = -1
    num_output_tokens: int = 0
    answer: AnswerRecord | None = field(default=None)

    def note(self, record: RequestRecord) -> None:
        """Take in a milestone."""
        if record.what == "queued" and self.arrival_ns < 0:
            self.arrival_ns, self.num_prompt_tokens = record.time_ns, record.detail["num_prompt_tokens"]
        elif record.what == "admitted":
            self.num_cached_tokens = max(self.num_cached_tokens, record.detail.get("num_cached_tokens", 0))
        elif record.what == "finished":
            self.end_ns, self.num_output_tokens = record.time_ns, record.detail["num_output_tokens"]
        if record.what == "first_token" and self.first_token_ns < 0:
            self.first_token_ns = record.time_ns
        if record.what in ("queued", "first_token", "handoff_delivered"):
            self.worker = record.worker


def arrivals_of(records: Sequence[Record], default: Slo, since_ns: int) -> tuple[Arrival, ...]:
    """Arrivals in order: each request whose beginning is in the records. default: the objectives of those that have
    none of their own. since_ns: the beginning of the window."""
    seen: dict[str, _Seen] = defaultdict(_Seen)
    step_ends: dict[int, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, RequestRecord):
            seen[record.request_id].note(record)
        elif isinstance(record, AnswerRecord):
            seen[record.request_id].answer = record
        elif isinstance(record, StepRecord) and record.num_decodes:
            step_ends[record.worker].append(record.end_ns)
    for ends in step_ends.values():
        ends.sort()
    known = {request_id: request for request_id, request in seen.items() if request.arrival_ns >= 0}
    for request in known.values():
        if request.end_ns < 0 and request.first_token_ns >= 0:
            ends = step_ends[request.worker]
            request.num_output_tokens = 1 + len(ends) - bisect_right(ends, request.first_token_ns)
    num_ended = sum(request.end_ns >= 0 for request in known.values())
    more = round(sum(request.num_output_tokens for request in known.values()) / max(1, num_ended))
    found = [_arrival(request_id, request, default, since_ns, more) for request_id, request in known.items()]
    return tuple(sorted(found, key=lambda arrival: (arrival.spec.arrival_ns, arrival.request_id)))


def _arrival(request_id: str, request: _Seen, default: Slo, since_ns: int, more: int) -> Arrival:
    answer, own = request.answer, Slo()
    if answer is not None:
        own = Slo(answer.ttft_slo_ns or None, answer.tpot_slo_ns or None)
    has_ended = request.end_ns >= 0
    spec = RequestSpec(
        arrival_ns=request.arrival_ns if answer is None else answer.submitted_ns,
        # what was found in the cache need not be computed in the twin either
        prompt_tokens=max(1, request.num_prompt_tokens - request.num_cached_tokens),
        output_tokens=max(1, request.num_output_tokens + (0 if has_ended else more)),
        slo=None if own == Slo() else own,
        kind="" if answer is None else answer.service_class,
        service_class="standard" if answer is None else answer.service_class,
    )
    return Arrival(request_id, spec, own.or_else(default), has_ended and request.end_ns < since_ns)
