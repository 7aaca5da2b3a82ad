"""``diptych worker --join``: a worker on this host for a front end on another (or this) one."""

import asyncio
import logging
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diptych.base.stop_signals import stop_signals
from diptych.cli import shared_help
from diptych.cli.error_messages import errors_in_words
from diptych.cli.http_options import LogLevel
from diptych.cli.options import KERNEL_NAMES, Text, Whole, model_path, option
from diptych.control.config import ModelImplName
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.runtime.transfer.stream.addresses import parse_address
from diptych.serving.link.engine_options import (
    DeviceName,
    DeviceOptions,
    InstructionSetName,
    parse_bytes,
    parse_cores,
)

if TYPE_CHECKING:
    from diptych.serving.join.worker_agent import AgentOptions

FRONT, PLACE, MACHINE = "Front end", "Place", "Machine"
JOIN_HELP = "Address where the front end takes workers (its --listen-workers), HOST:PORT."
KEY_HELP = "File with the key that the front end has, too: 32 to 4096 bytes."
GRACE_HELP = "Seconds to keep the model and its cache while there is no front end."
KV_HELP = "ADDRESS:PORT for KV from other workers. Default: the address that reaches the front end, any port."


def worker(
    join: Annotated[str, option(JOIN_HELP, FRONT)],
    key_file: Annotated[Path, option(KEY_HELP, FRONT)],
    model: Annotated[Text, option("The front end's model, on this host. Default: the bundled model.", FRONT)] = None,
    model_impl: Annotated[ModelImplName, option("What computes the model, as at the front end.", FRONT)] = "auto",
    grace: Annotated[float, option(GRACE_HELP, FRONT)] = 300.0,
    drain_timeout: Annotated[float, option(shared_help.DRAIN_TIMEOUT, FRONT)] = 30.0,
    log_level: Annotated[LogLevel, option("Least severe messages that the worker logs.", FRONT)] = "warning",
    role: Annotated[Role, option("Role of the worker; it can change while it serves.", PLACE)] = "both",
    host_name: Annotated[Text, option("Name of this host. Default: the system's.", PLACE)] = None,
    rack: Annotated[str, option("Name of the host's rack, for the choice of workers. Default: none.", PLACE)] = "",
    kv_listen: Annotated[Text, option(KV_HELP, PLACE)] = None,
    device: Annotated[DeviceName, option(shared_help.DEVICE, MACHINE)] = "auto",
    threads: Annotated[Whole, option(shared_help.THREADS, MACHINE)] = None,
    cores: Annotated[Text, option(shared_help.CORES, MACHINE)] = None,
    instruction_set: Annotated[
        InstructionSetName, option("Kernels that compute; auto: the best of this host.", MACHINE, *KERNEL_NAMES)
    ] = "auto",
    agent: Annotated[
        Text, option("Identity of 32 hexadecimal digits, from what starts the worker. Default: a random one.", FRONT)
    ] = None,
    end_with_stdin: Annotated[bool, option("End at once when the standard input is closed.", FRONT)] = False,
    kv_cache_memory: Annotated[Text, option("KV cache, such as 2GiB. Default: the front end's.", MACHINE)] = None,
) -> None:
    """Join a front end as one of its workers."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    with errors_in_words():
        from diptych.serving.fleet.join_options import parse_host_port
        from diptych.serving.join.worker_agent import AgentOptions
        from diptych.tls.shared_key import read_key_file

        if cores:
            parse_cores(cores)
        for name, value in (("grace", grace), ("drain_timeout", drain_timeout)):
            if not value >= 0:
                raise ConfigError(f"{name} is {value}; it must not be negative", param=name)
        if agent is not None and not re.fullmatch("[0-9a-f]{32}", agent):
            raise ConfigError(f"agent is {agent!r}; it must have 32 hexadecimal digits", param="agent")
        host, port = parse_host_port(join, "join", may_be_name=True)
        options = AgentOptions(
            host=host,
            port=port,
            key=read_key_file(key_file),
            model=str(model_path(model)),
            model_impl=model_impl,
            role=role,
            name=host_name or socket.gethostname(),
            rack=rack,
            device=DeviceOptions(device=device, threads=threads, cores=cores, instruction_set=instruction_set),
            kv_cache_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory, "kv_cache_memory"),
            kv_listen="" if kv_listen is None else str(parse_address(f"tcp://{kv_listen}")),
            num_cores=len(os.sched_getaffinity(0)),
            grace_s=grace,
            drain_s=drain_timeout,
            agent=bytes.fromhex(agent or ""),
            ends_with_stdin=end_with_stdin,
        )
        asyncio.run(run_agent(options))


async def run_agent(options: "AgentOptions") -> None:
    """Be a worker until a stop signal (a second one ends it at once), or until it is removed. Raises ConfigError
    when the front end refuses it for good."""
    from diptych.serving.failures.watched_tasks import WatchedTasks
    from diptych.serving.join.worker_agent import WorkerAgent

    agent = WorkerAgent(options)
    leaving = WatchedTasks(agent.fail)
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, lambda: leaving.start(agent.leave(), "leaving"))
    await agent.run()
