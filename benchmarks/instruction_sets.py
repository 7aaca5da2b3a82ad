"""The engine with each instruction set, in turns with torch on the same instructions.

    python benchmarks/instruction_sets.py MODEL_DIR [--isa avx512 --isa avx2] [--json instruction_sets.json]

For each set there are two engines in bf16: one with the native kernels of the set, and one with torch alone (--isa
torch), which is kept to the same instructions: ATEN_CPU_CAPABILITY for torch's own kernels, ONEDNN_MAX_CPU_ISA for
the matrix products (with AVX2 alone, oneDNN has no fast product in bf16: torch would be faster in fp32). They take
turns. Reported: medians, spreads, and the ratio of the medians.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import report
from engine import HERE, Child

from diptych.base.processor import read_processor

TORCH_ON = {  # what keeps torch to the instructions of a set
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
COMMANDS: dict[str, dict[str, Any]] = {
    "prefill 512": {"do": "prefill", "tokens": 512},
    "prefill 2048": {"do": "prefill", "tokens": 2048},
    "decode b1": {"do": "decode", "batch": 1, "context": 512, "steps": 32},
    "decode b8": {"do": "decode", "batch": 8, "context": 512, "steps": 16},
}


def start(name: str, model: Path, threads: int, isa: str, environment: dict[str, str]) -> Child:
    """An engine in its own process."""
    command = [sys.executable, str(HERE / "peers" / "diptych_child.py"), str(model), str(threads), isa]
    return Child(name, command, environment)


def measure(isa: str, model: Path, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """A row for each command: the set's kernels and torch, in turns."""
    ours = start(isa, model, threads, isa, {})
    torch = start(f"torch on {isa}", model, threads, "torch", TORCH_ON[isa])
    rows = []
    for what, command in COMMANDS.items():
        samples: dict[Child, list[float]] = {ours: [], torch: []}
        for repetition in range(repetitions + 1):
            for child, values in samples.items():
                tokens_per_s = child.ask(**command)
                if repetition:  # the first one warms up
                    values.append(tokens_per_s)
        row: dict[str, Any] = {"isa": isa, "what": what}
        for name, child in (("native", ours), ("torch", torch)):
            values = samples[child]
            row[f"{name} tok/s"] = round(statistics.median(values), 1)
            row[f"{name} spread"] = f"{min(values):.4g}..{max(values):.4g}"
        row["ratio"] = round(row["native tok/s"] / row["torch tok/s"], 2)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    ours.close()
    torch.close()
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", action="append", choices=sorted(TORCH_ON), help="default: avx512 and avx2")
    parser.add_argument("--threads", type=int, default=read_processor().num_threads)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for isa in options.isa or ("avx512", "avx2"):
        rows += measure(isa, options.model, options.threads, options.repetitions)
    report(f"instruction sets, {options.model.name}", rows, options.json, threads=options.threads)


if __name__ == "__main__":
    main()
