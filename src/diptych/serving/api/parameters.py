"""From a request body to what the engine understands: prompts, SamplingParams, RequestOptions.

Owns defaults and refusals: an unsupported field that would change the answer is refused by name, any other unknown
field is ignored. Submits nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.control.errors import ContextLengthError, InvalidRequestError, NotFoundError
from diptych.control.request import RequestOptions, SamplingParams
from diptych.control.slo import NS_PER_MS, Slo
from diptych.serving import edge_limits
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.protocol import ChatBody, CompletionBody, GenerationBody, OptionsBody
from diptych.serving.link.messages import Ready

DEFAULT_COMPLETION_TOKENS = 16
LEAST_ROOM = 1024

# Fields that would change the answer, with the values at which they do not. null is always one of them.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
}
_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "n",
    "seed",
    "prompt_logprobs",
    "include_stop_str_in_output",
)


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise InvalidRequestError for a field that would change the answer if it were served."""
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")


def check_model(name: str | None, served: Sequence[str]) -> None:
    """Raise NotFoundError for a model that is not served here. served: the names by which it may be called."""
    if name is not None and name not in served:
        known = f"{served[0]!r} is" if len(served) == 1 else f"{', '.join(map(repr, served))} are"
        raise NotFoundError(f"model {name!r} is not served here; {known}", param="model", code="model_not_found")


def options_of(body: OptionsBody, tenant: str = "") -> RequestOptions:
    """What a request asks for besides its tokens: objectives, priority, class, deadline, labels."""
    slo, tpot_slo_ms = None, body.tpot_slo_ms if isinstance(body, GenerationBody) else None
    if body.ttft_slo_ms is not None or tpot_slo_ms is not None:
        slo = Slo(_nanoseconds(body.ttft_slo_ms), _nanoseconds(tpot_slo_ms))
    return RequestOptions(
        priority=body.priority or 0,
        slo=slo,
        service_class=body.service_class or "standard",
        tenant=tenant,
        deadline_ns=_nanoseconds(body.deadline_ms),
        cache_salt=body.cache_salt,
        metadata=body.metadata or {},
        best_effort_ns=None if body.gives_way_ms is None else int(body.gives_way_ms * NS_PER_MS),
    )


def sampling_of(
    body: GenerationBody, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None, grammar: str = ""
) -> SamplingParams:
    """How to sample; fields that are not given have the defaults of SamplingParams. grammar: that was tried."""
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if prompt_logprobs is not None:
        given["prompt_logprobs"] = prompt_logprobs
    if len(body.logit_bias or ()) * (body.n or 1) > edge_limits.BIASES:
        message = f"logit_bias has {len(body.logit_bias or ())} entries, for {body.n or 1} answers: at most "
        raise InvalidRequestError(f"{message}{edge_limits.BIASES} in all", param="logit_bias")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        grammar=grammar,
        forces_tokens=body.forced_tokens is not False,
        **given,
    )


def max_tokens_of(body: GenerationBody, longest_prompt: int, ready: Ready) -> int:
    """How many tokens to generate at most. Raises ContextLengthError when they do not fit behind the prompt."""
    param, wish = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        param, wish = "max_completion_tokens", body.max_completion_tokens
    room = ready.max_model_len - longest_prompt
    if wish is None:
        limit = min(ready.max_model_len, ready.kv_capacity_tokens) - longest_prompt
        default = usual_room(longest_prompt, ready) if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        return max(1, min(limit, default), min(body.min_tokens or 0, limit))
    if 0 < room < wish:
        raise ContextLengthError(
            f"This model's maximum context length is {ready.max_model_len} tokens; the prompt has {longest_prompt} and "
            f"{param} is {wish}",
            param=param,
        )
    return wish


def usual_room(longest_prompt: int, ready: Ready) -> int:
    """Tokens for an answer whose client names no limit: what is left in the smallest workers that hold the prompt and
    an answer of LEAST_ROOM tokens. More would keep each such request for the largest workers."""
    limits = [limit for limit in ready.sequence_limits if limit - longest_prompt >= LEAST_ROOM]
    longest = min(ready.max_model_len, ready.kv_capacity_tokens)
    return min(limits, default=longest) - longest_prompt


def context_limit(body: OptionsBody, ready: Ready) -> int | None:
    """The length of the context, where a longer prompt is refused; None where it is cut."""
    return ready.max_model_len if body.truncate_prompt_tokens is None else None


def truncated(body: OptionsBody, prompts: list[list[int]], ready: Ready, max_tokens: int | None) -> list[list[int]]:
    """What is kept of each prompt. max_tokens: of the answer, as far as the client says. Raises InvalidRequestError
    for 0."""
    wish = body.truncate_prompt_tokens
    if wish is None:
        return prompts
    if not wish:
        text = "truncate_prompt_tokens is 0; it must be at least 1, or -1"
        raise InvalidRequestError(text, param="truncate_prompt_tokens")
    most = wish if wish > 0 else max(1, ready.max_model_len - (max_tokens or 1))
    return [prompt[-most:] for prompt in prompts]


def given_prompts(body: CompletionBody) -> tuple[list[str], list[list[int]]]:
    """The prompts of a completion request: as texts or as lists of token ids; the other list is empty."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise InvalidRequestError("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], str):
        return prompt, []
    return [], [prompt] if isinstance(prompt[0], int) else prompt


def template_arguments(body: ChatBody) -> dict[str, Any]:
    """What the chat template is given besides the messages. As with other servers, reasoning_effort goes to the
    template, and thinking is off where it is "none" and on where it is anything else, unless the client says so itself
    (enable_thinking)."""
    given = dict(body.chat_template_kwargs or {})
    if body.documents:
        given["documents"] = body.documents
    effort = body.reasoning_effort
    if effort is None:
        return given
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | given


def shown_tokens(tokenizer: Tokenizer, body: GenerationBody, texts: Sequence[str] = ()) -> dict[int, str]:
    """The special tokens that are part of the text: all of them, or those in ``texts``."""
    if body.skip_special_tokens is False:
        return {token_id: text for text, token_id in tokenizer.special_token_ids.items()}
    return tokenizer.special_tokens_in(texts) if texts else {}


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else max(1, int(milliseconds * NS_PER_MS))


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(f"logit_bias has the key {key[:40]!r}; keys are token ids", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
