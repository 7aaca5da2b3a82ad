"""What sampling a step costs on the device, beside the same on the host; and the INT8 codec of KV.

Every set of rows is checked first: the device picks the tokens that the host's sampler picks.
"""

from statistics import median

import numpy as np
import torch
from benchmarks.gpu_parts.models import DEVICE, row, seconds_of

from diptych.control.request import SamplingParams
from diptych.runtime.device.host_copies import memory_of
from diptych.runtime.kernels.triton_kernels import has_triton
from diptych.runtime.sampling.batch_sampler import Adjustment, BatchSampler, Pick, RowBatch, pick_torch
from diptych.runtime.sampling.sampler import RowSampling, row_as_float32, sample_row, uniforms
from diptych.runtime.sampling.token_counts import CountedTokens
from diptych.runtime.transfer.codec.kv_codec import KVCodec
from diptych.runtime.transfer.codec.wire_format import WireEncoding
from diptych.runtime.transfer.kv_format import KVFormat

ON_GPU = DEVICE.type == "cuda"
VOCABULARY, BATCHES, REPETITIONS = (151936, (1, 32, 256), 15) if ON_GPU else (1000, (1, 3), 2)
CHECKED = 8  # rows
CODEC_TOKENS = 8192 if ON_GPU else 64
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs 5": SamplingParams(temperature=0.8, logprobs=5),
}


def batch_of(params: SamplingParams, tokens: list[np.ndarray]) -> RowBatch:
    """A row for each of these histories."""
    count = len(tokens)
    adjustments = {}
    if params.repetition_penalty != 1.0:
        adjustments = {
            place: Adjustment(params, tokens=CountedTokens(tokens[place], tokens[place], 500)) for place in range(count)
        }
    return RowBatch(
        rows=np.arange(count),
        temperatures=np.full(count, params.temperature),
        top_ks=np.full(count, params.top_k),
        top_ps=np.full(count, params.top_p),
        min_ps=np.full(count, params.min_p),
        uniforms=uniforms(np.arange(count), np.full(count, 1000)),
        forced=np.full(count, -1),
        num_logprobs=np.full(count, -1 if params.logprobs is None else params.logprobs),
        adjustments=adjustments,
    )


def sampling() -> None:
    """Rows by kind of sampling, size of the batch, and what picks."""
    picks: dict[str, Pick] = {"torch": pick_torch}
    if has_triton() and ON_GPU:
        from diptych.runtime.kernels.triton_kernels.pick_tokens import pick_triton

        picks["triton"] = pick_triton
    rng = np.random.default_rng(0)
    for count in BATCHES:
        logits = (torch.randn(count, VOCABULARY, device=DEVICE) * 3).to(torch.bfloat16 if ON_GPU else torch.float32)
        tokens = [rng.integers(0, VOCABULARY, 1000, dtype=np.int32) for _ in range(count)]
        for name, params in PARAMS.items():
            batch = batch_of(params, tokens)
            expected = [
                sample_row(
                    row_as_float32(logits, place), RowSampling(params, float(batch.uniforms[place]), tokens[place], 500)
                )
                for place in range(min(count, CHECKED))
            ]
            for kernel, pick in picks.items():
                sampler = BatchSampler(DEVICE, memory_of(DEVICE), pick)
                same = sampler.sample(logits, batch).result()[0][:CHECKED].tolist() == expected
                found = seconds_of(lambda s=sampler, b=batch, m=logits: s.sample(m, b).result(), REPETITIONS)
                row(what=f"{name}, b{count}", kernels=kernel, ms=round(1e3 * median(found), 3), same_tokens=same)


def codec() -> None:
    """KV of a prompt of a model with 8 B parameters to wire bytes in host memory, and back."""
    form = KVFormat("model", 32 if ON_GPU else 2, 8, 128, "bfloat16" if ON_GPU else "float32", 32, "cuda")
    blocks = list(range(CODEC_TOKENS // form.block_size))[::-1]

    def values() -> torch.Tensor:
        return torch.randn(len(blocks), form.block_size, 8, 128, device=DEVICE).to(getattr(torch, form.dtype))

    caches = [(values(), values()) for _ in range(form.num_layers)]
    wires = []
    for kernel in ("torch", "triton") if has_triton() and ON_GPU else ("torch",):
        encoder = KVCodec(caches, form, WireEncoding.INT8)
        encoder.uses_triton = kernel == "triton"
        wire = bytearray(encoder.num_bytes(CODEC_TOKENS))
        encode_s = median(seconds_of(lambda e=encoder, w=wire: e.encode(blocks, 0, CODEC_TOKENS, w), 3, warm_up=1))
        decode_s = median(seconds_of(lambda e=encoder, w=wire: e.decode(w, blocks, 0, CODEC_TOKENS), 3, warm_up=1))
        wires.append(wire)
        row(
            what=f"int8 codec, {CODEC_TOKENS} tokens", kernels=kernel, encode_ms=round(1e3 * encode_s, 2),
            decode_ms=round(1e3 * decode_s, 2), wire_mib=len(wire) >> 20,
        )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Print a row for each."""
    sampling()
    codec()


if __name__ == "__main__":
    main()
