"""One name that may use the server, and how a key becomes what is kept of it."""

import re
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

from diptych.control.admission.quota import QuotaLimits
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits

OPTION_NAME = "api-key-"  # and a number: the names of keys that --api-key gives
OTHER = "other"  # what all names together are called for which there is no room
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
KEY_PREFIX = "sk-"  # of keys, by custom: what begins so is never printed
FRESH_PREFIX, FRESH_BYTES = f"{KEY_PREFIX}diptych-", 32
NO_LIMITS = QuotaLimits()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """digests: SHA-256 of each key that the name has; several while one replaces another. tenant: whose requests,
    responses and batches these are. is_admin: it opens /admin, too. sees_all: /metrics has the use of all names.
    expires_s: Unix seconds from which the keys are refused (None: never). models: by which names the model may be
    called (None: by any). is_option: given by --api-key, without a name of its own."""

    name: str
    digests: tuple[bytes, ...] = field(repr=False)
    tenant: str
    limits: QuotaLimits = NO_LIMITS
    is_admin: bool = False
    sees_all: bool = False
    expires_s: float | None = None
    models: tuple[str, ...] | None = None
    is_option: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the model may be called by this name."""
        return self.models is None or model in self.models


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. A key is drawn at random and long, so that no salt and no slow hash is needed: it cannot
    be found by trying."""
    return sha256(key).digest()


def tenant_of(key: str) -> str:
    """A name for the owner of an API key that does not give the key away."""
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def option_record(number: int, key: str) -> KeyRecord:
    """What a key of --api-key may do: everything but /admin. number: of the option, from 1. Raises ConfigError."""
    content = key.encode("utf-8", "surrogateescape")  # as Python reads the environment
    if not 1 <= len(content) <= edge_limits.KEY_CHARACTERS:
        message = f"api_key number {number} has {len(content)} bytes; it must have 1 to {edge_limits.KEY_CHARACTERS}"
        raise ConfigError(message, param="api_key")
    return KeyRecord(f"{OPTION_NAME}{number}", (digest_of(content),), tenant_of(key), sees_all=True, is_option=True)


def fresh_key() -> str:
    """A new key of 256 random bits. Its beginning is the one by which scanners for leaked secrets, and clients, know
    keys."""
    return FRESH_PREFIX + secrets.token_urlsafe(FRESH_BYTES)
