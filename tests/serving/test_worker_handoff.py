"""Handoffs between workers, spoken as wire messages: the make-believe model in this process first, then real ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_worker import EOS_TOKEN, FAIL_TOKEN
from wire_peers import ThreadPeer, attempt, fake_peer, hand_off

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import FirstToken, HandoffExpired, HandoffReleased, HandoffReserved, RequestAdmitted
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS
from diptych.serving.link.messages import (
    Abort,
    AskBlocks,
    Blocks,
    Delivered,
    DropAttempts,
    ForgetPeer,
    PeerForgotten,
    PrefillAttempt,
    ReleaseAttempts,
    RenewAttempts,
    ReserveAttempt,
    Stats,
    Submit,
    TransferLost,
)
from diptych.serving.worker.recorder import close_recording
from diptych.simulation.replay import replay

PROMPT = list(range(100, 300))  # six blocks and a bit: four chunks


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ThreadPeer, ThreadPeer]]:
    """A prefill worker and a decode worker; at the end nothing is left on either, and what they did can be repeated."""
    prefill, decode = fake_peer(tmp_path / "p"), fake_peer(tmp_path / "d", first_block=128)
    try:
        yield prefill, decode
        for one in (prefill, decode):
            one.stop()
            close_recording(one.core)
            one.check_empty()
        for name in ("p", "d"):
            report = replay(tmp_path / f"{name}.jsonl")
            assert report.is_identical, report.difference
            assert report.is_complete
    finally:
        prefill.close()
        decode.close()


def start(
    pair: tuple[ThreadPeer, ThreadPeer], attempt_id: str = "r", prompt: list[int] = PROMPT, **more: Any
) -> HandoffReserved:
    prefill, decode = pair
    borrowed = more.pop("borrowed", False)
    return hand_off(prefill, decode, attempt(attempt_id, prompt, **more), decode.connector.address, borrowed=borrowed)


@pytest.mark.parametrize("borrowed", [False, True])
def test_the_first_token_comes_from_the_prefill_worker_and_the_rest_from_the_decode_worker(
    pair: tuple[ThreadPeer, ThreadPeer], borrowed: bool
) -> None:
    prefill, decode = pair
    reserved = start(pair, max_tokens=6, logprobs=1, borrowed=borrowed)
    assert len(reserved.block_ids) == 7 and min(reserved.block_ids) >= 128
    prefill.wait_event(FirstToken, "r")
    assert prefill.tokens["r"] == [200]
    delivered = decode.wait(Delivered, "r")
    assert delivered.first_token == 200
    assert delivered.logprobs is not None and delivered.logprobs.token_id == 200
    assert delivered.num_bytes == (0 if borrowed else 8 * len(PROMPT))
    prefill.send(ReleaseAttempts(["r"]))
    prefill.wait_event(HandoffReleased, "r")
    end = decode.wait_end("r")
    assert decode.tokens["r"] == list(range(201, 206))
    assert end.reason is FinishReason.LENGTH
    latency = end.latency
    assert latency.num_output_tokens == 6
    assert min(latency.queue_ns, latency.prefill_ns, latency.handoff_ns, latency.decode_ns) >= 0
    assert prefill.wait_event(RequestAdmitted, "r").num_cached_tokens == 0


def test_only_what_the_decode_worker_lacks_travels_even_when_the_prefill_worker_has_it_cached(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, decode = pair
    prefill.send(Submit([attempt("warm-p", PROMPT, max_tokens=1)]))
    decode.send(Submit([attempt("warm-d", PROMPT[:64], max_tokens=1)]))
    prefill.wait_end("warm-p")
    decode.wait_end("warm-d")
    assert start(pair).num_cached_tokens == 64
    assert decode.wait(Delivered, "r").num_bytes == 8 * (len(PROMPT) - 64)
    assert prefill.wait_event(RequestAdmitted, "r").num_cached_tokens == 192
    prefill.send(ReleaseAttempts(["r"]))
    decode.wait_end("r")
    prefill.wait_event(HandoffReleased, "r")


def test_an_attempt_goes_on_after_the_tokens_that_exist_already(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    output = [200, 201, 202]
    request = attempt("r~1", PROMPT, output, max_tokens=6)
    hand_off(prefill, decode, request, decode.connector.address, borrowed=False)
    assert decode.wait(Delivered, "r~1").first_token == 203
    end = decode.wait_end("r~1")
    assert decode.tokens["r~1"] == [204, 205]
    assert (end.num_prompt_tokens, end.latency.num_output_tokens) == (203, 3)
    decode.send(Submit([attempt("w~1", PROMPT, output, max_tokens=6), attempt("x~1", PROMPT, output, max_tokens=3)]))
    assert decode.wait_end("x~1").error is not None
    decode.wait_end("w~1")
    assert decode.tokens["w~1"] == [203, 204, 205]
    prefill.send(ReleaseAttempts(["r~1"]))
    prefill.wait_event(HandoffReleased, "r~1")


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        (PROMPT, {"max_tokens": 1}, FinishReason.LENGTH),
        (PROMPT, {"stop_token_ids": [200]}, FinishReason.STOP),
        ([*PROMPT, FAIL_TOKEN], {}, FinishReason.ERROR),
    ],
)
def test_an_answer_that_ends_with_the_prefill_is_not_handed_off(
    pair: tuple[ThreadPeer, ThreadPeer], prompt: list[int], more: dict[str, Any], reason: FinishReason
) -> None:
    prefill, decode = pair
    start(pair, prompt=prompt, **more)
    assert prefill.wait_end("r").reason is reason
    assert prefill.connector.cancelled == ["r"]
    decode.send(DropAttempts(["r"]))
    assert decode.wait_end("r").reason is FinishReason.ABORT
    assert decode.connector.forgotten == ["r"]
    assert decode.first(Delivered) is None


def test_an_attempt_can_be_dropped_in_every_state(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    long = [1 + number % 50 for number in range(3000)]
    # Reserved, nothing else.
    decode.send(ReserveAttempt(attempt("reserved", PROMPT), 0, False))
    decode.wait_event(HandoffReserved, "reserved")
    decode.send(DropAttempts(["reserved"]))
    assert decode.wait_end("reserved").reason is FinishReason.ABORT
    # Before it comes, on either side.
    for one in (prefill, decode):
        one.send(DropAttempts(["early"]))
        one.wait_event(HandoffReleased, "early")
        one.events.clear()
    decode.send(ReserveAttempt(attempt("early", PROMPT), 0, False))
    prefill.send(PrefillAttempt(attempt("early", PROMPT), decode.connector.address, 0, [], 0))
    for one in (prefill, decode):
        one.wait_event(HandoffReleased, "early")
    # While it is prefilled: chunks have gone already.
    start(pair, "prefilling", long)
    prefill.wait_event(RequestAdmitted, "prefilling")
    prefill.send(DropAttempts(["prefilling"]))
    assert prefill.wait_end("prefilling").reason is FinishReason.ABORT
    assert "prefilling" in prefill.connector.cancelled
    decode.send(DropAttempts(["prefilling"]))
    decode.wait_end("prefilling")
    assert decode.connector.forgotten[-1] == "prefilling"
    # While it waits for its release, and while it decodes.
    start(pair, "decoding", max_tokens=2000)
    decode.wait(Delivered, "decoding")
    prefill.send(DropAttempts(["decoding"]))
    prefill.wait_event(HandoffReleased, "decoding")
    decode.send(DropAttempts(["decoding"]))
    assert decode.wait_end("decoding").reason is FinishReason.ABORT
    # As a client that goes away.
    start(pair, "aborted", long)
    for one in (prefill, decode):
        one.send(Abort(["aborted"]))
        one.wait_end("aborted")


def test_an_attempt_without_a_sign_of_life_expires_and_one_that_is_renewed_does_not(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, decode = pair
    lease_ns = 100 * NS_PER_MS
    decode.send(
        ReserveAttempt(attempt("lost", PROMPT), lease_ns, False), ReserveAttempt(attempt("kept", PROMPT), 10**12, False)
    )
    prefill.send(PrefillAttempt(attempt("untaken", PROMPT), decode.connector.address, 0, [], lease_ns))
    assert not decode.wait_event(HandoffExpired, "lost").is_sender
    assert prefill.wait_event(HandoffExpired, "untaken").is_sender
    decode.send(RenewAttempts(["kept", "lost"]), DropAttempts(["kept"]))
    decode.wait_end("kept")
    assert decode.connector.forgotten == ["lost", "kept"]
    assert prefill.connector.cancelled == ["untaken"]


def test_kv_that_cannot_be_moved_is_told_and_keeps_its_blocks_until_the_attempt_is_dropped(
    pair: tuple[ThreadPeer, ThreadPeer], tmp_path: Path
) -> None:
    prefill, _ = pair
    prefill.send(PrefillAttempt(attempt("nobody", PROMPT), f"unix://{tmp_path}/nobody", 0, [], 0))
    lost = prefill.wait(TransferLost, "nobody")
    assert lost.is_sender and "nobody" in lost.message
    prefill.send(PrefillAttempt(attempt("nowhere", PROMPT), "an address", 0, [], 0))
    assert "an address" in prefill.wait(TransferLost, "nowhere").message
    prefill.send(DropAttempts(["nobody", "nowhere"]))
    prefill.until(lambda: {"nobody", "nowhere"} <= {*prefill.finished, *(event.request_id for event in prefill.events)})


def test_nothing_touches_the_blocks_of_a_worker_once_it_is_forgotten(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    long = attempt("borrowing", [1 + number % 50 for number in range(3000)])
    decode.send(ReserveAttempt(long, 0, True))
    blocks = list(decode.wait_event(HandoffReserved, "borrowing").block_ids)
    prefill.send(
        PrefillAttempt(long, decode.connector.address, 0, blocks, 0, target=1), Submit([attempt("other", PROMPT)])
    )
    prefill.wait_event(RequestAdmitted, "borrowing")
    prefill.send(ForgetPeer(1))
    prefill.wait(PeerForgotten)
    assert prefill.finished["borrowing"].reason is FinishReason.ABORT  # said before
    assert prefill.wait_end("other").reason is FinishReason.LENGTH
    decode.send(DropAttempts(["borrowing"]))
    decode.wait_end("borrowing")


def test_the_prefix_cache_is_published_in_numbered_records_and_whole_when_asked(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, decode = pair
    start(pair, max_tokens=2)
    decode.wait_end("r")
    prefill.send(ReleaseAttempts(["r"]))
    for one in pair:
        one.send(AskBlocks())
        snapshot = one.until(
            lambda one=one: next((said for said in one.said if isinstance(said, Blocks) and said.is_snapshot), None)
        )
        records = [said for said in one.said if isinstance(said, Blocks) and not said.is_snapshot]
        assert [record.sequence for record in records] == list(range(1, snapshot.sequence + 1))
        assert [block for record in records for block in record.stored] == snapshot.stored
        assert snapshot.stored == list(hash_blocks(PROMPT, 32))
    assert prefill.wait(Stats).load is not None


def test_a_request_that_no_worker_can_serve_is_refused_where_it_is_reserved(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    _, decode = pair
    decode.send(ReserveAttempt(attempt("huge", [1] * 5000), 0, False))
    end = decode.wait_end("huge")
    assert end.error is not None and end.error.kind == "ContextLengthError"
    assert EOS_TOKEN == 0


@pytest.mark.parametrize("borrowed", [False, True])
def test_each_chunk_is_sent_layer_by_layer_unless_its_blocks_are_borrowed(
    pair: tuple[ThreadPeer, ThreadPeer], *, borrowed: bool
) -> None:
    prefill, decode = pair
    prefill.runner.num_layers = 3
    start(pair, borrowed=borrowed)
    decode.wait(Delivered, "r")
    assert prefill.connector.layers == ([] if borrowed else [("r", 1), ("r", 2)] * 4)
    prefill.send(ReleaseAttempts(["r"]))
    prefill.wait_event(HandoffReleased, "r")
    decode.wait_end("r")


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_step_that_nobody_wants_any_more_is_broken_off(
    pair: tuple[ThreadPeer, ThreadPeer], *, borrowed: bool
) -> None:
    prefill, decode = pair
    prefill.runner.num_layers = 20_000
    start(pair, borrowed=borrowed)
    prefill.wait_event(RequestAdmitted, "r")
    prefill.send(DropAttempts(["r"]))
    assert prefill.wait_end("r").reason is FinishReason.ABORT
    assert prefill.runner.num_layers_done < 20_000
    prefill.runner.num_layers = 1
    decode.send(DropAttempts(["r"]))
    decode.wait_end("r")
    start(pair, "next", borrowed=borrowed)
    decode.wait(Delivered, "next")
    decode.wait_end("next")
    prefill.send(ReleaseAttempts(["next"]))
    prefill.wait_event(HandoffReleased, "next")
