"""``diptych``: the table of its commands, and three of them: serve, generate and version.

Owns option names, their help and the output in the terminal. Holds no logic that a library user would miss: every
command ends in a call of another package.
"""

import logging
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych import __version__
from diptych.base import compiled_modules
from diptych.base.processor import Processor, read_processor
from diptych.base.terminal_text import own
from diptych.cli import shared_help
from diptych.cli.advise import advise
from diptych.cli.alerts import alerts
from diptych.cli.batch import batch
from diptych.cli.batch_options import BatchTaking, batch_options
from diptych.cli.bench import bench
from diptych.cli.cache import cache
from diptych.cli.calibrate import calibrate, replay
from diptych.cli.command_line import Command, CommandGroup, own_command
from diptych.cli.describe_models import models
from diptych.cli.diagnose import diagnose
from diptych.cli.error_messages import errors_in_words
from diptych.cli.examples import examples
from diptych.cli.front import front
from diptych.cli.guide import guide
from diptych.cli.http_options import HttpOptions, admin_key, default_slo, failure_folder, http_policy, keyring
from diptych.cli.keys import keys
from diptych.cli.options import (
    KERNEL_NAMES,
    Text,
    model_name,
    model_path,
    option,
    picked,
    takes,
    tier_memory,
    with_objectives,
)
from diptych.cli.plan import plan
from diptych.cli.pull import present_or_downloaded, pull
from diptych.cli.serve_options import (
    ISA_HELP,
    MACHINE,
    MODEL,
    MODEL_HELP,
    QUANTIZE_HELP,
    ModelOptions,
    ServeOptions,
)
from diptych.cli.simulate import simulate
from diptych.cli.terminal_chat import chat
from diptych.cli.worker import worker
from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.cluster.core_split import parse_core_split
from diptych.control.config import (
    DEFAULT_SHAPE,
    DTypeName,
    KVDTypeName,
    ModelImplName,
    PresetName,
    QuantizeName,
    scheduler_config,
)
from diptych.control.errors import ConfigError
from diptych.control.planner.planner_config import PlanMode, PlannerConfig
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.join_options import JoinOptions
from diptych.serving.fleet.memory_fit import MemoryNeed, check_memory, fitted, memory_words
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.engine_options import (
    BUNDLED_MODEL,
    DeviceOptions,
    EngineOptions,
    InstructionSetName,
    MemoryOptions,
    parse_bytes,
    parse_cores,
)
from diptych.serving.link.messages import Ready
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


SCHEDULER_OPTIONS = tuple(name for name in signature(scheduler_config).parameters if name != "shape")
TWIN_COMMAND = (sys.executable, "-m", "diptych.advisor.twin_process")
SHAPES: tuple[PresetName, ...] = (DEFAULT_SHAPE, "unified")
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
@takes(ModelOptions, HttpOptions, BatchTaking, ServeOptions)
def serve(given: dict[str, Any]) -> None:
    """Serve a model over an OpenAI-compatible API."""
    with errors_in_words():
        place, model = given["place"], given["model"]
        if place is not None and model is not None:
            raise ConfigError(f"the model is given twice: {place} and --model {model}", param="model")
        given = with_objectives(given | {"model": place or model})
        if given["download"] and given["model"] is not None:
            present_or_downloaded(given["model"], given["revision"])
        options = engine_options(given)
        workers_here = fleet_options(given)
        if workers_here.roles:
            check_start(options)
        if given["fit"]:
            fit = fitted(options, workers_here)
            options = fit.options
            print(f"--fit chooses {fit.words}", flush=True)
        need = check_memory(options, workers_here)
        _serve(options, workers_here, need, given["served_model_name"] or [model_name(Path(options.model))], given)


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """The engine's settings from the values of the options of ``serve``. Raises ConfigError."""
    path = model_path(given["model"], given["revision"])
    if given["cores"]:
        parse_cores(given["cores"])
    memory = given["kv_cache_memory"]
    slo = default_slo(given)
    return EngineOptions(
        model=str(path),
        model_impl=given["model_impl"],
        device=DeviceOptions(**picked(given, "device", "dtype", "threads", "cores", "instruction_set", "quantize")),
        memory=MemoryOptions(
            block_size=given["block_size"],
            kv_dtype=given["kv_dtype"],
            kv_cache_bytes=None if memory is None else parse_bytes(memory, "kv_cache_memory"),
            prefix_cache=given["prefix_cache"],
            **tier_memory(given),
        ),
        scheduler=scheduler_config(given["shape"] or DEFAULT_SHAPE, **picked(given, *SCHEDULER_OPTIONS)),
        slo=slo,
        max_model_len=given["max_model_len"],
        speculation=given["speculation"],
        tool_format=given["tool_format"],
        record=None if given["record"] is None else str(given["record"].resolve()),
        failures=failure_folder(given),
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
    shapes = (given["shape"] or DEFAULT_SHAPE,) if has_chosen else SHAPES
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
        picked(given | {"shape": given["shape"] or DEFAULT_SHAPE}, "shape", *SCHEDULER_OPTIONS),
    )


def _serve(
    options: EngineOptions, workers: FleetOptions, need: MemoryNeed, names: list[str], given: dict[str, Any]
) -> None:
    logging.basicConfig(level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s")
    from diptych.serving.answers.stream_journal import StreamJournal
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.api.start_screen import StartScreen, prompt_kind
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.fleet.fleet import Fleet
    from diptych.serving.fleet.launchers import launcher_of

    most = given["max_responses"]
    server = ServerOptions(
        **picked(given, "host", "port", "log_level", "responses"),
        served_model_name=names[0],
        also_served_as=tuple(names[1:]),
        keys=keyring(given),
        admin_key=admin_key(given),
        max_body_bytes=parse_bytes(given["max_body"], "max_body"),
        drain_timeout_s=given["drain_timeout"],
        http_policy=http_policy(given),
        batches=batch_options(given),
        max_responses_bytes=None if most is None else parse_bytes(most, "max_responses"),
    )
    chat_command = f"{own_command()} chat"
    with StartScreen(
        names[0], has_key=server.keys is not None, chat_command=chat_command, is_verbose=given["verbose"]
    ) as screen:
        screen.hint = busy_machine_hint(options, len(workers.roles))
        journal = None if given["survive_restart"] is None else StreamJournal(given["survive_restart"])
        llm = AsyncLLM(options, Fleet(options, workers, launcher_of(workers)), journal)
        screen.warnings = llm.tokenizer.template_complaints
        screen.kind = prompt_kind(llm.tokenizer, is_bundled=Path(options.model) == BUNDLED_MODEL)

        def on_ready(ready: Ready, url: str) -> None:
            fleet = llm.fleet
            roles = {number: fleet.role(number) for number in sorted(fleet.known)}
            screen.memory = memory_words(need, roles, fleet.known)
            screen.on_ready(ready, url)

        run_server(llm, server, screen.on_loading, on_ready)


def busy_machine_hint(options: EngineOptions, num_workers: int, processor: Processor | None = None) -> str:
    """What to know where one worker computes on all cores of this machine; empty elsewhere."""
    device = options.device
    if num_workers != 1 or device.threads or device.cores or device.device == "cuda" or GPU.exists():
        return ""
    if (processor or read_processor()).num_threads < 2:
        return ""
    return "It computes on every core, so programs beside it make each step slower; --threads N leaves cores to them."


@app.command(cls=Command, epilog=examples("generate"))
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: Annotated[Text, option(MODEL_HELP, MODEL)] = None,
    model_impl: Annotated[ModelImplName, option(shared_help.MODEL_IMPL, MODEL)] = "auto",
    max_tokens: Annotated[int, option("Most tokens of the answer.", MODEL)] = 128,
    temperature: Annotated[float, option(shared_help.TEMPERATURE, MODEL)] = 0.7,
    top_p: Annotated[float, option("Sample from the likeliest tokens of this total probability.", MODEL)] = 1.0,
    seed: Annotated[int | None, option("Seed that makes the output repeatable. Default: a random one.", MODEL)] = None,
    threads: Annotated[int | None, option(shared_help.THREADS, MACHINE)] = None,
    dtype: Annotated[DTypeName, option(shared_help.DTYPE, MODEL)] = "auto",
    instruction_set: Annotated[InstructionSetName, option(ISA_HELP, MACHINE, *KERNEL_NAMES)] = "auto",
    quantize: Annotated[QuantizeName, option(QUANTIZE_HELP, MODEL)] = "none",
    kv_dtype: Annotated[KVDTypeName, option(shared_help.KV_DTYPE, MODEL)] = "auto",
) -> None:
    """Continue one text in this process, without a server; the text appears as it is made."""
    from diptych.control.request import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    with errors_in_words():
        from diptych.serving.llm import LLM

        path = model_path(model)
        device = DeviceOptions(dtype=dtype, threads=threads, instruction_set=instruction_set, quantize=quantize)
        memory = MemoryOptions(kv_dtype=kv_dtype)
        check_start(EngineOptions(model=str(path), model_impl=model_impl, device=device, memory=memory))
        llm = LLM(
            path,
            model_impl=model_impl,
            dtype=dtype,
            threads=threads,
            instruction_set=instruction_set,
            quantize=quantize,
            kv_dtype=kv_dtype,
        )
        print(llm.ready.description, file=sys.stderr)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        out = sys.stdout if sys.stdout.isatty() else own(sys.stdout)  # a file or a program gets the text as it is
        out.write(text)
        for piece in llm.stream(text, sampling):
            out.write(piece)
            out.flush()
        out.write("\n")


@app.command(cls=Command, epilog=examples("version"))
def version() -> None:
    """Print the version, and whether the control code and the simulator are compiled."""
    print(f"diptych {__version__} (control code and simulator: {compiled_modules.what_runs()})")


for command in (
    advise,
    alerts,
    bench,
    calibrate,
    chat,
    diagnose,
    front,
    models,
    plan,
    pull,
    replay,
    simulate,
    worker,
    guide,
):
    app.command(cls=Command, epilog=examples(command.__name__))(command)
app.add_typer(batch, name="batch", epilog=examples("batch"))
app.add_typer(keys, name="keys", epilog=examples("keys"))
app.add_typer(cache, name="cache", epilog=examples("cache"))


def main() -> None:
    """The entry point of the ``diptych`` command."""
    app()
