"""``python -m diptych.web.panel_worker``: the process that renders pages and computes panels, one call after another.

Owns the answers to the calls of panel_wire, and the streams that are being read. It ends when the process that started
it is gone. Must never print to standard output: the replies go there.
"""

import gzip
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from diptych.control.errors import ConfigError, DiptychError
from diptych.web.panel_wire import MOST_STREAMS, Call, Reply, receive, refusal, send

GZIP_LEVEL, GZIP_LEAST = 5, 1000
NICENESS = 19


class PanelWorker:
    """Answers calls. Streams are numbered from 1."""

    def __init__(self) -> None:
        self._streams: dict[int, Iterator[dict[str, Any]]] = {}
        self._last = 0

    def answer(self, call: Call) -> Reply:
        """One call. A wrong query is 400 with a message, a fault in a panel 500 with its traceback on standard error;
        neither ends the process."""
        try:
            return self._answer(call)
        except DiptychError as error:
            status = 400 if isinstance(error, ConfigError) else error.status
            return refusal(status, error.message, error.param)
        except Exception:
            traceback.print_exc()
            return refusal(500, "This panel failed; the server's log has the details.")

    def _answer(self, call: Call) -> Reply:
        from diptych.web.chapters import BY_NAME, page  # not before the process has its priority: it takes a while
        from diptych.web.panels.choose import ChooseQuery, steps
        from diptych.web.panels.query import read

        if call.kind == "page":
            return Reply(body=page(call.name, live="live" in call.query).encode())
        if call.kind == "panel":
            chapter = BY_NAME[call.name]
            assert chapter.panel is not None
            body = msgspec.json.encode(chapter.panel(read(chapter.query, call.query)))
            if call.packs and len(body) >= GZIP_LEAST:
                return Reply(body=gzip.compress(body, GZIP_LEVEL, mtime=0), is_packed=True)
            return Reply(body=body)
        if call.kind == "diagnosis":
            from diptych.diagnosis.live_diagnosis import live_diagnosis

            return Reply(body=live_diagnosis(call.body))
        if call.kind == "engines":
            from diptych.diagnosis.live_diagnosis import engines_diagnosis

            return Reply(body=engines_diagnosis(call.body))
        if call.kind == "begin":
            events = steps(read(ChooseQuery, call.query))
            first = next(events)
            self._last += 1
            self._streams[self._last] = events
            if len(self._streams) > MOST_STREAMS:
                del self._streams[min(self._streams)]
            return Reply(body=msgspec.json.encode(first), stream=self._last)
        if call.kind == "next" and call.stream in self._streams:
            event = next(self._streams[call.stream], None)
            if event is not None:
                return Reply(body=msgspec.json.encode(event))
        self._streams.pop(call.stream, None)
        return Reply()


def use_idle_cores() -> None:
    """Run only when no other process wants the core: on Linux SCHED_IDLE, elsewhere the lowest priority."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(NICENESS)


def main() -> None:
    """Serve the pipes until the other end closes them. The argument ``background``: see ``use_idle_cores``."""
    if sys.argv[1:] == ["background"]:
        use_idle_cores()
    worker = PanelWorker()
    while True:
        try:
            send(sys.stdout.buffer, worker.answer(receive(sys.stdin.buffer, Call)))
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the reader is gone; nothing is to be flushed


if __name__ == "__main__":
    main()
