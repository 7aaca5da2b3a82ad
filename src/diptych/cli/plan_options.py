"""The options of ``diptych plan``: names, help, panels."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.options import SLO_HELP, Number, Text, Whole, option

FLEET, BUDGET, SEARCH, WORKLOAD = "Model and devices", "Budget (without: the smallest fleet)", "Search", "Workload"
OBJECTIVES, OUTPUT = "Objectives", "Output"


class PlanOptions:
    """One attribute each; options.py makes a command of them."""

    config: Annotated[Path | None, typer.Argument(help="TOML file of settings, as for simulate.")] = None
    model: Annotated[Text, option("Model of the catalogue, or a config.json.", FLEET)] = None
    hardware: Annotated[list[str] | None, option("Device that may be used. Repeatable: any mix.", FLEET)] = None
    prefill_hardware: Annotated[list[str] | None, option("Devices for prefill alone. Repeatable.", FLEET)] = None
    decode_hardware: Annotated[list[str] | None, option("Devices for decode alone. Repeatable.", FLEET)] = None
    parallel: Annotated[Text, option("Ways to share a worker: tp1,tp2,tp4-pp2. Default: tp1 to tp8.", FLEET)] = None
    weight_bits: Annotated[Whole, option("Bits of a weight on a GPU. Default: the checkpoint's.", FLEET)] = None
    quantize: Annotated[Text, option("Weights on a CPU, as for serve: none, int8 or int4.", FLEET)] = None
    kv_bits: Annotated[Whole, option("Bits of a cached number: 16 or 8.", FLEET)] = None
    cost: Annotated[Text, option("Step durations, as for simulate.", FLEET)] = None
    engine: Annotated[Text, option("Whose host and front end: diptych, vllm-0.12, ...", FLEET)] = None
    link: Annotated[Text, option("Link between workers: ib400, eth100, nvlink4, ...", FLEET)] = None
    nics: Annotated[Whole, option("Network cards of a worker, each with such a link.", FLEET)] = None
    devices: Annotated[Whole, option("Devices of the fleet at most.", BUDGET)] = None
    usd_per_hour: Annotated[Number, option("Price of the fleet at most.", BUDGET)] = None
    kilowatts: Annotated[Number, option("Rated power of the fleet's devices at most.", BUDGET)] = None
    shapes: Annotated[Text, option("Of unified,chunked,split,mixed. Default: all.", SEARCH)] = None
    placement: Annotated[Text, option("joint: whole fleets. per-phase: DistServe's search.", SEARCH)] = None
    processes: Annotated[Whole, option("Processes. Default: one per core.", SEARCH)] = None
    rate: Annotated[Number, option("Requests per second. Default: the trace's.", WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option("Mean length of a prompt.", WORKLOAD)] = None
    output_tokens: Annotated[Number, option("Mean length of an answer.", WORKLOAD)] = None
    arrivals: Annotated[Text, option("poisson, gamma, constant or on_off.", WORKLOAD)] = None
    trace: Annotated[Text, option("azure-conv, mooncake-conversation, or a file.", WORKLOAD)] = None
    num_requests: Annotated[Whole, option("Requests of a run at least.", WORKLOAD)] = None
    seed: Annotated[Whole, option("Seed of everything random.", WORKLOAD)] = None
    slo: Annotated[Text, option(SLO_HELP, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option("Time to first token.", OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option("Time per later token.", OBJECTIVES)] = None
    attainment: Annotated[Number, option("Share of requests that must meet them: 0.9 or 90.", OBJECTIVES)] = None
    tolerance: Annotated[Number, option("Highest rates are searched this closely. Default: 0.05.", OBJECTIVES)] = None
    probe: Annotated[Text, option("Shortest run. Default: 60s.", OBJECTIVES)] = None
    assign: Annotated[list[str] | None, option("Any setting: PATH=VALUE. Repeatable.", OUTPUT, "--set")] = None
    as_json: Annotated[bool, option("One JSON object on standard output.", OUTPUT, "--json")] = False
    report: Annotated[Path | None, option("Write a page with charts (HTML).", OUTPUT)] = None
