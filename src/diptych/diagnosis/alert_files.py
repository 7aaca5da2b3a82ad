"""Files for monitoring, made from the diagnosis table: a Prometheus rule file and a Grafana dashboard.

An alert cannot attribute seconds: it says which row of the table to look at, with the row's own words. The expressions
read vLLM's names, which Diptych exports too, and Diptych's own.
"""

import json
from collections.abc import Iterable
from typing import Any

from diptych.diagnosis.diagnosis_table import ROWS, CauseRow

WINDOW = "5m"
FOR = "5m"
GROUP = "diptych-diagnosis"
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 12, 8, 2
DASHBOARD_SCHEMA = 39  # of Grafana 10 and later


def alert_name(row: CauseRow) -> str:
    """The cause in the spelling of alerts."""
    return "".join(part.capitalize() for part in row.cause.split("_"))


def expression(row: CauseRow, window: str = WINDOW) -> str:
    """The PromQL of a row's alert."""
    return row.alert.format(w=window)


def watched_rows() -> tuple[CauseRow, ...]:
    """The rows that Prometheus can watch."""
    return tuple(row for row in ROWS if row.alert)


def prometheus_rules() -> str:
    """The text of a rule file (YAML; strings are quoted as JSON, which is YAML)."""
    lines = ["groups:", f"  - name: {GROUP}", "    rules:"]
    for row in watched_rows():
        summary = f"{row.symptom}: {row.cause.replace('_', ' ')}"
        description = f"Evidence: {row.evidence}. Not if {row.counter_evidence}. Inspect: {row.inspect}. {row.action}."
        lines += [
            f"      - alert: {alert_name(row)}",
            f"        expr: {json.dumps(expression(row))}",
            f"        for: {FOR}",
            "        labels:",
            "          severity: warning",
            f"          cause: {row.cause}",
            f"          phase: {row.phase}",
            "        annotations:",
            f"          summary: {json.dumps(summary)}",
            f"          description: {json.dumps(description)}",
            '          next: "diptych diagnose URL"',
        ]
    return "\n".join(lines) + "\n"


def grafana_dashboard() -> str:
    """The text of a dashboard (JSON): the latencies by phase, then a panel for each row that can be watched."""
    phases = [
        ("Mean TTFT by phase", [_mean("request_queue_time"), _mean("request_prefill_time")], "s"),
        ("TTFT p50, p95, p99", [_quantile(share, "time_to_first_token") for share in ("0.5", "0.95", "0.99")], "s"),
        ("Gap between tokens p50, p99", [_quantile(share, "inter_token_latency") for share in ("0.5", "0.99")], "s"),
        ("Running and waiting", ["sum(vllm:num_requests_running)", "sum(vllm:num_requests_waiting)"], "short"),
    ]
    panels = [_panel(number, name, queries, unit) for number, (name, queries, unit) in enumerate(phases)]
    for number, row in enumerate(watched_rows(), len(panels)):
        panels.append(_panel(number, row.symptom, [expression(row)], "short", f"{row.evidence}. {row.action}."))
    dashboard = {
        "title": "Diptych: what limits the server",
        "uid": "diptych-diagnosis",
        "schemaVersion": DASHBOARD_SCHEMA,
        "tags": ["diptych", "vllm"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _mean(name: str) -> str:
    metric = f"vllm:{name}_seconds"
    return f"sum(rate({metric}_sum[{WINDOW}])) / sum(rate({metric}_count[{WINDOW}]))"


def _quantile(share: str, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(vllm:{name}_seconds_bucket[{WINDOW}])))"


def _panel(number: int, title: str, queries: Iterable[str], unit: str, about: str = "") -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title[:1].upper() + title[1:],
        "description": about,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {
            "h": PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "x": PANEL_WIDTH * (number % COLUMNS),
            "y": PANEL_HEIGHT * (number // COLUMNS),
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": chr(ord("A") + at), "expr": query} for at, query in enumerate(queries)],
    }
