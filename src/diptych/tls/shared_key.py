"""The key that all processes of one server share, and the TLS connections between those that know it.

Each role of a connection (say, front end and worker) has a certificate that is derived from the key. Each end presents
its own and accepts the other role's alone, so that both prove that they know the key, and one secret is enough; a
message of one role is never taken for one of the other. TLS 1.3 gives forward secrecy: who learns the key later cannot
read what was recorded before. All who know the key are trusted alike: it does not tell workers apart.
"""

import hmac
import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from diptych.control.errors import ConfigError
from diptych.tls.certificate import make_certificate

MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 4096

TlsRole = Literal["front end", "worker", "KV receiver", "KV sender"]


@dataclass(frozen=True, slots=True)
class SharedKey:
    """The secret."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not MIN_KEY_BYTES <= len(self.secret) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"the key has {len(self.secret)} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES}", param="key_file"
            )

    def derived(self, purpose: str) -> bytes:
        """32 bytes for one purpose, from which neither the key nor those of other purposes can be computed."""
        return hmac.new(self.secret, b"diptych " + purpose.encode(), "sha256").digest()

    def server_tls(self, own: TlsRole, other: TlsRole) -> ssl.SSLContext:
        """The TLS context of connections that are accepted: this end has role ``own``, only ``other`` is let in."""
        return self._context(ssl.PROTOCOL_TLS_SERVER, own, other)

    def client_tls(self, own: TlsRole, other: TlsRole) -> ssl.SSLContext:
        """The TLS context of connections that are dialled."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, own, other)

    def _context(self, protocol: int, own: TlsRole, other: TlsRole) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate says what the other end knows, not where it is
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=make_certificate(self.derived(other), other).certificate)
        mine = make_certificate(self.derived(own), own)
        with open(os.memfd_create("key", os.MFD_CLOEXEC), "wb", buffering=0) as file:  # load_cert_chain takes a path
            file.write((mine.certificate + mine.private_key).encode("ascii"))
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no connection is resumed
        return context


def read_key_file(path: Path) -> SharedKey:
    """The key in this file, without white space around it. Raises ConfigError, also for a file that every user of the
    host can read."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            secret = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"key_file {path} cannot be read: {error.strerror}", param="key_file") from error
    if mode & stat.S_IROTH:
        raise ConfigError(f"key_file {path} can be read by every user of this host: chmod 600 it", param="key_file")
    return SharedKey(secret)
