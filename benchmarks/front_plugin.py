"""What vLLM's step reports cost: time in the engine's own thread per step, beside the steps that a vLLM has reported.

    python benchmarks/front_plugin.py [--steps FILE] [--json front_plugin.json]

The plugin's own code runs here over plans with so many decoding requests (objects that have the fields of vLLM's), with
a subscriber in another process that reads all of them. The first row of a size is a step of decodes, the second one
has a prompt beside them. --steps: what ``diptych calibrate --engine ... --steps-output FILE`` kept of a live vLLM; the
overhead is the share of the median of its steps of about that many decodes (within a quarter).
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from common import report
from servers import free_port

from diptych.base.engine_steps import EngineAbout, EngineStep
from diptych.calibration.engine_calibration import read_steps_file
from diptych.vllm_plugin.step_observer import StepObserver
from diptych.vllm_plugin.step_publisher import TOPIC, StepPublisher

SIZES = (1, 4, 16, 64, 256)
PROMPT = 512
NUM_STEPS, NUM_RUNS = 2000, 5


def plan_of(num_decodes: int, prompt: int) -> tuple[Any, Any]:
    """(scheduler, plan) with so many decodes of 500 tokens each, and a new prompt where ``prompt`` is not 0."""
    names = [f"cmpl-{number:032x}-0" for number in range(num_decodes)]
    requests = {name: SimpleNamespace(num_prompt_tokens=400) for name in names}
    counts, new = dict.fromkeys(names, 1), []
    if prompt:
        requests["cmpl-new-0"] = SimpleNamespace(num_prompt_tokens=prompt)
        counts["cmpl-new-0"] = prompt
        new.append(SimpleNamespace(req_id="cmpl-new-0", num_computed_tokens=0))
    plan = SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=names, num_computed_tokens=[500] * num_decodes),
    )
    return SimpleNamespace(requests=requests, get_num_unfinished_requests=lambda: num_decodes), plan


def measured(observer: StepObserver, num_decodes: int, prompt: int) -> float:
    """Seconds a step: median of the runs, at the pace of an engine that computes in between."""
    scheduler, plan = plan_of(num_decodes, prompt)
    runs = []
    for _ in range(NUM_RUNS):
        used = 0.0
        for _ in range(NUM_STEPS // NUM_RUNS):
            begun = time.perf_counter()
            observer.on_planned(scheduler, plan, observer.begin())
            middle = time.perf_counter()
            time.sleep(0.0002)
            after = time.perf_counter()
            observer.on_computed(scheduler, plan)
            used += middle - begun + time.perf_counter() - after
        runs.append(used / (NUM_STEPS // NUM_RUNS))
    return statistics.median(runs)


def usual_step_s(steps: Iterable[EngineStep], num_decodes: int, has_prompt: bool) -> float | None:
    """The median of the live steps of this kind; None where there are fewer than ten."""
    times = [
        (step.end_ns - step.start_ns) / 1e9
        for step in steps
        if abs(step.num_decodes - num_decodes) <= num_decodes / 4 and bool(step.prefills) == has_prompt
    ]
    return statistics.median(times) if len(times) >= 10 else None


def _read(address: str, is_ready: Any) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(address)
    socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
    while True:
        socket.recv_multipart()
        is_ready.set()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path)
    parser.add_argument("--json", help="write a record")
    options = parser.parse_args()
    found = read_steps_file(options.steps) if options.steps else None
    address = f"tcp://127.0.0.1:{free_port()}"
    observer = StepObserver(StepPublisher(address, EngineAbout("vllm", "run")))
    context = get_context("spawn")
    is_ready = context.Event()
    reader = context.Process(target=_read, args=(address, is_ready), daemon=True)
    reader.start()
    scheduler, plan = plan_of(1, 0)
    while not is_ready.wait(0.1):
        observer.on_planned(scheduler, plan, observer.begin())
        observer.on_computed(scheduler, plan)
    rows = []
    for size in SIZES:
        for prompt in (0, PROMPT):
            cost = measured(observer, size, prompt)
            row: dict[str, Any] = {"decodes": size, "prompt": prompt, "us/step": round(1e6 * cost, 1)}
            usual = usual_step_s(found.steps, size, bool(prompt)) if found else None
            if usual is not None:
                row |= {"vLLM's step ms": round(1e3 * usual, 2), "overhead": f"{cost / usual:.3%}"}
            rows.append(row)
    reader.terminate()
    engine = f"{found.about.engine} {found.about.version}, {found.about.model}" if found and found.about else None
    report("step reports of vLLM", rows, options.json, engine=engine)


if __name__ == "__main__":
    main()
