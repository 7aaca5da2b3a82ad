"""Where a server listens, from its URL."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from diptych.control.errors import ConfigError


def host_header(host: str, port: int) -> str:
    """The value of the Host header: an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens; ``base``: the path before /v1."""

    host: str
    port: int
    is_tls: bool
    base: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """``http://host:port``, with or without /v1. Raises ConfigError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"url is {url!r}; its port is no number", param="url") from None
        if parts.username is not None or parts.password is not None:
            raise ConfigError("url has a user or a password in it; give a key with --api-key", param="url")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"url is {url!r}; expected http://host:port", param="url")
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base)

    @property
    def netloc(self) -> str:
        """Host and port, for the Host header."""
        return host_header(self.host, self.port)
