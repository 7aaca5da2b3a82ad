"""A link between an agent and a front end that can lose a direction: bytes wait, no end is told."""

import asyncio
import contextlib


class StallingRelay:
    """Forwards connections to 127.0.0.1:``target``. up: towards the target; down: back. A direction that is not open
    delivers nothing until it is open again; connections that were made meanwhile are not answered."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()

    def heal(self) -> None:
        """Both directions deliver."""
        self.up.set()
        self.down.set()

    def cut(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> "StallingRelay":
        self.heal()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:  # what waits to be sent would keep it open
            end.transport.abort()
        await asyncio.sleep(0)

    async def _accept(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        self._ends.add(near_out)
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            near_out.close()
            return
        self._ends.add(far_out)
        ways = ((near_in, far_out, self.up), (far_in, near_out, self.down))
        for source, sink, is_open in ways:
            task = asyncio.create_task(self._forward(source, sink, is_open))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_open: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            try:
                while data := await source.read(1 << 16):
                    await is_open.wait()
                    sink.write(data)
                    await sink.drain()
            finally:
                sink.close()
