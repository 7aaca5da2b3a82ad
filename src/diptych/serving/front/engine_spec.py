"""Which engines stand behind a front, as its command line or its TOML file names them.

    --engine vllm=http://10.0.0.1:8000,role=prefill,kv_events=tcp://10.0.0.1:5557

    [[engine]]
    kind = "vllm"
    url = "http://10.0.0.1:8000"
    role = "prefill"

Owns the refusal of settings that contradict each other. Connects to nothing.
"""

import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, Role
from diptych.serving.keys.key_file import read_secret, where

EngineKind = Literal["vllm", "sglang", "llamacpp", "openai"]
KINDS: tuple[EngineKind, ...] = get_args(EngineKind)
MAX_ENGINES = 1024
MAX_RANKS = 1024  # of data parallelism
TEXT_BLOCK, EVENT_BLOCK = 128, 16  # tokens per block, where prompts are hashed as text, and where engines say theirs
AUTO = "auto"
_ZMQ_ADDRESS = re.compile(r"tcp://\S+:\d+|ipc://\S+")
_RANKS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
logger = logging.getLogger(__name__)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_FIELD_NAME = re.compile(r"[a-z_]{1,24}")
_COUNTED = ("kv_events", "kv_replay", "step_events")  # addresses whose ports count up with the ranks of an engine


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. url: of its HTTP server, without a path. role: what it is used for. api_key_env: the environment
    variable with the key that the engine asks for; api_key_file: the file with it ("": none). kv_events, kv_replay:
    where it publishes what enters and leaves its prefix cache, and where it repeats that ("": not used; kv_events
    "auto": a vLLM is asked for both). step_events: where Diptych's plugin in vLLM publishes its steps, or SGLang its
    forward-pass metrics ("": nowhere). bootstrap: host:port of the bootstrap server of an SGLang prefill engine ("":
    the host of the url, port 8998). model: of those that it serves ("": its first one). rank: of data parallelism, of a
    vLLM each of whose ranks is an engine of its own here, with its own cache (None: the server chooses one for each
    request)."""

    kind: EngineKind
    url: str
    role: Role = "both"
    api_key_env: str = ""
    kv_events: str = ""
    kv_replay: str = ""
    step_events: str = ""
    bootstrap: str = ""
    model: str = ""
    rank: int | None = None
    api_key_file: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"engine kind is {self.kind!r}; one of {', '.join(KINDS)}", param="engine")
        parts = urlsplit(self.url)
        is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
        try:
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid or not is_plain:
            raise ConfigError(
                f"engine url is {without_secrets(self.url)!r}; it must be http://HOST:PORT or https://HOST:PORT "
                "without a path (a key goes into api_key_file or api_key_env)",
                param="engine",
            )
        if self.role not in ROLES:
            raise ConfigError(f"role of {self.url} is {self.role!r}; one of {', '.join(ROLES)}", param="role")
        self._check_events()
        if self.rank is not None and (self.kind != "vllm" or not 0 <= self.rank < MAX_RANKS):
            raise ConfigError(
                f"rank of {self.url} is {self.rank}; it must be in [0, {MAX_RANKS - 1}], and of a vllm", param="rank"
            )
        self._check_key()

    def _check_key(self) -> None:
        name = self.api_key_env
        if name and self.api_key_file:
            raise ConfigError(f"engine {self.url} has api_key_env and api_key_file; give one", param="api_key_env")
        if name and name not in os.environ:
            shown = f"is {name}" if _VARIABLE.fullmatch(name) else "is no name of a variable, and not shown here"
            raise ConfigError(
                f"api_key_env of {self.url} {shown}: there is no such environment variable", param="api_key_env"
            )
        if self.api_key_file:
            read_secret(Path(self.api_key_file), "api_key_file")

    def _check_events(self) -> None:
        for name in ("kv_events", "kv_replay", "step_events"):
            address = getattr(self, name)
            if name == "kv_events" and address == AUTO and self.kind == "vllm":
                continue
            if name != "step_events" and address and self.kind not in ("vllm", "sglang"):
                raise ConfigError(f"{name} of {self.url}: {self.kind} publishes no KV events", param=name)
            if address and not _ZMQ_ADDRESS.fullmatch(address):
                raise ConfigError(f"{name} of {self.url} is {address!r}; such as tcp://HOST:5557", param=name)
        if self.step_events and self.kind not in ("vllm", "sglang"):
            raise ConfigError(f"step_events of {self.url}: {self.kind} reports no steps", param="step_events")
        if self.kv_replay and self.kv_events in ("", AUTO):
            raise ConfigError(f"kv_replay of {self.url} has no effect without kv_events=ADDRESS", param="kv_replay")
        if self.role != "both" and self.kind not in ("vllm", "sglang"):
            raise ConfigError(
                f"role of {self.url} is {self.role}, and {self.kind} has no protocol to hand a prompt over; role=both",
                param="role",
            )
        if self.bootstrap and (self.kind != "sglang" or self.role != "prefill"):
            raise ConfigError(f"bootstrap of {self.url} is for kind sglang with role prefill", param="bootstrap")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return parts.hostname, parts.port or (443 if self.is_tls else 80)

    @property
    def is_tls(self) -> bool:
        """Whether it speaks HTTPS."""
        return self.url.startswith("https:")

    @property
    def headers(self) -> dict[str, str]:
        """Sent with every request, with the key as it is now. Raises ConfigError for a file that cannot be read."""
        headers = {"User-Agent": "diptych"}
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_file:
            key = read_secret(Path(self.api_key_file), "api_key_file")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if self.rank is not None:
            headers["X-data-parallel-rank"] = str(self.rank)
        return headers

    def headers_again(self, last: Mapping[str, str]) -> Mapping[str, str]:
        """The same, for an engine that was lost and may have another key by now; last: where that cannot be read."""
        try:
            return self.headers
        except ConfigError as error:
            logger.error("%s: %s", self.name, error.message)
            return last

    @property
    def name(self) -> str:
        """The engine's name for people."""
        host, port = self.address
        return f"{self.kind} {host}:{port}" + ("" if self.rank is None else f" rank {self.rank}")


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """engines: in the order of roles prefill, decode, both. block_size: tokens per block of the prefix index.
    bytes_per_token: by which prompts are counted where they are not tokenised. assumed_s: how long an engine is
    believed to hold a prompt where no events say it. probe_s: between two looks at an engine's gauges. silence_s:
    without a byte from an engine that has requests, after which it is asked for a sign of life. first_byte_s: that an
    engine may take for a prompt. idle_s: between two tokens of a stream. recovery: whether a stream that an engine lost
    goes on at another."""

    engines: tuple[EngineSpec, ...]
    block_size: int = TEXT_BLOCK
    bytes_per_token: float = 4.0
    assumed_s: float = 600.0
    probe_s: float = 0.5
    silence_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 60.0
    recovery: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.engines) <= MAX_ENGINES:
            raise ConfigError(
                f"{len(self.engines)} engines; between 1 and {MAX_ENGINES} (--engine kind=URL)", param="engine"
            )
        ranks: dict[str, list[int | None]] = {}
        for engine in self.engines:
            of_server = ranks.setdefault(engine.url.rstrip("/"), [])
            if engine.rank in of_server:
                raise ConfigError(f"engine {engine.name} is given twice", param="engine")
            of_server.append(engine.rank)
            if len(of_server) > 1 and None in of_server:
                raise ConfigError(f"engine {engine.url} is given with a rank and without one", param="rank")
        if not 1 <= self.block_size <= 4096:
            raise ConfigError(f"block_size is {self.block_size}; it must be in [1, 4096]", param="block_size")
        for name, least, most in (
            ("probe_s", 0.05, 60.0),
            ("silence_s", 0.1, 600.0),
            ("first_byte_s", 0.1, 86_400.0),
            ("idle_s", 0.1, 86_400.0),
            ("bytes_per_token", 0.5, 32.0),
            ("assumed_s", 1.0, 86_400.0),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be in [{least}, {most}]", param=name)
        kinds = {engine.kind for engine in self.engines if engine.role != "both"}
        if len(kinds) > 1:
            raise ConfigError(
                f"engines with the roles prefill and decode are of the kinds {', '.join(sorted(kinds))}; KV is handed "
                "over between engines of one kind only",
                param="role",
            )

    @property
    def reads_events(self) -> bool:
        """Whether an engine publishes its KV events: then prompts are tokenised, and blocks are those of tokens."""
        return any(engine.kv_events for engine in self.engines)

    @property
    def hands_off(self) -> bool:
        """Whether some engines have a role of their own."""
        return any(engine.role != "both" for engine in self.engines)


def without_secrets(text: str) -> str:
    """An address for a message, without what may be a key in it: a user with a password, and all behind a ? or #."""
    return re.sub(r"[?#].*", "?...", re.sub(r"(?<=//)[^/?#]*@", "...@", text))


def parse_engine(text: str) -> EngineSpec:
    """The one engine of ``kind=URL[,name=value ...]``. Raises ConfigError."""
    first, *others = parse_engines(text)
    if others:
        raise ConfigError(f"engine {first.url} has {len(others) + 1} ranks; one of them is wanted here", param="rank")
    return first


def parse_engines(text: str) -> list[EngineSpec]:
    """The engines of ``kind=URL[,name=value ...]``: one, or the ranks of one server. Raises ConfigError."""
    head, *rest = text.split(",")
    kind, separator, url = head.partition("=")
    if not separator:
        raise ConfigError(
            f"engine is {without_secrets(text)!r}; expected KIND=URL, such as vllm=http://HOST:8000", param="engine"
        )
    given: dict[str, Any] = {"kind": kind.strip(), "url": url.strip()}
    for number, part in enumerate(rest, 2):
        name, separator, value = part.partition("=")
        if not separator or not value:
            shown = repr(part) if _FIELD_NAME.fullmatch(name.strip()) else f"a part (number {number}), not shown here"
            raise ConfigError(f"engine {without_secrets(url)} has {shown}; expected name=value", param="engine")
        given[name.strip()] = value.strip()
    return engines_of(given)


def engines_of(given: dict[str, Any]) -> list[EngineSpec]:
    """The engines of a table: one, or one for each of its ranks ("0-7"; the ports of its addresses are those of the
    first, and count up, as vLLM's do). Raises ConfigError for unknown names and wrong types."""
    known = {found.name for found in fields(EngineSpec)}
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"engine {without_secrets(str(given.get('url', '')))} has the unknown field "
            f"{unknown[0] if _FIELD_NAME.fullmatch(unknown[0]) else '(not shown here)'!r}; one of "
            f"{', '.join(sorted(known))}",
            param="engine",
        )
    for name in ("kind", "url"):
        if name not in given:
            raise ConfigError(f"an engine has no {name}", param="engine")
    rank = given.pop("rank", None)
    for name, value in given.items():
        if not isinstance(value, str):
            url = without_secrets(str(given["url"]))
            raise ConfigError(f"{name} of engine {url} is {value!r}; it must be text", param=name)
    spec = EngineSpec(**given)
    if rank is None:
        return [spec]
    found = _RANKS.fullmatch(str(rank)) if isinstance(rank, str | int) and not isinstance(rank, bool) else None
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ConfigError(f"rank of engine {spec.url} is {rank!r}; a number, or several as 0-7", param="rank")
    return [_ranked(spec, first, rank) for rank in range(first, last + 1)]


def _ranked(spec: EngineSpec, first: int, rank: int) -> EngineSpec:
    changed = {name: address for name in _COUNTED if (address := getattr(spec, name)).startswith("tcp://")}
    for name, address in changed.items():
        host, _, port = address.rpartition(":")
        changed[name] = f"{host}:{int(port) + rank - first}"
    if (steps := spec.step_events).startswith("ipc://"):
        head = steps.removesuffix(f".{first}")
        changed["step_events"] = f"{head}.{rank}" if rank else head
    return replace(spec, rank=rank, **changed)


def read_engines(path: Path) -> list[EngineSpec]:
    """The engines of a TOML file. Raises ConfigError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="engines") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {where(error)}", param="engines") from None
    tables = content.pop("engine", [])
    if content:
        raise ConfigError(f"{path} has {sorted(content)[0]!r}; only [[engine]] tables", param="engines")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: engine must be tables, [[engine]]", param="engines")
    return [engine for table in tables for engine in engines_of(table)]


def in_order(engines: Sequence[EngineSpec]) -> tuple[EngineSpec, ...]:
    """The engines in the order in which a fleet numbers its workers: by role; within a role as they are given."""
    return tuple(sorted(engines, key=lambda engine: ROLES.index(engine.role)))
