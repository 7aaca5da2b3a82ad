"""Profiles of kernels as a serving engine runs them, put together from several published measurements of one GPU.

No published profile of the H100, the A100 and the A6000 holds all kernels of an engine: the artifact of ISPASS'26 ran
norms and rotary embeddings as chains of elementwise kernels and decode attention on a few cores of the GPU, vidur's
profiler holds no output layer, and none holds the collectives. What is missing comes from measurements of vLLM's
kernels on the same GPU, and where there are none from a law, which the table then says.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from layer_profiles import (
    Profile,
    Rows,
    custom_all_reduce,
    fused_kernels,
    read_artifact,
    read_vllm,
    rows_of,
    vllm_attention,
)

from diptych.simulation.costs.collectives import all_reduce
from diptych.simulation.costs.interpolation import Surface
from diptych.simulation.costs.operator_tables import layer_tables
from diptych.simulation.costs.operators import load_operator_tables
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism

H100_ATTENTION = "systems/data/h100_sxm/attention/vllm/0.24.0"
H100_ALL_REDUCE = "systems/data/h100_sxm/comm/vllm/0.24.0/custom_allreduce_perf.parquet"
VALUE_BYTES = 2
VIDUR_OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj",
    "mlp_act", "mlp_down_proj", "add", "add",
)  # fmt: skip


def link_all_reduce(hardware: str, num_devices: int, hidden: int) -> Callable[[int], float]:
    """Microseconds of an all-reduce of the activations of some tokens, by the law of the hardware entry's link."""
    law = all_reduce(load_hardware(hardware), num_devices)
    return lambda tokens: 1e6 * law.seconds(tokens * hidden * VALUE_BYTES)


def read_h100_llama_3(folder: Path, size: str, tensor_parallel: int) -> Profile:
    """Llama-3.1-8B or 70B on H100: the artifact's matrix products, vidur's norms and rotary embedding, vLLM's attention
    and all-reduce."""
    layers, dimensions, hidden, heads = (80, "70b", 8192, 64) if size == "70B" else (32, "7b", 4096, 32)
    path = folder / f"llmservingsim/profiles/v0/H100/meta-llama/Llama-3.1-{size}/tp{tensor_parallel}"
    kernels = fused_kernels(
        folder / f"vidur/compute/h100/meta-llama/Llama-2-{dimensions}-hf/mlp.csv.gz", tensor_parallel
    )
    added = kernels
    if tensor_parallel > 1:
        reduce_us = custom_all_reduce(folder / "aiconfigurator" / H100_ALL_REDUCE, tensor_parallel, hidden)

        def added(tokens: int) -> float:
            return 2 * reduce_us(tokens) + kernels(tokens)

    profile = read_artifact(path, layers, added, fused=True)
    attention = folder / "aiconfigurator" / H100_ATTENTION
    prefill, decode = vllm_attention(attention, heads // tensor_parallel, 8 // tensor_parallel)
    return replace(profile, prefill=prefill, decode=decode)


def read_h100_70b_eager(folder: Path) -> Profile:
    """Llama-3.1-70B on four H100 as the artifact measured it, and vLLM's all-reduce."""
    path = folder / "llmservingsim/profiles/v0/H100/meta-llama/Llama-3.1-70B/tp4"
    reduce_us = custom_all_reduce(folder / "aiconfigurator" / H100_ALL_REDUCE, 4, 8192)
    return read_artifact(path, 80, lambda tokens: 2 * reduce_us(tokens))


def read_vidur_layers(folder: Path, hardware: str, dimensions: str, model: str, tensor_parallel: int) -> Profile:
    """Layers of the ``dimensions`` of a model as vidur measured them (projections, MLP, norms, rotary embedding), and
    vLLM's attention, output layer and all-reduce of the same GPU, as the operators of the catalogue hold them."""
    operators, spec = load_operator_tables(load_hardware(hardware)), load_model(model)
    tables = layer_tables(operators, spec, Parallelism(tensor_parallel), 16, 16)
    path = folder / f"vidur/compute/{hardware.partition('-')[0]}/meta-llama/{dimensions}/mlp.csv.gz"
    tokens: dict[int, float] = {}
    for row in rows_of(path):
        if row["num_tensor_parallel_workers"] == str(tensor_parallel):
            count = int(row["num_tokens"])
            layer = 1000 * sum(float(row[f"time_stats.{name}.median"]) for name in VIDUR_OPERATORS)
            tokens[count] = spec.layers * layer + 1000 * float(row["time_stats.emb.median"])
            if tensor_parallel > 1:  # after attention, after the MLP, and once after the embedding
                tokens[count] += (2 * spec.layers + 1) * operators.all_reduce[tensor_parallel](count * spec.hidden)
    outputs = {int(knot): value for knot, value in zip(tables.sequences.knots, tables.sequences.values, strict=True)}
    prefill, decode = as_rows(tables.prefill_attention), as_rows(tables.decode_attention)
    return Profile(spec.layers, tokens, outputs, prefill, decode)


def as_rows(surface: Surface) -> Rows:
    """A surface as measured points; rows between whole numbers are left out."""
    return {
        int(knot): {int(x): value for x, value in zip(row.knots, row.values, strict=True)}
        for knot, row in zip(surface.knots, surface.rows, strict=True)
        if knot == int(knot)
    }


def read_a6000_8b(folder: Path, tensor_parallel: int) -> Profile:
    """Llama-3.1-8B on A6000: matrix products, activation and prompts of the artifact; norms and rotary embedding by the
    roofline's law of the hardware entry; decode attention as vLLM's on an RTX 4090 (the same heads), slower by the
    ratio of the memory bandwidths. A device of two has half of the heads: the time of half of the batch."""
    device, other = load_hardware("a6000"), load_hardware("rtx-4090")
    achieved = device.achieved
    moved = 2 * 4 * 4096 + 2 * (4096 + 1024) / tensor_parallel  # values of a token: two norms with residual, rotary
    rate = device.memory_bandwidth * achieved.elementwise_memory
    reduce_us = link_all_reduce("a6000", tensor_parallel, 4096)

    def added(tokens: int) -> float:
        kernels = 3 * achieved.elementwise_launch_s + tokens * moved * VALUE_BYTES / rate
        return 1e6 * kernels + 2 * reduce_us(tokens)

    root = folder / "llmservingsim/profiles"
    profile = read_artifact(root / f"v0/A6000/meta-llama/Llama-3.1-8B/tp{tensor_parallel}", 32, added, fused=True)
    decode = read_vllm(root / "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1", 32).decode
    slower = other.memory_bandwidth / device.memory_bandwidth
    scaled = {
        batch * tensor_parallel: {context: slower * value for context, value in row.items()}
        for batch, row in decode.items()
    }
    return replace(profile, decode=scaled)


def read_a6000_8b_eager(folder: Path) -> Profile:
    """Llama-3.1-8B on one A6000 as the artifact measured it."""
    path = folder / "llmservingsim/profiles/v0/A6000/meta-llama/Llama-3.1-8B/tp1"
    return read_artifact(path, 32, lambda tokens: 0.0)
