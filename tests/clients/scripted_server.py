"""The real server, prompts and readers of answers in front of a scripted worker: ``python scripted_server.py FOLDER``.

FOLDER holds the model and ``scripts.json`` (see scripted_worker.py). Into it go ``prompts.jsonl``, what the model was
given and has answered, and ``requests.jsonl``, every request to /v1 with its reply. Prints the address when it is
ready.
"""

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from scripted_worker import scripted_command
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.serving.api.app import build_app
from diptych.serving.api.server import ServerOptions, run_server
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import EngineOptions

MODEL_NAME = "scripted"
API_KEY = "key-of-the-agents"


class RequestRecorder:
    """Writes down what comes and what is answered, as far as it goes through ``send``."""

    def __init__(self, app: ASGIApp, log: Path) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1"):
            await self._app(scope, receive, send)
            return
        asked, answered, status, headers = b"", b"", 0, {}

        async def received() -> Message:
            nonlocal asked
            message = await receive()
            asked += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            nonlocal answered, status, headers
            status = message.get("status", status)
            headers = {name.decode(): value.decode() for name, value in message.get("headers", ())} or headers
            answered += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            names = {"method": scope["method"], "path": scope["path"], "status": status, "headers": headers}
            texts = {"request": asked.decode(errors="replace"), "reply": answered.decode(errors="replace")}
            with self._log.open("a") as log:
                log.write(json.dumps(names | texts) + "\n")


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    folder = Path(sys.argv[1])
    options = EngineOptions(model=str(folder / "model"))
    command = scripted_command(folder / "scripts.json", folder / "prompts.jsonl")
    llm = AsyncLLM(options, Fleet(options, FleetOptions(), LocalLauncher(command)))

    def make_app() -> ASGIApp:
        app = build_app(llm, MODEL_NAME, api_keys=(API_KEY,))
        app.add_middleware(RequestRecorder, log=folder / "requests.jsonl")
        return app

    server = ServerOptions(port=0, served_model_name=MODEL_NAME)
    run_server(llm, server, on_ready=lambda ready, url: print("served at", url, flush=True), make_app=make_app)


if __name__ == "__main__":
    main()
