"""``diptych alerts``: the diagnosis table as files for Prometheus and Grafana."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.error_messages import errors_in_words
from diptych.cli.output import write_file
from diptych.control.errors import ConfigError

RULES, DASHBOARD = "diptych-rules.yml", "diptych-dashboard.json"


def alerts(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; it is made.")] = Path("."),
) -> None:
    """Write Prometheus rules and a Grafana dashboard for Diptych and vLLM servers."""
    with errors_in_words():
        from diptych.diagnosis.alert_files import grafana_dashboard, prometheus_rules

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder is {folder}, which cannot be made: {error.strerror}", param="folder") from None
        for name, text in ((RULES, prometheus_rules()), (DASHBOARD, grafana_dashboard())):
            print(write_file(folder / name, [text.encode()]))
