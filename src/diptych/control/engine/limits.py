"""What one worker can serve at all: context, cache and queue. Pure questions; whoever asks says no."""

from diptych.control.config import EngineConfig
from diptych.control.errors import ContextLengthError, OverloadedError, RequestError
from diptych.control.request import Request


def refusal(request: Request, config: EngineConfig, capacity_tokens: int, num_waiting: int) -> RequestError | None:
    """The error with which a request is refused, or None.

    capacity_tokens: the longest sequence that the cache holds when it is alone. A prompt that is computed for another
    worker needs room for itself only, and none where it is computed into the other's blocks.
    """
    length, prompt = config.max_model_len, request.num_prompt_tokens
    if prompt < 1:
        return ContextLengthError("the prompt has 0 tokens; it must have at least 1", param="prompt")
    if prompt >= length:
        return ContextLengthError(
            f"the prompt has {prompt} tokens; the context holds {length}, of which at least 1 is for the answer",
            param="prompt",
        )
    needed = prompt if request.hands_off else prompt + min(request.max_tokens, length - prompt)
    if needed > capacity_tokens and not request.borrowed_block_ids:
        return ContextLengthError(
            f"prompt and max_tokens make {needed} tokens; the KV cache holds {capacity_tokens}", param="max_tokens"
        )
    limit = config.scheduler.max_waiting
    if num_waiting >= limit:
        return OverloadedError(f"{limit} requests are waiting already (max_waiting)")
    return None
