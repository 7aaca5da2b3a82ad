"""What the benchmarks under load share: requests as bytes, the memory of a process, a crowd of plain connections."""

import errno
import json
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

MIB = 2**20


def http_request(
    method: str, path: str, body: Any = None, *headers: str, version: str = "1.1", host: str = "localhost"
) -> bytes:
    """A request as bytes. body: JSON, or bytes as they are. headers: whole lines besides Host and Content-Length."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", f"Host: {host}", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join((*lines, "", "")).encode() + data


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def memory_of(pid: int) -> dict[str, float]:
    """Resident and proportional memory of a process, in MiB: RSS counts shared pages whole, PSS divides them."""
    found = {"rss": 0.0, "pss": 0.0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            found[name.lower()] = int(rest.split()[0]) / 1024
    return found


def listen_drops() -> dict[str, int]:
    """How often this network namespace's kernel found the queue of a listening socket full, and dropped a connection
    there, since its start."""
    lines = Path("/proc/net/netstat").read_text().splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        if names.startswith("TcpExt:"):
            found = dict(zip(names.split()[1:], map(int, values.split()[1:]), strict=True))
            return {name: found[name] for name in ("ListenOverflows", "ListenDrops")}
    return {}


@dataclass
class Reply:
    """One reply, as it comes in. beginning: its first KEPT bytes. num_bytes: all that came."""

    KEPT: ClassVar[int] = 8192  # with the code behind a message of full length
    LAST_CHUNK: ClassVar[bytes] = b"\r\n0\r\n\r\n"  # in no text of this server: JSON and events hold no CR LF

    beginning: bytes = b""
    num_bytes: int = 0
    _tail: bytes = b""
    _end: int | None = None  # bytes up to its end, where its head says so
    _is_chunked: bool = False

    def feed(self, data: bytes) -> None:
        """What came next."""
        has_head = self.has_head
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-len(self.LAST_CHUNK) :]
        self.beginning += data[: max(0, self.KEPT - len(self.beginning))]
        if not has_head and self.has_head:
            head, _, _ = self.beginning.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name == b"content-length":
                    self._end = len(head) + 4 + int(value)
                self._is_chunked |= name == b"transfer-encoding"

    @property
    def has_head(self) -> bool:
        """Whether its status and headers are there."""
        return b"\r\n\r\n" in self.beginning

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there, by its own word."""
        if self._end is not None:
            return self.num_bytes >= self._end
        return self._is_chunked and self._tail == self.LAST_CHUNK

    def fate(self, otherwise: str, *, is_closed: bool = False) -> str:
        """The status of a whole reply with its code of error, and "without Retry-After" where a refusal lacks it;
        "partial" with the status of another; what happened to the connection where nothing came. is_closed: the
        server ended the connection in order."""
        if not self.num_bytes:
            return otherwise
        if not self.beginning.startswith(b"HTTP/"):
            return "no HTTP"
        ends_with_connection = is_closed and self.has_head and self._end is None and not self._is_chunked
        if not (self.is_whole or ends_with_connection):
            return f"partial {self.status}: {otherwise}"
        if self.status == "200":
            return self.status
        code = self.beginning.partition(b'"code":"')[2].partition(b'"')[0].decode(errors="replace")
        has_advice = b"\r\nretry-after: " in self.beginning.lower()
        lacks = "" if has_advice or self.status not in ("429", "503") else " without Retry-After"
        return f"{self.status} {code}".rstrip() + lacks

    @property
    def status(self) -> str:
        """The status, three digits, or what stands in its place."""
        return self.beginning.partition(b" ")[2].partition(b" ")[0].decode(errors="replace")


@dataclass
class Caller:
    """One connection with one request. fate: how it ended ("": it has not)."""

    request: bytes
    connection: socket.socket
    started_s: float
    sent: int = 0
    reply: Reply = field(default_factory=Reply)
    first_byte_s: float = 0.0
    fate: str = ""


@dataclass
class Crowd:
    """Many connections at once from one process, each with one request; replies are read and thrown away but for their
    beginnings."""

    address: tuple[str, int]
    callers: dict[int, Caller] = field(default_factory=dict)  # by descriptor, those that are open
    over: list[Caller] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._poll = select.epoll()

    def call(self, requests: Iterable[bytes]) -> None:
        """Connect all, without waiting for any."""
        for request in requests:
            connection = socket.socket()
            connection.setblocking(False)
            caller = Caller(request, connection, time.monotonic())
            code = connection.connect_ex(self.address)
            if code not in (0, errno.EINPROGRESS):
                caller.fate = f"connect: {errno.errorcode[code]}"
                self.over.append(caller)
                connection.close()
                continue
            self.callers[connection.fileno()] = caller
            self._poll.register(connection, select.EPOLLIN | select.EPOLLOUT)

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Read and write until the condition holds (True), or the time is over."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                return False
            for descriptor, events in self._poll.poll(0.1, 1024):
                self._serve(self.callers[descriptor], events)
        return True

    def _serve(self, caller: Caller, events: int) -> None:
        try:
            if events & select.EPOLLOUT and caller.sent < len(caller.request):
                caller.sent += caller.connection.send(caller.request[caller.sent :])
                if caller.sent == len(caller.request):
                    self._poll.modify(caller.connection, select.EPOLLIN)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(caller)
        except BlockingIOError:
            return
        except OSError as error:
            read_rest(caller.connection, caller.reply)
            self._end(caller, caller.reply.fate(name_of(error)))

    def _read(self, caller: Caller) -> None:
        data = caller.connection.recv(65536)
        caller.first_byte_s = caller.first_byte_s or time.monotonic()
        caller.reply.feed(data)
        if caller.reply.is_whole or not data:
            self._end(caller, caller.reply.fate("closed by the server", is_closed=True))

    def _end(self, caller: Caller, fate: str) -> None:
        caller.fate = fate
        self.over.append(caller)
        del self.callers[caller.connection.fileno()]
        self._poll.unregister(caller.connection)
        caller.connection.close()

    def hang_up(self) -> None:
        """Close what is open."""
        for caller in list(self.callers.values()):
            self._end(caller, "hung up")

    def count_open(self) -> int:
        """Streams that have begun: the head of a 200 is there, and the reply is not over."""
        return sum(caller.reply.beginning.startswith(b"HTTP/1.1 200") for caller in self.callers.values())

    def fates(self) -> Counter[str]:
        """How calls ended, in words; see ``Reply.fate``."""
        return Counter(caller.fate for caller in self.over)


def read_rest(connection: socket.socket, reply: Reply) -> None:
    """What came before a connection was reset: a refusal is read though the rest of the request could not be sent."""
    with suppress(OSError):
        while data := connection.recv(65536):
            reply.feed(data)


def name_of(error: OSError) -> str:
    """Such as ECONNRESET."""
    return errno.errorcode.get(error.errno or 0, str(error))


def is_by_the_book(fate: str) -> bool:
    """Whether a call ended as documented: an answer, or a refusal that says when to come back."""
    return fate in ("200", "hung up") or (fate.startswith(("429 ", "503 ")) and "without" not in fate)
