"""The KV codec: how fast one core encodes and decodes, and what INT8 and INT4 do to greedy output.

    python benchmarks/transfer.py codec [MODEL_DIR ...] [--json codec.json]

Rates are bytes of KV in the cache per second of one thread's own processor time (a busy machine disturbs that little),
the best and the median of several turns beside memcpy of the same bytes between two buffers. The KV is larger than the
processor's caches and its blocks are scattered, as in a server; rows of a few MB or less stay inside the caches. "raw"
copies whole blocks into a buffer: a transport that sends and receives segments in place does not need to.

Accuracy, for the bundled model on Python sources and for every MODEL_DIR on random tokens: a prompt is prefilled, its
KV goes through encode and decode in place, 64 tokens are generated greedily. "equal" is the share of them that is the
same as without a codec, position by position (after the first different token the texts are different ones);
"top-1" and the logits compare next-token predictions over the undisturbed text, from the changed and the true KV. The
gap is the median between the best and the second logit: random weights leave none, so any noise turns their text.
"""

import argparse
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import report
from tokenizers import Tokenizer

import diptych
from diptych.control.request import SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import allocate_cpu
from diptych.runtime.step.model_runner import ModelRunner, RunnerConfig, load_runner
from diptych.runtime.transfer.codec.kv_codec import KVCodec
from diptych.runtime.transfer.codec.wire_format import WireEncoding
from diptych.runtime.transfer.kv_format import KVFormat

BUNDLED = Path(diptych.__file__).parent / "bundled" / "stdlib-python"
SOURCES = ("heapq", "shelve", "bisect", "textwrap", "queue", "sched", "fnmatch", "graphlib")
SHAPES = (("qwen2.5-0.5b", 24, 2, 64), ("smollm2-135m", 30, 3, 64), ("8 heads of 128", 8, 8, 128))
BLOCK_SIZE, NUM_TOKENS, SMALL_TOKENS = 32, 4096, 32
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64


def seconds_of(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[list[float]]:
    """Seconds of processor time of each call, sorted; the calls take turns, and the first turn does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(repetitions + 1):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.thread_time_ns()
            call()
            if turn:
                taken.append((time.thread_time_ns() - began) / 1e9)
    return [sorted(taken) for taken in seconds]


def rate_rows(dtype: str, native: bool, repetitions: int) -> list[dict[str, Any]]:
    """GB/s of KV for each shape and encoding; torch code (native False) is measured on one small shape."""
    rows = []
    for name, layers, heads, dim in SHAPES if native else SHAPES[:1]:
        kv_format = KVFormat(name, layers, heads, dim, dtype, BLOCK_SIZE, "cpu")
        num_blocks = NUM_TOKENS // BLOCK_SIZE
        caches = [allocate_cpu(num_blocks, heads, BLOCK_SIZE, dim, getattr(torch, dtype)) for _ in range(layers)]
        for cache in (cache for pair in caches for cache in pair):
            cache.normal_()
        table = list(range(num_blocks))
        random.Random(0).shuffle(table)
        for encoding in encodings(dtype, native):
            codec = KVCodec(caches, kv_format, encoding, native)
            for num_tokens in (NUM_TOKENS, SMALL_TOKENS) if native else (NUM_TOKENS,):
                rows.append(rate_row(codec, table, num_tokens, repetitions))
    return rows


def encodings(dtype: str, native: bool) -> list[WireEncoding]:
    """What is worth measuring: RAW is nobody's kernel, only copies of whole blocks, one by one."""
    first = [WireEncoding.RAW] if native else []
    exact = [WireEncoding.FP32] if dtype == "float32" else []
    return [*first, *exact, WireEncoding.BF16, WireEncoding.INT8, WireEncoding.INT4]


def rate_row(codec: KVCodec, table: list[int], num_tokens: int, repetitions: int) -> dict[str, Any]:
    """One encoding, both directions, beside memcpy."""
    wire = bytearray(codec.num_bytes(num_tokens))
    size = codec.format.bytes_per_block * num_tokens // BLOCK_SIZE
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = seconds_of(
        [
            lambda: codec.encode(table, 0, num_tokens, wire),
            lambda: codec.decode(wire, table, 0, num_tokens),
            lambda: target.copy_(source),
        ],
        repetitions if num_tokens == NUM_TOKENS else 50 * repetitions,
    )
    row: dict[str, Any] = {
        "shape": codec.format.model,
        "cache": codec.format.dtype,
        "by": "native" if codec.is_native else "torch",
        "encoding": codec.encoding.name.lower(),
        "mb": round(size / 1e6, 2),
        "wire share": round(len(wire) / size, 3),
    }
    for what, taken in zip(("encode", "decode", "memcpy"), times, strict=True):
        row[f"{what} gbps"] = round(size / taken[0] / 1e9, 2)
        row[f"{what} median"] = round(size / statistics.median(taken) / 1e9, 2)
    return row


def gaussian_rows() -> list[dict[str, Any]]:
    """Errors of values that are all drawn alike: what the format itself loses."""
    kv_format = KVFormat("gaussian", 4, 8, 128, "float32", BLOCK_SIZE, "cpu")
    table, rows = list(range(32)), []
    for encoding in (WireEncoding.BF16, WireEncoding.INT8, WireEncoding.INT4):
        layers = [allocate_cpu(len(table), 8, BLOCK_SIZE, 128, torch.float32) for _ in range(4)]
        true_kv = [(k.normal_().clone(), v.normal_().clone()) for k, v in layers]
        codec = KVCodec(layers, kv_format, encoding)
        wire = bytearray(codec.num_bytes(len(table) * BLOCK_SIZE))
        codec.encode(table, 0, len(table) * BLOCK_SIZE, wire)
        codec.decode(wire, table, 0, len(table) * BLOCK_SIZE)
        errors = kv_errors(true_kv, layers, len(table))
        rows.append({"encoding": encoding.name.lower()} | {key: round(error, 5) for key, error in errors.items()})
    return rows


@dataclass(frozen=True)
class Subject:
    """A model and prompts for it, all of PROMPT_TOKENS tokens."""

    name: str
    runner: ModelRunner
    prompts: list[list[int]]

    def codec(self, encoding: WireEncoding) -> KVCodec:
        """A codec over the runner's own cache."""
        heads = self.runner.model_config.attention
        dtype = str(self.runner.kv.layers[0][0].dtype).removeprefix("torch.")
        layers = self.runner.model_config.num_layers
        kv_format = KVFormat(self.name, layers, heads.num_kv_heads, heads.head_dim, dtype, BLOCK_SIZE, "cpu")
        return KVCodec(self.runner.kv.layers, kv_format, encoding)


def load_subject(model: Path, num_prompts: int) -> Subject:
    """The bundled model with Python sources, any other with random tokens."""
    needed = -(-(PROMPT_TOKENS + OUTPUT_TOKENS + 1) // BLOCK_SIZE)
    runner = load_runner(RunnerConfig(model=model, block_size=BLOCK_SIZE, num_blocks=needed, max_num_seqs=4))
    if model == BUNDLED:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        library = Path(sysconfig.get_path("stdlib"))
        texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES[:num_prompts]]
        return Subject("bundled", runner, [tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in texts])
    vocab = runner.model_config.vocab_size
    draws = [random.Random(seed) for seed in range(num_prompts)]
    prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for draw in draws]
    return Subject(model.name, runner, prompts)


def generate(subject: Subject, prompt: list[int], change: Callable[[], None] | None) -> list[int]:
    """The first token, then OUTPUT_TOKENS more, greedily; ``change`` is done to the KV after the prefill."""
    runner, total = subject.runner, OUTPUT_TOKENS + 1
    sampling = SamplingParams(max_tokens=total, temperature=0.0, ignore_eos=True)
    runner.add_request("r", prompt, sampling)
    held = -(-len(prompt) // BLOCK_SIZE)
    chunk = ScheduledPrefill("r", 0, len(prompt), (tuple(range(held)),), True)
    tokens = list(runner.execute(SchedulerOutput(0, prefills=(chunk,))).payload.token_ids)
    if change is not None:
        change()
    while len(tokens) < total:
        grows = len(prompt) + len(tokens) > held * BLOCK_SIZE
        new_blocks = (("r", 0, held),) if grows else ()
        held += grows
        step = SchedulerOutput(len(tokens), num_decodes=1, new_blocks=new_blocks)
        tokens += runner.execute(step).payload.token_ids
    runner.execute(SchedulerOutput(total, finished=("r",)))
    return tokens


@torch.inference_mode()
def logits_after(subject: Subject, start: int, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] fp32 of ``tokens`` at positions from ``start`` on, over the KV that is there."""
    count, end = len(tokens), start + len(tokens)
    positions = torch.arange(start, end)
    batch = InputBatch(
        torch.tensor(tokens), positions, (positions,), torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32), (torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32)[None],),
        torch.arange(count), 0, count, end,
    )  # fmt: skip
    return subject.runner.model.logits(subject.runner.forward(batch)).float()


def accuracy_rows(subject: Subject) -> list[dict[str, Any]]:
    """One row per codec: errors of the KV, of the logits and of the text, over all prompts."""
    samples: dict[str, list[dict[str, float]]] = {"int8": [], "int4": []}
    for prompt in subject.prompts:
        expected = generate(subject, prompt, None)
        true_kv = [(k.clone(), v.clone()) for k, v in subject.runner.kv.layers]
        logits = logits_after(subject, len(prompt), expected[:-1])
        for name, rows in samples.items():
            codec, table = subject.codec(WireEncoding[name.upper()]), list(range(-(-len(prompt) // BLOCK_SIZE)))

            def through_codec(codec: KVCodec = codec, table: list[int] = table, length: int = len(prompt)) -> None:
                wire = bytearray(codec.num_bytes(length))
                codec.encode(table, 0, length, wire)
                codec.decode(wire, table, 0, length)

            tokens = generate(subject, prompt, through_codec)[1:]
            row = kv_errors(true_kv, subject.runner.kv.layers, len(table))
            changed = logits_after(subject, len(prompt), expected[:-1])
            equal = [one == other for one, other in zip(tokens, expected[1:], strict=True)]
            row["equal"] = sum(equal) / len(equal)
            row["until different"] = float(equal.index(False) if False in equal else len(equal))
            row["top-1"] = float((changed.argmax(-1) == logits.argmax(-1)).float().mean())
            row["mean logit difference"] = float((changed - logits).abs().mean())
            best = logits.topk(2).values
            row["gap of the best two"] = float((best[:, 0] - best[:, 1]).median())
            difference = changed.log_softmax(-1) - logits.log_softmax(-1)
            row["kl nats"] = float(-(logits.softmax(-1) * difference).sum(-1).mean())
            rows.append(row)
            for pair, saved in zip(subject.runner.kv.layers, true_kv, strict=True):
                for cache, values in zip(pair, saved, strict=True):
                    cache.copy_(values)
    return [
        {"model": subject.name, "codec": name, "prompts": len(rows)}
        | {key: round(statistics.mean(row[key] for row in rows), 5) for key in rows[0]}
        for name, rows in samples.items()
    ]


def kv_errors(true_kv: Sequence[Any], layers: Sequence[Any], num_blocks: int) -> dict[str, float]:
    """Root of the mean square error of K and V relative to their own, mean over layers."""
    errors: dict[str, float] = {}
    for index, name in enumerate(("k error", "v error")):
        shares = []
        for saved, pair in zip(true_kv, layers, strict=True):
            values, changed = saved[index][:num_blocks].float(), pair[index][:num_blocks].float()
            shares.append(float(((changed - values).pow(2).mean() / values.pow(2).mean()).sqrt()))
        errors[name] = statistics.mean(shares)
    return errors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help=f"of each model, at most {len(SOURCES)}")


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rates = [row for dtype in ("bfloat16", "float32") for row in rate_rows(dtype, True, options.repetitions)]
    rates += rate_rows("bfloat16", False, 3)
    report("codec rates, one core", rates)
    gaussian = gaussian_rows()
    report("relative RMS error, Gaussian values", gaussian)
    accuracy = []
    for model in (BUNDLED, *options.models):
        accuracy += accuracy_rows(load_subject(model, options.prompts))
        print(accuracy[-2:], flush=True)
    report("greedy output after the codec", accuracy, options.json, rates=rates, gaussian=gaussian)
