"""The host's time between two decode steps: the whole loop of scheduler, layout, model and sampler, against the
device's time for the same steps."""

import time
from statistics import median

import torch
from benchmarks.gpu_parts.engine import step
from benchmarks.gpu_parts.models import DEVICE, batch_of, load, row, seconds_of

from diptych.control.config import shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import LocalEngine, engine_config

SHAPES, CONTEXT, BATCHES, STEPS = (
    (("0.5B", "8B"), 1024, (1, 64, 256), 60) if DEVICE.type == "cuda" else (("tiny",), 40, (1, 3), 10)
)
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
}


@torch.inference_mode()
def main() -> None:
    """Print the milliseconds of a step of the loop, of the device alone, and what the host adds."""
    for shape in SHAPES:
        loaded = load(shape, num_tokens=max(BATCHES) * (CONTEXT + STEPS + 64))
        runner, vocabulary = loaded.runner, loaded.runner.model_config.vocab_size
        for num_seqs in BATCHES:
            batch = batch_of([(CONTEXT - 1, 1)] * num_seqs, vocabulary)
            device_s = median(seconds_of(lambda b=batch, m=loaded: step(m, b), 20, warm_up=6))
            for name, options in SAMPLINGS.items():
                settings = shape_preset("unified", max_num_seqs=max(BATCHES))
                engine = LocalEngine(EngineCore(engine_config(runner, settings, enable_prefix_cache=False)), runner)
                for index in range(num_seqs):
                    tokens = [(7 * index + place) % (vocabulary - 1) + 1 for place in range(CONTEXT)]
                    sampling = SamplingParams(max_tokens=STEPS, ignore_eos=True, **options)
                    engine.add(f"{name} {num_seqs} {index}", tokens, sampling)
                while engine.core.scheduler.waiting or engine.core.scheduler.prefilling:
                    engine.step()
                seconds = []
                while True:
                    began = time.perf_counter()
                    if engine.step() is None:
                        break
                    seconds.append(time.perf_counter() - began)
                loop_s = median(seconds[5:-2])
                row(
                    shape=shape,
                    what=f"decode b{num_seqs} at {CONTEXT}, {name}",
                    loop_ms=round(1e3 * loop_s, 3),
                    device_ms=round(1e3 * device_s, 3),
                    host_share=round(1 - device_s / loop_s, 3),
                )


if __name__ == "__main__":
    main()
