"""/v1/files and /v1/batches, in OpenAI's format.

Owns paths, bodies and lists. Where the server has no folder for batches, every path says so (404: clients do not try
again).
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field

from diptych.control.errors import InvalidRequestError, NotFoundError
from diptych.serving import edge_limits
from diptych.serving.api.bodies import key_in, read_body, takes, tenant_in
from diptych.serving.api.multipart import MultipartParser, PartBegin
from diptych.serving.api.protocol import Fields, Metadata
from diptych.serving.api.reply import encode_json
from diptych.serving.batches.batch_records import Batch, BatchTerms, StoredFile, window_seconds
from diptych.serving.batches.batch_service import BatchService, Upload

USUAL_BATCHES = 20
WRITE_BYTES = 2**18
OFF = "this server keeps no files and batches; it was started without --batch-dir"
Seconds = Annotated[int, Field(ge=edge_limits.FILE_LEAST_S, le=edge_limits.BATCH_WINDOW_S)]


class ExpiryBody(Fields):
    """How long files are kept."""

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchBody(Fields):
    """POST /v1/batches. null means: not given."""

    input_file_id: str
    endpoint: str = Field(description="The path of every line.")
    completion_window: str = Field(description="A time such as 24h, 90m or 7d; what is not done by then expires.")
    metadata: Metadata | None = None
    output_expires_after: ExpiryBody | None = Field(
        None, description="How long after the batch's creation its files are deleted."
    )


def add_batch_routes(app: FastAPI, service: BatchService | None, errors: dict[int | str, dict[str, Any]]) -> None:
    """The routes of files and batches. service: None where there is no folder for them."""
    _add_file_routes(app, service, errors)

    @app.post("/v1/batches", responses=errors, openapi_extra=takes(BatchBody))
    async def create(request: Request) -> Response:
        """Begin a batch: its lines run when there is room, until its window is over."""
        known = _required(service)
        body = await read_body(request, BatchBody)
        expiry = body.output_expires_after
        terms = BatchTerms(
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            window_seconds(body.completion_window),
            body.metadata,
            None if expiry is None else expiry.seconds,
            _owner(request),
        )
        return _json((await known.create(terms, tenant_in(request))).json())

    @app.get("/v1/batches", responses=errors)
    async def batches(request: Request) -> Response:
        """Batches, the newest first."""
        known = _required(service)
        limit = _limit(request, USUAL_BATCHES, edge_limits.LISTED_BATCHES)
        found = await known.batches(tenant_in(request), request.query_params.get("after"), limit + 1)
        return await asyncio.to_thread(_page, found, limit)

    @app.get("/v1/batches/{batch_id}", responses=errors)
    async def batch(request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return _json((await _required(service).batch(batch_id, tenant_in(request))).json())

    @app.post("/v1/batches/{batch_id}/cancel", responses=errors)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Give up the lines that are not done."""
        return _json((await _required(service).cancel(batch_id, tenant_in(request))).json())


def _owner(request: Request) -> str:
    """The name whose limits the lines count for."""
    key = key_in(request)
    return "" if key is None or key.is_option else key.name


def upload_limits(service: BatchService | None) -> dict[str, int]:
    """The largest bodies of paths that take files."""
    return {} if service is None else {"/v1/files": service.options.limits.max_file_bytes + edge_limits.FORM_BYTES}


def _add_file_routes(app: FastAPI, service: BatchService | None, errors: dict[int | str, dict[str, Any]]) -> None:
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
    }
    upload_body = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}

    @app.post("/v1/files", responses=errors, openapi_extra=upload_body)
    async def upload(request: Request) -> Response:
        """Take a file of lines for a batch."""
        return _json((await _receive(_required(service), request)).json())

    @app.get("/v1/files", responses=errors)
    async def files(request: Request) -> Response:
        """Files, the newest first."""
        known, query = _required(service), request.query_params
        limit = _limit(request, edge_limits.LISTED_FILES, edge_limits.LISTED_FILES)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order is {order[:40]!r}; one of asc, desc", param="order")
        found = await known.files(
            tenant_in(request), query.get("purpose"), query.get("after"), limit + 1, newest=order == "desc"
        )
        return await asyncio.to_thread(_page, found, limit)

    @app.get("/v1/files/{file_id}", responses=errors)
    async def file(request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return _json((await _required(service).file(file_id, tenant_in(request))).json())

    @app.get("/v1/files/{file_id}/content", responses=errors)
    async def content(request: Request, file_id: str) -> Response:
        """The file itself."""
        known = _required(service)
        found = await known.file(file_id, tenant_in(request))
        return FileResponse(known.store.path(found.id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}", responses=errors)
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file that no open batch reads."""
        await _required(service).delete_file(file_id, tenant_in(request))
        return _json({"id": file_id, "object": "file", "deleted": True})


async def _receive(service: BatchService, request: Request) -> StoredFile:
    """An upload, streamed to the disk. Raises InvalidRequestError or BodyTooLargeError."""
    parser = MultipartParser(request.headers.get("content-type", ""))
    fields: dict[str, bytearray] = {}
    upload: Upload | None = None
    filename, pending = "", bytearray()
    part = PartBegin("", None)
    try:
        async for chunk in request.stream():
            for event in parser.feed(chunk):
                if isinstance(event, PartBegin):
                    part = event
                    if part.name != "file":
                        fields[part.name] = bytearray()
                    elif upload is not None:
                        raise InvalidRequestError("the body has more than one file", param="file")
                    else:
                        filename = (part.filename or "upload")[-edge_limits.FILENAME :]
                        upload = await service.begin_upload()
                elif part.name == "file":
                    pending += event
                elif len(fields[part.name]) + len(event) > edge_limits.FORM_FIELD_BYTES:
                    text = f"the field {part.name[:40]!r} has more than {edge_limits.FORM_FIELD_BYTES} bytes"
                    raise InvalidRequestError(text, param=part.name[:40])
                else:
                    fields[part.name] += event
            if upload is not None and len(pending) >= WRITE_BYTES:
                await upload.write(bytes(pending))
                pending.clear()
        parser.close()
        if upload is None:
            raise InvalidRequestError("file is required", param="file")
        expiry_s = _checked(fields)
        await upload.write(bytes(pending))
        return await upload.keep(tenant_in(request), filename, expiry_s)
    finally:
        if upload is not None:
            upload.drop()


def _checked(fields: dict[str, bytearray]) -> int | None:
    """When the file expires, in seconds. Raises InvalidRequestError for fields that do not fit."""
    texts = {name: bytes(value).decode("utf-8", "replace") for name, value in fields.items()}
    purpose = texts.pop("purpose", None)
    if purpose != "batch":
        given = "missing" if purpose is None else repr(purpose[:40])
        raise InvalidRequestError(f"purpose is {given}; it must be batch", param="purpose")
    anchor, seconds = texts.pop("expires_after[anchor]", None), texts.pop("expires_after[seconds]", None)
    if texts:
        name = next(iter(texts))[:40]
        raise InvalidRequestError(f"{name} is no field of an upload", param=name)
    if anchor is None and seconds is None:
        return None
    least, most = edge_limits.FILE_LEAST_S, edge_limits.BATCH_WINDOW_S
    is_known = anchor == "created_at" and seconds is not None and seconds.isdecimal() and len(seconds) < 10
    if not is_known or not least <= int(seconds or 0) <= most:
        text = f"expires_after needs the anchor created_at and {least} to {most} seconds"
        raise InvalidRequestError(text, param="expires_after")
    return int(seconds or 0)


def _required(service: BatchService | None) -> BatchService:
    if service is None:
        raise NotFoundError(OFF, code="batches_off")
    return service


def _limit(request: Request, usual: int, most: int) -> int:
    text = request.query_params.get("limit", str(usual))
    limit = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 0 < limit <= most:
        raise InvalidRequestError(f"limit is {text[:40]!r}; it must be between 1 and {most}", param="limit")
    return limit


def _page(found: Sequence[StoredFile] | Sequence[Batch], limit: int) -> Response:
    """One page of a list, which may be long: for a thread. found: one entry more than fits, if there is one."""
    data = [entry.json() for entry in found[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return _json({"object": "list", "data": data, **ends, "has_more": len(found) > limit})


def _json(content: Any) -> Response:
    return Response(encode_json(content), media_type="application/json")
