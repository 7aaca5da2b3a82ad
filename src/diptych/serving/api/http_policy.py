"""HTTP policy: CORS, allowed hosts, access log, strictness: the settings of the layers around the routes."""

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from diptych.control.errors import ConfigError

ANY_ORIGIN = "*"
LOCAL_HOSTS = ("localhost", "ip6-localhost", "host.docker.internal")
_ORIGIN = re.compile(r"https?://[^/?#@\s]+|null|\*")
_ADDRESS = re.compile(r"[\d.]+|\[[\da-fA-F:.%]+\]")


@dataclass(frozen=True, slots=True)
class HttpPolicy:
    """cors_origins: origins whose pages may use the API ("*": all). allowed_hosts: names under which the server may be
    called; none given: any, unless ``only_local``, and then this machine's. access_log: a file, "-" for standard error
    (None: none). is_strict: unknown fields are refused."""

    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    only_local: bool = False
    access_log: str | None = None
    is_strict: bool = False

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin is {origin!r}; expected an origin such as https://example.org:8443 without a path, "
                    "or *",
                    param="cors_origin",
                )

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Hosts that CrossOrigin lets through; None: any."""
        return self.allowed_hosts if self.allowed_hosts or self.only_local else None


def is_loopback(host: str) -> bool:
    """Whether an address, with or without the brackets of a URL, is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_name(host: str) -> str:
    """The name in a Host header, without its port and in lower case."""
    return re.sub(r":\d*$", "", host).rstrip(".").lower()


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is one that no page of another origin can be called by: an address, this machine's own
    names, or one of ``names`` (in lower case). A request without one is no browser's."""
    name = host_name(host)
    is_local = name in LOCAL_HOSTS or name.endswith(".localhost")
    return not name or _ADDRESS.fullmatch(name) is not None or is_local or name in names
