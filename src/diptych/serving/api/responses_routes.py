"""The routes of OpenAI's Responses API."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.bodies import in_turn, note_ignored, num_bytes, read_body, takes, tenant_in, while_client_waits
from diptych.serving.api.conversation import start_chat
from diptych.serving.api.parameters import check_model
from diptych.serving.api.reply import encode_json
from diptych.serving.api.response_store import ResponseStore, has_id
from diptych.serving.api.responses_items import kind_of
from diptych.serving.api.responses_request import ResponsesBody, as_chat, input_items
from diptych.serving.api.responses_writer import Reply, ResponsesWriter, echoed
from diptych.serving.api.stored_response import Keeping, StoredResponse
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.long_work import LONG
from diptych.serving.metrics.store_metrics import store_families


def add_responses_routes(
    app: FastAPI,
    llm: AsyncLLM,
    model_names: Sequence[str],
    errors: dict[int | str, dict[str, Any]],
    store: ResponseStore,
) -> None:
    """POST /v1/responses, and what was stored by GET and DELETE."""
    llm.metrics.more_families.append(lambda model: store_families(store, model))

    @app.post("/v1/responses", responses=errors, openapi_extra=takes(ResponsesBody))
    @while_client_waits
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the format of OpenAI's Responses."""
        body, tenant = await read_body(request, ResponsesBody), tenant_in(request)
        check_model(body.model, model_names)
        previous = body.previous_response_id
        earlier = await store.conversation(previous, tenant) if previous else []
        more = LONG if previous else 0  # what is stored may be long
        new = input_items(body)
        if wanted := await in_turn(request, lambda: referenced(new), more):
            own = await in_turn(request, lambda: with_ids((*earlier, *new)), more)
            found = {**await store.items(wanted - own.keys(), tenant), **own}
            new = await in_turn(request, lambda: resolved(input_items(body), found), more)
        chat, tools = await in_turn(request, lambda: as_chat(body, earlier, new), more)
        note_ignored(request, tools.left_out)
        echo = await in_turn(request, lambda: echoed(body))
        size = await num_bytes(request) + more
        started = await start_chat(llm, chat, model_names[0], tenant, "resp_", size, clamps=True)
        writer = ResponsesWriter(started.context, body, started.reader, tools, echo)
        keeping = None if body.store is False else Keeping(store, tenant, previous, new)
        return StoredResponse(llm, started.generation, writer, keeping, stream=bool(body.stream))

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


def referenced(items: Sequence[Reply]) -> set[str]:
    """The ids of the items that references stand for."""
    return {str(item.get("id")) for item in items if kind_of(item) == "item_reference"}


def with_ids(items: Sequence[Reply]) -> dict[str, Reply]:
    """The items that a reference can mean, by their ids."""
    return {item["id"]: item for item in items if has_id(item) and kind_of(item) != "item_reference"}


def resolved(items: Sequence[Reply], found: Mapping[str, Reply]) -> list[Reply]:
    """The items with what their references mean: an item of this request, of the conversation, or of any response that
    this tenant has stored. Raises InvalidRequestError for an id that nothing has."""
    whole = []
    for number, item in enumerate(items):
        if kind_of(item) != "item_reference":
            whole.append(item)
        elif (item_id := str(item.get("id"))) in found:
            whole.append(found[item_id])
        else:
            raise InvalidRequestError(
                f"input.{number}.id: there is no item {item_id[:80]!r}, or it has expired (store: true keeps items)",
                param=f"input.{number}.id",
                code="item_not_found",
            )
    return whole
