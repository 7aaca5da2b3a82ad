"""``GET /settings``: what this server runs by, for ``diptych diagnose`` and for people."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from diptych import __version__
from diptych.serving.fleet.settings_view import settings_of
from diptych.serving.served_fleet import ServedFleet


class SettingsReply(BaseModel):
    """The reply of /settings: the records of control.fleet_settings as JSON. Times are in nanoseconds."""

    version: str
    model: str
    workers: list[dict[str, Any]]
    cluster: dict[str, Any]
    kv_bytes_per_token: int
    shares_memory: bool


def add_settings_routes(
    app: FastAPI, llm: ServedFleet, model_name: str, errors: dict[int | str, dict[str, Any]]
) -> None:
    """Add ``/settings``. errors: documented replies from 400 on."""

    @app.get("/settings", responses={401: errors[401], 200: {"model": SettingsReply}})
    async def settings() -> Response:
        """The settings of the workers that are up and of the front end, as they are now."""
        found = settings_of(llm.fleet, __version__, model_name)
        return Response(msgspec.json.encode(found), media_type="application/json")
