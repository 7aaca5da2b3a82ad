"""``diptych calibrate``: what single steps cost on this machine, and what they cost in a live server under load.

Owns the two measurements and the load that the second one needs. Single steps run in a process of their own
(calibration_steps.py); then a real server with a recorded worker is sent streams in known numbers and lengths, and its
recording says how long the steps took there, with scheduling, sampling, sockets and the HTTP front end on the same
cores. Must never fit anything: it returns measurements. Imports no torch.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import msgspec

from diptych.base.child_process import end_process
from diptych.calibration.timed_stream import TimedAnswer, timed_stream
from diptych.control.config import EngineConfig
from diptych.control.errors import ConfigError, DiptychError, ErrorRecord, WorkerError
from diptych.control.step import StepFeatures
from diptych.serving.link.engine_options import EngineOptions
from diptych.simulation.replay import recorded_steps

STEPS_COMMAND = (sys.executable, "-m", "diptych.calibration.calibration_steps")
SERVER_COMMAND = (sys.executable, "-m", "diptych.calibration.calibration")
STREAM_COUNTS = (1, 2, 4, 8, 16, 32)
STREAM_PROMPTS = (35, 390)
IDLE_PROMPTS = (16, 75, 270, 1035)  # as prompts are: few are a whole number of a kernel's tiles, which would be cheaper
MIXED_STREAMS, MIXED_PROMPTS = (2, 8), (16, 75, 270, 530)
ROUNDS = 2  # at least

Report = Callable[[str, float], None]  # (stage, share of it that is done)
Step = tuple[StepFeatures, int]  # what it computed, nanoseconds


@dataclass(frozen=True, slots=True)
class Measurements:
    """steps: medians of single steps. live_steps: every step of the live server. front_end: (prompt tokens,
    nanoseconds) of requests to the idle server: what the client waited for its first token besides the worker."""

    steps: list[Step]
    live_steps: list[Step]
    front_end: list[tuple[int, int]]
    engine: EngineConfig
    warm_up: tuple[Step, ...]  # what the live server's step-time model began with
    description: str


def measure(options: EngineOptions, report: Report, *, steps_s: float = 45.0, live_s: float = 45.0) -> Measurements:
    """Measure single steps for about ``steps_s`` seconds, and a live server for about ``live_s``. Raises what the
    engine refused to start with."""
    steps = measure_steps(options, steps_s, lambda share: report("single steps", share))
    with tempfile.TemporaryDirectory(prefix="diptych-") as directory:
        path = Path(directory) / "live.jsonl"
        # without guesses, whose rows would pass for streams: a batch of a known number of streams is what is measured
        recorded = msgspec.structs.replace(options, record=str(path), speculation="off")
        with subprocess.Popen(SERVER_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                description, url, vocab_size = _start(process, recorded)
                load = _Load(url, vocab_size, options, steps, live_s, report)
                front_end = asyncio.run(load.run())
            finally:
                end_process(process)
        live = recorded_steps(path)
    return Measurements(steps, live.steps, front_end, live.config, tuple(live.warm_up), description)


def measure_steps(options: EngineOptions, seconds: float, progress: Callable[[float], None]) -> list[Step]:
    """The medians of calibration_steps.py, from a process of its own."""
    with subprocess.Popen(STEPS_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(msgspec.json.encode((options, seconds)))
        process.stdin.close()
        for line in process.stdout:
            kind, content = json.loads(line)
            if kind == "progress":
                progress(content)
            elif kind == "failed":
                raise msgspec.convert(content, ErrorRecord).exception()
            else:
                return msgspec.convert(content, list[Step])
    raise WorkerError(f"measuring single steps ended with status {process.returncode}")


def _start(process: "subprocess.Popen[bytes]", options: EngineOptions) -> tuple[str, str, int]:
    """Hand over the options; (description, address, vocabulary) of the server when it is ready."""
    assert process.stdin and process.stdout
    process.stdin.write(msgspec.json.encode(options))
    process.stdin.close()
    line = process.stdout.readline()
    if not line:
        raise WorkerError(f"the server to calibrate ended with status {process.wait()}")
    content = json.loads(line)
    if "error" in content:
        raise msgspec.convert(content["error"], ErrorRecord).exception()
    return content["description"], content["url"], content["vocab_size"]


class _Load:
    """Streams in known numbers and lengths, one scenario after another, until the time is over."""

    def __init__(
        self, url: str, vocab_size: int, options: EngineOptions, steps: Sequence[Step], live_s: float, report: Report
    ) -> None:
        target = urlparse(url)
        self._host, self._port = target.hostname or "", target.port or 0
        self._vocab_size = vocab_size
        self._max_seqs = options.scheduler.max_num_seqs
        self._report = report
        self._seconds = live_s
        self._rng = random.Random(0)
        self._step_ns = {step.decode_seqs: duration_ns for step, duration_ns in steps if not step.prefill_tokens}
        prompts = [(step.prefill_tokens, ns) for step, ns in steps if step.prefill_tokens]
        large = [prompt for prompt in prompts if prompt[0] >= 64] or prompts
        if not large or not self._step_ns:
            raise ConfigError("seconds is too little for a single step of a prompt here", param="seconds")
        self._prompt_ns = statistics.median([ns / num_tokens for num_tokens, ns in large])

    async def run(self) -> list[tuple[int, int]]:
        """All scenarios, at least once each. Returns the front end's samples."""
        begun = time.monotonic()
        samples: list[tuple[int, int]] = []
        await self._stream(64, 8)
        counts = [count for count in STREAM_COUNTS if count <= self._max_seqs]
        scenarios = [(count, prompt) for count in counts for prompt in STREAM_PROMPTS]
        scenarios += [(count, 0) for count in MIXED_STREAMS if count <= self._max_seqs]
        share_s = self._seconds / (len(scenarios) + 2) / ROUNDS
        limit = max(2 * MIXED_PROMPTS[-1], 2e9 * share_s / self._prompt_ns)  # prompt tokens of a scenario
        scenarios = [(count, prompt) for count, prompt in scenarios if count * prompt <= limit]
        idle_prompts = [prompt for prompt in IDLE_PROMPTS if prompt <= limit]
        rounds = 0
        while rounds < ROUNDS or time.monotonic() - begun < self._seconds * rounds / (rounds + 1):
            rounds += 1
            for prompt in idle_prompts * 3:
                samples += await self._idle(prompt)
            for count, prompt in self._rng.sample(scenarios, len(scenarios)):
                await (self._streams(count, prompt, share_s) if prompt else self._mixed(count, share_s))
                self._report("live server", min(1.0, (time.monotonic() - begun) / self._seconds))
        return samples

    async def _idle(self, prompt: int) -> list[tuple[int, int]]:
        """One request to an idle server."""
        await asyncio.sleep(0.03)
        answer = await self._stream(prompt, 4)
        latency = answer.usage["latency"]
        worker_ns = 1e6 * (latency["queue_ms"] + latency["prefill_ms"])
        return [(prompt, round(answer.first_ns - answer.sent_ns - worker_ns))]

    async def _streams(self, count: int, prompt: int, seconds: float) -> None:
        """``count`` streams that decode together for a while."""
        await asyncio.gather(*(self._stream(prompt, self._num_tokens(count, seconds)) for _ in range(count)))

    async def _mixed(self, count: int, seconds: float) -> None:
        """Prompts of different lengths that arrive while ``count`` streams decode."""
        first = asyncio.Event()
        tokens = self._num_tokens(count, 2 * seconds)
        streams = [asyncio.create_task(self._stream(64, tokens, first)) for _ in range(count)]
        await first.wait()
        while not all(stream.done() for stream in streams):
            await self._stream(self._rng.choice(MIXED_PROMPTS), 4)
        await asyncio.gather(*streams)

    def _num_tokens(self, count: int, seconds: float) -> int:
        """Tokens that fill the time, by the costs of single steps; enough for all streams to decode together, though
        their prompts are computed one after another."""
        nearest = min(self._step_ns, key=lambda known: (abs(known - count), known))
        return max(32 + count, min(600, round(seconds * 1e9 / (2 * self._step_ns[nearest]))))

    async def _stream(self, prompt: int, tokens: int, first: asyncio.Event | None = None) -> TimedAnswer:
        """One streamed completion of random tokens. Raises WorkerError when the server does not answer it."""
        token_ids = [self._rng.randrange(self._vocab_size // 2, self._vocab_size) for _ in range(prompt)]
        body = {
            "prompt": token_ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "return_latency": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = await timed_stream((self._host, self._port), body, on_first=first.set if first else None)
        if "latency" not in answer.usage:
            raise WorkerError(f"the server did not answer a prompt of {prompt} tokens")
        return answer


def main() -> int:
    """Serve what standard input asks for (EngineOptions) on a free port, until SIGTERM."""
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.link.messages import Ready

    def on_ready(ready: Ready, url: str) -> None:
        line = {"description": ready.description, "url": url, "vocab_size": ready.vocab_size}
        print(json.dumps(line), flush=True)

    options = msgspec.json.decode(sys.stdin.read(), type=EngineOptions)
    try:
        run_server(AsyncLLM(options), ServerOptions(port=0, log_level="error"), on_ready=on_ready)
    except DiptychError as error:
        print(msgspec.json.encode({"error": ErrorRecord.of(error)}).decode(), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
