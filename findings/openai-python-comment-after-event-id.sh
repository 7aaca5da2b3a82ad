#!/usr/bin/env bash
# OpenAI's client for Python takes a keep-alive comment for an event once an event of the stream had an id.
#
# Server-sent events: a line that begins with a colon is a comment, and an empty line dispatches an event only where data
# has come. Servers therefore send ": keep-alive" and an empty line while they have nothing to say. The client keeps the id
# of the last event (as it should), and takes any empty line after that for the end of an event: one without data, whose
# JSON it then cannot read. Without ids, or where the comment has no empty line behind it, the same stream is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import httpx2 as httpx
import openai

chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
delta = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
data = f"data: {json.dumps({**chunk, 'choices': [delta]})}\n\n"


def read(stream: str) -> str:
    """What the client makes of a stream."""
    reply = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream + "data: [DONE]\n\n")
    http = httpx.Client(transport=httpx.MockTransport(lambda request: reply))
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
    try:
        chunks = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        return "".join(found.choices[0].delta.content or "" for found in chunks)
    except ValueError as error:
        return type(error).__name__


seen = {
    "comment, no ids": read(data + ": keep-alive\n\n" + data),
    "ids, no comment": read("id: 1\n" + data + "id: 2\n" + data),
    "comment after an id": read("id: 1\n" + data + ": keep-alive\n\n" + "id: 2\n" + data),
    "comment without an empty line after an id": read("id: 1\n" + data + ": keep-alive\n" + "id: 2\n" + data),
}
print("openai", openai.__version__)
for name, result in seen.items():
    print(f"{name}: {result}")
assert list(seen.values()) == ["aa", "aa", "JSONDecodeError", "aa"], "the client behaves otherwise now"
PYTHON
