"""A GGUF file in the library: the same answers as the directory that it was made of."""

import json
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from tests.gguf_files import write_model

from diptych import LLM, SamplingParams
from diptych.serving.link.engine_options import BUNDLED_MODEL


def test_the_bundled_model_as_a_file_gives_the_same_answers(tmp_path: Path) -> None:
    vocabulary = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    special = {token["content"] for token in vocabulary["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in sorted(ids, key=ids.__getitem__)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocabulary["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }
    file = LLM(write_model(tmp_path / "m.gguf", BUNDLED_MODEL, kind=Kind.BF16, **metadata), threads=1)
    directory = LLM(threads=1)
    prompt = directory.tokenizer.encode("def read(self, path):\n")
    sampling = SamplingParams(max_tokens=24, temperature=0)
    [ours], [expected] = file.generate(prompt, sampling), directory.generate(prompt, sampling)
    assert ours.outputs[0].token_ids == expected.outputs[0].token_ids
    assert ours.outputs[0].text == expected.outputs[0].text
