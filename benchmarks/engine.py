"""Prefill and decode rates of the engine, in turns with vLLM's CPU build and llama.cpp, beside what limits them.

    python benchmarks/engine.py MODEL_DIR [--quantize int8] [--vllm VENV] [--llamacpp FOLDER] [--json engine-NAME.json]
    python benchmarks/engine.py MODEL_DIR --isa avx2 --torch [--json engine-NAME-avx2.json]
    python benchmarks/engine.py MODEL_DIR --kv-dtype int8 --context 8192 --batches 1,8 [--quantize int4]

MODEL_DIR is a Hugging Face directory (scripts/make_random_model.py makes one of a real shape with random weights).
--vllm VENV and --llamacpp FOLDER (scripts/bench-peers makes both) measure these in the same run: the engines take
turns, so that a noisy machine disturbs all alike. vLLM computes in bf16; llama.cpp has bf16 weights, or q8_0 beside
int8 and q4_0 beside int4. Quantised weights are measured beside our own bf16, too, and a KV cache of 8 bits beside one
of the dtype of the model. --torch: torch's own kernels, kept to the instructions of --isa (with AVX2 alone, oneDNN has
no fast product in bf16: it would be faster in fp32).
Reported: medians, spreads, ratios of medians, and for each rate the share of its ceiling and what limits it. The
ceilings are measured in this run, with as many threads:

    step = max(bytes of weights / read bandwidth, operations / multiply-add peak) + attention of all layers

where the peak is that of the products that the weights are multiplied in (bf16, fp32 where the instruction set has no
bf16, int8), and attention is the time of that kernel alone. The largest of the three is what limits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common import report

from diptych.base.processor import read_processor

HERE = Path(__file__).parent
PREFILLS = (2048, 8000)
BATCHES = (1, 8, 32)
CONTEXT, STEPS = 512, 48
GGUF_TYPES = {"none": "bf16", "int8": "q8_0", "int4": "q4_0"}  # by --quantize
TORCH_ON = {  # what keeps torch to the instructions of a set
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
SLOT_TOKENS = 256  # llama.cpp divides its context into equal parts, each a multiple of this


class Engine(Protocol):
    """What is measured."""

    name: str

    def ask(self, **command: Any) -> float:
        """Tokens per second for one command, which peers/vllm_child.py describes."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Child:
    """An engine in its own process that answers one command at a time."""

    def __init__(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        self._read()

    def ask(self, **command: Any) -> float:
        """Tokens per second for one command of the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._read()["tok_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class LlamaCpp:
    """llama.cpp without its server: its own benchmark of batches, a process for each command, which warms up first."""

    def __init__(self, folder: Path, model: Path, quantize: str, threads: int) -> None:
        weights = GGUF_TYPES[quantize]
        self.name = f"llama.cpp {weights}"
        self._program, self._model = folder / "build/bin/llama-batched-bench", folder / f"{model.name}-{weights}.gguf"
        self._threads = threads
        for path in (self._program, self._model):
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: scripts/bench-peers {folder.parent} {model} makes it")

    def ask(self, **command: Any) -> float:
        """Tokens per second for one command, in a process of its own."""
        is_prefill = command["do"] == "prefill"
        prompt, batch = (command["tokens"], 1) if is_prefill else (command["context"], command["batch"])
        steps = 1 if is_prefill else command["steps"]
        context = batch * -(-(prompt + steps) // SLOT_TOKENS) * SLOT_TOKENS
        options = {
            "--model": self._model, "--threads": self._threads, "--threads-batch": self._threads,
            "--ctx-size": context, "-npp": prompt, "-ntg": steps, "-npl": batch, "--output-format": "jsonl",
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        done = subprocess.run([str(self._program), *words], capture_output=True, text=True)
        line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
        if done.returncode or line is None:
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-500:]}")
        return float(json.loads(line)["speed_pp" if is_prefill else "speed_tg"])

    def close(self) -> None:
        """Nothing is left to end."""


def vllm_environment(venv: Path) -> dict[str, str]:
    """What vLLM's CPU guide asks for: preloaded allocator and OpenMP, a thread on each core, offline."""
    tcmalloc = next(venv.parent.glob("debs/usr/lib/*/libtcmalloc_minimal.so.4"), None)
    preload = [str(path) for path in (tcmalloc, venv / "lib/libiomp5.so") if path and path.exists()]
    processor = read_processor()
    return {
        "LD_PRELOAD": ":".join(preload),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core[0]) for core in processor.cores_of(processor.usable)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def measure(engines: Sequence[Engine], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every command to every engine in turn, several times. The ratios are of the first to the others."""
    commands: list[dict[str, Any]] = [{"do": "prefill", "tokens": tokens} for tokens in PREFILLS]
    decode = {"do": "decode", "context": options.context, "steps": STEPS}
    commands += [decode | {"batch": batch} for batch in options.batches]
    for engine in engines:
        engine.ask(do="prefill", tokens=512)
    rows = []
    for command in commands:
        samples: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for _ in range(options.repetitions):
            for engine in engines:
                samples[engine.name].append(engine.ask(**command))
                time.sleep(0.3)
        label = f"prefill {command['tokens']}" if command["do"] == "prefill" else f"decode b{command['batch']}"
        row: dict[str, Any] = {"what": label}
        for name, values in samples.items():
            row[name] = round(statistics.median(values), 1)
            row[f"{name} spread"] = f"{min(values):.4g}..{max(values):.4g}"
        for other in engines[1:]:
            row[f"ratio to {other.name}"] = round(row[engines[0].name] / row[other.name], 2)
        print("  " + json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step: tokens that it yields, bytes of weights, operations of linear layers, seconds in attention
    of all layers."""

    tokens: int
    weight_bytes: int
    operations: float
    attention_s: float

    def limit(self, ceilings: dict[str, float], products: str) -> dict[str, Any]:
        """Tokens per second at the ceilings, and what the largest part of that time is."""
        parts = {
            "read bandwidth": self.weight_bytes / ceilings["read_gbps"] / 1e9,
            f"{products} products": self.operations / ceilings[f"{products}_gflops"] / 1e9,
        }
        linear_s = max(parts.values())
        parts["attention"] = self.attention_s
        milliseconds = {f"{name} ms": round(1e3 * seconds, 2) for name, seconds in parts.items()}
        limit = max(parts, key=lambda name: parts[name])
        return {"ceiling": round(self.tokens / (linear_s + self.attention_s), 1), "limit": limit, **milliseconds}


def kind_of_products(instruction_set: str, quantize: str, ceilings: dict[str, float]) -> str:
    """The ceiling that linear layers have: KIND of ``KIND_gflops``."""
    prefix = "amx_" if instruction_set == "amx" else ""
    wanted = f"{prefix}int8" if quantize != "none" else f"{prefix}bf16"
    has_products = quantize != "none" or instruction_set in ("amx", "avx512_bf16")
    return wanted if has_products and f"{wanted}_gflops" in ceilings else "fp32"


def add_limits(rows: list[dict[str, Any]], model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the ceilings, and add to each row its own, the share of it that was reached and what limits."""
    import torch
    from ceilings import best_of, measure_ceilings
    from kernels import attention_calls

    from diptych.runtime.kernels.instruction_set import choose
    from diptych.simulation.model_catalogue import load_model
    from diptych.simulation.weight_precision import QUANTIZED

    torch.set_num_threads(options.threads)
    instruction_set = choose(torch.bfloat16, options.isa)
    ceilings, spec = measure_ceilings(options.repetitions), load_model(str(model))
    if not ceilings:
        return {}
    products = kind_of_products(instruction_set, options.quantize, ceilings)
    weights, shape = QUANTIZED[options.quantize], (spec.heads, spec.kv_heads, spec.head_dim)
    weight_bytes = weights.layers.num_bytes(spec.layer_outputs, spec.layer_parameters())
    weight_bytes += weights.head.num_bytes(spec.vocab, spec.head_parameters)
    for row in rows:
        kind, size = row["what"].split()
        tokens = int(size.removeprefix("b"))
        before, new, num_seqs = (0, tokens, 1) if kind == "prefill" else (options.context + STEPS // 2, 1, tokens)
        call, layers, _ = attention_calls(shape, before, new, num_seqs, instruction_set, options.kv_dtype)
        attention_s = best_of([call], options.repetitions)[0] / layers * spec.layers
        operations = 2.0 * (tokens * spec.layer_parameters() + num_seqs * spec.head_parameters)
        row |= StepWork(tokens, weight_bytes, operations, attention_s).limit(ceilings, products)
        row["share"] = round(row["diptych"] / row["ceiling"], 2)
    return {"ceilings": ceilings, "instruction_set": instruction_set, "weight_bytes": weight_bytes}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Start the engines, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--llamacpp", type=Path)
    parser.add_argument("--quantize", choices=sorted(GGUF_TYPES), default="none", help="weights, as for diptych serve")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto", help="KV cache, as for diptych serve")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before a decode step")
    parser.add_argument("--batches", type=_numbers, default=BATCHES, help="sequences of a decode step, such as 1,8")
    parser.add_argument("--isa", default="auto", help="instruction set of the native kernels")
    parser.add_argument("--torch", action="store_true", help="beside torch's kernels, on the instructions of --isa")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=read_processor().num_threads)
    parser.add_argument("--json")
    options = parser.parse_args()
    script, threads = HERE / "peers" / "diptych_child.py", str(options.threads)
    length = str(max(8192, options.context + STEPS + 1))

    def child(name: str, isa: str, quantize: str, kv_dtype: str, env: dict[str, str] | None = None) -> Child:
        words = [sys.executable, str(script), str(options.model), threads, isa, quantize, kv_dtype, length]
        return Child(name, words, env)

    engines: list[Engine] = [child("diptych", options.isa, options.quantize, options.kv_dtype)]
    if options.kv_dtype != "auto":
        engines.append(child("diptych, KV bf16", options.isa, options.quantize, "auto"))
    if options.quantize != "none":
        engines.append(child("diptych bf16", options.isa, "none", options.kv_dtype))
    if options.torch:
        engines.append(child("torch", "torch", "none", "auto", TORCH_ON.get(options.isa)))
    if options.vllm:
        theirs = [str(options.vllm / "bin/python"), str(HERE / "peers" / "vllm_child.py"), str(options.model)]
        engines.append(Child("vllm", theirs, vllm_environment(options.vllm)))
    if options.llamacpp:
        engines.append(LlamaCpp(options.llamacpp, options.model, options.quantize, options.threads))
    rows = measure(engines, options)
    for engine in engines:
        engine.close()
    limits = add_limits(rows, options.model, options)
    name = f"engine {options.model.name}" + (f", {options.quantize}" if options.quantize != "none" else "")
    name += f", KV {options.kv_dtype}" if options.kv_dtype != "auto" else ""
    made = {"quantize": options.quantize, "kv_dtype": options.kv_dtype, "context": options.context}
    report(name, rows, options.json, threads=options.threads, **made, **limits)


if __name__ == "__main__":
    main()
