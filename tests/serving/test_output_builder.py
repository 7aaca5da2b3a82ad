"""From deltas to the growing output that users of the library read."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Generation
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.serving.output_builder import OutputBuilder, request_metrics
from diptych.serving.outputs import Logprob

TOKENIZER = Tokenizer(BUNDLED_MODEL)


def generation(n: int = 1, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Generation:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    return Generation("a", [AnswerStream(f"a-{at}", at, list(prompt), params, TOKENIZER) for at in range(n)])


def push(stream: AnswerStream, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
    stream.push(token_id, logprobs=logprobs)
    stream.mark()


def end(stream: AnswerStream, total_ns: int = 3, *, slo_met: bool | None = None, num_preemptions: int = 0) -> None:
    latency = LatencyBreakdown(1, 1, total_ns - 2, stream.num_tokens)
    stream.end(RequestFinished(9, stream.request_id, FinishReason.LENGTH, 3, 2, num_preemptions, latency, slo_met))
    stream.mark()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(3, 4000), st.booleans()), max_size=40))
def test_whatever_the_looks_in_between_the_last_output_is_the_same(
    happened: Sequence[tuple[int, int, bool]],
) -> None:
    often, once = generation(3), generation(3)
    builders = [OutputBuilder(each, "text", TOKENIZER) for each in (often, once)]
    lengths = [0, 0, 0]
    for index, token_id, looks in happened:
        for each in (often, once):
            push(each.streams[index], token_id)
        if looks:
            builders[0].add(often.take())
            grown = [len(output.token_ids) for output in builders[0].output().outputs]
            assert all(new >= old for new, old in zip(grown, lengths, strict=True)), "an output that shrinks"
            lengths = grown
    for builder in builders:
        for stream in builder.generation.streams:
            end(stream)
        builder.add(builder.generation.take())
    first, second = (builder.output() for builder in builders)
    assert first == second
    for index, output in enumerate(first.outputs):
        token_ids = [token_id for at, token_id, _ in happened if at == index]
        assert (output.token_ids, output.finish_reason) == (token_ids, "length")


def test_an_output_that_was_given_away_does_not_change_any_more() -> None:
    source = generation(logprobs=0)
    builder = OutputBuilder(source, None, TOKENIZER)
    push(source.streams[0], 100, TokenLogprobs(100, -1.0))
    builder.add(source.take())
    early = builder.output()
    push(source.streams[0], 101, TokenLogprobs(101, -1.0))
    builder.add(source.take())
    assert early.outputs[0].token_ids == [100]
    assert early.outputs[0].logprobs is not None and len(early.outputs[0].logprobs) == 1
    assert builder.output().outputs[0].token_ids == [100, 101]


def test_logprobs_hold_the_best_with_their_ranks_and_the_token_itself_wherever_it_is() -> None:
    source = generation(logprobs=2)
    builder = OutputBuilder(source, None, TOKENIZER)
    push(source.streams[0], 300, TokenLogprobs(300, -4.0, ((301, -0.1), (302, -2.0))))
    push(source.streams[0], 301, TokenLogprobs(301, -0.1, ((301, -0.1), (302, -2.0))))
    builder.add(source.take())
    text = TOKENIZER.token_text
    best = {301: Logprob(-0.1, 1, text(301)), 302: Logprob(-2.0, 2, text(302))}
    assert builder.output().outputs[0].logprobs == [{**best, 300: Logprob(-4.0, None, text(300))}, best]


def test_without_logprobs_there_are_none_rather_than_an_empty_list() -> None:
    source = generation()
    builder = OutputBuilder(source, None, TOKENIZER)
    push(source.streams[0], 100)
    builder.add(source.take())
    output = builder.output()
    assert output.outputs[0].logprobs is None and output.prompt_logprobs is None


def test_prompt_logprobs_begin_with_none_for_the_first_token() -> None:
    source = generation(prompt_logprobs=0)
    source.streams[0].add_prompt_logprobs(1, [TokenLogprobs(2, -1.0), TokenLogprobs(3, -2.0)])
    rows = OutputBuilder(source, None, TOKENIZER).output().prompt_logprobs
    assert rows is not None and rows[0] is None
    assert [next(iter(row)) for row in rows[1:] if row is not None] == [2, 3]


def test_a_request_is_finished_when_all_its_answers_are_and_only_then_has_metrics() -> None:
    source = generation(2)
    builder = OutputBuilder(source, "the prompt", TOKENIZER)
    first, second = source.streams
    push(first, 100)
    end(first, total_ns=50, slo_met=True, num_preemptions=1)
    builder.add(source.take())
    half = builder.output()
    assert (half.finished, half.metrics, half.outputs[0].finished, half.outputs[1].finished) == (
        False, None, True, False,
    )  # fmt: skip
    end(second, total_ns=90, slo_met=False, num_preemptions=2)
    builder.add(source.take())
    whole = builder.output()
    assert (whole.finished, whole.prompt, whole.num_cached_tokens) == (True, "the prompt", 2)
    assert whole.metrics is not None
    assert whole.metrics.latency.total_ns == 90  # the slowest
    assert (whole.metrics.num_preemptions, whole.metrics.slo_met) == (3, False)
    parts = whole.metrics.queue_s + whole.metrics.prefill_s + whole.metrics.decode_s
    assert abs(parts - whole.metrics.total_s) < 1e-12


def test_an_objective_counts_as_met_when_all_answers_that_had_one_met_it() -> None:
    source = generation(2)
    end(source.streams[0], slo_met=True)
    end(source.streams[1], slo_met=None)
    metrics = request_metrics(source.streams)
    assert metrics is not None and metrics.slo_met is True
    assert request_metrics(generation().streams) is None


def test_a_stop_reason_is_said_with_the_end() -> None:
    [equals] = TOKENIZER.encode("=", add_special_tokens=False)
    source = generation(stop=("=",))
    builder = OutputBuilder(source, None, TOKENIZER)
    push(source.streams[0], equals)
    builder.add(source.take())
    assert builder.output().outputs[0].stop_reason is None
    end(source.streams[0])
    builder.add(source.take())
    output = builder.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "=")
