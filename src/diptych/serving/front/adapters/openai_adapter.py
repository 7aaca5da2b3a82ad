"""Any server that speaks OpenAI's API and says nothing of itself: Ollama, TGI, LiteLLM, a hosted model.

It is placed by its own requests alone, and its cache is assumed from what it was sent.
"""

from collections.abc import Sequence
from typing import Any

from diptych.serving.front.adapters.openai_parts import model_of, real_token, usage_wanted
from diptych.serving.front.capabilities import EngineFacts, whole_number
from diptych.serving.front.engine_connection import ConnectionPool
from diptych.serving.front.engine_load import EngineGauges
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_request import RelayRequest
from diptych.serving.front.tokenized_prompt import TokenizedPrompt


class OpenAIAdapter:
    """The EngineAdapter of any other OpenAI-compatible server."""

    gauge_path = ""

    async def look(self, pool: ConnectionPool, spec: EngineSpec) -> EngineFacts:
        model = await model_of(pool, spec)
        name = str(model["id"])
        await real_token(pool, name)
        return EngineFacts("openai", "", name, whole_number(model.get("max_model_len")))

    def changes(self, request: RelayRequest, facts: EngineFacts) -> dict[str, Any]:
        return usage_wanted(request)

    def read_gauges(self, page: bytes) -> EngineGauges | None:
        return None

    async def tokenize(self, pool: ConnectionPool, request: RelayRequest, facts: EngineFacts) -> TokenizedPrompt | None:
        return None

    async def text_of(self, pool: ConnectionPool, token_ids: Sequence[int], model: str) -> str | None:
        """Always None: answers name no tokens."""
        return None
