"""vLLM's OpenAI server (endpoints and fields as of 0.11 to 0.32).

Token ids of answers come by ``return_token_ids``; prompts are tokenised by ``/tokenize`` with the engine's own chat
template, or rendered and sent as tokens where the server was started with ``--enable-scale-out``; the size of the KV
cache is a label of ``vllm:cache_config_info``. A request is given up by closing its connection, which every version
understands.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from diptych.base.engine_load_metrics import VLLM_LOAD
from diptych.serving.api.http_policy import is_loopback
from diptych.serving.front.adapters.openai_parts import (
    LOOK_S,
    GaugePage,
    get_fields,
    model_of,
    post_rendered,
    post_text,
    post_tokens,
    real_token,
    usage_wanted,
)
from diptych.serving.front.capabilities import Capabilities, EngineFacts, EngineNotReadyError, text_in, whole_number
from diptych.serving.front.engine_connection import ConnectionPool, ReplyTooLongError, ask
from diptych.serving.front.engine_load import EngineGauges
from diptych.serving.front.engine_pages import page_of_rank
from diptych.serving.front.engine_spec import AUTO, EngineSpec
from diptych.serving.front.relay_request import CHAT_PATH, COMPLETION_PATH, RelayRequest, encode_json
from diptych.serving.front.reply_chunks import UnreadableReplyError, read_chunk
from diptych.serving.front.tokenized_prompt import GENERATE_PATH, RENDER_PATH, TokenizedPrompt

_GAUGES = GaugePage(VLLM_LOAD.series())
_CACHE_LINE = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_RANK = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bengine="(\d{1,4})"', re.MULTILINE)
_LABEL = re.compile(rb'(num_gpu_blocks|block_size)="(\d+)"')
NOT_SAID = "it says at /kv_event_sources that it publishes none, or this version has no such page"
ANY_HOST = ("*", "0.0.0.0", "[::]", "::")
TEMPLATE_FIELDS = (
    "tools", "chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt",
    "add_special_tokens",
)  # fmt: skip


class VLLMAdapter:
    """The EngineAdapter of vLLM."""

    gauge_path = "/metrics"

    async def look(self, pool: ConnectionPool, spec: EngineSpec) -> EngineFacts:
        model = await model_of(pool, spec)
        name = str(model["id"])
        reply = await real_token(pool, name)
        version = text_in(await get_fields(pool, "/version"), "version")
        degraded = []
        try:
            _, page = await ask(pool, "GET", self.gauge_path, timeout_s=LOOK_S)
        except (ConnectionError, TimeoutError, ReplyTooLongError) as error:
            raise EngineNotReadyError(f"{self.gauge_path}: {str(error) or 'no reply'}") from None
        ranks, page = ranks_on(page), page_of_rank(page, spec.rank)
        if spec.rank is not None and ranks and spec.rank not in ranks:
            raise EngineNotReadyError(f"it has no rank {spec.rank}, but {sorted(ranks)}")
        has_gauges = _GAUGES.read(page) is not None
        if not has_gauges:
            degraded.append("gauges (no vllm:num_requests_running; --disable-log-stats?)")
        labels = (
            {key: int(value) for key, value in _LABEL.findall(line[1])} if (line := _CACHE_LINE.search(page)) else {}
        )
        tokens = await self._tokens(pool, {"model": name, "prompt": "1"})
        if tokens is None:
            degraded.append("tokenizes (no /tokenize)")
        if not version:
            degraded.append("version (no /version)")
        takes_tokens = await self._takes_tokens(pool, name, tokens)
        if spec.kv_events and not takes_tokens:
            degraded.append("tokens_in (chats are tokenised twice without --enable-scale-out)")
        has_cached = says_cached(reply)
        if not has_cached:
            degraded.append("cached_tokens (start it with --enable-prompt-tokens-details)")
        sources = await get_fields(pool, "/kv_event_sources") if spec.kv_events else {}
        found = spec.kv_events, spec.kv_replay
        if spec.kv_events == AUTO:
            found = published(sources, spec.address[0], spec.rank)
        if words := silent_publisher(sources) or ("" if any(found) or not spec.kv_events else NOT_SAID):
            degraded.append(f"kv_events ({words})")
        if spec.rank is None and len(ranks) > 1:  # each has its own cache, and nobody says which one a request goes to
            found = "", ""
            degraded.append(f"prefix_index (it has {len(ranks)} data-parallel ranks: rank=0-{len(ranks) - 1})")
        return EngineFacts(
            "vllm",
            version,
            name,
            whole_number(model.get("max_model_len")),
            labels.get(b"num_gpu_blocks", 0),
            labels.get(b"block_size", 0),
            Capabilities(
                tokenizes=tokens is not None,
                tokens_in=takes_tokens,
                tokens_out=True,
                cached_tokens=has_cached,
                gauges=has_gauges,
                kv_events=any(found),
                handoff="nixl",
                step_times=bool(spec.step_events),
            ),
            tuple(degraded),
            found,
        )

    def changes(self, request: RelayRequest, facts: EngineFacts) -> dict[str, Any]:
        added = usage_wanted(request)
        if request.is_stateless and facts.capabilities.tokens_out:
            added["return_token_ids"] = True
        if request.path == COMPLETION_PATH and request.token_ids is not None and not request.body_echoes:
            added["prompt"] = request.token_ids
        return added

    def read_gauges(self, page: bytes) -> EngineGauges | None:
        return _GAUGES.read(page)

    async def tokenize(self, pool: ConnectionPool, request: RelayRequest, facts: EngineFacts) -> TokenizedPrompt | None:
        model = facts.model
        if request.path == CHAT_PATH and facts.capabilities.tokens_in:
            return await post_rendered(pool, RENDER_PATH, request.engine_fields(model, {}))
        if request.path == CHAT_PATH:
            fields: dict[str, Any] = {"model": model, "messages": request.body.messages, "add_generation_prompt": True}
            fields |= {name: request.fields[name] for name in TEMPLATE_FIELDS if name in request.fields}
            return await self._tokens(pool, fields)
        if request.path == COMPLETION_PATH and request.prompt_head.startswith(b'"'):
            special = {name: request.fields[name] for name in ("add_special_tokens",) if name in request.fields}
            return await self._tokens(pool, {"model": model, "prompt": request.body.prompt, **special})
        return None

    async def text_of(self, pool: ConnectionPool, token_ids: Sequence[int], model: str) -> str | None:
        return await post_text(pool, "/detokenize", {"model": model, "tokens": list(token_ids)})

    @staticmethod
    async def _tokens(pool: ConnectionPool, fields: dict[str, Any]) -> TokenizedPrompt | None:
        try:
            return await post_tokens(pool, "/tokenize", fields)
        except (ConnectionError, TimeoutError):
            return None

    @staticmethod
    async def _takes_tokens(pool: ConnectionPool, model: str, tokens: TokenizedPrompt | None) -> bool:
        """Whether chats can be rendered, and what was rendered be sent, with text in the answer."""
        if tokens is None:
            return False
        asked = {"model": model, "token_ids": tokens.token_ids, "sampling_params": {"max_tokens": 1}}
        try:
            status, _ = await ask(pool, "POST", RENDER_PATH, b"{}", timeout_s=LOOK_S)  # 400 or 422 where there is one
            if status in (404, 405, 501):
                return False
            body = encode_json({**asked, "output_mode": "text"})
            status, body = await ask(pool, "POST", GENERATE_PATH, body, timeout_s=LOOK_S)
            choices = read_chunk(body).choices if status == 200 else []
        except (ConnectionError, TimeoutError, ReplyTooLongError, UnreadableReplyError):
            return False
        return bool(choices) and choices[0].text is not None


def says_cached(reply: bytes) -> bool:
    """Whether the usage of a reply has a part for cached tokens."""
    try:
        usage = read_chunk(reply).usage
    except UnreadableReplyError:
        return False
    return usage is not None and usage.prompt_tokens_details is not None


def ranks_on(page: bytes) -> frozenset[int]:
    """The ranks of data parallelism that speak on a page of metrics (one, without; none where it says nothing)."""
    return frozenset(int(rank) for rank in _RANK.findall(page))


def published(sources: Mapping[str, Any], host: str, rank: int | None) -> tuple[str, str]:
    """Where vLLM publishes its KV events and where it repeats them, by what /kv_event_sources says of this rank (None:
    of the only one, which may be any, where each rank has a server); host: of the engine, as this side reaches it.
    Empty where it does not, or listens in no way that could be used."""
    names = list(sources) if rank is None else [str(rank)]
    source = sources.get(names[0]) if len(names) == 1 else None
    if not isinstance(source, Mapping) or source.get("enable_kv_cache_events") is not True:
        return "", ""
    events, replay = (reachable(text_in(source, name), host) for name in ("endpoint", "replay_endpoint"))
    return (events, replay) if events else ("", "")


def reachable(endpoint: str, host: str) -> str:
    """An address on which an engine listens, for others ("": there is none)."""
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("ipc://"):
        return endpoint if is_loopback(host) else ""
    if not endpoint.startswith("tcp://") or not port.isascii() or not port.isdigit():
        return ""
    if name in ANY_HOST:
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return endpoint if is_loopback(host) or not is_loopback(name) else ""


def silent_publisher(sources: Mapping[str, Any]) -> str:
    """Why nothing will be heard of vLLM's KV events, by what /kv_event_sources says ("": nothing speaks against it, or
    this version has no such page). vLLM listens only where its endpoint has a wildcard."""
    for source in sources.values():
        if not isinstance(source, Mapping):
            continue
        if source.get("enable_kv_cache_events") is False:
            return "it publishes none: --kv-events-config with enable_kv_cache_events"
        endpoint = text_in(source, "endpoint")
        if endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
            return f"it connects to {endpoint} instead of listening there: its endpoint must be tcp://*:PORT"
    return ""
