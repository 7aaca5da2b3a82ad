"""Handoffs between workers, ordered one by one: the make-believe model in this process first, then real ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FAIL_TOKEN
from worker_peers import ThreadPeer, attempt, fake_peer, hand_off

from diptych.control.commands import Resize
from diptych.control.compute_share import ComputeShare
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import (
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestAdmitted,
    Resized,
    TransferFailed,
)
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS
from diptych.simulation.replay import replay

PROMPT = list(range(100, 300))  # six blocks and a bit: four chunks


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ThreadPeer, ThreadPeer]]:
    """A prefill worker and a decode worker; at the end nothing is left on either, and what they did can be repeated."""
    prefill, decode = fake_peer(tmp_path / "p"), fake_peer(tmp_path / "d", first_block=128)
    try:
        yield prefill, decode
        for peer in (prefill, decode):
            peer.stop()
            peer.check_empty()
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
    return hand_off(prefill, decode, attempt(attempt_id, prompt, **more), borrowed=borrowed)


@pytest.mark.parametrize("borrowed", [False, True])
def test_the_first_token_comes_from_the_prefill_worker_and_the_rest_from_the_decode_worker(
    pair: tuple[ThreadPeer, ThreadPeer], borrowed: bool
) -> None:
    prefill, decode = pair
    reserved = start(pair, max_tokens=6, logprobs=1, borrowed=borrowed)
    (blocks,) = reserved.block_tables
    assert len(blocks) == 7 and min(blocks) >= 128
    prefill.wait_event(FirstToken, "r")
    assert prefill.tokens["r"] == [200]
    delivered = decode.wait_event(HandoffDelivered, "r")
    first_token, logprobs = decode.first_tokens["r"]
    assert first_token == 200
    assert logprobs is not None and logprobs.token_id == 200
    assert delivered.num_bytes == (0 if borrowed else 8 * len(PROMPT))
    prefill.release("r")
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
    prefill.serve(attempt("warm-p", PROMPT, max_tokens=1))
    decode.serve(attempt("warm-d", PROMPT[:64], max_tokens=1))
    prefill.wait_end("warm-p")
    decode.wait_end("warm-d")
    assert start(pair).num_cached_tokens == 64
    assert decode.wait_event(HandoffDelivered, "r").num_bytes == 8 * (len(PROMPT) - 64)
    assert prefill.wait_event(RequestAdmitted, "r").num_cached_tokens == 192
    prefill.release("r")
    decode.wait_end("r")
    prefill.wait_event(HandoffReleased, "r")


def test_an_attempt_goes_on_after_the_tokens_that_exist_already(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    output = [200, 201, 202]
    request = attempt("r~1", PROMPT, output, max_tokens=6)
    hand_off(prefill, decode, request, borrowed=False)
    decode.wait_event(HandoffDelivered, "r~1")
    assert decode.first_tokens["r~1"][0] == 203
    end = decode.wait_end("r~1")
    assert decode.tokens["r~1"] == [204, 205]
    assert (end.num_prompt_tokens, end.latency.num_output_tokens) == (203, 3)
    decode.serve(attempt("w~1", PROMPT, output, max_tokens=6), attempt("x~1", PROMPT, output, max_tokens=3))
    assert decode.wait_end("x~1").error is not None
    decode.wait_end("w~1")
    assert decode.tokens["w~1"] == [203, 204, 205]
    prefill.release("r~1")
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
    decode.drop("r")
    assert decode.wait_end("r").reason is FinishReason.ABORT
    assert decode.connector.forgotten == ["r"]
    assert not decode.of_kind(HandoffDelivered)


def test_an_attempt_can_be_dropped_in_every_state(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    long = [1 + number % 50 for number in range(3000)]
    # Reserved, nothing else.
    decode.reserve(attempt("reserved", PROMPT))
    decode.wait_event(HandoffReserved, "reserved")
    decode.drop("reserved")
    assert decode.wait_end("reserved").reason is FinishReason.ABORT
    # Before it comes, on either side.
    for peer in (prefill, decode):
        peer.drop("early")
        peer.wait_event(HandoffReleased, "early")
        peer.events.clear()
    decode.reserve(attempt("early", PROMPT))
    prefill.prefill(attempt("early", PROMPT), decode.address)
    for peer in (prefill, decode):
        peer.wait_event(HandoffReleased, "early")
    # While it is prefilled: chunks have gone already.
    start(pair, "prefilling", long)
    prefill.wait_event(RequestAdmitted, "prefilling")
    prefill.drop("prefilling")
    assert prefill.wait_end("prefilling").reason is FinishReason.ABORT
    assert "prefilling" in prefill.connector.cancelled
    decode.drop("prefilling")
    decode.wait_end("prefilling")
    assert decode.connector.forgotten[-1] == "prefilling"
    # While it waits for its release, and while it decodes.
    start(pair, "decoding", max_tokens=2000)
    decode.wait_event(HandoffDelivered, "decoding")
    prefill.drop("decoding")
    prefill.wait_event(HandoffReleased, "decoding")
    decode.drop("decoding")
    assert decode.wait_end("decoding").reason is FinishReason.ABORT
    # As a client that goes away.
    start(pair, "aborted", long)
    for peer in (prefill, decode):
        peer.drop("aborted", FinishReason.STOP)
        peer.until(lambda peer=peer: peer.has_let_go("aborted"))


def test_an_attempt_without_a_sign_of_life_expires_and_one_that_is_renewed_does_not(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, decode = pair
    lease_ns = 100 * NS_PER_MS
    decode.reserve(attempt("lost", PROMPT), lease_ns)
    decode.reserve(attempt("kept", PROMPT), 10**12)
    prefill.prefill(attempt("untaken", PROMPT), decode.address, lease_ns=lease_ns)
    assert not decode.wait_event(HandoffExpired, "lost").is_sender
    assert prefill.wait_event(HandoffExpired, "untaken").is_sender
    decode.renew("kept", "lost")
    decode.drop("kept")
    decode.wait_end("kept")
    assert decode.connector.forgotten == ["lost", "kept"]
    assert prefill.connector.cancelled == ["untaken"]


def test_kv_that_cannot_be_moved_is_told_and_keeps_its_blocks_until_the_attempt_is_dropped(
    pair: tuple[ThreadPeer, ThreadPeer], tmp_path: Path
) -> None:
    prefill, _ = pair
    prefill.prefill(attempt("nobody", PROMPT), f"unix://{tmp_path}/nobody")
    lost = prefill.wait_event(TransferFailed, "nobody")
    assert lost.is_sender and "nobody" in lost.message
    prefill.prefill(attempt("nowhere", PROMPT), "an address")
    assert "an address" in prefill.wait_event(TransferFailed, "nowhere").message
    for name in ("nobody", "nowhere"):
        prefill.drop(name)
        prefill.until(lambda name=name: prefill.has_let_go(name))


def test_nothing_touches_the_blocks_of_a_worker_once_it_is_forgotten(pair: tuple[ThreadPeer, ThreadPeer]) -> None:
    prefill, decode = pair
    long = attempt("borrowing", [1 + number % 50 for number in range(3000)])
    decode.reserve(long, borrowed=True)
    tables = decode.wait_event(HandoffReserved, "borrowing").block_tables
    prefill.prefill(long, decode.address, 0, tables, target=1)
    prefill.serve(attempt("other", PROMPT))
    prefill.wait_event(RequestAdmitted, "borrowing")
    prefill.forget_peer(1)
    prefill.until(lambda: prefill.of_kind(PeerForgotten))
    assert prefill.finished["borrowing"].reason is FinishReason.ABORT  # said before
    assert prefill.wait_end("other").reason is FinishReason.LENGTH
    decode.drop("borrowing")
    decode.wait_end("borrowing")


def test_a_worker_says_what_it_computes_on_from_now_on_and_goes_on(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, _ = pair
    prefill.serve(attempt("before", PROMPT))
    prefill.wait_end("before")
    prefill.order(Resize(0, ComputeShare((0,), 1)))
    prefill.order(Resize(0, ComputeShare((7,), 1)))
    taken, refused = prefill.until(lambda: prefill.of_kind(Resized) if len(prefill.of_kind(Resized)) == 2 else None)
    assert (taken.share, taken.message) == (ComputeShare((0,), 1), "")
    assert (refused.share, refused.message) == (taken.share, "cores is (7,); there are four")
    prefill.serve(attempt("after", PROMPT))
    assert prefill.wait_end("after").reason is FinishReason.LENGTH


def test_changes_of_the_prefix_cache_are_reported_with_numbers_and_all_of_it_when_asked(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    prefill, decode = pair
    start(pair, max_tokens=2)
    decode.wait_end("r")
    prefill.release("r")
    for peer in pair:
        peer.ask_snapshot()
        (snapshot,) = peer.until(lambda peer=peer: peer.of_kind(KVSnapshot))
        changes = peer.of_kind(KVEvents)
        assert [change.sequence for change in changes] == list(range(1, snapshot.sequence + 1))
        assert [block for change in changes for block in change.stored] == list(snapshot.hashes)
        assert list(snapshot.hashes) == list(hash_blocks(PROMPT, 32))
    assert prefill.until(lambda: prefill.loads)


def test_a_request_that_no_worker_can_serve_is_refused_where_it_is_reserved(
    pair: tuple[ThreadPeer, ThreadPeer],
) -> None:
    _, decode = pair
    decode.reserve(attempt("huge", [1] * 5000))
    end = decode.wait_end("huge")
    assert end.error is not None and end.error.kind == "ContextLengthError"


@pytest.mark.parametrize("borrowed", [False, True])
def test_each_chunk_is_sent_layer_by_layer_unless_its_blocks_are_borrowed(
    pair: tuple[ThreadPeer, ThreadPeer], *, borrowed: bool
) -> None:
    prefill, decode = pair
    prefill.runner.num_layers = 3
    start(pair, borrowed=borrowed)
    decode.wait_event(HandoffDelivered, "r")
    assert prefill.connector.layers == ([] if borrowed else [("r", 1), ("r", 2)] * 4)
    prefill.release("r")
    prefill.wait_event(HandoffReleased, "r")
    decode.wait_end("r")


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_step_that_is_not_wanted_any_more_is_broken_off(
    pair: tuple[ThreadPeer, ThreadPeer], *, borrowed: bool
) -> None:
    prefill, decode = pair
    prefill.runner.num_layers = 20_000
    start(pair, borrowed=borrowed)
    prefill.wait_event(RequestAdmitted, "r")
    prefill.drop("r")
    assert prefill.wait_end("r").reason is FinishReason.ABORT
    assert prefill.runner.num_layers_done < 20_000
    prefill.runner.num_layers = 1
    decode.drop("r")
    decode.wait_end("r")
    start(pair, "next", borrowed=borrowed)
    decode.wait_event(HandoffDelivered, "next")
    decode.wait_end("next")
    prefill.release("next")
    prefill.wait_event(HandoffReleased, "next")
