"""Ways between the parts of a fleet that can be cut at a named point of the protocol, in one direction or both.

A proxy stands in the middle of TLS, since it knows the key, and passes whole messages on. Before it does, it shows the
names of the points that a message is; whoever watches may cut the way, and then that message is the first that is lost.
A way that is cut is as a network that is: what is sent waits, no end is seen, and nobody can connect.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable

import msgspec

from diptych.runtime.transfer.stream.encrypted_socket import kv_encryption
from diptych.runtime.transfer.stream.frames import HEADER_BYTES, LAST_OF_CHUNK, Kind, parse_header
from diptych.runtime.transfer.stream.handshake import GREETING_BYTES, HELLO_BYTES, WELCOME_BYTES, format_bytes_of
from diptych.serving.join.join_messages import RELAYED, read_from_agent, read_from_door
from diptych.serving.link.messages import (
    Orders,
    Ready,
    StepReport,
    decode_from_frontend,
    decode_from_worker,
    encode,
)
from diptych.tls.shared_key import SharedKey

UP, DOWN = "up", "down"  # towards the end that was dialled; back
LENGTH_BYTES = 4
Names = frozenset[str]
Message = tuple[bytes, Names]  # as it is passed on; its points
Messages = AsyncIterator[Message]


class Way:
    """Between two ends. watch: called with the names of each message and its direction, before it is passed on."""

    def __init__(self) -> None:
        self.watch: Callable[[Names, str], None] = lambda names, direction: None
        self._is_open = {direction: asyncio.Event() for direction in (UP, DOWN)}
        self.heal()

    def lose(self, *directions: str) -> None:
        """Nothing arrives in these directions from now on."""
        for direction in directions:
            self._is_open[direction].clear()

    def heal(self) -> None:
        """Everything arrives, also what was sent meanwhile."""
        for is_open in self._is_open.values():
            is_open.set()

    async def opened(self, *directions: str) -> None:
        """Wait until what is sent in these directions arrives."""
        while not all(self._is_open[direction].is_set() for direction in directions):
            for direction in directions:
                await self._is_open[direction].wait()


class Proxy:
    """Accepts at 127.0.0.1:``port``, and dials 127.0.0.1:``target``. Subclasses say how bytes become messages."""

    def __init__(self, way: Way, target: int, accepting: ssl.SSLContext, dialling: ssl.SSLContext) -> None:
        self.way = way
        self._target = target
        self._tls = accepting, dialling
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._start(self._accept(), self._tasks)

    def cut(self) -> None:
        """End all connections."""
        for task in self._connections:
            task.cancel()

    async def close(self) -> None:
        """End."""
        tasks = [*self._tasks, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def messages_up(self, reader: asyncio.StreamReader) -> Messages:
        """What comes from the end that has dialled."""
        raise NotImplementedError

    def messages_down(self, reader: asyncio.StreamReader) -> Messages:
        """What comes from the other."""
        raise NotImplementedError

    def _start(self, work: "asyncio._CoroutineLike[None]", tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            self._start(self._connect(sock), self._connections)

    async def _connect(self, sock: socket.socket) -> None:
        loop, (accepting, dialling) = asyncio.get_running_loop(), self._tls
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), sock:
            await self.way.opened(UP, DOWN)  # a connection takes both directions
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=accepting)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target, ssl=dialling)
            except OSError:
                transport.abort()
                raise
            up = self._forward(self.messages_up(reader), far_writer, UP)
            down = self._forward(self.messages_down(far_reader), writer, DOWN)
            try:
                await asyncio.gather(up, down)
            finally:
                for each in (writer, far_writer):
                    each.transport.abort()

    async def _forward(self, messages: Messages, sink: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async for data, names in messages:
                self.way.watch(names, direction)
                await self.way.opened(direction)
                sink.write(data)
                await sink.drain()
        await self.way.opened(direction)  # the end is seen when it arrives
        sink.close()


class ControlProxy(Proxy):
    """Between an agent and the door of a front end. kv_port: where KV for this worker is to go instead of its own
    address, for the port of that."""

    def __init__(self, way: Way, target: int, key: SharedKey, kv_port: Callable[[int], int]) -> None:
        super().__init__(way, target, key.server_tls("front end", "worker"), key.client_tls("worker", "front end"))
        self._kv_port = kv_port

    async def messages_up(self, reader: asyncio.StreamReader) -> Messages:
        while True:
            frame = await _frame(reader)
            if frame[:1] != RELAYED:
                name = type(read_from_agent(frame[1:])).__name__
                yield _packed(frame), frozenset((name,))
                continue
            message = decode_from_worker(frame[1:])
            names = {type(message).__name__}
            if isinstance(message, Ready) and message.address:
                host, _, port = message.address.rpartition(":")
                message = msgspec.structs.replace(message, address=f"{host}:{self._kv_port(int(port))}")
                frame = RELAYED + encode(message)
            elif isinstance(message, StepReport):
                names |= {name for name, _ in message.events}
                if message.tokens is not None and "FirstToken" not in names:
                    names.add("DecodeStep")
            yield _packed(frame), frozenset(names)

    async def messages_down(self, reader: asyncio.StreamReader) -> Messages:
        while True:
            frame = await _frame(reader)
            if frame[:1] != RELAYED:
                yield _packed(frame), frozenset((type(read_from_door(frame[1:])).__name__,))
                continue
            message = decode_from_frontend(frame[1:])
            orders = [order.command[0] for order in message.orders] if isinstance(message, Orders) else []
            yield _packed(frame), frozenset((type(message).__name__, *orders))


class KVProxy(Proxy):
    """Between two KV connectors. hold_s: how long each piece of KV is on its way."""

    def __init__(self, way: Way, target: int, key: SharedKey) -> None:
        encryption = kv_encryption(key.derived("KV"))
        super().__init__(way, target, encryption.receiver, encryption.sender)
        self.hold_s = 0.0
        self._committed = (0, 0)  # the newest commit: its transfer, and the acknowledgement that it is waiting for

    async def messages_up(self, reader: asyncio.StreamReader) -> Messages:
        """Pass on the messages of the sender."""
        hello = await reader.readexactly(HELLO_BYTES)
        yield hello + await reader.readexactly(format_bytes_of(hello)), frozenset(("KV hello",))
        is_first = True
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            frame = parse_header(header)
            body = await reader.readexactly(frame.body_bytes)
            name = frame.kind.name
            if frame.kind is Kind.OPEN:
                is_first = True
            elif frame.kind is Kind.DATA:
                name = "KV first chunk" if is_first else "KV later chunk"
                is_first = is_first and not frame.flags & LAST_OF_CHUNK
                await asyncio.sleep(self.hold_s)
            elif frame.kind is Kind.COMMIT:
                self._committed = frame.number, frame.sequence + 1
            yield header + body, frozenset((name if name.startswith("KV") else f"KV {name.lower()}",))

    async def messages_down(self, reader: asyncio.StreamReader) -> Messages:
        """Pass on the messages of the receiver."""
        yield await reader.readexactly(GREETING_BYTES), frozenset(("KV greeting",))
        welcome = await reader.readexactly(WELCOME_BYTES)
        yield welcome + await reader.readexactly(format_bytes_of(welcome)), frozenset(("KV welcome",))
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            frame = parse_header(header)
            body = await reader.readexactly(frame.body_bytes)
            name = "acknowledgement" if frame.kind is Kind.ACK else frame.kind.name.lower()
            if frame.kind is Kind.ACK and self._committed == (frame.number, frame.sequence):
                name = "last acknowledgement"
            yield header + body, frozenset((f"KV {name}",))


async def _frame(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return await reader.readexactly(length)


def _packed(frame: bytes) -> bytes:
    return len(frame).to_bytes(LENGTH_BYTES, "little") + frame
