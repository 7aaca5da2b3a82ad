"""A worker whose step of batch work is under way when another request comes: the step is broken off, and done again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving.worker_peers import ThreadPeer, attempt, fake_peer

from diptych.control.events import FirstToken, RequestAdmitted, RequestRested, RequestResumed, StepFinished
from diptych.control.request import FinishReason, RequestOptions
from diptych.simulation.replay import replay

BATCH = RequestOptions(service_class="batch")
PROMPT = list(range(100, 150))
ENDLESS = 60_000  # layers of 1 ms


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ThreadPeer]:
    """A worker on which nothing is left at the end, and whose recording decides the same again."""
    peer = fake_peer(tmp_path / "worker")
    try:
        yield peer
        peer.stop()
        peer.check_empty()
        report = replay(tmp_path / "worker.jsonl")
        assert report.is_identical, report.difference
    finally:
        peer.runner.num_layers = 1
        peer.close()


def test_a_prompt_of_batch_is_broken_off_for_a_request_that_comes(peer: ThreadPeer) -> None:
    peer.runner.num_layers = ENDLESS
    peer.serve(attempt("batch", PROMPT, max_tokens=8, options=BATCH))
    peer.wait_event(RequestAdmitted, "batch")
    peer.runner.num_layers = 1
    peer.serve(attempt("other", PROMPT[::-1], max_tokens=8))
    assert peer.wait_end("other").reason is FinishReason.LENGTH
    assert peer.wait_end("batch").latency.num_output_tokens == 8
    assert [step for step in peer.of_kind(StepFinished) if not (step.prefills or step.num_decodes)]
    assert peer.runner.num_layers_done < ENDLESS


def test_a_decode_step_of_batch_is_broken_off_and_its_stream_goes_on_where_it_was(peer: ThreadPeer) -> None:
    peer.serve(attempt("batch", PROMPT, max_tokens=1500, options=BATCH))
    peer.wait_event(FirstToken, "batch")
    peer.runner.num_layers = ENDLESS
    done = peer.runner.num_layers_done
    peer.until(lambda: peer.runner.num_layers_done > done + 20)
    peer.runner.num_layers = 1
    peer.serve(attempt("other", PROMPT[::-1], max_tokens=8))
    assert peer.wait_end("other").reason is FinishReason.LENGTH
    peer.wait_event(RequestRested, "batch")
    peer.wait_event(RequestResumed, "batch")
    assert peer.wait_end("batch").latency.num_output_tokens == 1500
    assert peer.runner.num_layers_done < ENDLESS


def test_a_request_of_batch_does_not_break_off_another(peer: ThreadPeer) -> None:
    peer.runner.num_layers = 30
    peer.serve(attempt("first", PROMPT, max_tokens=8, options=BATCH))
    peer.wait_event(RequestAdmitted, "first")
    peer.serve(attempt("second", PROMPT[::-1], max_tokens=8, options=BATCH))
    peer.wait_end("first")
    peer.wait_end("second")
    assert all(step.prefills or step.num_decodes for step in peer.of_kind(StepFinished))
