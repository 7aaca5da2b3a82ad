"""What one tenant has stored is for another what does not exist: the same reply as for an id that nobody has."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_files import ENDPOINT, numbered
from fake_llm import FakeLLM
from tool_model import tool_model

from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api.app import build_app
from diptych.serving.batches.batch_service import BatchOptions, BatchService

pytestmark = pytest.mark.asyncio
Call = tuple[str, str, dict[str, Any] | None]

RESPONSES: tuple[Call, ...] = (
    ("GET", "/v1/responses/ID", None),
    ("DELETE", "/v1/responses/ID", None),
    ("POST", "/v1/responses", {"model": "fake", "input": "And?", "previous_response_id": "ID"}),
)
ITEMS: tuple[Call, ...] = (
    ("POST", "/v1/responses", {"model": "fake", "input": [{"type": "item_reference", "id": "ID"}]}),
)
FILES: tuple[Call, ...] = (
    ("GET", "/v1/files/ID", None),
    ("GET", "/v1/files/ID/content", None),
    ("DELETE", "/v1/files/ID", None),
)
NEW_BATCH: tuple[Call, ...] = (
    ("POST", "/v1/batches", {"input_file_id": "ID", "endpoint": ENDPOINT, "completion_window": "24h"}),
)
BATCHES: tuple[Call, ...] = (("GET", "/v1/batches/ID", None), ("POST", "/v1/batches/ID/cancel", None))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tool_model(tmp_path_factory.mktemp("model") / "tools"))


@asynccontextmanager
async def served(folder: Path, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """A server of two tenants, whose batches wait."""
    service = BatchService(BatchOptions(folder))
    llm: Any = FakeLLM(answer="Sun.", tokenizer=tokenizer)
    app = build_app(llm, "fake", api_keys=("me", "you"), batches=service)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    service.close()


async def ask(client: httpx.AsyncClient, key: str, call: Call, id_: str) -> httpx.Response:
    method, path, body = call
    content = None if body is None else json.loads(json.dumps(body).replace("ID", id_))
    return await client.request(
        method, path.replace("ID", id_), json=content, headers={"authorization": f"Bearer {key}"}
    )


async def upload(client: httpx.AsyncClient, headers: dict[str, str]) -> str:
    sent = {"file": ("in.jsonl", numbered(2))}
    reply = await client.post("/v1/files", files=sent, data={"purpose": "batch"}, headers=headers)
    return str(reply.json()["id"])


async def check(client: httpx.AsyncClient, calls: Sequence[Call], id_: str) -> None:
    """Assert of these calls that the other tenant learns nothing and changes nothing, whatever it asks first."""
    made_up = f"{id_[:-4]}0000"
    for call in calls:
        theirs, nobodys = await ask(client, "you", call, id_), await ask(client, "you", call, made_up)
        assert nobodys.status_code in (400, 404), nobodys.text
        assert (theirs.status_code, theirs.text.replace(id_, made_up)) == (nobodys.status_code, nobodys.text)
    for call in sorted(calls, key=lambda call: call[0] == "DELETE"):
        assert (await ask(client, "me", call, id_)).status_code < 300


async def test_of_what_a_tenant_has_stored_others_see_and_change_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    mine = {"authorization": "Bearer me"}
    async with served(tmp_path, tokenizer) as client:
        reply = await client.post("/v1/responses", json={"model": "fake", "input": "Weather?"}, headers=mine)
        await check(client, ITEMS, reply.json()["output"][0]["id"])
        await check(client, RESPONSES, reply.json()["id"])
        unused, file = [await upload(client, mine) for _ in range(2)]
        await check(client, FILES, unused)
        await check(client, NEW_BATCH, file)
        batch = (await ask(client, "me", NEW_BATCH[0], file)).json()["id"]
        await check(client, BATCHES, batch)
        for path in ("/v1/files", "/v1/batches"):
            theirs = await client.get(path, headers={"authorization": "Bearer you"})
            assert theirs.json()["data"] == []
            assert (await client.get(path, headers=mine)).json()["data"]


async def test_the_tenant_of_a_key_is_in_no_reply(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with served(tmp_path, tokenizer) as client:
        for key in ("", "he", "mee", "Bearer me"):
            refused = await client.get("/v1/files", headers={"authorization": f"Bearer {key}"})
            assert refused.status_code == 401 and "me" not in refused.json()["error"]["message"].split()
