"""How the server behaves towards clients besides answering them: the settings of the layers around the routes."""

import re
from dataclasses import dataclass

from diptych.control.errors import ConfigError

LOOPBACK = ("127.", "localhost", "::1", "[::1]")
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"https?://[^/?#@\s]+|null|\*")


@dataclass(frozen=True, slots=True)
class Manners:
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
        """See CrossOrigin."""
        return self.allowed_hosts if self.allowed_hosts or self.only_local else None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    return host.startswith(LOOPBACK)
