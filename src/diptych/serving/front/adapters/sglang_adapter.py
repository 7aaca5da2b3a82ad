"""SGLang's server (endpoints and fields as of 0.5). Spoken to from its documentation and sources: it has no build for
CPUs, so that only servers that speak its protocol were run here.

``/health_generate`` makes a token, also at engines that only prefill or only decode. Cached tokens are said with
``--enable-cache-report``, gauges with ``--enable-metrics``, steps with ``--enable-forward-pass-metrics``. Answers'
token ids are not on its OpenAI endpoints: a stream that it loses cannot be continued.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.base.engine_load_metrics import SGLANG_LOAD
from diptych.serving.front.adapters.openai_parts import (
    LOOK_S,
    GaugePage,
    get_fields,
    model_of,
    post_tokens,
    usage_wanted,
)
from diptych.serving.front.capabilities import Capabilities, EngineFacts, EngineNotReadyError, text_in, whole_number
from diptych.serving.front.engine_connection import ConnectionPool, ReplyTooLongError, ask
from diptych.serving.front.engine_load import EngineGauges
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_request import COMPLETION_PATH, RelayRequest
from diptych.serving.front.tokenized_prompt import TokenizedPrompt

_GAUGES = GaugePage(SGLANG_LOAD.series())


class SGLangAdapter:
    """The EngineAdapter of SGLang."""

    gauge_path = "/metrics"

    async def look(self, pool: ConnectionPool, spec: EngineSpec) -> EngineFacts:
        try:
            status, _ = await ask(pool, "GET", "/health_generate", timeout_s=LOOK_S)
            if status != 200:
                raise EngineNotReadyError(f"/health_generate: status {status}")
            _, page = await ask(pool, "GET", self.gauge_path, timeout_s=LOOK_S)
        except TimeoutError:
            raise EngineNotReadyError(f"/health_generate: no token within {LOOK_S:g} s") from None
        except (ConnectionError, ReplyTooLongError) as error:
            raise EngineNotReadyError(str(error)) from None
        model = await model_of(pool, spec)
        info = await get_fields(pool, "/server_info") or await get_fields(pool, "/get_server_info")
        has_gauges, has_report = _GAUGES.read(page) is not None, info.get("enable_cache_report") is True
        degraded = [] if has_gauges else ["gauges (start it with --enable-metrics)"]
        if not has_report:
            degraded.append("cached_tokens (start it with --enable-cache-report)")
        if not info:
            degraded.append("version (no /server_info)")
        has_steps = bool(spec.step_events) and not _is_off(info, "enable_forward_pass_metrics")
        if spec.step_events and not has_steps:
            degraded.append("step_times (start it with --enable-forward-pass-metrics)")
        num_ranks = whole_number(info.get("dp_size"), 1)
        if num_ranks > 1:  # each has its own cache, and nobody says which one a request goes to
            degraded.append(f"prefix_index (it has {num_ranks} data-parallel ranks)")
        sources = (spec.kv_events, spec.kv_replay) if num_ranks <= 1 else ("", "")
        page_size = max(1, whole_number(info.get("page_size"), 1))
        return EngineFacts(
            "sglang",
            text_in(info, "version"),
            str(model["id"]),
            whole_number(model.get("max_model_len")) or whole_number(info.get("context_length")),
            whole_number(info.get("max_total_num_tokens")) // page_size,
            page_size,
            Capabilities(
                tokenizes=True,
                cached_tokens=has_report,
                gauges=has_gauges,
                kv_events=any(sources),
                handoff="bootstrap",
                step_times=has_steps,
            ),
            tuple(degraded),
            sources,
        )

    def changes(self, request: RelayRequest, facts: EngineFacts) -> dict[str, Any]:
        return usage_wanted(request)

    def read_gauges(self, page: bytes) -> EngineGauges | None:
        return _GAUGES.read(page)

    async def tokenize(self, pool: ConnectionPool, request: RelayRequest, facts: EngineFacts) -> TokenizedPrompt | None:
        """Tokenize a prompt of text; None for a chat, since the engine has no endpoint for its chat template."""
        if request.path == COMPLETION_PATH and request.prompt_head.startswith(b'"'):
            return await post_tokens(pool, "/tokenize", {"model": facts.model, "prompt": request.body.prompt})
        return None

    async def text_of(self, pool: ConnectionPool, token_ids: Sequence[int], model: str) -> str | None:
        """Always None: answers name no tokens."""
        return None


def _is_off(info: Mapping[str, Any], name: str) -> bool:
    """Whether /server_info says that a setting is off, in itself or in a scheduler's state, and nowhere that it is on.
    A version that does not know it says neither."""
    states = info.get("internal_states")
    said = [info.get(name)]
    if isinstance(states, list):
        said += [state.get(name) for state in states if isinstance(state, Mapping)]
    return False in said and True not in said
