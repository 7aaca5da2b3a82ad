"""``diptych worker`` with a make-believe model: what Python runs on the hosts of a cluster manager in tests."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_worker import fake_command

from diptych.cli.main import main
from diptych.serving.join import worker_agent

PROGRAM = (__file__, "worker")

if __name__ == "__main__":
    worker_agent.AgentOptions = partial(worker_agent.AgentOptions, command=fake_command())  # type: ignore[assignment, misc]
    main()
