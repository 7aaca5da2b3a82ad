"""Calls of the command ``llm``."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, call, expect, expect_abort, expect_choice, run

PROGRAM = str(Path(sys.executable).parent / "llm")
FOLDER = tempfile.TemporaryDirectory()
ENVIRONMENT = {**os.environ, "LLM_USER_PATH": FOLDER.name, "LLM_LOAD_PLUGINS": ""}
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)
MODELS = f"""
- model_id: here
  model_name: {MODEL}
  api_base: {URL}
  api_key_name: diptych
  supports_schema: true
  supports_tools: true
- model_id: here-text
  model_name: {MODEL}
  api_base: {URL}
  api_key_name: diptych
  completion: true
"""
Path(FOLDER.name, "extra-openai-models.yaml").write_text(MODELS)
Path(FOLDER.name, "keys.json").write_text(json.dumps({"diptych": KEY}))


def llm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it."""
    given = (PROGRAM, *words)
    return subprocess.run(given, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def answer(*words: str) -> str:
    """What it prints. Raises AssertionError with its error."""
    done = llm(*words)
    expect(done.returncode == 0, done.stderr.strip()[-300:])
    return done.stdout.strip()


@call("models")
def models() -> None:
    expect("here" in answer("models"), "the model is not listed")


@call("chat")
def chat() -> None:
    expect(answer("-m", "here", *OPTIONS, "12", "--no-stream", QUESTION), "no text")
    expect(answer("-c", *OPTIONS, "12", "--no-stream", "And of three?"), "no text in the second turn")


@call("stream")
def stream() -> None:
    whole = answer("-m", "here", *OPTIONS, "12", "--no-stream", QUESTION)
    streamed = answer("-m", "here", *OPTIONS, "12", QUESTION)
    expect(streamed == whole, f"{streamed!r} as a stream, else {whole!r}")


@call("completions")
def completions() -> None:
    expect(answer("-m", "here-text", *OPTIONS, "8", "import os\n"), "no text")


@call("tools")
def tools() -> None:
    code = 'def choose(colour: str) -> str:\n    "Choose a colour."\n    return colour'
    expect(answer("-m", "here", *OPTIONS, "12", "--functions", code, QUESTION), "no text")  # it cannot force a call


@call("structured")
def structured() -> None:
    expect_choice(json.loads(answer("-m", "here", *OPTIONS, "60", "--schema", SCHEMA, QUESTION)))


@call("abort")
def abort() -> None:
    words = (PROGRAM, "-m", "here", *OPTIONS, str(ENDLESS), QUESTION)
    running = subprocess.Popen(words, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.read(1)
    expect_abort(running.kill)
    running.communicate()


@call("too long")
def too_long() -> None:
    done = llm("-m", "here", *OPTIONS, "8", TOO_LONG)
    expect(done.returncode and "maximum context length" in done.stderr, done.stderr.strip()[-300:])


run()
