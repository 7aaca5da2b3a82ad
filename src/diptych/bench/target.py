"""The server that is measured: what it serves, its dialect, and the bodies of requests to it."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from diptych.bench.http_client import HttpClient
from diptych.bench.objectives import LatencyObjectives
from diptych.bench.prompts import WORDS, PromptMaker, as_text
from diptych.bench.token_stream import TokenStream
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.http1.address import Address
from diptych.workload.spec import RequestSpec

Api = Literal["completions", "chat"]
PromptForm = Literal["ids", "text"]
Prompt = list[int] | tuple[str, ...]  # units (prompts.py), or texts
PROBES = (40, 240)  # words of the prompts that measure a tokenizer
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What the user says about the server.

    api_key: sent as a bearer token. prompts: token ids need /v1/completions. token_ids: the range of prompts' ids.
    exact_length: ``ignore_eos`` and ``min_tokens`` are sent, so that answers are as long as the workload says.
    send_slo: requests carry ttft_slo_ms and tpot_slo_ms, which Diptych's scheduler reads. running_usage: every event
    carries the usage so far (exact tokens per event, at some cost for the server). extra: fields for every body.
    """

    url: str
    api: Api = "completions"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    prompts: PromptForm = "ids"
    token_ids: tuple[int, int] = (100, 1000)
    exact_length: bool = True
    send_slo: bool = False
    running_usage: bool = False
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in (("api", Api), ("prompts", PromptForm)):
            if getattr(self, name) not in get_args(kinds):
                words = ", ".join(get_args(kinds))
                raise ConfigError(f"{name} is {getattr(self, name)!r}; one of {words}", param=name)
        if self.api == "chat" and self.prompts == "ids":
            raise ConfigError("prompts is ids; chat completions take text", param="prompts")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout is {self.timeout_s}; it must be positive", param="timeout")


def client_for(config: TargetConfig) -> HttpClient:
    """Connections to the server. Raises ConfigError for what is no address."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    return HttpClient(Address.parse(config.url), headers)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What is known of the server. tokens_per_word, overhead_tokens: of text prompts, measured. turn_tokens: a chat
    template adds for a further turn. returns_token_ids: whether answers carry them if the request asks for them."""

    model: str
    software: str = ""
    max_model_len: int | None = None
    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    turn_tokens: float = 0.0
    returns_token_ids: bool = False


class Target:
    """The server, ready for requests."""

    def __init__(self, config: TargetConfig, client: HttpClient, facts: ServerFacts) -> None:
        self.config = config
        self.client = client
        self.facts = facts
        self._head = client.head("POST", PATHS[config.api])
        options = {"include_usage": True, **({"continuous_usage_stats": True} if config.running_usage else {})}
        self._common = {"model": facts.model, "stream": True, "stream_options": options, "temperature": 0}

    @classmethod
    async def find(cls, config: TargetConfig, client: HttpClient) -> "Target":
        """Find out what is served; with text prompts, how many tokens words are. Raises ConfigError."""
        models = await client.fetch("GET", "/v1/models")
        if models.status == 0:
            raise ConfigError(models.error or "no answer", param="url")
        model, length = config.model, None
        if models.status == 200:
            model, length = _choose_model(models.body, model)
        elif models.status in (401, 403):
            raise ConfigError(f"the server refuses the key: {models.error}", param="api_key")
        if model is None:
            message = f"{config.url} does not say what it serves: GET /v1/models there says {models.error or 'nothing'}"
            raise ConfigError(f"{message}; --model names it", param="model")
        facts = ServerFacts(model=model, software=await _software(client), max_model_len=length)
        target = cls(config, client, facts)
        return await target._measure_words() if config.prompts == "text" else target

    def prompt_maker(self, salt: str) -> PromptMaker:
        """Makes this server's prompts."""
        if self.config.prompts == "ids":
            return PromptMaker(salt, *self.config.token_ids)
        return PromptMaker(
            salt,
            0,
            len(WORDS),
            tokens_per_unit=self.facts.tokens_per_word,
            overhead_tokens=self.facts.overhead_tokens,
        )

    def body(self, prompt: Prompt, spec: RequestSpec, slo: LatencyObjectives | None = None) -> bytes:
        """The JSON of a request. prompt: units, or the texts so far: question, answer, ..., question."""
        config = self.config
        body: dict[str, Any] = dict(self._common)
        limit = spec.max_tokens or spec.output_tokens
        if config.api == "chat":
            roles = ("user", "assistant")
            texts = _texts(prompt)
            body["messages"] = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
            body["max_completion_tokens"] = limit  # by its newer name too: servers know one, or both
        else:
            body["prompt"] = prompt if config.prompts == "ids" else "".join(_texts(prompt))
            if self.facts.returns_token_ids:
                body["return_token_ids"] = True
        body["max_tokens"] = limit
        if config.exact_length:
            body["ignore_eos"] = True
            body["min_tokens"] = limit
        if spec.priority:
            body["priority"] = spec.priority
        if spec.service_class != "standard":
            body["service_class"] = spec.service_class
        if config.send_slo and slo is not None:
            body |= {
                name: value / NS_PER_MS
                for name, value in (("ttft_slo_ms", slo.ttft_ns), ("tpot_slo_ms", slo.tpot_ns))
                if value is not None
            }
        return msgspec.json.encode({**body, **config.extra})

    def send(self, body: bytes, stream: TokenStream) -> None:
        """Send a request now."""
        self.client.post(self._head, body, stream)

    async def ask(self, prompt: Prompt, num_tokens: int) -> TokenStream:
        """A request outside of any workload. Raises ConfigError with the server's words if it fails."""
        spec = RequestSpec(arrival_ns=0, prompt_tokens=len(prompt), output_tokens=num_tokens)
        stream = TokenStream(0)
        self.send(self.body(prompt, spec), stream)
        try:
            await asyncio.wait_for(asyncio.shield(stream.done), self.config.timeout_s)
        except TimeoutError:
            raise ConfigError(f"the server gave no answer in {self.config.timeout_s:g} s", param="url") from None
        if stream.error:
            hint = "; --no-exact-length leaves them out" if re.search("ignore_eos|min_tokens", stream.error) else ""
            refused = "the server refuses a request: " if stream.status else ""
            raise ConfigError(f"{refused}{stream.error}{hint}", param="url")
        if not stream.stamps:
            raise ConfigError(no_tokens(stream), param="url")
        return stream

    async def with_conversations(self) -> "Target":
        """The same server, with what conversations need to know: whether it returns token ids, or what its chat
        template adds for a turn. Raises ConfigError."""
        if self.config.prompts == "text":
            turn = await self._turn_tokens() if self.config.api == "chat" else 0.0
            return Target(self.config, self.client, replace(self.facts, turn_tokens=turn))
        asking = Target(self.config, self.client, replace(self.facts, returns_token_ids=True))
        spec = RequestSpec(arrival_ns=0, prompt_tokens=16, output_tokens=2)
        stream = TokenStream(0, keep_token_ids=True)
        asking.send(asking.body(self.prompt_maker("token ids").fresh("", 16), spec), stream)
        await asyncio.wait({stream.done}, timeout=self.config.timeout_s)
        return asking if stream.token_ids else self

    async def _turn_tokens(self) -> float:
        """What a question costs beside its words when it follows an answer."""
        maker, words = self.prompt_maker("turns"), PROBES[0]
        texts = [as_text(maker.words(f"{place}", words)) for place in range(3)]
        first, third = [await self._prompt_tokens(tuple(texts[:count])) for count in (1, 3)]
        return max(0.0, third - first - 2 * self.facts.tokens_per_word * len(texts[0].split()))

    async def _measure_words(self) -> "Target":
        """Two prompts of different length: tokens = overhead + slope * words."""
        maker = self.prompt_maker("words")
        counts = [await self._prompt_tokens((as_text(maker.fresh(f"{words}", words)),)) for words in PROBES]
        slope = max(0.1, (counts[1] - counts[0]) / (PROBES[1] - PROBES[0]))
        overhead = max(0.0, counts[0] - slope * PROBES[0])
        return Target(self.config, self.client, replace(self.facts, tokens_per_word=slope, overhead_tokens=overhead))

    async def _prompt_tokens(self, texts: tuple[str, ...]) -> int:
        usage = (await self.ask(texts, 1)).usage
        if usage is None or not usage.prompt_tokens:
            raise ConfigError("the server sends no usage, which text prompts need; use --prompts ids", param="prompts")
        return usage.prompt_tokens


def no_tokens(stream: TokenStream) -> str:
    """The error of an answer that came whole and has no tokens."""
    return "the server's answer is no stream of events" if stream.body else "the server's answer has no tokens"


def _texts(prompt: Prompt) -> tuple[str, ...]:
    return prompt if isinstance(prompt, tuple) else (as_text(prompt),)


def _choose_model(body: bytes | bytearray, wanted: str | None) -> tuple[str | None, int | None]:
    """(name, context length if told) of the wanted model or of the first."""
    try:
        cards = msgspec.json.decode(body)["data"]
        names = [str(card["id"]) for card in cards]
    except (msgspec.DecodeError, KeyError, TypeError):
        return wanted, None
    if wanted is not None and names and wanted not in names:
        raise ConfigError(f"model is {wanted!r}; the server has {', '.join(names)}", param="model")
    for card, name in zip(cards, names, strict=True):
        if wanted in (None, name):
            meta = card.get("meta") or {}  # llama.cpp's: what a request may have, and what the model was trained for
            length = card.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
            return name, length if isinstance(length, int) else None
    return wanted, None


async def _software(client: HttpClient) -> str:
    """What GET /version says, if anything."""
    reply = await client.fetch("GET", "/version")
    if reply.status != 200:
        return ""
    try:
        found = msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        return ""
    if not isinstance(found, dict):
        return str(found)
    said = (found.get(name) for name in ("version", "instruction_set", "weights", "processor"))
    return ", ".join(str(value) for value in said if value)
