"""What the terminal shows of a server: progress of its start, its addresses and a command to paste, and its end.

Without a terminal the same comes as plain lines. A failure here must not fail the start.
"""

import contextlib
import json
import shlex
import sys
from types import TracebackType
from typing import Any, Literal

from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from diptych.base.terminal_text import console
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.messages import Loading, Ready

ADDRESSES = {"API": "/v1", "Live page": "/ui", "Guide": "/guide", "Reference": "/docs"}
PromptKind = Literal["chat", "code", "text", "ids"]  # what a first request is best made of
CODE = "def get(self, key, default=None):\n    try:\n        return self[key]\n    except KeyError:\n"
EXAMPLES: dict[PromptKind, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}),
    "code": ("completions", {"prompt": CODE, "max_tokens": 32, "stop": ["\n\n"]}),
    "text": ("completions", {"prompt": "The capital of France is", "max_tokens": 32}),
    "ids": ("completions", {"prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": True}),
}
NO_TOKENIZER = (
    "warning: this model has no tokenizer (no tokenizer.json), so prompts and answers are token ids; texts get an "
    "error. A tokenizer.json of the same model in its directory mends that."
)


def prompt_kind(tokenizer: Tokenizer, *, is_bundled: bool) -> PromptKind:
    """What to show a newcomer. The bundled model has a chat template, and follows no instruction."""
    if not tokenizer.has_text:
        return "ids"
    if is_bundled:
        return "code"
    return "chat" if tokenizer.has_chat_template else "text"


class StartScreen:
    """A progress line until the server is ready, and a line when it has ended. Use it as a context manager.

    chat_command: how this user starts ``diptych chat``. is_verbose: say what the engine says of itself, too. kind: of
    the request that is shown. hint: a line below the workers, if any. warnings: sentences that a user
    should read, on standard error.
    """

    def __init__(self, model_name: str, *, has_key: bool, chat_command: str, is_verbose: bool = False) -> None:
        self.kind: PromptKind = "text"
        self.memory = ""
        self.hint = ""
        self.warnings: list[str] = []
        self._model_name = model_name
        self._has_key = has_key
        self._chat_command = chat_command
        self._is_verbose = is_verbose
        self._console = console()
        self._last_stage = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(f"starting {model_name}", total=None)

    def __enter__(self) -> "StartScreen":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if kind is None:
            with contextlib.suppress(OSError):  # its reader may be gone
                print(f"{self._model_name} is stopped", file=sys.stderr)

    def on_loading(self, loading: Loading) -> None:
        """A worker reports progress."""
        description = f"{self._model_name}: {loading.stage}"
        total = None if loading.fraction is None else 1.0
        self._progress.update(self._task, description=description, total=total, completed=loading.fraction or 0.0)
        if not self._console.is_terminal and loading.stage != self._last_stage:
            print(description, flush=True)
        self._last_stage = loading.stage

    def on_ready(self, ready: Ready, url: str) -> None:
        """The server takes requests."""
        self._progress.stop()
        lines = [f"{name:<11}{url}{path}" for name, path in ADDRESSES.items()]
        workers = f"{ready.summary}; context {ready.max_model_len:,} tokens"
        details = [line for line in (self.memory, self.hint, ready.description if self._is_verbose else "") if line]
        if self._console.is_terminal:
            text = Text("\n").join([*map(Text, lines), *(Text(line, "dim") for line in (workers, *details))])
            self._console.print(Panel(text, title=Text(f"{self._model_name} is served"), expand=False))
        else:
            print("\n".join([f"{self._model_name} is served at {url}", *lines, workers, *details]))
        if self.kind == "ids":
            print(NO_TOKENIZER, file=sys.stderr)
        for warning in self.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print("Try it:\n")
        if self.kind != "ids":
            print(f"{self._chat_command} {url}\n")
        print(f"{curl(url, self._model_name, self.kind, has_key=self._has_key)}\n", flush=True)


def curl(url: str, model_name: str, kind: PromptKind, *, has_key: bool) -> str:
    """A command to paste. Below the box, so that no frame gets into the clipboard."""
    path, fields = EXAMPLES[kind]
    body = json.dumps({"model": model_name, **fields, "temperature": 0}, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $DIPTYCH_API_KEY"' if has_key else ""
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n  -d {shlex.quote(body)}"
