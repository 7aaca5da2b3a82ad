"""The file of API keys: TOML that people edit, and programs replace while the server runs.

    [[key]]
    name = "web"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    requests_per_minute = 600

Owns its format, its errors and who else may read it. No message has a key, the hash of one, or what may be one.
"""

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from diptych.base.byte_size import size_words
from diptych.control.admission.quota import MOST, QuotaLimits
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.keys.key_record import KEY_PREFIX, NAME, OPTION_NAME, OTHER, KeyRecord, digest_of

PARAM = "api_keys"
LIMIT_FIELDS = tuple(found.name for found in fields(QuotaLimits))
FIELDS = ("name", "key", "sha256", "tenant", "admin", "metrics", "expires", "models", *LIMIT_FIELDS)
SHOWN_CHARACTERS = 24  # of a text that is wrong; a longer one may be a key in the wrong place
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_VISIBLE = re.compile(r"[!-~]+")  # what can stand in a header, without spaces
_WORD = re.compile(r"[a-z_]{1,24}")


def read_secret_file(path: Path, param: str, most_bytes: int) -> bytes:
    """A file of secrets. Raises ConfigError, also when every user of the host can read it, or change it: those of its
    group may, since that is how Kubernetes hands a Secret to a container (fsGroup, defaultMode 0440)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{param} is {path}, which is no regular file", param=param)
            mode = stat.S_IMODE(status.st_mode)
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                what = "read" if mode & stat.S_IROTH else "changed"
                message = (
                    f"{param} is {path}, which can be {what} by every user of this host (mode {mode:04o}): chmod 600 "
                    "it; of a Secret in Kubernetes, set defaultMode: 0440"
                )
                raise ConfigError(message, param=param)
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{param} is {path}, which cannot be read: {error.strerror}", param=param) from None
    if len(content) > most_bytes:
        raise ConfigError(f"{param} is {path}, which is larger than {size_words(most_bytes)}, the limit", param=param)
    return content


def read_secret(path: Path, param: str) -> str:
    """The one secret in a file, without white space around it. Raises ConfigError."""
    secret = read_secret_file(path, param, edge_limits.SECRET_BYTES).decode("utf-8", "replace").strip()
    if not _VISIBLE.fullmatch(secret):
        what = "has characters that cannot stand in a header" if secret else "is empty"
        raise ConfigError(f"{param} is {path}, which {what}", param=param)
    return secret


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The entries of a file, in its order. Raises ConfigError that names file, entry, field, value and limit."""
    content = read_secret_file(path, PARAM, edge_limits.KEY_FILE_BYTES)
    try:
        tables = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8", param=PARAM) from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is no TOML: {where(error)}", param=PARAM) from None
    entries = tables.pop("key", [])
    if tables:
        raise ConfigError(f"{path} has the unknown field {_field(sorted(tables)[0])}; only [[key]] tables", param=PARAM)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: key must be tables, [[key]]", param=PARAM)
    if not 1 <= len(entries) <= edge_limits.KEY_ENTRIES:
        message = f"{path} has {len(entries)} [[key]] tables; between 1 and {edge_limits.KEY_ENTRIES}"
        raise ConfigError(message, param=PARAM)
    records = [_Entry(f"{path}, entry {number}", entry).record() for number, entry in enumerate(entries, 1)]
    check_distinct(records, str(path))
    return tuple(records)


def check_distinct(records: Sequence[KeyRecord], place: str) -> None:
    """Raise ConfigError when two entries have a name or a key in common."""
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for record in records:
        if record.name in names:
            raise ConfigError(f"{place}: there are two entries of the name {record.name!r}", param=PARAM)
        names.add(record.name)
        for digest in record.digests:
            if digest in owners:
                message = f"{place}: {owners[digest]!r} and {record.name!r} have the same key"
                raise ConfigError(message, param=PARAM)
            owners[digest] = record.name


def check_name(field: str, value: object, place: str = "") -> str:
    """A name or a tenant. Raises ConfigError. place: begins the message."""
    if isinstance(value, str) and value.startswith(KEY_PREFIX):
        message = f"{place}{field} begins like a key ({KEY_PREFIX}): it is shown in metrics and logs"
    elif not isinstance(value, str) or not NAME.fullmatch(value):
        message = f"{place}{field} is {_shown(value)}; it must be 1 to 64 letters, digits and ._@-"
    elif field == "name" and (value == OTHER or value.startswith(OPTION_NAME)):
        message = f"{place}name is {value!r}, which Diptych uses itself; choose another"
    else:
        return value
    raise ConfigError(message, param=field)


class _Entry:
    """One table. place: file and number of the entry, for messages."""

    def __init__(self, place: str, given: Mapping[str, Any]) -> None:
        self._place = place
        self._given = given

    def record(self) -> KeyRecord:
        """Raises ConfigError."""
        for field in self._given:
            if field not in FIELDS:
                raise self._error(f"has the unknown field {_field(field)}; one of {', '.join(FIELDS)}")
        name = self._name("name")
        if name is None:
            raise self._error("has no name")
        self._place += f" ({name})"
        return KeyRecord(
            name,
            self._digests(),
            self._name("tenant") or name,
            QuotaLimits(**{field: self._limit(field) for field in LIMIT_FIELDS}),
            is_admin=self._flag("admin"),
            sees_all=self._flag("metrics") or self._flag("admin"),
            expires_s=self._expiry(),
            models=self._models(),
        )

    def _name(self, field: str) -> str | None:
        value = self._given.get(field)
        return None if value is None else check_name(field, value, f"{self._place}: ")

    def _digests(self) -> tuple[bytes, ...]:
        keys, hashes = self._texts("key"), self._texts("sha256")
        count = len(keys) + len(hashes)
        if not 1 <= count <= edge_limits.KEYS_OF_NAME:
            message = f"has {count} keys; between 1 and {edge_limits.KEYS_OF_NAME}, in the fields key and sha256"
            raise self._error(message)
        for key in keys:
            if not edge_limits.KEY_LEAST <= len(key) <= edge_limits.KEY_CHARACTERS or not _VISIBLE.fullmatch(key):
                raise self._error(
                    f"key has {len(key)} characters; it must have {edge_limits.KEY_LEAST} to "
                    f"{edge_limits.KEY_CHARACTERS}, of ASCII and without spaces (diptych keys new makes one)"
                )
        for text in hashes:
            if not _DIGEST.fullmatch(text):
                raise self._error(f"sha256 has {len(text)} characters; it must be 64 digits from 0 to f")
        return (*(digest_of(key.encode()) for key in keys), *map(bytes.fromhex, hashes))

    def _texts(self, field: str) -> list[str]:
        value = self._given.get(field, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self._error(f"{field} must be a text or a list of texts")
        return found

    def _flag(self, field: str) -> bool:
        value = self._given.get(field, False)
        if not isinstance(value, bool):
            raise self._error(f"{field} is {_shown(value)}; it must be true or false")
        return value

    def _limit(self, field: str) -> int | None:
        value = self._given.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST):
            raise self._error(f"{field} is {_shown(value)}; it must be a whole number in [1, {MOST}]")
        return value

    def _expiry(self) -> float | None:
        value = self._given.get("expires")
        if value is None:
            return None
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.timestamp()
        if isinstance(value, date) and not isinstance(value, datetime):
            return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
        raise self._error(f"expires is {_shown(value)}; it must be a time such as 2027-01-31T18:00:00Z, or a date")

    def _models(self) -> tuple[str, ...] | None:
        value = self._given.get("models")
        if value is None:
            return None
        is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
        if not is_list or not 1 <= len(value) <= edge_limits.MODELS_OF_NAME:
            raise self._error(f"models must be a list of 1 to {edge_limits.MODELS_OF_NAME} names")
        return tuple(value)

    def _error(self, words: str) -> ConfigError:
        return ConfigError(f"{self._place}: {words}", param=PARAM)


def _shown(value: object) -> str:
    """A wrong value for a message, unless it may be a key in the wrong place."""
    if isinstance(value, str):
        is_safe = len(value) <= SHOWN_CHARACTERS and not value.startswith(KEY_PREFIX)
        return repr(value) if is_safe else f"a text of {len(value)} characters"
    if isinstance(value, bool | float | datetime | date):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
    return "a list" if isinstance(value, list) else "a table" if isinstance(value, dict) else type(value).__name__


def _field(name: str) -> str:
    """The name of an unknown field, unless it may be a key in the wrong place."""
    return repr(name) if _WORD.fullmatch(name) else "(not shown: it may be a key)"


def where(error: Exception) -> str:
    """Where a file is no TOML. What the parser says besides may quote the file."""
    found = re.search(r"at (line \d+, column \d+|end of document)", str(error))
    return f"an error at {found[1]}" if found else "it cannot be parsed"
