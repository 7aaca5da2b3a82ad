"""Plain HTTP calls, in the order in which a chat page such as Open WebUI makes them; the standard library alone."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from calls import COLOURS, ENDLESS, KEY, MODEL, QUESTION, ROOT, TOO_LONG, call, expect, expect_abort, run

PAGE = "http://localhost:3000"  # the server is started with --cors-origin of it
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Origin": PAGE}
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}


def send(method: str, path: str, body: Any = None, **headers: str) -> tuple[http.client.HTTPResponse, Any]:
    """A request on a connection of its own, and its reply as JSON or text."""
    connection, reply = start(method, path, body, **headers)
    text = reply.read().decode()
    connection.close()
    return reply, json.loads(text) if "json" in reply.headers.get("content-type", "") else text


def start(
    method: str, path: str, body: Any = None, **headers: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A request of which the reply begins."""
    connection = http.client.HTTPConnection(urlsplit(ROOT).netloc, timeout=60)
    connection.request(method, path, json.dumps(body) if body is not None else None, {**HEADERS, **headers})
    return connection, connection.getresponse()


@call("models")
def models() -> None:
    reply, found = send("GET", "/v1/models")
    expect(reply.status == 200 and found["data"][0]["id"] == MODEL, found)
    reply, card = send("GET", f"/v1/models/{MODEL}")
    expect(reply.status == 200 and card["max_model_len"] > 0, card)
    expect(send("GET", "/v1/models/another")[0].status == 404, "a model that is not there")


@call("chat")
def chat() -> None:
    reply, found = send("POST", "/v1/chat/completions", ASKED)
    expect(reply.status == 200 and found["choices"][0]["message"]["content"], found)


@call("stream")
def stream() -> None:
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    reply, text = send("POST", "/v1/chat/completions", asked)
    expect(reply.headers["content-type"].startswith("text/event-stream"), reply.headers["content-type"])
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    expect(lines[-1] == "[DONE]", lines[-1])
    events = [json.loads(line) for line in lines[:-1]]
    whole = send("POST", "/v1/chat/completions", ASKED)[1]["choices"][0]["message"]["content"]
    found = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    expect(found == whole and events[-1]["usage"]["completion_tokens"] == 12, found)


@call("completions")
def completions() -> None:
    asked = {"model": MODEL, "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
    expect(send("POST", "/v1/completions", asked)[1]["choices"][0]["text"], "no text")


@call("tools")
def tools() -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": list(COLOURS)}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "choose", "parameters": schema}}
    asked = {**ASKED, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}
    [made] = send("POST", "/v1/chat/completions", asked)[1]["choices"][0]["message"]["tool_calls"]
    expect(json.loads(made["function"]["arguments"])["colour"] in COLOURS, made)


@call("embeddings")
def embeddings() -> None:
    reply, found = send("POST", "/v1/embeddings", {"model": MODEL, "input": "one"})
    expect(reply.status == 200 and len(found["data"][0]["embedding"]) > 1, found)


@call("abort")
def abort() -> None:
    asked = {**ASKED, "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    connection, reply = start("POST", "/v1/chat/completions", asked)
    reply.read(1)

    def leave() -> None:
        reply.close()
        connection.close()

    expect_abort(leave)


@call("request id")
def request_id() -> None:
    reply, _ = send("POST", "/v1/chat/completions", ASKED, **{"X-Request-Id": "mine-2"})
    expect(reply.headers["x-request-id"] == "mine-2", reply.headers["x-request-id"])


@call("too long")
def too_long() -> None:
    messages = [{"role": "user", "content": TOO_LONG}]
    reply, found = send("POST", "/v1/chat/completions", {**ASKED, "messages": messages})
    expect(reply.status == 400 and found["error"]["code"] == "context_length_exceeded", found)


@call("CORS")
def cross_origin() -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    connection = http.client.HTTPConnection(urlsplit(ROOT).netloc, timeout=60)
    connection.request("OPTIONS", "/v1/chat/completions", None, {"Origin": PAGE, **asks})  # a browser sends no key
    reply = connection.getresponse()
    reply.read()
    connection.close()
    allowed = reply.headers.get("access-control-allow-headers", "").lower()
    expect(reply.status in (200, 204) and "authorization" in allowed, f"{reply.status} {dict(reply.headers)}")
    expect(reply.headers.get("access-control-allow-origin") == PAGE, dict(reply.headers))
    read, _ = send("GET", "/v1/models")
    expect(read.headers.get("access-control-allow-origin") == PAGE, dict(read.headers))


run()
