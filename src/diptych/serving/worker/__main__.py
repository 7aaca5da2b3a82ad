"""``python -m diptych.serving.worker DIRECTORY``: a worker process, started by the supervisor."""

import sys

from diptych.serving.worker.worker_loop import main

sys.exit(main())
