"""``diptych chat``: a conversation with a server that is a few lines long."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.cli.chat_client import ChatClient, Piece
from diptych.cli.terminal_chat import AnswerWriter
from diptych.control.errors import ConfigError, RequestError

NO_TEMPLATE = "this model has no chat template"


class Replies(BaseHTTPRequestHandler):
    """Echoes the last message word by word. "fail": an error before the stream, "break": one within it. A word in
    brackets is reasoning, and may have content behind it."""

    bodies: list[dict[str, Any]]
    has_template = True
    root = "/models/echo"
    reasoning = "reasoning_content"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """The models."""
        self._reply(200, {"data": [{"id": "echo", "root": self.root}]})

    def do_POST(self) -> None:
        """Count tokens, or answer."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._reply(*((200, {}) if self.has_template else (400, {"error": {"message": NO_TEMPLATE}})))
            return
        self.bodies.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if text == "fail":
            self._reply(400, {"error": {"message": "too long"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for word in text.split():  # the client may hang up meanwhile
            if word == "break":
                event: dict[str, Any] = {"error": {"message": "the worker was lost"}}
            elif word.startswith("("):
                reasoning, _, content = word.removeprefix("(").partition(")")
                delta = {self.reasoning: f"{reasoning} ", **({"content": f"{content} "} if content else {})}
                event = {"choices": [{"delta": delta}]}
            else:
                event = {"choices": [{"text": f"{word} "} if "prompt" in body else {"delta": {"content": f"{word} "}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def replies() -> Iterator[type[Replies]]:
    """The handler's class of this test, with the address of its server."""

    class Own(Replies):
        bodies: list[dict[str, Any]] = []  # noqa: RUF012
        url = ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    Own.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


def chat(replies: Any, text: str, *words: str) -> Any:
    """Run ``diptych chat`` with this standard input."""
    return CliRunner().invoke(cli.app, ["chat", replies.url, *words], input=text)


def test_answers_are_printed_and_the_conversation_is_kept(replies: type[Replies]) -> None:
    result = chat(replies, "good morning\nand evening\n", "--system", "be brief", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    assert result.stdout == "good morning \nand evening \n"
    first, second = replies.bodies
    assert (first["temperature"], first["max_tokens"], first["stream"]) == (0.2, 9, True)
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "good morning "


def test_an_answer_that_does_not_end_is_left(replies: type[Replies], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cli.chat_client.MOST_PIECES", 3)
    result = chat(replies, "a b c d e\nshort\n")
    assert result.exit_code == 0 and result.stdout == "a b c \nshort \n"
    assert "stopped after 3 pieces; --max-tokens N allows more" in result.stderr
    assert replies.bodies[1]["messages"][1] == {"role": "assistant", "content": "a b c "}
    assert chat(replies, "a b c d e\n", "--max-tokens", "9").stdout == "a b c d e \n"


def test_a_line_may_go_on_in_the_next(replies: type[Replies]) -> None:
    chat(replies, "def f():\\\n    return\n\n")
    assert replies.bodies[0]["messages"][-1]["content"] == "def f():\n    return"


def test_a_refused_message_was_not_said_and_the_status_tells(replies: type[Replies]) -> None:
    result = chat(replies, "fail\nhello\n")
    assert result.exit_code == 1
    assert "error: too long\n" in result.stderr and result.stdout == "hello \n"
    assert [message["content"] for message in replies.bodies[1]["messages"]] == ["hello"]


def test_an_error_within_an_answer_keeps_what_came(replies: Any) -> None:
    client = ChatClient.connect(replies.url, None, None)
    pieces = []
    with pytest.raises(RequestError, match="the worker was lost"):
        for piece in client.answer("a b break c"):
            pieces.append(piece)
    assert [piece.content for piece in pieces] == ["a ", "b "]
    assert client.messages[-1] == {"role": "assistant", "content": "a b "}


def test_a_stopped_answer_stays_in_the_conversation(replies: Any) -> None:
    client = ChatClient.connect(replies.url, None, None)
    answer = client.answer("one two three")
    assert next(answer).content == "one "
    answer.close()  # type: ignore[attr-defined]
    assert client.messages[-1]["content"] == "one "


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_beside_the_answer_and_not_sent_back(replies: type[Replies], name: str) -> None:
    replies.reasoning = name
    result = chat(replies, "(let (me)well then\nnext\n")
    assert result.stdout == "well then \nnext \n"
    assert "let me \n" in result.stderr
    assert replies.bodies[1]["messages"][1] == {"role": "assistant", "content": "well then "}


def test_an_answer_of_nothing_but_reasoning_was_not_said(replies: type[Replies]) -> None:
    result = chat(replies, "(on (and (on\nnext\n")
    assert "on and on \n(it ended within its reasoning; --max-tokens N allows more)" in result.stderr
    assert [message["content"] for message in replies.bodies[1]["messages"]] == ["next"]


def test_reasoning_is_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    writer = AnswerWriter()
    for piece in (Piece("let "), Piece("me", "well "), Piece("", "then")):
        writer.write(piece)
    writer.close()
    assert capsys.readouterr().out == "\x1b[2mlet me\x1b[0m\nwell then"


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("has_template", False, "has no chat template"),
        ("root", "/x/bundled/stdlib-python", "follows no instructions"),
    ],
)
def test_where_there_is_no_conversation_texts_are_continued(replies: Any, attribute: str, value: Any, why: str) -> None:
    setattr(replies, attribute, value)
    result = chat(replies, "import os\nimport re\n")
    assert why in result.stderr and result.stdout == "import os \nimport re \n"
    assert [body["prompt"] for body in replies.bodies] == ["import os", "import re"]
    with pytest.raises(ConfigError, match="system has no effect"):
        ChatClient.connect(replies.url, None, None, system="be brief")


def test_a_model_that_is_not_served_is_named_with_what_is(replies: Any) -> None:
    result = chat(replies, "", "--model", "other")
    assert result.exit_code == 1
    assert result.stderr == f"error: --model is 'other'; {replies.url} serves echo\n"
