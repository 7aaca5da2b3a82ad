"""``diptych serve | worker | generate | calibrate | replay | version``: the command line.

Owns option names, their help and the output in the terminal. Holds no logic that a library user would miss: every
command ends in a call of another package.
"""

import logging
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from diptych import __version__, compiled_modules
from diptych.cli import batch_options
from diptych.cli.advise import advise
from diptych.cli.alerts import alerts
from diptych.cli.batch import batch
from diptych.cli.bench import bench
from diptych.cli.cache import cache
from diptych.cli.calibrate import calibrate, replay
from diptych.cli.command_line import Command, CommandGroup, own_command
from diptych.cli.diagnose import diagnose
from diptych.cli.error_messages import errors_in_words
from diptych.cli.examples import examples
from diptych.cli.front import front
from diptych.cli.guide import guide
from diptych.cli.options import (
    SLO_HELP,
    Number,
    Strings,
    Text,
    Whole,
    model_name,
    model_path,
    option,
    picked,
    tier_memory,
    with_objectives,
)
from diptych.cli.plan import plan
from diptych.cli.simulate import simulate
from diptych.cli.terminal_chat import chat
from diptych.cli.worker import worker
from diptych.control.cluster.cluster_config import OnFailure, cluster_config
from diptych.control.cluster.core_split import parse_core_split
from diptych.control.config import BudgetName, OrderName, PreemptionName, ShapeName, scheduler_config
from diptych.control.errors import ConfigError
from diptych.control.planner.planner_config import PlanMode, PlannerConfig
from diptych.control.router.routing import Deflection, Disaggregate, RoutingName
from diptych.control.slo import NS_PER_MS, Slo
from diptych.processor import Processor, read_processor
from diptych.runtime.tiers.extent_format import DiskCodecName
from diptych.runtime.transfer import CONNECTORS
from diptych.runtime.transfer.connector import CodecName
from diptych.serving.api.manners import Manners, is_loopback
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import (
    BUNDLED_MODEL,
    DeviceName,
    DeviceOptions,
    DTypeName,
    EngineOptions,
    ExplainMisses,
    InstructionSetName,
    MemoryOptions,
    QuantizeName,
    SpeculationName,
    parse_bytes,
    parse_cores,
)
from diptych.serving.ray.ray_options import RayOptions
from diptych.serving.start_checks import GPU, check_start
from diptych.tls.shared_key import read_key_file

app = typer.Typer(
    name="diptych",
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

MODEL_HELP = "Model directory, GGUF file, or a name of the Hub that is in its cache. Default: the bundled model."
TRANSFERS = "|".join(("auto", *CONNECTORS))  # FleetOptions refuses other names
MODEL, SERVER, OBJECTIVES, WORKERS = "Model", "Server", "Objectives", "Workers"
ISA_HELP = "Instructions of the CPU kernels; auto: the fastest set of this machine."
QUANTIZE_HELP = "Weights of 8 or 4 bits, made from the checkpoint's when it is loaded; on a CPU."
SPECULATION_HELP = "Guess tokens from prompt and answer, and verify several at once; auto: where no token changes."
UNTOUCHED_NAMES = ("--max-untouched-per-worker", "--edge-depth")  # the second is the old name
UNTOUCHED_HELP = "Requests per worker without a first token; more wait in the queue (0: none wait). Default: 64."
BOTH_HELP = "Workers that do both. Default: 1 if there is no other."
CORE_SPLIT_HELP = "Cores by role, such as prefill=3,decode=1 (weights); divided again when a role changes."
FLEET_HELP = "TOML file of unequal workers: tables pools.NAME, as for diptych simulate."
SURVIVE_HELP = "Record streams in this directory: clients go on with Last-Event-ID, also after a restart."
LISTEN_HELP = "Take workers of other hosts here (diptych worker --join)."
KEY_HELP = "File with the key that workers must have to join: 32 to 4096 bytes."
LAUNCHER_HELP = "What starts the workers: this host, or Ray on its hosts (they join: --listen-workers)."
PLAIN_HELP = "With --listen-workers: KV unencrypted between workers, on a network that you trust."
POOL_HELP = "NAME=POOL, such as large=1:max_model_len=131072,kv_cache_bytes=8GiB. Repeatable."
DEFLECTION_HELP = "Prompts of a busy decode worker: short ones, or any that its streams' objective leaves room for."
MAX_QUEUED_HELP = "Requests that may wait in the queue; more get 429. Default: 4096."
ADMIN_KEY_HELP = "Ask for this key at /admin. Default: only programs on this machine are answered there."
API_KEY_HELP = "Accept this key (Authorization: Bearer KEY). Repeatable; each key is a tenant, tenants share fairly."
MISSES_HELP = "Say why prompts were not in the prefix cache. text: keep prompts in memory, to show what differs."
CORS_HELP = "Origin whose web pages may use the API, such as https://example.org (*: all). Repeatable."
LOG_HELP = "Append a JSON line per request to this file (-: standard error), without prompts and answers."
KV_HOST_HELP = "Host memory per worker for evicted KV and preempted requests, in GB."
HOST_HELP = "Name by which the server may be called, besides addresses and localhost. Repeatable."
BATCHES = "Batches"
SCHEDULER, MEMORY, MACHINE = "Scheduler (details; --shape presets them)", "Memory", "Machine"


LogLevel = Literal["debug", "info", "warning", "error"]
SCHEDULER_OPTIONS = tuple(name for name in signature(scheduler_config).parameters if name != "shape")
TWIN_COMMAND = (sys.executable, "-m", "diptych.simulation.twin.twin_process")
SHAPES: tuple[ShapeName, ...] = ("chunked", "unified")
SHAPE_HELP = "unified: prompts first. chunked: between decodes. Default: chunked, and --plan may change it."
PLAN_HELP = "Change roles, shapes and --core-split to fit the load (auto), or only say so (advise). Default: advise."
CLUSTER_OPTIONS = tuple(signature(cluster_config).parameters)


@app.callback()
def diptych(
    ctx: typer.Context,
    is_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Diptych: LLM inference served as the two jobs that it is, prefill and decode."""
    if is_version:
        version()
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(cls=Command, epilog=examples("serve"))
def serve(
    place: Annotated[Text, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)] = None,
    model: Annotated[Text, option("The same as MODEL.", MODEL)] = None,
    served_model_name: Annotated[Text, option("Name for clients. Default: the model's own.", MODEL)] = None,
    max_model_len: Annotated[Whole, option("Context length. Default: the model's own.", MODEL)] = None,
    dtype: Annotated[DTypeName, option("Arithmetic; auto: the checkpoint's own.", MODEL)] = "auto",
    host: Annotated[str, option("Address to listen on. 0.0.0.0: reachable from everywhere.", SERVER)] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 picks a free one.", SERVER)] = 8000,
    api_key: Annotated[Strings, option(API_KEY_HELP, SERVER, envvar="DIPTYCH_API_KEY")] = None,
    admin_key: Annotated[Text, option(ADMIN_KEY_HELP, SERVER, envvar="DIPTYCH_ADMIN_KEY")] = None,
    max_waiting: Annotated[Whole, option("Requests that may wait on each worker; more get 429.", SERVER)] = None,
    max_body: Annotated[str, option("Largest request body; more gets 413.", SERVER)] = "16MiB",
    cors_origin: Annotated[Strings, option(CORS_HELP, SERVER)] = None,
    allowed_host: Annotated[Strings, option(HOST_HELP, SERVER)] = None,
    access_log: Annotated[Text, option(LOG_HELP, SERVER)] = None,
    strict: Annotated[bool, option("Refuse fields of requests that this server does not know.", SERVER)] = False,
    responses: Annotated[
        Path | None, option("Keep /v1/responses in this SQLite file. Default: memory.", SERVER)
    ] = None,
    batch_dir: Annotated[Path | None, option(batch_options.DIR_HELP, BATCHES)] = None,
    batch_lines: Annotated[Whole, option(batch_options.LINES_HELP, BATCHES)] = None,
    batch_lines_beside: Annotated[Whole, option(batch_options.BESIDE_HELP, BATCHES)] = None,
    batch_max_lines: Annotated[Whole, option(batch_options.MAX_LINES_HELP, BATCHES)] = None,
    batch_max_file: Annotated[Text, option(batch_options.MAX_FILE_HELP, BATCHES)] = None,
    batch_gb: Annotated[Number, option(batch_options.GB_HELP, BATCHES)] = None,
    drain_timeout: Annotated[float, option("Seconds for running requests after SIGTERM.", SERVER)] = 30.0,
    log_level: Annotated[LogLevel, option("How much the server logs.", SERVER)] = "warning",
    verbose: Annotated[bool, option("Say at the start what the engine computes with.", SERVER)] = False,
    record: Annotated[Path | None, option("Record all decisions to this file, for diptych replay.", SERVER)] = None,
    prefill: Annotated[int, option("Workers that prefill.", WORKERS)] = 0,
    decode: Annotated[int, option("Workers that decode.", WORKERS)] = 0,
    both: Annotated[Whole, option(BOTH_HELP, WORKERS, "--both", "--workers")] = None,
    listen_workers: Annotated[Text, option(LISTEN_HELP, WORKERS, metavar="HOST:PORT")] = None,
    key_file: Annotated[Path | None, option(KEY_HELP, WORKERS)] = None,
    launcher: Annotated[Literal["local", "ray"], option(LAUNCHER_HELP, WORKERS)] = "local",
    ray_address: Annotated[Text, option("The Ray cluster. Default: auto, the one of this host.", WORKERS)] = None,
    ray_cpus: Annotated[float | None, option("CPUs that Ray keeps for each worker. Default: 1.", WORKERS)] = None,
    ray_gpus: Annotated[float | None, option("GPUs that Ray keeps for each worker. Default: 0.", WORKERS)] = None,
    ray_wait: Annotated[float | None, option("Seconds for Ray to find room. Default: 300.", WORKERS)] = None,
    survive_restart: Annotated[Path | None, option(SURVIVE_HELP, SERVER)] = None,
    transfer_plain: Annotated[bool, option(PLAIN_HELP, WORKERS)] = False,
    max_workers: Annotated[Whole, option("Workers that there may be, with those added later.", WORKERS)] = None,
    fleet: Annotated[Path | None, option(FLEET_HELP, WORKERS)] = None,
    pool: Annotated[Strings, option(POOL_HELP, WORKERS)] = None,
    plan: Annotated[PlanMode | None, option(PLAN_HELP, WORKERS)] = None,
    routing: Annotated[RoutingName | None, option("How workers are chosen.", WORKERS)] = None,
    disaggregate: Annotated[Disaggregate | None, option("Whether two workers share a request.", WORKERS)] = None,
    deflection: Annotated[Deflection | None, option(DEFLECTION_HELP, WORKERS)] = None,
    transfer: Annotated[
        str, option("KV between workers; auto: shared memory on CPUs, else TCP.", WORKERS, metavar=f"<{TRANSFERS}>")
    ] = "auto",
    kv_codec: Annotated[CodecName, option("Compress (and round) KV; auto: if it saves time.", WORKERS)] = "none",
    on_failure: Annotated[OnFailure | None, option("What becomes of the requests of a lost worker.", WORKERS)] = None,
    heartbeat_timeout: Annotated[float, option("Seconds without heartbeat until a worker is killed.", WORKERS)] = 10.0,
    cores_per_worker: Annotated[Text, option("Cores per worker: a number, or lists of CPUs 0-3/4-7.", WORKERS)] = None,
    core_split: Annotated[Text, option(CORE_SPLIT_HELP, WORKERS)] = None,
    max_untouched_per_worker: Annotated[Whole, option(UNTOUCHED_HELP, WORKERS, *UNTOUCHED_NAMES)] = None,
    max_queued: Annotated[Whole, option(MAX_QUEUED_HELP, WORKERS)] = None,
    max_queued_per_key: Annotated[Whole, option("Of these, requests of one API key (0: no limit).", WORKERS)] = None,
    slo: Annotated[Text, option(SLO_HELP, OBJECTIVES)] = None,
    ttft_slo_ms: Annotated[Number, option("Time to first token, for requests that name none.", OBJECTIVES)] = None,
    tpot_slo_ms: Annotated[Number, option("Time per later token, for requests that name none.", OBJECTIVES)] = None,
    shape: Annotated[ShapeName | None, option(SHAPE_HELP, OBJECTIVES)] = None,
    speculation: Annotated[SpeculationName, option(SPECULATION_HELP, OBJECTIVES)] = "auto",
    order: Annotated[OrderName | None, option("Which waiting request goes first.", SCHEDULER)] = None,
    budget: Annotated[BudgetName | None, option("What limits a step: prompts, tokens or time.", SCHEDULER)] = None,
    max_batched_tokens: Annotated[Whole, option("Tokens of one step at most.", SCHEDULER)] = None,
    step_target_ms: Annotated[Number, option("Step time of --budget slo, without TPOT objectives.", SCHEDULER)] = None,
    max_num_seqs: Annotated[Whole, option("Requests running at once per worker.", SCHEDULER)] = None,
    max_partial_prefills: Annotated[Whole, option("Prompts partly computed at once (0: no limit).", SCHEDULER)] = None,
    max_long_partial_prefills: Annotated[Whole, option("Of these, long ones (0: no limit).", SCHEDULER)] = None,
    long_prefill_threshold: Annotated[Whole, option("A prompt with more uncached tokens is long.", SCHEDULER)] = None,
    preemption: Annotated[PreemptionName | None, option("When a decode loses its KV blocks.", SCHEDULER)] = None,
    preempt_for_priority: Annotated[bool, option("Displace running requests of lower priority.", SCHEDULER)] = False,
    block_size: Annotated[int, option("Tokens per KV block.", MEMORY)] = 32,
    kv_cache_memory: Annotated[Text, option("KV cache per worker, such as 2GiB. Default: a share.", MEMORY)] = None,
    kv_host_gb: Annotated[float, option(KV_HOST_HELP, MEMORY)] = 0.0,
    kv_disk: Annotated[Path | None, option("Folder that keeps KV over restarts, such as ~/.cache/kv.", MEMORY)] = None,
    kv_disk_gb: Annotated[Number, option("What its files may take together, in GB.", MEMORY)] = None,
    kv_disk_codec: Annotated[DiskCodecName, option("int8: half the bytes, rounded.", MEMORY)] = "none",
    prefix_cache: Annotated[bool, option("Reuse the KV of equal prompt beginnings.", MEMORY)] = True,
    explain_misses: Annotated[ExplainMisses, option(MISSES_HELP, MEMORY)] = "off",
    device: Annotated[DeviceName, option("Where to compute.", MACHINE)] = "auto",
    threads: Annotated[Whole, option("Compute threads per worker. Default: one per physical core.", MACHINE)] = None,
    cores: Annotated[Text, option("CPUs to compute on, such as 0-3: one thread each.", MACHINE)] = None,
    instruction_set: Annotated[InstructionSetName, option(ISA_HELP, MACHINE, "--isa")] = "auto",
    quantize: Annotated[QuantizeName, option(QUANTIZE_HELP, MACHINE)] = "none",
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    given = dict(locals())
    with errors_in_words():
        if place is not None and model is not None:
            raise ConfigError(f"the model is given twice: {place} and --model {model}", param="model")
        given = with_objectives(given | {"model": place or model})
        options = engine_options(given)
        workers_here = fleet_options(given)
        if workers_here.roles:
            check_start(options)
        _serve(options, workers_here, served_model_name or model_name(Path(options.model)), given)


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """The engine's settings from the values of the options of ``serve``. Raises ConfigError."""
    path = model_path(given["model"])
    if given["cores"]:
        parse_cores(given["cores"])
    memory = given["kv_cache_memory"]
    slo = Slo(_nanoseconds(given["ttft_slo_ms"]), _nanoseconds(given["tpot_slo_ms"]))
    return EngineOptions(
        model=str(path),
        device=DeviceOptions(**picked(given, "device", "dtype", "threads", "cores", "instruction_set", "quantize")),
        memory=MemoryOptions(
            block_size=given["block_size"],
            kv_cache_bytes=None if memory is None else parse_bytes(memory, "kv_cache_memory"),
            prefix_cache=given["prefix_cache"],
            **tier_memory(given),
        ),
        scheduler=scheduler_config(given["shape"] or SHAPES[0], **picked(given, *SCHEDULER_OPTIONS)),
        slo=slo,
        max_model_len=given["max_model_len"],
        speculation=given["speculation"],
        record=None if given["record"] is None else str(given["record"].resolve()),
    )


def fleet_options(given: dict[str, Any]) -> FleetOptions:
    """The workers from the values of the options of ``serve``. Raises ConfigError."""
    found = FleetOptions(
        **picked(given, "prefill", "decode", "both", "max_workers", "transfer", "kv_codec", "cores_per_worker"),
        explain_misses=given["explain_misses"],
        groups=_groups(given),
        heartbeat_timeout_s=given["heartbeat_timeout"],
        core_split=parse_core_split(given["core_split"]) if given["core_split"] else None,
        cluster=cluster_config(**picked(given, *CLUSTER_OPTIONS)),
        join=_join_options(given),
        ray=_ray_options(given),
    )
    is_planned = len(found.slots) > 1
    mode: PlanMode = given["plan"] or ("advise" if is_planned else "off")
    has_chosen = any(
        given[name] for name in ("shape", *SCHEDULER_OPTIONS)
    )  # settings that a change of shape would lose
    shapes = (given["shape"] or SHAPES[0],) if has_chosen else SHAPES
    return replace(found, plan=PlannerConfig(mode, shapes=shapes), twin_command=TWIN_COMMAND)


def _join_options(given: dict[str, Any]) -> JoinOptions | None:
    listen, path = given["listen_workers"], given["key_file"]
    if listen is None:
        for name in ("key_file", "transfer_plain"):
            if given[name]:
                raise ConfigError(f"{name} has no effect without listen_workers", param=name)
        return None
    if path is None:
        raise ConfigError("listen_workers needs a key_file: what workers must know to join", param="key_file")
    return JoinOptions(listen, read_key_file(path), given["transfer_plain"])


def _ray_options(given: dict[str, Any]) -> RayOptions | None:
    names = ("ray_address", "ray_cpus", "ray_gpus", "ray_wait")
    if given["launcher"] == "local":
        for name in names:
            if given[name] is not None:
                raise ConfigError(f"{name} has no effect without launcher ray", param=name)
        return None
    if given["key_file"] is None:
        raise ConfigError("launcher is ray, which needs listen_workers and a key_file", param="launcher")
    address, cpus, gpus, wait_s = (given[name] for name in names)
    default = RayOptions(key_file=given["key_file"])
    return RayOptions(
        key_file=given["key_file"],
        address=address or default.address,
        num_cpus=default.num_cpus if cpus is None else cpus,
        num_gpus=default.num_gpus if gpus is None else gpus,
        wait_s=default.wait_s if wait_s is None else wait_s,
    )


def _groups(given: dict[str, Any]) -> tuple[WorkerGroup, ...]:
    if given["fleet"] is None and not given["pool"]:
        return ()
    from diptych.cli.fleet_file import worker_groups

    return worker_groups(
        given["fleet"],
        given["pool"] or (),
        picked(given | {"shape": given["shape"] or SHAPES[0]}, "shape", *SCHEDULER_OPTIONS),
    )


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * NS_PER_MS)


def _serve(options: EngineOptions, workers: FleetOptions, name: str, given: dict[str, Any]) -> None:
    logging.basicConfig(level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s")
    from diptych.serving.answers.stream_journal import StreamJournal
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.api.start_screen import StartScreen, prompt_kind
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.fleet.fleet import Fleet
    from diptych.serving.fleet.launchers import launcher_of

    server = ServerOptions(
        **picked(given, "host", "port", "log_level", "responses"),
        served_model_name=name,
        api_keys=tuple(given["api_key"] or ()),
        admin_key=given["admin_key"] or None,
        max_body_bytes=parse_bytes(given["max_body"], "max_body"),
        drain_timeout_s=given["drain_timeout"],
        manners=manners(given),
        batches=batch_options.batch_options(given),
    )
    chat_command = f"{own_command()} chat"
    with StartScreen(
        name, has_key=bool(server.api_keys), chat_command=chat_command, is_verbose=given["verbose"]
    ) as screen:
        screen.hint = busy_machine_hint(options, len(workers.roles))
        journal = None if given["survive_restart"] is None else StreamJournal(given["survive_restart"])
        llm = AsyncLLM(options, Fleet(options, workers, launcher_of(workers)), journal)
        screen.kind = prompt_kind(llm.tokenizer, is_bundled=Path(options.model) == BUNDLED_MODEL)
        run_server(llm, server, screen.on_loading, screen.on_ready)


def busy_machine_hint(options: EngineOptions, num_workers: int, processor: Processor | None = None) -> str:
    """What to know where one worker computes on all cores of this machine; empty elsewhere."""
    device = options.device
    if num_workers != 1 or device.threads or device.cores or device.device == "cuda" or GPU.exists():
        return ""
    if (processor or read_processor()).num_threads < 2:
        return ""
    return "It computes on every core, so programs beside it make each step slower; --threads N leaves cores to them."


def manners(given: dict[str, Any]) -> Manners:
    """How the server behaves towards clients. Raises ConfigError."""
    return Manners(
        cors_origins=tuple(given["cors_origin"] or ()),
        allowed_hosts=tuple(given["allowed_host"] or ()),
        only_local=is_loopback(given["host"]) and not given["api_key"],
        access_log=given["access_log"],
        is_strict=given["strict"],
    )


@app.command(cls=Command, epilog=examples("generate"))
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: Annotated[Text, option(MODEL_HELP, MODEL)] = None,
    max_tokens: Annotated[int, option("Tokens at most.", MODEL)] = 128,
    temperature: Annotated[float, option("0 takes the likeliest token each time.", MODEL)] = 0.7,
    top_p: Annotated[float, option("Only the likeliest tokens of this total probability.", MODEL)] = 1.0,
    seed: Annotated[int | None, option("Repeatable output.", MODEL)] = None,
    threads: Annotated[int | None, option("Compute threads. Default: one per physical core.", MACHINE)] = None,
    dtype: Annotated[DTypeName, option("Arithmetic; auto: the checkpoint's own.", MODEL)] = "auto",
    instruction_set: Annotated[InstructionSetName, option(ISA_HELP, MACHINE, "--isa")] = "auto",
    quantize: Annotated[QuantizeName, option(QUANTIZE_HELP, MODEL)] = "none",
) -> None:
    """Continue one text in this process, without a server; the text appears as it is made."""
    from diptych.control.request import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    with errors_in_words():
        from diptych.serving.llm import LLM

        path = model_path(model)
        device = DeviceOptions(dtype=dtype, threads=threads, instruction_set=instruction_set, quantize=quantize)
        check_start(EngineOptions(model=str(path), device=device))
        llm = LLM(path, dtype=dtype, threads=threads, instruction_set=instruction_set, quantize=quantize)
        print(llm.ready.description, file=sys.stderr)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        sys.stdout.write(text)
        for piece in llm.stream(text, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


@app.command(cls=Command, epilog=examples("version"))
def version() -> None:
    """Print the version, and whether the control code and the simulator are compiled."""
    print(f"diptych {__version__} (control code and simulator: {compiled_modules.what_runs()})")


for command in (advise, alerts, bench, calibrate, chat, diagnose, front, plan, replay, simulate, worker, guide):
    app.command(cls=Command, epilog=examples(command.__name__))(command)
app.add_typer(batch, name="batch", epilog=examples("batch"))
app.add_typer(cache, name="cache", epilog=examples("cache"))


def main() -> None:
    """The entry point of the ``diptych`` command."""
    app()
