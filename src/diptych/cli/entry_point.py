"""The ``diptych`` command: imports the command line and runs it."""

from diptych.runtime.device.garbage import without_collections


def main() -> None:
    """Run the command line of this process, and end it with its status."""
    with without_collections():
        from diptych.cli.main import app
    app()
