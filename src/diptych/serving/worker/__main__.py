"""``python -m diptych.serving.worker DIRECTORY``: a worker process, started by the supervisor."""

import sys

from diptych.runtime.device.garbage import without_collections

with without_collections():
    from diptych.serving.worker.worker_loop import main

sys.exit(main())
