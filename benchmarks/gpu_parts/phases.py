"""What running streams feel while a long prompt is computed beside them: whole, in fixed chunks, and in chunks that are
sized by an objective in milliseconds."""

import time
from typing import Any

import torch
from benchmarks.gpu_parts.models import DEVICE, load, row

from diptych.control.config import BudgetConfig, SchedulerConfig, shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import SamplingParams
from diptych.control.slo import NS_PER_MS
from diptych.runtime.local_engine import LocalEngine, engine_config
from diptych.runtime.step.warm_up import warm_up

SHAPE, PROMPT, CONTEXT, STREAMS = ("8B", 8192, 1024, 32) if DEVICE.type == "cuda" else ("tiny", 300, 40, 3)
OBJECTIVES_MS = (25, 50)


def schedulers() -> dict[str, SchedulerConfig]:
    """Ways to mix, by name."""
    found = {"unified": shape_preset("unified", max_num_seqs=STREAMS + 1)}
    for tokens in (512, 2048):
        budget = BudgetConfig(kind="fixed", max_batched_tokens=tokens)
        found[f"chunks of {tokens}"] = SchedulerConfig(max_num_seqs=STREAMS + 1, budget=budget)
    for target in OBJECTIVES_MS:
        budget = BudgetConfig(kind="slo", max_batched_tokens=8192, target_ns=target * NS_PER_MS)
        found[f"chunks for {target} ms"] = SchedulerConfig(max_num_seqs=STREAMS + 1, budget=budget)
    return found


def trial(engine: LocalEngine, vocabulary: int, name: str) -> dict[str, Any]:
    """STREAMS decode; one prompt arrives. Milliseconds: the longest gap before it came and while it was computed, and
    its first token."""
    sampling = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    for index in range(STREAMS):
        engine.add(f"{name} {index}", [(index + place) % (vocabulary - 1) + 1 for place in range(CONTEXT)], sampling)
    while engine.core.scheduler.waiting or engine.core.scheduler.prefilling:
        engine.step()
    calm = [_timed(engine)[0] for _ in range(30)][5:]
    prompt = [place % (vocabulary - 1) + 1 for place in range(PROMPT)]
    engine.add(f"{name} long", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    began, gaps, since_token = time.perf_counter(), [], 0.0
    while True:
        seconds, ids = _timed(engine)
        since_token += seconds
        if f"{name} 0" in ids:
            gaps.append(since_token)
            since_token = 0.0
        if f"{name} long" in ids:
            break
    first_token = time.perf_counter() - began
    for index in range(STREAMS):
        engine.abort(f"{name} {index}")
    while engine.step() is not None:
        pass
    return {
        "calm_ms": round(1e3 * max(calm), 2),
        "longest_gap_ms": round(1e3 * max([*gaps, since_token]), 2),
        "ttft_ms": round(1e3 * first_token, 1),
    }


def _timed(engine: LocalEngine) -> tuple[float, list[str]]:
    began = time.perf_counter()
    outcome = engine.step()
    assert outcome is not None
    return time.perf_counter() - began, outcome.tokens.request_ids


@torch.inference_mode()
def main() -> None:
    """Print a row for each way to mix."""
    loaded = load(SHAPE, num_tokens=STREAMS * (CONTEXT + 4096) + 2 * PROMPT, max_num_seqs=STREAMS + 1)
    measured = list(warm_up(loaded.runner))
    for name, settings in schedulers().items():
        core = EngineCore(engine_config(loaded.runner, settings, enable_prefix_cache=False))
        for features, duration_ns in measured:
            core.observe(features, duration_ns)
        engine = LocalEngine(core, loaded.runner)
        row(what=name, **trial(engine, loaded.runner.model_config.vocab_size, name))


if __name__ == "__main__":
    main()
