"""Step durations from NVIDIA's aiconfigurator-core: its measured operator tables behind our seam (extra ``planner``).

Owns the translation: our plans into its queries. Must never be imported for its tables by the base install: the library
is loaded when a cost model is made, and what it lacks is a ConfigError.
"""

import importlib
from bisect import bisect_right
from functools import cache, lru_cache
from typing import Protocol, Self

from diptych.control.errors import ConfigError
from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import UNBOUNDED, DecodeLine

NS_PER_MS = 1_000_000
# Contexts of one sequence at which decode steps are asked for; in between a step follows a line, beyond the last too.
KNOTS = (1, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
CACHE_LIMIT = 65_536

SYSTEMS = {
    "a100-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
MODELS = {
    "llama-3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
QUANT_MODES = {16: "bfloat16", 8: "fp8"}


class Engine(Protocol):
    """What we use of the library's EngineHandle. Milliseconds; ``isl`` counts the prefix in."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """A step that computes the last isl - prefix tokens of ``bs`` prompts."""
        ...

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        """A decode step of ``gen_tokens`` sequences, each attending to isl + osl / 2 tokens."""
        ...

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        """Total, everything but attention, attention of the chunk, attention of the decodes."""
        ...


class AIConfiguratorCost:
    """CostModel over a compiled engine of aiconfigurator-core.

    Decode steps are sampled at KNOTS tokens per sequence (once per number of sequences) and follow lines in between. In
    a mixed step everything but attention is priced once for all tokens, attention chunk by chunk.
    """

    def __init__(self, engine: Engine, name: str = "aiconfigurator") -> None:
        self.name = name
        self._engine = engine
        self._lines = cache(self._decode_lines)
        self._shared_ms = lru_cache(CACHE_LIMIT)(self._ask_shared_ms)

    @classmethod
    def compile(
        cls,
        model: str,
        hardware: str,
        tensor_parallel: int = 1,
        *,
        backend: str = "vllm",
        weight_bits: int = 16,
        kv_bits: int = 16,
    ) -> Self:
        """Load the library and its tables (seconds). Names of the catalogue, or the library's own.

        Raises ConfigError when the library is not installed or has no data for the combination.
        """
        for param, bits in (("weight_bits", weight_bits), ("kv_bits", kv_bits)):
            if bits not in QUANT_MODES:
                raise ConfigError(f"{param} is {bits}; aiconfigurator takes 16 or 8", param=param)
        try:
            library = importlib.import_module("aiconfigurator_core.sdk.engine")
        except ImportError as error:
            raise ConfigError(
                "the cost model 'aiconfigurator' needs a library: pip install 'diptych[planner]'", param="cost"
            ) from error
        path, system = MODELS.get(model.lower(), model), SYSTEMS.get(hardware.lower(), hardware)
        mode = QUANT_MODES[weight_bits]
        try:
            engine = library.EngineHandle.compile(
                path,
                system,
                backend,
                tp_size=tensor_parallel,
                moe_tp_size=tensor_parallel,
                gemm_quant_mode=mode,
                moe_quant_mode=mode,
                kvcache_quant_mode=QUANT_MODES[kv_bits],
            )
        except Exception as error:  # the library's own types differ from release to release
            raise ConfigError(
                f"aiconfigurator has no data for {path} on {system} with {backend}: {error}", param="cost"
            ) from error
        return cls(engine, f"aiconfigurator:{path}:{system}:{backend}:tp{tensor_parallel}:w{weight_bits}:kv{kv_bits}")

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """See CostModel."""
        bounds, lines = self._lines(num_seqs)
        return lines[bisect_right(bounds, context)]

    def step_ns(self, output: SchedulerOutput) -> int:
        """See CostModel."""
        features = output.features
        num_seqs, context = features.decode_seqs, features.decode_context
        if not output.prefills:
            return self.decode_line(num_seqs, context).step_ns(context)
        engine = self._engine
        total = self._shared_ms(features.prefill_tokens, num_seqs)
        for chunk in output.prefills:
            whole = engine.predict_prefill_latency(1, chunk.start + chunk.num_tokens, chunk.start)
            total += max(0.0, whole - self._shared_ms(chunk.num_tokens, 0))
        if num_seqs:
            total += engine.mixed_step_breakdown(1, num_seqs, max(1, context // num_seqs - 1), 2)[3]
        return max(1, int(total * NS_PER_MS))

    def _ask_shared_ms(self, num_prefill_tokens: int, num_seqs: int) -> float:
        """Everything but attention."""
        return self._engine.mixed_step_breakdown(num_prefill_tokens, num_seqs, num_prefill_tokens, 2)[1]

    def _decode_lines(self, num_seqs: int) -> tuple[list[int], list[DecodeLine]]:
        """Contexts at which the line changes, and one line more than those; never falling with the context."""
        times: list[float] = []
        for knot in KNOTS:
            time = self._engine.decode_step_latency(num_seqs, max(1, knot - 1), 2) * NS_PER_MS
            times.append(max(time, times[-1]) if times else time)
        bounds = [num_seqs * knot for knot in KNOTS]
        lines: list[DecodeLine] = []
        for i in range(len(KNOTS) - 1):
            slope = (times[i + 1] - times[i]) / (bounds[i + 1] - bounds[i])
            intercept = times[i] - slope * bounds[i]
            if intercept < 0:  # a line must not start below nothing: through the origin and the right end
                intercept, slope = 0.0, times[i + 1] / bounds[i + 1]
            is_last = i == len(KNOTS) - 2
            lines.append(DecodeLine.of(intercept, slope, UNBOUNDED if is_last else bounds[i + 1]))
        return bounds[1:-1], lines
