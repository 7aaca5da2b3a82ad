"""One connection between a front end and an agent: frames both ways, inside TLS.

Owns the limits: of a frame, of what may wait to be sent, and how long the other end may be silent. What frames say is
the business of join_listener.py and worker_agent.py.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from diptych.base.length_prefix import Unpacker, pack
from diptych.serving import edge_limits
from diptych.serving.join.join_messages import RELAYED, TOLD


class FramedLink(asyncio.Protocol):
    """``on_told`` gets structs, ``on_relayed`` the messages that are passed on; ``on_closed`` comes once, with a
    reason. All are called in the loop; they may be replaced at any time. ``on_defect`` gets what one of them raises:
    what came may be half done, and the connection ends. (The loop would log it, and go on.)"""

    def __init__(self) -> None:
        self.on_connected: Callable[[], None] = lambda: None
        self.on_told: Callable[[bytes], None] = lambda data: None
        self.on_relayed: Callable[[bytes], None] = lambda data: None
        self.on_closed: Callable[[str], None] = lambda why: None
        self.on_defect: Callable[[BaseException], None] = _raise
        self.peer = ""  # address of the other end
        self.own_host = ""  # address of this end
        self.heard_s = 0.0  # when something came, on the loop's clock
        self._unpacker = Unpacker(edge_limits.WORKER_FIRST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._why = ""

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def introduced(self) -> None:
        """The other end is known: its frames may be long from now on."""
        self._unpacker.limit = edge_limits.WORKER_FRAME_BYTES

    def tell(self, frame: bytes) -> None:
        """Send a frame; nothing happens when the connection is gone."""
        if not self.is_open:
            return
        assert self._transport is not None
        self._transport.write(pack(frame))
        if self._transport.get_write_buffer_size() > edge_limits.WORKER_UNSENT_BYTES:
            self.close(f"{edge_limits.WORKER_UNSENT_BYTES} bytes wait to be sent, and the other end takes none")

    def relay(self, data: bytes) -> None:
        """Send a message that the other end passes on."""
        self.tell(RELAYED + data)

    def close(self, why: str, *, at_once: bool = True) -> None:
        """End the connection. at_once: what waits to be sent is lost."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort() if at_once else self._transport.close()

    def silent_s(self) -> float:
        """Seconds for which nothing has come."""
        return asyncio.get_running_loop().time() - self.heard_s

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: both ends have proved that they know the key."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _words(transport.get_extra_info("peername"))
        self.own_host = (transport.get_extra_info("sockname") or ("",))[0]
        self.heard_s = asyncio.get_running_loop().time()
        try:
            self.on_connected()
        except Exception as error:
            self._fail(error)

    def data_received(self, data: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        try:
            frames = self._unpacker.feed(data)
        except ValueError as error:
            self.close(f"{self.peer} sent {error}")
            return
        try:
            for frame in frames:
                if self._why:
                    return
                if frame[:1] == RELAYED:
                    self.on_relayed(frame[1:])
                elif frame[:1] == TOLD:
                    self.on_told(frame[1:])
                else:
                    self.close(f"{self.peer} sent a frame of an unknown kind")
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._why = self._why or (str(error) if error else "the other end closed the connection")
        try:
            self.on_closed(self._why)
        except Exception as defect:
            self._fail(defect)

    def _fail(self, error: Exception) -> None:
        self.on_told = self.on_relayed = lambda data: None
        self._why = self._why or f"what it brought could not be handled: {type(error).__name__}"
        try:
            self.on_defect(error)
        finally:
            if self.is_open:
                self.close(self._why)


def _raise(error: BaseException) -> None:
    raise error


def _words(address: tuple[object, ...] | None) -> str:
    if not address:
        return "an unknown address"
    return f"[{address[0]}]:{address[1]}" if ":" in str(address[0]) else f"{address[0]}:{address[1]}"
