"""Files for monitoring, made from the diagnosis table and what an operator must see to: a Prometheus rule file and a
Grafana dashboard.

An alert cannot attribute seconds: it says which row of the table to look at, with the row's own words. The expressions
read vLLM's names, which Diptych exports too, and Diptych's own. Each server that Prometheus scrapes is judged alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych.diagnosis.diagnosis_table import ROWS, CauseRow

WINDOW = "5m"
SERVER = "instance, model_name"  # the labels that stand for one server
FOR = "5m"
GROUP = "diptych-diagnosis"
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 12, 8, 2
DASHBOARD_SCHEMA = 39  # of Grafana 10 and later
FLEET_GROUP = "diptych-fleet"
WORKER = f"{SERVER}, worker"  # the labels that stand for one worker, or one engine behind a front


@dataclass(frozen=True, slots=True)
class FleetAlert:
    """What an operator has to see to, whatever it costs: name, PromQL, how long it must hold, words for people."""

    name: str
    expression: str
    hold: str
    summary: str
    description: str
    look: str


FLEET_ALERTS = (
    FleetAlert(
        "WorkerDown",
        f"min by ({WORKER}) (diptych:worker_up) == 0",
        "2m",
        "worker {{ $labels.worker }} does not serve",
        "It was lost and is not back. Behind a front /engines names the engine and says what it lacks; the log says "
        "why it was lost.",
        "curl URL/engines, or the log of the server",
    ),
    FleetAlert(
        "DrainsTooLong",
        f"max by ({WORKER}) (diptych:worker_draining) == 1",
        "30m",
        "worker {{ $labels.worker }} has been draining for half an hour",
        "It gets nothing new until its engine was started again, or until it is used again.",
        """curl -X POST URL/admin/workers/{{ $labels.worker }} -d '{"drain": false}'""",
    ),
    FleetAlert(
        "RequestsRefused",
        f"sum by ({SERVER}) (rate(diptych:requests_refused_total[{WINDOW}])) > 0.05 * "
        f"sum by ({SERVER}) (rate(vllm:request_success_total[{WINDOW}]))",
        FOR,
        "more than one request in twenty is refused",
        "Queues or limits of keys are full: clients get 429 or 503.",
        "diptych diagnose URL",
    ),
    FleetAlert(
        "ObjectivesMissed",
        f"sum by ({SERVER}) (rate(diptych:requests_meeting_slo_total[{WINDOW}])) < 0.9 * "
        f"sum by ({SERVER}) (rate(diptych:requests_with_slo_total[{WINDOW}]))",
        FOR,
        "more than one request in ten misses its latency objectives",
        "The diagnosis says what takes the time, and which setting changes most.",
        "diptych diagnose URL",
    ),
    FleetAlert(
        "CachePredictedWrongly",
        f"max by ({SERVER}) (diptych:router_cache_alarm) == 1",
        FOR,
        "the router is wrong about what the engines' caches hold",
        "More than a fifth of the predicted cached tokens was not there. Give kv_events=, or set --assumed and "
        "--block-size to what the engines do.",
        "curl URL/engines",
    ),
)


def alert_name(row: CauseRow) -> str:
    """The cause in the spelling of alerts."""
    return "".join(part.capitalize() for part in row.cause.split("_"))


def expression(row: CauseRow, window: str = WINDOW) -> str:
    """The PromQL of a row's alert."""
    return row.alert.format(w=window, server=SERVER)


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
    lines += [f"  - name: {FLEET_GROUP}", "    rules:"]
    for alert in FLEET_ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.hold}",
            "        labels:",
            "          severity: warning",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.description)}",
            f"          next: {json.dumps(alert.look)}",
        ]
    return "\n".join(lines) + "\n"


def grafana_dashboard() -> str:
    """The text of a dashboard (JSON): the latencies by phase, then a panel for each row that can be watched."""
    phases = [
        ("Mean TTFT by phase", {name: _mean(f"request_{name}_time") for name in ("queue", "prefill")}, "s"),
        ("TTFT p50, p95, p99", {f"p{at}": _quantile(at, "time_to_first_token") for at in (50, 95, 99)}, "s"),
        ("Gap between tokens p50, p99", {f"p{at}": _quantile(at, "inter_token_latency") for at in (50, 99)}, "s"),
        (
            "Running and waiting",
            {name: f"sum by ({SERVER}) (vllm:num_requests_{name})" for name in ("running", "waiting")},
            "short",
        ),
    ]
    panels = [_panel(number, name, queries, unit) for number, (name, queries, unit) in enumerate(phases)]
    for number, row in enumerate(watched_rows(), len(panels)):
        panels.append(_panel(number, row.symptom, {"": expression(row)}, "short", f"{row.evidence}. {row.action}."))
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
    total, count = (f"sum by ({SERVER}) (rate({metric}_{part}[{WINDOW}]))" for part in ("sum", "count"))
    return f"{total} / on ({SERVER}) {count}"


def _quantile(percent: int, name: str) -> str:
    buckets = f"rate(vllm:{name}_seconds_bucket[{WINDOW}])"
    return f"histogram_quantile({percent / 100:g}, sum by (le, {SERVER}) ({buckets}))"


def _panel(number: int, title: str, queries: Mapping[str, str], unit: str, about: str = "") -> dict[str, Any]:
    """queries: by what the legend calls them, after the server."""
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
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": f"{{{{instance}}}} {name}".strip()}
            for at, (name, query) in enumerate(queries.items())
        ],
    }
