"""``diptych diagnose``: which phase hurts, why, and which setting changes it.

Reading is diptych.diagnosis.adapters, deciding is diptych.diagnosis; here are the options and the output.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.http_options import asked_slo
from diptych.cli.options import LOCAL_URL, Number, Strings, Text
from diptych.cli.output import check_folders, print_tables, write_file
from diptych.control.errors import ConfigError

if TYPE_CHECKING:
    from diptych.control.slo import Slo
    from diptych.diagnosis.adapters.engine_server import Reader
    from diptych.diagnosis.diagnosis import Diagnosis
    from diptych.diagnosis.engine_advice import Advice

WINDOW_S, WATCH_S = 3.0, 10.0
WATCH_SHARE = 0.01  # of a core, at most
SOURCES_HELP = f"Servers, recordings, timelines. Default: {LOCAL_URL}."
SLO_HELP = "Objectives: ttft=300ms,tpot=50ms, or a preset (mlperf-llama3.1-8b ...). Default: the server's own."


def diagnose(
    sources: Annotated[Strings, typer.Argument(metavar="[URL|FILE...]", help=SOURCES_HELP)] = None,
    slo: Annotated[Text, typer.Option(help=SLO_HELP)] = None,
    ttft_slo_ms: Annotated[Number, typer.Option(help=shared_help.TTFT_OF_SLO)] = None,
    tpot_slo_ms: Annotated[Number, typer.Option(help=shared_help.TPOT_OF_SLO)] = None,
    window: Annotated[float, typer.Option(help="Seconds over which an engine's metrics are read.")] = WINDOW_S,
    range_s: Annotated[
        Number, typer.Option("--range", help="Seconds of a Prometheus server's history. Default: 1800.")
    ] = None,
    watch: Annotated[bool, typer.Option(help="Diagnose again every 10 seconds, until interrupted.")] = False,
    advice: Annotated[bool, typer.Option(help="Simulate what other settings would gain.")] = True,
    api_key: Annotated[
        Text, typer.Option(help="API key of the servers. Default: none.", envvar="DIPTYCH_API_KEY")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the diagnosis of the first source as a page to this file. Default: not written."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=shared_help.JSON_DOCUMENT)] = False,
) -> None:
    """Say what limits a server: causes in seconds per request, and the setting that changes most.

    Reads Diptych, vLLM, SGLang, llama.cpp, Dynamo and Prometheus servers, a front with the engines behind it, and files
    of diptych serve --record.
    """
    with errors_in_words():
        sources = sources or [LOCAL_URL]
        check_folders({"report": report})
        if window <= 0 or (range_s is not None and range_s <= 0):
            raise ConfigError("window and range are seconds; they must be more than 0", param="window")
        objectives = asked_slo(slo, ttft_slo_ms, tpot_slo_ms)
        watched = [_Source(source, api_key, window, range_s) for source in sources]
        while True:
            begun_s = time.process_time()
            found = _diagnosed(watched, objectives, with_advice=advice, goes_on=watch)
            if as_json and found:
                _print_json(found)
            elif not as_json:
                for each in found:
                    _show(each)
            if report is not None and found:
                from diptych.diagnosis.diagnosis_page import render

                page = render(found[0].diagnosis, found[0].advice, shlex.join(["diptych", "diagnose", *sources]))
                sentence = write_file(report, [page.encode()])
                if not as_json:
                    print(sentence)
            if not watch:
                return
            time.sleep(max(WATCH_S, (time.process_time() - begun_s) / WATCH_SHARE))


@dataclass(frozen=True, slots=True)
class _Diagnosed:
    diagnosis: "Diagnosis"
    advice: "Sequence[Advice]"


def reader_for(source: str, key: str | None, window_s: float = WINDOW_S, range_s: float | None = None) -> "Reader":
    """The reader of a URL or a file. Raises ConfigError."""
    path = Path(source)
    if "://" not in source and path.exists():
        from diptych.diagnosis.adapters.recorded_file import RecordedFile

        return RecordedFile(path)
    if "://" not in source and ("/" in source or ":" not in source) and not source.startswith("localhost"):
        raise ConfigError(f"{source} is no file, and no URL such as {LOCAL_URL}", param="sources")
    from diptych.diagnosis.adapters.engine_server import reader_of
    from diptych.diagnosis.adapters.http_get import Site

    return reader_of(Site.of(source, key), window_s, range_s)


class _Watched:
    """A server that is diagnosed again and again. reader: finds out what answers there, when it first does. Advice is
    simulated again only when other causes are named."""

    def __init__(self, name: str, reader: Callable[[], "Reader"]) -> None:
        self.name = name
        self._find_reader = reader
        self._reader: Reader | None = None
        self._causes: list[str] = []
        self._advice: Sequence[Advice] = ()

    def diagnose(self, slo: "Slo | None", *, with_advice: bool) -> _Diagnosed:
        from diptych.diagnosis.diagnosis import diagnose
        from diptych.diagnosis.engine_advice import advise

        if self._reader is None:
            self._reader = self._find_reader()
        found = diagnose(self._reader.observe(), slo)
        causes = [cause.name for cause in found.causes]
        if with_advice and causes != self._causes:
            self._causes, self._advice = causes, advise(found)
        return _Diagnosed(found, self._advice)


class _Source:
    """What was named on the command line: one server or file, or a front, which stands for itself and its engines."""

    def __init__(self, name: str, key: str | None, window_s: float, range_s: float | None) -> None:
        self._name, self._key, self._window_s = name, key, window_s
        self._single = _Watched(name, partial(reader_for, name, key, window_s, range_s))
        self._servers: dict[str, _Watched] = {}  # of a front

    def servers(self) -> list[_Watched]:
        """The servers that it stands for now."""
        from diptych.diagnosis.adapters.front_server import readers_behind
        from diptych.diagnosis.adapters.http_get import Site

        if "://" not in self._name and (Path(self._name).exists() or ":" not in self._name):
            return [self._single]
        try:
            behind = readers_behind(Site.of(self._name, self._key), self._window_s)
        except ConfigError:  # it is no address: its own reader says so, when it is its turn
            return [self._single]
        if behind is None:
            return [self._single]
        for reader in behind:
            self._servers.setdefault(reader.name, _Watched(reader.name, reader.find))
        return [self._servers[reader.name] for reader in behind]


def _diagnosed(sources: Sequence[_Source], slo: "Slo | None", *, with_advice: bool, goes_on: bool) -> list[_Diagnosed]:
    """Diagnose all servers that can be read; print why the others cannot. Raises ConfigError when none can be read,
    unless they are read again."""
    found, why = [], None
    watched = [server for source in sources for server in source.servers()]
    for server in watched:
        try:
            found.append(server.diagnose(slo, with_advice=with_advice))
        except ConfigError as error:
            why = error
            if goes_on or len(watched) > 1:
                print(f"{server.name}: {error}", file=sys.stderr)
    if why is not None and not (found or goes_on):
        raise why
    return found


def _show(found: _Diagnosed) -> None:
    from diptych.diagnosis.diagnosis_words import (
        advice_table,
        cause_table,
        headline,
        sentences,
        waterfall_table,
    )

    diagnosis = found.diagnosis
    print(headline(diagnosis))
    print(diagnosis.sentence)
    tables = [cause_table(diagnosis)] if diagnosis.causes else []
    tables += [waterfall_table(waterfall) for waterfall in diagnosis.waterfalls]
    tables += [advice_table(found.advice)] if found.advice else []
    print_tables(tables, sentences(diagnosis, found.advice))


def _print_json(found: Iterable[_Diagnosed]) -> None:
    """One document: that of the only server, or ``servers`` and the causes of all of them."""
    from diptych.diagnosis.diagnosis_words import as_json

    documents: list[dict[str, Any]] = [as_json(each.diagnosis, each.advice) for each in found]
    document = documents[0]
    if len(documents) > 1:
        causes = [{**cause, "source": each["source"]} for each in documents for cause in each["causes"]]
        causes.sort(key=lambda cause: (-(cause["share_of_misses"] or 0.0), -cause["seconds_per_request"]))
        document = {"servers": documents, "causes": causes}
    print(json.dumps(document, indent=2))
