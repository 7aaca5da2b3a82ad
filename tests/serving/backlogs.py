"""How many connections wait at a listening socket until they are accepted."""

import errno
import select
import socket
import sys

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="each kernel has its own way to count a backlog")


def check_backlog(listening: socket.socket, backlog: int) -> None:
    """As many connections wait as the backlog, and those beyond come later. Closes the socket."""
    listening.settimeout(30)
    address = listening.getsockname()
    waiting = [socket.create_connection(address, 30) for _ in range(backlog + 1)]  # Linux takes one more
    beyond = socket.socket()
    beyond.setblocking(False)
    assert beyond.connect_ex(address) == errno.EINPROGRESS
    assert not select.select([], [beyond], [], 0)[1]
    accepted = [listening.accept()[0] for _ in range(backlog + 2)]  # its client has tried again
    assert {taken.getpeername() for taken in accepted} == {each.getsockname() for each in [*waiting, beyond]}
    for each in [*waiting, *accepted, beyond, listening]:
        each.close()
