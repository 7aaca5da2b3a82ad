"""File descriptors of the front end: how many it may open, and which are kept from connections.

A new connection gets the lowest free descriptor. One whose descriptor is among the last of the process's limit is not
served, so that files, pipes and restarted workers always find some.
"""

import errno
import logging
import os
import resource

from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.fleet.worker_process import WORKER_DESCRIPTORS

logger = logging.getLogger(__name__)

LEAST_REFUSALS = 8  # connections that are open only to be refused, where there are few descriptors
REFUSALS_SHARE = 32  # else: one descriptor in REFUSALS_SHARE
FREE_DESCRIPTORS = 8  # besides, for files, pipes and workers
SERVER_DESCRIPTORS = 16  # of the event loop, the signals, the listening socket and the shared memory
MOST_DESCRIPTORS = 2**20
FEW_CONNECTIONS = 2048  # said at the start when there is room for fewer
SHORTAGE_PAUSE_S = 0.1  # until connections are accepted again, when there was no descriptor for one


def descriptor_limit() -> int:
    """How many files this process may open at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(num_workers: int) -> int:
    """Raise the limit of open files of this process and its workers as far as allowed, up to a million. Returns the
    limit. Raises ConfigError when the server could take no connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = descriptor_limit()
    num_own = len(os.listdir("/proc/self/fd")) + SERVER_DESCRIPTORS + num_workers * WORKER_DESCRIPTORS
    least = num_own + spare_descriptors(limit) + 1
    if limit < least:
        raise ConfigError(f"this process may open {limit} files (ulimit -n); this server needs at least {least}")
    if (num_connections := limit - least + 1) < FEW_CONNECTIONS:
        logger.warning(
            "this process may open %d files (ulimit -n): about %d connections at a time, and more are refused with 503 "
            "(too_many_connections)",
            limit,
            num_connections,
        )
    return limit


def num_refusals(limit: int) -> int:
    """Connections that may be open only to be refused. limit: of the process's file descriptors."""
    return min(max(LEAST_REFUSALS, limit // REFUSALS_SHARE), edge_limits.REFUSED_CONNECTIONS)


def spare_descriptors(limit: int) -> int:
    """Descriptors that no served connection gets. limit: of the process's file descriptors."""
    return num_refusals(limit) + FREE_DESCRIPTORS


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether a connection could not be accepted because this process or the system has no room for one."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
