"""The options of ``diptych plan``: names, help, panels."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.options import SLO_HELP, Number, Text, Whole, option

FLEET, BUDGET, SEARCH, WORKLOAD = "Model and devices", "Budget (without: the smallest fleet)", "Search", "Workload"
OBJECTIVES, OUTPUT = "Objectives", "Output"


class PlanOptions:
    """One attribute each; options.py makes a command of them."""

    config: Annotated[Path | None, typer.Argument(help="TOML file of settings, as for simulate. Default: none.")] = None
    model: Annotated[Text, option("Model of the catalogue, or a config.json. Default: that of CONFIG.", FLEET)] = None
    hardware: Annotated[
        list[str] | None,
        option("Device that may be used; several may be mixed. Repeatable. Default: that of CONFIG.", FLEET),
    ] = None
    prefill_hardware: Annotated[
        list[str] | None, option("Device that may be used for prefill alone. Repeatable. Default: --hardware.", FLEET)
    ] = None
    decode_hardware: Annotated[
        list[str] | None, option("Device that may be used for decode alone. Repeatable. Default: --hardware.", FLEET)
    ] = None
    parallel: Annotated[
        Text, option("Parallelism of a worker to try: tp1,tp2,tp4-pp2. Default: tp1 to tp8.", FLEET)
    ] = None
    weight_bits: Annotated[Whole, option("Bits of a weight on a GPU. Default: the checkpoint's.", FLEET)] = None
    quantize: Annotated[Text, option("Weights on a CPU: none, int8 or int4. Default: none.", FLEET)] = None
    kv_bits: Annotated[Whole, option("Bits of a number in the KV cache: 16 or 8. Default: 16.", FLEET)] = None
    cost: Annotated[
        Text, option("Step durations: auto, tables, operators, roofline, or a file. Default: auto.", FLEET)
    ] = None
    engine: Annotated[
        Text,
        option("Engine whose host and front end are simulated: diptych, vllm-0.12, ... Default: by --cost.", FLEET),
    ] = None
    link: Annotated[Text, option("Link between workers: ib400, eth100, nvlink4, ... Default: ib400.", FLEET)] = None
    nics: Annotated[Whole, option("Network cards of a worker, each with a link of its own. Default: 1.", FLEET)] = None
    devices: Annotated[Whole, option("Most devices of the fleet. Default: no budget.", BUDGET)] = None
    usd_per_hour: Annotated[
        Number, option("Highest price of the fleet in US dollars per hour. Default: no budget.", BUDGET)
    ] = None
    kilowatts: Annotated[
        Number, option("Most rated power of the fleet's devices in kilowatts. Default: no budget.", BUDGET)
    ] = None
    shapes: Annotated[Text, option("Shapes of a fleet to try: unified,chunked,split,mixed. Default: all.", SEARCH)] = (
        None
    )
    placement: Annotated[
        Text, option("Search of whole fleets (joint), or DistServe's (per-phase). Default: joint.", SEARCH)
    ] = None
    kv_host_gb: Annotated[Text, option("Host memory sizes to value, in GB: 16,64. Default: none.", SEARCH)] = None
    kv_disk_gb: Annotated[Text, option("Disk sizes to value, in GB: 100,1000. Default: none.", SEARCH)] = None
    processes: Annotated[Whole, option("Processes that simulate. Default: one per core.", SEARCH)] = None
    rate: Annotated[Number, option("Requests per second. Default: 1, or the trace's.", WORKLOAD)] = None
    prompt_tokens: Annotated[Number, option("Mean length of a prompt in tokens. Default: 512.", WORKLOAD)] = None
    output_tokens: Annotated[Number, option("Mean length of an answer in tokens. Default: 128.", WORKLOAD)] = None
    arrivals: Annotated[
        Text, option("Arrival process: poisson, gamma, constant or on_off. Default: poisson.", WORKLOAD)
    ] = None
    trace: Annotated[
        Text, option("Trace: azure-conv, mooncake-conversation, or a file. Default: random lengths.", WORKLOAD)
    ] = None
    num_requests: Annotated[Whole, option("Fewest requests of a run. Default: 1000, or the trace.", WORKLOAD)] = None
    seed: Annotated[Whole, option("Seed of everything random. Default: 0.", WORKLOAD)] = None
    slo: Annotated[Text, option(SLO_HELP, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option("TTFT objective in milliseconds. Default: none.", OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option("TPOT objective in milliseconds. Default: none.", OBJECTIVES)] = None
    attainment: Annotated[
        Number, option("Share of requests that must meet the objectives: 0.9 or 90. Default: 0.9.", OBJECTIVES)
    ] = None
    tolerance: Annotated[Number, option("Relative precision of the highest rates. Default: 0.05.", OBJECTIVES)] = None
    probe: Annotated[Text, option("Shortest run of a simulation. Default: 60s.", OBJECTIVES)] = None
    assign: Annotated[
        list[str] | None, option("Any setting, PATH=VALUE. Repeatable. Default: none.", OUTPUT, "--set")
    ] = None
    as_json: Annotated[bool, option("Print one JSON object to standard output.", OUTPUT, "--json")] = False
    report: Annotated[
        Path | None, option("Write a page with charts (HTML) to this file. Default: not written.", OUTPUT)
    ] = None
