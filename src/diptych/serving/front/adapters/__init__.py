"""One file for each kind of engine. A new kind is a file here, a line in ADAPTERS, and its name in EngineKind."""

from diptych.serving.front.adapters.llamacpp_adapter import LlamaCppAdapter
from diptych.serving.front.adapters.openai_adapter import OpenAIAdapter
from diptych.serving.front.adapters.sglang_adapter import SGLangAdapter
from diptych.serving.front.adapters.vllm_adapter import VLLMAdapter
from diptych.serving.front.capabilities import EngineAdapter
from diptych.serving.front.engine_spec import EngineKind

ADAPTERS: dict[EngineKind, EngineAdapter] = {
    "vllm": VLLMAdapter(),
    "sglang": SGLangAdapter(),
    "llamacpp": LlamaCppAdapter(),
    "openai": OpenAIAdapter(),
}
