"""Addresses of connectors: "tcp://127.0.0.1:41234", "tcp://[::1]:41234", "unix:///directory/name".

Names of hosts are not looked up: a lookup would wait for a name server.
"""

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from diptych.control.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where to connect to."""

    family: int
    target: tuple[str, int] | str

    def __str__(self) -> str:
        if isinstance(self.target, str):
            return f"unix://{self.target}"
        host, port = self.target
        return f"tcp://[{host}]:{port}" if self.family == socket.AF_INET6 else f"tcp://{host}:{port}"


def parse_address(text: str) -> SocketAddress:
    """The address that a text names. Raises ConfigError."""
    try:
        url = urlsplit(text)
        if url.scheme == "unix" and not url.netloc and len(url.path) > 1:
            if len(os.fsencode(url.path)) > MAX_UNIX_PATH_BYTES:
                raise ConfigError(
                    f"address {text!r} is too long: a socket's path has at most {MAX_UNIX_PATH_BYTES} bytes",
                    param="address",
                )
            return SocketAddress(socket.AF_UNIX, url.path)
        if url.scheme == "tcp" and url.hostname and url.port is not None and not url.path:
            host = ipaddress.ip_address("127.0.0.1" if url.hostname == "localhost" else url.hostname)
            return SocketAddress(socket.AF_INET6 if host.version == 6 else socket.AF_INET, (str(host), url.port))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"address {text!r}: {error}", param="address") from error
    raise ConfigError(f"address {text!r} is neither tcp://host:port nor unix:///path", param="address")


def listen(where: SocketAddress) -> tuple[socket.socket, SocketAddress]:
    """A listening socket and its address. Raises ConfigError when the address is taken, or a path's directory is open
    to others."""
    sock = socket.socket(where.family, socket.SOCK_STREAM)
    try:
        if isinstance(where.target, str):
            _make_way(Path(where.target))
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where.target)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        bound = where.target if isinstance(where.target, str) else sock.getsockname()[:2]
        return sock, SocketAddress(where.family, bound)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {error}", param="listen") from error
    except ConfigError:
        sock.close()
        raise


def _make_way(path: Path) -> None:
    """Remove the socket that a killed worker has left behind, in a directory that is this user's alone."""
    info = path.parent.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"the directory of {path} must be this user's alone (mode 0700)", param="listen")
    if path.is_socket():
        path.unlink()
