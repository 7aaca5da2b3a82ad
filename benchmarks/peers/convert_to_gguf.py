"""A model directory as a GGUF file, by llama.cpp's own converter, whatever the tokenizer is.

Run by scripts/bench-peers with a Python that has torch and transformers:
    convert_to_gguf.py LLAMA_CPP_SOURCES MODEL_DIR --outtype bf16 --outfile FILE
The converter knows tokenizers by a hash of what they make of a test text, and refuses every other one. Checkpoints with
random weights have vocabularies of their own: those are written down as splitting text the way Qwen2 does. That changes
how text is tokenised, never how long it takes to compute a token.
"""

import importlib
import runpy
import sys
from typing import Any


def main() -> None:
    """Convert."""
    sources = sys.argv.pop(1)
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    model_class = importlib.import_module("conversion.base").TextModel
    known = model_class.get_vocab_base_pre

    def pre_tokenizer(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            print("an unknown tokenizer: text is split as Qwen2 does", file=sys.stderr)
            return "qwen2"

    model_class.get_vocab_base_pre = pre_tokenizer
    sys.argv[0] = f"{sources}/convert_hf_to_gguf.py"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
