"""What is read of servers that answer oddly, were started again, or do not serve all that they are asked."""

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request

import msgspec
import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.control.errors import ConfigError
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S, Slo
from diptych.diagnosis.adapters import engine_server
from diptych.diagnosis.adapters.engine_server import MetricsReader, reader_of
from diptych.diagnosis.adapters.exposition import Growth, MetricsPage
from diptych.diagnosis.adapters.http_get import Site, open_url
from diptych.diagnosis.adapters.llamacpp_metrics import Slots, observe_llamacpp
from diptych.diagnosis.adapters.metric_names import Scrapes
from diptych.diagnosis.adapters.timeline_records import TimelineSource, end_of, observe
from diptych.diagnosis.adapters.vllm_metrics import VLLM
from diptych.diagnosis.diagnosis import diagnose
from diptych.diagnosis.observation import Observation
from diptych.diagnosis.predicted_gain import Present
from diptych.diagnosis.twin_model import twin_of
from diptych.timeline.records import RequestRecord
from tests.diagnosis.simulated_servers import SLO, Server, chat, server_with

Pages = Mapping[str, tuple[int, bytes]]


@contextmanager
def serving(pages: Pages) -> Iterator[str]:
    """A server of these pages (path -> status, body); a status of 3xx leads to the body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path.split("?")[0], (404, b""))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", body.decode())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def page_of(count: int, total_s: float) -> MetricsPage:
    text = f'# TYPE x histogram\nx_bucket{{le="+Inf"}} {count}\nx_sum{{}} {total_s}\nx_count{{}} {count}\n'
    return MetricsPage.of_text(text, "test")


def test_all_values_of_a_histogram_that_began_again_count_from_0() -> None:
    growth = Growth(page_of(1000, 100.0), page_of(50, 150.0))
    assert growth.mean("x") == (3.0, 50)
    assert growth.distribution("x").count == 50


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({"/metrics": (200, b"\xff\xfe\x00")}, "is no text"),
        ({"/metrics": (302, b"http://127.0.0.1:1/metrics")}, "answered 302"),
        ({"/api/v1/status/buildinfo": (200, b"[1]"), "/metrics": (200, b"x 1\n")}, "no names of a known engine"),
        ({"/version": (200, json.dumps({"control": "Python", "engines": {"http://e:1": ""}}).encode())}, "http://e:1"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(pages: Pages, words: str) -> None:
    with serving(pages) as url, pytest.raises(ConfigError, match=words):
        reader_of(Site(url, "key"), 1.0)


def test_another_version_of_diptych_is_named_and_no_traceback() -> None:
    pages = {"/version": (200, b'{"control": "Python"}'), "/settings": (200, b'{"other": 1}')}
    with serving(pages) as url:
        found = CliRunner().invoke(app, ["diagnose", url])
    assert found.exit_code == 1 and "cannot be read by this version" in found.stderr


def test_a_reply_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.diagnosis.adapters.http_get.MAX_BYTES", 1000)
    with serving({"/metrics": (200, b"x" * 5000)}) as url, pytest.raises(ConfigError, match="longer than"):
        Site(url).get("/metrics")


def test_a_source_that_is_away_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    file.write_bytes(msgspec.json.encode({"records": server_with("sequence_limit").records()}))
    (tmp_path / "wrong.json").write_text('[{"a": 1}]')
    options = ["--slo", "ttft=400ms,tpot=30ms", "--json", "--no-advice"]
    found = CliRunner().invoke(
        app, ["diagnose", "http://127.0.0.1:1", str(tmp_path / "wrong.json"), str(file), *options]
    )
    assert found.exit_code == 0 and json.loads(found.stdout)["causes"]
    assert "cannot reach" in found.stderr and "neither a recording" in found.stderr
    assert CliRunner().invoke(app, ["diagnose", "http://127.0.0.1:1", *options]).exit_code == 1


def test_requests_without_an_answer_are_not_healthy() -> None:
    seen = Server(chat(60, 300)).observe()
    assert diagnose(seen).verdict == "healthy"
    for signals in ({"rejected": 40.0}, {"failed": 5.0, "rejected": 1.0}):
        found = diagnose(replace(seen, signals={**seen.signals, **signals}))
        assert found.verdict == "limited"
        assert f"{sum(signals.values()):.0f} of" in found.sentence and "got no answer" in found.sentence
    assert diagnose(replace(seen, signals={**seen.signals, "rejected": 1.0})).verdict == "healthy"


def test_failed_are_those_with_an_error_and_those_that_left_before_their_first_token() -> None:
    records = Server(chat(20, 300)).records()
    ends = [record for record in records if isinstance(record, RequestRecord) and record.what == "finished"]
    first = [record for record in records if isinstance(record, RequestRecord) and record.what == "first_token"]
    failed, left, left_early = (end.request_id for end in ends[:3])
    changed = []
    for record in records:
        if record in first and record.request_id == left_early:
            continue
        if record in ends:
            reason = {failed: FinishReason.ERROR, left: FinishReason.ABORT, left_early: FinishReason.ABORT}
            detail = {**record.detail, "reason": reason.get(record.request_id, record.detail["reason"])}
            record = msgspec.structs.replace(record, detail=detail)
        changed.append(record)
    assert observe(changed, TimelineSource(source="test")).signals["failed"] == 2


def test_batch_work_has_no_objective_but_its_own() -> None:
    seen = Server(chat(20, 300)).observe(Slo())
    first, *others = seen.requests
    batch = replace(seen, requests=(replace(first, service_class="batch"), *others))
    judged = batch.with_objectives(SLO)
    assert judged.requests[0].slo == Slo() and all(parts.slo == SLO for parts in judged.requests[1:])


def test_a_window_in_which_no_step_ended_is_observed() -> None:
    records = Server(chat(20, 300)).records()
    end_ns = max(map(end_of, records))
    late = [record for record in records if isinstance(record, RequestRecord)][-1]
    later = msgspec.structs.replace(late, time_ns=end_ns + 90 * NS_PER_S, what="queued", request_id="late",
                                    detail={"num_prompt_tokens": 3})  # fmt: skip
    seen = observe([*records, later], TimelineSource(source="test"), end_ns + NS_PER_S)
    assert diagnose(seen, SLO).verdict == "too few requests"


def test_a_server_of_which_no_request_ended_has_no_present() -> None:
    seen = server_with("sequence_limit").observe()
    model = twin_of(seen)
    assert model is not None and Present.of(model, seen) is not None
    assert Present.of(replace(model, measured={}), replace(seen, ttft=None, itl=None)) is None


def llamacpp(pages: list[str], slots: Slots) -> Observation:
    scrapes = [(float(at), MetricsPage.of_text(text, "test")) for at, text in enumerate(pages)]
    return observe_llamacpp(Scrapes(scrapes, "test"), slots)


def test_llamacpp_without_a_prompt_in_the_window_or_without_anything_in_it() -> None:
    def page(tokens: int, seconds: int) -> str:
        found = {"prompt_seconds": 1000, "tokens_predicted": tokens, "tokens_predicted_seconds": seconds}
        return "".join(f"llamacpp:{name}_total {value}\n" for name, value in found.items())

    before, after = page(100, 9), page(140, 10)
    busy = Slots([[{"id_task": number, "is_processing": True} for number in range(8)]])
    assert diagnose(llamacpp([before, after], busy), SLO).num_requests == 8
    idle = llamacpp([before, before], busy)
    assert idle.ttft is None and idle.notes


def test_a_watched_engine_with_few_requests_is_judged_by_its_last_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the hour before."""

    def page(count: int, total_s: float) -> MetricsPage:
        name = VLLM.ttft
        lines = [f"# TYPE {name} histogram", f'{name}_bucket{{le="+Inf"}} {count}', f"{name}_sum{{}} {total_s}"]
        return MetricsPage.of_text("\n".join([*lines, f"{name}_count{{}} {count}\n"]), "test")

    slow_hour = [(1000 + 3 * number, 9000.0 + 0.3 * number) for number in range(10)]
    rounds = iter([[(0.0, page(*one)), (3.0, page(*other))] for one, other in itertools.pairwise(slow_hour)])
    monkeypatch.setattr(engine_server, "read_pages", lambda *_: Scrapes(next(rounds), "test"))
    reader = MetricsReader(Site("http://x"), VLLM, 3.0)
    means = []
    for _ in range(6):
        seen = reader.observe()
        assert seen.ttft is not None
        means.append((round(seen.ttft.measured_s, 2), bool(seen.notes)))
    assert means[0] == (8.97, True)  # nothing else is known yet
    assert means[-1] == (0.1, False)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_on_this_machine_is_called_without_a_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"/page": (200, b"here")}) as url:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert Site.of(url).get("/page") == b"here"
        with open_url(Request(f"{url}/page"), 5.0) as reply:
            assert reply.read() == b"here"
