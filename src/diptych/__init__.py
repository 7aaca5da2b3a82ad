"""Diptych: LLM inference served as the two jobs that it is, prefill and decode.

``LLM``, ``AsyncLLM`` and ``SamplingParams`` are loaded on first use, so that the base install (no torch) imports fast.
"""

from typing import TYPE_CHECKING, Any

from diptych.base import compiled_modules

if TYPE_CHECKING:
    from diptych.control.request import SamplingParams
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.llm import LLM

__version__ = "0.1.0"
if not compiled_modules.is_built():
    compiled_modules.use_sources()
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from diptych.control.request import SamplingParams

        return SamplingParams
    if name == "LLM":
        from diptych.serving.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from diptych.serving.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'diptych' has no attribute {name!r}")
