#!/usr/bin/env bash
# LiteLLM 1.108.7 sends an Anthropic-style call (litellm.anthropic.messages, which is also what its proxy does for
# /v1/messages) to another route than a chat completion of the same model: with the prefix openai/ to /v1/responses, with
# hosted_vllm/ to /v1/chat/completions. So a server that has only chat completions works with openai/ in OpenAI's dialect,
# and not in Anthropic's; and the two calls of one application meet two different parsers of tools and history.
#
# Installs litellm in a temporary folder, serves 127.0.0.1, and prints which path each call asks for. Exits with 1 when that
# is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check litellm==1.108.7 2>/dev/null
cat >"$folder/routes.py" <<'PYTHON'
import asyncio
import http.server
import json
import sys
import threading
from importlib.metadata import version

import litellm

litellm.suppress_debug_info = True
paths = []


class Refusing(http.server.BaseHTTPRequestHandler):
    """Notes the path of each request; what it answers does not matter."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        paths.append(self.path)
        body = json.dumps({"error": {"message": "noted"}}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
threading.Thread(target=server.serve_forever, daemon=True).start()
common = {
    "api_base": f"http://127.0.0.1:{server.server_port}/v1",
    "api_key": "any",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
}


async def path_of(call, model):
    paths.clear()
    try:
        await call(model=model, num_retries=0, **common)
    except Exception:
        pass
    return paths[0] if paths else "none"


async def main():
    seen = {}
    for model in ("openai/any-model", "hosted_vllm/any-model"):
        for name, call in (("chat", litellm.acompletion), ("messages", litellm.anthropic.messages.acreate)):
            seen[model.partition("/")[0], name] = await path_of(call, model)
    print("litellm", version("litellm"))
    for (prefix, name), path in seen.items():
        print(f"{prefix:<12} {name:<9} {path}")
    return seen


expected = {
    ("openai", "chat"): "/v1/chat/completions",
    ("openai", "messages"): "/v1/responses",
    ("hosted_vllm", "chat"): "/v1/chat/completions",
    ("hosted_vllm", "messages"): "/v1/chat/completions",
}
sys.exit(0 if asyncio.run(main()) == expected else 1)
PYTHON
env LITELLM_LOCAL_MODEL_COST_MAP=True NO_PROXY=127.0.0.1 "$folder/venv/bin/python" "$folder/routes.py" 2>/dev/null
# Seen:
#   litellm 1.108.7
#   openai       chat      /v1/chat/completions
#   openai       messages  /v1/responses
#   hosted_vllm  chat      /v1/chat/completions
#   hosted_vllm  messages  /v1/chat/completions
