"""``diptych serve | generate | calibrate | replay | version``: the command line.

Owns option names, their help and what people see in the terminal. Must never hold logic that a library user would
miss: every command ends in a call of the serving package.
"""

import logging
import sys
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from diptych import __version__
from diptych.cli import bench as cli_bench
from diptych.cli import calibrate as cli_calibrate
from diptych.cli import guide as cli_guide
from diptych.cli import simulate as cli_simulate
from diptych.cli.error_messages import errors_in_words
from diptych.control.cluster.cluster_config import OnFailure, cluster_config
from diptych.control.config import BudgetName, OrderName, PreemptionName, ShapeName, scheduler_config
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Disaggregate, RoutingName
from diptych.control.slo import NS_PER_MS, Slo
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import CodecName
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.link.engine_options import (
    BUNDLED_MODEL,
    DeviceName,
    DeviceOptions,
    DTypeName,
    EngineOptions,
    InstructionSetName,
    MemoryOptions,
    parse_bytes,
    parse_cores,
)

app = typer.Typer(
    name="diptych",
    help="Diptych: LLM inference served as the two jobs that it is, prefill and decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

TRANSFERS = "|".join(("auto", *CONNECTORS))  # FleetOptions refuses other names
MODEL, SERVER, OBJECTIVES, WORKERS = "Model", "Server", "Objectives", "Workers"
ISA_HELP = "Instructions of the CPU kernels; auto: the fastest set of this machine."
UNTOUCHED_NAMES = ("--max-untouched-per-worker", "--edge-depth")  # the second is the old name
UNTOUCHED_HELP = "Requests without a token; more wait by class and key (0: none wait). Default: 64."
API_KEY_HELP = "Ask for this key (Authorization: Bearer KEY). Several: each is a tenant, and they share fairly."
SCHEDULER, MEMORY, MACHINE = "Scheduler (details; --shape presets them)", "Memory", "Machine"


LogLevel = Literal["debug", "info", "warning", "error"]
SCHEDULER_OPTIONS = tuple(name for name in signature(scheduler_config).parameters if name != "shape")
CLUSTER_OPTIONS = tuple(signature(cluster_config).parameters)


def _option(help_text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


Text: TypeAlias = str | None
Whole: TypeAlias = int | None
Number: TypeAlias = float | None
Strings: TypeAlias = list[str] | None


@app.command()
def serve(
    model: Annotated[Path | None, _option("Model directory (Hugging Face layout). Default: bundled.", MODEL)] = None,
    served_model_name: Annotated[Text, _option("Name for clients. Default: the directory's name.", MODEL)] = None,
    max_model_len: Annotated[Whole, _option("Context length. Default: the model's own.", MODEL)] = None,
    dtype: Annotated[DTypeName, _option("Arithmetic; auto: the checkpoint's own.", MODEL)] = "auto",
    host: Annotated[str, _option("Address to listen on. 0.0.0.0: reachable from everywhere.", SERVER)] = "127.0.0.1",
    port: Annotated[int, _option("Port; 0 picks a free one.", SERVER)] = 8000,
    api_key: Annotated[Strings, _option(API_KEY_HELP, SERVER, envvar="DIPTYCH_API_KEY")] = None,
    max_waiting: Annotated[Whole, _option("Requests that may wait per worker; more get 429.", SERVER)] = None,
    max_body: Annotated[str, _option("Largest request body; more gets 413.", SERVER)] = "16MiB",
    drain_timeout: Annotated[float, _option("Seconds for running requests after SIGTERM.", SERVER)] = 30.0,
    log_level: Annotated[LogLevel, _option("How much the server logs.", SERVER)] = "warning",
    record: Annotated[Path | None, _option("Record what decisions depend on, for diptych replay.", SERVER)] = None,
    prefill: Annotated[int, _option("Workers that prefill.", WORKERS)] = 0,
    decode: Annotated[int, _option("Workers that decode.", WORKERS)] = 0,
    both: Annotated[Whole, _option("Workers that do both. Default: 1 if there is no other.", WORKERS)] = None,
    routing: Annotated[RoutingName | None, _option("How workers are chosen.", WORKERS)] = None,
    disaggregate: Annotated[Disaggregate | None, _option("Two workers share a request.", WORKERS)] = None,
    transfer: Annotated[
        str, _option("Of KV; auto: a shared pool on CPUs, else TCP.", WORKERS, metavar=f"<{TRANSFERS}>")
    ] = "auto",
    kv_codec: Annotated[CodecName, _option("Packs (and rounds) KV; auto: if it saves time.", WORKERS)] = "none",
    on_failure: Annotated[OnFailure | None, _option("When a worker dies with requests.", WORKERS)] = None,
    heartbeat_timeout: Annotated[float, _option("Seconds until a silent worker is killed.", WORKERS)] = 10.0,
    cores_per_worker: Annotated[Text, _option("A number, or lists: 0-3/4-7. Default: shares.", WORKERS)] = None,
    max_untouched_per_worker: Annotated[Whole, _option(UNTOUCHED_HELP, WORKERS, *UNTOUCHED_NAMES)] = None,
    max_queued: Annotated[
        Whole, _option("Requests that may wait in all; more get 429. Default: 4096.", WORKERS)
    ] = None,
    max_queued_per_key: Annotated[Whole, _option("Of these, of one API key (0: no limit).", WORKERS)] = None,
    ttft_slo_ms: Annotated[Number, _option("Time to first token, for requests that name none.", OBJECTIVES)] = None,
    tpot_slo_ms: Annotated[Number, _option("Mean time per later token, likewise.", OBJECTIVES)] = None,
    shape: Annotated[ShapeName, _option("unified: prompts first. chunked: between decodes.", OBJECTIVES)] = "chunked",
    order: Annotated[OrderName | None, _option("Which request is next.", SCHEDULER)] = None,
    budget: Annotated[BudgetName | None, _option("What limits a step: prompts, tokens or time.", SCHEDULER)] = None,
    max_batched_tokens: Annotated[Whole, _option("Tokens of one step at most.", SCHEDULER)] = None,
    step_target_ms: Annotated[Number, _option("Of a step with --budget slo without TPOTs.", SCHEDULER)] = None,
    max_num_seqs: Annotated[Whole, _option("Requests running at once per worker.", SCHEDULER)] = None,
    max_partial_prefills: Annotated[Whole, _option("Prompts half done at once (0: no limit).", SCHEDULER)] = None,
    max_long_partial_prefills: Annotated[Whole, _option("Of these, long ones (0: no limit).", SCHEDULER)] = None,
    long_prefill_threshold: Annotated[Whole, _option("Uncached tokens of a long prompt.", SCHEDULER)] = None,
    preemption: Annotated[PreemptionName | None, _option("Of a decode that loses its blocks.", SCHEDULER)] = None,
    preempt_for_priority: Annotated[bool, _option("Waiting may displace running, by priority.", SCHEDULER)] = False,
    block_size: Annotated[int, _option("Tokens per KV block.", MEMORY)] = 32,
    kv_cache_memory: Annotated[Text, _option("Of each worker, such as 2GiB. Default: a share.", MEMORY)] = None,
    swap_memory: Annotated[str, _option("Host memory for swapped requests.", MEMORY)] = "0",
    prefix_cache: Annotated[bool, _option("Reuse the KV of equal prompt beginnings.", MEMORY)] = True,
    device: Annotated[DeviceName, _option("Where to compute.", MACHINE)] = "auto",
    threads: Annotated[Whole, _option("Compute threads per worker. Default: one per core.", MACHINE)] = None,
    cores: Annotated[Text, _option("Cores to compute on, such as 0-3.", MACHINE)] = None,
    instruction_set: Annotated[InstructionSetName, _option(ISA_HELP, MACHINE, "--isa")] = "auto",
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    given = dict(locals())
    with errors_in_words():
        options = engine_options(given)
        _serve(options, fleet_options(given), served_model_name or Path(options.model).resolve().name, given)


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """The engine's settings from the values of the options of ``serve``. Raises ConfigError."""
    directory = Path(given["model"] or BUNDLED_MODEL)
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory} is no model directory: it has no config.json", param="model")
    if given["cores"]:
        parse_cores(given["cores"])
    memory = given["kv_cache_memory"]
    slo = Slo(_nanoseconds(given["ttft_slo_ms"]), _nanoseconds(given["tpot_slo_ms"]))
    return EngineOptions(
        model=str(directory.resolve()),
        device=DeviceOptions(
            device=given["device"],
            dtype=given["dtype"],
            threads=given["threads"],
            cores=given["cores"],
            instruction_set=given["instruction_set"],
        ),
        memory=MemoryOptions(
            block_size=given["block_size"],
            kv_cache_bytes=None if memory is None else parse_bytes(memory, "kv_cache_memory"),
            swap_bytes=parse_bytes(given["swap_memory"], "swap_memory"),
            prefix_cache=given["prefix_cache"],
        ),
        scheduler=scheduler_config(given["shape"], **{name: given[name] for name in SCHEDULER_OPTIONS}),
        slo=slo,
        max_model_len=given["max_model_len"],
        record=None if given["record"] is None else str(given["record"].resolve()),
    )


def fleet_options(given: dict[str, Any]) -> FleetOptions:
    """The workers from the values of the options of ``serve``. Raises ConfigError."""
    return FleetOptions(
        prefill=given["prefill"],
        decode=given["decode"],
        both=given["both"],
        transfer=given["transfer"],
        kv_codec=given["kv_codec"],
        heartbeat_timeout_s=given["heartbeat_timeout"],
        cores_per_worker=given["cores_per_worker"],
        cluster=cluster_config(**{name: given[name] for name in CLUSTER_OPTIONS}),
    )


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * NS_PER_MS)


def _serve(options: EngineOptions, workers: FleetOptions, name: str, given: dict[str, Any]) -> None:
    logging.basicConfig(level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s")
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.api.start_screen import StartScreen
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.fleet.fleet import Fleet

    server = ServerOptions(
        host=given["host"],
        port=given["port"],
        served_model_name=name,
        api_keys=tuple(given["api_key"] or ()),
        max_body_bytes=parse_bytes(given["max_body"], "max_body"),
        drain_timeout_s=given["drain_timeout"],
        log_level=given["log_level"],
    )
    with StartScreen(name, has_key=bool(server.api_keys)) as screen:
        run_server(AsyncLLM(options, Fleet(options, workers)), server, screen.on_loading, screen.on_ready)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: Annotated[Path | None, _option("Model directory. Default: bundled.", MODEL)] = None,
    max_tokens: Annotated[int, _option("Tokens at most.", MODEL)] = 128,
    temperature: Annotated[float, _option("0 takes the likeliest token each time.", MODEL)] = 0.7,
    top_p: Annotated[float, _option("Only the likeliest tokens of this total probability.", MODEL)] = 1.0,
    seed: Annotated[int | None, _option("Repeatable output.", MODEL)] = None,
    threads: Annotated[int | None, _option("Compute threads. Default: one per core.", MACHINE)] = None,
    dtype: Annotated[DTypeName, _option("Arithmetic; auto: the checkpoint's own.", MODEL)] = "auto",
    instruction_set: Annotated[InstructionSetName, _option(ISA_HELP, MACHINE, "--isa")] = "auto",
) -> None:
    """Continue one text in this process, without a server; the text appears as it is made."""
    from diptych.control.request import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    with errors_in_words():
        from diptych.serving.llm import LLM

        llm = LLM(model, dtype=dtype, threads=threads, instruction_set=instruction_set)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        sys.stdout.write(text)
        for piece in llm.stream(text, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


@app.command()
def version() -> None:
    """Print the version."""
    print(f"diptych {__version__}")


cli_bench.register(app)
cli_calibrate.register(app)
cli_simulate.register(app)
cli_guide.register(app)


def main() -> None:
    """The entry point of the ``diptych`` command."""
    app()
