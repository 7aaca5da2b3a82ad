"""Whether workers of other hosts may join, and where: a part of the settings of a fleet."""

import ipaddress
from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.tls.shared_key import SharedKey


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """listen: "HOST:PORT" for workers (port 0: any free one). key: what they must know. transfer_plain: KV travels
    unencrypted. Names of hosts are not looked up: HOST is an address."""

    listen: str
    key: SharedKey
    transfer_plain: bool = False

    def __post_init__(self) -> None:
        parse_host_port(self.listen, "listen_workers")

    @property
    def host(self) -> str:
        """The address to listen on."""
        return parse_host_port(self.listen, "listen_workers")[0]

    @property
    def port(self) -> int:
        """The port to listen on."""
        return parse_host_port(self.listen, "listen_workers")[1]

    @property
    def is_everywhere(self) -> bool:
        """Whether ``host`` stands for all addresses of this host."""
        return ipaddress.ip_address(self.host).is_unspecified

    @property
    def kv_listen(self) -> str:
        """Where the KV connectors of this host's own workers listen, so that those of other hosts reach them."""
        return f"tcp://[{self.host}]:0" if ":" in self.host else f"tcp://{self.host}:0"


def parse_host_port(text: str, param: str, *, may_be_name: bool = False) -> tuple[str, int]:
    """The address (or name) and the port of "HOST:PORT" or "[HOST]:PORT". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" and not may_be_name else host
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    try:
        number = int(port)
        if not colon or not host or not 0 <= number <= 65535 or (":" in host and not is_bracketed):
            raise ValueError
        if not may_be_name:
            ipaddress.ip_address(host)
    except ValueError:
        wanted = "HOST:PORT" if may_be_name else "an address and a port, such as 192.0.2.1:7000 or [2001:db8::1]:7000"
        raise ConfigError(f"{param} is {text!r}; expected {wanted}", param=param) from None
    return host, number
