"""The routes of Anthropic's API."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.api_flavour import MESSAGES
from diptych.serving.api.bodies import in_turn, note_ignored, num_bytes, read_body, takes, tenant_in, while_client_waits
from diptych.serving.api.context_edits import Cleared, Edit, EditedContext, Turn, edited_context
from diptych.serving.api.conversation import chat_length, chat_size, start_chat
from diptych.serving.api.messages_request import (
    Body,
    MessagesBody,
    TokenCountBody,
    as_chat,
    effort_of,
    turns_of,
    without_effort,
)
from diptych.serving.api.messages_writer import MessagesWriter
from diptych.serving.api.parameters import check_model
from diptych.serving.api.protocol import ChatBody
from diptych.serving.api.reply import encode_json
from diptych.serving.api.responses import GenerationResponse
from diptych.serving.async_llm import AsyncLLM

EFFORTS = ("low", "medium", "high", "xhigh", "max")
MESSAGES_BODIES = (MessagesBody, TokenCountBody)


def add_messages_routes(
    app: FastAPI, llm: AsyncLLM, model_names: Sequence[str], errors: dict[int | str, dict[str, Any]]
) -> None:
    """/v1/messages and /v1/messages/count_tokens. Every name of a model that the server does not have is refused."""

    @app.post("/v1/messages", responses=errors, openapi_extra=takes(MessagesBody))
    @while_client_waits
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's format."""
        body = await read_body(request, MessagesBody)
        check_model(body.model, model_names)
        body = await with_known_effort(request, body)
        context = await _edited(llm, request, body)
        chat, left_out = await in_turn(request, lambda: as_chat(body, context.turns))
        note_ignored(request, [*left_out, *context.left_out])
        size = await num_bytes(request)
        started = await start_chat(llm, chat, model_names[0], tenant_in(request), "msg_", size, clamps=True)
        applied = None if body.context_management is None else context.applied
        writer = MessagesWriter(started.context, started.reader, applied)
        return GenerationResponse(llm, started.generation, writer, stream=bool(body.stream), flavour=MESSAGES)

    @app.post("/v1/messages/count_tokens", responses=errors, openapi_extra=takes(TokenCountBody))
    @while_client_waits
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        body = await read_body(request, TokenCountBody)
        check_model(body.model, model_names)
        body = await with_known_effort(request, body)
        context = await _edited(llm, request, body)
        chat, left_out = await in_turn(request, lambda: as_chat(body, context.turns))
        note_ignored(request, [*left_out, *context.left_out])
        counted: dict[str, Any] = {"input_tokens": await _num_tokens(llm, request, chat)}
        if body.context_management is not None:
            original = context.original_tokens or counted["input_tokens"]
            counted["context_management"] = {"original_input_tokens": original}
        return Response(encode_json(counted), media_type="application/json")

    efforts: dict[str, bool] = {}  # whether the chat template takes them

    async def with_known_effort(request: Request, body: Body) -> Body:
        """A client that always sends an effort is not refused by a template that knows others."""
        effort = effort_of(body)
        if effort is None:
            return body
        if effort in EFFORTS and effort not in efforts:
            try:
                tried = {"reasoning_effort": effort}
                await llm.encode_chat([{"role": "user", "content": ""}], template_arguments=tried)
                efforts[effort] = True
            except InvalidRequestError:
                efforts[effort] = False
        if effort in EFFORTS and efforts[effort]:
            return body
        note_ignored(request, ["output_config.effort"])
        return without_effort(body)


async def _edited(llm: AsyncLLM, request: Request, body: TokenCountBody) -> EditedContext:
    async def count(turns: Sequence[Turn]) -> int:
        chat, _ = await in_turn(request, lambda: as_chat(body, turns))
        return await _num_tokens(llm, request, chat)

    async def clear(edit: Edit, turns: Sequence[Turn]) -> Cleared:
        return await in_turn(request, lambda: edit(turns))

    turns = await in_turn(request, lambda: turns_of(body))
    return await edited_context(body.context_management, turns, count, clear)


async def _num_tokens(llm: AsyncLLM, request: Request, chat: ChatBody) -> int:
    size = chat_size(chat, await num_bytes(request))
    return await chat_length(llm, chat, size, tenant_in(request))
