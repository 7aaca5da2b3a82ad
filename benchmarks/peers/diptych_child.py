"""Diptych's engine behind the line protocol of vllm_child.py: the whole loop of scheduler and model, no sockets.

diptych_child.py MODEL_DIR THREADS [INSTRUCTION_SET [QUANTIZE [KV_DTYPE [MAX_MODEL_LEN]]]]
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from diptych.control.config import shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import SamplingParams
from diptych.runtime.device.threads import configure_threads
from diptych.runtime.kernels.instruction_set import AUTO
from diptych.runtime.local_engine import LocalEngine, engine_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner


def main() -> None:
    """Serve commands until standard input ends."""
    configure_threads(int(sys.argv[2]), bind=True)
    quantize = sys.argv[4] if len(sys.argv) > 4 else "none"
    weights: dict[str, Any] = {} if quantize == "none" else {"quantize": quantize}
    if len(sys.argv) > 5 and sys.argv[5] != "auto":
        weights["kv_dtype"] = sys.argv[5]
    config = RunnerConfig(
        model=Path(sys.argv[1]),
        dtype="bfloat16",
        max_num_seqs=32,
        max_model_len=int(sys.argv[6]) if len(sys.argv) > 6 else 8192,
        kv_bytes=2 << 30,
        instruction_set=sys.argv[3] if len(sys.argv) > 3 else AUTO,
        **weights,
    )
    runner = load_runner(config)
    settings = shape_preset("unified", max_num_seqs=32)
    engine = LocalEngine(EngineCore(engine_config(runner, settings, enable_prefix_cache=False)), runner)

    rng, number = random.Random(0), 0
    vocab = runner.model_config.vocab_size

    def add(num_tokens: int, num_outputs: int) -> str:
        nonlocal number
        number += 1
        tokens = [rng.randrange(min(300, vocab // 2), min(16_000, vocab)) for _ in range(num_tokens)]
        engine.add(str(number), tokens, SamplingParams(max_tokens=num_outputs, temperature=0, ignore_eos=True))
        return str(number)

    def run() -> None:
        while engine.step() is not None:
            pass

    def prefill(num_tokens: int) -> float:
        add(num_tokens, 1)
        began = time.perf_counter()
        run()
        return num_tokens / (time.perf_counter() - began)

    def decode(batch: int, context: int, steps: int) -> float:
        for _ in range(batch):
            add(context, steps + 1)
        while engine.core.scheduler.waiting or engine.core.scheduler.prefilling:
            engine.step()
        began = time.perf_counter()
        run()
        return batch * steps / (time.perf_counter() - began)

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prefill":
            rate = prefill(command["tokens"])
        else:
            rate = decode(command["batch"], command["context"], command["steps"])
        print(json.dumps({"tok_s": rate}), flush=True)


if __name__ == "__main__":
    main()
