"""The bodies of requests and replies, as OpenAI defines them, with vLLM's additions. FastAPI publishes them as OpenAPI.

Owns field names, types and ranges; parameters.py interprets them. Lists have a limit and fail at their first wrong
element: describing each of millions of wrong elements would block the event loop for minutes.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from diptych.control.request import ServiceClass
from diptych.serving import edge_limits
from diptych.serving.api.miss_views import PrefixMissReply
from diptych.serving.long_work import check_wanted

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
MAX_TOKEN_ID = 2**32 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Milliseconds = Annotated[float, Field(gt=0, le=1e9)]
Metadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=edge_limits.LABEL_NAME)],
        Annotated[str, Field(max_length=edge_limits.LABEL_VALUE)],
    ],
    Field(max_length=edge_limits.LABELS),
    BeforeValidator(lambda value: _limited(value, edge_limits.LABELS)),
]
Finite = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning

Element = TypeVar("Element")
Items: TypeAlias = Annotated[list[Element], Field(fail_fast=True, max_length=edge_limits.LIST_ITEMS)]
Turns: TypeAlias = Annotated[list[Element], Field(fail_fast=True, max_length=edge_limits.MESSAGES)]
IDS_AT_ONCE = 8192  # are looked at in one call, which others wait for


def _is_small(value: Any) -> Any:
    """Pydantic would measure a dict only when it has looked at every item."""
    return _limited(value, edge_limits.LIST_ITEMS)


def _limited(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and len(value) > limit:
        raise PydanticCustomError("too_many_fields", f"at most {limit} fields, not {len(value)}")
    return value


def parts_of(ids: list[int]) -> Iterator[list[int]]:
    """A list in parts of IDS_AT_ONCE, of which none is looked at when its client is gone."""
    for begin in range(0, len(ids), IDS_AT_ONCE):
        check_wanted()
        yield ids[begin : begin + IDS_AT_ONCE]


def _are_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """A list of whole numbers, looked at in parts: pydantic would hold all others up until it has seen the last one."""
    if not isinstance(value, list):
        return handler(value)
    if len(value) > edge_limits.TOKEN_IDS:
        raise PydanticCustomError("too_long", f"at most {edge_limits.TOKEN_IDS} items, not {len(value)}")
    for begin, part in zip(range(0, len(value), IDS_AT_ONCE), parts_of(value), strict=True):
        if set(map(type, part)) != {int}:
            wrong = next(number for number, element in enumerate(part) if type(element) is not int)
            return handler([0] * min(begin, 1) + part[wrong : wrong + 1]) if begin else handler(part[: wrong + 1])
    return value


def _are_small_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """The same, of numbers that a tokenizer may have."""
    ids = _are_ids(value, handler)
    for part in parts_of(ids):
        if min(part) < 0 or max(part) > MAX_TOKEN_ID:
            wrong = next(element for element in part if not 0 <= element <= MAX_TOKEN_ID)
            raise PydanticCustomError("token_id", f"{wrong} is no token id; they are in [0, {MAX_TOKEN_ID}]")
    return ids


Ids: TypeAlias = Annotated[list[int], Field(fail_fast=True), WrapValidator(_are_ids)]
SmallIds: TypeAlias = Annotated[list[int], Field(fail_fast=True), WrapValidator(_are_small_ids)]


class Fields(BaseModel):
    """An object in a request: what it has is counted before it is looked at. The check is in Python, so that others get
    their turn between two elements of a list of these, and the work ends there when its client is gone."""

    model_config = Finite

    @model_validator(mode="before")
    @classmethod
    def _has_few(cls, value: Any) -> Any:
        check_wanted()
        return _limited(value, edge_limits.BODY_FIELDS)


Biases: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=edge_limits.LIST_ITEMS),
    BeforeValidator(_is_small),
]


class StreamOptions(Fields):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="A last chunk without choices carries the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk carries the usage so far.")


class OptionsBody(Fields):
    """What every request for the model may say. null means: not given."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    priority: Int32 | None = Field(None, description="Lower is served earlier (with --order priority).")
    ttft_slo_ms: Milliseconds | None = Field(None, description="Objective for the time to the first token.")
    service_class: ServiceClass | None = Field(
        None, description="interactive goes before standard, batch uses what others leave."
    )
    gives_way_ms: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        None,
        description="Of class batch: after this time on a worker it runs beside others (left out: it waits for them).",
    )
    deadline_ms: Milliseconds | None = Field(
        None, description="Refuse the request when its first token cannot come within this time after its arrival."
    )
    metadata: Metadata | None = Field(
        None, description="Labels of the request; they decide nothing and come back in the timeline and in recordings."
    )
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prefixes.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Keep the last N tokens of a prompt; -1: as many as the context has room for."
    )


class GenerationBody(OptionsBody):
    """What completions and chat completions have in common. null means: not given."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Biases | None = Field(None, description="Token id (as a string) to bias.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=edge_limits.STOP_TEXTS)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=edge_limits.STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tpot_slo_ms: Milliseconds | None = Field(None, description="Objective for the mean time per later token.")
    response_format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with a schema.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: json (a schema), regex, choice, grammar (Lark or GBNF) or json_object."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    forced_tokens: bool | None = Field(
        None, description="false: tokens of which a grammar leaves no choice are sampled all the same."
    )
    include_stop_str_in_output: bool | None = Field(None, description="The text ends with what stopped it.")
    skip_special_tokens: bool | None = Field(None, description="false: special tokens have their text in the answer.")
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="Tokens of reasoning; then the answer follows."
    )
    return_token_ids: bool | None = Field(None, description="Choices carry token_ids, the first also the prompt's.")
    return_latency: bool | None = Field(None, description="usage.latency says where the time went.")
    return_prefix_misses: bool | None = Field(
        None, description="usage.prompt_tokens_details.prefix_misses says why prompts were not found in a cache."
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Items[str] | Ids | Items[Ids] = Field(
        description="A text, a list of texts, a list of token ids, or a list of those."
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class Message(Fields):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Items[dict[str, Any]] | None = None


class FunctionBody(Fields):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Fields):
    """A tool; only functions are served."""

    type: str = "function"
    function: FunctionBody


class PredictionBody(Fields):
    """OpenAI's predicted output."""

    type: Literal["content"] = "content"
    content: str | Items[dict[str, Any]]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Turns[Message], Field(min_length=1)]
    tools: Annotated[list[ToolBody], Field(max_length=edge_limits.TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required (or any), or a function.")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="The answer goes on with the text of the last message, which stays open."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = Field(None, description="For chat templates that read them.")
    prediction: PredictionBody | None = Field(
        None, description="What the answer may well repeat: it comes faster then."
    )
    reasoning_effort: Effort | None = Field(
        None, description="Goes to the chat template; none turns thinking off where the template can."
    )


class TokenizeBody(Fields):
    """POST /tokenize: one of prompt and messages. With messages, the fields of a chat request that shape its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Turns[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolBody], Field(max_length=edge_limits.TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: SmallIds


class ErrorDetail(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every reply with a status of 400 or more."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens. prefix_misses: one for each prompt of the request (null: it ended before it was
    computed); only with return_prefix_misses."""

    cached_tokens: int
    prefix_misses: list[PrefixMissReply | None] | None = None


class LatencyReply(BaseModel):
    """Where the time went; queue_ms + prefill_ms + handoff_ms + decode_ms == total_ms."""

    queue_ms: float
    prefill_ms: float
    handoff_ms: float
    decode_ms: float
    total_ms: float


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    latency: LatencyReply | None = None


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionReply(BaseModel):
    """The reply of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionReply(BaseModel):
    """Which function is called with what. arguments: JSON."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """The reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diptych"
    root: str
    max_model_len: int | None


class ModelList(BaseModel):
    """The reply of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """The reply of /detokenize."""

    prompt: str


class StatusReply(BaseModel):
    """The reply of /health and /ready."""

    status: str
    detail: str | None = None


class VersionReply(BaseModel):
    """The reply of /version. control: how the control code runs, "compiled" or "Python". instruction_set: the
    kernels that compute. processor: its name, the cores of a worker, its caches; null on a GPU. weights: their
    formats, such as bfloat16 or int8. These three are null while the workers load. chat_template: what that of
    the model takes (see TemplateProfile); null where there is none."""

    version: str
    control: str
    instruction_set: str | None
    processor: str | None
    weights: str | None
    chat_template: dict[str, Any] | None
