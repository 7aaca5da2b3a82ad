"""A worker process with a make-believe model: real sockets, real scheduling, tokens that can be foretold.

Token number i after a prompt of p tokens is ``(p + i) % vocab_size``, whoever sampled those before it. A prompt with
CRASH_TOKEN kills the process; one with FAIL_TOKEN fails alone. A worker with a place hands off through a FakeConnector.
No torch. ``python fake_worker.py [--step-ms 2] [--max-model-len N] DIRECTORY``.
"""

import argparse
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.runtime.device.garbage import without_collections

with without_collections():  # until it serves, as a real one
    from fake_connector import FakeConnector

    from diptych.control.config import CacheConfig, EngineConfig
    from diptych.control.engine.engine_core import EngineCore
    from diptych.control.engine.recording import RecordingEngineCore
    from diptych.control.request import FinishReason, SamplingParams
    from diptych.control.step import SchedulerOutput, StepResult, StepTokens, TokenLogprobs
    from diptych.serving.link.engine_options import EngineOptions
    from diptych.serving.link.messages import Ready
    from diptych.serving.link.recorder import record_engine
    from diptych.serving.worker.load_engine import LoadedEngine
    from diptych.serving.worker.worker_loop import die_with_parent, serve

VOCAB_SIZE = 4096
EOS_TOKEN = 0
CRASH_TOKEN = 4001
FAIL_TOKEN = 4002


@dataclass
class FakeState:
    """One request."""

    prompt: list[int]
    sampling: SamplingParams
    num_outputs: int = 0


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """Alternatives follow the token itself, each half as likely."""
    top = tuple(((token_id + rank) % VOCAB_SIZE, -0.5 - 0.7 * rank) for rank in range(count))
    return TokenLogprobs(token_id, -0.5, top)


class FakeRunner:
    """An Executor without a model."""

    def __init__(self, step_s: float = 0.0, tokens_per_s: float = 0.0) -> None:
        self.requests: dict[str, FakeState] = {}
        self.decoding: dict[str, None] = {}
        self.step_s = step_s
        self.token_s = 1 / tokens_per_s if tokens_per_s else 0.0
        self.on_layer: Callable[[int], None] | None = None
        self.num_layers = 1  # of 1 ms each, where there are more
        self.num_layers_done = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        block_hashes: Sequence[bytes] | None = None,
        output_token_ids: Sequence[int] = (),
        constraint: object = None,
    ) -> None:
        """Remember it."""
        assert request_id not in self.requests, request_id
        self.requests[request_id] = FakeState(list(prompt_token_ids), sampling, len(output_token_ids))

    def forget(self, request_id: str) -> None:
        """It will be in no plan."""
        self.requests.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Requests known here."""
        return len(self.requests)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Membership as the plan says, then one token per decode and per ended prompt."""
        for request_id in output.finished:
            self.requests.pop(request_id, None)
            self.decoding.pop(request_id, None)
        for request_id in output.paused:
            self.decoding.pop(request_id, None)
        for resumed in output.resumed:
            self.decoding[resumed.request_id] = None
        for layer in range(self.num_layers):
            if self.on_layer is not None:
                self.on_layer(layer)
            self.num_layers_done += 1
            time.sleep(0.001 * (self.num_layers > 1))
        payload, stopped, failed = StepTokens([], []), [], []
        sampling = list(self.decoding) if output.num_decodes else []
        for chunk in output.prefills:
            state = self.requests[chunk.request_id]
            if CRASH_TOKEN in state.prompt:
                time.sleep(0.02)  # so that what was said before gets out
                os._exit(42)
            if FAIL_TOKEN in state.prompt:
                failed.append((chunk.request_id, "the make-believe model failed"))
                continue
            self._score(chunk.request_id, state, chunk.start, chunk.num_tokens, payload)
            if chunk.is_last:
                sampling.append(chunk.request_id)
                self.decoding[chunk.request_id] = None
        for request_id in sampling:
            prompt, pooling = self.requests[request_id].prompt, self.requests[request_id].sampling.pooling
            if pooling is not None:
                payload.embeddings[request_id] = array("f", [len(prompt), sum(prompt)]).tobytes()
            elif self._sample(request_id, payload):
                stopped.append((request_id, FinishReason.STOP))
        duration_s = self.step_s + self.token_s * output.features.prefill_tokens
        if output.is_compute and duration_s:
            time.sleep(duration_s)
        return StepResult(output.step_id, stopped=tuple(stopped), failed=tuple(failed), payload=payload)

    def _sample(self, request_id: str, payload: StepTokens) -> bool:
        state = self.requests[request_id]
        token_id = (len(state.prompt) + state.num_outputs) % VOCAB_SIZE
        state.num_outputs += 1
        if state.sampling.logprobs is not None:
            payload.logprobs[len(payload.token_ids)] = fake_logprobs(token_id, state.sampling.logprobs)
        payload.request_ids.append(request_id)
        payload.token_ids.append(token_id)
        if state.num_outputs <= state.sampling.min_tokens:
            return False
        is_eos = token_id == EOS_TOKEN and not state.sampling.ignore_eos
        return is_eos or token_id in state.sampling.stop_token_ids

    def _score(self, request_id: str, state: FakeState, start: int, count: int, payload: StepTokens) -> None:
        if state.sampling.prompt_logprobs is None:
            return
        first, last = max(1, start), min(start + count + 1, len(state.prompt))
        entries = [fake_logprobs(state.prompt[at], state.sampling.prompt_logprobs) for at in range(first, last)]
        if entries:
            payload.prompt_logprobs[request_id] = (first, entries)


def fake_load(arguments: argparse.Namespace) -> Callable[..., LoadedEngine[FakeRunner]]:
    """What ``serve`` calls instead of loading a model."""

    def load(options: EngineOptions, report: Callable[..., None]) -> LoadedEngine[FakeRunner]:
        report("pretending", 0.5)
        time.sleep(arguments.load_s)
        pool = options.place.pool if options.place else None
        num_blocks, first_block = (pool.num_blocks, pool.first_block) if pool else (arguments.num_blocks, 0)
        cache = CacheConfig(num_blocks, options.memory.block_size, first_block=first_block)
        length = options.max_model_len or arguments.max_model_len
        config = EngineConfig(cache, options.scheduler, options.slo, length)
        recorder = record_engine(Path(options.record), config) if options.record else None
        engine = RecordingEngineCore(config, recorder.write) if recorder else EngineCore(config)
        runner = FakeRunner(arguments.step_ms / 1000, arguments.tokens_per_s)
        capacity, scheduler = engine.kv.capacity_tokens, options.scheduler
        waiting, seqs = scheduler.max_waiting, scheduler.max_num_seqs
        ready = Ready(VOCAB_SIZE, length, capacity, waiting, seqs, [EOS_TOKEN], "a fake model", embedding_size=2)
        return LoadedEngine(engine, runner, ready, recorder)

    return load


def fake_connect(options: EngineOptions, runner: FakeRunner, directory: Path) -> FakeConnector | None:
    """What ``serve`` calls instead of connecting real memory."""
    return FakeConnector(directory / "kv") if options.place else None


def fake_command(**arguments: Any) -> tuple[str, ...]:
    """The command line for a Supervisor."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    return (sys.executable, __file__, *flags)


def main() -> int:
    """As diptych.serving.worker.worker_loop.main, with the fake."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="prefill speed; 0: prompts cost nothing")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(arguments.directory)
    return serve(arguments.directory, fake_load(arguments), fake_connect)


if __name__ == "__main__":
    sys.exit(main())
