"""Ends this program when its standard input is closed: by its parent, or by the end of its parent, whatever ends it."""

import os
import signal
import threading


def end_with_stdin() -> None:
    """End the program when its standard input ends, as if it were asked to stop (SIGTERM). What is written to the
    standard input is thrown away."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()
