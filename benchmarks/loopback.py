"""What the benchmarks under load share: requests as bytes, the memory of a process, a crowd of plain connections."""

import errno
import json
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class Caller:
    """One connection with one request. fate: how it ended ("": it has not)."""

    request: bytes
    connection: socket.socket
    started_s: float
    sent: int = 0
    reply: bytes = b""  # its beginning
    first_byte_s: float = 0.0
    fate: str = ""


@dataclass
class Crowd:
    """Many connections at once from one process, each with one request; replies are read and thrown away but for their
    beginnings. keep: bytes of each reply that are kept."""

    address: tuple[str, int]
    keep: int = 1500
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
            has_reply = b"\r\n\r\n" in caller.reply and is_whole(caller.reply)
            self._end(caller, "answered" if has_reply else errno.errorcode.get(error.errno or 0, str(error)))

    def _read(self, caller: Caller) -> None:
        data = caller.connection.recv(65536)
        if not data:
            self._end(caller, "answered" if is_whole(caller.reply) else f"closed after {len(caller.reply)} bytes")
            return
        caller.first_byte_s = caller.first_byte_s or time.monotonic()
        if len(caller.reply) < self.keep:
            caller.reply += data[: self.keep - len(caller.reply)]
        if is_whole(caller.reply) or data.endswith(b"0\r\n\r\n"):
            self._end(caller, "answered")

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
        return sum(caller.reply.startswith(b"HTTP/1.1 200") for caller in self.callers.values())

    def fates(self) -> Counter[str]:
        """How calls ended, in words; see ``fate_of``."""
        return Counter(fate_of(caller.fate, caller.reply) for caller in self.over)


def is_whole(reply: bytes) -> bool:
    """Whether a reply with a Content-Length is all there."""
    head, mark, body = reply.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if mark and line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False


def fate_of(fate: str, reply: bytes) -> str:
    """The status of a reply with its code of error, and "without Retry-After" where a refusal lacks it; or what became
    of the connection."""
    if fate != "answered":
        return fate
    if not reply.startswith(b"HTTP/"):
        return "no HTTP"
    status = reply.partition(b" ")[2].partition(b" ")[0].decode(errors="replace")
    if status == "200":
        return status
    code = reply.partition(b'"code":"')[2].partition(b'"')[0].decode()
    has_advice = b"\r\nretry-after: " in reply.lower()
    return f"{status} {code}" + ("" if has_advice or status not in ("429", "503") else " without Retry-After")


def is_by_the_book(fate: str) -> bool:
    """Whether a call ended as documented: an answer, or a refusal that says when to come back."""
    return fate in ("200", "hung up") or (fate.startswith(("429 ", "503 ")) and "without" not in fate)
