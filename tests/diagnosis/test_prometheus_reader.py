"""A Prometheus server is read as the engine that it has scraped, and its refusals are said."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.engine_server import RANGE_STEPS, PrometheusReader, reader_of
from diptych.diagnosis.adapters.http_get import Site

Row = dict[str, Any]


def row(name: str, value: float, **labels: str) -> Row:
    """A series in Prometheus' answer."""
    return {"metric": {"__name__": name, "instance": "a:8000", **labels}, "value": [0, str(value)]}


def engine_rows(prefix: str, instance: str = "a:8000", ttft_s: float = 3.0) -> list[Row]:
    """Forty requests with this TTFT."""
    name = f"{prefix}time_to_first_token_seconds"
    buckets = [row(f"{name}_bucket", 40 * (bound >= ttft_s), le=str(bound), instance=instance) for bound in (1.0, 5.0)]
    buckets.append(row(f"{name}_bucket", 40, le="+Inf", instance=instance))
    counts = [row(f"{name}_sum", 40 * ttft_s, instance=instance), row(f"{name}_count", 40, instance=instance)]
    return [*buckets, *counts]


@contextmanager
def prometheus(rows: list[Row], status: int = 200) -> Iterator[tuple[Site, list[str]]]:
    """A server that answers with those rows whose name begins as asked; and what it was asked for."""
    asked: list[str] = []

    class Replies(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body: dict[str, Any] = {"status": "success", "data": {}}
            code = 200
            if url.path == "/api/v1/query":
                code = status
                [wanted] = re.findall(r'"(.*)\.\*"', parse_qs(url.query)["query"][0])
                asked.append(wanted)
                body["data"]["result"] = [one for one in rows if one["metric"]["__name__"].startswith(wanted)]
            elif url.path != "/api/v1/status/buildinfo":
                code = 404
            text = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield Site.of(f"http://127.0.0.1:{server.server_port}"), asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_prometheus_that_scrapes_an_engine_is_read_as_that_engine() -> None:
    with prometheus(engine_rows("sglang:")) as (site, asked):
        reader = reader_of(site, 1.0)
        assert isinstance(reader, PrometheusReader)
        seen = reader.observe()
    assert seen.engine == "sglang" and seen.ttft is not None
    assert seen.ttft.measured_s == pytest.approx(3.0)
    assert (asked.count("vllm:"), asked.count("sglang:")) == (1, RANGE_STEPS)  # an absent engine costs one question


def test_diptych_behind_prometheus_is_not_taken_for_vllm() -> None:
    rows = [*engine_rows("vllm:"), row("diptych:worker_requests_waiting", 1)]
    with prometheus(rows) as (site, _), pytest.raises(ConfigError, match=r"scraped Diptych \(a:8000\).*URL of Diptych"):
        PrometheusReader(site, 60.0).observe()


@pytest.mark.parametrize(("status", "words"), [(401, "--api-key"), (503, "answered 503")])
def test_a_prometheus_that_refuses_is_not_one_without_series(status: int, words: str) -> None:
    with prometheus(engine_rows("vllm:"), status) as (site, _), pytest.raises(ConfigError, match=words):
        PrometheusReader(site, 60.0).observe()


def test_a_prometheus_without_engines_says_so() -> None:
    with prometheus([row("up", 1)]) as (site, asked):
        with pytest.raises(ConfigError, match="holds no series"):
            PrometheusReader(site, 60.0).observe()
        assert len(asked) == 4


def test_native_histograms_are_left_out() -> None:
    native = {"metric": {"__name__": "vllm:time_to_first_token_seconds"}, "histogram": [0, {"count": "40"}]}
    with prometheus([native, *engine_rows("vllm:")]) as (site, _):
        assert PrometheusReader(site, 60.0).observe().engine == "vllm"


def test_several_servers_in_one_figure_are_named() -> None:
    rows = [*engine_rows("vllm:"), *engine_rows("vllm:", "b:8000")]
    with prometheus(rows) as (site, _):
        notes = PrometheusReader(site, 60.0).observe().notes
    assert any("2 servers together: a:8000, b:8000" in note for note in notes)
