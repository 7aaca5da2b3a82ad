"""The signals that ask a process of Diptych to end in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a terminal that is closed sends to its programs: the last one only where the
    parent of this process does not want it ignored (``nohup``)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def leave_terminal_to_parent() -> None:
    """A terminal sends SIGINT and SIGHUP to all processes that were started from it: this one, which its parent ends
    when it has drained, takes no notice of them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
