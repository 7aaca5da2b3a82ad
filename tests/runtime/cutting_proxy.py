"""A link that can be slow, cut its connections, or damage bytes: between two connectors on one machine."""

import contextlib
import random
import socket
import threading
import time
from types import TracebackType

from diptych.runtime.transfer.stream.addresses import parse_address


class CuttingProxy:
    """Forwards connections to ``target``; what it does to them is drawn from a seeded generator.

    cuts: how many connections are cut, each after a random number of bytes (both directions together) up to
    ``cut_within``. flips: how many bytes to the target are damaged instead. bytes_per_s: how fast it forwards.
    """

    def __init__(
        self, target: str, seed: int = 0, cuts: int = 0, flips: int = 0, cut_within: int = 1, bytes_per_s: int = 0
    ) -> None:
        self._target = parse_address(target)
        self._random = random.Random(seed)
        self.cuts_left, self.flips_left = cuts, flips
        self._within = cut_within
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Cut all connections now."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "CuttingProxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _start(self, function: object, *arguments: object) -> None:
        assert callable(function)
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(self._target.family)
            try:
                far.connect(self._target.target)
            except OSError:
                near.close()
                continue
            if self._bytes_per_s:
                for sock in (near, far):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            self._sockets += [near, far]
            limit = None
            if self.cuts_left or self.flips_left:
                limit = [self._random.randrange(1, self._within)]
            self._start(self._forward, near, far, limit, True)
            self._start(self._forward, far, near, limit, False)

    def _forward(self, source: socket.socket, sink: socket.socket, limit: list[int] | None, to_target: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if self._bytes_per_s:
                    time.sleep(len(data) / self._bytes_per_s)
                if limit is not None and limit[0] < len(data):
                    if self.flips_left and to_target:
                        self.flips_left -= 1
                        damaged = bytearray(data)
                        damaged[limit[0]] ^= 0x10
                        data, limit = bytes(damaged), None
                    elif self.cuts_left:
                        self.cuts_left -= 1
                        sink.sendall(data[: limit[0]])
                        break
                if limit is not None:
                    limit[0] = max(0, limit[0] - len(data))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
