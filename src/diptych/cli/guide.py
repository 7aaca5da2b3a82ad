"""``diptych guide``: the interactive guide, served from this machine to its own browser.

Owns the options and the output in the terminal; the pages are in diptych.web.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.control.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def guide(
    host: Annotated[str, typer.Option(help=shared_help.LISTEN_ADDRESS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help=shared_help.PORT)] = 8765,
    opens: Annotated[bool, typer.Option("--open", help="Open the guide in the browser.")] = False,
) -> None:
    """Prefill and decode, explained: an interactive guide and a comparison of runs. Needs no model."""
    from diptych.serving.api.connection import Connection
    from diptych.serving.api.http_policy import is_loopback
    from diptych.web.guide_app import run_guide

    with errors_in_words():
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}; it must be from 0 to 65535", param="port")
        run_guide(host, port, _say, opens=opens, guarded=_guarded if is_loopback(host) else None, http=Connection)


def _guarded(app: "ASGIApp") -> "ASGIApp":
    """A page of another name that resolves to this machine is refused, as ``diptych serve`` does."""
    from diptych.serving.api.cross_origin import CrossOrigin

    return CrossOrigin(app, (), ())


def _say(url: str) -> None:
    print(f"The guide is at {url}  (Ctrl+C ends it)", flush=True)
