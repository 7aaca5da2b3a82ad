"""The messages between a front end and its workers: whatever control says survives, and garbage does not get in."""

import random
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from diptych.control import errors
from diptych.control.commands import Prefill, Serve, WorkerCommand
from diptych.control.config import SchedulerConfig, shape_preset
from diptych.control.engine.reports import EngineStats, LoadReport
from diptych.control.events import EVENT_CLASSES, Event, FirstToken, StepFinished
from diptych.control.request import FinishReason, PeerRun, RequestOptions, SamplingParams
from diptych.control.slo import LatencyBreakdown, Slo
from diptych.control.step import StepTokens, TokenLogprobs, VerifyResult
from diptych.serving.link import messages as wire

OPTIONS = RequestOptions(
    priority=-2, slo=Slo(5, None), service_class="batch", tenant="key", deadline_ns=7, cache_salt="salt",
    metadata={"job": "night"},
)  # fmt: skip


def value_of(kind: Any, rng: random.Random) -> Any:
    """Any value of a field's type."""
    if kind is int:
        return rng.randrange(10**12)
    if kind is bool:
        return rng.random() < 0.5
    if kind is str:
        return f"text-{rng.randrange(100)}"
    if kind is bytes:
        return rng.randbytes(8)
    if kind is FinishReason:
        return rng.choice(list(FinishReason))
    if is_dataclass(kind):
        return made(kind, rng)
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return rng.choice(arguments)
    if getattr(kind, "__origin__", None) is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(value_of(arguments[0], rng) for _ in range(rng.randrange(3)))
        return tuple(value_of(part, rng) for part in arguments)
    return value_of(rng.choice(arguments), rng) if arguments else None


def made(kind: Any, rng: random.Random) -> Any:
    """An instance of a dataclass with any values."""
    hints = get_type_hints(kind)
    if kind is RequestOptions:
        return OPTIONS
    if kind is SchedulerConfig:
        return shape_preset(rng.choice(["unified", "chunked"]), max_num_seqs=rng.randrange(1, 256))
    return kind(**{field.name: value_of(hints[field.name], rng) for field in fields(kind)})


def reported(*events: Event, **more: Any) -> wire.StepReport:
    back = wire.decode_from_worker(wire.encode(wire.StepReport(wire.pack_events(events), **more)))
    assert isinstance(back, wire.StepReport)
    return back


@pytest.mark.parametrize("kind", EVENT_CLASSES.values(), ids=lambda kind: kind.__name__)
def test_every_event_of_control_arrives_as_it_was(kind: type[Event]) -> None:
    rng = random.Random(1)
    events = [made(kind, rng) for _ in range(20)]
    assert wire.unpack_events(reported(*events).events) == events


@pytest.mark.parametrize("kind", get_args(WorkerCommand), ids=lambda kind: kind.__name__)
def test_every_command_of_control_arrives_as_it_was(kind: type[WorkerCommand]) -> None:
    rng = random.Random(2)
    for _ in range(20):
        command = made(kind, rng)
        back = wire.decode_from_frontend(wire.encode(wire.Orders([wire.Order(wire.pack_command(command))])))
        assert isinstance(back, wire.Orders)
        assert wire.unpack_command(back.orders[0].command) == command


def test_the_tokens_of_an_attempt_arrive_with_all_that_was_asked_for() -> None:
    sampling = SamplingParams(
        max_tokens=7, min_tokens=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, logit_bias={5: -1.5},
        stop_token_ids=(1, 2), seed=-3, logprobs=2,
    )  # fmt: skip
    tokens = wire.AttemptTokens(wire.pack_token_ids([0, 1, 2**32 - 1]), sampling, wire.pack_token_ids([9]), OPTIONS)
    serve = Serve(0, "a", "a", 1, PeerRun(3, 5, 70))
    order = wire.Order(wire.pack_command(serve), tokens)
    back = wire.decode_from_frontend(wire.encode(wire.Orders([order])))
    assert isinstance(back, wire.Orders)
    assert wire.unpack_command(back.orders[0].command) == serve
    got = back.orders[0].tokens
    assert got is not None and got.options == OPTIONS
    assert asdict(got.sampling) == asdict(sampling)
    assert wire.unpack_token_ids(got.prompt) == [0, 1, 2**32 - 1]
    assert wire.unpack_token_ids(got.output) == [9]


def test_a_report_arrives_with_its_tokens_and_numbers() -> None:
    row = TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.0)))
    tokens = StepTokens(["a", "b", "b"], [3, 4, 5], {0: row}, {"a": (1, [row])})
    load = LoadReport(1, 2, 3, 4, 5.0, 6.0)
    step = StepFinished(1, 2, 3, (("a", 0, 5),), 4, 5, 6, extra=(VerifyResult("b", 3, 1),))
    first_tokens = {"c": (5, row), "d": (6, None)}
    report = reported(
        step, FirstToken(9, "a"), tokens=tokens, first_tokens=first_tokens, load=load, stats=EngineStats(1)
    )
    assert wire.unpack_events(report.events) == [step, FirstToken(9, "a")]
    assert (report.tokens, report.load, report.stats) == (tokens, load, EngineStats(1))
    assert report.first_tokens == first_tokens


@pytest.mark.parametrize("kind", [errors.OverloadedError, errors.ContextLengthError, errors.WorkerError])
def test_errors_keep_their_class_and_status(kind: type[errors.DiptychError]) -> None:
    record = errors.ErrorRecord.of(kind("why"))
    back = wire.decode_from_worker(wire.encode(wire.Failed(record)))
    assert isinstance(back, wire.Failed)
    error = back.error.exception()
    assert type(error) is kind
    assert (error.message, error.status) == ("why", kind.status)


def test_an_unknown_error_becomes_a_worker_error() -> None:
    assert isinstance(errors.ErrorRecord("SystemExit", "no").exception(), errors.WorkerError)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x91\xa3foo", b"\x80\x04\x95", wire.encode(wire.Loading("x"))])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_frontend(data)


def test_a_command_with_wrong_fields_is_refused() -> None:
    name, _ = wire.pack_command(Prefill(0, "a", "a", 0, 1, 0, (), 0))
    with pytest.raises(msgspec.ValidationError):
        wire.unpack_command((name, {"worker": "first"}))
    with pytest.raises(KeyError):
        wire.unpack_command(("Explode", {}))


def test_latency_parts_survive_as_integers() -> None:
    latency = LatencyBreakdown(2**53 + 1, 2, 3, 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(latency), type=LatencyBreakdown) == latency
