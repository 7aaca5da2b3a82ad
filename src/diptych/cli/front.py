"""``diptych front``: engines that others run, behind our edge, router, metrics and page."""

import logging
from pathlib import Path
from typing import Annotated, Any

from diptych.cli import shared_help
from diptych.cli.batch_options import BatchTaking, batch_options
from diptych.cli.command_line import own_command
from diptych.cli.error_messages import errors_in_words
from diptych.cli.http_options import HttpOptions, admin_key, default_slo, failure_folder, http_policy, keyring
from diptych.cli.options import Number, Strings, Text, Whole, option, picked, takes, with_objectives
from diptych.control.cluster.cluster_config import OnFailure, cluster_config
from diptych.control.router.routing import RoutingName
from diptych.serving.front.engine_spec import EVENT_BLOCK, TEXT_BLOCK, FrontOptions, parse_engines, read_engines
from diptych.serving.link.engine_options import parse_bytes

ENGINES, ROUTING, OBJECTIVES = "Engines", "Routing and queue", "Objectives"
ENGINE_HELP = (
    "Engine, KIND=URL[,NAME=VALUE ...]; kinds: vllm, sglang, llamacpp, openai. Repeatable. Default: those of --engines."
)
FILE_HELP = 'TOML file of engines: a table "engine" for each, with kind, url and the same names. Default: none.'
BLOCK_HELP = "Tokens per block of the prefix index. Default: 16 with KV events, else 128."
BYTES_HELP = "Bytes of prompt per token, where prompts are not tokenised."
ASSUMED_HELP = "Seconds for which an engine is believed to hold a prompt where no KV events say it."
SILENCE_HELP = "Seconds without a byte from a busy engine, after which it is probed."
RECOVERY_HELP = "Continue a stream at another engine when its own is lost."
NAME_HELP = "Name for clients; repeat it for more. Default: the engines' own."
IN_FLIGHT_HELP = "Requests per engine whose prefill is not done; more wait in the queue (0: none wait)."
FRONT_IN_FLIGHT = 256
CLUSTER_OPTIONS = ("routing", "on_failure", "max_prefills_in_flight_per_worker", "max_queued", "max_queued_per_key")


class FrontEngines:
    """The engines, and how they are looked after (see ``takes``)."""

    engine: Annotated[Strings, option(ENGINE_HELP, ENGINES)] = None
    engines: Annotated[Path | None, option(FILE_HELP, ENGINES)] = None
    served_model_name: Annotated[Strings, option(NAME_HELP, ENGINES)] = None
    probe_interval: Annotated[float, option("Seconds between two reads of an engine's metrics.", ENGINES)] = 0.5
    silence: Annotated[float, option(SILENCE_HELP, ENGINES)] = 5.0
    first_byte_timeout: Annotated[float, option("Seconds that an engine may take until the first token.", ENGINES)] = (
        600.0
    )
    idle_timeout: Annotated[float, option("Seconds between two tokens of a stream.", ENGINES)] = 60.0
    recovery: Annotated[bool, option(RECOVERY_HELP, ENGINES)] = True


class RoutingOptions:
    """How requests find their engine."""

    routing: Annotated[RoutingName | None, option("How the router chooses engines. Default: kv_aware.", ROUTING)] = None
    block_size: Annotated[Whole, option(BLOCK_HELP, ROUTING)] = None
    bytes_per_token: Annotated[float, option(BYTES_HELP, ROUTING)] = 4.0
    assumed: Annotated[float, option(ASSUMED_HELP, ROUTING)] = 600.0
    on_failure: Annotated[
        OnFailure | None, option("What becomes of the requests of a lost engine. Default: retry.", ROUTING)
    ] = None
    max_prefills_in_flight_per_worker: Annotated[int, option(IN_FLIGHT_HELP, ROUTING)] = FRONT_IN_FLIGHT
    max_queued: Annotated[
        Whole, option("Requests that may wait in the queue; more get 429. Default: 4096.", ROUTING)
    ] = None
    max_queued_per_key: Annotated[Whole, option(shared_help.MAX_QUEUED_PER_KEY, ROUTING)] = None
    slo: Annotated[Text, option(shared_help.SLO, OBJECTIVES)] = None
    ttft_slo_ms: Annotated[Number, option(shared_help.TTFT_SLO_MS, OBJECTIVES)] = None
    tpot_slo_ms: Annotated[Number, option(shared_help.TPOT_SLO_MS, OBJECTIVES)] = None


@takes(FrontEngines, HttpOptions, BatchTaking, RoutingOptions)
def front(given: dict[str, Any]) -> None:
    """Put Diptych in front of engines that run already: vLLM, SGLang, llama.cpp, any OpenAI-compatible server."""
    with errors_in_words():
        given = with_objectives(given)
        _front(front_options(given), given)


def front_options(given: dict[str, Any]) -> FrontOptions:
    """The engines, and how they are looked after. Raises ConfigError."""
    engines = [engine for text in given["engine"] or () for engine in parse_engines(text)]
    if given["engines"] is not None:
        engines += read_engines(given["engines"])
    usual = EVENT_BLOCK if any(engine.kv_events for engine in engines) else TEXT_BLOCK
    return FrontOptions(
        tuple(engines),
        **picked(given, "bytes_per_token", "recovery"),
        block_size=given["block_size"] or usual,
        assumed_s=given["assumed"],
        probe_s=given["probe_interval"],
        silence_s=given["silence"],
        first_byte_s=given["first_byte_timeout"],
        idle_s=given["idle_timeout"],
    )


def _front(options: FrontOptions, given: dict[str, Any]) -> None:
    logging.basicConfig(level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s")
    from diptych.serving.api.front_app import OWN_NAME, build_front_app
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.api.start_screen import StartScreen
    from diptych.serving.batches.batch_service import BatchService
    from diptych.serving.front.external_fleet import ExternalFleet
    from diptych.serving.front.served_engines import EngineFront

    slo = default_slo(given)
    cluster = cluster_config(**picked(given, *CLUSTER_OPTIONS))
    fleet = ExternalFleet(options, cluster, slo, given["record"], failures=failure_folder(given))
    end = EngineFront(fleet)
    keys, own_admin_key = keyring(given), admin_key(given)
    max_body = parse_bytes(given["max_body"], "max_body")
    rules = http_policy(given)
    name, *more_names = given["served_model_name"] or ("",)
    server = ServerOptions(
        **picked(given, "host", "port", "log_level"), served_model_name=name, drain_timeout_s=given["drain_timeout"]
    )

    taken = batch_options(given)
    batches = None if taken is None else BatchService(taken)

    def make_app() -> Any:
        return build_front_app(
            end,
            name,
            also_served_as=more_names,
            keys=keys,
            admin_key=own_admin_key,
            max_body_bytes=max_body,
            http_policy=rules,
            batches=batches,
        )

    chat_command = f"{own_command()} chat"
    with StartScreen(name or OWN_NAME, has_key=keys is not None, chat_command=chat_command) as screen:
        screen.kind = "chat"
        run_server(end, server, screen.on_loading, screen.on_ready, make_app)
