"""Two workers under random messages: every attempt is answered, every token follows the one before it, nothing
stays."""

import random
from pathlib import Path

from tests.laws import law
from worker_peers import Attempt, Peer, attempt, fake_peer

from diptych.control.events import HandoffDelivered, HandoffReserved, HandoffRevoked
from diptych.control.request import FinishReason
from diptych.simulation.replay import replay

DECODE = 1  # the number of the decode worker


def drop(prefill: Peer, decode: Peer, attempt_id: str) -> None:
    """In this order: the blocks that the first one writes into may be the second one's."""
    for peer in (prefill, decode):
        peer.drop(attempt_id)
        peer.until(lambda peer=peer: peer.has_let_go(attempt_id))


def disturb(rng: random.Random, prefill: Peer, decode: Peer, attempt_id: str, *, borrowed: bool) -> None:
    """Something happens to an attempt, or nothing."""
    chance = rng.random()
    if chance < 0.12:
        drop(prefill, decode, attempt_id)
    elif chance < 0.2 and not borrowed:
        rng.choice([prefill, decode]).drop(attempt_id, FinishReason.STOP)
    elif chance < 0.3:
        for peer in (prefill, decode):
            peer.renew(attempt_id)
    elif chance < 0.4 and decode.event(HandoffDelivered, attempt_id):
        prefill.release(attempt_id)
    elif chance < 0.42:
        prefill.forget_peer(DECODE)


def begin(rng: random.Random, prefill: Peer, decode: Peer, request: Attempt, *, borrowed: bool) -> None:
    """Reserve, and prefill unless the attempt was dropped before it came."""
    attempt_id, lease_ns = request.attempt_id, 0 if borrowed else rng.choice([0, 20_000_000, 10**10])
    for peer in (prefill, decode):
        if rng.random() < 0.1:
            peer.drop(attempt_id)
    decode.reserve(request, lease_ns, borrowed=borrowed)

    def answered() -> object:
        prefill.read()
        recalled = [event.request_id for event in decode.of_kind(HandoffRevoked)]  # their blocks are needed ...
        lost = [ended for ended, event in prefill.finished.items() if event.reason == FinishReason.ABORT]
        for given_up in (*recalled, *lost):  # ... or nobody computes them any more: the front end gives them up
            if not decode.has_let_go(given_up):
                for peer in (prefill, decode):
                    peer.drop(given_up)
        return decode.event(HandoffReserved, attempt_id) or decode.has_let_go(attempt_id)

    reserved = decode.until(answered)
    if isinstance(reserved, HandoffReserved):
        tables = reserved.block_tables if borrowed else ()
        prefill.prefill(request, decode.address, reserved.num_cached_tokens, tables, lease_ns, DECODE)


@law(weight=1.0)
def test_every_attempt_is_answered_and_nothing_stays(seed: int, tmp_path: Path) -> None:
    rng, folder = random.Random(seed), tmp_path / str(seed)
    folder.mkdir()
    prefill, decode = fake_peer(folder / "p"), fake_peer(folder / "d", first_block=128)
    prefill.runner.num_layers = 1 + 2 * (seed % 2)
    attempts: dict[str, tuple[bool, int]] = {}  # whether blocks are borrowed, and the first token
    try:
        for number in range(rng.randint(3, 10)):
            attempt_id, borrowed = f"attempt{number}", rng.random() < 0.5
            length, stem = rng.choice([5, 31, 32, 33, 64, 200, 700, 1500]), rng.randrange(3)
            prompt = [1 + stem] * (length // 2) + [1 + (7 * at + number) % 90 for at in range(length - length // 2)]
            output = [7] * rng.choice([0, 0, 1, 30])
            attempts[attempt_id] = borrowed, length + len(output)
            request = attempt(
                attempt_id, prompt, output, max_tokens=rng.choice([31, 40, 60]), logprobs=rng.choice([None, 2])
            )
            begin(rng, prefill, decode, request, borrowed=borrowed)
            for other, (is_borrowed, _) in attempts.items():
                disturb(rng, prefill, decode, other, borrowed=is_borrowed)
        for attempt_id, (_, first_token) in attempts.items():
            if decode.event(HandoffDelivered, attempt_id) and rng.random() < 0.7:
                decode.wait_end(attempt_id)
            drop(prefill, decode, attempt_id)
            tokens = prefill.tokens.get(attempt_id, []) + decode.tokens.get(attempt_id, [])
            assert tokens == list(range(first_token, first_token + len(tokens))), attempt_id
        for peer, name in ((prefill, "p"), (decode, "d")):
            peer.stop()
            peer.check_empty()
            report = replay(folder / f"{name}.jsonl")
            assert report.is_identical, report.difference
    finally:
        prefill.close()
        decode.close()
