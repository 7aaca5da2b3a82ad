"""What the terminal shows while a server starts: progress, then a box with the address and a command to paste.

Without a terminal the same comes as plain lines. A failure here must not fail the start.
"""

import shlex
import sys
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from diptych.serving.link.messages import Loading, Ready


class StartScreen:
    """A progress line until the server is ready. Use it as a context manager."""

    def __init__(self, model_name: str, *, has_key: bool) -> None:
        self._model_name = model_name
        self._has_key = has_key
        self._console = Console(file=sys.stdout, highlight=False)
        self._last_stage = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
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
        example = curl(url, self._model_name, has_key=self._has_key)
        lines = (
            f"[bold]{self._model_name}[/bold] is served at [bold cyan]{url}[/bold cyan] (API: {url}/v1, "
            f"reference: {url}/docs; watch it: {url}/ui)",
            f"[dim]{ready.description}; context {ready.max_model_len:,} tokens[/dim]",
        )
        if self._console.is_terminal:
            self._console.print(Panel("\n".join(lines), title="Diptych", expand=False))
        else:
            print(f"{self._model_name} is served at {url} (API: {url}/v1, reference: {url}/docs; watch it: {url}/ui)")
            print(f"{ready.description}; context {ready.max_model_len:,} tokens")
        print(f"Try it:\n\n{example}\n", flush=True)


def curl(url: str, model_name: str, *, has_key: bool) -> str:
    """A command to paste: it streams a completion. Below the box, so that no frame gets into the clipboard."""
    body = f'{{"model": "{model_name}", "prompt": "def fibonacci(n):\\n", "max_tokens": 64, "stream": true}}'
    key = ' -H "Authorization: Bearer $DIPTYCH_API_KEY"' if has_key else ""
    return f"curl -N {url}/v1/completions -H 'Content-Type: application/json'{key} \\\n  -d {shlex.quote(body)}"
