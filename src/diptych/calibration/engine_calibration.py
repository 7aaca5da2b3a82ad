"""``diptych calibrate --engine``: what the steps of an engine that others run cost, from what its plugin reports.

Owns where the steps come from (a file, a socket, or an engine that is given a load of known streams), what a step took,
and the engine's scheduler in our words. Fits with the laws of any calibration (simulation/costs/fitted.py).

A step takes until the next begins where requests were left and the next followed at once, because an engine plans and
hands out tokens between two steps; else until its own end.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.base.engine_steps import EngineAbout, EngineStep, UnreadableStepError, decode_line, encode_line
from diptych.control.config import BudgetConfig, CacheConfig, SchedulerConfig
from diptych.control.errors import ConfigError, WorkerError
from diptych.serving.front.step_feed import features_of, own_id, read_steps
from diptych.simulation.costs.fitted import Calibration, MeasuredPoint, fit, fit_front_end, gather
from diptych.simulation.serving_engine import FrontEnd

Report = Callable[[str, float], None]  # (stage, share of it that is done)
MOST_STEPS = 500_000  # the newest are kept
FEWEST_STEPS = 50
GAP_SHARE = 1.0  # a pause after a step that is longer than this share of it is not the step's


@dataclass
class ReportedSteps:
    """about: of the run that the steps are of: when the engine is started again, those before are dropped."""

    about: EngineAbout | None = None
    steps: deque[EngineStep] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    def take(self, data: bytes) -> None:
        """A line. Raises UnreadableStepError."""
        line = decode_line(data)
        if isinstance(line, EngineStep):
            if self.steps and line.number <= self.steps[-1].number:
                self.steps.clear()
            self.steps.append(line)
            return
        if self.about is not None and line.run_id != self.about.run_id:
            self.steps.clear()
        self.about = line

    async def follow(self, address: str) -> None:
        """Take what is published there; for ever. Raises WorkerError."""
        try:
            await read_steps(address, self.take)
        except UnreadableStepError as error:
            raise WorkerError(f"{address}: {error}") from None

    @staticmethod
    async def stop(reading: "asyncio.Task[None]") -> None:
        """End a task that follows."""
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, WorkerError):  # it was cancelled above, or has told the run
            await reading

    def write(self, path: Path) -> None:
        """Write the steps as a file for ``read_steps_file``. Raises ConfigError."""
        lines = [*([self.about] if self.about else []), *self.steps]
        try:
            path.write_bytes(b"".join(encode_line(line) + b"\n" for line in lines))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", param="steps_output") from None


def read_steps_file(path: Path) -> ReportedSteps:
    """The lines of a file. Raises ConfigError that names the line."""
    found, number = ReportedSteps(), 1
    try:
        with path.open("rb") as lines:
            for line in lines:
                found.take(line)
                number += 1
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="engine") from None
    except UnreadableStepError as error:
        raise ConfigError(f"{path}, line {number}: {error}", param="engine") from None
    return found


async def listen(address: str, seconds: float, report: Report) -> ReportedSteps:
    """All steps that are published within ``seconds``, regardless of client. Raises WorkerError."""
    found = ReportedSteps()
    reading = asyncio.create_task(found.follow(address))
    try:
        begun = time.monotonic()
        while not reading.done() and (passed := time.monotonic() - begun) < seconds:
            await asyncio.wait([reading], timeout=min(0.5, seconds - passed))
            report(f"listening to {address}, {len(found.steps)} steps", min(1.0, passed / seconds))
        if reading.done():
            reading.result()
        return found
    finally:
        await found.stop(reading)


def durations(steps: Sequence[EngineStep]) -> list[int]:
    """What each step took, in nanoseconds; see the module."""
    found = []
    for at, step in enumerate(steps):
        took = step.end_ns - step.start_ns
        following = steps[at + 1] if at + 1 < len(steps) else None
        if following is not None and following.number == step.number + 1 and step.num_left:
            pause = following.start_ns - step.end_ns
            took += pause if 0 <= pause <= GAP_SHARE * took else 0
        found.append(max(1, took))
    return found


def worker_ns(steps: Iterable[EngineStep], request_ids: Iterable[str]) -> dict[str, int]:
    """Time for which the engine computed the prompts of each of these requests, in nanoseconds."""
    found = dict.fromkeys(request_ids, 0)
    for step in steps:
        for name, _, _ in step.prefills:
            if (own := own_id(name)) in found:
                found[own] += step.end_ns - step.start_ns
    return found


def engine_calibration(
    found: ReportedSteps, front_end: Sequence[tuple[int, int]] = (), machine: dict[str, Any] | None = None
) -> Calibration:
    """The calibration of what was reported. front_end: (prompt tokens, nanoseconds) that requests to the idle engine
    waited for their first token besides its steps. Raises ConfigError where too little is known."""
    about = found.about
    if about is None or len(found.steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{len(found.steps)} steps were reported; a calibration needs {FEWEST_STEPS} at least, and the engine's "
            "own description: does it run with --scheduler-cls diptych.vllm_plugin.scheduler, and has it requests?",
            param="engine",
        )
    steps = list(found.steps)
    points = gather(zip([features_of(step) for step in steps], durations(steps), strict=True))
    cost, errors = fit([point for point in points if _is_compute(point)])
    return Calibration(
        model=about.model,
        cost=cost,
        cache=cache_of(about),
        max_model_len=about.max_model_len or about.block_size * about.num_blocks,
        front_end=fit_front_end(front_end) if front_end else FrontEnd(),
        points=tuple(points),
        errors=errors,
        machine=machine or {},
        settings={"engine": f"{about.engine} {about.version}".strip(), "steps": len(steps)},
        scheduler=scheduler_of_engine(about),
    )


def cache_of(about: EngineAbout) -> CacheConfig:
    """The engine's KV cache: prompts are let in as soon as they fit. Raises ConfigError."""
    if not (about.block_size and about.num_blocks):
        raise ConfigError(
            f"the engine does not say how large its KV cache is ({', '.join(about.lacks)})", param="engine"
        )
    return CacheConfig(
        num_blocks=about.num_blocks,
        block_size=about.block_size,
        watermark_blocks=0,
        enable_prefix_cache=about.prefix_cache,
        admission="greedy",
    )


def scheduler_of_engine(about: EngineAbout) -> SchedulerConfig:
    """vLLM's rules in ours: decodes first, then prompts in the order of their arrival (or priority), cut to what is
    left of a fixed number of tokens. Raises ConfigError."""
    if not (about.max_batched_tokens and about.max_num_seqs):
        raise ConfigError(f"the engine does not say how large its steps are ({', '.join(about.lacks)})", param="engine")
    return SchedulerConfig(
        order="priority" if about.policy == "priority" else "fcfs",
        budget=BudgetConfig(kind="fixed", max_batched_tokens=about.max_batched_tokens, min_chunk_tokens=1),
        max_num_seqs=about.max_num_seqs,
    )


def not_modelled(about: EngineAbout) -> list[str]:
    """Rules of the engine that the simulator does not have."""
    found = []
    if about.long_prefill_threshold:
        found.append(f"chunks of long prompts are cut to {about.long_prefill_threshold} tokens there")
    if not about.chunked_prefill:
        found.append("prompts are not cut into chunks there")
    return found


def _is_compute(point: MeasuredPoint) -> bool:
    return point.features.prefill_tokens > 0 or point.features.decode_seqs > 0
