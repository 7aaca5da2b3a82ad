"""Writes GGUF files with the gguf package, an implementation of the format that is not ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

F32 = GGMLQuantizationType.F32
VOCABULARY: dict[str, Any] = {  # byte-level BPE of three letters
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", "<|im_end|>", "<tool>", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 4, 3],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 7,
    "tokenizer.ggml.eos_token_id": 7,
}

Tensors = Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """A file with this metadata (a value of None: no entry) and these tensors: fp32, or bytes of a type."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        match value:
            case None:
                pass
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in (tensors or {}).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, F32)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
