"""The messages survive the wire, and nothing else does."""

from dataclasses import asdict

import msgspec
import pytest

from diptych.control import errors
from diptych.control.events import BlocksStored, FirstToken, StepFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.slo import LatencyBreakdown, Slo
from diptych.serving.link import messages as wire


def test_a_request_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(max_tokens=7, logit_bias={5: -1.5}, stop_token_ids=(1, 2), seed=-3, logprobs=2)
    request = wire.WireRequest("a", wire.pack_tokens([0, 1, 2**32 - 1]), sampling, -2, Slo(5, None), "salt")
    message = wire.decode_from_frontend(wire.encode(wire.Submit([request])))
    assert message == wire.Submit([request])
    assert isinstance(message, wire.Submit)
    assert wire.unpack_tokens(message.requests[0].prompt) == [0, 1, 2**32 - 1]


def test_a_step_record_arrives_as_it_was_sent() -> None:
    latency = LatencyBreakdown(1, 2, 3, 4)
    failure = wire.pack_error(errors.ContextLengthError("too long", param="prompt"))
    ends = [wire.Finished("b", FinishReason.ERROR, 1, 2, 3, latency, None, failure)]
    row = wire.TokenLogprobs(3, -0.5, [(3, -0.5), (4, -1.0)])
    tokens = wire.Tokens(["a", "b"], [3, 4], ends, {"a": 32}, {"a": row}, {"a": (1, [row])})
    assert wire.decode_from_worker(wire.encode(tokens)) == tokens


def test_events_keep_their_classes_and_block_events_stay_home() -> None:
    step = StepFinished(1, 2, 3, (("a", 0, 5),), 4, 5, 6)
    packed = wire.pack_events([step, BlocksStored(1, (b"x",)), FirstToken(9, "a")])
    stats = wire.decode_from_worker(wire.encode(wire.Stats({"num_waiting": 1}, packed)))
    assert isinstance(stats, wire.Stats)
    assert wire.unpack_events(stats.events) == [step, FirstToken(9, "a")]


@pytest.mark.parametrize("kind", [errors.OverloadedError, errors.ContextLengthError, errors.WorkerError])
def test_errors_keep_their_class_and_status(kind: type[errors.DiptychError]) -> None:
    back = wire.unpack_error(wire.pack_error(kind("why")))
    assert type(back) is kind
    assert (back.message, back.status) == ("why", kind.status)


def test_an_unknown_error_becomes_a_worker_error() -> None:
    assert isinstance(wire.unpack_error(wire.WireError("SystemExit", "no")), errors.WorkerError)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x91\xa3foo", b"\x80\x04\x95", wire.encode(wire.Loading("x"))])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_frontend(data)


def test_sampling_params_cross_the_wire_whole() -> None:
    sampling = SamplingParams(max_tokens=3, min_tokens=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1)
    request = wire.WireRequest("a", b"", sampling)
    back = wire.decode_from_frontend(wire.encode(wire.Submit([request])))
    assert isinstance(back, wire.Submit)
    assert asdict(back.requests[0].sampling) == asdict(sampling)
