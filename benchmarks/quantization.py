"""What weights and a KV cache in whole numbers cost in quality: bits per byte of text that the model has not seen.

    python benchmarks/quantization.py [MODEL] [--text FILE ...] [--tokens 60000] [--json quantization.json]

MODEL: a directory or a GGUF file; default: the bundled one, whose held-out files are then the text (the split of
scripts/train_bundled_model.py: exact with the Python version that evaluation.json names). Each document is scored from
its beginning in windows of 2,048 tokens, every token given those before it in its window; all formats see the same
windows.
"""

import argparse
import itertools
import math
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from common import report

from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import SamplingParams
from diptych.runtime.local_engine import LocalEngine, engine_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

WINDOW = 2048


def held_out() -> list[str]:
    """The files that the bundled model was not trained on."""
    path = Path(__file__).parent.parent / "scripts" / "train_bundled_model.py"
    spec = spec_from_file_location("train_bundled_model", path)
    assert spec is not None and spec.loader is not None
    training: Any = module_from_spec(spec)
    spec.loader.exec_module(training)
    with tempfile.TemporaryDirectory() as work:
        training.corpus(argparse.Namespace(work=Path(work)))
        return list(training.documents(Path(work), "heldout"))


def windows(texts: list[str], tokenizer: Tokenizer, limit: int) -> tuple[list[list[int]], int]:
    """(windows of tokens, bytes of the text they stand for). Whole documents, until there are ``limit`` tokens."""
    found: list[list[int]] = []
    num_tokens = num_bytes = 0
    for text in texts:
        if num_tokens >= limit:
            break
        tokens = tokenizer.encode(text, add_special_tokens=False)
        found += [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
        num_tokens += len(tokens)
        num_bytes += len(text.encode())
    return found, num_bytes


def bits(model: Path, quantize: str, kv_dtype: str, sequences: list[list[int]]) -> tuple[float, str]:
    """(bits of all tokens, the formats of the weights). A window begins behind an end-of-text token."""
    config = RunnerConfig(model, max_num_seqs=8, kv_bytes=1 << 29, quantize=quantize, kv_dtype=kv_dtype)
    runner = load_runner(config)
    engine = LocalEngine(EngineCore(engine_config(runner, enable_prefix_cache=False)), runner)
    first = runner.model_config.eos_token_ids[0]
    total = 0.0
    for index, tokens in enumerate(sequences):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(str(index), [first, *tokens], sampling)
        while (step := engine.step()) is not None:
            for _, entries in step.tokens.prompt_logprobs.values():
                total -= sum(entry.logprob for entry in entries)
        print(f"\r{quantize}, KV {kv_dtype}: {index + 1} of {len(sequences)} windows", end="", file=sys.stderr)
    print(file=sys.stderr)
    return total / math.log(2), runner.loaded.weights


def main() -> None:
    """Score, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--text", type=Path, nargs="+", help="documents; default: the bundled model's held-out files")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--json")
    options = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in options.text] if options.text else held_out()
    sequences, num_bytes = windows(texts, Tokenizer(options.model), options.tokens)
    rows: list[dict[str, Any]] = []
    exact = 0.0
    for kv_dtype, quantize in itertools.product(("auto", "int8"), QUANTIZATIONS):
        total, formats = bits(options.model, quantize, kv_dtype, sequences)
        exact = exact or total
        row = {"quantize": quantize, "weights": formats, "kv_dtype": kv_dtype}
        rows.append(
            row | {"bits per byte": round(total / num_bytes, 4), "change %": round(100 * (total / exact - 1), 3)}
        )
    tokens = sum(map(len, sequences))
    report(
        "quality of quantised weights and KV",
        rows,
        options.json,
        model=options.model.name,
        tokens=tokens,
        bytes=num_bytes,
    )


if __name__ == "__main__":
    main()
