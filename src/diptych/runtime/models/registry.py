"""Which function loads which architecture."""

from collections.abc import Callable

from diptych.runtime.models.layers import DecoderWeights, LayerLoader
from diptych.runtime.models.llama import load_llama
from diptych.runtime.models.qwen2 import load_qwen2
from diptych.runtime.models.qwen3 import load_qwen3

MODELS: dict[str, Callable[[LayerLoader], DecoderWeights]] = {
    "LlamaForCausalLM": load_llama,
    "MistralForCausalLM": load_llama,
    "Qwen2ForCausalLM": load_qwen2,
    "Qwen3ForCausalLM": load_qwen3,
}
