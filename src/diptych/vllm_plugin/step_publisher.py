"""The socket on which an engine's steps are published: ZeroMQ PUB, bounded, never waits.

What a subscriber does not read in time is dropped for it (numbers of steps show the gap). The record about the engine
is sent again every ABOUT_EVERY_S seconds in which there are steps, because a subscriber may come at any time.
"""

import logging
from typing import Any

from diptych.base.engine_steps import EngineAbout, EngineStep, encode_line

logger = logging.getLogger("vllm.diptych")  # so that vLLM shows it

TOPIC = b"steps"
MOST_UNREAD = 4096  # messages that wait for a slow subscriber
ABOUT_EVERY_NS = 1_000_000_000


class StepPublisher:
    """Binds ``address`` (tcp://HOST:PORT or ipc://PATH). Raises OSError (zmq.ZMQError is one) when it is taken."""

    def __init__(self, address: str, about: EngineAbout) -> None:
        import zmq

        self._no_wait = zmq.NOBLOCK
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(MOST_UNREAD)
        try:
            self._socket.bind(address)
        except Exception:
            self._socket.close()
            raise
        self._about = encode_line(about)
        self._about_ns = 0

    def publish(self, step: EngineStep) -> None:
        """Send a step."""
        if step.end_ns - self._about_ns >= ABOUT_EVERY_NS:
            self._about_ns = step.end_ns
            self._socket.send_multipart([TOPIC, self._about], self._no_wait)
        self._socket.send_multipart([TOPIC, encode_line(step)], self._no_wait)

    def close(self) -> None:
        """Drop what was not read."""
        self._socket.close()
