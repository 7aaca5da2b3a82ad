"""``diptych bench``: the command line of the load generator.

Option names, their help and the output on the terminal; measurements are in bench/, workloads are described as for
``diptych simulate``.
"""

import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import LOCAL_URL, Number, Text, Whole, option, picked, takes
from diptych.cli.output import check_folders, print_tables, write_file
from diptych.control.errors import ConfigError

if TYPE_CHECKING:
    from diptych.bench.load import LoadResult
    from diptych.bench.progress import LiveLine
    from diptych.bench.session import BenchConfig, Session
    from diptych.report.text import Table
    from diptych.workload.description import WorkloadConfig

SERVER, WORKLOAD, OBJECTIVES, STREAMS, OUTPUT = "Server", "Workload", "Objectives and series", "Interference", "Output"

# Options that are settings of the workload, by their dotted path in a file of ``diptych simulate``.
PATHS = {
    "rate": "workload.rate",
    "num_requests": "workload.num_requests",
    "arrivals": "workload.arrivals.kind",
    "concurrency": "workload.arrivals.concurrency",
    "prompt_tokens": "workload.lengths.prompt.mean",
    "output_tokens": "workload.lengths.output.mean",
    "time_scale": "workload.trace.scale",
    "seed": "seed",
}

# Options that mean something only with others.
ONLY_WITH = {
    **dict.fromkeys(("attainment", "tolerance"), ("find_goodput",)),
    "probe": ("find_goodput", "rates"),
    **dict.fromkeys(
        (
            "streams", "stream_tokens", "stream_limit", "long_tokens", "short_tokens", "ahead_tokens", "behind",
            "quiet", "repetitions",
        ),
        ("interference",),
    ),
}  # fmt: skip

KEY = "DIPTYCH_API_KEY"
URL_HELP = f"Address of an OpenAI-compatible server. Default: {LOCAL_URL}."
SALT_HELP = "Salt for prompt texts; a new one in every run makes sure that nothing is cached. Default: none."
DEFAULT_DURATION = "30s"  # of a single run that nothing else ends
DURATION_HELP = f"Send no request after this time. Default: {DEFAULT_DURATION}, unless requests are counted."


class BenchOptions:
    """One attribute each; options.py makes a command of them."""

    place: Annotated[Text, typer.Argument(metavar="[URL]", help=URL_HELP)] = None
    url: Annotated[Text, option("The same as URL. Default: URL.", SERVER)] = None
    api: Annotated[str, option("API to send requests to: completions or chat.", SERVER)] = "completions"
    model: Annotated[Text, option(shared_help.SERVED_MODEL, SERVER)] = None
    api_key: Annotated[
        Text, option("API key, sent as a bearer token. Default: none.", SERVER, envvar=KEY, show_envvar=True)
    ] = None
    prompts: Annotated[
        Text, option("How prompts are sent: ids (token ids) or text. Default: ids; with --api chat: text.", SERVER)
    ] = None
    token_ids: Annotated[str, option("Range of the token ids that prompts are made of, LOW:HIGH.", SERVER)] = "100:1000"
    exact_length: Annotated[bool, option("Ask for answers of exact length (ignore_eos and min_tokens).", SERVER)] = True
    send_slo: Annotated[bool, option("Send the objectives with each request (Diptych reads them).", SERVER)] = False
    running_usage: Annotated[bool, option("Ask for token counts in every event.", SERVER)] = False
    extra: Annotated[Text, option("JSON object of further fields for every body. Default: none.", SERVER)] = None
    timeout: Annotated[str, option("Longest time for a whole answer, such as 600s.", SERVER)] = "600s"
    workload: Annotated[
        Text, option("TOML file as for diptych simulate, or a trace's name or file. Default: random lengths.", WORKLOAD)
    ] = None
    rate: Annotated[Number, option(shared_help.RATE, WORKLOAD)] = None
    num_requests: Annotated[Whole, option("Requests in all. Default: what --duration lets in.", WORKLOAD)] = None
    arrivals: Annotated[Text, option(shared_help.ARRIVALS, WORKLOAD)] = None
    concurrency: Annotated[Whole, option("Clients of a closed loop, which it implies. Default: none.", WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option(shared_help.PROMPT_TOKENS, WORKLOAD)] = None
    output_tokens: Annotated[Number, option(shared_help.OUTPUT_TOKENS, WORKLOAD)] = None
    time_scale: Annotated[Number, option("How many times as fast a trace is replayed. Default: 1.", WORKLOAD)] = None
    ramp: Annotated[Text, option("Rate that rises: FROM:TO:TIME, such as 1:20:60s. Default: none.", WORKLOAD)] = None
    duration: Annotated[Text, option(DURATION_HELP, WORKLOAD)] = None
    warmup: Annotated[int, option("Warm-up requests before the first that counts.", WORKLOAD)] = 4
    seed: Annotated[Whole, option("Seed of arrivals, lengths and sharing. Default: 0.", WORKLOAD)] = None
    salt: Annotated[Text, option(SALT_HELP, WORKLOAD)] = None
    assign: Annotated[
        list[str] | None,
        option("Any setting of the workload, PATH=VALUE. Repeatable. Default: none.", WORKLOAD, "--set"),
    ] = None
    slo: Annotated[
        Text, option("Objectives for any of ttft, tpot, itl, e2e: ttft=2s,itl=60ms. Default: none.", OBJECTIVES)
    ] = None
    ttft_slo_ms: Annotated[Number, option(shared_help.TTFT_OF_SLO, OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option(shared_help.TPOT_OF_SLO, OBJECTIVES)] = None
    find_goodput: Annotated[bool, option(shared_help.FIND_GOODPUT, OBJECTIVES)] = False
    attainment: Annotated[Number, option(shared_help.ATTAINMENT, OBJECTIVES)] = None
    tolerance: Annotated[Number, option(shared_help.TOLERANCE, OBJECTIVES)] = None
    probe: Annotated[Text, option("Length of a run of a search or series. Default: 30s.", OBJECTIVES)] = None
    rates: Annotated[Text, option("Measure at each of these rates, such as 1,2,4. Default: one run.", OBJECTIVES)] = (
        None
    )
    interference: Annotated[bool, option("Measure what a long prompt does to running streams.", STREAMS)] = False
    streams: Annotated[Whole, option("Streams that run beside the long prompt. Default: 4.", STREAMS)] = None
    stream_tokens: Annotated[Whole, option("Prompt tokens of each stream. Default: 512.", STREAMS)] = None
    stream_limit: Annotated[Whole, option("Most answer tokens of a stream. Default: 3000.", STREAMS)] = None
    long_tokens: Annotated[Whole, option("Tokens of the long prompt. Default: 4096.", STREAMS)] = None
    short_tokens: Annotated[Whole, option("Tokens of the short prompt behind the long one. Default: 32.", STREAMS)] = (
        None
    )
    ahead_tokens: Annotated[
        Whole, option("Tokens of the long prompt on the idle server. Default: those of --long-tokens.", STREAMS)
    ] = None
    behind: Annotated[Text, option("Time from the long prompt to the short one. Default: 100ms.", STREAMS)] = None
    quiet: Annotated[Text, option("Time that is measured before the long prompt. Default: 4s.", STREAMS)] = None
    repetitions: Annotated[Whole, option("How often the interference scenario runs. Default: 3.", STREAMS)] = None
    verbose: Annotated[bool, option("Show the longest gaps, and what the client itself took.", OUTPUT)] = False
    as_json: Annotated[bool, option(shared_help.JSON_OBJECT, OUTPUT, "--json")] = False
    output: Annotated[Path | None, option("Write the JSON object to this file. Default: not written.", OUTPUT)] = None
    records: Annotated[
        Path | None, option("Write a JSON line per request to this file. Default: not written.", OUTPUT)
    ] = None
    gaps: Annotated[bool, option("Keep every gap between tokens in --records.", OUTPUT)] = False
    report: Annotated[Path | None, option(shared_help.REPORT, OUTPUT)] = None


@takes(BenchOptions)
def bench(given: dict[str, Any]) -> None:
    """Measure any OpenAI-compatible server: latencies, goodput, stalls, interference."""
    with errors_in_words():
        place, url = given["place"], given["url"]
        if place is not None and url is not None:
            raise ConfigError(f"the server is given twice: {place} and --url {url}", param="url")
        run({**given, "url": place or url or LOCAL_URL})


def run(given: dict[str, Any]) -> None:
    """What the options ask for. Raises ConfigError."""
    from diptych.bench.session import drive

    modes = [name for name in ("find_goodput", "rates", "interference") if given[name]]
    if len(modes) > 1:
        raise ConfigError(f"{modes[0]} and {modes[1]} are two measurements; give only one of them", param=modes[1])
    _check(given, modes)
    config = bench_config(given)
    mode = modes[0] if modes else "run"
    measure = {"run": _run, "rates": _rates, "find_goodput": _goodput, "interference": _interference}[mode](given)
    drive(_measure(config, mode, measure, given))


def bench_config(given: Mapping[str, Any]) -> "BenchConfig":
    """The measurement from the values of the options. Raises ConfigError."""
    from diptych.bench import option_grammar
    from diptych.bench.session import BenchConfig
    from diptych.bench.target import TargetConfig
    from diptych.simulation.settings import read_settings

    prompts: Any = given["prompts"] or ("text" if given["api"] == "chat" else "ids")
    file, overrides = workload_settings(given)
    settings = read_settings(file, overrides)
    in_ms = option_grammar.slo_of(given["ttft_slo_ms"], given["tpot_slo_ms"])
    objectives = option_grammar.slo(given["slo"]).or_else(in_ms)
    file_slo = option_grammar.slo_of(settings.slo.ttft_ms, settings.slo.tpot_ms)
    asked = objectives.or_else(file_slo)
    if given["send_slo"] and asked.has_any and asked.ttft_ns is None and asked.tpot_ns is None:
        raise ConfigError("send_slo sends ttft and tpot; slo has neither", param="send_slo")
    target = TargetConfig(
        **picked(given, "url", "api", "model", "api_key", "exact_length", "send_slo", "running_usage"),
        prompts=prompts,
        token_ids=option_grammar.id_range(given["token_ids"]),
        timeout_s=option_grammar.duration_s(given["timeout"], "timeout"),
        extra=_extra(given["extra"]),
    )
    duration = given["duration"]
    if duration is None and has_default_duration(given, settings.workload):
        duration = DEFAULT_DURATION
    return BenchConfig(
        target=target,
        workload=settings.workload,
        slo=asked,
        seed=settings.seed,
        duration_s=None if duration is None else option_grammar.duration_s(duration, "duration"),
        ramp=None if given["ramp"] is None else option_grammar.ramp(given["ramp"]),
        warm_up=given["warmup"],
        salt=given["salt"],
    )


def has_default_duration(given: Mapping[str, Any], workload: "WorkloadConfig") -> bool:
    """Whether a single run would send the default number of requests, or a whole trace, which can take an hour."""
    is_single = not any(given[name] for name in ("find_goodput", "rates", "interference", "ramp"))
    return is_single and workload.num_requests is None


def workload_settings(given: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """(settings file, settings by dotted path) as ``diptych simulate`` reads them. Raises ConfigError."""
    from diptych.simulation.sweep import assigned

    workload = given["workload"]
    file = Path(workload) if workload is not None and workload.endswith(".toml") else None
    values: dict[str, Any] = {} if workload is None or file else {"workload.trace.path": workload}
    values |= {path: given[name] for name, path in PATHS.items() if given[name] is not None}
    if given["concurrency"] is not None:
        values.setdefault("workload.arrivals.kind", "closed")
    return file, values | assigned(given["assign"] or ())


def command_line(given: Mapping[str, Any]) -> str:
    """The command as it was typed, without the key."""
    words = sys.argv[1:] if sys.argv[1:2] == ["bench"] else ["bench", "--url", str(given["url"])]
    shown: list[str] = []
    for word in words:
        hidden = shown and shown[-1] == "--api-key"
        shown.append("KEY" if hidden else "--api-key=KEY" if word.startswith("--api-key=") else word)
    return shlex.join(["diptych", *shown])


Measured: TypeAlias = "tuple[dict[str, Any], list[Table], list[str], Sequence[LoadResult]]"
Measure: TypeAlias = "Callable[[Session, LiveLine], Awaitable[Measured]]"


async def _measure(config: "BenchConfig", mode: str, measure: Measure, given: Mapping[str, Any]) -> None:
    from diptych.bench import measurement
    from diptych.bench.progress import LiveLine
    from diptych.bench.session import open_session
    from diptych.bench.tables import failures, problems, verdict

    with LiveLine("looking for the server", quiet=given["as_json"]) as live:
        async with open_session(config) as session:
            live.announce(f"{config.target.url}: {_plan_words(config, mode)}")
            live.describe("measuring")
            data, tables, notes, results = await measure(session, live)
            broken = _broken(session, data)
            data = {**measurement.context(session, command_line(given)), "mode": mode, "broken": broken, **data}
    notes += _write_files(data, results, given)
    server = data["server"]
    software = f", server {server['software']}" if server["software"] else ""
    notes.insert(0, f"model {server['model']}{software} at {config.target.url}; client on {data['machine']['cpu']}")
    if given["as_json"]:
        print(json.dumps(data))
    else:
        print_tables(tables, notes, problems(data), lead=verdict(data), failures=failures(data))
    if broken is not None:
        raise ConfigError(broken, param="url")


def _plan_words(config: "BenchConfig", mode: str) -> str:
    """What is about to be measured."""
    from diptych.workload.workload_words import workload_words

    if mode == "interference":
        return "a long prompt among running streams"
    words = workload_words(config.workload, has_count=mode == "run" and config.duration_s is None)
    if mode != "run":
        return f"{words}, at several rates"
    if config.ramp is not None:
        words += f", ramp from {config.ramp.start:g} to {config.ramp.end:g}/s in {config.ramp.over_s:g} s"
    return words if config.duration_s is None else f"{config.duration_s:g} s of {words}"


def _broken(session: "Session", data: Mapping[str, Any]) -> str | None:
    """Why the measurement is incomplete; what was measured is shown all the same."""
    if session.broken is not None:
        return f"it ended early: {session.broken}"
    summary = data.get("summary")
    if summary is not None and summary["num_requests"] and summary["num_failed"] == summary["num_requests"]:
        return f"every request failed: {next(iter(summary['errors']))}"
    return None


def _run(given: Mapping[str, Any]) -> Measure:
    async def measure(session: "Session", live: "LiveLine") -> Measured:
        from diptych.bench import measurement, tables
        from diptych.bench.stalls import longest_gaps
        from diptych.report.text import latency_table

        result = await session.run(watch=live.show)
        data = measurement.single_run(result)
        summary = data["summary"]
        shown = [latency_table(summary, tables.STATISTICS)]
        if data["classes"]:
            shown.append(tables.class_table(data["classes"]))
        shown.append(tables.service_table(summary))
        if given["verbose"]:
            shown.append(tables.client_table(summary))
            shown += [tables.stall_table(stalls) for stalls in [longest_gaps(result.records, 5)] if stalls]
        notes = []
        if result.ended == "stopped" or (result.ended == "duration" and given["duration"] is not None):
            notes.append(
                f"ended early ({result.ended}): {len(result.records):,} of {result.total:,} requests were sent"
            )
        return data, shown, notes, [result]

    return measure


def _rates(given: Mapping[str, Any]) -> Measure:
    from diptych.bench import measurement, option_grammar, tables

    wanted, seconds = option_grammar.rates(given["rates"]), _probe_s(given)

    async def measure(session: "Session", live: "LiveLine") -> Measured:
        is_counted = session.config.workload.num_requests is not None and given["probe"] is None
        probes = await session.series(
            wanted, None if is_counted else seconds, live.show, lambda probe: live.say(tables.probe_line(probe))
        )
        data = {"points": measurement.points(probes)}
        return data, tables.probe_tables(data["points"]), [], [probe.result for probe in probes]

    return measure


def _goodput(given: Mapping[str, Any]) -> Measure:
    from diptych.bench import measurement, tables
    from diptych.report.text import goodput_table
    from diptych.search.goodput_search import SearchConfig

    config = SearchConfig(**_given(given, ("attainment", "tolerance")))
    seconds = _probe_s(given)

    async def measure(session: "Session", live: "LiveLine") -> Measured:
        found, probes = await session.find_goodput(
            config,
            start_rate=given["rate"],
            seconds=seconds,
            watch=live.show,
            on_probe=lambda probe, search: live.say(tables.probe_line(probe, search)),
        )
        data = measurement.search(found, config, probes)
        shown = [*tables.probe_tables(data["points"]), goodput_table(data["goodput"])]
        return data, shown, [], [probe.result for probe in probes]

    return measure


def _interference(given: Mapping[str, Any]) -> Measure:
    from diptych.bench import option_grammar
    from diptych.bench.interference import InterferenceConfig, interference, tables

    counts = [name for name in ONLY_WITH if name in InterferenceConfig.__dataclass_fields__]
    chosen = _given(given, counts)
    chosen |= {f"{name}_s": option_grammar.duration_s(given[name], name) for name in ("behind", "quiet") if given[name]}
    config = InterferenceConfig(**chosen)

    async def measure(session: "Session", live: "LiveLine") -> Measured:
        data = await interference(session, config, live.say)
        late = "a stream ended before the long prompt's first token: its later gaps are missing"
        return {"interference": data}, tables(data), [late] if data["streams_ended"] else [], []

    return measure


def _given(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if given[name] is not None}


def _probe_s(given: Mapping[str, Any]) -> float:
    from diptych.bench import option_grammar

    return option_grammar.duration_s(given["probe"] or "30s", "probe")


def _write_files(data: Mapping[str, Any], results: "Sequence[LoadResult]", given: Mapping[str, Any]) -> list[str]:
    """Write what was asked for; sentences about it."""
    notes: list[str] = []
    if given["records"] is not None:
        from diptych.bench.request_records import lines

        notes.append(write_file(given["records"], lines(results[0].records, with_gaps=given["gaps"])))
    if given["output"] is not None:
        notes.append(write_file(given["output"], [json.dumps(data, indent=1).encode() + b"\n"]))
    if given["report"] is not None:
        from diptych.bench.page import render

        notes.append(write_file(given["report"], [render(data, [result.records for result in results]).encode()]))
    return notes


def _check(given: Mapping[str, Any], modes: Sequence[str]) -> None:
    """Check before the measurement what would otherwise fail after it."""
    check_folders({name: given[name] for name in ("output", "records", "report")})
    if given["records"] is not None and modes:
        raise ConfigError(f"records is for a single run and has no effect with {modes[0]}", param="records")
    for name, wanted in ONLY_WITH.items():
        if given[name] is not None and not any(mode in wanted for mode in modes):
            options = " or ".join(f"--{mode.replace('_', '-')}" for mode in wanted)
            raise ConfigError(f"{name} has no effect without {options}", param=name)
    if given["verbose"] and modes:
        raise ConfigError(f"verbose is for a single run and has no effect with {modes[0]}", param="verbose")
    if given["verbose"] and given["as_json"]:
        raise ConfigError("verbose has no effect with --json, which has it all", param="verbose")
    if given["gaps"] and given["records"] is None:
        raise ConfigError("gaps has no effect without records", param="gaps")


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"extra is {text!r}; expected a JSON object", param="extra")
    return found
