"""llama.cpp's server: /props says what it is, /metrics (with --metrics) how busy, and prompts share a slot's cache.

``cache_prompt`` is asked for, since older builds have it off. A slot is not chosen here: the server takes the one with
the longest common beginning.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from diptych.base.engine_load_metrics import LLAMACPP_LOAD
from diptych.serving import edge_limits
from diptych.serving.front.adapters.openai_parts import (
    LOOK_S,
    TOKENIZE_S,
    GaugePage,
    get_fields,
    model_of,
    post_tokens,
    real_token,
    usage_wanted,
)
from diptych.serving.front.capabilities import Capabilities, EngineFacts, EngineNotReadyError, text_in, whole_number
from diptych.serving.front.engine_connection import ConnectionPool, ReplyTooLongError, ask
from diptych.serving.front.engine_load import EngineGauges
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_request import CHAT_PATH, COMPLETION_PATH, WHOLE_PATHS, RelayRequest, encode_json
from diptych.serving.front.tokenized_prompt import TokenizedPrompt

_GAUGES = GaugePage(LLAMACPP_LOAD.series())


class LlamaCppAdapter:
    """The EngineAdapter of llama.cpp's server."""

    gauge_path = "/metrics"

    async def look(self, pool: ConnectionPool, spec: EngineSpec) -> EngineFacts:
        model = await model_of(pool, spec)
        name = str(model["id"])
        await real_token(pool, name)
        props = await get_fields(pool, "/props")
        try:
            _, page = await ask(pool, "GET", self.gauge_path, timeout_s=LOOK_S)
        except (ConnectionError, TimeoutError, ReplyTooLongError) as error:
            raise EngineNotReadyError(f"{self.gauge_path}: {str(error) or 'no reply'}") from None
        has_gauges = _GAUGES.read(page) is not None
        degraded = [] if has_gauges else ["gauges (start it with --metrics)"]
        if not props:
            degraded.append("version (no /props)")
        settings = props.get("default_generation_settings")
        length = whole_number(settings.get("n_ctx")) if isinstance(settings, dict) else 0
        capabilities = Capabilities(tokenizes=True, cached_tokens=True, gauges=has_gauges)
        places = max(1, whole_number(props.get("total_slots"), 1))
        return EngineFacts(
            "llamacpp", text_in(props, "build_info"), name, length, length * places, 1, capabilities, tuple(degraded)
        )

    def changes(self, request: RelayRequest, facts: EngineFacts) -> dict[str, Any]:
        added = usage_wanted(request)
        if request.path not in WHOLE_PATHS:
            added["cache_prompt"] = True
        return added

    def read_gauges(self, page: bytes) -> EngineGauges | None:
        return _GAUGES.read(page)

    async def tokenize(self, pool: ConnectionPool, request: RelayRequest, facts: EngineFacts) -> TokenizedPrompt | None:
        if request.path == COMPLETION_PATH and request.prompt_head.startswith(b'"'):
            return await self._tokens(pool, request.body.prompt)
        if request.path != CHAT_PATH:
            return None
        fields = {name: request.fields[name] for name in ("messages", "tools") if name in request.fields}
        try:
            status, body = await ask(
                pool,
                "POST",
                "/apply-template",
                encode_json(fields),
                timeout_s=TOKENIZE_S,
                limit=edge_limits.ENGINE_TOKENS_BYTES,
            )
            prompt = msgspec.json.decode(body).get("prompt") if status == 200 else None
        except (ReplyTooLongError, msgspec.DecodeError, AttributeError):
            return None
        return await self._tokens(pool, prompt) if isinstance(prompt, str) else None

    async def text_of(self, pool: ConnectionPool, token_ids: Sequence[int], model: str) -> str | None:
        """Always None: answers name no tokens."""
        return None

    @staticmethod
    async def _tokens(pool: ConnectionPool, content: Any) -> TokenizedPrompt | None:
        return await post_tokens(pool, "/tokenize", {"content": content, "add_special": True, "parse_special": True})
