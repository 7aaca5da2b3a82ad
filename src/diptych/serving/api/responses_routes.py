"""The routes of OpenAI's Responses API."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.serving.api.bodies import read_body, takes, tenant_in
from diptych.serving.api.conversation import start_chat
from diptych.serving.api.dialect import RESPONSES
from diptych.serving.api.parameters import check_model
from diptych.serving.api.reply import encode_json
from diptych.serving.api.response_store import ResponseStore
from diptych.serving.api.responses import GenerationResponse
from diptych.serving.api.responses_request import ResponsesBody, as_chat, input_items
from diptych.serving.api.responses_writer import Reply, ResponsesWriter
from diptych.serving.async_llm import AsyncLLM


def add_responses_routes(
    app: FastAPI, llm: AsyncLLM, model_name: str, errors: dict[int | str, dict[str, Any]], store: ResponseStore
) -> None:
    """POST /v1/responses, and what was stored by GET and DELETE."""

    @app.post("/v1/responses", responses=errors, openapi_extra=takes(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the format of OpenAI's Responses."""
        body, tenant = await read_body(request, ResponsesBody), tenant_in(request)
        check_model(body.model, model_name)
        previous = body.previous_response_id
        earlier = await store.conversation(previous, tenant) if previous else []
        started = await start_chat(llm, as_chat(body, earlier), model_name, tenant, "resp_", clamps=True)

        def finished(reply: Reply) -> None:
            if body.store is not False:
                store.put(reply, tenant, previous, [*input_items(body), *reply["output"]])

        writer = ResponsesWriter(started.context, body, started.reader, finished)
        return GenerationResponse(llm, started.generation, writer, stream=bool(body.stream), dialect=RESPONSES)

    @app.get("/v1/responses/{response_id}", responses=errors)
    async def stored(request: Request, response_id: str) -> Response:
        """A response that was stored."""
        reply = await store.reply(response_id, tenant_in(request))
        return Response(reply, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=errors)
    async def delete(request: Request, response_id: str) -> Response:
        """Forget a response."""
        await store.delete(response_id, tenant_in(request))
        gone = {"id": response_id, "object": "response", "deleted": True}
        return Response(encode_json(gone), media_type="application/json")
