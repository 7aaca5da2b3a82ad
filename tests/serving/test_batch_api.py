"""/v1/files and /v1/batches as OpenAI's client sees them, in front of an AsyncLLM without workers."""

import asyncio
import errno
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_files import ENDPOINT, jsonl, line, numbered
from fake_llm import FakeLLM

from diptych.control.errors import InvalidRequestError
from diptych.serving.api.app import build_app
from diptych.serving.api.multipart import MultipartParser, PartBegin
from diptych.serving.batches import batch_service, batch_store
from diptych.serving.batches.batch_records import BatchLimits
from diptych.serving.batches.batch_service import BatchOptions, BatchService
from diptych.serving.batches.batch_tables import BatchTables

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def served(folder: Path | None, llm: FakeLLM | None = None, **limits: int) -> AsyncIterator[httpx.AsyncClient]:
    service = None if folder is None else BatchService(BatchOptions(folder, BatchLimits(**limits)))
    app = build_app(llm or FakeLLM(), "fake", api_keys=("me", "you"), batches=service)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    if service is not None:
        service.start()
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"authorization": "Bearer me"}
    ) as client:
        yield client
    if service is not None:
        await service.stop()
        service.close()


async def upload(client: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch", **fields})


async def ended(client: Any, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
                return batch
            await asyncio.sleep(0.01)


async def create(client: httpx.AsyncClient, file_id: str, **changes: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **changes}
    return await client.post("/v1/batches", json=body)


async def test_openai_s_client_runs_a_batch(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with served(tmp_path, llm) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="me", max_retries=0, http_client=http)
        content = jsonl([line("a"), line("b", body={"prompt": "x", "max_tokens": 0}), line("c", body={"prompt": [7]})])
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose, file.status) == (
            "in.jsonl",
            len(content),
            "batch",
            "processed",
        )
        assert (await client.files.retrieve(file.id)).id == file.id
        assert (await client.files.content(file.id)).content == content
        assert [entry.id async for entry in client.files.list(purpose="batch")] == [file.id]
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
        await ended(http, batch.id)
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
        assert batch.output_file_id and batch.error_file_id
        good = [json.loads(text) for text in (await client.files.content(batch.output_file_id)).text.splitlines()]
        assert {row["custom_id"] for row in good} == {"a", "c"}
        assert good[0]["response"]["body"]["object"] == "text_completion"
        assert good[0]["response"]["request_id"] == good[0]["response"]["body"]["id"]
        [bad] = [json.loads(text) for text in (await client.files.content(batch.error_file_id)).text.splitlines()]
        assert bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == "max_tokens"
        assert [entry.id async for entry in client.batches.list()] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        assert "diptych:batch_lines_total" in (await http.get("/metrics")).text
    assert {submitted.options.service_class for submitted in llm.submitted} == {"batch"}


async def test_conversations_of_every_dialect_run_as_lines(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    llm = FakeLLM()
    async with served(tmp_path, llm) as client:
        for path, body, kind in (
            ("/v1/chat/completions", chat, "chat.completion"),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "response"),
            ("/v1/messages", chat, "message"),
        ):
            file = (await upload(client, jsonl([line("a", url=path, body=body)]))).json()
            batch = await ended(client, (await create(client, file["id"], endpoint=path)).json()["id"])
            assert batch["status"] == "completed", batch
            output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).json()
            reply = output["response"]["body"]
            assert reply.get("object", reply.get("type")) == kind
            assert llm.submitted[-1].options.service_class == "batch"
            if kind == "response":  # not stored unless the line says so
                assert (await client.get(f"/v1/responses/{reply['id']}")).status_code == 404


async def test_a_wrong_file_fails_with_its_lines(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        file = (await upload(client, jsonl([line("a"), line("a"), line("b", url="/v1/x")]))).json()
        batch = await ended(client, (await create(client, file["id"])).json()["id"])
        assert batch["status"] == "failed" and batch["failed_at"]
        assert [(fault["code"], fault["line"]) for fault in batch["errors"]["data"]] == [
            ("duplicate_custom_id", 2),
            ("mismatched_endpoint", 3),
        ]


async def test_wrong_requests_name_the_field(tmp_path: Path) -> None:
    async with served(tmp_path, max_file_bytes=3000) as client:
        file = (await upload(client, numbered(1))).json()
        for reply, status, param in (
            (await create(client, "file-no"), 404, "input_file_id"),
            (await create(client, file["id"], endpoint="/v1/x"), 400, "endpoint"),
            (await create(client, file["id"], completion_window="soon"), 400, "completion_window"),
            (await create(client, file["id"], output_expires_after={"anchor": "created_at", "seconds": 1}), 400,
             "output_expires_after.seconds"),
            (await client.get("/v1/batches?limit=0"), 400, "limit"),
            (await client.get("/v1/batches?after=x"), 404, "after"),
            (await client.get("/v1/files?order=up"), 400, "order"),
            (await client.get("/v1/batches/x"), 404, "batch_id"),
            (await client.post("/v1/batches/x/cancel"), 404, "batch_id"),
            (await client.delete("/v1/files/x"), 404, "file_id"),
            (await upload(client, b"x", purpose="vision"), 400, "purpose"),
            (await upload(client, b"x", **{"expires_after[anchor]": "now"}), 400, "expires_after"),
            (await upload(client, b"x", colour="red"), 400, "colour"),
            (await client.post("/v1/files", data={"purpose": "batch"}, files={"f": b"x"}), 400, "file"),
            (await client.post("/v1/files", json={}), 400, None),
        ):  # fmt: skip
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
        reply = await upload(client, b"x" * 3001)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "file_too_large")
        assert list((tmp_path / "incoming").iterdir()) == []
        reply = await upload(client, b"x" * 80_000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        kept = (
            await upload(client, b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        ).json()
        assert kept["expires_at"] == kept["created_at"] + 3600
        other = {"authorization": "Bearer you"}
        assert (await client.get(f"/v1/files/{file['id']}", headers=other)).status_code == 404
        assert (await client.get("/v1/files", headers=other)).json()["data"] == []


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        ids = [(await upload(client, numbered(1))).json()["id"] for _ in range(3)]
        page = (await client.get("/v1/files?limit=2&order=asc")).json()
        assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (ids[:2], True)
        page = (await client.get(f"/v1/files?limit=2&order=asc&after={page['last_id']}")).json()
        assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (ids[2:], False)
        batches = [(await create(client, ids[0])).json()["id"] for _ in range(3)]
        page = (await client.get("/v1/batches?limit=2")).json()
        assert [entry["id"] for entry in page["data"]] == [batches[2], batches[1]]
        page = (await client.get(f"/v1/batches?after={page['last_id']}")).json()
        assert ([entry["id"] for entry in page["data"]], page["has_more"]) == ([batches[0]], False)


async def test_a_server_without_a_folder_says_so() -> None:
    async with served(None) as client:
        for reply in (await client.get("/v1/batches"), await upload(client, b"x"), await create(client, "x")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "batches_off")
            assert "--batch-dir" in reply.json()["error"]["message"]


def parts_of(body: bytes, boundary: str, size: int) -> list[tuple[str, str | None, bytes]]:
    parser, found = MultipartParser(f'multipart/form-data; boundary="{boundary}"'), []
    for begin in range(0, len(body), size):
        for event in parser.feed(body[begin : begin + size]):
            if isinstance(event, PartBegin):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, content = found[-1]
                found[-1] = (name, filename, content + event)
    parser.close()
    return found


async def test_parts_of_a_body_are_found_however_it_is_cut() -> None:
    content = b"a\r\n--b\r\nx\r\n--\r\n\r\n\x00"
    body = (
        b'--bound\r\nContent-Disposition: form-data; name="file"; filename="a \\"q\\" \xe6\x97\xa5.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\n"
        + content
        + b"\r\n--bound\r\ncontent-disposition: form-data; name=empty\r\n\r\n"
        b"\r\n--bound--\r\nafter"
    )
    for size in (1, 2, 3, 7, 50, 10_000):
        assert parts_of(body, "bound", size) == [("file", 'a "q" 日.txt', content), ("empty", None, b"")]
    unnamed = b"--bound\r\nContent-Disposition: form-data\r\n\r\n"
    for wrong in (body[:-13], b"", b"--boundx", b"--bound\r\n\r\n\r\n", unnamed, b"--bound\r\n" + b"a" * 20_000):
        with pytest.raises(InvalidRequestError):
            parts_of(wrong, "bound", 10)


@pytest.mark.parametrize("place", ["open", "write", "sync", "rename", "row"])
async def test_an_upload_on_a_full_disk_is_refused_and_leaves_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise (
            sqlite3.OperationalError("database or disk is full")
            if place == "row"
            else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        )

    async with served(tmp_path / "batches") as client:
        with monkeypatch.context() as patch:
            targets = {
                "open": (batch_service, "open_private"),
                "write": (batch_service, "_write_all"),
                "sync": (batch_store, "_sync_folder"),
                "rename": (Path, "rename"),
                "row": (BatchTables, "add_file"),
            }
            patch.setattr(*targets[place], full)
            replies = [await upload(client, b"{}") for _ in range(3)]
        for reply in replies:
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "disk_failed"
            assert reply.headers["retry-after"] == "60"
        assert caplog.text.count("cannot be used") == 1
        assert not list((tmp_path / "batches").rglob("file-*"))
        assert (await upload(client, b"{}")).status_code == 200


FAILURES = (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), sqlite3.OperationalError("database or disk is full"))


@pytest.mark.parametrize("failure", FAILURES, ids=["file", "database"])
async def test_whatever_is_asked_of_files_and_batches_is_refused_with_a_time_while_their_disk_fails(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No route lets it through as an internal error; afterwards all is as before."""

    async def failing(self: batch_service.BatchService, work: Any, *arguments: Any) -> Any:
        raise failure

    async with served(tmp_path / "batches") as client:
        file = (await upload(client, b"{}")).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()["id"]
        calls = [
            ("POST", "/v1/batches", body),
            *(
                ("GET", path, None)
                for path in ("/v1/batches", "/v1/files", f"/v1/batches/{batch}", f"/v1/files/{file}")
            ),
            ("GET", f"/v1/files/{file}/content", None),
            ("POST", f"/v1/batches/{batch}/cancel", None),
            ("DELETE", f"/v1/files/{file}", None),
        ]
        with monkeypatch.context() as patch:
            patch.setattr(batch_service.BatchService, "in_thread", failing)
            for method, path, given in calls:
                reply = await client.request(method, path, json=given)
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "disk_failed"), path
                assert reply.headers["retry-after"] == "60"
        assert (await client.get(f"/v1/batches/{batch}")).status_code == 200


async def test_a_request_that_comes_while_the_server_ends_is_told(tmp_path: Path) -> None:
    service = BatchService(BatchOptions(tmp_path / "batches", BatchLimits()))
    app = build_app(FakeLLM(), "fake", batches=service)  # type: ignore[arg-type]
    service.close()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for reply in (await upload(client, b"{}"), await client.get("/v1/batches"), await create(client, "file-a")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
            assert reply.headers["retry-after"] == "1"
