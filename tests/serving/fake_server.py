"""The real HTTP server in front of the make-believe worker. ``python fake_server.py '{"step_ms": 1, "serve": {...}}'``.

Keys of "serve": fields of ServerOptions, of "scheduler": of SchedulerConfig, of "fleet": of FleetOptions,
of "cluster": options of cluster_config. "batch_dir": as of diptych serve. The rest: fake_worker's flags.
Prints the address when it is ready.
"""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from diptych.runtime.device.garbage import without_collections

with without_collections():  # until it serves, as a real one
    import msgspec
    from fake_worker import fake_command

    from diptych.control.cluster.cluster_config import cluster_config
    from diptych.control.config import SchedulerConfig
    from diptych.serving.api.server import ServerOptions, run_server
    from diptych.serving.async_llm import AsyncLLM
    from diptych.serving.batches.batch_service import BatchOptions
    from diptych.serving.fleet.fleet import Fleet
    from diptych.serving.fleet.fleet_options import FleetOptions
    from diptych.serving.fleet.supervisor import LocalLauncher
    from diptych.serving.link.engine_options import EngineOptions


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    settings = json.loads(sys.argv[1])
    scheduler = msgspec.convert(settings.pop("scheduler", {}), SchedulerConfig)
    folder = settings.pop("batch_dir", None)
    batches = None if folder is None else BatchOptions(Path(folder))
    server = replace(ServerOptions(port=0, served_model_name="fake", batches=batches), **settings.pop("serve", {}))
    cluster = cluster_config(**settings.pop("cluster", {}))
    workers = FleetOptions(**settings.pop("fleet", {}), cluster=cluster)
    options = EngineOptions(scheduler=scheduler)
    llm = AsyncLLM(options, Fleet(options, workers, LocalLauncher(fake_command(**settings))))
    run_server(llm, server, on_ready=lambda ready, url: print("served at", url, flush=True))


if __name__ == "__main__":
    main()
