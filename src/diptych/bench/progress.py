"""The live line on the terminal while a measurement runs."""

from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.base.terminal_text import console
from diptych.bench.load import LoadProgress
from diptych.report.text import milliseconds

LINE_S = 10.0


class LiveLine:
    """A bar with the figures so far, on standard error; where that is no terminal, a line each LINE_S seconds."""

    def __init__(self, words: str, *, quiet: bool) -> None:
        self._console = console(is_error=True)
        self._words = words
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(12),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(words, total=1.0, figures="")
        self._last = (0.0, 0)
        self._is_quiet = quiet
        self._plan = ""
        self._said_s = 0.0  # of the run, when its last line was printed

    def __enter__(self) -> "LiveLine":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def announce(self, plan: str) -> None:
        """What is going to be measured: a line before the first figures."""
        self._plan = plan

    def describe(self, words: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=words, completed=0.0, figures="")
        self._last = (0.0, 0)
        self._progress.refresh()

    def show(self, now: LoadProgress) -> None:
        """How the run is doing."""
        self._say_plan()
        seconds, tokens = self._last
        if now.elapsed_s < seconds:
            seconds, tokens = 0.0, 0
        rate = (now.tokens - tokens) / max(1e-3, now.elapsed_s - seconds)
        self._last = (now.elapsed_s, now.tokens)
        figures = [f"{now.sent:,}/{now.total:,} sent", f"{now.running:,} running", f"{rate:,.0f} tok/s"]
        if now.ttft_p50_ms is not None:
            figures.append(f"TTFT {milliseconds(now.ttft_p50_ms)} ms")
        if now.judged:
            figures.append(f"{100 * now.met / now.judged:.0f} % in time")
        if now.failed:
            figures.append(f"[red]{now.failed:,} failed[/red]")
        if not self._console.is_terminal and not self._is_quiet:
            self._said_s = min(self._said_s, now.elapsed_s)  # a new run begins at 0
            if now.elapsed_s >= self._said_s + LINE_S:
                self._said_s = now.elapsed_s
                self._console.print(f"{now.elapsed_s:.0f} s:  {'  '.join(figures)}", markup=True, soft_wrap=True)
        share = (now.completed + now.failed) / max(1, now.total)
        self._progress.update(self._task, description="", completed=share, figures="  ".join(figures))
        self._progress.refresh()

    def _say_plan(self) -> None:
        plan, self._plan = self._plan, ""
        if plan:
            self.say(plan)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._say_plan()
        if not self._is_quiet:
            self._console.print(line, soft_wrap=True)
