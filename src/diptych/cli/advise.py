"""``diptych advise``: from the traffic to a shape. It begins with the question which phase hurts.

Of a server, or of a recording, the present workers are simulated in every shape that they can have. Of a trace,
``diptych plan`` searches a fleet, and its answer is this command's: there is one search.
"""

import io
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli import shared_help
from diptych.cli.diagnose import SLO_HELP, reader_for
from diptych.cli.error_messages import errors_in_words
from diptych.cli.http_options import asked_slo
from diptych.cli.options import LOCAL_URL, Number, Text, Whole
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS

if TYPE_CHECKING:
    from diptych.control.slo import Slo
    from diptych.diagnosis.diagnosis import Diagnosis
    from diptych.diagnosis.observation import Observation
    from diptych.diagnosis.shape_choice import ShapeChoice
    from diptych.diagnosis.traffic import ExportedTraffic, Traffic
    from diptych.workload.spec import RequestSpec

SIMULATED = 500  # requests of a trace that are diagnosed
SHAPE_SETTINGS = {  # of other engines (engine_settings.py): what makes them a shape
    "chunked": ("max_num_batched_tokens", "chunked_prefill_size", "batch_size"),
    "split": ("kv_role",),
}
URL_HELP = f"A running server. Default: {LOCAL_URL}, without --trace and --record."


def advise(
    url: Annotated[Text, typer.Argument(metavar="[URL]", help=URL_HELP)] = None,
    trace: Annotated[
        Text, typer.Option(help="Trace of the traffic: azure-conv, mooncake-conversation, or a file. Default: none.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Recording of a server (diptych serve --record). Default: none.")
    ] = None,
    slo: Annotated[Text, typer.Option(help=SLO_HELP)] = None,
    ttft_slo_ms: Annotated[Number, typer.Option(help=shared_help.TTFT_OF_SLO)] = None,
    tpot_slo_ms: Annotated[Number, typer.Option(help=shared_help.TPOT_OF_SLO)] = None,
    model: Annotated[
        Text, typer.Option(help="Model of the catalogue to simulate, with --trace. Default: none.")
    ] = None,
    hardware: Annotated[
        Text, typer.Option(help="Device of the catalogue to simulate, with --trace. Default: none.")
    ] = None,
    devices: Annotated[
        Whole, typer.Option(help="Most devices of the fleet, with --trace. Default: what the load needs.")
    ] = None,
    api_key: Annotated[Text, typer.Option(help=shared_help.SERVER_KEY, envvar="DIPTYCH_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help=shared_help.JSON_DOCUMENT)] = False,
) -> None:
    """Say which phase hurts for a traffic, and which shape serves it: unified, chunked or split."""
    with errors_in_words():
        given = [source for source in (url, trace, record) if source is not None]
        if len(given) > 1:
            raise ConfigError(f"{len(given)} sources of traffic; give one URL, --trace or --record", param="url")
        objectives = asked_slo(slo, ttft_slo_ms, tpot_slo_ms)
        fleet = {"model": model, "hardware": hardware, "devices": devices}
        if trace is not None:
            _advise_trace(trace, objectives, fleet, as_json)
            return
        for name, value in fleet.items():
            if value is not None:
                raise ConfigError(f"{name} has no effect without --trace", param=name)
        _advise_observed(str(record or url or LOCAL_URL), objectives, api_key, as_json)


def _advise_observed(source: str, slo: "Slo | None", key: str | None, as_json: bool) -> None:
    """Advise on a running server or a recording."""
    from diptych.diagnosis.diagnosis import diagnose
    from diptych.diagnosis.shape_choice import choose_shape
    from diptych.diagnosis.traffic import ExportedTraffic, traffic_of
    from diptych.diagnosis.twin_model import twin_of

    observation = reader_for(source, key).observe()
    found = diagnose(observation, slo)
    twin = twin_of(found.observation)
    if twin is None:
        raise ConfigError(f"{source} has too few finished requests to simulate them", param="url")
    choice = _with_options_of(observation.engine, choose_shape(twin))
    traffic: Traffic | ExportedTraffic = ExportedTraffic.of(observation.signals)
    if seen := _seen(observation):
        traffic = traffic_of(seen, found_share=observation.signals.get("hit_share"))
    if as_json:
        print(json.dumps(_as_json(traffic, found, choice), indent=2))
    else:
        _show(traffic, found, choice)


def _seen(observation: "Observation") -> "list[RequestSpec]":
    """The requests with their whole prompts; empty where they were not seen one by one."""
    from diptych.workload.spec import RequestSpec

    return [
        RequestSpec(
            arrival_ns=parts.arrival_ns,
            prompt_tokens=max(1, parts.num_prompt_tokens),
            output_tokens=max(1, parts.num_output_tokens),
        )
        for parts in observation.requests
    ]


def _with_options_of(engine: str, choice: "ShapeChoice") -> "ShapeChoice":
    """The shapes with the options of an engine that is not Diptych; "" where it has none that is known."""
    from dataclasses import replace

    from diptych.diagnosis.engine_settings import CATALOGUE

    if engine == "diptych":
        return choice
    known = {setting.name: setting.option for setting in CATALOGUE.get(engine, {}).get("prefill_interference", ())}
    shapes = []
    for shape in choice.shapes:
        options = [known[name] for name in SHAPE_SETTINGS.get(shape.shape, ()) if name in known]
        shapes.append(replace(shape, option=re.sub(r"{\w+}", "N", options[0]) if options else ""))
    return replace(choice, shapes=tuple(shapes))


def _recommended(found: "Diagnosis", choice: "ShapeChoice") -> str:
    """The shape, and how this engine gets it."""
    engine, best = found.observation.engine, choice.best
    if engine == "diptych":
        return f"Recommended: {best.words} (diptych serve {best.option})"
    meaning = {
        "chunked": "prompts in chunks between the steps of streams",
        "unified": "whole prompts in one step",
        "split": "prompts and streams on instances of their own",
    }[best.shape]
    option = f"; {engine}: {best.option}" if best.option else ""
    return f"Recommended, by a simulation with drawn requests of these means: {best.shape}, {meaning}{option}"


def _show(traffic: "Traffic | ExportedTraffic", found: "Diagnosis", choice: "ShapeChoice") -> None:
    from diptych.diagnosis.diagnosis_words import headline

    print("Which phase hurts?")
    _print(["", headline(found), found.sentence, *_binding(found), *_disturbance(found)])
    print("What the traffic is like")
    _print(traffic.sentences())
    print(_recommended(found, choice))
    _print([*choice.reasons(), "how many workers, and of which devices: diptych plan"])


def _print(sentences: Sequence[str]) -> None:
    for sentence in filter(None, sentences):
        print(f"  {sentence}")


def _binding(found: "Diagnosis") -> list[str]:
    """Which objective is missed more."""
    requests = found.observation.requests
    late = sum(bool(parts.slo.ttft_ns and parts.ttft_ns > parts.slo.ttft_ns) for parts in requests)
    slow = sum(bool(parts.slo.tpot_ns and (parts.tpot_ns or 0) > parts.slo.tpot_ns) for parts in requests)
    if not late and not slow:
        return ["neither objective is missed" if requests else ""]
    binding = "TTFT (prefill)" if late >= slow else "TPOT (decode)"
    return [f"the binding objective is {binding}: {late:,} requests missed TTFT, {slow:,} missed TPOT"]


def _disturbance(found: "Diagnosis") -> list[str]:
    """What large prefills do to decode now."""
    requests = [parts for parts in found.observation.requests if parts.num_output_tokens > 1]
    if not requests:
        return []
    lost = sum(parts.decode["mixed_prefill"] + parts.decode["stalled_by_prefill"] for parts in requests)
    large = sum(parts.marked_decode_ns for parts in requests)
    total = max(1, sum(parts.decode_ns for parts in requests))
    return [
        f"prompts of others take {lost / total:.0%} of the decode time ({lost / len(requests) / NS_PER_MS:,.0f} ms of "
        f"a request), long prompts {large / total:.0%}"
    ]


def _as_json(traffic: "Traffic | ExportedTraffic", found: "Diagnosis", choice: "ShapeChoice") -> dict[str, Any]:
    import dataclasses

    from diptych.diagnosis.diagnosis_words import as_json

    return {
        "diagnosis": as_json(found, ()),
        "traffic": dataclasses.asdict(traffic),
        "recommended": dataclasses.asdict(choice.best),
        "shapes": [dataclasses.asdict(shape) for shape in choice.shapes],
        "reasons": choice.reasons(),
    }


def _advise_trace(trace: str, slo: "Slo | None", fleet: dict[str, Any], as_json: bool) -> None:
    """Advise on a trace: what it is like; with a model and a device, which phase hurts there, and the answer of
    ``diptych plan``."""
    import dataclasses

    from diptych.diagnosis.traffic import burstiness, traffic_of
    from diptych.workload.traces import load_trace

    traffic = traffic_of(list(load_trace(trace)))
    like = [*traffic.sentences(), f"arrivals are {burstiness(traffic.variation)}"]
    document: dict[str, Any] = {"diagnosis": None, "traffic": dataclasses.asdict(traffic), "recommended": None}
    if fleet["model"] is None or fleet["hardware"] is None:
        if as_json:
            print(json.dumps(document, indent=2))
            return
        print("Which phase hurts depends on the machine: give --model and --hardware (and --devices), and --slo.")
        print("What the traffic is like")
        _print(like)
        return
    if slo is None:
        raise ConfigError("slo is not given; a fleet is chosen for objectives (--slo ttft=...,tpot=...)", param="slo")
    found = _simulated(trace, slo, fleet)
    if not as_json:
        print(f"Which phase hurts? On {found.observation.source}:")
        _print([found.sentence, *_binding(found), *_disturbance(found)])
        print("What the traffic is like")
        _print(like)
    answer = io.StringIO()
    status = 0
    with redirect_stdout(answer) if as_json else nullcontext():
        try:
            _plan(trace, slo, fleet, as_json)
        except typer.Exit as end:
            status = end.exit_code
    if as_json and answer.getvalue():
        from diptych.diagnosis.diagnosis_words import as_json as as_document

        document |= {"diagnosis": as_document(found, ()), "recommended": json.loads(answer.getvalue())}
        print(json.dumps(document, indent=2))
    if status:
        raise typer.Exit(status)


def _simulated(trace: str, slo: "Slo", fleet: dict[str, Any]) -> "Diagnosis":
    """What hurts the first requests of a trace on workers that do both phases, with prompts in chunks."""
    from diptych.cli.simulate_options import PATHS
    from diptych.diagnosis.adapters.recorded_file import records_of
    from diptych.diagnosis.adapters.timeline_records import TimelineSource, observe
    from diptych.diagnosis.diagnosis import diagnose
    from diptych.simulation.settings import read_settings
    from diptych.simulation.sweep import run_here

    count = fleet["devices"] or 1
    asked = {"model": fleet["model"], "hardware": fleet["hardware"], "replicas": count, "shape": "chunked"}
    asked |= {"trace": trace, "num_requests": SIMULATED, **_objectives(slo)}
    settings = read_settings(None, {PATHS[name]: value for name, value in asked.items() if value is not None})
    run = run_here(settings, record_events=True)
    assert run.log is not None
    records = records_of(run.log, dict.fromkeys(range(count), "both"))
    words = f"{count} simulated {fleet['hardware']} with {fleet['model']}, prompts in chunks, {SIMULATED:,} requests"
    return diagnose(observe(records, TimelineSource(source=words, slo=slo)))


def _plan(trace: str, slo: "Slo", fleet: dict[str, Any], as_json: bool) -> None:
    from diptych.cli.plan import plan

    asked = {"trace": trace, "model": fleet["model"], "hardware": [fleet["hardware"]], "devices": fleet["devices"]}
    plan(**asked, **_objectives(slo), as_json=as_json)


def _objectives(slo: "Slo") -> dict[str, Any]:
    """Objectives as options."""
    limits = {"ttft_slo_ms": slo.ttft_ns, "tpot_slo_ms": slo.tpot_ns}
    return {name: limit_ns and limit_ns / NS_PER_MS for name, limit_ns in limits.items()}
