"""The open answers of a front end: each token reaches its client once, from the worker that the attempt is on."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.control.errors import DiptychError, ErrorRecord, OverloadedError, WorkerError
from diptych.control.events import RequestAdmitted, RequestFinished
from diptych.control.request import FinishReason, RequestOptions, SamplingParams
from diptych.control.slo import LatencyBreakdown, Slo
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.output_streams import OutputStreams
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.serving.link.messages import unpack_token_ids
from diptych.serving.metrics.serving_metrics import ServingMetrics

TOKENIZER = Tokenizer(BUNDLED_MODEL)
NO_STOPS: frozenset[str] = frozenset()
PREFILL, DECODE = 0, 1


class Open:
    """Streams with their metrics."""

    def __init__(self) -> None:
        self.metrics = ServingMetrics()
        self.streams = OutputStreams(self.metrics)

    def generation(
        self, request_id: str = "a", n: int = 1, *, options: RequestOptions | None = None, **sampling: Any
    ) -> Generation:
        """A request whose n answers are submitted; their ids are those of AsyncLLM."""
        params = SamplingParams(**{"max_tokens": 100, **sampling})
        ids = [request_id] if n == 1 else [f"{request_id}-{number}" for number in range(n)]
        answers = [
            AnswerStream(own_id, number, [1, 2, 3], params, TOKENIZER, options or RequestOptions())
            for number, own_id in enumerate(ids)
        ]
        generation = Generation(request_id, answers)
        self.streams.add(answers)
        return generation

    def answer(self, request_id: str = "a", worker: int = 0, **sampling: Any) -> AnswerStream:
        """One answer, placed on a worker."""
        [answer] = self.generation(request_id, **sampling).streams
        self.streams.on_placed(request_id, request_id, worker)
        return answer

    def tokens(self, worker: int, **token_of: int) -> list[AnswerStream]:
        """A step of a worker gave these attempts these tokens."""
        return self.streams.on_tokens(worker, StepTokens(list(token_of), list(token_of.values())), NO_STOPS)


def finished(request_id: str = "a", num_tokens: int = 3, **changes: Any) -> RequestFinished:
    fields: dict[str, Any] = {
        "reason": FinishReason.LENGTH, "num_prompt_tokens": 3, "num_cached_tokens": 0, "num_preemptions": 0,
        "latency": LatencyBreakdown(1, 1, 1, num_tokens), "slo_met": None, **changes,
    }  # fmt: skip
    return RequestFinished(9, request_id, **fields)


# -- whose tokens count -----------------------------------------------------------------------------------------------


def test_tokens_go_to_the_answers_of_their_attempts() -> None:
    open_ = Open()
    first, second = open_.answer("a"), open_.answer("b")
    open_.tokens(0, a=10, b=20)
    open_.tokens(0, b=21)
    assert (first.token_ids, second.token_ids) == ([10], [20, 21])
    assert open_.metrics.num_generated_tokens == 3
    assert open_.streams.num_awaiting_first_token == 0
    assert open_.streams.progress() == {"a": 1, "b": 2}


def test_what_an_older_attempt_or_another_worker_says_goes_nowhere() -> None:
    open_ = Open()
    answer = open_.answer("a", worker=0)
    open_.tokens(0, a=10)
    open_.tokens(1, a=66)
    open_.streams.on_restarted("a", "a~1")
    open_.tokens(0, a=67)
    open_.streams.on_placed("a", "a~1", 1)
    open_.tokens(0, **{"a": 68, "a~1": 69})
    open_.tokens(1, **{"a": 70, "a~1": 11})
    assert answer.token_ids == [10, 11]
    assert open_.metrics.num_generated_tokens == 2


@given(st.lists(st.tuples(st.sampled_from(["token", "restart"]), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_an_answer_holds_exactly_what_its_own_attempt_said_on_its_own_worker(
    happened: Sequence[tuple[str, int, int]],
) -> None:
    open_ = Open()
    answer = open_.answer("a", worker=0)
    worker_now, epoch_now, wanted = 0, 0, []
    for at, (what, worker, epoch) in enumerate(happened):
        if what == "restart":
            worker_now, epoch_now = worker, epoch_now + 1
            open_.streams.on_restarted("a", f"a~{epoch_now}")
            open_.streams.on_placed("a", f"a~{epoch_now}", worker)
        else:
            open_.tokens(worker, **{f"a~{epoch}" if epoch else "a": at})
            if (worker, epoch) == (worker_now, epoch_now):
                wanted.append(at)
    assert answer.token_ids == wanted
    assert open_.metrics.num_generated_tokens == len(wanted)


def test_an_attempt_begins_with_what_the_client_has() -> None:
    open_ = Open()
    open_.answer("a", stop=("x",), temperature=0.5)
    open_.tokens(0, a=10)
    open_.tokens(0, a=11)
    wire = open_.streams.attempt_tokens("a")
    assert wire is not None
    assert (unpack_token_ids(wire.prompt), unpack_token_ids(wire.output)) == ([1, 2, 3], [10, 11])
    assert (wire.sampling.temperature, wire.sampling.stop) == (0.5, ())  # stop strings are the front end's business
    assert open_.streams.attempt_tokens("b") is None


def test_cached_tokens_are_those_of_the_first_admission_at_the_worker_that_feeds() -> None:
    open_ = Open()
    answer = open_.answer("a", worker=1)
    open_.streams.on_events(0, [RequestAdmitted(1, "a", 64, True)])
    open_.streams.on_events(1, [RequestAdmitted(1, "a", 96, False)])
    assert answer.cached_tokens == 0
    open_.streams.on_events(1, [RequestAdmitted(1, "a", 32, True)])
    open_.tokens(1, a=5)
    open_.streams.on_events(1, [RequestAdmitted(2, "a", 96, True)])
    assert answer.cached_tokens == 32


def test_a_request_is_admitted_when_the_worker_that_feeds_it_begins_with_one_of_its_prompts() -> None:
    open_ = Open()
    generation = open_.generation("a", n=2)
    for number, attempt_id in enumerate(("a-0", "a-1")):
        open_.streams.on_placed(attempt_id, attempt_id, number)
    open_.streams.on_events(0, [RequestAdmitted(1, "a-1", 0, True), RequestAdmitted(1, "z", 0, True)])
    assert not generation.is_admitted
    open_.streams.on_events(1, [RequestAdmitted(1, "a-1", 0, True)])
    assert generation.is_admitted


# -- a decode worker takes over ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reported", [True, False], ids=["reported before", "comes with the commit"])
def test_the_first_token_of_a_handoff_counts_once_whoever_says_it_first(is_reported: bool) -> None:
    open_ = Open()
    answer = open_.answer("a", worker=PREFILL, logprobs=0)
    if is_reported:
        tokens = StepTokens(["a"], [10], {0: TokenLogprobs(10, -1.0)})
        open_.streams.on_tokens(PREFILL, tokens, NO_STOPS)
    completed = open_.streams.on_delivered(DECODE, "a", 10, TokenLogprobs(10, -1.0))
    assert completed is not None and completed.sender == PREFILL
    assert (completed.exposed_s > 0) == is_reported
    open_.tokens(PREFILL, a=66)  # it speaks too late
    open_.tokens(DECODE, a=11)
    assert answer.token_ids == [10, 11]
    assert answer.take().logprobs == [TokenLogprobs(10, -1.0)]


def test_the_first_token_after_a_retry_is_news_although_the_client_has_tokens() -> None:
    open_ = Open()
    answer = open_.answer("a", worker=PREFILL)
    open_.tokens(PREFILL, a=10)
    open_.streams.on_placed("a", "a~1", PREFILL)
    assert open_.streams.on_delivered(DECODE, "a~1", 11, None) is not None
    assert answer.token_ids == [10, 11]
    assert open_.streams.on_delivered(DECODE, "a", 99, None) is None  # the older attempt feeds nothing
    assert answer.token_ids == [10, 11]


def test_a_first_token_that_completes_a_stop_string_is_told_with_the_takeover() -> None:
    open_ = Open()
    [token_id] = TOKENIZER.encode("=", add_special_tokens=False)
    answer = open_.answer("a", worker=PREFILL, stop=("=",))
    completed = open_.streams.on_delivered(DECODE, "a", token_id, None)
    assert completed is not None and completed.stopped == [answer]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_an_end_gives_the_account_and_forgets_the_request() -> None:
    open_ = Open()
    answer = open_.answer("a")
    open_.tokens(0, a=10)
    assert not open_.streams.idle.is_set()
    assert open_.streams.on_end("a", finished(num_cached_tokens=2), None) is None
    assert (answer.finish_reason, answer.cached_tokens) == ("length", 2)
    assert answer.generation.num_open == 0 and not answer.generation.is_exhausted
    assert "a" not in open_.streams and len(open_.streams) == 0 and open_.streams.idle.is_set()
    assert open_.streams.on_end("a", finished(), None) is None  # a second one is of no request
    assert open_.metrics.num_ended[FinishReason.LENGTH] == 1
    open_.tokens(0, a=11)
    assert answer.token_ids == [10]


def test_an_account_with_an_error_fails_the_generation_with_that_error() -> None:
    open_ = Open()
    answer = open_.answer("a")
    record = ErrorRecord.of(WorkerError("the model failed"))
    failed = open_.streams.on_end("a", finished(reason=FinishReason.ERROR, error=record), None)
    assert failed is answer.generation and failed.has_failed
    assert open_.metrics.num_ended[FinishReason.ERROR] == 1
    assert open_.streams.num_awaiting_first_token == 0


@pytest.mark.parametrize(
    ("slo", "error", "counts"),
    [
        (None, WorkerError("lost"), 0),
        (Slo(ttft_ns=1), WorkerError("lost"), 1),
        (Slo(ttft_ns=1), OverloadedError("full"), 0),  # refused as at the door: it was never begun
    ],
)
def test_an_objective_counts_as_missed_by_what_was_begun_and_failed(
    slo: Slo | None, error: DiptychError, counts: int
) -> None:
    open_ = Open()
    open_.generation("a", options=RequestOptions(slo=slo))
    open_.streams.on_end("a", None, error)
    assert (open_.metrics.num_with_slo, open_.metrics.num_meeting_slo) == (counts, 0)


def test_without_an_account_and_without_an_error_the_client_gets_an_error() -> None:
    open_ = Open()
    answer = open_.answer("a")
    assert open_.streams.on_end("a", None, None) is answer.generation
    assert answer.generation.has_failed


def test_abandon_gives_back_what_is_still_open_of_a_request_with_several_answers() -> None:
    open_ = Open()
    generation, other = open_.generation("a", n=3), open_.answer("b")
    open_.streams.on_placed("a-0", "a-0", 0)
    open_.streams.on_placed("a-1", "a-1", 0)
    open_.tokens(0, **{"a-0": 10, "a-1": 20, "b": 30})
    open_.streams.on_end("a-0", finished("a-0"), None)
    assert [answer.request_id for answer in open_.streams.abandon(generation)] == ["a-1", "a-2"]
    assert open_.metrics.num_ended[FinishReason.ABORT] == 2
    assert open_.streams.abandon(generation) == []
    assert open_.metrics.num_ended[FinishReason.ABORT] == 2
    open_.tokens(0, **{"a-1": 21, "b": 31})
    assert (generation.streams[1].token_ids, other.token_ids) == ([20], [30, 31])
    assert (len(open_.streams), open_.streams.num_awaiting_first_token) == (1, 0)


def test_fail_all_ends_everything_with_the_error() -> None:
    open_ = Open()
    generations = [open_.generation("a", n=2), open_.generation("b")]
    open_.streams.fail_all(WorkerError("over"))
    assert all(generation.has_failed for generation in generations)
    assert (len(open_.streams), open_.streams.num_awaiting_first_token, open_.streams.idle.is_set()) == (0, 0, True)


# -- an answer whose text fails ---------------------------------------------------------------------------------------


class BrokenDetokenizer:
    """Fails on one token."""

    def push(self, token_id: int) -> str:
        if token_id == 13:
            raise ValueError("no text for 13")
        return "x"

    def flush(self) -> str:
        return ""


class BrokenTokenizer(Tokenizer):
    """The tokenizer of a model whose text fails."""

    def detokenizer(  # type: ignore[override]
        self, prompt_token_ids: Sequence[int], shown: Mapping[int, str] = {}
    ) -> BrokenDetokenizer:
        return BrokenDetokenizer()


def test_a_text_that_fails_costs_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    open_ = Open()
    broken = AnswerStream("bad", 0, [1], SamplingParams(max_tokens=9), BrokenTokenizer(BUNDLED_MODEL))
    generation = Generation("bad", [broken])
    open_.streams.add([broken])
    open_.streams.on_placed("bad", "bad", 0)
    good = open_.answer("good")
    assert open_.tokens(0, bad=1, good=2) == []
    assert open_.tokens(0, bad=13, good=3) == [broken]
    assert generation.has_failed and not good.generation.has_failed
    assert good.token_ids == [2, 3]
    assert "no text for 13" in caplog.text


# -- who is woken -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_reader_is_told_once_per_report_and_only_when_there_is_something() -> None:
    open_ = Open()
    told: list[list[int]] = []
    generation = open_.answer("a").generation

    def on_new() -> bool:
        told.append([token_id for delta in generation.take() for token_id in delta.token_ids])
        return True

    reader = asyncio.create_task(generation.read(on_new))
    await asyncio.sleep(0)
    open_.streams.deliver()
    assert told == []
    open_.tokens(0, a=10)
    open_.tokens(0, a=11)
    assert told == []
    open_.streams.deliver()
    open_.streams.deliver()
    assert told == [[10, 11]]
    open_.streams.on_end("a", finished(), None)
    open_.streams.deliver()
    [delta] = await reader  # the end goes to ``read``
    assert (delta.token_ids, delta.finish_reason) == ([], "length")
    assert generation.is_exhausted


def test_an_answer_that_ends_leaves_what_the_front_end_saw_of_it() -> None:
    opened = Open()
    slo = Slo(10**9, 10**8)
    opened.generation(options=RequestOptions(slo=slo, service_class="batch"))
    opened.streams.on_placed("a", "a", 1)
    opened.tokens(1, a=5)
    opened.tokens(1, a=6)
    record = opened.streams.answer_of("a", finished(num_tokens=2), 10**15)
    assert record is not None
    assert (record.worker, record.num_prompt_tokens, record.num_output_tokens) == (1, 3, 2)
    assert (record.ttft_slo_ns, record.tpot_slo_ns, record.service_class) == (slo.ttft_ns, slo.tpot_ns, "batch")
    assert 0 < record.submitted_ns <= record.first_token_ns <= record.last_token_ns
    assert opened.streams.answer_of("b", None, 0) is None


def test_tokens_that_nobody_reads_are_counted_as_unread() -> None:
    opened = Open()
    generation = opened.generation()
    opened.streams.on_placed("a", "a", 0)
    opened.tokens(0, a=5)
    opened.streams.deliver()  # its reader is busy, with a client that does not read
    assert generation.unread_ns == 0
    generation.take()
    assert generation.unread_ns > 0
    before = generation.unread_ns
    generation.take()
    assert generation.unread_ns == before
