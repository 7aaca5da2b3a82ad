"""The routes of Anthropic's API."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.serving.api.bodies import read_body, takes, tenant_in
from diptych.serving.api.conversation import chat_prompt, start_chat
from diptych.serving.api.dialect import MESSAGES
from diptych.serving.api.messages_request import MessagesBody, TokenCountBody, as_chat
from diptych.serving.api.messages_writer import MessagesWriter
from diptych.serving.api.parameters import check_model
from diptych.serving.api.reply import encode_json
from diptych.serving.api.responses import GenerationResponse
from diptych.serving.api.tools import requested_tools
from diptych.serving.async_llm import AsyncLLM

MESSAGES_BODIES = (MessagesBody, TokenCountBody)


def add_messages_routes(app: FastAPI, llm: AsyncLLM, model_name: str, errors: dict[int | str, dict[str, Any]]) -> None:
    """/v1/messages and /v1/messages/count_tokens. Every name of a model that the server does not have is refused."""

    @app.post("/v1/messages", responses=errors, openapi_extra=takes(MessagesBody))
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's format."""
        body = await read_body(request, MessagesBody)
        check_model(body.model, model_name)
        started = await start_chat(llm, as_chat(body), model_name, tenant_in(request), "msg_", clamps=True)
        writer = MessagesWriter(started.context, started.reader)
        return GenerationResponse(llm, started.generation, writer, stream=bool(body.stream), dialect=MESSAGES)

    @app.post("/v1/messages/count_tokens", responses=errors, openapi_extra=takes(TokenCountBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        body = await read_body(request, TokenCountBody)
        check_model(body.model, model_name)
        chat = as_chat(body)
        prompt = await chat_prompt(llm, chat, requested_tools(chat, llm.tokenizer))
        return Response(encode_json({"input_tokens": len(prompt)}), media_type="application/json")
