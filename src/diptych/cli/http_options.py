"""The options of a server's door, for ``diptych serve`` and ``diptych front``: where it listens, and to whom."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from diptych.cli import shared_help
from diptych.cli.options import Strings, Text, option, with_objectives
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, Slo
from diptych.serving.api.http_policy import HttpPolicy, is_loopback
from diptych.serving.keys.key_file import read_secret
from diptych.serving.keys.keyring import Keyring

SERVER = "Server"
API_KEY_HELP = (
    "Accept this key (Authorization: Bearer KEY); each key is a tenant, tenants share fairly. Repeatable. "
    "Default: no key is asked for."
)
KEYS_HELP = (
    "TOML file of named keys with tenants, limits and quotas; read again when it changes (diptych keys new). "
    "Default: none."
)
ADMIN_FILE_HELP = (
    "File with the key of --admin-key, which every user of the machine can read in the arguments. Default: none."
)
ADMIN_KEY_HELP = "Ask for this key at /admin. Default: only programs on this machine are answered there."
CORS_HELP = "Origin whose web pages may use the API, such as https://example.org (*: all). Repeatable. Default: none."
HOST_HELP = (
    "Accept this Host header besides IP addresses and localhost. Repeatable. Default: any; on 127.0.0.1 without "
    "keys, none."
)
LOG_HELP = (
    "Append a JSON line per request to this file (-: standard error), without prompts and answers. Default: none."
)
LogLevel = Literal["debug", "info", "warning", "error"]


class HttpOptions:
    """Their names, types, help and defaults (see ``takes``)."""

    host: Annotated[str, option(shared_help.LISTEN_ADDRESS, SERVER)] = "127.0.0.1"
    port: Annotated[int, option(shared_help.PORT, SERVER)] = 8000
    api_key: Annotated[Strings, option(API_KEY_HELP, SERVER, envvar="DIPTYCH_API_KEY")] = None
    api_keys: Annotated[Path | None, option(KEYS_HELP, SERVER)] = None
    admin_key: Annotated[Text, option(ADMIN_KEY_HELP, SERVER, envvar="DIPTYCH_ADMIN_KEY")] = None
    admin_key_file: Annotated[Path | None, option(ADMIN_FILE_HELP, SERVER)] = None
    max_body: Annotated[str, option("Largest request body; more gets 413.", SERVER)] = "16MiB"
    cors_origin: Annotated[Strings, option(CORS_HELP, SERVER)] = None
    allowed_host: Annotated[Strings, option(HOST_HELP, SERVER)] = None
    access_log: Annotated[Text, option(LOG_HELP, SERVER)] = None
    drain_timeout: Annotated[float, option(shared_help.DRAIN_TIMEOUT, SERVER)] = 30.0
    log_level: Annotated[LogLevel, option("Least severe messages that the server logs.", SERVER)] = "warning"
    record: Annotated[
        Path | None, option("Record all decisions to this file, for diptych replay. Default: not recorded.", SERVER)
    ] = None


def http_policy(given: Mapping[str, Any]) -> HttpPolicy:
    """How the server behaves towards clients. Raises ConfigError."""
    return HttpPolicy(
        cors_origins=tuple(given["cors_origin"] or ()),
        allowed_hosts=tuple(given["allowed_host"] or ()),
        only_local=is_loopback(given["host"]) and not given["api_key"] and given["api_keys"] is None,
        access_log=given["access_log"],
        is_strict=given.get("strict", False),
    )


def keyring(given: Mapping[str, Any]) -> Keyring | None:
    """The keys that clients may have; None: none is asked for. Raises ConfigError."""
    if not given["api_key"] and given["api_keys"] is None:
        return None
    return Keyring(given["api_key"] or (), given["api_keys"])


def admin_key(given: Mapping[str, Any]) -> str | None:
    """The key of /admin besides those of the file of keys. Raises ConfigError."""
    if given["admin_key_file"] is None:
        return given["admin_key"] or None
    if given["admin_key"]:
        raise ConfigError("admin_key and admin_key_file are two places of one key; give one", param="admin_key")
    return read_secret(given["admin_key_file"], "admin_key_file")


def failure_folder(given: Mapping[str, Any]) -> str:
    """Where a core that fails leaves its recording: beside the access log, or else beside the recording; "": neither is
    a file."""
    log = given["access_log"] if given["access_log"] != "-" else None
    beside = log or given["record"]
    return "" if beside is None else str(Path(beside).resolve().parent)


def default_slo(given: Mapping[str, Any]) -> Slo:
    """The objectives of requests that name none. Raises ConfigError."""
    return Slo(*(_nanoseconds(name, given[name]) for name in ("ttft_slo_ms", "tpot_slo_ms")))


def asked_slo(slo: str | None, ttft_slo_ms: float | None, tpot_slo_ms: float | None) -> Slo | None:
    """The objectives that the options of a command give; None: they give none. Raises ConfigError."""
    given = default_slo(with_objectives({"slo": slo, "ttft_slo_ms": ttft_slo_ms, "tpot_slo_ms": tpot_slo_ms}))
    return None if given == Slo() else given


def _nanoseconds(name: str, milliseconds: float | None) -> int | None:
    if milliseconds is not None and not milliseconds > 0:
        raise ConfigError(f"{name} is {milliseconds:g}; it must be more than 0", param=name)
    return None if milliseconds is None else int(milliseconds * NS_PER_MS)
