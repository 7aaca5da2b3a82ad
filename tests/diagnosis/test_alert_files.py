"""The files for Prometheus and Grafana are well-formed, and every expression is PromQL."""

import json
import re
from pathlib import Path

import pytest
import yaml

from diptych.diagnosis import alert_files
from diptych.diagnosis.alert_files import (
    FLEET_ALERTS,
    FLEET_GROUP,
    GROUP,
    FleetAlert,
    expression,
    grafana_dashboard,
    prometheus_rules,
    watched_rows,
)
from diptych.diagnosis.diagnosis_table import BY_CAUSE

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<string>\"[^\"]*\")|(?P<range>\[\d+[smhd]\])"
    r"|(?P<sign>>=|<=|==|!=|=~|!~|[-+*/<>=(){},]))"
)
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
FUNCTIONS = {"rate", "increase", "deriv", "histogram_quantile"}
OPERATORS = {">", "<", ">=", "<=", "==", "!=", "+", "-", "*", "/", "and", "or", "unless"}


class PromQL:
    """A parser of the part of PromQL that the table uses. Raises AssertionError for anything else."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        at = 0
        while text[at:].strip():
            found = TOKEN.match(text, at)
            assert found, f"unreadable at {text[at:]!r}"
            self.tokens.append(found.group().strip())
            at = found.end()
        self.at = 0
        self.metrics: list[str] = []
        self.kept: list[set[str]] = []  # the labels of each aggregation and of each operator's on()
        self.expression()
        assert self.at == len(self.tokens), f"too much: {self.tokens[self.at :]}"

    def take(self, wanted: str = "") -> str:
        assert self.at < len(self.tokens), "it ends too early"
        token = self.tokens[self.at]
        assert not wanted or token == wanted, f"{token} instead of {wanted}"
        self.at += 1
        return token

    def next_is(self, *wanted: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] in wanted

    def expression(self) -> None:
        self.operand()
        while self.next_is(*OPERATORS):
            self.take()
            if self.next_is("on", "ignoring"):
                self.take()
                self.kept.append(self.labels())
            self.operand()

    def operand(self) -> None:
        token = self.take()
        if token == "(":
            self.expression()
            self.take(")")
        elif token in AGGREGATIONS:
            self.kept.append(set())
            if self.next_is("by", "without"):
                is_kept = self.take() == "by"
                labels = self.labels()
                self.kept[-1] = labels if is_kept else set()
            self.arguments()
        elif token in FUNCTIONS:
            self.arguments()
        elif not re.fullmatch(r"\d+(\.\d+)?", token):
            assert re.fullmatch(r"[a-z]+[a-z_:]*[a-z]", token), f"{token} is no metric"
            self.metrics.append(token)
            if self.next_is("{"):
                self.take()
                while not self.next_is("}"):
                    self.take()
                    assert self.take() in ("=", "!=", "=~", "!~")
                    assert self.take().startswith('"')
                    if self.next_is(","):
                        self.take()
                self.take("}")
            if self.at < len(self.tokens) and self.tokens[self.at].startswith("["):
                self.take()

    def arguments(self) -> None:
        self.take("(")
        self.expression()
        while self.next_is(","):
            self.take()
            self.expression()
        self.take(")")

    def labels(self) -> set[str]:
        found = set()
        self.take("(")
        while not self.next_is(")"):
            found.add(self.take())
        self.take(")")
        return found - {","}


@pytest.mark.parametrize("row", watched_rows(), ids=lambda row: row.cause)
def test_every_alert_is_promql_over_names_that_are_exported(row: object) -> None:
    assert row in BY_CAUSE.values()
    found = PromQL(expression(row))  # type: ignore[arg-type]
    assert found.metrics
    assert all(name.startswith(("vllm:", "diptych:")) for name in found.metrics)


@pytest.mark.parametrize("row", watched_rows(), ids=lambda row: row.cause)
def test_every_alert_judges_each_server_alone(row: object) -> None:
    kept = PromQL(expression(row)).kept  # type: ignore[arg-type]
    assert kept and all({"instance", "model_name"} <= labels for labels in kept)


def exported() -> set[str]:
    """Names of metrics that the source of servers and fronts writes, with the ending that Prometheus gives counters."""
    source = Path(alert_files.__file__).parents[1] / "serving"
    found = {
        name for path in source.rglob("*.py") for name in re.findall(r'"((?:vllm|diptych):\w+)"', path.read_text())
    }
    return found | {f"{name}_total" for name in found}


@pytest.mark.parametrize("alert", FLEET_ALERTS, ids=lambda alert: alert.name)
def test_every_alert_of_a_fleet_reads_metrics_that_servers_export(alert: FleetAlert) -> None:
    found = PromQL(alert.expression)
    assert set(found.metrics) <= exported() and all({"instance", "model_name"} <= labels for labels in found.kept)


@pytest.mark.parametrize("wrong", ["sum(", "rate(x:y[5m]", "sum(rate(vllm:a[5m]))) > 1", "a:b >", "1 and on( 2"])
def test_the_parser_refuses_what_is_no_promql(wrong: str) -> None:
    with pytest.raises(AssertionError):
        PromQL(wrong)


def test_the_rule_file_is_what_prometheus_reads() -> None:
    rules = yaml.safe_load(prometheus_rules())
    [group, fleet] = rules["groups"]
    assert rules.keys() == {"groups"} and (group["name"], fleet["name"]) == (GROUP, FLEET_GROUP)
    assert [rule["labels"]["cause"] for rule in group["rules"]] == [row.cause for row in watched_rows()]
    assert [rule["alert"] for rule in fleet["rules"]] == [alert.name for alert in FLEET_ALERTS]
    for rule in (*group["rules"], *fleet["rules"]):
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        PromQL(rule["expr"])


def test_the_dashboard_has_a_panel_for_every_watched_row() -> None:
    dashboard = json.loads(grafana_dashboard())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {expression(row) for row in watched_rows()} <= set(queries)
    for query in queries:
        assert all("instance" in labels for labels in PromQL(query).kept)
    legends = [target["legendFormat"] for target in panels[0]["targets"]]
    assert legends == ["{{instance}} queue", "{{instance}} prefill"]


def test_the_parser_sees_what_an_aggregation_keeps() -> None:
    assert PromQL("sum(a:b) > on (x, y) max by (z) (a:c)").kept == [set(), {"x", "y"}, {"z"}]
    assert PromQL("sum without (x) (a:b)").kept == [set()]
