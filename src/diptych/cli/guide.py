"""``diptych guide``: the interactive guide, served from this machine to its own browser.

Owns the options and the output in the terminal; the pages are in diptych.web.
"""

from typing import Annotated

import typer

from diptych.cli.error_messages import errors_in_words
from diptych.control.errors import ConfigError


def guide(
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0: reachable from everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.")] = 8765,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Prefill and decode, explained: an interactive guide and a comparison of runs. Needs no model."""
    from diptych.web.guide_app import run_guide

    with errors_in_words():
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}; it must be from 0 to 65535", param="port")
        run_guide(host, port, _say, opens=opens)


def _say(url: str) -> None:
    print(f"The guide is at {url}  (Ctrl+C ends it)", flush=True)
