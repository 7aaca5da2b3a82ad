"""POST /v1/embeddings: prompts as vectors, in OpenAI's format.

A request is prefill alone. Each input is a sequence of its own, which the workers schedule, chunk and batch like any
other prompt.
"""

import asyncio
import math
import uuid
from array import array
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from diptych.control.errors import InvalidRequestError
from diptych.control.request import Pooling, SamplingParams
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import Delta, Generation
from diptych.serving.api.bodies import read_body, takes, tenant_in, while_client_waits
from diptych.serving.api.parameters import check_model, context_limit, options_of, truncated
from diptych.serving.api.protocol import Count, Ids, Items, OptionsBody, PromptTokensDetails
from diptych.serving.api.reply import encode_json
from diptych.serving.api.responses import WholeResponse
from diptych.serving.async_llm import AsyncLLM, check_count, check_prompt
from diptych.serving.embedding_recipe import read_embedding_recipe, with_prompt

NUMBERS_AT_ONCE = 2**16  # are encoded between two turns of the event loop: some milliseconds
# Fields of other servers that would change the vectors, with the values at which they do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "truncate": (False, "NONE"),
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "prompt_embeds": (),
}


class EmbeddingsBody(OptionsBody):
    """POST /v1/embeddings. null means: not given."""

    input: str | Items[str] | Ids | Items[Ids] = Field(
        description="A text, a list of texts, a list of token ids, or a list of those."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the numbers as little-endian float32."
    )
    dimensions: Annotated[Count, Field(description="Only the first numbers of each vector, at length 1.")] | None = None
    pooling: Pooling | None = Field(
        None, description="The hidden state of the last token, or the mean of all; the model's own by default, or last."
    )
    add_special_tokens: bool | None = None
    prompt_name: str | None = Field(
        None,
        description="The model's prompt of this name is put before each text; the model's default, or an empty one.",
    )


class EmbeddingReply(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingsReply(BaseModel):
    """The reply of /v1/embeddings."""

    id: str
    object: Literal["list"]
    model: str
    data: list[EmbeddingReply]
    usage: EmbeddingsUsage


class EmbeddingsResponse(WholeResponse):
    """Sends the vectors when all are there."""

    def __init__(self, llm: AsyncLLM, generation: Generation, body: EmbeddingsBody, model_name: str) -> None:
        super().__init__(llm, generation)
        self._body = body
        self._model_name = model_name

    async def content(self, deltas: Sequence[Delta]) -> bytes:
        streams, parts, num_numbers = self._generation.streams, [], 0
        is_base64, dimensions = self._body.encoding_format == "base64", self._body.dimensions
        for stream in streams:
            vector = shortened(stream.embedding, dimensions)
            encoded = b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
            parts.append(encode_json({"object": "embedding", "index": stream.index, "embedding": encoded}))
            num_numbers += len(vector)
            if num_numbers >= NUMBERS_AT_ONCE:
                num_numbers = 0
                await asyncio.sleep(0)
        num_prompt = sum(len(stream.prompt_token_ids) for stream in streams)
        usage = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in streams)},
        }
        tail = encode_json({"model": self._model_name, "usage": usage, "id": self._generation.request_id})[1:]
        return b'{"object":"list","data":[' + b",".join(parts) + b"]," + tail


def shortened(embedding: bytes, dimensions: int | None) -> "array[float]":
    """The first numbers of an embedding (None: all of them), at length 1: what is left of a vector of zeros stays."""
    vector = array("f")
    vector.frombytes(embedding)
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in kept))
    return array("f", (number / length for number in kept)) if length else kept


def add_embeddings_routes(
    app: FastAPI, llm: AsyncLLM, model_names: Sequence[str], errors: dict[int | str, dict[str, Any]]
) -> None:
    """POST /v1/embeddings."""

    @app.post(
        "/v1/embeddings",
        responses={**errors, 200: {"model": EmbeddingsReply}},
        openapi_extra=takes(EmbeddingsBody),
    )
    @while_client_waits
    async def embeddings(request: Request) -> Response:
        """Prompts as vectors of length 1."""
        body = await read_body(request, EmbeddingsBody)
        check_model(body.model, model_names)
        generation = await _submit(llm, body, tenant_in(request))
        return EmbeddingsResponse(llm, generation, body, model_names[0])


async def _submit(llm: AsyncLLM, body: EmbeddingsBody, tenant: str) -> Generation:
    ready = llm.require_ready()
    for name, harmless in _UNSUPPORTED.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
    size = body.dimensions or ready.embedding_size
    if size > ready.embedding_size:
        text = f"dimensions is {size}; this model's embeddings have {ready.embedding_size}"
        raise InvalidRequestError(text, param="dimensions")
    texts, prompts = _inputs(body)
    count = max(len(texts), len(prompts))
    check_count(count, ready, "input")  # before they are encoded
    if count * size > edge_limits.EMBEDDING_NUMBERS:
        most = edge_limits.EMBEDDING_NUMBERS
        text = f"input has {count} entries, and dimensions is {size}: at most {most} numbers fit in a reply"
        raise InvalidRequestError(text, param="input")
    recipe = await asyncio.to_thread(read_embedding_recipe, Path(llm.options.model))
    pooling = recipe.pooling(body.pooling)
    if texts:
        is_special = body.add_special_tokens is not False
        texts = with_prompt(texts, recipe.prompt(body.prompt_name, pooling))
        limit = context_limit(body, ready)
        prompts = await llm.encode_all(texts, add_special_tokens=is_special, param="input", limit=limit, tenant=tenant)
    elif body.prompt_name:
        raise InvalidRequestError("prompt_name is for texts; input holds token ids", param="prompt_name")
    prompts = truncated(body, prompts, ready, 1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)

    def check() -> None:
        for number, prompt in enumerate(prompts):
            check_prompt(prompt, sampling, ready, "input" if count == 1 else f"input.{number}")

    await llm.long_work.run(check, sum(map(len, prompts)), tenant)
    return await llm.submit_in_turn(prompts, sampling, f"embd-{uuid.uuid4().hex}", options_of(body, tenant))


def _inputs(body: EmbeddingsBody) -> tuple[list[str], list[list[int]]]:
    """The inputs as texts or as lists of token ids; the other list is empty."""
    given = body.input
    if isinstance(given, str):
        return [given], []
    if not given:
        raise InvalidRequestError("input is an empty list", param="input")
    if isinstance(given[0], str):
        return given, []
    return [], [given] if isinstance(given[0], int) else given
